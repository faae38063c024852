//! Models of the format registry: concurrent changes of counter formats are all recorded.

use std::sync::Arc;

use transom_limiter::format_registry::{CounterFormat, CounterFormats, FormatRegistry, RegistryFull};
use transom_limiter::memory::Memory;

use crate::support::{explore, race};

const PLAIN: CounterFormat =
    CounterFormat { accumulates: false, shards: 1, max_ahead: 0, grants: (5, 5), limits_differ: false };
const ACCUMULATING: CounterFormat = CounterFormat { accumulates: true, ..PLAIN };
const SHARDED: CounterFormat = CounterFormat { shards: 3, ..PLAIN };
const OTHER_LIMIT: CounterFormat = CounterFormat { max_ahead: 7, grants: (9, 9), ..PLAIN };

fn registry(layers: usize) -> FormatRegistry {
    let cells = Memory::heap(0).and_then(|memory| memory.numbers(0, FormatRegistry::numbers(layers)));
    FormatRegistry::new(cells.expect("there is memory"))
}

fn formats_of(all: &[(u64, CounterFormat)]) -> CounterFormats {
    let mut formats = CounterFormats::default();
    all.iter().for_each(|(bits, format)| formats.join(*bits, *format));
    formats
}

fn join(registry: &FormatRegistry, bits: u64, format: CounterFormat) -> Result<(), RegistryFull> {
    registry.join(&formats_of(&[(bits, format)]))
}

#[test]
fn two_formats_of_one_layer_merge_into_one_entry() {
    explore(3, || {
        // The registry has no space for a second entry.
        let registry = Arc::new(registry(1));
        let joined = race(&registry, [|l| join(l, 1, ACCUMULATING), |l| join(l, 1, SHARDED)]);
        assert_eq!(joined, [Ok(()), Ok(())]);
        assert_eq!(registry.formats(), formats_of(&[(1, ACCUMULATING.join(SHARDED))]));
    });
}

#[test]
fn formats_written_under_another_limit_are_known_in_any_order() {
    explore(3, || {
        let registry = Arc::new(registry(1));
        assert_eq!(race(&registry, [|l| join(l, 1, ACCUMULATING), |l| join(l, 1, OTHER_LIMIT)]), [Ok(()), Ok(())]);
        let format = registry.formats().get(1).expect("it was joined");
        assert!(format.limits_differ && format.accumulates && format.max_ahead == 7);
    });
}

#[test]
fn two_layers_registered_at_once_have_separate_entries() {
    explore(3, || {
        let registry = Arc::new(registry(2));
        let joined = race(&registry, [|l| join(l, 1, ACCUMULATING), |l| join(l, 2, SHARDED)]);
        assert_eq!(joined, [Ok(()), Ok(())]);
        assert_eq!(registry.formats(), formats_of(&[(1, ACCUMULATING), (2, SHARDED)]));
    });
}
