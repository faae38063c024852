//! The whole state of two gateways and a store, small enough to be compared, and the records that properties are judged by.
//!
//! Only the store changes its state here, as its two scripts do.

/// A counter of one client, and one of all.
pub const NARROW: usize = 0;
pub const WIDE: usize = 1;
pub const COUNTERS: [usize; 2] = [NARROW, WIDE];
pub const GATEWAYS: usize = 2;

/// Of each counter.
pub type Each<T> = [T; 2];
/// Of each window, of each counter.
pub type Windows = [Each<u8>; 2];
/// The end of a window stands for it: 0 or 1.
pub type Window = u8;

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct State {
    pub store: Store,
    pub gateways: [Gateway; GATEWAYS],
    /// What is under way between them.
    pub calls: Vec<Call>,
    pub ghost: Ghost,
    pub budget: Budget,
    /// The name of the property that was seen broken.
    pub broken: Option<&'static str>,
}

/// How often what may happen may still happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Budget {
    pub requests: u8,
    /// Background fetches: ahead of need, or whether a window that was used up has room again.
    pub background: u8,
    /// Calls that are lost, or their answers.
    pub losses: u8,
    /// Requests whose patience ends, or whose client goes away.
    pub impatient: u8,
    pub refunds: u8,
    pub kills: u8,
    pub failovers: u8,
    /// Servers that are started again without their data.
    pub restarts: u8,
    pub resets: u8,
    pub windows: u8,
}

impl Budget {
    /// Whether a server may forget what it has counted.
    pub fn forgets(&self) -> bool {
        self.failovers > 0 || self.restarts > 0
    }
}

/// What nobody in the world knows.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ghost {
    pub admitted: Windows,
    /// Tokens that the store counts and nobody will ever spend.
    pub lost: Windows,
    /// Tokens that the store has handed out, and does not count any more.
    pub forgotten: Windows,
    /// How often a call that counts was executed more than once.
    pub counted_twice: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Store {
    pub window: Window,
    pub used: Windows,
    /// Before the latest write: what a replica knows.
    pub before: Windows,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Gateway {
    pub window: Window,
    pub purse: Each<(Window, u8)>,
    pub tally: Each<Option<(Window, u8)>>,
    /// Whether the tally was told by a server that another has taken the place of.
    pub stale: Each<bool>,
    pub requests: Vec<Request>,
    /// What was paid for the latest admitted request, and whether from a purse.
    pub paid: Each<Option<(Window, bool)>>,
    /// Tokens that the store got back, or was made to forget, since it told the tally.
    pub since: Each<u8>,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Request {
    pub id: u8,
    /// Which counters it is counted in.
    pub kind: Each<bool>,
    pub stage: Stage,
    /// Tokens that found no place in the table.
    pub hand: Each<Option<Window>>,
    /// What was taken from purses before the store is asked for the rest.
    pub paid: Each<Option<Window>>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Stage {
    Ready,
    /// Until a flight for this counter has landed.
    Waits(usize),
    Asks,
}

/// One call of the store.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Call {
    /// `None`: it was killed.
    pub by: Option<usize>,
    pub what: What,
    pub stage: Sent,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum What {
    /// Tokens for purses. `later` comes in another call.
    Fetch { ask: Ask, later: Each<bool>, need: u8 },
    /// The store decides a request. `done` was charged by calls before.
    Charge { request: Option<u8>, ask: Ask, later: Each<bool>, done: Each<bool> },
    /// Back goes one counter's; then so much is decided of a request.
    Give { counter: usize, window: Window, tokens: u8, then: Option<(u8, Then)> },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ask {
    pub counters: Each<bool>,
    pub window: Window,
    pub need: u8,
    pub want: u8,
    pub least: Each<u8>,
    /// What the gateway had been told was used when it was sent, but for what came back since.
    pub told: Each<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Then {
    /// In the window in which it was asked for.
    Refuse(Window),
    Again,
    Unavailable,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Sent {
    Sent,
    Executed {
        answer: Answer,
        /// What the store got back since.
        since: Each<u8>,
        /// Whether a server said so that another has taken the place of.
        stale: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Answer {
    /// Granted, and used then, of each counter.
    Granted(Each<u8>, Each<u8>),
    Refused(Each<u8>),
    OtherWindow(Window),
    GivenBack,
}

impl Store {
    /// What acquire.lua does for plain windows: all of it or nothing, in the window of the later of both clocks; beyond
    /// what is needed, one `part` in so many of what is left. `None`: nothing was written.
    pub fn take(&mut self, ask: &Ask, limits: Each<u8>, part: u8, together: bool) -> Answer {
        let open = self.window.max(ask.window);
        if ask.window < open {
            return Answer::OtherWindow(open);
        }
        let known = self.used[usize::from(open)];
        let asked_of = |used: Each<u8>| COUNTERS.map(|counter| if ask.counters[counter] { used[counter] } else { 0 });
        let asked = || COUNTERS.into_iter().filter(|counter| ask.counters[*counter]);
        let raised = |counter: usize| known[counter].max(ask.least[counter]);
        if asked().any(|counter| raised(counter) + ask.need > limits[counter]) {
            return Answer::Refused(asked_of(known));
        }
        let (mut granted, mut used, before) = ([0; 2], known, self.used);
        for counter in asked() {
            let spare = limits[counter] - raised(counter) - ask.need;
            granted[counter] = ask.need + (ask.want - ask.need).min(spare / part);
            if granted[counter] > 0 {
                used[counter] = raised(counter) + granted[counter];
                self.used[usize::from(open)][counter] = used[counter];
            }
        }
        if before != self.used {
            self.replicate(before, ask.counters, together);
        }
        Answer::Granted(granted, asked_of(used))
    }

    /// What refund.lua does for plain windows: as much as is counted. How much that was.
    pub fn give(&mut self, window: Window, counter: usize, tokens: u8, together: bool) -> u8 {
        let window = usize::from(window);
        let back = tokens.min(self.used[window][counter]);
        if back > 0 {
            let before = self.used;
            self.used[window][counter] -= back;
            self.replicate(before, [counter == NARROW, counter == WIDE], together);
        }
        back
    }

    /// The replica has all but what was just written.
    fn replicate(&mut self, before: Windows, written: Each<bool>, together: bool) {
        for counter in COUNTERS.into_iter().filter(|counter| together || written[*counter]) {
            self.before[0][counter] = before[0][counter];
            self.before[1][counter] = before[1][counter];
        }
    }

    /// Keys end with their windows.
    pub fn turn(&mut self) {
        self.window = 1;
        self.used[0] = [0; 2];
        self.before[0] = [0; 2];
    }
}

impl State {
    /// Tokens of a window that somebody may still spend or give back: in purses and hands, paid by requests that are not
    /// decided, and in calls.
    pub fn outstanding(&self, window: Window, counter: usize) -> u8 {
        let is_here = |of: &Option<Window>| u8::from(*of == Some(window));
        let at_gateways = self.gateways.iter().map(|gateway| {
            let (of, purse) = gateway.purse[counter];
            let in_requests = |request: &Request| is_here(&request.hand[counter]) + is_here(&request.paid[counter]);
            (if of == window { purse } else { 0 }) + gateway.requests.iter().map(in_requests).sum::<u8>()
        });
        at_gateways.sum::<u8>() + self.calls.iter().map(|call| call.carries(window, counter)).sum::<u8>()
    }
}

impl Gateway {
    pub fn free_id(&self) -> u8 {
        (0..).find(|id| self.requests.iter().all(|request| request.id != *id)).unwrap_or(u8::MAX)
    }
}

impl Call {
    fn carries(&self, window: Window, counter: usize) -> u8 {
        let granted = match (&self.what, &self.stage) {
            (What::Fetch { ask, .. } | What::Charge { ask, .. }, Sent::Executed { answer, .. }) => match answer {
                Answer::Granted(granted, _) if ask.window == window && ask.counters[counter] => granted[counter],
                _ => 0,
            },
            (What::Give { counter: of, window: from, tokens, .. }, Sent::Sent) if (*of, *from) == (counter, window) => {
                *tokens
            }
            _ => 0,
        };
        let done = match &self.what {
            What::Charge { ask, done, .. } => u8::from(done[counter] && ask.window == window),
            _ => 0,
        };
        granted + done
    }

    /// Whether it fetches for a counter, now or later.
    pub fn flies_for(&self, gateway: usize, counter: usize) -> bool {
        match &self.what {
            What::Fetch { ask, later, .. } => self.by == Some(gateway) && (ask.counters[counter] || later[counter]),
            _ => false,
        }
    }
}
