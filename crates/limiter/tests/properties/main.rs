//! Properties of the counting room: random actions of several clocks, on real atomics, compared
//! with a limiter that is plainly right.
//!
//! `roomy` holds that a table with room is that limiter exactly, `tiny` what is left of it when the
//! table is full, `leases` what tokens that were fetched are worth. All name each invariant as the
//! models do.

mod large_table;
mod leases;
mod oracle;
mod small_table;
mod support;

/// How many cases each property tries; `PROPTEST_CASES` asks for more.
fn config() -> proptest::test_runner::Config {
    let mut config = proptest::test_runner::Config { failure_persistence: None, ..Default::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 3000;
    }
    config
}
