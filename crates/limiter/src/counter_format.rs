//! How the layers of a book write their counters, so that whoever comes later reads them.
//!
//! A word does not tell whether windows hang together in it, nor into how many shards a counter was split. What the rules say is
//! joined with what was written before, and held to what others know who count in the same memory. How a store has
//! counters that gateways share follows from the rules alone.

use crate::counter::WindowKind;
use crate::format_registry::{CounterFormat, CounterFormats};
use crate::rule_set::{Layer, RuleSet, StoreFormat};

impl Layer {
    fn way(&self) -> CounterFormat {
        CounterFormat {
            rolls: self.course != WindowKind::Plain,
            shards: self.shards,
            ahead_most: self.ahead_most,
            grants: (self.limit, self.capacity),
            differ: self.differs,
        }
    }
}

impl RuleSet {
    pub(super) fn settle_forms(&mut self) {
        for layer in self.entries.iter_mut().flat_map(|entry| &mut entry.layers) {
            layer.shards_elsewhere = layer.shards;
            layer.form = match layer.course {
                WindowKind::Plain | WindowKind::Leased => StoreFormat::Plain,
                WindowKind::Grid(_) => StoreFormat::Account,
                WindowKind::Floating(_) => StoreFormat::Floating,
            };
        }
    }

    /// How the layers write their counters. Those of one counter, such as those of a rule's plans, do it in one way:
    /// as tokens that roll over if they do in one of them, and in as many shards as the most of them have.
    pub fn ways(&self) -> CounterFormats {
        let mut ways = CounterFormats::default();
        for layer in self.entries.iter().flat_map(|entry| &entry.layers) {
            ways.join(layer.bits, layer.way());
        }
        ways
    }

    /// Reads counters as they were written, in one of these ways or another.
    pub fn agree(&mut self, ways: &CounterFormats) {
        for layer in self.entries.iter_mut().flat_map(|entry| &mut entry.layers) {
            let Some(way) = ways.get(layer.bits).map(|known| layer.way().join(known)) else { continue };
            if way.rolls && layer.course == WindowKind::Plain {
                layer.course = WindowKind::Grid(layer.timeline as u32);
            }
            layer.shards = if way.rolls { 1 } else { way.shards };
            layer.differs = way.differ;
            layer.ahead_most = way.ahead_most;
        }
    }

    /// Writes counters in no other way than these: others count in the same memory, and know of no other. A layer that
    /// would roll over, wait or reserve has windows that stand for themselves then, and what would be owed is not.
    /// `true` if there is one that would do otherwise.
    pub fn abide_by(&mut self, ways: &CounterFormats) -> bool {
        let mut holds = false;
        for layer in self.entries.iter_mut().flat_map(|entry| &mut entry.layers) {
            let (own, known) = (layer.way(), ways.get(layer.bits).unwrap_or(CounterFormat::PLAIN));
            holds |= layer.shards > known.shards;
            layer.shards = layer.shards.min(known.shards);
            // Windows that requests open are never read otherwise.
            let rolls = own.rolls && !known.rolls && !matches!(layer.course, WindowKind::Floating(_));
            if rolls || own.ahead_most > known.ahead_most {
                holds = true;
                layer.is_held = true;
                layer.capacity = layer.limit;
                layer.reserve = 0;
                layer.ahead_most = known.ahead_most;
            }
            if rolls {
                layer.course = WindowKind::Plain;
            }
        }
        holds
    }
}
