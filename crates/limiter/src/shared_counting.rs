//! Rules whose counters several gateways share: what is decided here with tokens that were fetched beforehand, what is left for
//! the store to decide, and what is counted on this machine alone as long as the store can not be reached.
//!
//! Nothing is waited for here, and no store is known. Whoever asks is told that tokens lack, fetches some, and asks
//! again; everything else of the request is charged with them, or nothing is.

use crate::acquire::{Charge, Verdict, look, take};
use crate::counter::{Use, usage};
use crate::decision_context::{Asker, Desk};
use crate::decision_time::Now;
use crate::rule::{OnLimit, OnOutage, Sharing};
use crate::rule_set::{Book, Entry, Judgement, Layer, Line, Roster};
use crate::sharded_counter::{Share, Split};
use crate::table::{Counter, Table};
use crate::window_sequence::Time;

/// How the rules of a roster are counted in one decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stand {
    /// In ordinary counters.
    Own,
    /// With tokens that were fetched beforehand.
    Leased,
    /// In ordinary counters, beside what is known to be used elsewhere.
    Alone,
    /// Not here.
    Aside,
}

/// What came of deciding some lines.
#[derive(Debug)]
pub enum Step {
    Decided(Judgement),
    /// Nothing was charged: the counters at `desk.lacking` need more tokens than were fetched for them.
    Lacking,
}

impl Layer {
    /// The counter of one key, as it is where it is not shared.
    pub fn counter(&self, asker: Asker) -> Counter {
        self.charge(asker, 0, 0).counter
    }

    /// Makes a charge one of tokens that were fetched.
    fn lease(&self, charge: &mut Charge) {
        charge.counter = charge.counter.purse();
        charge.ask = charge.ask.leased();
        charge.split = Split::WHOLE;
    }
}

impl Book {
    /// The stand of each rule of a roster.
    /// `beyond`: whether a rule does what it does in an outage.
    pub fn stands(&self, roster: &Roster, beyond: impl Fn(usize) -> bool, stands: &mut Vec<Stand>) {
        stands.clear();
        stands.extend_from_slice(&roster.stands);
        for (position, stand) in stands.iter_mut().enumerate() {
            if *stand != Stand::Own && beyond(position) {
                *stand = match self.entries[roster.rules[position]].rule.on_outage {
                    OnOutage::Local => Stand::Alone,
                    OnOutage::Allow | OnOutage::Refuse => Stand::Aside,
                };
            }
        }
    }

    /// The enforced lines of a request in the order in which they are charged.
    /// They are in the desk's own list: see [`Desk::put_back`].
    pub fn enforced(&self, roster: &Roster, desk: &mut Desk) -> Vec<Line> {
        if desk.askers.iter().flatten().any(|asker| asker.variant != 0) {
            return self.lines_of(roster, desk);
        }
        let mut lines = std::mem::take(&mut desk.own_lines);
        lines.clear();
        lines.extend_from_slice(roster.enforced());
        lines
    }

    /// The lines of a shadow rule, by its position.
    pub fn of_shadow(&self, roster: &Roster, position: usize, asker: Asker) -> Vec<Line> {
        self.lines(roster, position, asker.variant).collect()
    }

    /// Charges lines as `desk.stands` says, all or none, behind what is on the desk already.
    pub fn step<const W: usize>(
        &self,
        roster: &Roster,
        lines: &[Line],
        table: &Table<W>,
        now: Now<'_>,
        desk: &mut Desk,
        may_wait: bool,
    ) -> Step {
        let first = desk.charges.len();
        desk.lacking.clear();
        desk.decided_ms = 0;
        // Who waits for windows to come asks the store for his place; here he can not have it.
        let leases = |line: &Line| desk.stands[line.rule] == Stand::Leased && desk.askers[line.rule].is_some();
        let may_wait = may_wait && !lines.iter().any(leases);
        let judgement = self.decide(roster, lines, table, now, desk, may_wait);
        let now_ms = desk.decided_ms;
        match judgement {
            Judgement::Refused => {
                if self.only_lacks(roster, table, now, desk, first) {
                    return Step::Lacking;
                }
                if roster.counts_refused() {
                    self.count_refusal(roster, table, self.time(now_ms), desk, first);
                }
            }
            Judgement::Admitted | Judgement::Delayed { .. } => desk.find_low(first),
        }
        self.tell(roster, table, now_ms, desk, first);
        Step::Decided(judgement)
    }

    /// What a key has used of a layer by the counters of this machine; `rule` is a position in the book.
    pub fn used_here<const W: usize>(
        &self,
        rule: usize,
        layer: usize,
        asker: Asker,
        table: &Table<W>,
        mut now: Now<'_>,
    ) -> Use {
        loop {
            let mut charge = self.charge_here(rule, layer, asker, now.unix_ms);
            look(table, std::slice::from_mut(&mut charge), self.time(now.unix_ms));
            if charge.usage.used == 0 || !charge.may_owe() || !now.goes_on() {
                return charge.usage;
            }
        }
    }

    /// Forgets what a key has used of a layer by the counters of this machine; returns how much it was. Before a counter
    /// becomes empty, `announce` is told the tokens in it. What is announced is never less than what is forgotten; it is more
    /// if another thread empties the same counter.
    pub fn forget_here<const W: usize>(
        &self,
        rule: usize,
        layer: usize,
        asker: Asker,
        table: &Table<W>,
        mut now: Now<'_>,
        mut announce: impl FnMut(u64),
    ) -> u64 {
        let charge = self.charge_here(rule, layer, asker, now.unix_ms);
        let time = self.time(now.unix_ms);
        let mut forgotten = Vec::new();
        for counter in charge.split.counters(charge.counter) {
            let mut announced = 0;
            forgotten.push(table.forget_after(counter, charge.ask, time, |word| {
                let used = usage(word, charge.ask, time).used;
                announce(used.saturating_sub(announced));
                announced = used.max(announced);
            }));
        }
        now.goes_on();
        let ask = self.charge_here(rule, layer, asker, now.unix_ms).ask;
        forgotten.into_iter().map(|word| usage(word, ask, self.time(now.unix_ms)).used).sum()
    }

    fn charge_here(&self, rule: usize, layer: usize, asker: Asker, now_ms: u64) -> Charge {
        let layer = self.entries[rule].layer(layer);
        let end_ms = self.timelines[layer.timeline].window_at(now_ms, asker.offset).end_ms;
        layer.charge(Asker { cost: 0, ..asker }, end_ms, 0)
    }

    /// Whether nothing stands against a request that was refused but that too few tokens were fetched.
    fn only_lacks<const W: usize>(
        &self,
        roster: &Roster,
        table: &Table<W>,
        now: Now<'_>,
        desk: &mut Desk,
        first: usize,
    ) -> bool {
        let now_ms = desk.decided_ms;
        let Desk { charges, lines, stands, askers, lacking, .. } = desk;
        let mut is_full = false;
        for (i, (charge, line)) in charges.iter_mut().zip(lines.iter()).enumerate().skip(first) {
            let Some(asker) = askers[line.rule].filter(|_| charge.full) else { continue };
            let layer = self.layer_of(roster, *line);
            let here = || self.used_here(roster.rules[line.rule], line.layer, asker, table, now).used;
            if stands[line.rule] != Stand::Leased || layer.is_used_up(table, asker, charge, here(), now_ms) {
                is_full = true;
            } else {
                lacking.push(i);
            }
        }
        if is_full {
            // What might have been fetched is not what refused it.
            for i in lacking.drain(..) {
                charges[i].full = false;
                // That no tokens were fetched says nothing about what is left, if nothing else is known of the counter.
                let known = askers[lines[i].rule]
                    .and_then(|asker| table.tally(self.layer_of(roster, lines[i]).counter(asker), now_ms));
                if known.is_none() {
                    charges[i].usage.used = 0;
                }
            }
        }
        !is_full && !lacking.is_empty()
    }

    /// Whether a charge that was made without the store is more than is left by what is known now: since it was put down,
    /// another event loop has made what is used elsewhere more, and may have emptied its counter before it was charged.
    // Ordering: that loop raises the tally and then empties the counter, each by an acquiring and releasing swap. A charge
    // of the emptied counter has acquired the raised tally, so it is read here.
    pub(super) fn was_overtaken<const W: usize>(
        &self,
        roster: &Roster,
        table: &Table<W>,
        now_ms: u64,
        desk: &Desk,
        first: usize,
    ) -> bool {
        desk.charges.iter().zip(&desk.lines).skip(first).any(|(charge, line)| {
            let is_alone = desk.stands.get(line.rule) == Some(&Stand::Alone);
            let elsewhere = || used_elsewhere(charge.counter, table, now_ms);
            let capacity = u64::from(self.layer_of(roster, *line).capacity);
            is_alone && charge.usage.used > capacity.saturating_sub(elsewhere())
        })
    }

    /// Makes charges say what is used by all gateways together, as far as it is known.
    pub fn tell<const W: usize>(&self, roster: &Roster, table: &Table<W>, now_ms: u64, desk: &mut Desk, first: usize) {
        let Desk { charges, lines, stands, askers, .. } = desk;
        for (charge, line) in charges.iter_mut().zip(lines.iter()).skip(first) {
            let (Some(asker), Some(stand)) = (askers[line.rule], stands.get(line.rule)) else { continue };
            let layer = self.layer_of(roster, *line);
            match stand {
                Stand::Own | Stand::Aside => {}
                Stand::Leased => {
                    let left = charge.ask.ceiling.saturating_sub(charge.usage.used);
                    if let Some((end_ms, used)) = table.tally(layer.counter(asker), now_ms) {
                        charge.usage.used = u64::from(used).saturating_sub(left);
                        if left == 0 {
                            charge.usage.end_ms = end_ms;
                        }
                    }
                }
                Stand::Alone => {
                    let whole = charge.ask.ceiling.max(u64::from(layer.capacity));
                    charge.usage.used += whole - charge.ask.ceiling;
                    charge.ask.ceiling = whole;
                }
            }
        }
    }

    /// Puts down lines for the store to decide, or for later, as ordinary charges that nobody has made; returns from where on.
    pub fn lay_aside<const W: usize>(
        &self,
        roster: &Roster,
        lines: &[Line],
        table: &Table<W>,
        now_ms: u64,
        desk: &mut Desk,
    ) -> usize {
        let behind = desk.charges.len();
        for line in lines {
            if let Some(asker) = desk.askers[line.rule] {
                let mut charge = desk.charge(self, roster, *line, asker, now_ms);
                if desk.stands.get(line.rule) == Some(&Stand::Alone) {
                    beside_others(&mut charge, table, now_ms);
                }
                desk.charges.push(charge);
                desk.lines.push(*line);
            }
        }
        behind
    }

    /// Charges what lies on the desk from `behind` up to `until`, all or none, without looking at it first; `false` if
    /// somebody else has taken it.
    pub fn take<const W: usize>(
        &self,
        table: &Table<W>,
        now_ms: u64,
        desk: &mut Desk,
        behind: usize,
        until: usize,
    ) -> bool {
        let Desk { charges, shares, .. } = desk;
        take(table, &mut charges[behind..until], shares, self.time(now_ms)) == Verdict::Admitted
    }

    /// Looks anew at what lies on the desk behind `behind`: at what is counted here, and by the use that is known of it at
    /// what the store decides.
    pub fn measure<const W: usize>(
        &self,
        roster: &Roster,
        table: &Table<W>,
        now_ms: u64,
        desk: &mut Desk,
        behind: usize,
    ) {
        let uses: Vec<Use> = desk.charges[behind..].iter().map(|charge| charge.usage).collect();
        let lines = desk.lines[behind..].to_vec();
        desk.rewind(behind);
        self.lay_aside(roster, &lines, table, now_ms, desk);
        let Desk { charges, stands, .. } = desk;
        for ((charge, line), usage) in charges[behind..].iter_mut().zip(&lines).zip(uses) {
            charge.usage = match stands[line.rule] {
                Stand::Own | Stand::Alone => table.look(charge.counter, charge.ask, self.time(now_ms)).0,
                Stand::Leased | Stand::Aside => usage,
            };
            charge.full = !charge.usage.admits(charge.ask);
        }
    }

    /// Asks for places in the windows in which rules let a request pass; `told` is what is used of each layer. Returns
    /// the lines, charged before `behind` or placed, whose windows are over by the time that the last of them lets it pass.
    #[allow(clippy::too_many_arguments, reason = "what is asked, of whom, and when")]
    pub fn ask_for_turns(
        &self,
        roster: &Roster,
        turns: &[u64],
        told: &[(Line, Use)],
        time: Time<'_>,
        desk: &mut Desk,
        first: usize,
        behind: usize,
    ) -> Vec<Line> {
        let until_ms = turns.iter().copied().max().unwrap_or(time.now_ms);
        let mut again = Vec::new();
        for (charge, line) in desk.charges.iter_mut().zip(&desk.lines).skip(behind) {
            if let Some((_, usage)) = told.iter().find(|(known, _)| known == line) {
                charge.usage = *usage;
            }
            charge.full = !charge.usage.admits(charge.ask);
            let turn_ms = turns[line.rule];
            if turn_ms > time.now_ms {
                let end_ms = self.ask_for_then(charge, &self.entries[roster.rules[line.rule]], *line, turn_ms, time);
                again.extend((end_ms <= until_ms).then_some(*line));
            }
        }
        let kept = desk.charges[..behind].iter().zip(&desk.lines).skip(first);
        again.extend(kept.filter(|(charge, _)| charge.usage.end_ms <= until_ms).map(|(_, line)| *line));
        again
    }

    /// Whether a refused request could be let through in a window to come, by rules that are full.
    pub fn may_wait(&self, roster: &Roster, desk: &Desk) -> bool {
        let full = desk.charges.iter().zip(&desk.lines).filter(|(charge, _)| charge.full);
        let mut waits = full.map(|(_, line)| {
            let entry = &self.entries[roster.rules[line.rule]];
            match entry.rule.on_limit {
                OnLimit::Delay { .. } => roster.delays || (desk.reserve && self.layer_of(roster, *line).reserve > 0),
                OnLimit::Refuse => desk.reserve && self.layer_of(roster, *line).reserve > 0,
                OnLimit::Shadow => false,
            }
        });
        let first = waits.next();
        first.is_some_and(|first| first && waits.all(|waits| waits))
    }
}

/// Leaves to a charge on this machine alone what is not known to be used elsewhere.
fn beside_others<const W: usize>(charge: &mut Charge, table: &Table<W>, now_ms: u64) {
    charge.ask.ceiling = charge.ask.ceiling.saturating_sub(used_elsewhere(charge.counter, table, now_ms));
}

/// What is known to be used of a counter by other gateways, or was reported to the store by this one.
fn used_elsewhere<const W: usize>(counter: Counter, table: &Table<W>, now_ms: u64) -> u64 {
    table.tally(counter, now_ms).map_or(0, |(_, used)| u64::from(used))
}

impl Entry {
    /// Whether any of its counters is split, where gateways share them.
    pub fn is_split(&self) -> bool {
        self.layers.iter().any(|layer| layer.shards_elsewhere > 1)
    }

    /// How it is counted as long as the store can be asked.
    pub(super) fn stand(&self) -> Stand {
        match self.rule.sharing {
            Sharing::Own => Stand::Own,
            // No one call decides on all shards: tokens of a split counter are always fetched.
            Sharing::Exact if !self.is_split() => Stand::Aside,
            Sharing::Exact | Sharing::Lease => Stand::Leased,
        }
    }
}

impl Layer {
    /// Whether it is known that all gateways together have used too much of a window for this charge, with what was
    /// counted `here` alone.
    fn is_used_up<const W: usize>(
        &self,
        table: &Table<W>,
        asker: Asker,
        charge: &Charge,
        here: u64,
        now_ms: u64,
    ) -> bool {
        let (cost, capacity) = (u64::from(charge.ask.cost), u64::from(self.capacity));
        let counter = self.counter(asker);
        // What was fetched here and is not spent is not used.
        let spent = |(_, used): (u64, u32)| u64::from(used.saturating_sub(table.purse(counter, now_ms)));
        cost > capacity || table.tally(counter, now_ms).is_some_and(|told| spent(told) + here + cost > capacity)
    }
}

impl Desk {
    /// Takes back the list that was used for lines, so that the next request need not allocate one.
    pub fn put_back(&mut self, lines: Vec<Line>) {
        self.own_lines = lines;
    }

    /// Takes off the desk what was charged behind `first`, to be given back: nobody else can give it back as well.
    pub fn take_back(&mut self, first: usize) -> Vec<Share> {
        let split = if first == 0 { 0 } else { self.first_share.min(self.shares.len()) };
        let whole = self.charges.iter_mut().skip(first).filter_map(Charge::take_share);
        whole.chain(self.shares.drain(split..)).collect()
    }

    /// Makes charges that were taken back say so.
    pub fn take_off_costs(&mut self, first: usize, behind: usize) {
        for charge in &mut self.charges[first..behind] {
            charge.usage.used = charge.usage.used.saturating_sub(u64::from(charge.ask.cost));
        }
    }

    /// Puts down what the request asks of each of `lines` where several gateways share counters.
    pub(super) fn put_down_shared<const W: usize>(
        &mut self,
        book: &Book,
        roster: &Roster,
        table: &Table<W>,
        lines: &[Line],
        now_ms: u64,
        first: usize,
    ) {
        self.charges.truncate(first);
        self.lines.truncate(first);
        for line in lines {
            let stand = self.stands[line.rule];
            let Some(asker) = self.askers[line.rule].filter(|_| stand != Stand::Aside) else { continue };
            if self.in_hand.contains(line) {
                continue;
            }
            let mut charge = self.charge(book, roster, *line, asker, now_ms);
            let layer = book.layer_of(roster, *line);
            match stand {
                Stand::Leased => {
                    layer.lease(&mut charge);
                    // More was handed out than this request's limit, which is another one than others have, or had.
                    let handed_out = table.tally(layer.counter(asker), now_ms).map_or(0, |(_, used)| used);
                    if handed_out > layer.capacity && layer.is_used_up(table, asker, &charge, 0, now_ms) {
                        charge.ask.floor = charge.ask.ceiling;
                    }
                }
                Stand::Alone => beside_others(&mut charge, table, now_ms),
                Stand::Own | Stand::Aside => {}
            }
            self.charges.push(charge);
            self.lines.push(*line);
        }
    }

    /// Finds the counters whose fetched tokens have become few: it is looked at each time they have halved, so that
    /// most requests need not.
    fn find_low(&mut self, first: usize) {
        self.low.clear();
        for (i, (charge, line)) in self.charges.iter().zip(&self.lines).enumerate().skip(first) {
            if self.stands[line.rule] == Stand::Leased {
                let left = charge.ask.ceiling.saturating_sub(charge.usage.used);
                if left.leading_zeros() != (left + u64::from(charge.ask.cost)).leading_zeros() {
                    self.low.push(i);
                }
            }
        }
    }

    /// Takes off the desk what was put down behind `first`.
    pub fn rewind(&mut self, first: usize) {
        self.charges.truncate(first);
        self.lines.truncate(first);
    }
}
