//! Properties of the counter table: random requests from several clocks, on real atomics, compared with a reference
//! limiter.
//!
//! `large_table`: a table with free slots equals the reference limiter. `small_table`: what holds when the table is
//! full. `leases`: deposited tokens are spent once. `concurrency`: requests under way. Properties have the names of the loom models
//! of the same invariants.

mod concurrency;
mod large_table;
mod leases;
mod oracle;
mod small_table;
mod support;

/// The number of cases of each property. `PROPTEST_CASES` overrides it.
fn config() -> proptest::test_runner::Config {
    let mut config = proptest::test_runner::Config { failure_persistence: None, ..Default::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 3000;
    }
    config
}
