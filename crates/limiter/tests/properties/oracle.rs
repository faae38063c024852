//! A limiter that is plainly right: one map, one thread, nothing is ever forgotten.
//!
//! The room is compared against it. It does not know about slots, so it can not say what happens
//! when there are none.

use std::collections::HashMap;

/// What is asked of one counter.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Which counter.
    pub id: u64,
    /// Length of its windows, which start at multiples of it.
    pub window_ms: u64,
    pub limit: u32,
    pub cost: u32,
}

impl Wish {
    /// End of the window that `now_ms` falls into.
    pub fn end_ms(&self, now_ms: u64) -> u64 {
        (now_ms / self.window_ms + 1) * self.window_ms
    }
}

/// What a counter stands at: the end of its window, and the tokens used in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stand {
    pub end_ms: u64,
    pub used: u64,
}

#[derive(Default)]
pub struct Oracle {
    stands: HashMap<u64, Stand>,
}

impl Oracle {
    /// What counts for a request at `now_ms`: the window of that moment, or a later one if the counter was seen there.
    pub fn stand(&self, wish: &Wish, now_ms: u64) -> Stand {
        let fresh = Stand { end_ms: wish.end_ms(now_ms), used: 0 };
        match self.stands.get(&wish.id) {
            Some(&stand) if stand.end_ms >= fresh.end_ms => stand,
            _ => fresh,
        }
    }

    /// Admits a request if each of its counters has room, and then charges each of them.
    pub fn decide(&mut self, wishes: &[Wish], now_ms: u64) -> bool {
        let room = |wish: &Wish| self.stand(wish, now_ms).used + u64::from(wish.cost) <= u64::from(wish.limit);
        let admitted = wishes.iter().all(room);
        if admitted {
            for wish in wishes.iter().filter(|wish| wish.cost > 0) {
                let stand = self.stand(wish, now_ms);
                self.stands.insert(wish.id, Stand { used: stand.used + u64::from(wish.cost), ..stand });
            }
        }
        admitted
    }
}
