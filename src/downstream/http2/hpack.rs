//! Checks request heads in HPACK (RFC 7541) before h2 decodes them.
//!
//! h2 ends the connection for an invalid field, where RFC 9113, section 8.1.1 requires an error of the stream only; and it
//! decodes thousands of fields before they can be rejected. A block that is valid and within the limits passes unchanged. Any
//! other block is replaced by a short one that changes the dynamic table in the same way.
//!
//! The copy of the dynamic table has only lengths and kinds of fields. This file knows no frames.

use std::collections::VecDeque;

use http::Method;

use crate::downstream::http2::huffman;
use transom_http::percent_encoding::byte_set;

/// SETTINGS_HEADER_TABLE_SIZE, at its default.
const TABLE_MAX_BYTES: usize = 4096;

/// Added to the length of a field's name and value (RFC 7541, section 4.1; RFC 9113, section 6.5.2).
const FIELD_BYTES: usize = 32;

/// Clients split Cookie (RFC 9113, section 8.2.3). The pieces count as one field, up to this many for each allowed field.
const COOKIES_PER_FIELD: usize = 2;

/// A field that makes a request malformed, so that h2 resets its stream.
pub const MALFORMED: &[u8] = b"\x00\x0aconnection\x00";
/// An index that does not exist: a connection error.
const UNDECODABLE: &[u8] = b"\x80";

/// Limits on a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Fields, with `:authority` and without the other pseudo-header fields.
    pub fields: usize,
    /// Bytes of all names and values, and `FIELD_BYTES` for each.
    pub bytes: usize,
}

/// An error in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockError {
    /// A field is invalid: a stream error.
    Malformed,
    /// The fields exceed the limits. `by_h2`: the replacement exceeds them too, so h2 responds with 431 itself.
    TooLarge { by_h2: bool },
    /// The block cannot be decoded: a connection error.
    Undecodable,
}

/// Result of checking a block.
#[derive(Debug)]
pub struct ScanResult {
    /// Size of all fields, as limits count it.
    pub bytes: usize,
    /// The error, and the block that replaces this one.
    pub error: Option<(BlockError, Vec<u8>)>,
}

/// The kind of a field name, which determines its valid values.
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
    /// A name that a request must not have.
    Invalid,
}

/// A field: kind, and lengths of name and value.
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

/// The dynamic table (RFC 7541, section 2.3.2); the newest entry is first.
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
        // An entry larger than the table leaves it empty.
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

/// Checks the blocks of one connection. Every block must be passed once, in order.
#[derive(Debug)]
pub struct HpackScanner {
    table: Table,
    limits: HeadLimits,
    /// Buffer for a decoded Huffman string.
    decoded: Vec<u8>,
}

/// Counts of the fields of a block so far.
#[derive(Default)]
struct BlockTotals {
    fields: usize,
    cookies: usize,
    bytes: usize,
    /// Bit set of the kinds that occurred.
    kinds: u16,
    is_malformed: bool,
    is_too_large: bool,
    /// The replacement block, after an error was found, and the size of its fields.
    replacement: Option<Vec<u8>>,
    replacement_bytes: usize,
}

impl BlockTotals {
    fn add(&mut self, entry: Entry, limit_bytes: usize, limits: HeadLimits) {
        let kind = 1 << entry.kind as u16;
        match entry.kind {
            FieldKind::Cookie => self.cookies += 1,
            FieldKind::Te | FieldKind::Plain | FieldKind::Invalid => self.fields += 1,
            FieldKind::Method | FieldKind::Authority | FieldKind::Path | FieldKind::Scheme | FieldKind::Protocol => {
                self.fields += usize::from(entry.kind == FieldKind::Authority);
                // Each occurs at most once, before all other fields.
                self.is_malformed |= self.kinds & kind != 0 || self.kinds >= 1 << FieldKind::Te as u16;
            }
        }
        self.kinds |= kind;
        self.bytes += entry.bytes();
        self.is_malformed |= !entry.is_valid;
        self.is_too_large |= self.bytes >= limit_bytes
            || self.fields + usize::from(self.cookies > 0) > limits.fields
            || self.cookies > limits.fields * COOKIES_PER_FIELD;
    }
}

impl HpackScanner {
    pub fn new(limits: HeadLimits) -> HpackScanner {
        let table = Table { entries: VecDeque::new(), bytes: 0, max_bytes: TABLE_MAX_BYTES };
        HpackScanner { table, limits, decoded: Vec::new() }
    }

    /// Checks the block of a head or of trailers, whose fields may have `max_bytes`.
    pub fn scan(&mut self, block: &[u8], is_head: bool, max_bytes: usize) -> ScanResult {
        // In trailers, a pseudo-header field is malformed (RFC 9113, section 8.1), as one is behind other fields.
        let kinds = if is_head { 0 } else { 1 << FieldKind::Te as u16 };
        let mut totals = BlockTotals { kinds, ..BlockTotals::default() };
        if self.scan_fields(block, max_bytes, &mut totals).is_none() {
            return ScanResult { bytes: totals.bytes, error: Some((BlockError::Undecodable, UNDECODABLE.to_vec())) };
        }
        let error = totals.replacement.map(|mut replacement| {
            let error = if totals.is_malformed {
                replacement.extend_from_slice(MALFORMED);
                BlockError::Malformed
            } else {
                BlockError::TooLarge { by_h2: totals.replacement_bytes >= self.limits.bytes }
            };
            (error, replacement)
        });
        ScanResult { bytes: totals.bytes, error }
    }

    /// `None`: the block cannot be decoded.
    fn scan_fields(&mut self, block: &[u8], max_bytes: usize, totals: &mut BlockTotals) -> Option<()> {
        let limit_bytes = max_bytes.min(self.limits.bytes);
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
                let is_wanted = is_inserted || totals.replacement.is_none();
                self.literal(&mut reader, if is_inserted { 6 } else { 4 }, is_wanted)?
            };
            if !entry.is_valid && entry.kind == FieldKind::Method && entry.value == 0 {
                // A placeholder cannot keep this name: no method of length 0 is valid.
                entry.kind = FieldKind::Invalid;
            }
            totals.add(entry, limit_bytes, self.limits);
            if is_inserted {
                self.table.insert(entry);
            }
            if totals.replacement.is_none() {
                if !totals.is_malformed && !totals.is_too_large {
                    continue;
                }
                // Earlier fields stay: the 431 response may depend on them.
                totals.replacement = Some(block[..start].to_vec());
                totals.replacement_bytes = totals.bytes - entry.bytes();
            }
            if let (true, Some(replacement)) = (is_inserted, &mut totals.replacement) {
                totals.replacement_bytes += entry.bytes();
                if entry.is_valid {
                    replacement.extend_from_slice(&block[start..reader.at]);
                } else {
                    push_placeholder(entry, &block[start..], replacement)?;
                }
            }
        }
        Some(())
    }

    /// Reads a literal whose index has a prefix of `prefix` bits. The value is validated only if `is_wanted`.
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

/// Appends a valid field of the same table size as the invalid `literal`, with the same name if that is valid.
fn push_placeholder(entry: Entry, literal: &[u8], block: &mut Vec<u8>) -> Option<()> {
    let mut rest = entry.value as usize;
    if entry.kind == FieldKind::Invalid {
        block.extend_from_slice(b"\x40\x01x");
        // h2 rejects a field without a name.
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
    /// Reads an integer (RFC 7541, section 5.1), of as many bytes as h2 accepts.
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

    /// Reads the encoded bytes of a string, and whether they are Huffman-coded (RFC 7541, section 5.2).
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

    /// Skips a string; returns its encoded length.
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

    /// Whether h2 and the gateway accept the value.
    fn accepts(self, value: &[u8]) -> bool {
        match self {
            FieldKind::Method => Method::from_bytes(value).is_ok(),
            // h2 drops a fragment, which no client sends (RFC 9113, section 8.3.1); over HTTP/1.1 it gets 400.
            FieldKind::Path => str::from_utf8(value).is_ok() && !value.contains(&b'#'),
            FieldKind::Authority | FieldKind::Scheme | FieldKind::Protocol => str::from_utf8(value).is_ok(),
            FieldKind::Te => value == b"trailers",
            FieldKind::Invalid => false,
            // No control characters except tab.
            FieldKind::Cookie | FieldKind::Plain => {
                !value.iter().fold(false, |bad, &byte| bad | (byte < 32 && byte != b'\t') | (byte == 127))
            }
        }
    }
}

/// Bytes of names: token characters without upper-case letters (RFC 9113, section 8.2.1).
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

    const UNBOUNDED: usize = usize::MAX;
    const LIMITS: HeadLimits = HeadLimits { fields: 4, bytes: 1000 };
    /// GET, http, `/`.
    const START: &[u8] = b"\x82\x86\x84";

    /// A literal: not indexed (0x00), or indexed (0x40).
    fn literal(first: u8, name: &str, value: &str) -> Vec<u8> {
        assert!(name.len() < 127 && value.len() < 127);
        [&[first, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    }

    fn error(scanner: &mut HpackScanner, block: &[u8]) -> Option<BlockError> {
        scanner.scan(block, true, UNBOUNDED).error.map(|(error, _)| error)
    }

    #[test]
    fn the_examples_of_the_rfc_are_accepted() {
        // RFC 7541, appendix C.4: three requests on one connection, with Huffman code.
        let mut scanner = HpackScanner::new(HeadLimits { fields: 100, bytes: 10_000 });
        let host = b"\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff";
        let cached = b"\xbe\x58\x86\xa8\xeb\x10\x64\x9c\xbf";
        let custom =
            b"\x82\x87\x85\xbf\x40\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f\x89\x25\xa8\x49\xe9\x5b\xb8\xe8\xb4\xbf";
        for (block, table) in [([START, host].concat(), 57), ([START, cached].concat(), 110), (custom.to_vec(), 164)] {
            let scanned = scanner.scan(&block, true, UNBOUNDED);
            assert!(scanned.error.is_none(), "{scanned:?}");
            assert_eq!(scanner.table.bytes, table);
        }
    }

    #[test]
    fn an_invalid_field_makes_a_block_malformed() {
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
            (":path", "/a#b"),
        ] {
            for first in [0x00, 0x10, 0x40] {
                let mut scanner = HpackScanner::new(LIMITS);
                let block = [START, &literal(first, name, value)].concat();
                assert_eq!(error(&mut scanner, &block), Some(BlockError::Malformed), "{name}: {value:?}");
                // The entry in the dynamic table is invalid as well.
                let again = [START, b"\xbe"].concat();
                let expected = if first == 0x40 { BlockError::Malformed } else { BlockError::Undecodable };
                assert_eq!(error(&mut scanner, &again), Some(expected));
            }
        }
        for (name, value) in [("x-a", "a\tb"), ("x-a", ""), ("x-~", "\u{e4}"), (":path", "/\u{e4}"), ("te", "trailers")]
        {
            assert_eq!(error(&mut HpackScanner::new(LIMITS), &literal(0, name, value)), None, "{name}: {value:?}");
        }
    }

    #[test]
    fn a_replacement_block_changes_the_table_in_the_same_way() {
        let mut scanner = HpackScanner::new(LIMITS);
        let bad = literal(0x40, "X-Bad", &"v".repeat(40));
        let good = literal(0x40, "x-good", "1");
        let dropped = literal(0x00, "x-b", "2");
        let block = [START, &good, &bad, &dropped, &good].concat();
        let (error, replacement) = scanner.scan(&block, true, UNBOUNDED).error.unwrap();
        assert_eq!(error, BlockError::Malformed);
        let placeholder = literal(0x40, "x", &"x".repeat(44));
        assert_eq!(replacement, [START, &good, &placeholder, &good, MALFORMED].concat());
        // A scanner that reads the replacement has the same table.
        let mut other = HpackScanner::new(LIMITS);
        assert!(other.scan(&replacement[..replacement.len() - MALFORMED.len()], true, UNBOUNDED).error.is_none());
        let lengths = |scanner: &HpackScanner| scanner.table.entries.iter().map(Entry::bytes).collect::<Vec<_>>();
        assert_eq!(lengths(&other), lengths(&scanner));
    }

    #[test]
    fn fields_beyond_the_limits_are_removed() {
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
            assert_eq!(error(&mut HpackScanner::new(LIMITS), &block), expected);
        }
        let block = [all(&field, 9), good.clone(), field.clone()].concat();
        let (_, replacement) = HpackScanner::new(LIMITS).scan(&block, true, UNBOUNDED).error.unwrap();
        assert_eq!(replacement, [all(&field, 4), good].concat());
        // 1000 bytes exceed the limit.
        let mut wide = HpackScanner::new(HeadLimits { fields: 100, bytes: 1000 });
        assert_eq!(error(&mut wide, &all(&long, 5)), None);
        assert_eq!(error(&mut wide, &all(&long, 6)), Some(BlockError::TooLarge { by_h2: false }));
        assert!(wide.scan(&all(&long, 3), true, 300).error.is_some());
        let inserted = all(&literal(0x40, "x-a", &"x".repeat(120)), 8);
        assert_eq!(error(&mut wide, &inserted), Some(BlockError::TooLarge { by_h2: true }));
    }

    #[test]
    fn blocks_that_cannot_be_decoded_are_reported() {
        let too_long = b"\x00\x01a\x05bc";
        let int = b"\xff\xff\xff\xff\xff\xff\x0f";
        let resized_late = [START, b"\x20"].concat();
        for block in [&b"\x80"[..], b"\xbe", b"\x00", b"\x00\x01a", too_long, int, b"\x3f\xe2\x1f", &resized_late] {
            assert_eq!(error(&mut HpackScanner::new(LIMITS), block), Some(BlockError::Undecodable), "{block:x?}");
        }
        // A field without name and value cannot be inserted into h2's table.
        assert_eq!(error(&mut HpackScanner::new(LIMITS), b"\x40\x00\x00"), Some(BlockError::Undecodable));
        assert_eq!(error(&mut HpackScanner::new(LIMITS), b"\x00\x00\x00"), Some(BlockError::Malformed));
    }

    #[test]
    fn the_table_evicts_entries_by_size() {
        let mut scanner = HpackScanner::new(HeadLimits { fields: 1000, bytes: 100_000 });
        let field = literal(0x40, "x-a", &"x".repeat(29));
        // 64 bytes each.
        assert_eq!(error(&mut scanner, &field.repeat(64)), None);
        assert_eq!((scanner.table.entries.len(), scanner.table.bytes), (64, 4096));
        assert_eq!(error(&mut scanner, &field), None);
        assert_eq!(scanner.table.entries.len(), 64);
        assert_eq!(error(&mut scanner, b"\x3f\x21"), None);
        assert_eq!((scanner.table.entries.len(), scanner.table.max_bytes), (1, 64));
        let large = literal(0x40, "x-a", &"x".repeat(30));
        assert_eq!(error(&mut scanner, &large), None);
        assert_eq!(scanner.table.entries.len(), 0);
    }
}
