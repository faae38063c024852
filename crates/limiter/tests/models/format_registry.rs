//! Models of the format registry: concurrent changes of counter formats are all recorded.

use std::sync::Arc;

use transom_limiter::format_registry::{CounterFormat, CounterFormats, FormatRegistry, RegistryFull};
use transom_limiter::memory::Memory;

use crate::support::{explore, race};

const PLAIN: CounterFormat =
    CounterFormat { accumulates: false, shards: 1, max_ahead: 0, grants: (5, 5), limits_differ: false };
const ROLLS: CounterFormat = CounterFormat { accumulates: true, ..PLAIN };
const SPLIT: CounterFormat = CounterFormat { shards: 3, ..PLAIN };
const OTHER: CounterFormat = CounterFormat { max_ahead: 7, grants: (9, 9), ..PLAIN };

fn ledger(layers: usize) -> FormatRegistry {
    let cells = Memory::heap(0).and_then(|memory| memory.numbers(0, FormatRegistry::numbers(layers)));
    FormatRegistry::new(cells.expect("there is memory"))
}

fn of(all: &[(u64, CounterFormat)]) -> CounterFormats {
    let mut ways = CounterFormats::default();
    all.iter().for_each(|(bits, way)| ways.join(*bits, *way));
    ways
}

fn join(ledger: &FormatRegistry, bits: u64, way: CounterFormat) -> Result<(), RegistryFull> {
    ledger.join(&of(&[(bits, way)]))
}

#[test]
fn two_formats_of_one_layer_merge_into_one_entry() {
    explore(3, || {
        // There is no room for a second entry.
        let ledger = Arc::new(ledger(1));
        let joined = race(&ledger, [|l| join(l, 1, ROLLS), |l| join(l, 1, SPLIT)]);
        assert_eq!(joined, [Ok(()), Ok(())]);
        assert_eq!(ledger.formats(), of(&[(1, ROLLS.join(SPLIT))]));
    });
}

#[test]
fn formats_written_under_another_limit_are_known_in_any_order() {
    explore(3, || {
        let ledger = Arc::new(ledger(1));
        assert_eq!(race(&ledger, [|l| join(l, 1, ROLLS), |l| join(l, 1, OTHER)]), [Ok(()), Ok(())]);
        let way = ledger.formats().get(1).expect("it was joined");
        assert!(way.limits_differ && way.accumulates && way.max_ahead == 7);
    });
}

#[test]
fn two_layers_registered_at_once_have_separate_entries() {
    explore(3, || {
        let ledger = Arc::new(ledger(2));
        let joined = race(&ledger, [|l| join(l, 1, ROLLS), |l| join(l, 2, SPLIT)]);
        assert_eq!(joined, [Ok(()), Ok(())]);
        assert_eq!(ledger.formats(), of(&[(1, ROLLS), (2, SPLIT)]));
    });
}
