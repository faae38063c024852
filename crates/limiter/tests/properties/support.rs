//! What properties are made of: random actions of several clocks, played on a table.
//!
//! It asserts nothing; it turns an action into charges and says what came of it.

use proptest::prelude::*;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::bucket::Key;
use transom_limiter::counter::AcquireRequest;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::Time;

use crate::oracle::Wish;

/// Every clock starts here, so that none can go back to before the epoch.
pub const START_MS: u64 = 1_700_000_000_000;
/// How many independent clocks there are.
pub const CLOCKS: usize = 4;

/// Two layers of three rules each, with windows that do not divide one another.
pub const WINDOWS_MS: [u64; 6] = [10, 60, 1000, 15, 70, 1000];

/// One request by the clock of one thread.
#[derive(Clone, Debug)]
pub struct Action {
    pub clock: usize,
    /// By how much that clock moves before the request; it may stand still or go back.
    pub moves_ms: i64,
    /// Which client asks; it is the key of the rules of the first layer, and half of it that of the second's.
    pub client: u64,
    /// Which of the six rules apply, as a mask.
    pub rules: u8,
    pub cost: u32,
}

pub fn actions(clients: u64, costs: impl Strategy<Value = u32>) -> impl Strategy<Value = Vec<Action>> {
    let moves = prop_oneof![4 => Just(0i64), 3 => 1..20i64, 1 => 20..1500i64, 2 => -90..0i64, 1 => -1200..0i64];
    let action = (0..CLOCKS, moves, 0..clients, 1..64u8, costs)
        .prop_map(|(clock, moves_ms, client, rules, cost)| Action { clock, moves_ms, client, rules, cost });
    prop::collection::vec(action, 1..120)
}

/// Limits of the six rules: small ones that are reached, and those at the edge of the number.
pub fn limits() -> impl Strategy<Value = [u32; 6]> {
    prop::array::uniform6(prop_oneof![6 => 0..12u32, 1 => (u32::MAX - 2)..=u32::MAX])
}

/// Costs from nothing to everything.
pub fn costs() -> impl Strategy<Value = u32> {
    prop_oneof![8 => Just(1u32), 4 => 0..4u32, 1 => prop_oneof![Just(u32::MAX / 2), Just(u32::MAX - 1), Just(u32::MAX)]]
}

/// The clocks of all threads.
pub struct Clocks([u64; CLOCKS]);

impl Clocks {
    pub fn new() -> Clocks {
        Clocks([START_MS; CLOCKS])
    }

    /// Moves one clock, never to before the first window that any test uses.
    pub fn moved(&mut self, action: &Action) -> u64 {
        let clock = &mut self.0[action.clock];
        *clock = clock.saturating_add_signed(action.moves_ms).max(START_MS - 100_000);
        *clock
    }
}

/// What an action asks of each counter, in the order in which they are charged.
pub fn wishes(action: &Action, limits: &[u32; 6]) -> Vec<Wish> {
    let wish = |rule: usize| {
        let client = if rule < 3 { action.client } else { action.client / 2 };
        Wish { id: rule as u64 * 1000 + client, window_ms: WINDOWS_MS[rule], limit: limits[rule], cost: action.cost }
    };
    (0..6).filter(|rule| action.rules >> rule & 1 == 1).map(wish).collect()
}

/// What came of a request: the verdict, when it counted, and its charges.
pub struct Answer {
    pub verdict: AcquireResult,
    /// The time for which it was decided: that of its clock, or the table's horizon if that was too late.
    pub now_ms: u64,
    pub charges: Vec<Charge>,
}

/// Decides a request as the gateway does: one that comes too late counts at the table's own time.
pub fn play<const W: usize>(table: &Table<W>, wishes: &[Wish], mut now_ms: u64) -> Answer {
    loop {
        let mut charges: Vec<Charge> =
            wishes.iter().map(|wish| Charge::new(counter(wish.id), ask(wish, now_ms))).collect();
        let verdict = acquire_all(table, &mut charges, &mut Vec::new(), Time::plain(now_ms));
        if verdict != AcquireResult::Late {
            return Answer { verdict, now_ms, charges };
        }
        assert!(table.horizon_ms() > now_ms, "too late, and yet not before the horizon");
        now_ms = table.horizon_ms();
    }
}

pub fn ask(wish: &Wish, now_ms: u64) -> AcquireRequest {
    AcquireRequest::plain(wish.end_ms(now_ms), wish.limit, wish.cost)
}

/// The counter of an identity, hashed; the thousands are its layer.
pub fn counter(id: u64) -> Counter {
    Counter { key: Key::new(mixed(id), mixed(id ^ (1 << 63))), layer: mixed(!(id / 1000)) }
}

/// Sixty-four bits spread evenly (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
pub fn mixed(bits: u64) -> u64 {
    let bits = bits.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ bits >> 31
}
