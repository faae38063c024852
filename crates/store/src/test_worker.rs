//! For unit tests of shared counters: a worker, and a store on loopback that keeps counters in memory. A test can make the store hold
//! replies back, close connections, or shift its clock.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::Notify;
use tokio::task::spawn_local;

use super::scripts::TOKENS_MAX;
use super::shared_counters::{SharedByWorkers, SharedCounters};
use super::shared_decision::{BeginResult, SharedDecision, SharedOutcome};
use super::simulated_store::counters::{CounterArguments, Store};
use transom_config::key_kind::HOST;
use transom_config::redis::{Node, Nodes, StoreConfig};
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{Handle, LayerId, PlanPosition, RuleId, VariantId};
use transom_limiter::key::{KeyHasher, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Rule, Sharing};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::store_key::StoreKeys;
use transom_limiter::table::{Counter, Table};
use transom_runtime::clock::Clock;
use transom_runtime::metrics::redis::StoreMetrics;
use transom_runtime::metrics::{self, Metric, Registry, WorkerId};

/// The time at which tests begin: the start of an hour.
pub const START_MS: u64 = 1_800_000_000_000;
pub const HOUR_MS: u64 = 3_600_000;
/// The counter of key `a` under rule `r`, if the rule has only windows of an hour.
pub const KEY: &str = "transom:{r|a}:500000";
/// The counters of key `a` under rule `r`, if the rule has windows of a minute and of an hour.
pub const MINUTE_KEY: &str = "transom:{r|a}:minute:30000000";
pub const HOUR_KEY: &str = "transom:{r|a}:hour:500000";
/// The counter of key `a` under rule `r`, if its window slides.
pub const SLIDING_KEY: &str = "transom:{r|a}:sliding";
/// The counter of key `a` under rule `r`, if its window begins with the first request.
pub const FIRST_REQUEST_KEY: &str = "transom:{r|a}:first-request";
/// The counter of key `a` under rule `r`, if its windows accumulate.
pub const ACCOUNT_KEY: &str = "transom:{r|a}:account";
const SEED: u64 = 1;
/// Longer than any test waits.
const DEADLINE: Duration = Duration::from_secs(30);

/// Runs a test on a runtime like that of a worker.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
    runtime.block_on(async { tokio::time::timeout(DEADLINE, test).await.expect("the test ends") })
}

/// A rule `r` with leased tokens.
pub fn leased(limits: &[&str]) -> Rule {
    let layers = limits.iter().map(|limit| Limit::parse(limit).unwrap()).collect();
    Rule { sharing: Sharing::Lease, ..Rule::new("r", vec![HOST.part()], OnMissing::Never, layers) }
}

/// A rule `r` in exact mode.
pub fn exact(limit: &str) -> Rule {
    Rule { sharing: Sharing::Exact, ..leased(&[limit]) }
}

/// A rule `r` with leased tokens, and 4 shards.
pub fn sharded(limit: &str) -> Rule {
    let mut rule = leased(&[limit]);
    rule.layers[0].shards = 4;
    rule
}

/// A rule `local` that this gateway counts alone.
pub fn local(limit: &str) -> Rule {
    named("local", Rule { sharing: Sharing::Local, ..leased(&[limit]) })
}

pub fn named(name: &str, rule: Rule) -> Rule {
    Rule { name: name.to_owned(), ..rule }
}

/// The counter of key `a` in a shard, if the rule has only windows of an hour.
pub fn shard_key(shard: u32) -> String {
    match shard {
        0 => KEY.to_owned(),
        shard => format!("transom:{{r|a|#{shard}}}:500000"),
    }
}

/// A call that a store received.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Call {
    /// Tokens needed and wanted, and the least usage, of each key.
    Acquire(Vec<(String, [u64; 3])>),
    /// Tokens returned to each key.
    Refund(Vec<(String, u64)>),
    Info,
}

/// A call for tokens of one key: needed, wanted, least usage.
pub fn acquire(key: &str, tokens: [u64; 3]) -> Call {
    Call::Acquire(vec![(key.to_owned(), tokens)])
}

pub fn refund(key: &str, tokens: u64) -> Call {
    Call::Refund(vec![(key.to_owned(), tokens)])
}

/// A store on loopback.
#[derive(Clone)]
pub struct TestStore(Rc<StoreState>);

struct StoreState {
    port: u16,
    clock: Clock,
    counters: RefCell<Store>,
    /// The calls that no test has taken.
    calls: RefCell<Vec<Call>>,
    /// Of the last request.
    ceiling: Cell<u64>,
    /// Lead of the store's clock over the gateway's.
    lead_ms: Cell<i64>,
    /// Notified when replies are no longer held back, if they are.
    held: RefCell<Option<Rc<Notify>>>,
    /// Whether calls are executed and get no reply: the connection ends.
    is_down: Cell<bool>,
    /// Whether connections end before their first reply, and calls of open ones are not executed.
    is_refusing: Cell<bool>,
    /// The reply to `INFO`.
    info: Cell<&'static str>,
}

impl TestStore {
    async fn start(clock: Clock) -> TestStore {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let store = TestStore(Rc::new(StoreState {
            port: listener.local_addr().unwrap().port(),
            clock,
            counters: RefCell::default(),
            calls: RefCell::default(),
            ceiling: Cell::default(),
            lead_ms: Cell::new(0),
            held: RefCell::default(),
            is_down: Cell::new(false),
            is_refusing: Cell::new(false),
            info: Cell::new("maxmemory:0"),
        }));
        let accepting = store.clone();
        spawn_local(async move {
            while let Ok((stream, _)) = listener.accept().await {
                spawn_local(accepting.clone().serve(stream));
            }
        });
        store
    }

    /// Takes the calls that the store has received since they were last taken.
    pub fn take_calls(&self) -> Vec<Call> {
        self.0.calls.take()
    }

    /// The ceiling of the last request.
    pub fn last_ceiling(&self) -> u64 {
        self.0.ceiling.get()
    }

    /// Waits until the store has received calls, and takes them.
    pub async fn next_calls(&self) -> Vec<Call> {
        while self.0.calls.borrow().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.take_calls()
    }

    pub fn used(&self, key: &str) -> u64 {
        self.0.counters.borrow().used(key)
    }

    /// Sets the usage of the current window, or segment. Windows of accumulating and sliding counters are those of an hour.
    pub fn set_used(&self, key: &str, used: u64) {
        let (now_ms, hour) = (self.now_ms(), self.now_ms() / HOUR_MS);
        let (limit, hour_end_ms) = (used.max(1), (hour + 1) * HOUR_MS);
        let (kind, end_ms, others) = match key.rsplit(':').next() {
            Some("sliding") => ("s", HOUR_MS, &[0][..]),
            Some("first-request") => ("f", HOUR_MS, &[limit, 0][..]),
            Some("account") => ("g", hour_end_ms, &[limit, 0, hour, hour_end_ms + HOUR_MS][..]),
            _ => ("p", now_ms + 1000 * HOUR_MS, &[][..]),
        };
        let numbers = [&[TOKENS_MAX, used, end_ms, used, 0][..], others].concat();
        let numbers = numbers.into_iter().map(|number| number.to_string());
        let arguments = [now_ms.to_string(), "1".to_owned(), kind.to_owned()].into_iter().chain(numbers);
        let (keys, mut counters) = ([key.to_owned()], self.0.counters.borrow_mut());
        counters.refund(&keys, &[kind, "0", "0", "0", "all"].map(str::to_owned), now_ms);
        counters.acquire(&keys, &arguments.collect::<Vec<_>>(), now_ms);
    }

    fn now_ms(&self) -> u64 {
        self.0.clock.now().unix_ms.saturating_add_signed(self.0.lead_ms.get())
    }

    pub fn set_lead_ms(&self, lead_ms: i64) {
        self.0.lead_ms.set(lead_ms);
    }

    pub fn set_info(&self, info: &'static str) {
        self.0.info.set(info);
    }

    /// Sets whether each call ends its connection after it was executed.
    pub fn set_down(&self, is_down: bool) {
        self.0.is_down.set(is_down);
    }

    /// Sets whether connections end without a reply, before a call is executed.
    pub fn set_refusing(&self, is_refusing: bool) {
        self.0.is_refusing.set(is_refusing);
    }

    /// Executes calls, and holds the replies back from now on.
    pub fn hold(&self) {
        self.0.held.replace(Some(Rc::default()));
    }

    /// Holds no further replies back. The result sends those that are held back when it is notified.
    pub fn stop_holding(&self) -> Rc<Notify> {
        self.0.held.take().expect("replies are held back")
    }

    /// Sends the replies that were held back.
    pub fn release(&self) {
        self.stop_holding().notify_waiters();
    }

    async fn serve(self, stream: TcpStream) -> Option<()> {
        stream.set_nodelay(true).ok()?;
        let mut stream = BufReader::new(stream);
        loop {
            let command = read_command(&mut stream).await?;
            if self.0.is_refusing.get() {
                return None;
            }
            let reply = self.execute(&command);
            if self.0.is_down.get() {
                return None;
            }
            let held = self.0.held.borrow().clone().filter(|_| command[0] == "EVALSHA");
            if let Some(held) = held {
                held.notified().await;
            }
            stream.write_all(&reply).await.ok()?;
        }
    }

    fn execute(&self, command: &[String]) -> Vec<u8> {
        match command[0].as_str() {
            "EVALSHA" => {
                let (keys, arguments) = command[3..].split_at(command[2].parse().unwrap());
                match arguments[0].parse::<u64>() {
                    Ok(_gateway_ms) => array(&self.acquire(keys, arguments)),
                    Err(_letter) => format!(":{}\r\n", self.refund(keys, arguments)).into_bytes(),
                }
            }
            "INFO" => {
                self.0.calls.borrow_mut().push(Call::Info);
                format!("${}\r\n{}\r\n", self.0.info.get().len(), self.0.info.get()).into_bytes()
            }
            _ => b"+OK\r\n".to_vec(),
        }
    }

    fn acquire(&self, keys: &[String], arguments: &[String]) -> Vec<i64> {
        let (mut call_keys, mut words) = (keys.iter(), arguments.iter());
        while let Some(count) = words.nth(1) {
            let mut call = Vec::new();
            for key in call_keys.by_ref().take(count.parse().unwrap()) {
                let CounterArguments { ceiling, need, want, least, .. } = CounterArguments::take(&mut words);
                self.0.ceiling.set(ceiling as u64);
                call.push((key.clone(), [need, want, least].map(|tokens| tokens as u64)));
            }
            self.0.calls.borrow_mut().push(Call::Acquire(call));
        }
        self.0.counters.borrow_mut().acquire(keys, arguments, self.now_ms())
    }

    fn refund(&self, keys: &[String], arguments: &[String]) -> i64 {
        let tokens = arguments.chunks(5).map(|fields| fields[3].parse().unwrap());
        self.0.calls.borrow_mut().push(Call::Refund(keys.iter().cloned().zip(tokens).collect()));
        self.0.counters.borrow_mut().refund(keys, arguments, self.now_ms()).0
    }
}

fn array(numbers: &[i64]) -> Vec<u8> {
    let items: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
    format!("*{}\r\n{items}", numbers.len()).into_bytes()
}

/// Reads an array of bulk strings; `None` at the end.
async fn read_command(stream: &mut BufReader<TcpStream>) -> Option<Vec<String>> {
    let count = read_length(stream).await?;
    let mut command = Vec::new();
    for _ in 0..count {
        let mut text = vec![0; read_length(stream).await? + 2];
        stream.read_exact(&mut text).await.ok()?;
        text.truncate(text.len() - 2);
        command.push(String::from_utf8(text).unwrap());
    }
    Some(command)
}

/// The number of a line such as `*3` or `$5`.
async fn read_length(stream: &mut BufReader<TcpStream>) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    line.get(1..)?.trim_end().parse().ok()
}

/// The request of a key under a rule.
pub fn keyed_request(rule_set: &RuleSet, rule: RuleId, key: &str, cost: u32) -> KeyedRequest {
    let mut hasher = KeyHasher::new(Seed(1, 2), rule_set.rules[rule].hash_prefix);
    hasher.add_part(0, key.as_bytes());
    KeyedRequest { key: hasher.finish(), offset: 0, variant: VariantId::DEFAULT, cost }
}

/// A worker whose requests are decided by some rules, the store of its counters, and the clock of both.
pub struct TestWorker {
    pub shared: Rc<SharedCounters>,
    pub store: TestStore,
    pub clock: Clock,
    pub rule_set: Arc<RuleSet>,
    pub charge_plan: ChargePlan,
    registry: Registry,
    rules: Vec<Rule>,
    pub shared_by_workers: SharedByWorkers,
}

impl TestWorker {
    pub async fn new(rules: &[Rule]) -> TestWorker {
        // The worker's own shard is 1 of 4.
        fastrand::seed(SEED);
        let clock = Clock::manual(START_MS);
        let store = TestStore::start(clock.clone()).await;
        let shared_by_workers = SharedByWorkers::new(Arc::new(Table::with_capacity(1000).unwrap()), clock);
        TestWorker::with(rules, store, shared_by_workers)
    }

    /// Another worker of the same process.
    pub fn beside(&self) -> TestWorker {
        TestWorker::with(&self.rules, self.store.clone(), self.shared_by_workers.clone())
    }

    /// A worker of another process, with the same store.
    pub fn other_gateway(&self) -> TestWorker {
        let table = Arc::new(Table::with_capacity(1000).unwrap());
        TestWorker::with(&self.rules, self.store.clone(), SharedByWorkers::new(table, self.clock.clone()))
    }

    fn with(rules: &[Rule], store: TestStore, shared_by_workers: SharedByWorkers) -> TestWorker {
        let node = Node::Tcp { host: "127.0.0.1".to_owned(), port: store.0.port };
        let config = StoreConfig { timeout: DEADLINE, ..StoreConfig::with_defaults(Nodes::Single(node)) };
        let registry = Registry::default();
        let metrics = StoreMetrics::new(&registry, WorkerId::at(0));
        let shared = SharedCounters::new(&config, shared_by_workers.clone(), metrics);
        let rule_set = Arc::new(RuleSet::new(rules, Seed(1, 2), None));
        let charge_plan = rule_set.charge_plan(rule_set.rules.ids());
        let rules = rules.to_vec();
        let clock = shared_by_workers.clock.clone();
        TestWorker { shared, store, clock, rule_set, charge_plan, registry, rules, shared_by_workers }
    }

    /// The request of a key under the rule at this position.
    pub fn request(&self, rule: usize, key: &str, cost: u32) -> KeyedRequest {
        keyed_request(&self.rule_set, RuleId::at(rule), key, cost)
    }

    /// A default layer of the rule at this position.
    fn layer(&self, rule: usize, layer: usize) -> LayerId {
        self.rule_set.rules[RuleId::at(rule)].variant(VariantId::DEFAULT).nth(layer).unwrap()
    }

    /// As [`TestWorker::layer`], in the charge plan.
    pub fn layer_ref(&self, rule: usize, layer: usize) -> LayerRef {
        LayerRef { position: PlanPosition::at(rule), id: self.layer(rule, layer) }
    }

    /// The counter of a key in a layer of the first rule.
    pub fn counter(&self, key: &str, layer: usize) -> Counter {
        self.rule_set.layer(self.layer(0, layer)).counter(self.request(0, key, 1))
    }

    /// A request with the same key under all rules.
    pub fn context(&self, key: &str, cost: u32) -> DecisionContext {
        let mut context = DecisionContext::default();
        context.inputs.keyed_requests =
            (0..self.rule_set.rules.len()).map(|rule| Some(self.request(rule, key, cost))).collect();
        context
    }

    /// The store keys of a key under all rules.
    pub fn store_keys(&self, key: &str) -> StoreKeys {
        let text = |rule: &RuleId| Some(format!("{}|{key}", self.rule_set.rules[*rule].rule.name).into());
        self.charge_plan.rules().map(text)
    }

    /// The known usage of a key in the first layer.
    pub fn known_usage(&self, key: &str) -> Option<u32> {
        self.shared.table.known_usage(self.counter(key, 0), self.clock.now().unix_ms).map(|(_, used)| used)
    }

    /// The calls that the store has received when the background tasks have ended: they make two calls one after the other at
    /// most, such as a fetch and a refund, and the store executes calls in order.
    pub async fn settled_calls(&self) -> Vec<Call> {
        for _ in 0..3 {
            self.shared.store.probe_one("probe".to_owned()).await.expect("the store replies");
        }
        let is_probe = |call: &Call| matches!(call, Call::Acquire(keys) if keys[0].0.starts_with("probe"));
        self.store.take_calls().into_iter().filter(|call| !is_probe(call)).collect()
    }

    /// Begins the decision about a request.
    pub fn begin(&self, key: &str, cost: u32) -> (BeginResult, DecisionContext) {
        self.begin_of(VariantId::DEFAULT, key, cost)
    }

    /// As [`TestWorker::begin`], by a variant of the first rule.
    fn begin_of(&self, variant: VariantId, key: &str, cost: u32) -> (BeginResult, DecisionContext) {
        let mut context = self.context(key, cost);
        context.inputs.keyed_requests[PlanPosition::at(0)].as_mut().expect("the rule applies").variant = variant;
        let texts = self.store_keys(key);
        let begun = self.shared.begin(&self.charge_plan, &mut context, |rule| texts[rule].clone());
        (begun, context)
    }

    /// The decision about a request that has to wait.
    pub fn pending(&self, key: &str, cost: u32) -> Box<SharedDecision> {
        match self.begin(key, cost).0 {
            BeginResult::Pending(pending) => pending,
            BeginResult::Decided(decision) => panic!("decided without the store: {decision:?}"),
            BeginResult::Unavailable => panic!("unavailable"),
        }
    }

    /// Decides a request, which must not be delayed; returns whether it is admitted. `None`: a rule cannot be counted.
    pub async fn decide(&self, key: &str, cost: u32) -> Option<bool> {
        let (decision, _) = self.outcome(key, cost).await?;
        assert!(!matches!(decision, Decision::Delayed { .. }), "{decision:?}");
        Some(matches!(decision, Decision::Admitted))
    }

    /// Decides a request; returns the context too.
    pub async fn outcome(&self, key: &str, cost: u32) -> Option<(Decision, DecisionContext)> {
        self.outcome_of(VariantId::DEFAULT, key, cost).await
    }

    /// As [`TestWorker::outcome`], by a variant of the first rule.
    pub async fn outcome_of(&self, variant: VariantId, key: &str, cost: u32) -> Option<(Decision, DecisionContext)> {
        match self.begin_of(variant, key, cost) {
            (BeginResult::Decided(decision), context) => Some((decision, context)),
            (BeginResult::Pending(pending), _) => {
                let SharedOutcome { decision, context, .. } = pending.decide(&self.charge_plan).await.ok()?;
                Some((decision, context))
            }
            (BeginResult::Unavailable, _) => None,
        }
    }

    pub fn leased_tokens(&self, key: &str, layer: usize) -> u32 {
        self.shared.table.leased_tokens(self.counter(key, layer), self.clock.now().unix_ms)
    }

    /// The value of a metric with this label, if it has one.
    pub fn metric(&self, metric: &Metric, label: Option<(&'static str, &str)>) -> u64 {
        self.registry.cell(metric, WorkerId::at(0), label.as_slice()).get()
    }

    /// Tokens with this outcome.
    pub fn tokens(&self, outcome: &str) -> u64 {
        self.metric(&metrics::redis::TOKENS, Some(("outcome", outcome)))
    }

    /// Calls with this outcome.
    pub fn calls(&self, outcome: &str) -> u64 {
        self.metric(&metrics::redis::REQUESTS, Some(("outcome", outcome)))
    }

    /// Requests decided in an outage by this policy.
    pub fn decided_in_outage(&self, policy: &str) -> u64 {
        self.metric(&metrics::redis::OUTAGE_DECISIONS, Some(("policy", policy)))
    }
}
