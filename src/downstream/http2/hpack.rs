//! Heads of requests as HTTP/2 carries them (HPACK, RFC 7541), scanned before h2 decodes them.
//!
//! h2 ends the connection for a field that is not valid, where RFC 9113, section 8.1.1, asks for an error of that stream alone; and it
//! decodes thousands of fields before anybody can refuse them. A block of fields that is valid and within the limits goes to
//! h2 unchanged. Any other is replaced by one that changes the dynamic table in the same way and has little else.
//!
//! Of the dynamic table only what tells lengths and kinds is kept here. This file knows nothing of frames.

use std::collections::VecDeque;

use http::Method;

use crate::config::byte_set;
use crate::downstream::http2::huffman;

/// SETTINGS_HEADER_TABLE_SIZE, which the gateway does not change.
const TABLE_MAX_BYTES: usize = 4096;

/// What a field adds to its name and value (RFC 7541, section 4.1; RFC 9113, section 6.5.2).
const FIELD_BYTES: usize = 32;

/// Clients send a Cookie in pieces (RFC 9113, section 8.2.3), which count as one field, up to so many for each field that a head may have.
const COOKIES_PER_FIELD: usize = 2;

/// A field that makes a request malformed, and its stream an error. h2 has nothing else to find in such a block.
pub const MALFORMED: &[u8] = b"\x00\x0aconnection\x00";
/// An index that does not exist: an error of the connection.
const UNDECODABLE: &[u8] = b"\x80";

/// What a head may have.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Fields, with `:authority` and without the other pseudo-header fields.
    pub fields: usize,
    /// Bytes of all names and values, and `FIELD_BYTES` for each.
    pub bytes: usize,
}

/// What is wrong with a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockError {
    /// A field is not valid: an error of the stream.
    Malformed,
    /// There is more than the limits allow. `by_h2`: even what has to stay is, so h2 answers 431.
    TooLarge { by_h2: bool },
    /// No decoder could go on: an error of the connection.
    Undecodable,
}

/// What a scan has found.
#[derive(Debug)]
pub struct ScanResult {
    /// Bytes of all fields, as they count against the limits.
    pub bytes: usize,
    /// What is wrong, and the block that takes the place of this one.
    pub error: Option<(BlockError, Vec<u8>)>,
}

/// What a name says of its values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FieldKind {
    Method,
    Authority,
    Path,
    Scheme,
    Protocol,
    Te,
    Cookie,
    Plain,
    /// No name that a request may have.
    Invalid,
}

/// A field, as far as is remembered of it.
#[derive(Clone, Copy, Debug)]
struct Entry {
    kind: FieldKind,
    name: u32,
    value: u32,
    is_valid: bool,
}

impl Entry {
    fn bytes(&self) -> usize {
        (self.name + self.value) as usize + FIELD_BYTES
    }
}

/// The dynamic table (RFC 7541, section 2.3.2); the last entry is the first.
#[derive(Debug)]
struct Table {
    entries: VecDeque<Entry>,
    bytes: usize,
    max_bytes: usize,
}

impl Table {
    fn get(&self, index: usize) -> Option<Entry> {
        match index.checked_sub(1)? {
            at if at < STATIC.len() => Some(STATIC[at]),
            at => self.entries.get(at - STATIC.len()).copied(),
        }
    }

    fn insert(&mut self, entry: Entry) {
        self.shrink(self.max_bytes.saturating_sub(entry.bytes()));
        // One that is larger than the table leaves it empty.
        if self.bytes + entry.bytes() <= self.max_bytes {
            self.bytes += entry.bytes();
            self.entries.push_front(entry);
        }
    }

    fn shrink(&mut self, bytes: usize) {
        while self.bytes > bytes {
            self.bytes -= self.entries.pop_back().map_or(self.bytes, |entry| entry.bytes());
        }
    }
}

/// Scans the blocks of one connection, each once and in their order.
#[derive(Debug)]
pub struct HpackScanner {
    table: Table,
    limits: Limits,
    /// Memory for a string in Huffman code.
    decoded: Vec<u8>,
}

/// What a block has so far.
#[derive(Default)]
struct BlockTotals {
    fields: usize,
    cookies: usize,
    bytes: usize,
    /// The kinds that there have been, as bits.
    kinds: u16,
    is_malformed: bool,
    is_too_large: bool,
    /// What is left of the block, once something is wrong, and how many bytes of fields that is.
    replacement: Option<Vec<u8>>,
    replacement_bytes: usize,
}

impl BlockTotals {
    fn add(&mut self, entry: Entry, most_bytes: usize, limits: Limits) {
        let kind = 1 << entry.kind as u16;
        match entry.kind {
            FieldKind::Cookie => self.cookies += 1,
            FieldKind::Te | FieldKind::Plain | FieldKind::Invalid => self.fields += 1,
            FieldKind::Method | FieldKind::Authority | FieldKind::Path | FieldKind::Scheme | FieldKind::Protocol => {
                self.fields += usize::from(entry.kind == FieldKind::Authority);
                // Each comes once, before all other fields.
                self.is_malformed |= self.kinds & kind != 0 || self.kinds >= 1 << FieldKind::Te as u16;
            }
        }
        self.kinds |= kind;
        self.bytes += entry.bytes();
        self.is_malformed |= !entry.is_valid;
        self.is_too_large |= self.bytes >= most_bytes
            || self.fields + usize::from(self.cookies > 0) > limits.fields
            || self.cookies > limits.fields * COOKIES_PER_FIELD;
    }
}

impl HpackScanner {
    pub fn new(limits: Limits) -> HpackScanner {
        let table = Table { entries: VecDeque::new(), bytes: 0, max_bytes: TABLE_MAX_BYTES };
        HpackScanner { table, limits, decoded: Vec::new() }
    }

    /// Scans a block, for whose fields there is no more room than this.
    pub fn scan(&mut self, block: &[u8], room: usize) -> ScanResult {
        let mut tally = BlockTotals::default();
        if self.scan_fields(block, room, &mut tally).is_none() {
            return ScanResult { bytes: tally.bytes, error: Some((BlockError::Undecodable, UNDECODABLE.to_vec())) };
        }
        let flaw = tally.replacement.map(|mut left| {
            let flaw = if tally.is_malformed {
                left.extend_from_slice(MALFORMED);
                BlockError::Malformed
            } else {
                BlockError::TooLarge { by_h2: tally.replacement_bytes >= self.limits.bytes }
            };
            (flaw, left)
        });
        ScanResult { bytes: tally.bytes, error: flaw }
    }

    /// `None`: no decoder could go on.
    fn scan_fields(&mut self, block: &[u8], room: usize, tally: &mut BlockTotals) -> Option<()> {
        let most_bytes = room.min(self.limits.bytes);
        let mut reader = Reader { block, at: 0 };
        let mut may_resize = true;
        while let Some(&first) = block.get(reader.at) {
            let start = reader.at;
            if first & 0xe0 == 0x20 {
                let max_bytes = reader.int(5)?;
                if max_bytes > TABLE_MAX_BYTES || !may_resize {
                    return None;
                }
                self.table.max_bytes = max_bytes;
                self.table.shrink(max_bytes);
                continue;
            }
            may_resize = false;
            let is_inserted = first & 0xc0 == 0x40;
            let mut entry = if first & 0x80 != 0 {
                self.table.get(reader.int(7)?)?
            } else {
                let is_wanted = is_inserted || tally.replacement.is_none();
                self.literal(&mut reader, if is_inserted { 6 } else { 4 }, is_wanted)?
            };
            if !entry.is_valid && entry.kind == FieldKind::Method && entry.value == 0 {
                // No value of this length is valid.
                entry.kind = FieldKind::Invalid;
            }
            tally.add(entry, most_bytes, self.limits);
            if is_inserted {
                self.table.insert(entry);
            }
            if tally.replacement.is_none() {
                if !tally.is_malformed && !tally.is_too_large {
                    continue;
                }
                // What came before stays: it may be what an answer of 431 depends on.
                tally.replacement = Some(block[..start].to_vec());
                tally.replacement_bytes = tally.bytes - entry.bytes();
            }
            if let (true, Some(left)) = (is_inserted, &mut tally.replacement) {
                tally.replacement_bytes += entry.bytes();
                if entry.is_valid {
                    left.extend_from_slice(&block[start..reader.at]);
                } else {
                    push_placeholder(entry, &block[start..], left)?;
                }
            }
        }
        Some(())
    }

    /// A literal, whose index has a prefix of so many bits. One that is not wanted is not looked at any more than it must be.
    fn literal(&mut self, reader: &mut Reader<'_>, prefix: u32, is_wanted: bool) -> Option<Entry> {
        let name = match reader.int(prefix)? {
            0 => {
                let name = reader.string(&mut self.decoded)?;
                Entry { kind: FieldKind::of(name), name: name.len() as u32, value: 0, is_valid: true }
            }
            index => self.table.get(index)?,
        };
        if !is_wanted {
            return Some(Entry {
                value: reader.skip_string()? as u32,
                is_valid: name.kind != FieldKind::Invalid,
                ..name
            });
        }
        let value = reader.string(&mut self.decoded)?;
        Some(Entry { value: value.len() as u32, is_valid: name.kind.accepts(value), ..name })
    }
}

/// Adds a field that is valid and takes as much room in the table as `literal`, which is not; with its name, if that is valid.
fn push_placeholder(entry: Entry, literal: &[u8], block: &mut Vec<u8>) -> Option<()> {
    let mut rest = entry.value as usize;
    if entry.kind == FieldKind::Invalid {
        block.extend_from_slice(b"\x40\x01x");
        // h2 has no field without a name.
        rest = (entry.bytes() - FIELD_BYTES).checked_sub(1)?;
    } else {
        let mut reader = Reader { block: literal, at: 0 };
        if reader.int(6)? == 0 {
            reader.raw_string()?;
        }
        block.extend_from_slice(&literal[..reader.at]);
    }
    let value = rest;
    if rest < 127 {
        block.push(rest as u8);
    } else {
        block.push(127);
        rest -= 127;
        while rest >= 128 {
            block.push((rest % 128 + 128) as u8);
            rest /= 128;
        }
        block.push(rest as u8);
    }
    block.resize(block.len() + value, b'x');
    Some(())
}

struct Reader<'a> {
    block: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// An integer (RFC 7541, section 5.1), with as many bytes as h2 reads.
    fn int(&mut self, prefix: u32) -> Option<usize> {
        let mask = (1usize << prefix) - 1;
        let mut number = usize::from(*self.block.get(self.at)?) & mask;
        self.at += 1;
        if number < mask {
            return Some(number);
        }
        for shift in [0, 7, 14, 21] {
            let byte = usize::from(*self.block.get(self.at)?);
            self.at += 1;
            number += (byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// The bytes of a string as they came, and whether they are in Huffman code (RFC 7541, section 5.2).
    fn raw_string(&mut self) -> Option<(&'a [u8], bool)> {
        let is_huffman = self.block.get(self.at)? & 0x80 != 0;
        let length = self.int(7)?;
        let raw = self.block.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some((raw, is_huffman))
    }

    fn string<'b>(&mut self, decoded: &'b mut Vec<u8>) -> Option<&'b [u8]>
    where
        'a: 'b,
    {
        let (raw, is_huffman) = self.raw_string()?;
        if !is_huffman {
            return Some(raw);
        }
        decoded.clear();
        huffman::decode(raw, decoded)?;
        Some(decoded)
    }

    /// Passes over a string; about how long it is.
    fn skip_string(&mut self) -> Option<usize> {
        self.raw_string().map(|(raw, _)| raw.len())
    }
}

impl FieldKind {
    fn of(name: &[u8]) -> FieldKind {
        match name {
            b":method" => FieldKind::Method,
            b":authority" => FieldKind::Authority,
            b":path" => FieldKind::Path,
            b":scheme" => FieldKind::Scheme,
            b":protocol" => FieldKind::Protocol,
            b"te" => FieldKind::Te,
            b"cookie" => FieldKind::Cookie,
            b"connection" | b"transfer-encoding" | b"upgrade" | b"keep-alive" | b"proxy-connection" => {
                FieldKind::Invalid
            }
            _ if !name.is_empty() && name.iter().all(|byte| NAME[usize::from(*byte)]) => FieldKind::Plain,
            _ => FieldKind::Invalid,
        }
    }

    /// Whether h2 takes such a value.
    fn accepts(self, value: &[u8]) -> bool {
        match self {
            FieldKind::Method => Method::from_bytes(value).is_ok(),
            FieldKind::Authority | FieldKind::Path | FieldKind::Scheme | FieldKind::Protocol => {
                str::from_utf8(value).is_ok()
            }
            FieldKind::Te => value == b"trailers",
            FieldKind::Invalid => false,
            // No control characters but the tab.
            FieldKind::Cookie | FieldKind::Plain => {
                !value.iter().fold(false, |bad, &byte| bad | (byte < 32 && byte != b'\t') | (byte == 127))
            }
        }
    }
}

/// Bytes of names: tokens without capital letters (RFC 9113, section 8.2.1).
const NAME: [bool; 256] = byte_set(b"abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~");

/// The static table (RFC 7541, appendix A).
const STATIC: [Entry; 61] = {
    const fn entry(kind: FieldKind, name: &str, value: &str) -> Entry {
        Entry {
            kind,
            name: name.len() as u32,
            value: value.len() as u32,
            is_valid: !matches!(kind, FieldKind::Invalid),
        }
    }
    const fn plain(name: &str) -> Entry {
        entry(FieldKind::Plain, name, "")
    }
    [
        entry(FieldKind::Authority, ":authority", ""),
        entry(FieldKind::Method, ":method", "GET"),
        entry(FieldKind::Method, ":method", "POST"),
        entry(FieldKind::Path, ":path", "/"),
        entry(FieldKind::Path, ":path", "/index.html"),
        entry(FieldKind::Scheme, ":scheme", "http"),
        entry(FieldKind::Scheme, ":scheme", "https"),
        entry(FieldKind::Invalid, ":status", "200"),
        entry(FieldKind::Invalid, ":status", "204"),
        entry(FieldKind::Invalid, ":status", "206"),
        entry(FieldKind::Invalid, ":status", "304"),
        entry(FieldKind::Invalid, ":status", "400"),
        entry(FieldKind::Invalid, ":status", "404"),
        entry(FieldKind::Invalid, ":status", "500"),
        plain("accept-charset"),
        entry(FieldKind::Plain, "accept-encoding", "gzip, deflate"),
        plain("accept-language"),
        plain("accept-ranges"),
        plain("accept"),
        plain("access-control-allow-origin"),
        plain("age"),
        plain("allow"),
        plain("authorization"),
        plain("cache-control"),
        plain("content-disposition"),
        plain("content-encoding"),
        plain("content-language"),
        plain("content-length"),
        plain("content-location"),
        plain("content-range"),
        plain("content-type"),
        entry(FieldKind::Cookie, "cookie", ""),
        plain("date"),
        plain("etag"),
        plain("expect"),
        plain("expires"),
        plain("from"),
        plain("host"),
        plain("if-match"),
        plain("if-modified-since"),
        plain("if-none-match"),
        plain("if-range"),
        plain("if-unmodified-since"),
        plain("last-modified"),
        plain("link"),
        plain("location"),
        plain("max-forwards"),
        plain("proxy-authenticate"),
        plain("proxy-authorization"),
        plain("range"),
        plain("referer"),
        plain("refresh"),
        plain("retry-after"),
        plain("server"),
        plain("set-cookie"),
        plain("strict-transport-security"),
        entry(FieldKind::Invalid, "transfer-encoding", ""),
        plain("user-agent"),
        plain("vary"),
        plain("via"),
        plain("www-authenticate"),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: usize = usize::MAX;
    const LIMITS: Limits = Limits { fields: 4, bytes: 1000 };
    /// GET, http, `/`.
    const START: &[u8] = b"\x82\x86\x84";

    /// A literal: not indexed (0x00), or indexed (0x40).
    fn literal(first: u8, name: &str, value: &str) -> Vec<u8> {
        assert!(name.len() < 127 && value.len() < 127);
        [&[first, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    }

    fn flaw(scanner: &mut HpackScanner, block: &[u8]) -> Option<BlockError> {
        scanner.scan(block, ROOM).error.map(|(flaw, _)| flaw)
    }

    #[test]
    fn the_examples_of_the_rfc_are_followed() {
        // RFC 7541, appendix C.4: three requests on one connection, with Huffman code.
        let mut scanner = HpackScanner::new(Limits { fields: 100, bytes: 10_000 });
        let host = b"\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff";
        let cached = b"\xbe\x58\x86\xa8\xeb\x10\x64\x9c\xbf";
        let custom =
            b"\x82\x87\x85\xbf\x40\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f\x89\x25\xa8\x49\xe9\x5b\xb8\xe8\xb4\xbf";
        for (block, table) in [([START, host].concat(), 57), ([START, cached].concat(), 110), (custom.to_vec(), 164)] {
            let scanned = scanner.scan(&block, ROOM);
            assert!(scanned.error.is_none(), "{scanned:?}");
            assert_eq!(scanner.table.bytes, table);
        }
    }

    #[test]
    fn fields_that_are_not_valid_make_a_block_malformed() {
        for (name, value) in [
            ("x-a", "a\nb"),
            ("x-a", "a\rb"),
            ("x-a", "\0"),
            ("x-a", "\x7f"),
            ("X-A", "b"),
            ("x a", "b"),
            ("x:a", "b"),
            (":other", "b"),
            ("cookie", "a=\x01"),
            (":method", "G T"),
            (":method", ""),
        ] {
            for first in [0x00, 0x10, 0x40] {
                let mut scanner = HpackScanner::new(LIMITS);
                let block = [START, &literal(first, name, value)].concat();
                assert_eq!(flaw(&mut scanner, &block), Some(BlockError::Malformed), "{name}: {value:?}");
                // One that has got into the table is not valid there either.
                let again = [START, b"\xbe"].concat();
                let expected = if first == 0x40 { BlockError::Malformed } else { BlockError::Undecodable };
                assert_eq!(flaw(&mut scanner, &again), Some(expected));
            }
        }
        for (name, value) in [("x-a", "a\tb"), ("x-a", ""), ("x-~", "\u{e4}"), (":path", "/\u{e4}"), ("te", "trailers")]
        {
            assert_eq!(flaw(&mut HpackScanner::new(LIMITS), &literal(0, name, value)), None, "{name}: {value:?}");
        }
    }

    #[test]
    fn a_block_that_takes_the_place_of_another_changes_the_table_alike() {
        let mut scanner = HpackScanner::new(LIMITS);
        let bad = literal(0x40, "X-Bad", &"v".repeat(40));
        let good = literal(0x40, "x-good", "1");
        let dropped = literal(0x00, "x-b", "2");
        let block = [START, &good, &bad, &dropped, &good].concat();
        let (flaw, left) = scanner.scan(&block, ROOM).error.unwrap();
        assert_eq!(flaw, BlockError::Malformed);
        let instead = literal(0x40, "x", &"x".repeat(44));
        assert_eq!(left, [START, &good, &instead, &good, MALFORMED].concat());
        // A scanner that sees this instead has the same table.
        let mut other = HpackScanner::new(LIMITS);
        assert!(other.scan(&left[..left.len() - MALFORMED.len()], ROOM).error.is_none());
        let lengths = |scanner: &HpackScanner| scanner.table.entries.iter().map(Entry::bytes).collect::<Vec<_>>();
        assert_eq!(lengths(&other), lengths(&scanner));
    }

    #[test]
    fn what_is_over_the_limits_is_left_out() {
        let field = literal(0x00, "x-a", "1");
        let cookie = literal(0x00, "cookie", "1");
        let long = literal(0x00, "x-a", &"x".repeat(120));
        let good = literal(0x40, "x-good", "1");
        let all = |field: &[u8], times| [START, &field.repeat(times)].concat();
        for (block, is_over) in [
            (all(&field, 4), false),
            (all(&field, 5), true),
            (all(&cookie, 8), false),
            (all(&cookie, 9), true),
            ([all(&field, 3), cookie.clone()].concat(), false),
            ([all(&field, 4), cookie.clone()].concat(), true),
            (all(&long, 4), false),
        ] {
            let expected = is_over.then_some(BlockError::TooLarge { by_h2: false });
            assert_eq!(flaw(&mut HpackScanner::new(LIMITS), &block), expected);
        }
        let block = [all(&field, 9), good.clone(), field.clone()].concat();
        let (_, left) = HpackScanner::new(LIMITS).scan(&block, ROOM).error.unwrap();
        assert_eq!(left, [all(&field, 4), good].concat());
        // By bytes: 1000 of them are too many, wherever the room ends.
        let mut wide = HpackScanner::new(Limits { fields: 100, bytes: 1000 });
        assert_eq!(flaw(&mut wide, &all(&long, 5)), None);
        assert_eq!(flaw(&mut wide, &all(&long, 6)), Some(BlockError::TooLarge { by_h2: false }));
        assert!(wide.scan(&all(&long, 3), 300).error.is_some());
        let inserted = all(&literal(0x40, "x-a", &"x".repeat(120)), 8);
        assert_eq!(flaw(&mut wide, &inserted), Some(BlockError::TooLarge { by_h2: true }));
    }

    #[test]
    fn what_no_decoder_reads_is_told() {
        let too_long = b"\x00\x01a\x05bc";
        let int = b"\xff\xff\xff\xff\xff\xff\x0f";
        let resized_late = [START, b"\x20"].concat();
        for block in [&b"\x80"[..], b"\xbe", b"\x00", b"\x00\x01a", too_long, int, b"\x3f\xe2\x1f", &resized_late] {
            assert_eq!(flaw(&mut HpackScanner::new(LIMITS), block), Some(BlockError::Undecodable), "{block:x?}");
        }
        // A field without a name and value can not be put into h2's table.
        assert_eq!(flaw(&mut HpackScanner::new(LIMITS), b"\x40\x00\x00"), Some(BlockError::Undecodable));
        assert_eq!(flaw(&mut HpackScanner::new(LIMITS), b"\x00\x00\x00"), Some(BlockError::Malformed));
    }

    #[test]
    fn the_table_forgets_as_it_should() {
        let mut scanner = HpackScanner::new(Limits { fields: 1000, bytes: 100_000 });
        let field = literal(0x40, "x-a", &"x".repeat(29));
        // 64 bytes each.
        assert_eq!(flaw(&mut scanner, &field.repeat(64)), None);
        assert_eq!((scanner.table.entries.len(), scanner.table.bytes), (64, 4096));
        assert_eq!(flaw(&mut scanner, &field), None);
        assert_eq!(scanner.table.entries.len(), 64);
        assert_eq!(flaw(&mut scanner, b"\x3f\x21"), None);
        assert_eq!((scanner.table.entries.len(), scanner.table.max_bytes), (1, 64));
        let large = literal(0x40, "x-a", &"x".repeat(30));
        assert_eq!(flaw(&mut scanner, &large), None);
        assert_eq!(scanner.table.entries.len(), 0);
    }
}
