//! `transom check`: says whether a configuration is good and what its rules amount to, or everything
//! that is wrong with it.

use std::path::Path;

use super::{Exit, read};
use crate::config::outlook;
use crate::reload::Watch;

pub fn check(path: &Path) -> Exit {
    match read(path, &mut Watch::default()) {
        Ok(config) => {
            let (routes, rules, upstreams) = (config.routes.len(), config.rules.len(), config.upstreams.len());
            println!("{}: fine: {routes} routes, {rules} rules, {upstreams} upstreams", path.display());
            outlook::lines(&config).iter().for_each(|line| println!("  {line}"));
            Exit::Fine
        }
        Err(problems) => {
            eprint!("{problems}");
            Exit::BadConfig
        }
    }
}
