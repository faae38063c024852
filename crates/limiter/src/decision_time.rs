//! The time of a decision, which goes on while it is made.

/// How often it is asked again at most: a clock may have gone on each time.
const LOOKS: u32 = 16;

/// What time it is, and a way to ask again.
///
/// Between the moment in which a thread learned the time and that in which it finds a counter, another may have opened a
/// window there. By the older time that window is yet to begin, and what is used in it looks like tokens that are owed. So
/// nobody is refused for what is owed before the time was asked for once more.
#[derive(Clone, Copy)]
pub struct Now<'a> {
    /// What it was when it was last asked for, Unix milliseconds.
    pub unix_ms: u64,
    clock: &'a dyn Fn() -> u64,
    looks: u32,
}

impl<'a> Now<'a> {
    /// The time by this clock.
    pub fn by(clock: &'a dyn Fn() -> u64) -> Now<'a> {
        Now::since(clock(), clock)
    }

    /// The time by a clock that told it before.
    pub fn since(unix_ms: u64, clock: &'a dyn Fn() -> u64) -> Now<'a> {
        Now { unix_ms, clock, looks: LOOKS }
    }

    /// Asks again; `true` if time has gone on.
    #[cold]
    pub(super) fn goes_on(&mut self) -> bool {
        if self.looks == 0 {
            return false;
        }
        self.looks -= 1;
        let before_ms = self.unix_ms;
        self.unix_ms = before_ms.max((self.clock)());
        self.unix_ms > before_ms
    }

    /// Goes on to a time that is known to have come.
    pub(super) fn not_before(&mut self, unix_ms: u64) -> bool {
        let is_later = unix_ms > self.unix_ms;
        self.unix_ms = self.unix_ms.max(unix_ms);
        is_later
    }
}
