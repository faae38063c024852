//! Looking at counters: what is used of them, and whether a request would have room. Nothing is charged.

use crate::acquire::look;
use crate::decision_context::Desk;
use crate::decision_time::Now;
use crate::rule_set::{Book, Line, Roster};
use crate::shared_counting::Stand;
use crate::table::Table;
use crate::window_sequence::Time;

impl Book {
    /// Looks at the counters of the enforced rules; `true` if all have room.
    pub fn look<const W: usize>(&self, roster: &Roster, table: &Table<W>, now: Now<'_>, desk: &mut Desk) -> bool {
        desk.clear();
        if roster.is_plain() && desk.are_usual() {
            desk.decided_ms = now.unix_ms;
            desk.put_down(self, roster, roster.enforced(), now.unix_ms, 0);
            return look(table, &mut desk.charges, Time::all_plain(now.unix_ms));
        }
        self.look_at_all(roster, table, now, desk)
    }

    /// As [`Book::look`], whatever the counters are.
    // Apart from it, for the plain way is that of clients who are refused again and again.
    #[inline(never)]
    fn look_at_all<const W: usize>(&self, roster: &Roster, table: &Table<W>, now: Now<'_>, desk: &mut Desk) -> bool {
        let lines = self.lines_of(roster, desk);
        let room = self.look_until_sure(table, now, desk, |desk, now_ms| match roster.is_shared {
            true => self.put_down_for_all(roster, &lines, table, now_ms, desk),
            false => desk.put_down(self, roster, &lines, now_ms, 0),
        });
        if roster.is_shared {
            self.tell(roster, table, desk.decided_ms, desk, 0);
        }
        desk.own_lines = lines;
        room
    }

    /// Looks at what is put down, and again where the time may have been too old.
    fn look_until_sure<const W: usize>(
        &self,
        table: &Table<W>,
        mut now: Now<'_>,
        desk: &mut Desk,
        put_down: impl Fn(&mut Desk, u64),
    ) -> bool {
        loop {
            desk.decided_ms = now.unix_ms;
            put_down(desk, now.unix_ms);
            let room = look(table, &mut desk.charges, self.time(now.unix_ms));
            if room || !desk.meets_debts(0) || !now.goes_on() {
                return room;
            }
        }
    }

    /// Puts down lines to be looked at: of those that are shared, what is known of all gateways together.
    fn put_down_for_all<const W: usize>(
        &self,
        roster: &Roster,
        lines: &[Line],
        table: &Table<W>,
        now_ms: u64,
        desk: &mut Desk,
    ) {
        self.stands(roster, |_within| false, &mut desk.stands);
        desk.stands.iter_mut().filter(|stand| **stand == Stand::Aside).for_each(|stand| *stand = Stand::Leased);
        desk.put_down_shared(self, roster, table, lines, now_ms, 0);
    }

    /// Looks at ordinary counters, beside what is known to be used elsewhere; `true` if all have room.
    pub fn look_alone<const W: usize>(
        &self,
        roster: &Roster,
        lines: &[Line],
        table: &Table<W>,
        now: Now<'_>,
        desk: &mut Desk,
    ) -> bool {
        let put_down = |desk: &mut Desk, now_ms| desk.put_down_shared(self, roster, table, lines, now_ms, 0);
        let room = self.look_until_sure(table, now, desk, put_down);
        self.tell(roster, table, desk.decided_ms, desk, 0);
        room
    }
}
