//! The first page of a counters file: the layout of the file, so that it is read only as it was written.
//!
//! | bytes | content, little-endian |
//! | --- | --- |
//! | 0..16 | magic, and a number in the byte order of the machine, which the counters use |
//! | 16..20 | version of the layout |
//! | 20..24 | version of the identities of counters: [`identity::VERSION`]; 0 in files written before it was stated |
//! | 24..48 | counter buckets, overflow buckets, slots of a bucket |
//! | 48..64 | hash seed |
//! | 64..100 | boot id of the machine when the file was created |
//! | 4064..4096 | SHA-256 of the page up to here |
//!
//! A page of variable data (the time) and the table follow, each page-aligned. This module opens no file.

use std::fmt;

use sha2::{Digest, Sha256};

use transom_limiter::identity;
use transom_limiter::key::Seed;
use transom_limiter::memory::PAGE_BYTES;
use transom_limiter::table::{BUCKET_SLOTS, TableLayout};

/// Version of the layout, of the counter words, and of the hash function. Files of other versions are not read.
const LAYOUT_VERSION: u32 = 2;
/// The two versions, as counters files and snapshots state them.
pub(super) const VERSION: u64 = LAYOUT_VERSION as u64 | (identity::VERSION as u64) << 32;
const MAGIC: [u8; 12] = *b"transom\0cnts";
/// Differs on a machine of another byte order.
const BYTE_ORDER_MARK: u32 = 0x0102_0304;
const CHECKSUM_AT: usize = PAGE_BYTES - 32;
const BOOT_AT: usize = 64;
/// More than any machine has memory for; sums of these do not overflow.
const SIZE_MAX: u64 = 1 << 40;

/// A boot id, as the kernel writes it (`/proc/sys/kernel/random/boot_id`).
pub type BootId = [u8; 36];

/// The content of the first page.
#[derive(Clone, Copy)]
pub struct Header {
    pub layout: TableLayout,
    pub seed: Seed,
    pub boot: BootId,
}

/// Why a file cannot be used as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnusableFile {
    /// It is not a counters file, and may be valuable.
    Foreign,
    /// Holds the two versions, as the file states them.
    Version(u64),
    Damaged,
    /// It was created before the last boot.
    OtherBoot,
    /// It is for another number of counters.
    OtherCapacity,
    /// Users other than its owner may write to it; holds the mode.
    WritableByOthers(u32),
}

impl fmt::Display for UnusableFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnusableFile::Foreign => f.write_str("it is not a counters file"),
            UnusableFile::Version(version) => f.write_str(&describe_version(*version)),
            UnusableFile::Damaged => f.write_str("it is damaged"),
            UnusableFile::OtherBoot => f.write_str("it was created before this machine was last started"),
            UnusableFile::OtherCapacity => f.write_str("it is for another `counters.capacity`"),
            UnusableFile::WritableByOthers(mode) => write!(f, "its mode is {mode:o}, so others can write to it"),
        }
    }
}

/// Why files of other versions are not read.
pub(super) fn describe_version(version: u64) -> String {
    let (layout, identities) = (version as u32, version >> 32);
    match layout {
        LAYOUT_VERSION => {
            format!(
                "the identities of its counters are version {identities}, and this is version {}",
                identity::VERSION
            )
        }
        _ => format!("its layout is version {layout}, and this is version {LAYOUT_VERSION}"),
    }
}

impl Header {
    pub const BYTES: usize = PAGE_BYTES;
    /// Where the time is.
    pub const TIME_AT: usize = PAGE_BYTES;
    /// Where the table is.
    pub const TABLE_AT: usize = 2 * PAGE_BYTES;

    /// The length of the file.
    pub fn file_bytes(&self) -> usize {
        Header::TABLE_AT.saturating_add(self.layout.bytes()).next_multiple_of(PAGE_BYTES)
    }

    pub fn encode(&self) -> [u8; Header::BYTES] {
        let mut page = [0; Header::BYTES];
        page[..12].copy_from_slice(&MAGIC);
        page[12..16].copy_from_slice(&BYTE_ORDER_MARK.to_ne_bytes());
        let TableLayout { counter_buckets: counters, overflow_buckets: overflow, bucket_slots: slots } = self.layout;
        let numbers = [VERSION, counters as u64, overflow as u64, slots as u64, self.seed.0, self.seed.1];
        for (bytes, number) in page[16..].chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        page[BOOT_AT..BOOT_AT + self.boot.len()].copy_from_slice(&self.boot);
        let checksum = Sha256::digest(&page[..CHECKSUM_AT]);
        page[CHECKSUM_AT..].copy_from_slice(&checksum);
        page
    }

    /// Decodes the first page of a file of `file_bytes` bytes.
    pub fn decode(page: &[u8], file_bytes: u64) -> Result<Header, UnusableFile> {
        if !page.starts_with(&MAGIC) {
            // A length of whole pages is unlikely for any other file; it may be a counters file with a damaged
            // beginning.
            let is_text = !file_bytes.is_multiple_of(PAGE_BYTES as u64);
            return Err(if is_text { UnusableFile::Foreign } else { UnusableFile::Damaged });
        }
        let Some(page) = page.first_chunk::<{ Header::BYTES }>() else { return Err(UnusableFile::Damaged) };
        if page[12..16] != BYTE_ORDER_MARK.to_ne_bytes() {
            return Err(UnusableFile::Damaged);
        }
        let mut numbers = [0; 6];
        for (number, bytes) in numbers.iter_mut().zip(page[16..].as_chunks().0) {
            *number = u64::from_le_bytes(*bytes);
        }
        let [version, counters, overflow, slots, seed_0, seed_1] = numbers;
        if version != VERSION {
            return Err(UnusableFile::Version(version));
        }
        if page[CHECKSUM_AT..] != *Sha256::digest(&page[..CHECKSUM_AT]) {
            return Err(UnusableFile::Damaged);
        }
        if counters.max(overflow) > SIZE_MAX || counters.min(overflow) == 0 || slots != BUCKET_SLOTS as u64 {
            return Err(UnusableFile::Damaged);
        }
        let mut boot = [0; 36];
        boot.copy_from_slice(&page[BOOT_AT..BOOT_AT + 36]);
        let layout = TableLayout {
            counter_buckets: counters as usize,
            overflow_buckets: overflow as usize,
            bucket_slots: BUCKET_SLOTS,
        };
        let header = Header { layout, seed: Seed(seed_0, seed_1), boot };
        if header.file_bytes() as u64 == file_bytes { Ok(header) } else { Err(UnusableFile::Damaged) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_limiter::table::Table;

    fn header() -> Header {
        Header { layout: Table::layout(1000), seed: Seed(1, 2), boot: [b'x'; 36] }
    }

    #[test]
    fn an_encoded_header_is_decoded() {
        let header = header();
        let read = Header::decode(&header.encode(), header.file_bytes() as u64).unwrap();
        assert_eq!((read.layout, read.boot), (header.layout, header.boot));
        assert_eq!((read.seed.0, read.seed.1), (1, 2));
    }

    #[test]
    fn a_header_with_any_bit_changed_is_rejected() {
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
            assert!(matches!(Header::decode(&header.encode(), bytes), Err(UnusableFile::Damaged)));
        }
        assert!(matches!(Header::decode(&header.encode()[..4095], bytes), Err(UnusableFile::Damaged)));
        assert!(matches!(Header::decode(b"root:x:0:0", 10), Err(UnusableFile::Foreign)));
        assert!(matches!(Header::decode(&[], 0), Err(UnusableFile::Damaged)));
    }
}
