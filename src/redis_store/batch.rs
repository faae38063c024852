//! Calls that come while others are under way are sent together, and decided by one run of the script, one after the
//! other: a server spends more on being asked than on deciding.
//!
//! Nobody waits for company. What comes first is sent at once, and what comes while some runs are under way goes
//! with the next. Who goes away before his call is sent is not sent.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use redis::Value;
use tokio::sync::oneshot;
use tokio::task::spawn_local;

use super::connection::{Connection, Failure, Which};
use super::scripts::{self, AcquireCall, Decision, Scripts};

/// Runs that are under way at once: one is decided while others are on their way.
const RUNS_MAX: usize = 3;
/// Calls in one run, and counters: a server does nothing else meanwhile, and a script can look up 8000 at most.
const CALLS_MAX: usize = 64;
const COUNTERS_MAX: usize = 1024;

/// Which calls may be sent together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Together {
    Any,
    /// About counters that begin alike: in a cluster, others may lie elsewhere.
    SameBase,
    /// A slot that moves is asked for by itself.
    Never,
}

#[derive(Default)]
pub struct Queue {
    waiting: RefCell<VecDeque<Waiting>>,
    runs: Cell<usize>,
}

struct Waiting {
    ask: AcquireCall,
    tell: oneshot::Sender<Result<Decision, Failure>>,
}

/// Asks on a connection, together with others who do.
pub async fn take(
    line: &Rc<Connection>,
    scripts: &Rc<Scripts>,
    ask: AcquireCall,
    together: Together,
) -> Result<Decision, Failure> {
    if together == Together::Never {
        let decided = run(line, scripts, std::slice::from_ref(&ask), true).await;
        return decided.and_then(|mut decided| decided.pop().ok_or_else(|| strange(&Value::Nil)));
    }
    let (tell, told) = oneshot::channel();
    line.queue.waiting.borrow_mut().push_back(Waiting { ask, tell });
    let runs = &line.queue.runs;
    if runs.get() < RUNS_MAX {
        runs.set(runs.get() + 1);
        spawn_local(carry(Rc::clone(line), Rc::clone(scripts), together));
    }
    told.await.unwrap_or_else(|_closed| Err(Failure::Lost("the gateway ends".to_owned())))
}

/// Sends what waits until nothing does.
async fn carry(line: Rc<Connection>, scripts: Rc<Scripts>, together: Together) {
    loop {
        let (asks, tells) = line.queue.next(together);
        if asks.is_empty() {
            break;
        }
        let mut decided = run(&line, &scripts, &asks, false).await.map(Vec::into_iter);
        for tell in tells {
            let decision = match &mut decided {
                Ok(decided) => decided.next().ok_or_else(|| strange(&Value::Nil)),
                Err(failure) => Err(failure.clone()),
            };
            // Who went away needs no answer.
            drop(tell.send(decision));
        }
    }
    line.queue.runs.set(line.queue.runs.get() - 1);
}

async fn run(
    line: &Connection,
    scripts: &Scripts,
    asks: &[AcquireCall],
    importing: bool,
) -> Result<Vec<Decision>, Failure> {
    let said = line.run(Which::Take, importing, &|by| scripts::take(&scripts.take, by, asks.iter())).await?;
    scripts::taken(&said, asks.iter()).ok_or_else(|| strange(&said))
}

type Tell = oneshot::Sender<Result<Decision, Failure>>;

impl Queue {
    /// The first that wait, and can be sent together.
    fn next(&self, together: Together) -> (Vec<AcquireCall>, Vec<Tell>) {
        let mut waiting = self.waiting.borrow_mut();
        let most = waiting.len().min(CALLS_MAX);
        let (mut asks, mut tells): (Vec<AcquireCall>, Vec<Tell>) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let mut counters = 0;
        while asks.len() < CALLS_MAX {
            let Some(next) = waiting.front() else { break };
            let is_near = |first: &AcquireCall| together == Together::Any || base(first) == base(&next.ask);
            let has_room = counters + next.ask.wants.len() <= COUNTERS_MAX;
            let joins = asks.first().is_none_or(|first| has_room && is_near(first));
            if !joins && !next.tell.is_closed() {
                break;
            }
            let Some(Waiting { ask, tell }) = waiting.pop_front() else { break };
            if !tell.is_closed() {
                counters += ask.wants.len();
                asks.push(ask);
                tells.push(tell);
            }
        }
        (asks, tells)
    }
}

fn base(ask: &AcquireCall) -> &str {
    ask.wants.first().map_or("", |want| &*want.base)
}

/// An answer that is none to what was asked.
pub fn strange(said: &Value) -> Failure {
    let said: String = format!("{said:?}").chars().take(100).collect();
    Failure::Lost(format!("a script was answered with {said}"))
}
