//! The first page of a counters file: what lies in it and where, so that it is only ever read as it was written.
//!
//! | bytes | what, little-endian |
//! | --- | --- |
//! | 0..16 | magic, and a number in the machine's own byte order, in which the counters are |
//! | 16..24 | version of the layout |
//! | 24..48 | buckets of counters, buckets of spill counters, slots of a bucket |
//! | 48..56 | layers that the ledger has room for |
//! | 56..72 | seed of the hashes |
//! | 72..108 | id of the boot in which it was made |
//! | 4064..4096 | SHA-256 of the page up to here |
//!
//! Behind it come a page of what changes (the time), the ledger, and the table, each from the start of a page on. This
//! file opens nothing.

use std::fmt;

use sha2::{Digest, Sha256};

use transom_limiter::format_registry::FormatRegistry;
use transom_limiter::key::Seed;
use transom_limiter::memory::PAGE_BYTES;
use transom_limiter::table::{BUCKET_SLOTS, TableLayout};

/// Version of the layout, of the words, and of how keys are hashed: what is written under another means nothing.
const VERSION: u64 = 1;
const MAGIC: [u8; 12] = *b"transom\0cnts";
/// Comes out otherwise on a machine of another byte order.
const ORDER: u32 = 0x0102_0304;
const CHECKSUM_AT: usize = PAGE_BYTES - 32;
const BOOT_AT: usize = 72;
/// More than any machine has memory for; sums of these do not overflow.
const MOST: u64 = 1 << 40;

/// The id of a boot, as the kernel writes it (`/proc/sys/kernel/random/boot_id`).
pub type Boot = [u8; 36];

/// What the first page says.
#[derive(Clone, Copy)]
pub struct Header {
    pub plan: TableLayout,
    /// Layers that the ledger has room for.
    pub layers: usize,
    pub seed: Seed,
    pub boot: Boot,
}

/// Why a file can not be used as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unfit {
    /// It is something else, which may be worth more than counting.
    Foreign,
    Version(u64),
    Damaged,
    /// It was made before the machine was last started.
    Boot,
    /// It is for another number of counters.
    Capacity,
    /// Others than its owner may write to it.
    Mode(u32),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::Foreign => f.write_str("it is no file of counters"),
            Unfit::Version(version) => write!(f, "its layout is version {version}, and this is version {VERSION}"),
            Unfit::Damaged => f.write_str("it is damaged"),
            Unfit::Boot => f.write_str("it was made before this machine was last started"),
            Unfit::Capacity => f.write_str("it is for another `counters.capacity`"),
            Unfit::Mode(mode) => write!(f, "its mode is {mode:o}, so others can write to it"),
        }
    }
}

impl Header {
    pub const BYTES: usize = PAGE_BYTES;
    /// Where the time stands.
    pub const TIME_AT: usize = PAGE_BYTES;
    pub const LEDGER_AT: usize = 2 * PAGE_BYTES;

    pub fn table_at(&self) -> usize {
        let ledger_bytes = size_of::<u64>() * FormatRegistry::numbers(self.layers);
        (Header::LEDGER_AT + ledger_bytes).next_multiple_of(PAGE_BYTES)
    }

    /// How long the file is.
    pub fn file_bytes(&self) -> usize {
        self.table_at().saturating_add(self.plan.bytes()).next_multiple_of(PAGE_BYTES)
    }

    pub fn encode(&self) -> [u8; Header::BYTES] {
        let mut page = [0; Header::BYTES];
        page[..12].copy_from_slice(&MAGIC);
        page[12..16].copy_from_slice(&ORDER.to_ne_bytes());
        let TableLayout { counter_buckets: own, overflow_buckets: spill, bucket_slots: slots } = self.plan;
        let numbers = [VERSION, own as u64, spill as u64, slots as u64, self.layers as u64, self.seed.0, self.seed.1];
        for (bytes, number) in page[16..].chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        page[BOOT_AT..BOOT_AT + self.boot.len()].copy_from_slice(&self.boot);
        let checksum = Sha256::digest(&page[..CHECKSUM_AT]);
        page[CHECKSUM_AT..].copy_from_slice(&checksum);
        page
    }

    /// Reads the page of a file that is `file_bytes` long.
    pub fn decode(page: &[u8], file_bytes: u64) -> Result<Header, Unfit> {
        if !page.starts_with(&MAGIC) {
            // A file of whole pages is none that somebody wrote by hand, and may be one of counters that lost its beginning.
            let is_text = !file_bytes.is_multiple_of(PAGE_BYTES as u64);
            return Err(if is_text { Unfit::Foreign } else { Unfit::Damaged });
        }
        let Some(page) = page.first_chunk::<{ Header::BYTES }>() else { return Err(Unfit::Damaged) };
        if page[12..16] != ORDER.to_ne_bytes() {
            return Err(Unfit::Damaged);
        }
        let mut numbers = [0; 7];
        for (number, bytes) in numbers.iter_mut().zip(page[16..].as_chunks().0) {
            *number = u64::from_le_bytes(*bytes);
        }
        let [version, own, spill, slots, layers, place, tag] = numbers;
        if version != VERSION {
            return Err(Unfit::Version(version));
        }
        if page[CHECKSUM_AT..] != *Sha256::digest(&page[..CHECKSUM_AT]) {
            return Err(Unfit::Damaged);
        }
        if own.max(spill).max(layers) > MOST || own.min(spill) == 0 || slots != BUCKET_SLOTS as u64 {
            return Err(Unfit::Damaged);
        }
        let mut boot = [0; 36];
        boot.copy_from_slice(&page[BOOT_AT..BOOT_AT + 36]);
        let plan =
            TableLayout { counter_buckets: own as usize, overflow_buckets: spill as usize, bucket_slots: BUCKET_SLOTS };
        let header = Header { plan, layers: layers as usize, seed: Seed(place, tag), boot };
        if header.file_bytes() as u64 == file_bytes { Ok(header) } else { Err(Unfit::Damaged) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_limiter::table::Table;

    fn header() -> Header {
        Header { plan: Table::layout(1000), layers: 100, seed: Seed(1, 2), boot: [b'x'; 36] }
    }

    #[test]
    fn what_was_written_is_read() {
        let header = header();
        let read = Header::decode(&header.encode(), header.file_bytes() as u64).unwrap();
        assert_eq!((read.plan, read.layers, read.boot), (header.plan, header.layers, header.boot));
        assert_eq!((read.seed.0, read.seed.1), (1, 2));
    }

    #[test]
    fn no_bit_can_be_otherwise() {
        let header = header();
        let (page, bytes) = (header.encode(), header.file_bytes() as u64);
        for bit in 0..8 * page.len() {
            let mut page = page;
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&page, bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_file_of_another_length_is_damaged() {
        let header = header();
        let bytes = header.file_bytes() as u64;
        for bytes in [0, 4096, bytes - 1, bytes + 1] {
            assert!(matches!(Header::decode(&header.encode(), bytes), Err(Unfit::Damaged)));
        }
        assert!(matches!(Header::decode(&header.encode()[..4095], bytes), Err(Unfit::Damaged)));
        assert!(matches!(Header::decode(b"root:x:0:0", 10), Err(Unfit::Foreign)));
        assert!(matches!(Header::decode(&[], 0), Err(Unfit::Damaged)));
    }
}
