//! `transom check`: says whether a configuration is good, or everything that is wrong with it.

use std::path::Path;

use super::{Exit, read};
use crate::reload::Watch;

pub fn check(path: &Path) -> Exit {
    match read(path, &mut Watch::default()) {
        Ok(config) => {
            let (routes, rules, upstreams) = (config.routes.len(), config.rules.len(), config.upstreams.len());
            println!("{}: fine: {routes} routes, {rules} rules, {upstreams} upstreams", path.display());
            Exit::Fine
        }
        Err(problems) => {
            eprint!("{problems}");
            Exit::BadConfig
        }
    }
}
