//! The `process_*` metrics, as client libraries of Prometheus have them, from `/proc/self` (proc_pid_stat(5)).

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

use super::exposition::Reading;
use super::{Metric, counter, gauge};

pub static CPU: Metric = counter("process_cpu_seconds_total", "User and system CPU time in seconds.");
pub static OPEN_FDS: Metric = gauge("process_open_fds", "Open file descriptors.");
pub static MAX_FDS: Metric = gauge("process_max_fds", "Limit on open file descriptors.");
pub static VIRTUAL_MEMORY: Metric = gauge("process_virtual_memory_bytes", "Virtual memory in bytes.");
pub static MAX_VIRTUAL_MEMORY: Metric =
    gauge("process_virtual_memory_max_bytes", "Limit on virtual memory in bytes; 2^64 - 1 without one.");
pub static RESIDENT_MEMORY: Metric = gauge("process_resident_memory_bytes", "Resident memory in bytes.");
pub static START_TIME: Metric = gauge("process_start_time_seconds", "Start of the process, Unix time in seconds.");
pub static THREADS: Metric = gauge("process_threads", "Threads of the process.");

/// The values as of now. Those that the system does not tell are missing.
pub fn readings() -> Vec<Reading> {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program, in parentheses, may contain spaces. The state follows, field 3.
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let ticks = clock_ticks_per_second() as f64;
    let values = [
        (&CPU, field(14).zip(field(15)).map(|(user, system)| (user + system) / ticks)),
        (&THREADS, field(20)),
        (&START_TIME, boot_time_s().zip(field(22)).map(|(boot_s, start)| boot_s + start / ticks)),
        (&VIRTUAL_MEMORY, field(23)),
        // As the client library of Go does: the largest limit stands for none.
        (&MAX_VIRTUAL_MEMORY, Some(getrlimit(Resource::As).current.unwrap_or(u64::MAX) as f64)),
        (&RESIDENT_MEMORY, field(24).map(|pages| pages * page_size() as f64)),
        // Without the descriptor that reads the folder.
        (&OPEN_FDS, fs::read_dir("/proc/self/fd").ok().map(|open| open.count().saturating_sub(1) as f64)),
        (&MAX_FDS, getrlimit(Resource::Nofile).current.map(|max| max as f64)),
    ];
    values.into_iter().filter_map(|(metric, value)| Some(Reading::new(metric, &[], value?))).collect()
}

/// When the system started, Unix time in seconds.
fn boot_time_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_this_process_can_be_read() {
        let readings = readings();
        let value = |metric: &'static Metric| {
            let found = readings.iter().find(|reading| std::ptr::eq(reading.name, metric));
            found.unwrap_or_else(|| panic!("no {}", metric.name)).value
        };
        assert!(value(&CPU) >= 0.0 && value(&THREADS) >= 1.0);
        assert!(value(&RESIDENT_MEMORY) > 1e5 && value(&VIRTUAL_MEMORY) >= value(&RESIDENT_MEMORY));
        assert!(value(&MAX_VIRTUAL_MEMORY) >= value(&VIRTUAL_MEMORY));
        assert!(value(&OPEN_FDS) >= 3.0 && value(&MAX_FDS) >= value(&OPEN_FDS));
        // After 2020 and before 2100.
        assert!((1.5e9..4.1e9).contains(&value(&START_TIME)), "{}", value(&START_TIME));
    }
}
