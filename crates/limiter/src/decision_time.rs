//! The time of a decision, which can advance while the decision is made.

/// The most clock reads of a decision: a clock may have advanced at each.
const MAX_READS: u32 = 16;

/// The current time, and the clock to read it again.
///
/// A decision needs a later time in two cases. (1) `advance`: after this thread has read the clock, another thread may
/// open a window in the counter that this thread is about to read. By the older time that window has not begun, and its
/// usage looks like debt. So before a request is refused because of debt, the clock is read again. (2) `advance_to`:
/// the table has reused the slot of an ended window for another key, so the window of this thread's time is over; the
/// time of the decision is raised.
#[derive(Clone, Copy)]
pub struct DecisionTime<'a> {
    /// The time of the last read, Unix milliseconds.
    pub unix_ms: u64,
    clock: &'a dyn Fn() -> u64,
    reads_left: u32,
}

impl<'a> DecisionTime<'a> {
    /// Reads this clock.
    pub fn read(clock: &'a dyn Fn() -> u64) -> DecisionTime<'a> {
        DecisionTime::starting_at(clock(), clock)
    }

    /// A time that was read from this clock before.
    pub fn starting_at(unix_ms: u64, clock: &'a dyn Fn() -> u64) -> DecisionTime<'a> {
        DecisionTime { unix_ms, clock, reads_left: MAX_READS }
    }

    /// Reads the clock again; `true` if time has advanced.
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

    /// Advances to a time that is known to have passed; `true` if it is later.
    pub(super) fn advance_to(&mut self, unix_ms: u64) -> bool {
        let is_later = unix_ms > self.unix_ms;
        self.unix_ms = self.unix_ms.max(unix_ms);
        is_later
    }
}
