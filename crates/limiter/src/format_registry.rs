//! The formats of each layer's counters, stored next to the counters.
//!
//! A counter's word does not show whether its windows depend on each other, and its key does not show the number of
//! shards. Both follow from the configuration, and counters outlive it. After a change of the configuration, or in
//! another process, counters are read in the format in which they were written. Formats are therefore only joined, and
//! never removed. A layer with plain, unsharded counters has no entry. While several processes count, all use only
//! formats that all of them know: those in the registry. A layer is identified by 64 bits.

use std::collections::HashMap;

use crate::atomics::{AtomicU64, Ordering};
use crate::memory::{AtomicSlice, LINE_BYTES};
use crate::sharded_counter::SHARDS_MAX;

/// Numbers per entry.
const ENTRY_NUMBERS: usize = LINE_BYTES / 2 / size_of::<u64>();

/// The format of a layer's counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterFormat {
    /// Whether windows depend on each other.
    pub accumulates: bool,
    /// Shards of each counter; at least 1.
    pub shards: u32,
    /// The most tokens that can be owed by delayed requests.
    pub max_ahead: u64,
    /// The limit and the capacity of the layer when its counters were written; `limits_differ` if there were several.
    pub grants: (u32, u32),
    /// Whether counters were also written under other limits.
    pub limits_differ: bool,
}

impl CounterFormat {
    /// The format of a layer without an entry.
    pub const PLAIN: CounterFormat =
        CounterFormat { accumulates: false, shards: 1, max_ahead: 0, grants: (0, 0), limits_differ: false };

    /// Whether words of this format can be read without knowing the format.
    pub fn is_plain(&self) -> bool {
        !self.accumulates && self.shards == 1 && self.max_ahead == 0
    }

    /// The format that can read both.
    pub fn join(self, other: CounterFormat) -> CounterFormat {
        CounterFormat {
            accumulates: self.accumulates | other.accumulates,
            shards: self.shards.max(other.shards),
            max_ahead: self.max_ahead.max(other.max_ahead),
            grants: self.grants,
            limits_differ: self.limits_differ | other.limits_differ | (self.grants != other.grants),
        }
    }
}

/// The formats of layers, by their id.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CounterFormats(HashMap<u64, CounterFormat>);

impl CounterFormats {
    /// The format of the layer with this id.
    pub fn get(&self, layer_id: u64) -> Option<CounterFormat> {
        self.0.get(&layer_id).copied()
    }

    /// Joins a format with the known format of the layer.
    pub fn join(&mut self, layer_id: u64, format: CounterFormat) {
        self.0.entry(layer_id).and_modify(|known| *known = known.join(format)).or_insert(format);
    }

    /// Whether a process that knows these formats can read counters written in `those`.
    pub fn covers(&self, those: &CounterFormats) -> bool {
        those.non_plain().all(|(layer_id, format)| self.get(layer_id).is_some_and(|known| known.join(format) == known))
    }

    /// The formats that cannot be read without knowing them.
    pub fn non_plain(&self) -> impl Iterator<Item = (u64, CounterFormat)> {
        self.0.iter().filter(|(_, format)| !format.is_plain()).map(|(layer_id, format)| (*layer_id, *format))
    }
}

/// The registry has no free entry for another layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegistryFull;

/// The formats of layers in shared memory.
pub struct FormatRegistry {
    /// The entries, each in half a cache line.
    cells: AtomicSlice<AtomicU64>,
}

/// An entry: the id of its layer, or 0, followed by the fields of the format.
struct RegistryEntry<'l>(&'l [AtomicU64; ENTRY_NUMBERS]);

impl FormatRegistry {
    /// How many numbers a registry for `layers` layers takes.
    pub const fn numbers(layers: usize) -> usize {
        layers.saturating_mul(ENTRY_NUMBERS)
    }

    /// A registry in these numbers, which are 0 or were written by a registry before. Other contents are taken for
    /// layers that do not exist.
    pub fn new(cells: AtomicSlice<AtomicU64>) -> FormatRegistry {
        FormatRegistry { cells }
    }

    fn entries(&self) -> impl Iterator<Item = RegistryEntry<'_>> {
        self.cells.as_chunks().0.iter().map(RegistryEntry)
    }

    /// Joins formats with the stored ones. To be called before a counter is written in a new format, and while no
    /// process counts that does not know the format.
    ///
    /// # Errors
    ///
    /// [`RegistryFull`]; some of the formats may have been stored.
    pub fn join(&self, formats: &CounterFormats) -> Result<(), RegistryFull> {
        for (layer_id, format) in formats.non_plain() {
            self.entries().find(|entry| entry.claim_for(layer_id)).ok_or(RegistryFull)?.join(format);
        }
        Ok(())
    }

    /// All stored formats.
    pub fn formats(&self) -> CounterFormats {
        let mut formats = CounterFormats::default();
        // Entries are never removed, so the first empty entry is the end.
        for (layer_id, format) in self.entries().map_while(|entry| entry.read()) {
            formats.join(layer_id, format);
        }
        formats
    }
}

impl RegistryEntry<'_> {
    /// Whether the entry belongs to this layer. Claims an empty entry.
    fn claim_for(&self, layer_id: u64) -> bool {
        // Ordering: the fields are read and changed one by one, and each only grows.
        let claimed = self.0[0].compare_exchange(0, layer_id, Ordering::AcqRel, Ordering::Acquire);
        claimed.is_ok() || claimed == Err(layer_id)
    }

    fn join(&self, format: CounterFormat) {
        let [_, accumulates, shards, max_ahead, grants, differ, ..] = self.0;
        let own = u64::from(format.grants.0) << 32 | u64::from(format.grants.1);
        // Ordering: relaxed; each number is independent.
        let known = match grants.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_none) => own,
            Err(known) => known,
        };
        let raise = |number: &AtomicU64, least: u64| _ = number.fetch_max(least, Ordering::Relaxed);
        raise(accumulates, u64::from(format.accumulates));
        raise(shards, u64::from(format.shards));
        raise(max_ahead, format.max_ahead);
        raise(differ, u64::from(format.limits_differ || known != own));
    }

    fn read(&self) -> Option<(u64, CounterFormat)> {
        // Ordering: relaxed; a process that must know a format was started, or given the rules, after it was joined.
        let [layer_id, accumulates, shards, max_ahead, grants, differ, ..] =
            self.0.each_ref().map(|n| n.load(Ordering::Relaxed));
        let format = CounterFormat {
            accumulates: accumulates != 0,
            shards: shards.clamp(1, u64::from(SHARDS_MAX)) as u32,
            max_ahead,
            grants: ((grants >> 32) as u32, grants as u32),
            limits_differ: differ != 0,
        };
        (layer_id != 0).then_some((layer_id, format))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    const PLAIN: CounterFormat =
        CounterFormat { accumulates: false, shards: 1, max_ahead: 0, grants: (5, 5), limits_differ: false };

    fn registry(layers: usize) -> FormatRegistry {
        let numbers = FormatRegistry::numbers(layers);
        FormatRegistry::new(Memory::heap(8 * numbers).unwrap().numbers(0, numbers).unwrap())
    }

    fn formats_of(all: &[(u64, CounterFormat)]) -> CounterFormats {
        let mut formats = CounterFormats::default();
        all.iter().for_each(|(layer_id, format)| formats.join(*layer_id, *format));
        formats
    }

    #[test]
    fn stored_formats_are_read_and_joined() {
        let registry = registry(2);
        assert_eq!(registry.formats(), CounterFormats::default());
        let rolling = CounterFormat { accumulates: true, ..PLAIN };
        assert_eq!(registry.join(&formats_of(&[(1, PLAIN), (2, rolling)])), Ok(()));
        assert_eq!(registry.formats(), formats_of(&[(2, rolling)]));
        assert!(registry.formats().covers(&formats_of(&[(1, PLAIN), (2, rolling)])));
        let split = CounterFormat { shards: 4, grants: (6, 6), ..PLAIN };
        assert!(!registry.formats().covers(&formats_of(&[(2, split)])));
        assert_eq!(registry.join(&formats_of(&[(2, split)])), Ok(()));
        assert!(registry.formats().covers(&formats_of(&[(2, split)])));
        assert_eq!(registry.formats().get(2), Some(CounterFormat { shards: 4, limits_differ: true, ..rolling }));
    }

    #[test]
    fn a_full_registry_reports_it() {
        let registry = registry(1);
        let rolling = CounterFormat { accumulates: true, ..PLAIN };
        assert_eq!(registry.join(&formats_of(&[(1, rolling)])), Ok(()));
        assert_eq!(registry.join(&formats_of(&[(2, rolling)])), Err(RegistryFull));
    }

    #[test]
    fn any_contents_can_be_read() {
        let numbers = FormatRegistry::numbers(1);
        let cells = Memory::heap(8 * numbers).unwrap().numbers(0, numbers).unwrap();
        cells.iter().for_each(|cell| cell.store(u64::MAX, Ordering::Relaxed));
        let format = FormatRegistry::new(cells).formats().get(u64::MAX).unwrap();
        assert_eq!((format.shards, format.accumulates, format.limits_differ), (SHARDS_MAX, true, true));
    }
}
