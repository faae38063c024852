//! The clock: the only file that reads time.
//!
//! Windows follow the wall clock, but the gateway's time never goes back: it is the monotonic clock plus the largest observed
//! lead of the wall clock over it. When the wall clock is stepped back, time continues at the pace of the monotonic clock until
//! the wall clock has caught up. After a wrong step forward, windows continue to open and close at their usual pace, so no
//! request waits longer than one period.
//!
//! The wall clock is read again only when the gateway's time has advanced by a millisecond on the monotonic clock: under load
//! a reading costs one clock and not two. A step of the wall clock is noticed with the next millisecond.
//!
//! Gateways that share counters follow the clock of their store, because the store decides which window is open. The
//! followed time is never ahead of the store's, except for what the two clocks drift apart in some seconds.
//!
//! Times that other systems write, such as the expiry of a token, are compared with the wall clock itself: the gateway's time
//! may differ much from it after a wrong step, or when the store's clock is wrong.

#![allow(clippy::disallowed_methods, reason = "the only file that reads the clocks")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A reading behind the latest time by more than this means that the monotonic clock was set back, which happens only to
/// processes with a faked clock. A smaller difference comes from threads that read the clock concurrently.
const SETBACK_MS: u64 = 1000;
/// Time for which a reading of the store's clock is used; at most twice this long.
const REMOTE_READING_LIFETIME: Duration = Duration::from_secs(10);
/// 2100-01-01. Later times are treated as errors of a clock.
const PLAUSIBLE_MAX_MS: u64 = 4_102_444_800_000;
const MS_NS: u64 = 1_000_000;

/// A point in time, on both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Timestamp {
    /// The gateway's time, Unix milliseconds.
    pub unix_ms: u64,
    /// Monotonic, for durations.
    pub instant: Instant,
}

/// The clock of the process. All workers share it, so that they agree on the time after a step.
#[derive(Clone, Debug)]
pub struct Clock(Arc<ClockSource>);

#[derive(Debug)]
enum ClockSource {
    System(SystemClock),
    Manual(ManualClock),
}

/// Gateway time and wall clock of a test, Unix milliseconds. Both change only by calls.
#[derive(Debug)]
struct ManualClock {
    unix_ms: AtomicU64,
    wall_ms: AtomicU64,
    /// The monotonic time at a time of the wall clock, if it changes only by calls too.
    instant_at: Option<(u64, Instant)>,
}

impl ManualClock {
    fn instant(&self) -> Instant {
        match self.instant_at {
            Some((at_ms, instant)) => {
                instant + Duration::from_millis(self.wall_ms.load(Ordering::SeqCst).saturating_sub(at_ms))
            }
            None => Instant::now(),
        }
    }
}

#[derive(Debug)]
struct SystemClock {
    origin: Instant,
    /// Added to the nanoseconds since `origin` to get Unix time.
    offset_ns: AtomicU64,
    /// The latest time returned. A thread that gets to a later one reads the wall clock.
    latest_ms: AtomicU64,
    /// Added instead, in milliseconds, while a remote clock is followed; else 0.
    remote_offset_ms: AtomicU64,
    remote_reading: Mutex<RemoteReading>,
}

/// Recent readings of a remote clock: its minimum lead over the milliseconds since `origin`. A reading is delayed by the
/// network, so the largest lead is the most accurate.
#[derive(Clone, Copy, Debug)]
struct RemoteReading {
    since: Instant,
    current_max_ms: u64,
    previous_max_ms: u64,
}

impl Clock {
    pub fn system() -> Clock {
        let origin = Instant::now();
        let system = SystemClock {
            origin,
            offset_ns: AtomicU64::new(0),
            latest_ms: AtomicU64::new(0),
            remote_offset_ms: AtomicU64::new(0),
            remote_reading: Mutex::new(RemoteReading { since: origin, current_max_ms: 0, previous_max_ms: 0 }),
        };
        // Read the wall clock before the first time is returned.
        system.refresh();
        Clock(Arc::new(ClockSource::System(system)))
    }

    /// A clock for tests, which changes only by `advance` and `set_wall_clock`.
    pub fn manual(unix_ms: u64) -> Clock {
        Clock::manual_with(unix_ms, None)
    }

    /// As [`Clock::manual`]; monotonic time, which is `instant` now, advances with it.
    pub fn stepped(unix_ms: u64, instant: Instant) -> Clock {
        Clock::manual_with(unix_ms, Some((unix_ms, instant)))
    }

    fn manual_with(unix_ms: u64, instant_at: Option<(u64, Instant)>) -> Clock {
        let (unix_ms, wall_ms) = (AtomicU64::new(unix_ms), AtomicU64::new(unix_ms));
        Clock(Arc::new(ClockSource::Manual(ManualClock { unix_ms, wall_ms, instant_at })))
    }

    /// Advances a manual clock. No effect on the system clock.
    pub fn advance(&self, by: Duration) {
        if let ClockSource::Manual(manual) = &*self.0 {
            for clock_ms in [&manual.unix_ms, &manual.wall_ms] {
                clock_ms.fetch_add(by.as_millis() as u64, Ordering::SeqCst);
            }
        }
    }

    /// Sets the wall clock of a manual clock; the gateway's time stays.
    pub fn set_wall_clock(&self, unix_ms: u64) {
        if let ClockSource::Manual(manual) = &*self.0 {
            manual.wall_ms.store(unix_ms, Ordering::SeqCst);
        }
    }

    /// The current time of the gateway.
    pub fn now(&self) -> Timestamp {
        match &*self.0 {
            ClockSource::System(system) => system.now(),
            ClockSource::Manual(manual) => {
                Timestamp { unix_ms: manual.unix_ms.load(Ordering::SeqCst), instant: manual.instant() }
            }
        }
    }

    /// Advances the time to one that another process reached, if that is later.
    pub fn ensure_at_least(&self, unix_ms: u64) {
        // Ignores times that no correct clock shows.
        let unix_ms = if unix_ms > PLAUSIBLE_MAX_MS { 0 } else { unix_ms };
        match &*self.0 {
            // Ordering: as in `SystemClock::now`.
            ClockSource::System(system) => system.latest_ms.fetch_max(unix_ms, Ordering::Relaxed),
            ClockSource::Manual(manual) => manual.unix_ms.fetch_max(unix_ms, Ordering::SeqCst),
        };
    }

    /// Follows a remote clock, which has just returned `unix_ms`. No effect on a manual clock, unless it is stepped: then the time
    /// is not behind the remote one.
    pub fn follow(&self, unix_ms: u64) {
        match &*self.0 {
            ClockSource::System(system) if (1..=PLAUSIBLE_MAX_MS).contains(&unix_ms) => {
                system.follow(unix_ms, Instant::now());
            }
            ClockSource::Manual(ManualClock { instant_at: Some(_), .. }) => self.ensure_at_least(unix_ms),
            ClockSource::System(_) | ClockSource::Manual(_) => {}
        }
    }

    /// The wall clock, Unix milliseconds: for times exchanged with other systems, not for windows. While the wall clock shows
    /// no plausible time, this is the gateway's time.
    pub fn wall_ms(&self) -> u64 {
        match &*self.0 {
            ClockSource::System(system) => match wall_ns() / MS_NS {
                0 => system.now().unix_ms,
                wall_ms => wall_ms,
            },
            ClockSource::Manual(manual) => manual.wall_ms.load(Ordering::SeqCst),
        }
    }

    /// As [`Clock::wall_ms`], with nanoseconds.
    pub fn wall_time(&self) -> SystemTime {
        let since = match &*self.0 {
            ClockSource::System(_) => Duration::from_nanos(wall_ns()),
            ClockSource::Manual(_) => Duration::ZERO,
        };
        UNIX_EPOCH + if since.is_zero() { Duration::from_millis(self.wall_ms()) } else { since }
    }

    /// Lead of the gateway's time over the wall clock, in whole seconds; negative if it is behind.
    pub fn offset_s(&self) -> i64 {
        let offset_ms = self.now().unix_ms as i64 - self.wall_ms() as i64;
        (offset_ms + 500).div_euclid(1000)
    }

    /// The monotonic clock, for durations only.
    pub fn instant(&self) -> Instant {
        match &*self.0 {
            ClockSource::System(_) => Instant::now(),
            ClockSource::Manual(manual) => manual.instant(),
        }
    }
}

impl SystemClock {
    #[inline]
    fn now(&self) -> Timestamp {
        let instant = Instant::now();
        let unix_ms = self.unix_ms(self.steady_ns(instant));
        // Ordering: relaxed; the number is used independently of other memory. If this time was returned before, a thread has
        // read the wall clock for it, or another process has reached it.
        if unix_ms == self.latest_ms.load(Ordering::Relaxed) { Timestamp { unix_ms, instant } } else { self.refresh() }
    }

    /// The time by the last reading of the wall clock, or of the remote clock if one is followed.
    #[inline]
    fn unix_ms(&self, steady_ns: u64) -> u64 {
        // Ordering: relaxed; each number is used independently of other memory.
        match self.remote_offset_ms.load(Ordering::Relaxed) {
            0 => (steady_ns + self.offset_ns.load(Ordering::Relaxed)) / MS_NS,
            guide_ms => steady_ns / MS_NS + guide_ms,
        }
    }

    /// Nanoseconds since `origin`; 64 bits last for centuries.
    #[inline]
    fn steady_ns(&self, instant: Instant) -> u64 {
        whole_ns(instant.saturating_duration_since(self.origin))
    }

    /// The time after reading the wall clock again.
    #[cold]
    fn refresh(&self) -> Timestamp {
        let (mut moment, _) = self.read();
        // Ordering: relaxed; both numbers only grow, and each is used independently of the other.
        let latest_ms = self.latest_ms.load(Ordering::Relaxed);
        if moment.unix_ms < latest_ms {
            // A different remote clock is followed even if its time is earlier.
            if latest_ms - moment.unix_ms > SETBACK_MS && self.remote_offset_ms.load(Ordering::Relaxed) > 0 {
                self.latest_ms.store(moment.unix_ms, Ordering::Relaxed);
                return moment;
            }
            if latest_ms - moment.unix_ms > SETBACK_MS {
                // Read again: this thread may have been suspended since it read the clocks.
                let steady_ns;
                (moment, steady_ns) = self.read();
                let latest_ms = self.latest_ms.load(Ordering::Relaxed);
                if latest_ms.saturating_sub(moment.unix_ms) > SETBACK_MS {
                    self.offset_ns.fetch_max((latest_ms * MS_NS).saturating_sub(steady_ns), Ordering::Relaxed);
                }
            }
            moment.unix_ms = moment.unix_ms.max(latest_ms);
        } else if moment.unix_ms > latest_ms {
            self.latest_ms.fetch_max(moment.unix_ms, Ordering::Relaxed);
        }
        moment
    }

    fn follow(&self, unix_ms: u64, instant: Instant) {
        let steady_ms = self.steady_ns(instant) / MS_NS;
        let lead_ms = unix_ms.saturating_sub(steady_ms);
        let mut reading = self.remote_reading.lock().unwrap_or_else(PoisonError::into_inner);
        let max_ms = reading.current_max_ms.max(reading.previous_max_ms);
        if max_ms.saturating_sub(lead_ms) > SETBACK_MS {
            // No reading is delayed by so much: this is another clock, or it was set back.
            *reading = RemoteReading { since: instant, current_max_ms: lead_ms, previous_max_ms: 0 };
        } else if instant.saturating_duration_since(reading.since) > REMOTE_READING_LIFETIME {
            *reading =
                RemoteReading { since: instant, current_max_ms: lead_ms, previous_max_ms: reading.current_max_ms };
        } else {
            reading.current_max_ms = reading.current_max_ms.max(lead_ms);
        }
        // Ordering: relaxed; the number is used independently of other memory.
        self.remote_offset_ms.store(reading.current_max_ms.max(reading.previous_max_ms).max(1), Ordering::Relaxed);
    }

    fn read(&self) -> (Timestamp, u64) {
        let wall_ns = if self.remote_offset_ms.load(Ordering::Relaxed) > 0 { 0 } else { wall_ns() };
        // Read after the wall clock: a thread suspended in between sees too small a lead, which the next reading corrects. In
        // the opposite order it would see too large a lead, which would last.
        let instant = Instant::now();
        let steady_ns = self.steady_ns(instant);
        let offset_ns = wall_ns.saturating_sub(steady_ns);
        if offset_ns > self.offset_ns.load(Ordering::Relaxed) {
            self.offset_ns.fetch_max(offset_ns, Ordering::Relaxed);
        }
        (Timestamp { unix_ms: self.unix_ms(steady_ns), instant }, steady_ns)
    }
}

/// The wall clock, Unix nanoseconds; 0 if it is not plausible. A time before 1970 means that the clock is not set yet. A time
/// beyond `PLAUSIBLE_MAX_MS` is wrong, and following it could not be undone.
fn wall_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if since > Duration::from_millis(PLAUSIBLE_MAX_MS) { 0 } else { whole_ns(since) }
}

/// Nanoseconds, without the 128-bit arithmetic of `as_nanos`.
#[inline]
fn whole_ns(duration: Duration) -> u64 {
    duration.as_secs() * 1_000_000_000 + u64::from(duration.subsec_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_shows_the_time_of_the_wall_clock() {
        let clock = Clock::system();
        let wall_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        let shown_ms = clock.now().unix_ms;
        assert!(shown_ms.abs_diff(wall_ms) < 60_000);
    }

    #[test]
    fn time_is_never_ahead_of_a_wall_clock_that_is_not_stepped() {
        let clock = Clock::system();
        for _ in 0..100_000 {
            let shown_ms = clock.now().unix_ms;
            assert!(shown_ms <= wall_ns() / MS_NS);
        }
    }

    #[test]
    fn a_step_forward_is_noticed_with_the_next_millisecond() {
        let clock = Clock::system();
        let ClockSource::System(system) = &*clock.0 else { unreachable!("made above") };
        let before_ms = clock.now().unix_ms;
        // As if the wall clock had been an hour behind until now.
        system.offset_ns.fetch_sub(3_600_000 * MS_NS, Ordering::Relaxed);
        system.latest_ms.fetch_sub(3_600_000, Ordering::Relaxed);
        let stepped = clock.now().instant;
        while clock.instant() - stepped < Duration::from_millis(1) {}
        assert!(clock.now().unix_ms >= before_ms);
    }

    #[test]
    fn time_advances_while_the_wall_clock_is_behind() {
        let lead_ms = 3_600_000;
        let clock = Clock::system();
        let before_ms = clock.now().unix_ms;
        let ClockSource::System(system) = &*clock.0 else { unreachable!("made above") };
        // As if the wall clock had been an hour ahead once.
        system.offset_ns.fetch_add(lead_ms * MS_NS, Ordering::Relaxed);
        let first_ms = clock.now().unix_ms;
        assert!(first_ms >= before_ms + lead_ms);
        assert!(clock.now().unix_ms >= first_ms);
    }

    #[test]
    fn a_faked_step_back_of_both_clocks_does_not_stop_time() {
        let clock = Clock::system();
        let latest_ms = clock.now().unix_ms + 3_600_000;
        let ClockSource::System(system) = &*clock.0 else { unreachable!("made above") };
        system.latest_ms.store(latest_ms, Ordering::Relaxed);
        assert!(clock.now().unix_ms >= latest_ms);
        assert!(system.read().0.unix_ms >= latest_ms);
    }

    #[test]
    fn time_continues_from_that_of_another_process() {
        let clock = Clock::system();
        let shown_ms = clock.now().unix_ms + 3_600_000;
        clock.ensure_at_least(shown_ms);
        clock.ensure_at_least(u64::MAX);
        let now_ms = clock.now().unix_ms;
        assert!((shown_ms..shown_ms + 60_000).contains(&now_ms));
        std::thread::sleep(Duration::from_millis(2));
        assert!(clock.now().unix_ms > now_ms);
    }

    #[test]
    fn a_remote_clock_is_followed() {
        let clock = Clock::system();
        let own_ms = clock.now().unix_ms;
        let hour_ms = 3_600_000;
        for other_ms in [own_ms - hour_ms, own_ms + hour_ms, own_ms] {
            clock.follow(other_ms);
            let shown_ms = clock.now().unix_ms;
            assert!((other_ms..other_ms + 60_000).contains(&shown_ms), "{other_ms} {shown_ms}");
        }
        // A delayed reading does not set the time back.
        let shown_ms = clock.now().unix_ms;
        clock.follow(shown_ms - 100);
        assert!(clock.now().unix_ms >= shown_ms);
        clock.follow(0);
        clock.follow(u64::MAX);
        assert!((shown_ms..shown_ms + 60_000).contains(&clock.now().unix_ms));
    }

    #[test]
    fn an_old_reading_of_a_remote_clock_expires() {
        let clock = Clock::system();
        let ClockSource::System(system) = &*clock.0 else { unreachable!("made above") };
        let start_ms = clock.now().unix_ms;
        system.follow(start_ms + 500, system.origin);
        for seconds in [11, 22, 33] {
            system.follow(start_ms + seconds * 1000, system.origin + Duration::from_secs(seconds));
        }
        assert_eq!(system.remote_offset_ms.load(Ordering::Relaxed), start_ms);
    }

    #[test]
    fn a_manual_clock_changes_only_by_calls() {
        let clock = Clock::manual(1000);
        assert_eq!(clock.now().unix_ms, 1000);
        clock.advance(Duration::from_secs(2));
        assert_eq!((clock.now().unix_ms, clock.wall_ms(), clock.offset_s()), (3000, 3000, 0));
        clock.set_wall_clock(8000);
        clock.advance(Duration::from_millis(400));
        assert_eq!((clock.now().unix_ms, clock.wall_ms(), clock.offset_s()), (3400, 8400, -5));
        clock.ensure_at_least(11_000);
        assert_eq!((clock.now().unix_ms, clock.wall_ms(), clock.offset_s()), (11_000, 8400, 3));
    }

    #[test]
    fn the_wall_clock_is_independent_of_a_followed_clock() {
        let clock = Clock::system();
        let before_ms = wall_ns() / MS_NS;
        clock.follow(before_ms - 86_400_000);
        let wall_ms = clock.wall_ms();
        assert!((before_ms..=wall_ns() / MS_NS).contains(&wall_ms), "{before_ms} {wall_ms}");
        assert_eq!(clock.offset_s(), -86_400);
    }
}
