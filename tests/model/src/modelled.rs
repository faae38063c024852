//! The counting room on loom's atomics: the same files, another door.
//!
//! It does not know what is checked; the models under `tests/models` do.

#[path = "../../../src/count/charge.rs"]
pub mod charge;
#[path = "../../../src/count/lease.rs"]
pub mod lease;
#[path = "../../../src/count/ledger.rs"]
pub mod ledger;
pub mod memory;
#[path = "../../../src/count/pace.rs"]
pub mod pace;
#[path = "../../../src/count/queue.rs"]
pub mod queue;
#[path = "../../../src/count/region.rs"]
pub mod region;
#[path = "../../../src/count/shard.rs"]
pub mod shard;
pub mod sync;
#[path = "../../../src/count/table.rs"]
pub mod table;
#[path = "../../../src/count/word.rs"]
pub mod word;
