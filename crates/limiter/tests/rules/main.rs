//! Properties of rule sets: random rules and random clocks, compared with a simple reference limiter, and timelines of
//! documented behaviour.
//!
//! `exact`: a gateway with a large table equals the reference. `bounds`: bounds that no table, clock or order of events
//! exceeds. `timelines`: behaviour known from other limiters. `delay`: delayed requests and counted refusals.
//! `late_threads`: threads whose clock is behind. `ending_limits`: limits that end with a window. `changes`: limits that change. `penalty`: lock-outs. `sharded_accounts`:
//! shards whose tokens roll over or are reserved. `shared`: counters that several gateways share. `extremes`: extreme
//! numbers. `slots`: requests in flight. `compiled`: names and positions in a rule set. `identity`: the texts by which counters are
//! found.

mod bounds;
mod changes;
mod compiled;
mod delay;
mod ending_limits;
mod exact;
mod extremes;
mod identity;
mod late_threads;
mod oracle;
mod penalty;
mod sharded_accounts;
mod shared;
mod sliding;
mod slots;
mod support;
mod timelines;
mod verdicts;

/// The number of cases of each property. `PROPTEST_CASES` overrides it.
fn config() -> proptest::test_runner::Config {
    let mut config = proptest::test_runner::Config { failure_persistence: None, ..Default::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 2000;
    }
    config
}
