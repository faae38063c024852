//! `transom check`: says whether a configuration is good and what its rules amount to, or everything
//! that is wrong with it. With `--connect`, the servers that counters are shared through are asked as well.

use std::path::Path;

use super::connect::connect;
use super::{Exit, read};
use crate::clock::Clock;
use crate::config::outlook;
use crate::reload::Watch;

pub fn check(path: &Path, reach_out: bool) -> Exit {
    match read(path, &mut Watch::default()) {
        Ok(config) => {
            let (routes, rules, upstreams) = (config.routes.len(), config.rules.len(), config.upstreams.len());
            show!("{}: fine: {routes} routes, {rules} rules, {upstreams} upstreams", path.display());
            for line in outlook::lines(&config) {
                show!("  {line}");
            }
            let certificates = outlook::certificates(&config, Clock::system().wall_ms());
            let notes = certificates.into_iter().chain(outlook::guessable(&config)).chain(outlook::spellings(&config));
            for line in notes {
                show!("  note: {line}");
            }
            if reach_out { connect(config.counters.shared.as_ref()) } else { Exit::Fine }
        }
        Err(problems) => {
            tell!("{}", problems.trim_end());
            Exit::BadConfig
        }
    }
}
