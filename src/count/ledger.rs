//! How the counters of each layer have been written, kept beside the counters.
//!
//! A word does not tell whether windows hang together in it, nor a key into how many shards its counter was split:
//! that is the configuration's to say, and counters outlive it. Whoever takes them over, after a change of the
//! configuration or in another process, reads them as they were written, and so writes them in a way in which both
//! would be read. Ways are therefore only ever joined, and never taken away. A layer whose counters are plain and
//! whole has no entry. This file does not know what a rule is: a layer is 64 bits.

use std::collections::HashMap;

use super::memory::{Cells, LINE_BYTES};
use super::shard::SHARDS_MAX;
use super::sync::{AtomicU64, Ordering};

/// Numbers of an entry, and of what stands before the first one.
const ENTRY: usize = LINE_BYTES / 2 / size_of::<u64>();

/// How the counters of a layer are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    /// Windows hang together in them.
    pub rolls: bool,
    /// Into how many each is split; at least 1.
    pub shards: u32,
    /// The most that was promised of windows to come.
    pub ahead_most: u64,
    /// The limit and the capacity of one who wrote them.
    pub grants: (u32, u32),
    /// Whether another who wrote them had others.
    pub differ: bool,
}

impl Way {
    /// Whether a word written so tells all.
    pub fn is_plain(&self) -> bool {
        !self.rolls && self.shards == 1 && self.ahead_most == 0
    }

    /// The way that serves for both.
    pub fn join(self, other: Way) -> Way {
        Way {
            rolls: self.rolls | other.rolls,
            shards: self.shards.max(other.shards),
            ahead_most: self.ahead_most.max(other.ahead_most),
            grants: self.grants,
            differ: self.differ | other.differ | (self.grants != other.grants),
        }
    }
}

/// The ways of layers, by their bits.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ways(HashMap<u64, Way>);

impl Ways {
    pub fn get(&self, bits: u64) -> Option<Way> {
        self.0.get(&bits).copied()
    }

    pub fn join(&mut self, bits: u64, way: Way) {
        self.0.entry(bits).and_modify(|known| *known = known.join(way)).or_insert(way);
    }

    /// Those that are not to be told from a word alone.
    pub fn special(&self) -> impl Iterator<Item = (u64, Way)> {
        self.0.iter().filter(|(_, way)| !way.is_plain()).map(|(bits, way)| (*bits, *way))
    }
}

/// There is no room for the ways of so many layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// The ways of layers in memory that is shared.
pub struct Ledger {
    /// First how often it was changed, then the entries, each in half a line.
    cells: Cells<AtomicU64>,
}

/// An entry: whose it is, or 0, and then the parts of the way.
struct Entry<'l>(&'l [AtomicU64; ENTRY]);

impl Ledger {
    /// How many numbers a ledger for so many layers takes.
    pub const fn numbers(layers: usize) -> usize {
        (layers + 1).saturating_mul(ENTRY)
    }

    /// In these cells, all 0 or written by a ledger before; any others are taken for layers that nobody asks for.
    pub fn new(cells: Cells<AtomicU64>) -> Ledger {
        Ledger { cells }
    }

    fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        self.cells.as_chunks().0.iter().skip(1).map(Entry)
    }

    /// How often it was changed.
    pub fn changes(&self) -> u64 {
        // Ordering: acquire, so that who sees the number sees the change.
        self.cells.first().map_or(0, |changes| changes.load(Ordering::Acquire))
    }

    /// Adds ways to those that are there; `true` if that changed any. To be done before a counter is written so.
    pub fn join(&self, ways: &Ways) -> Result<bool, Full> {
        let mut changed = false;
        for (bits, way) in ways.special() {
            let entry = self.entries().find(|entry| entry.is_of(bits)).ok_or(Full)?;
            changed |= entry.join(way);
        }
        if let Some(changes) = self.cells.first().filter(|_| changed) {
            // Ordering: release, see `changes`.
            changes.fetch_add(1, Ordering::Release);
        }
        Ok(changed)
    }

    /// All that are there.
    pub fn ways(&self) -> Ways {
        let mut ways = Ways::default();
        // Entries are never taken away, so behind one that is nobody's there is none.
        for (bits, way) in self.entries().map_while(|entry| entry.read()) {
            ways.join(bits, way);
        }
        ways
    }
}

impl Entry<'_> {
    /// Whether it belongs to this layer, after it was claimed for it if it was nobody's.
    fn is_of(&self, bits: u64) -> bool {
        // Ordering: the parts are read and changed one by one, and each only grows.
        let claimed = self.0[0].compare_exchange(0, bits, Ordering::AcqRel, Ordering::Acquire);
        claimed.is_ok_and(|_nobodys| true) || claimed == Err(bits)
    }

    /// `true` if that changed it.
    fn join(&self, way: Way) -> bool {
        let [_, rolls, shards, ahead_most, grants, differ, ..] = self.0;
        let own = u64::from(way.grants.0) << 32 | u64::from(way.grants.1);
        // Ordering: published by the number of changes.
        let known = match grants.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_none) => own,
            Err(known) => known,
        };
        let mut changed = raise(rolls, u64::from(way.rolls));
        changed |= raise(shards, u64::from(way.shards));
        changed |= raise(ahead_most, way.ahead_most);
        changed | raise(differ, u64::from(way.differ || known != own))
    }

    fn read(&self) -> Option<(u64, Way)> {
        // Ordering: relaxed; who has to see a change has seen the number of changes before.
        let [bits, rolls, shards, ahead_most, grants, differ, ..] =
            self.0.each_ref().map(|n| n.load(Ordering::Relaxed));
        let way = Way {
            rolls: rolls != 0,
            shards: shards.clamp(1, u64::from(SHARDS_MAX)) as u32,
            ahead_most,
            grants: ((grants >> 32) as u32, grants as u32),
            differ: differ != 0,
        };
        (bits != 0).then_some((bits, way))
    }
}

fn raise(number: &AtomicU64, least: u64) -> bool {
    number.fetch_max(least, Ordering::Relaxed) < least
}

#[cfg(test)]
mod tests {
    use super::super::memory::Memory;
    use super::*;

    const PLAIN: Way = Way { rolls: false, shards: 1, ahead_most: 0, grants: (5, 5), differ: false };

    fn ledger(layers: usize) -> Ledger {
        let numbers = Ledger::numbers(layers);
        Ledger::new(Memory::heap(8 * numbers).unwrap().numbers(0, numbers).unwrap())
    }

    fn ways(all: &[(u64, Way)]) -> Ways {
        let mut ways = Ways::default();
        all.iter().for_each(|(bits, way)| ways.join(*bits, *way));
        ways
    }

    #[test]
    fn what_was_written_is_read_and_joined() {
        let ledger = ledger(2);
        assert_eq!(ledger.ways(), Ways::default());
        let rolling = Way { rolls: true, ..PLAIN };
        assert_eq!(ledger.join(&ways(&[(1, PLAIN), (2, rolling)])), Ok(true));
        assert_eq!(ledger.ways(), ways(&[(2, rolling)]));
        assert_eq!((ledger.join(&ways(&[(2, rolling)])), ledger.changes()), (Ok(false), 1));
        let split = Way { shards: 4, grants: (6, 6), ..PLAIN };
        assert_eq!((ledger.join(&ways(&[(2, split)])), ledger.changes()), (Ok(true), 2));
        assert_eq!(ledger.ways().get(2), Some(Way { shards: 4, differ: true, ..rolling }));
    }

    #[test]
    fn a_full_ledger_says_so() {
        let ledger = ledger(1);
        let rolling = Way { rolls: true, ..PLAIN };
        assert_eq!(ledger.join(&ways(&[(1, rolling)])), Ok(true));
        assert_eq!(ledger.join(&ways(&[(2, rolling)])), Err(Full));
    }

    #[test]
    fn any_bits_are_read() {
        let numbers = Ledger::numbers(1);
        let cells = Memory::heap(8 * numbers).unwrap().numbers(0, numbers).unwrap();
        cells.iter().for_each(|cell| cell.store(u64::MAX, Ordering::Relaxed));
        let way = Ledger::new(cells).ways().get(u64::MAX).unwrap();
        assert_eq!((way.shards, way.rolls, way.differ), (SHARDS_MAX, true, true));
    }
}
