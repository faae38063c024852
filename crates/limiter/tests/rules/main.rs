//! Properties of the rule book: random rules and random clocks, compared with a limiter that is plainly
//! right, and what users were promised, row by row.
//!
//! `exact` holds that one gateway whose table has room is that limiter exactly; `bounds` what no table, clock or order of
//! events may exceed; `promises` the timelines that users know from other limiters; `waiting` what requests that wait and
//! refusals that count do; `late` what becomes of those that were held up; `changes` limits that change meanwhile;
//! `extremes` the largest and smallest numbers.

mod bounds;
mod changes;
mod delay;
mod exact;
mod extremes;
mod late_threads;
mod oracle;
mod support;
mod timelines;

/// How many cases each property tries; `PROPTEST_CASES` asks for more.
fn config() -> proptest::test_runner::Config {
    let mut config = proptest::test_runner::Config { failure_persistence: None, ..Default::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 2000;
    }
    config
}
