//! How the layers of a book write their counters, so that whoever comes later reads them.
//!
//! A word does not tell whether windows hang together in it, nor into how many shards a counter was split. What the rules say is
//! joined with what was written before, and held to what others know who count in the same memory. How a store has
//! counters that gateways share follows from the rules alone.

use crate::counter::WindowKind;
use crate::format_registry::{CounterFormat, CounterFormats};
use crate::rule_set::{CompiledLayer, RuleSet, StoreFormat};

impl CompiledLayer {
    fn counter_format(&self) -> CounterFormat {
        CounterFormat {
            accumulates: self.kind != WindowKind::Plain,
            shards: self.shards,
            max_ahead: self.max_ahead,
            grants: (self.limit, self.capacity),
            limits_differ: self.limit_differs,
        }
    }
}

impl RuleSet {
    pub(super) fn set_store_formats(&mut self) {
        for layer in self.rules.iter_mut().flat_map(|entry| &mut entry.layers) {
            layer.store_shards = layer.shards;
            layer.store_format = match layer.kind {
                WindowKind::Plain | WindowKind::Leased => StoreFormat::Plain,
                WindowKind::Grid(_) => StoreFormat::Account,
                WindowKind::Floating(_) => StoreFormat::Floating,
            };
        }
    }

    /// How the layers write their counters. Those of one counter, such as those of a rule's plans, do it in one way:
    /// as tokens that roll over if they do in one of them, and in as many shards as the most of them have.
    pub fn counter_formats(&self) -> CounterFormats {
        let mut formats = CounterFormats::default();
        for layer in self.rules.iter().flat_map(|entry| &entry.layers) {
            formats.join(layer.id, layer.counter_format());
        }
        formats
    }

    /// Reads counters as they were written, in one of these ways or another.
    pub fn adopt_formats(&mut self, formats: &CounterFormats) {
        for layer in self.rules.iter_mut().flat_map(|entry| &mut entry.layers) {
            let Some(format) = formats.get(layer.id).map(|known| layer.counter_format().join(known)) else { continue };
            if format.accumulates && layer.kind == WindowKind::Plain {
                layer.kind = WindowKind::Grid(layer.windows_index as u32);
            }
            layer.shards = if format.accumulates { 1 } else { format.shards };
            layer.limit_differs = format.limits_differ;
            layer.max_ahead = format.max_ahead;
        }
    }

    /// Writes counters in no other way than these: others count in the same memory, and know of no other. A layer that
    /// would roll over, wait or reserve has windows that stand for themselves then, and what would be owed is not.
    /// `true` if there is one that would do otherwise.
    pub fn restrict_to_formats(&mut self, formats: &CounterFormats) -> bool {
        let mut holds = false;
        for layer in self.rules.iter_mut().flat_map(|entry| &mut entry.layers) {
            let (own, known) = (layer.counter_format(), formats.get(layer.id).unwrap_or(CounterFormat::PLAIN));
            holds |= layer.shards > known.shards;
            layer.shards = layer.shards.min(known.shards);
            // Windows that requests open are never read otherwise.
            let rolls = own.accumulates && !known.accumulates && !matches!(layer.kind, WindowKind::Floating(_));
            if rolls || own.max_ahead > known.max_ahead {
                holds = true;
                layer.is_constrained = true;
                layer.capacity = layer.limit;
                layer.reserve = 0;
                layer.max_ahead = known.max_ahead;
            }
            if rolls {
                layer.kind = WindowKind::Plain;
            }
        }
        holds
    }
}
