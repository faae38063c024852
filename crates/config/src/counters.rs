//! `[counters]`: the counter table and its persistence.

use std::path::PathBuf;
use std::time::Duration;

use super::diagnostics::{Report, quoted};
use super::redis::{DefaultSharing, SharedSettings, StoreConfig, read_shared};
use super::settings::{Custom, DAY_MS, Integer, Optional, Restart, Section, Shape, Time};
use super::toml_reader::{Item, Table};

settings! {
    /// The counter table and its persistence.
    pub struct Counters checked by check_counters {
        /// Number of counters. One counter is needed for each key and layer with an open window; a counter that gateways
        /// share needs two (three during an outage of the store), and one more in mode `lease` with a sliding window.
        capacity: usize = Restart(Integer(1_000_000, 64..=1_000_000_000));
        /// Memory-mapped file for the counters. Counts survive a restart, a crash and an upgrade, and processes with the
        /// same file count together.
        file: Option<PathBuf> = Restart(Optional(Custom::or_empty(|| Shape::Text("absolute path"), |item, report| {
            read_absolute_path(item, "\"/run/transom/counters\"", report)
        })));
        /// File on a disk to which counts are written. Counts survive a reboot. Not together with `[counters.shared]`.
        snapshot: Option<PathBuf> = Restart(Optional(Custom::or_empty(|| Shape::Text("absolute path"), |item, report| {
            read_absolute_path(item, "\"/var/lib/transom/counts\"", report)
        })));
        /// Interval of snapshots. A snapshot is always written at exit. A power cut loses the counts after the last
        /// snapshot.
        snapshot_every: Duration = Restart(Time(Duration::from_secs(5), 1000..=DAY_MS));
        /// The store for counters that gateways share, see [`[counters.shared]`](#countersshared).
        shared: Option<StoreConfig> = Custom::or_empty(|| Shape::Table(SharedSettings::settings()), read_shared);
    }
}

impl Counters {
    /// The first setting that differs, apart from those that a reload applies.
    pub fn changed_setting(&self, other: &Counters) -> Option<&'static str> {
        let mut other = other.clone();
        if let (Some(store), Some((mode, on_outage))) = (&mut other.shared, self.default_sharing()) {
            (store.mode, store.on_outage) = (mode, on_outage);
        }
        let settings = [
            ("counters.capacity", self.capacity == other.capacity),
            ("counters.file", self.file == other.file),
            ("counters.snapshot", self.snapshot == other.snapshot),
            ("counters.shared", self.shared == other.shared),
            ("counters", *self == other),
        ];
        settings.into_iter().find(|(_, is_same)| !is_same).map(|(name, _)| name)
    }

    pub fn default_sharing(&self) -> DefaultSharing {
        self.shared.as_ref().map(StoreConfig::default_sharing)
    }
}

fn check_counters(counters: &mut Counters, table: &mut Table, report: &mut Report) {
    for key in ["redis", "mode", "on_outage", "prefix", "timeout"] {
        table.suggest_for(key, "shared", "write it in `[counters.shared]`");
    }
    if table.given("shared").is_none() && !table.lacks("shared") {
        counters.shared = Some(StoreConfig::placeholder());
    }
    let Some(item) = table.given("snapshot") else { return };
    let companions =
        |file: &PathBuf| ["", ".lock", ".new", ".old"].map(|end| format!("{}{end}", file.display()).into());
    let companions = counters.file.as_ref().map(companions).unwrap_or_default();
    if counters.snapshot.as_ref().is_some_and(|snapshot| companions.contains(snapshot)) {
        let message = "`snapshot` is the path of `file` or of one of its companion files";
        report.problem(item.span.clone(), message, "write another path for `snapshot`");
    }
    if table.given("shared").is_some() {
        let message =
            "`snapshot` and `[counters.shared]` are both given: a restored snapshot would return spent tokens";
        report.problem(item.span, message, "remove `snapshot`; shared counters are kept in Redis");
    }
}

/// Reads the absolute path of a file, which does not depend on the working directory.
pub fn read_absolute_path(item: &Item, example: &str, report: &mut Report) -> Option<PathBuf> {
    let word = item.string(example, report)?;
    if word.text.starts_with('/') && !word.text.ends_with('/') {
        return Some(PathBuf::from(word.text));
    }
    let message = format!("`{}` is {}, which is not the absolute path of a file", item.key, quoted(word.text));
    report.reject(word.span, message, item.fix_with(example))
}
