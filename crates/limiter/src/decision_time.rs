//! The time of a decision, which goes on while it is made.

/// How often it is asked again at most: a clock may have gone on each time.
const MAX_READS: u32 = 16;

/// What time it is, and a way to ask again.
///
/// Between the moment in which a thread learned the time and that in which it finds a counter, another may have opened a
/// window there. By the older time that window is yet to begin, and what is used in it looks like tokens that are owed. So
/// nobody is refused for what is owed before the time was asked for once more.
#[derive(Clone, Copy)]
pub struct DecisionTime<'a> {
    /// What it was when it was last asked for, Unix milliseconds.
    pub unix_ms: u64,
    clock: &'a dyn Fn() -> u64,
    reads_left: u32,
}

impl<'a> DecisionTime<'a> {
    /// The time by this clock.
    pub fn read(clock: &'a dyn Fn() -> u64) -> DecisionTime<'a> {
        DecisionTime::starting_at(clock(), clock)
    }

    /// The time by a clock that told it before.
    pub fn starting_at(unix_ms: u64, clock: &'a dyn Fn() -> u64) -> DecisionTime<'a> {
        DecisionTime { unix_ms, clock, reads_left: MAX_READS }
    }

    /// Asks again; `true` if time has gone on.
    #[cold]
    pub(super) fn advance(&mut self) -> bool {
        if self.reads_left == 0 {
            return false;
        }
        self.reads_left -= 1;
        let before_ms = self.unix_ms;
        self.unix_ms = before_ms.max((self.clock)());
        self.unix_ms > before_ms
    }

    /// Goes on to a time that is known to have come.
    pub(super) fn advance_to(&mut self, unix_ms: u64) -> bool {
        let is_later = unix_ms > self.unix_ms;
        self.unix_ms = self.unix_ms.max(unix_ms);
        is_later
    }
}
