//! Random requests from several clocks, and how a table decides them. It makes no assertions about results.

use proptest::prelude::*;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::bucket::Key;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::Time;
use transom_limiter::window_kind::AcquireRequest;

use crate::oracle::LayerRequest;

/// The start of every clock, so late that no clock can go back to before the epoch.
pub const START_MS: u64 = 1_700_000_000_000;
/// The number of independent clocks.
pub const CLOCKS: usize = 4;

/// Two layers of three rules each. No window is a multiple of another.
pub const WINDOWS_MS: [u64; 6] = [10, 60, 1000, 15, 70, 1000];

/// One request, at the time of one clock.
#[derive(Clone, Debug)]
pub struct Action {
    pub clock: usize,
    /// The time by which the clock moves before the request: forwards, backwards or not at all.
    pub shift_ms: i64,
    /// The key of the rules of the first layer; half of it is the key in the second layer.
    pub client: u64,
    /// A mask of the six rules that apply.
    pub rules: u8,
    pub cost: u32,
}

pub fn actions(clients: u64, costs: impl Strategy<Value = u32>) -> impl Strategy<Value = Vec<Action>> {
    let moves = prop_oneof![4 => Just(0i64), 3 => 1..20i64, 1 => 20..1500i64, 2 => -90..0i64, 1 => -1200..0i64];
    let action = (0..CLOCKS, moves, 0..clients, 1..64u8, costs)
        .prop_map(|(clock, shift_ms, client, rules, cost)| Action { clock, shift_ms, client, rules, cost });
    prop::collection::vec(action, 1..120)
}

/// Limits of the six rules: small ones that are reached, and the largest numbers.
pub fn limits() -> impl Strategy<Value = [u32; 6]> {
    prop::array::uniform6(prop_oneof![6 => 0..12u32, 1 => (u32::MAX - 2)..=u32::MAX])
}

/// Costs from 0 to the largest number.
pub fn costs() -> impl Strategy<Value = u32> {
    prop_oneof![8 => Just(1u32), 4 => 0..4u32, 1 => prop_oneof![Just(u32::MAX / 2), Just(u32::MAX - 1), Just(u32::MAX)]]
}

/// The clocks of all threads.
pub struct Clocks([u64; CLOCKS]);

impl Clocks {
    pub fn new() -> Clocks {
        Clocks([START_MS; CLOCKS])
    }

    /// Moves one clock, but not to before the first window of any test.
    pub fn advance(&mut self, action: &Action) -> u64 {
        let clock = &mut self.0[action.clock];
        *clock = clock.saturating_add_signed(action.shift_ms).max(START_MS - 100_000);
        *clock
    }
}

/// The requests of an action to each counter, in the order of charging.
pub fn layer_requests(action: &Action, limits: &[u32; 6]) -> Vec<LayerRequest> {
    let layer_request = |rule: usize| {
        let client = if rule < 3 { action.client } else { action.client / 2 };
        LayerRequest {
            id: rule as u64 * 1000 + client,
            window_ms: WINDOWS_MS[rule],
            limit: limits[rule],
            cost: action.cost,
        }
    };
    (0..6).filter(|rule| action.rules >> rule & 1 == 1).map(layer_request).collect()
}

/// The result of a request.
pub struct Outcome {
    pub result: AcquireResult,
    /// The time of the decision: that of the clock, or the horizon of the table if that is later.
    pub now_ms: u64,
    pub charges: Vec<Charge>,
}

/// Decides a request as the gateway does: if its time is too late, again at the horizon of the table.
pub fn decide<const W: usize>(table: &Table<W>, layer_requests: &[LayerRequest], mut now_ms: u64) -> Outcome {
    loop {
        let mut charges: Vec<Charge> = layer_requests
            .iter()
            .map(|layer_request| Charge::new(counter(layer_request.id), acquire_request(layer_request, now_ms)))
            .collect();
        let result = acquire_all(table, &mut charges, &mut Vec::new(), Time::plain(now_ms));
        if result != AcquireResult::Late {
            return Outcome { result, now_ms, charges };
        }
        assert!(table.horizon_ms() > now_ms, "late, but not before the horizon");
        now_ms = table.horizon_ms();
    }
}

pub fn acquire_request(layer_request: &LayerRequest, now_ms: u64) -> AcquireRequest {
    AcquireRequest::plain(layer_request.end_ms(now_ms), layer_request.limit, layer_request.cost)
}

/// The counter with this number. The thousands select its layer.
pub fn counter(id: u64) -> Counter {
    Counter { key: Key::new(mix(id), mix(id ^ (1 << 63))), layer: mix(!(id / 1000)) }
}

/// Distributes 64 bits uniformly (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
pub fn mix(bits: u64) -> u64 {
    let bits = bits.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ bits >> 31
}
