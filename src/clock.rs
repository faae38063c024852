//! The only room that reads time.
//!
//! Windows follow the wall clock, but the gateway's time never goes back: it is the monotonic clock
//! plus the largest distance at which the wall clock was ever seen ahead of it. When the wall clock
//! is stepped back, time goes on from where it was at the monotonic clock's pace, until the wall
//! clock has caught up. After a wrong step forward windows go on opening and closing at their usual
//! pace, so nobody waits longer than one period.
//!
//! The wall clock is looked at again only once the gateway's time has gone on by a millisecond, which the monotonic clock tells:
//! under load a look at the time is one clock's and not two. A step of the wall clock is seen with the next millisecond.
//!
//! Where gateways share counters, their store's clock decides which window is open. Time follows that clock then, as far as its
//! answers tell: it is never ahead of it, but for what the clocks drift apart in some seconds.
//!
//! Times that others wrote down, such as the expiry of a token, are compared with the wall clock itself: the gateway's time may be
//! far from it, after a wrong step or behind a store whose clock is wrong.

#![allow(clippy::disallowed_methods, reason = "this is the room that reads the clocks")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Behind by more than this, the monotonic clock itself was set back, which only happens to
/// processes whose clocks are faked. Less is threads that read the clock at the same time.
const SETBACK_MS: u64 = 1000;
/// For how long it counts what a store's answer told of its clock; at most twice that.
const REMOTE_READING_LIFETIME: Duration = Duration::from_secs(10);
/// 2100-01-01: what is later is no time that a clock shows.
const PLAUSIBLE_MAX_MS: u64 = 4_102_444_800_000;
const MS_NS: u64 = 1_000_000;

/// A point in time, in the two ways it is needed.
#[derive(Clone, Copy, Debug)]
pub struct Timestamp {
    /// The gateway's time, Unix milliseconds.
    pub unix_ms: u64,
    /// For durations.
    pub instant: Instant,
}

/// Shared by all event loops, so that they agree on the time after a step.
#[derive(Clone, Debug)]
pub struct Clock(Arc<ClockSource>);

#[derive(Debug)]
enum ClockSource {
    System(SystemClock),
    Manual(ManualClock),
}

/// Two clocks that stand still until they are told to move, Unix milliseconds.
#[derive(Debug)]
struct ManualClock {
    unix_ms: AtomicU64,
    wall_ms: AtomicU64,
}

#[derive(Debug)]
struct SystemClock {
    origin: Instant,
    /// What to add to the nanoseconds since `origin`.
    offset_ns: AtomicU64,
    /// The latest time that was told. Whoever comes to a later one looks at the wall clock.
    latest_ms: AtomicU64,
    /// What to add instead, where another clock is followed; 0 where none is.
    remote_offset_ms: AtomicU64,
    remote_reading: Mutex<RemoteReading>,
}

/// What answers told of another clock lately: how far it is ahead of the milliseconds since the origin, at least. An answer has
/// been on its way for some time, so the most is nearest to the truth.
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
        // Nothing was told yet, and nothing is to be told before the wall clock was looked at.
        system.refresh();
        Clock(Arc::new(ClockSource::System(system)))
    }

    /// A clock that stands still until it is told to move, for tests.
    pub fn manual(unix_ms: u64) -> Clock {
        Clock(Arc::new(ClockSource::Manual(ManualClock {
            unix_ms: AtomicU64::new(unix_ms),
            wall_ms: AtomicU64::new(unix_ms),
        })))
    }

    /// Moves a manual clock; the system's clock is not ours to move.
    pub fn advance(&self, by: Duration) {
        if let ClockSource::Manual(manual) = &*self.0 {
            for clock_ms in [&manual.unix_ms, &manual.wall_ms] {
                clock_ms.fetch_add(by.as_millis() as u64, Ordering::SeqCst);
            }
        }
    }

    /// Sets the wall clock of a manual clock, and leaves the gateway's time where it is.
    pub fn set_wall_clock(&self, unix_ms: u64) {
        if let ClockSource::Manual(manual) = &*self.0 {
            manual.wall_ms.store(unix_ms, Ordering::SeqCst);
        }
    }

    pub fn now(&self) -> Timestamp {
        match &*self.0 {
            ClockSource::System(system) => system.now(),
            ClockSource::Manual(manual) => {
                Timestamp { unix_ms: manual.unix_ms.load(Ordering::SeqCst), instant: Instant::now() }
            }
        }
    }

    /// Goes on from a time that another process told, if it is later than this one's.
    pub fn ensure_at_least(&self, unix_ms: u64) {
        // What no clock shows was not told by one.
        let unix_ms = if unix_ms > PLAUSIBLE_MAX_MS { 0 } else { unix_ms };
        match &*self.0 {
            // Ordering: as in `System::now`.
            ClockSource::System(system) => system.latest_ms.fetch_max(unix_ms, Ordering::Relaxed),
            ClockSource::Manual(manual) => manual.unix_ms.fetch_max(unix_ms, Ordering::SeqCst),
        };
    }

    /// Follows another clock, which has just said what time it was. A manual clock follows nobody.
    pub fn follow(&self, unix_ms: u64) {
        if let ClockSource::System(system) = &*self.0
            && (1..=PLAUSIBLE_MAX_MS).contains(&unix_ms)
        {
            system.follow(unix_ms, Instant::now());
        }
    }

    /// The wall clock, Unix milliseconds: for times that others wrote down or read, and not for windows. While the wall
    /// clock shows no credible time, the gateway's time is returned.
    pub fn wall_ms(&self) -> u64 {
        match &*self.0 {
            ClockSource::System(system) => match wall_ns() / MS_NS {
                0 => system.now().unix_ms,
                wall_ms => wall_ms,
            },
            ClockSource::Manual(manual) => manual.wall_ms.load(Ordering::SeqCst),
        }
    }

    /// How far the gateway's time is ahead of the wall clock, in whole seconds; negative where it is behind.
    pub fn offset_s(&self) -> i64 {
        let offset_ms = self.now().unix_ms as i64 - self.wall_ms() as i64;
        (offset_ms + 500).div_euclid(1000)
    }

    /// For durations only.
    pub fn instant(&self) -> Instant {
        Instant::now()
    }
}

impl SystemClock {
    #[inline]
    fn now(&self) -> Timestamp {
        let instant = Instant::now();
        let unix_ms = self.unix_ms(self.steady_ns(instant));
        // Ordering: relaxed; a number that means something by itself. A time that was told before is one at which
        // somebody has looked at the wall clock, or that another process has told.
        if unix_ms == self.latest_ms.load(Ordering::Relaxed) { Timestamp { unix_ms, instant } } else { self.refresh() }
    }

    /// The time by what is known of the wall clock, or of the clock that is followed.
    #[inline]
    fn unix_ms(&self, steady_ns: u64) -> u64 {
        // Ordering: relaxed; numbers that mean something by themselves.
        match self.remote_offset_ms.load(Ordering::Relaxed) {
            0 => (steady_ns + self.offset_ns.load(Ordering::Relaxed)) / MS_NS,
            guide_ms => steady_ns / MS_NS + guide_ms,
        }
    }

    /// Nanoseconds since the origin, which are enough for centuries.
    #[inline]
    fn steady_ns(&self, instant: Instant) -> u64 {
        whole_ns(instant.saturating_duration_since(self.origin))
    }

    /// The time after a look at the wall clock.
    #[cold]
    fn refresh(&self) -> Timestamp {
        let (mut moment, _) = self.read();
        // Ordering: relaxed; each of the two numbers only grows and means something by itself.
        let latest_ms = self.latest_ms.load(Ordering::Relaxed);
        if moment.unix_ms < latest_ms {
            // A clock that is followed is followed back as well, if it is another one than before.
            if latest_ms - moment.unix_ms > SETBACK_MS && self.remote_offset_ms.load(Ordering::Relaxed) > 0 {
                self.latest_ms.store(moment.unix_ms, Ordering::Relaxed);
                return moment;
            }
            if latest_ms - moment.unix_ms > SETBACK_MS {
                // Read again: this thread may have been asleep since it read the clocks.
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
        let ahead_ms = unix_ms.saturating_sub(steady_ms);
        let mut heard = self.remote_reading.lock().unwrap_or_else(PoisonError::into_inner);
        let most_ms = heard.current_max_ms.max(heard.previous_max_ms);
        if most_ms.saturating_sub(ahead_ms) > SETBACK_MS {
            // No answer is on its way for so long: this is another clock, or it was set back.
            *heard = RemoteReading { since: instant, current_max_ms: ahead_ms, previous_max_ms: 0 };
        } else if instant.saturating_duration_since(heard.since) > REMOTE_READING_LIFETIME {
            *heard = RemoteReading { since: instant, current_max_ms: ahead_ms, previous_max_ms: heard.current_max_ms };
        } else {
            heard.current_max_ms = heard.current_max_ms.max(ahead_ms);
        }
        // Ordering: relaxed; a number that means something by itself.
        self.remote_offset_ms.store(heard.current_max_ms.max(heard.previous_max_ms).max(1), Ordering::Relaxed);
    }

    fn read(&self) -> (Timestamp, u64) {
        let wall_ns = if self.remote_offset_ms.load(Ordering::Relaxed) > 0 { 0 } else { wall_ns() };
        // Read afterwards: a thread that falls asleep in between takes the wall clock to be less ahead than it is, which
        // the next look mends. The other way round it would be ahead of it for ever.
        let instant = Instant::now();
        let steady_ns = self.steady_ns(instant);
        let offset_ns = wall_ns.saturating_sub(steady_ns);
        if offset_ns > self.offset_ns.load(Ordering::Relaxed) {
            self.offset_ns.fetch_max(offset_ns, Ordering::Relaxed);
        }
        (Timestamp { unix_ms: self.unix_ms(steady_ns), instant }, steady_ns)
    }
}

/// What the wall clock shows, Unix nanoseconds. One before 1970 has not been set yet; and one in a year that
/// counters can not name is wrong, and following it could not be undone.
fn wall_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if since > Duration::from_millis(PLAUSIBLE_MAX_MS) { 0 } else { whole_ns(since) }
}

/// Nanoseconds without the detour over 128 bits.
#[inline]
fn whole_ns(duration: Duration) -> u64 {
    duration.as_secs() * 1_000_000_000 + u64::from(duration.subsec_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_tells_the_wall_clocks_time() {
        let clock = Clock::system();
        let wall_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        let told_ms = clock.now().unix_ms;
        assert!(told_ms.abs_diff(wall_ms) < 60_000);
    }

    #[test]
    fn time_is_never_ahead_of_a_wall_clock_that_is_not_stepped() {
        let clock = Clock::system();
        for _ in 0..100_000 {
            let told_ms = clock.now().unix_ms;
            assert!(told_ms <= wall_ns() / MS_NS);
        }
    }

    #[test]
    fn a_step_forward_is_seen_with_the_next_millisecond() {
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
    fn time_goes_on_when_the_wall_clock_is_behind() {
        let ahead_ms = 3_600_000;
        let clock = Clock::system();
        let before_ms = clock.now().unix_ms;
        let ClockSource::System(system) = &*clock.0 else { unreachable!("made above") };
        // As if the wall clock had been an hour ahead once.
        system.offset_ns.fetch_add(ahead_ms * MS_NS, Ordering::Relaxed);
        let first_ms = clock.now().unix_ms;
        assert!(first_ms >= before_ms + ahead_ms);
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
    fn time_goes_on_from_what_another_process_told() {
        let clock = Clock::system();
        let told_ms = clock.now().unix_ms + 3_600_000;
        clock.ensure_at_least(told_ms);
        clock.ensure_at_least(u64::MAX);
        let now_ms = clock.now().unix_ms;
        assert!((told_ms..told_ms + 60_000).contains(&now_ms));
        std::thread::sleep(Duration::from_millis(2));
        assert!(clock.now().unix_ms > now_ms);
    }

    #[test]
    fn another_clock_is_followed() {
        let clock = Clock::system();
        let own_ms = clock.now().unix_ms;
        let hour_ms = 3_600_000;
        for other_ms in [own_ms - hour_ms, own_ms + hour_ms, own_ms] {
            clock.follow(other_ms);
            let told_ms = clock.now().unix_ms;
            assert!((other_ms..other_ms + 60_000).contains(&told_ms), "{other_ms} {told_ms}");
        }
        // An answer that was on its way for a while says nothing new.
        let told_ms = clock.now().unix_ms;
        clock.follow(told_ms - 100);
        assert!(clock.now().unix_ms >= told_ms);
        clock.follow(0);
        clock.follow(u64::MAX);
        assert!((told_ms..told_ms + 60_000).contains(&clock.now().unix_ms));
    }

    #[test]
    fn clocks_that_drift_apart_are_not_followed_for_ever() {
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
    fn a_manual_clock_stands_still() {
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
    fn the_wall_clock_is_told_apart_from_a_clock_that_is_followed() {
        let clock = Clock::system();
        let before_ms = wall_ns() / MS_NS;
        clock.follow(before_ms - 86_400_000);
        let wall_ms = clock.wall_ms();
        assert!((before_ms..=wall_ns() / MS_NS).contains(&wall_ms), "{before_ms} {wall_ms}");
        assert_eq!(clock.offset_s(), -86_400);
    }
}
