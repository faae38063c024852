//! The crate's simple interface: a [`Limiter`] applies the same layers of fixed windows to every key.
//!
//! It is a thin layer over [`RuleSet`] and [`Table`], which also decide in the gateway. The caller passes the time.

use std::cell::RefCell;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use crate::charge_plan::ChargePlan;
use crate::decision::Decision;
use crate::decision_context::DecisionContext;
use crate::decision_time::DecisionTime;
use crate::handles::{Handle as _, IdVec, RuleId, VariantId};
use crate::key::{KeyHasher, KeyPart, OnMissing, Seed};
use crate::limit::Limit;
use crate::rule::Rule;
use crate::rule_set::{CompiledRule, KeyedRequest, RuleSet};
use crate::table::{Receipt, Table};
use crate::window::{PERIOD_MAX_MS, PERIOD_MIN_MS, Windows};
use crate::window_kind::AcquireRequest;

/// The most layers that a limiter can have.
pub const MAX_LAYERS: usize = 8;
/// The greatest capacity of a limiter, in counters.
pub const MAX_CAPACITY: usize = 1 << 32;

const DEFAULT_CAPACITY: usize = 1_000_000;

thread_local! {
    static CONTEXT: RefCell<DecisionContext> = RefCell::default();
}

/// A rate limiter for many keys: each key may take a limited number of tokens in every window of every layer.
///
/// Windows are aligned to the Unix epoch: windows of one hour begin at full hours, UTC. A request takes its tokens in all
/// layers or in none.
///
/// # Sharing
///
/// A `Limiter` is `Send + Sync` and takes no locks. Share it by reference or in an [`Arc`]. Decisions use
/// a buffer of the calling thread, which allocates only in the first decisions of that thread.
///
/// # Time
///
/// Every method takes the current time in Unix milliseconds. All threads should read one clock that does not go back. A
/// request whose time is behind is counted in the later window that another thread has already opened, so a late thread
/// never gets tokens of a window twice.
///
/// # Keys
///
/// A key is any value that implements [`Hash`]. Keys are compared by 54 bits of a keyed hash and by their buckets, not by
/// value. Values that hash equally, such as `"a"` and `String::from("a")`, are the same key. To limit all requests
/// together, use a constant key such as `&()`.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use transom_limiter::Limiter;
///
/// let limiter = Limiter::builder()
///     .layer(5, Duration::from_secs(1))
///     .layer(100, Duration::from_secs(60))
///     .capacity(10_000)
///     .build()?;
///
/// let now_ms = 1_700_000_000_000;
/// let decision = limiter.acquire(&("alice", "/search"), 1, now_ms);
/// assert!(decision.is_admitted());
/// assert_eq!(decision.layers()[0].remaining, 4);
/// assert_eq!(decision.layers()[1].remaining, 99);
/// # Ok::<(), transom_limiter::BuildError>(())
/// ```
pub struct Limiter {
    charge_plan: ChargePlan,
    table: Table,
    /// The hash of the rule, before a key.
    hasher: KeyHasher,
    rule: RuleId,
    periods: [Duration; MAX_LAYERS],
    /// Distinguishes receipts of limiters with other keys, layers or capacities.
    id: u64,
}

/// The settings of a [`Limiter`]. Start with [`Limiter::builder`], add at least one [`layer`](LimiterBuilder::layer), and
/// call [`build`](LimiterBuilder::build).
#[derive(Clone)]
pub struct LimiterBuilder {
    layers: Vec<(u32, Duration)>,
    capacity: usize,
    seed: Option<Seed>,
}

/// Why a [`Limiter`] cannot be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BuildError {
    /// There is no layer.
    NoLayers,
    /// There are more than [`MAX_LAYERS`] layers.
    TooManyLayers,
    /// A limit is 0.
    ZeroLimit,
    /// A period is shorter than 10 ms, longer than 366 days, or not a whole number of milliseconds.
    Period(Duration),
    /// Two layers have the same period; the one with the higher limit has no effect.
    DuplicatePeriod(Duration),
    /// The capacity is 0 or greater than [`MAX_CAPACITY`].
    Capacity(usize),
    /// The memory for a table of this capacity cannot be allocated.
    OutOfMemory,
}

/// The decision on one request, with the state of every layer.
///
/// [`is_admitted`](LimiterDecision::is_admitted) and [`layers`](LimiterDecision::layers) are enough for most callers. The
/// variants are needed for a refund and for the time to retry.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a box would allocate in every decision")]
#[must_use = "a refused request must not be served"]
pub enum LimiterDecision {
    /// Every layer has tokens left for the request.
    Admitted(Admission),
    /// At least one layer has too few tokens left. No layer was charged.
    Refused(Refusal),
}

/// An admitted request. [`Limiter::refund`] takes it to return the tokens; dropping it keeps them charged.
#[derive(Debug)]
pub struct Admission {
    layers: LayerStates,
    receipts: [Option<Receipt>; MAX_LAYERS],
    limiter: u64,
}

/// A refused request.
#[derive(Debug)]
pub struct Refusal {
    layers: LayerStates,
    layer: usize,
    retry_after: Option<Duration>,
}

/// The state of one layer for one key, right after a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LayerState {
    /// Tokens that each window grants.
    pub limit: u32,
    /// The length of a window.
    pub period: Duration,
    /// Tokens left in the current window.
    pub remaining: u32,
    /// The end of the current window, Unix milliseconds.
    pub resets_at_ms: u64,
}

#[derive(Debug, Default)]
struct LayerStates {
    states: [LayerState; MAX_LAYERS],
    count: usize,
}

impl Limiter {
    /// Starts a limiter without layers, with a capacity of 1,000,000 counters.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder { layers: Vec::new(), capacity: DEFAULT_CAPACITY, seed: None }
    }

    /// Checks whether `key` may take `cost` tokens at the time `now_ms` (Unix milliseconds), without taking them.
    ///
    /// The result may be outdated by the time it is used: to admit a request, call [`Limiter::acquire`]. With a cost of 0,
    /// the result shows the state of all layers.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use transom_limiter::Limiter;
    /// let limiter = Limiter::builder().layer(1, Duration::from_secs(60)).capacity(100).build()?;
    /// assert!(limiter.check("alice", 1, 0).is_admitted());
    /// assert!(limiter.check("alice", 1, 0).is_admitted());
    /// # Ok::<(), transom_limiter::BuildError>(())
    /// ```
    pub fn check<K: Hash + ?Sized>(&self, key: &K, cost: u32, now_ms: u64) -> LimiterDecision {
        self.with_request(
            key,
            cost,
            || now_ms,
            |context, now_ms| {
                let time = || now_ms;
                let fits = self.charge_plan.peek(&self.table, DecisionTime::read(&time), context);
                self.outcome(fits, context, now_ms)
            },
        )
    }

    /// Takes `cost` tokens of `key` in all layers, or in none, at the time `now_ms` (Unix milliseconds).
    ///
    /// A request is admitted if every layer has at least `cost` tokens left in its current window. This never waits, and
    /// is safe to call from any number of threads: together they take exactly the tokens of a window.
    ///
    /// If the table is full, a new key shares an overflow counter with other new keys, and is refused too early rather
    /// than too late; see [`Limiter::overflow_total`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use transom_limiter::{Limiter, LimiterDecision};
    /// let limiter = Limiter::builder().layer(2, Duration::from_secs(60)).capacity(100).build()?;
    /// assert!(limiter.acquire("alice", 2, 1_000).is_admitted());
    /// let LimiterDecision::Refused(refusal) = limiter.acquire("alice", 1, 1_000) else { panic!("admitted") };
    /// assert_eq!(refusal.retry_after(), Some(Duration::from_secs(59)));
    /// # Ok::<(), transom_limiter::BuildError>(())
    /// ```
    pub fn acquire<K: Hash + ?Sized>(&self, key: &K, cost: u32, now_ms: u64) -> LimiterDecision {
        self.acquire_with_clock(key, cost, || now_ms)
    }

    /// As [`Limiter::acquire`], at the time that `clock` returns (Unix milliseconds).
    ///
    /// The clock is read after the memory of the key's counters was requested. With more keys than the processor's cache has
    /// counters, a decision waits for main memory, and reads the clock meanwhile.
    ///
    /// ```
    /// # use std::time::{Duration, SystemTime, UNIX_EPOCH};
    /// # use transom_limiter::Limiter;
    /// let limiter = Limiter::builder().layer(2, Duration::from_secs(60)).capacity(100).build()?;
    /// let unix_ms = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
    /// assert!(limiter.acquire_with_clock("alice", 1, unix_ms).is_admitted());
    /// # Ok::<(), transom_limiter::BuildError>(())
    /// ```
    pub fn acquire_with_clock<K: Hash + ?Sized>(
        &self,
        key: &K,
        cost: u32,
        clock: impl FnOnce() -> u64,
    ) -> LimiterDecision {
        self.with_request(key, cost, clock, |context, now_ms| {
            let time = || now_ms;
            let decision = self.charge_plan.decide(&self.table, DecisionTime::read(&time), context);
            self.outcome(matches!(decision, Decision::Admitted), context, now_ms)
        })
    }

    /// Returns the tokens of an admitted request to the windows in which they were taken.
    ///
    /// Use it if a request should not count, for example because it failed for a reason that is not the client's. Tokens
    /// of a window that has ended have no effect on later windows. `now_ms` is the current time in Unix milliseconds.
    ///
    /// Returns `false` if no counter was changed: for an admission of [`Limiter::check`] or of another limiter, and if
    /// all windows have moved on.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use transom_limiter::{Limiter, LimiterDecision};
    /// let limiter = Limiter::builder().layer(1, Duration::from_secs(60)).capacity(100).build()?;
    /// let LimiterDecision::Admitted(admission) = limiter.acquire("alice", 1, 0) else { panic!("refused") };
    /// assert!(!limiter.check("alice", 1, 0).is_admitted());
    /// assert!(limiter.refund(admission, 10));
    /// assert!(limiter.check("alice", 1, 10).is_admitted());
    /// # Ok::<(), transom_limiter::BuildError>(())
    /// ```
    pub fn refund(&self, admission: Admission, now_ms: u64) -> bool {
        if admission.limiter != self.id {
            return false;
        }
        let mut refunded = false;
        for (receipt, state) in admission.receipts.iter().zip(&admission.layers.states) {
            if let Some(receipt) = receipt {
                let request = AcquireRequest::plain(receipt.end_ms(), state.limit, 0);
                refunded |= self.table.refund(*receipt, request, self.charge_plan.time(now_ms));
            }
        }
        refunded
    }

    /// The limit in tokens and the period of each layer, in the order of the builder.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use transom_limiter::Limiter;
    /// let minute = Duration::from_secs(60);
    /// let limiter = Limiter::builder().layer(33, minute).capacity(100).build()?;
    /// assert_eq!(limiter.layers().collect::<Vec<_>>(), [(33, minute)]);
    /// # Ok::<(), transom_limiter::BuildError>(())
    /// ```
    pub fn layers(&self) -> impl Iterator<Item = (u32, Duration)> {
        self.compiled_rule().rule.layers.iter().map(|layer| layer.tokens).zip(self.periods)
    }

    /// The number of charges to overflow counters since the limiter was built: the table had no free slot for these keys.
    /// A request can be charged to several of them, one in each layer. If this number rises, the capacity is too small.
    pub fn overflow_total(&self) -> u64 {
        self.table.overflow_charges_total()
    }

    fn with_request<K: Hash + ?Sized>(
        &self,
        key: &K,
        cost: u32,
        clock: impl FnOnce() -> u64,
        decide: impl FnOnce(&mut DecisionContext, u64) -> LimiterDecision,
    ) -> LimiterDecision {
        // The key is hashed and the clock is read before the context is borrowed: both could use another limiter.
        let mut hasher = self.hasher.clone();
        hasher.add(key);
        let keyed_request = Some(KeyedRequest { key: hasher.finish(), offset: 0, variant: VariantId::DEFAULT, cost });
        self.charge_plan.prefetch_each(&self.table, |_only_rule| keyed_request);
        let now_ms = clock();
        CONTEXT.with_borrow_mut(|context| {
            context.reset_rule_set();
            context.inputs.keyed_requests.push(keyed_request);
            decide(context, now_ms)
        })
    }

    fn compiled_rule(&self) -> &CompiledRule {
        &self.charge_plan.rule_set().rules[self.rule]
    }

    fn outcome(&self, admitted: bool, context: &DecisionContext, now_ms: u64) -> LimiterDecision {
        let now_ms = now_ms.max(context.result.decided_ms);
        let mut layers = LayerStates::default();
        let mut receipts = [None; MAX_LAYERS];
        let mut blocking = (0, Some(now_ms));
        for charge in &context.result.charges {
            let (layer, limit) = (charge.layer.id.position.index(), charge.request.limit);
            layers.states[layer] = LayerState {
                limit,
                period: self.periods[layer],
                remaining: u64::from(limit).saturating_sub(charge.usage.used) as u32,
                resets_at_ms: charge.usage.end_ms,
            };
            layers.count += 1;
            receipts[layer] = charge.receipt().map(|receipt| receipt.receipt);
            if charge.is_full {
                let at_ms = self.charge_plan.rule_set().available_at_ms(charge, charge.layer.id, now_ms);
                let is_later = at_ms.is_none_or(|at_ms| blocking.1.is_some_and(|other_ms| at_ms >= other_ms));
                blocking = if is_later { (layer, at_ms) } else { blocking };
            }
        }
        match admitted {
            true => LimiterDecision::Admitted(Admission { layers, receipts, limiter: self.id }),
            false => LimiterDecision::Refused(Refusal {
                layers,
                layer: blocking.0,
                retry_after: blocking.1.map(|at_ms| Duration::from_millis(at_ms.saturating_sub(now_ms))),
            }),
        }
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("layers", &self.compiled_rule().rule.layers).finish_non_exhaustive()
    }
}

impl LimiterBuilder {
    /// Adds a layer: each key may take `limit` tokens in each window of length `period`.
    ///
    /// The limit is at least 1. The period is a whole number of milliseconds from 10 ms to 366 days, and different in
    /// every layer. Layers keep their order in [`LimiterDecision::layers`].
    pub fn layer(mut self, limit: u32, period: Duration) -> LimiterBuilder {
        self.layers.push((limit, period));
        self
    }

    /// Sets the capacity in counters; the default is 1,000,000, which takes 32 MB.
    ///
    /// Every key needs one counter in each layer, from its first request in a window to the end of that window. With
    /// windows of a minute and an hour, twice the number of keys seen in an hour is enough. Each counter takes 32 bytes,
    /// allocated when the limiter is built.
    pub fn capacity(mut self, counters: usize) -> LimiterBuilder {
        self.capacity = counters;
        self
    }

    /// Sets the secret that keys the hash of keys. The default is random, so that clients cannot choose keys that collide.
    /// A fixed seed makes hashes reproducible, for example in tests.
    pub fn seed(mut self, seed: Seed) -> LimiterBuilder {
        self.seed = Some(seed);
        self
    }

    /// Checks the settings, allocates the table and returns the limiter.
    ///
    /// # Errors
    ///
    /// [`BuildError`] names the first invalid setting, or reports that the memory cannot be allocated.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use transom_limiter::{BuildError, Limiter};
    /// let error = Limiter::builder().layer(0, Duration::from_secs(1)).build().unwrap_err();
    /// assert_eq!(error, BuildError::ZeroLimit);
    /// ```
    pub fn build(self) -> Result<Limiter, BuildError> {
        match self.layers.len() {
            0 => return Err(BuildError::NoLayers),
            1..=MAX_LAYERS => {}
            _ => return Err(BuildError::TooManyLayers),
        }
        let mut periods = [Duration::ZERO; MAX_LAYERS];
        let mut limits = Vec::new();
        for (i, (tokens, period)) in self.layers.iter().copied().enumerate() {
            if tokens == 0 {
                return Err(BuildError::ZeroLimit);
            }
            if periods[..i].contains(&period) {
                return Err(BuildError::DuplicatePeriod(period));
            }
            periods[i] = period;
            limits.push(plain_limit(tokens, period)?);
        }
        if self.capacity == 0 || self.capacity > MAX_CAPACITY {
            return Err(BuildError::Capacity(self.capacity));
        }
        let table = Table::with_capacity(self.capacity).ok_or(BuildError::OutOfMemory)?;
        let seed = self.seed.unwrap_or_else(|| Seed(random(), random()));
        let id = seed.hash(&["limiter", &format!("{:?} {}", self.layers, self.capacity)]);
        let mut rules = IdVec::new();
        let rule: RuleId = rules.push(Rule::new("limiter", vec![KeyPart::GLOBAL], OnMissing::Never, limits));
        let rule_set = Arc::new(RuleSet::new(rules.as_slice(), seed, None));
        let hasher = KeyHasher::new(seed, rule_set.rules[rule].hash_prefix);
        Ok(Limiter { charge_plan: rule_set.charge_plan([rule]), table, hasher, rule, periods, id })
    }
}

fn plain_limit(tokens: u32, period: Duration) -> Result<Limit, BuildError> {
    let period_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
    if !(PERIOD_MIN_MS..=PERIOD_MAX_MS).contains(&period_ms) || Duration::from_millis(period_ms) != period {
        return Err(BuildError::Period(period));
    }
    let windows = Windows::Even { period_ms, offset_ms: 0 };
    Ok(Limit { tokens, windows, period_text: format!("{period_ms}ms"), capacity: None, reserve: 0, shards: 1 })
}

/// The standard library seeds its hash maps from the operating system.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

impl LimiterDecision {
    /// Whether the request may be served.
    pub fn is_admitted(&self) -> bool {
        matches!(self, LimiterDecision::Admitted(_))
    }

    /// The state of each layer, in the order of the builder.
    pub fn layers(&self) -> &[LayerState] {
        match self {
            LimiterDecision::Admitted(admission) => admission.layers(),
            LimiterDecision::Refused(refusal) => refusal.layers(),
        }
    }
}

impl Admission {
    /// The state of each layer, in the order of the builder. After [`Limiter::acquire`] it includes this request.
    pub fn layers(&self) -> &[LayerState] {
        &self.layers.states[..self.layers.count]
    }
}

impl Refusal {
    /// The state of each layer, in the order of the builder.
    pub fn layers(&self) -> &[LayerState] {
        &self.layers.states[..self.layers.count]
    }

    /// The position of the layer that has enough tokens last: its state explains [`Refusal::retry_after`].
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The time until all layers have enough tokens for the request, if the key makes no other requests: the value of a
    /// `Retry-After` field, to be rounded up to seconds. `None` if the cost is greater than a limit, so that the request
    /// can never be admitted.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::NoLayers => f.write_str("a limiter needs at least one layer"),
            BuildError::TooManyLayers => write!(f, "a limiter has at most {MAX_LAYERS} layers"),
            BuildError::ZeroLimit => f.write_str("a limit is at least 1"),
            BuildError::Period(period) => {
                write!(f, "a period is whole milliseconds from 10 ms to 366 days, not {period:?}")
            }
            BuildError::DuplicatePeriod(period) => write!(f, "two layers have the period {period:?}; remove one"),
            BuildError::Capacity(capacity) => write!(f, "a capacity is from 1 to {MAX_CAPACITY}, not {capacity}"),
            BuildError::OutOfMemory => f.write_str("out of memory; choose a smaller capacity"),
        }
    }
}

impl std::error::Error for BuildError {}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(3600);

    fn limiter() -> Limiter {
        Limiter::builder().layer(2, MINUTE).layer(3, HOUR).capacity(1000).build().unwrap()
    }

    fn remaining(decision: &LimiterDecision) -> Vec<u32> {
        decision.layers().iter().map(|layer| layer.remaining).collect()
    }

    fn refusal(decision: LimiterDecision) -> Refusal {
        match decision {
            LimiterDecision::Refused(refusal) => refusal,
            LimiterDecision::Admitted(_) => panic!("admitted"),
        }
    }

    fn admission(decision: LimiterDecision) -> Admission {
        match decision {
            LimiterDecision::Admitted(admission) => admission,
            LimiterDecision::Refused(_) => panic!("refused"),
        }
    }

    #[test]
    fn a_limiter_can_be_shared_between_threads() {
        fn is_shared<T: Send + Sync>() {}
        is_shared::<Limiter>();
    }

    #[test]
    fn a_request_is_charged_in_every_layer_or_in_none() {
        let limiter = limiter();
        assert_eq!(remaining(&limiter.acquire("a", 1, 0)), [1, 2]);
        assert_eq!(remaining(&limiter.acquire("a", 1, 0)), [0, 1]);
        let refused = refusal(limiter.acquire("a", 1, 30_000));
        assert_eq!((refused.layer(), refused.retry_after()), (0, Some(Duration::from_secs(30))));
        assert_eq!(refused.layers()[1].remaining, 1);
        assert_eq!(remaining(&limiter.acquire("a", 1, 60_000)), [1, 0]);
        let refused = refusal(limiter.acquire("a", 1, 60_000));
        assert_eq!((refused.layer(), refused.retry_after()), (1, Some(Duration::from_secs(3540))));
        assert_eq!(refused.layers()[1].resets_at_ms, 3_600_000);
        assert!(limiter.acquire("b", 1, 60_000).is_admitted());
    }

    #[test]
    fn a_check_takes_nothing() {
        let limiter = limiter();
        for _ in 0..5 {
            assert_eq!(remaining(&limiter.check("a", 2, 0)), [2, 3]);
        }
        assert!(!limiter.refund(admission(limiter.check("a", 1, 0)), 0));
        assert!(limiter.acquire("a", 2, 0).is_admitted());
        assert_eq!(refusal(limiter.check("a", 1, 0)).layer(), 0);
    }

    #[test]
    fn the_clock_of_a_decision_can_use_another_limiter() {
        let (limiter, other) = (limiter(), limiter());
        let decided = limiter.acquire_with_clock("a", 1, || {
            assert!(other.acquire("a", 1, 0).is_admitted());
            90_000
        });
        assert_eq!(decided.layers()[0].resets_at_ms, 120_000);
        assert_eq!(remaining(&decided), [1, 2]);
    }

    #[test]
    fn a_refund_returns_the_tokens_to_open_windows_only() {
        let limiter = limiter();
        let first = admission(limiter.acquire("a", 2, 0));
        assert!(limiter.refund(first, 0));
        assert_eq!(remaining(&limiter.check("a", 1, 0)), [2, 3]);
        let second = admission(limiter.acquire("a", 2, 0));
        let third = admission(limiter.acquire("a", 1, 60_000));
        assert!(limiter.refund(second, 60_000));
        assert_eq!(remaining(&limiter.check("a", 1, 60_000)), [1, 2]);
        assert!(!limiter.refund(third, 7_200_000) || remaining(&limiter.check("a", 1, 7_200_000)) == [2, 3]);
    }

    #[test]
    fn an_admission_of_another_limiter_gives_nothing_back() {
        let (one, other) = (limiter(), limiter());
        let admitted = admission(one.acquire("a", 2, 0));
        assert!(!other.refund(admitted, 0));
    }

    #[test]
    fn a_full_table_counts_keys_together() {
        let limiter = Limiter::builder().layer(1, MINUTE).capacity(1).build().unwrap();
        // Eight slots, and 64 counters for the other keys.
        let admitted = (0..1000).filter(|key| limiter.acquire(key, 1, 0).is_admitted()).count() as u64;
        assert_eq!(admitted, 8 + limiter.overflow_total());
        assert!((9..=8 + 64).contains(&admitted), "{admitted}");
    }

    #[test]
    fn a_cost_above_the_limit_is_never_admitted() {
        let refused = refusal(limiter().acquire("a", 3, 0));
        assert_eq!((refused.layer(), refused.retry_after()), (0, None));
    }

    #[test]
    fn limiters_of_one_thread_do_not_mix_their_windows() {
        let (minutes, hours) = (
            Limiter::builder().layer(5, MINUTE).capacity(10).build().unwrap(),
            Limiter::builder().layer(5, HOUR).capacity(10).build().unwrap(),
        );
        for _ in 0..2 {
            assert_eq!(minutes.acquire("a", 1, 1).layers()[0].resets_at_ms, 60_000);
            assert_eq!(hours.acquire("a", 1, 1).layers()[0].resets_at_ms, 3_600_000);
        }
    }

    #[test]
    fn wrong_settings_are_rejected() {
        let error = |builder: LimiterBuilder| builder.build().err();
        assert_eq!(error(Limiter::builder()), Some(BuildError::NoLayers));
        assert_eq!(error(Limiter::builder().layer(0, MINUTE)), Some(BuildError::ZeroLimit));
        for period in [Duration::ZERO, Duration::from_millis(9), Duration::from_micros(10_500), 24 * 367 * HOUR] {
            assert_eq!(error(Limiter::builder().layer(1, period)), Some(BuildError::Period(period)));
        }
        let same = Limiter::builder().layer(1, MINUTE).layer(2, MINUTE);
        assert_eq!(error(same), Some(BuildError::DuplicatePeriod(MINUTE)));
        let many = (1..=9).fold(Limiter::builder(), |builder, n| builder.layer(1, n * MINUTE));
        assert_eq!(error(many), Some(BuildError::TooManyLayers));
        for capacity in [0, MAX_CAPACITY + 1] {
            let builder = Limiter::builder().layer(1, MINUTE).capacity(capacity);
            assert_eq!(error(builder), Some(BuildError::Capacity(capacity)));
        }
    }
}
