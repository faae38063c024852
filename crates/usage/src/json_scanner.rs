//! A scanner for JSON documents that arrive in pieces of any size. It checks the grammar of RFC 8259, and keeps the values at the
//! pointers of a [`PointerTree`]. Memory is bounded: one bit for each of [`DEPTH_MAX`] levels, and the name that is being compared.
//!
//! Strings may contain bytes that are no UTF-8, and escapes of single surrogates: servers that cut texts between tokens send them.
//! Levels below [`DEPTH_MAX`] are skipped, with no check but that of strings and brackets.

use super::decimal::NumberReader;
use super::json_pointer::{NodeId, PointerTree, SlotId, TextId};
use super::values::{TEXT_MAX_BYTES, Value, Values};

/// Levels of arrays and objects whose grammar is checked.
pub const DEPTH_MAX: u32 = 256;

/// What a document was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Document {
    /// Nothing but white space.
    Empty,
    Complete,
    /// It ended within a value.
    Incomplete,
    Malformed,
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Value,
    /// A value, or the end of an empty array.
    ValueOrEnd,
    Name,
    /// A name, or the end of an empty object.
    NameOrEnd,
    Colon,
    /// A comma, or the end of the array or object.
    CommaOrEnd,
    String,
    Escape,
    /// Hexadecimal digits, as many as `left`.
    Unicode {
        left: u8,
        code: u16,
    },
    Number,
    Literal(&'static [u8]),
    /// Below the levels that are checked, by so many.
    Deep(u64),
    DeepString(u64),
    DeepEscape(u64),
    End,
    Malformed,
}

/// An array or object on the way to a pointer.
struct Container {
    node: NodeId,
    /// Of the current element.
    index: u64,
    /// Elements that are numbers.
    numbers: u64,
}

/// The text of a name or value that is being compared or kept.
#[derive(Default)]
struct Text {
    is_wanted: bool,
    bytes: Vec<u8>,
    /// A part of it cannot be kept: it is longer than any text of interest, or contains a single surrogate.
    is_unusable: bool,
    /// The first half of a surrogate pair, or 0.
    high_surrogate: u16,
}

/// Whether some servers may read a text as JSON: behind blanks it begins as an array, an object or a comment.
pub fn may_be_json(text: &[u8]) -> bool {
    let start = text.iter().position(|byte| !is_blank(*byte)).unwrap_or(text.len());
    matches!(text[start..], [b'{' | b'[', ..] | [b'/', b'/' | b'*', ..])
}

/// Whether a byte before a document says nothing: white space, and parts of a byte order mark or of wider characters.
pub fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0 | 0xEF | 0xBB | 0xBF | 0xFE | 0xFF)
}

pub struct JsonScanner {
    state: State,
    is_name: bool,
    depth: u32,
    /// For each level, whether it is an object.
    objects: [u64; DEPTH_MAX as usize / 64],
    /// The containers from the root to the innermost one that a pointer leads through.
    containers: Vec<Container>,
    /// The node of the next or current value.
    target: Option<NodeId>,
    number: NumberReader,
    text: Text,
    /// Whether the elements of an array at the root are documents.
    reads_elements: bool,
    /// Whether `NaN`, `Infinity` and `-Infinity` are values, as for some servers.
    accepts_nan: bool,
    /// A document had more levels than are checked.
    has_unchecked: bool,
}

impl JsonScanner {
    /// `reads_elements`: the elements of an array at the root are documents, one after the other.
    pub fn new(reads_elements: bool) -> JsonScanner {
        JsonScanner {
            state: State::Value,
            is_name: false,
            depth: 0,
            objects: [0; _],
            containers: Vec::new(),
            target: Some(PointerTree::ROOT),
            number: NumberReader::default(),
            text: Text::default(),
            reads_elements,
            accepts_nan: false,
            has_unchecked: false,
        }
    }

    /// Of requests, in which some servers accept more than JSON.
    pub fn of_requests() -> JsonScanner {
        JsonScanner { accepts_nan: true, ..JsonScanner::new(false) }
    }

    /// Ends the document, and begins the next one.
    pub fn finish(&mut self, tree: &PointerTree, values: &mut Values) -> Document {
        if self.state == State::Number && self.depth == 0 {
            self.end_number(tree, values);
        }
        let document = match self.state {
            State::End => Document::Complete,
            State::Malformed => Document::Malformed,
            State::Value if self.depth == 0 => Document::Empty,
            _ => Document::Incomplete,
        };
        (self.state, self.depth, self.target) = (State::Value, 0, Some(PointerTree::ROOT));
        self.containers.clear();
        document
    }

    /// Whether a document had more levels than are checked: what is below them may be no JSON.
    pub fn has_unchecked_levels(&self) -> bool {
        self.has_unchecked
    }

    pub fn is_malformed(&self) -> bool {
        self.state == State::Malformed
    }

    pub fn push(&mut self, tree: &PointerTree, values: &mut Values, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some((&byte, after)) = rest.split_first() {
            rest = match self.state {
                State::String => self.string(tree, values, rest),
                State::Number => {
                    if self.number.push(byte) {
                        &after[self.number.skip_digits(after)..]
                    } else if byte == b'I' && self.accepts_nan && self.number.is_minus() {
                        self.start_nan(b"nfinity", tree, values);
                        after
                    } else {
                        self.end_number(tree, values);
                        rest
                    }
                }
                State::Malformed => return,
                State::Deep(_) | State::DeepString(_) | State::DeepEscape(_) => {
                    self.skip_deep(byte, values);
                    after
                }
                State::Escape | State::Unicode { .. } | State::Literal(_) => {
                    self.part(byte, values);
                    after
                }
                _ if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') => after,
                _ => {
                    self.structure(byte, tree, values);
                    after
                }
            };
        }
    }

    /// A byte between tokens, or the first byte of one.
    #[inline]
    fn structure(&mut self, byte: u8, tree: &PointerTree, values: &mut Values) {
        match (self.state, byte) {
            (State::ValueOrEnd, b']') | (State::NameOrEnd, b'}') => self.close(tree, values),
            (State::Value | State::ValueOrEnd, _) => self.start_value(byte, tree, values),
            (State::Name | State::NameOrEnd, b'"') => {
                self.is_name = true;
                let is_wanted = self.is_on_the_way();
                self.text.start(is_wanted);
                self.state = State::String;
            }
            (State::Colon, b':') => self.state = State::Value,
            (State::CommaOrEnd, b',') if self.is_in_object() => self.state = State::Name,
            (State::CommaOrEnd, b',') => {
                self.state = State::Value;
                self.start_element(tree);
            }
            (State::CommaOrEnd, b'}') if self.is_in_object() => self.close(tree, values),
            (State::CommaOrEnd, b']') if !self.is_in_object() => self.close(tree, values),
            _ => self.state = State::Malformed,
        }
    }

    /// Whether the innermost container is on the way to a pointer.
    #[inline]
    fn is_on_the_way(&self) -> bool {
        self.containers.len() == self.depth as usize
    }

    #[inline]
    fn is_in_object(&self) -> bool {
        let level = self.depth - 1;
        self.objects[level as usize / 64] >> (level % 64) & 1 == 1
    }

    /// Determines the node of the next element.
    fn start_element(&mut self, tree: &PointerTree) {
        self.target = None;
        let is_document = self.reads_elements && self.depth == 1;
        if self.is_on_the_way()
            && let Some(container) = self.containers.last_mut()
        {
            self.target = tree.element(container.node, container.index).or(is_document.then_some(PointerTree::ELEMENT));
            container.index += 1;
        }
    }

    fn start_value(&mut self, byte: u8, tree: &PointerTree, values: &mut Values) {
        self.state = match byte {
            b'"' => {
                self.is_name = false;
                self.text.start(!self.texts(tree).is_empty());
                State::String
            }
            b'{' | b'[' => return self.open(byte == b'{', tree, values),
            b'-' | b'0'..=b'9' => {
                self.number.start(!self.number_slots(tree).is_empty() || !self.texts(tree).is_empty());
                self.number.push(byte);
                return self.state = State::Number;
            }
            b't' => {
                values.set_text(self.texts(tree), Some(b"true"));
                State::Literal(b"rue")
            }
            b'f' => {
                values.set_text(self.texts(tree), Some(b"false"));
                State::Literal(b"alse")
            }
            b'N' if self.accepts_nan => return self.start_nan(b"aN", tree, values),
            b'I' if self.accepts_nan => return self.start_nan(b"nfinity", tree, values),
            // No value at all.
            b'n' => return self.state = State::Literal(b"ull"),
            _ => return self.state = State::Malformed,
        };
        values.set(self.number_slots(tree), Value::Unreadable);
    }

    /// A number that JSON does not have. `rest`: of its name.
    fn start_nan(&mut self, rest: &'static [u8], tree: &PointerTree, values: &mut Values) {
        values.set_text(self.texts(tree), None);
        values.set(self.number_slots(tree), Value::Unreadable);
        self.state = State::Literal(rest);
    }

    /// Of the next or current value.
    #[inline]
    fn texts<'t>(&self, tree: &'t PointerTree) -> &'t [TextId] {
        self.target.map_or(&[], |node| &tree.wanted(node).texts)
    }

    /// Of the next or current value.
    #[inline]
    fn number_slots<'t>(&self, tree: &'t PointerTree) -> &'t [SlotId] {
        self.target.map_or(&[], |node| &tree.wanted(node).numbers)
    }

    fn open(&mut self, is_object: bool, tree: &PointerTree, values: &mut Values) {
        values.set(self.number_slots(tree), Value::Unreadable);
        if self.depth == DEPTH_MAX {
            self.state = State::Deep(1);
            self.has_unchecked = true;
            return;
        }
        let (word, bit) = (self.depth as usize / 64, 1 << (self.depth % 64));
        self.objects[word] = if is_object { self.objects[word] | bit } else { self.objects[word] & !bit };
        self.depth += 1;
        self.containers.extend(self.target.take().map(|node| Container { node, index: 0, numbers: 0 }));
        if is_object {
            self.state = State::NameOrEnd;
        } else {
            self.state = State::ValueOrEnd;
            self.start_element(tree);
        }
    }

    fn close(&mut self, tree: &PointerTree, values: &mut Values) {
        if self.is_on_the_way()
            && let Some(Container { node, index, numbers }) = self.containers.pop()
            && !self.is_in_object()
        {
            let elements = if self.state == State::ValueOrEnd { 0 } else { index };
            values.set(&tree.wanted(node).numbers, Value::Array(elements - numbers));
        }
        self.depth -= 1;
        self.end_value(values);
    }

    #[inline]
    fn end_value(&mut self, values: &mut Values) {
        self.target = None;
        self.state = if self.depth == 0 { State::End } else { State::CommaOrEnd };
        if self.depth == 1 && self.reads_elements && !self.is_in_object() {
            values.commit();
        }
    }

    fn end_number(&mut self, tree: &PointerTree, values: &mut Values) {
        if !self.number.is_complete() {
            self.state = State::Malformed;
            return;
        }
        if self.is_on_the_way()
            && let Some(container) = self.containers.last_mut()
        {
            container.numbers += 1;
        }
        let slots = self.number_slots(tree);
        if !slots.is_empty() {
            let unreadable = || if self.number.is_too_great() { Value::TooGreat } else { Value::Unreadable };
            values.set(slots, self.number.value().map_or_else(unreadable, Value::Number));
        }
        let texts = self.texts(tree);
        if !texts.is_empty() {
            values.set_text(texts, self.number.value().map(|number| number.to_string()).as_deref().map(str::as_bytes));
        }
        self.end_value(values);
    }

    /// A byte of an escape or a literal.
    fn part(&mut self, byte: u8, values: &mut Values) {
        match self.state {
            State::Literal([expected, rest @ ..]) if *expected == byte => match rest {
                [] => self.end_value(values),
                rest => self.state = State::Literal(rest),
            },
            State::Escape => {
                let plain = match byte {
                    b'"' | b'\\' | b'/' => byte,
                    b'b' => 8,
                    b'f' => 12,
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'u' => return self.state = State::Unicode { left: 4, code: 0 },
                    _ => return self.state = State::Malformed,
                };
                self.text.push(&[plain]);
                self.state = State::String;
            }
            State::Unicode { left, code } => {
                let Some(digit) = char::from(byte).to_digit(16) else { return self.state = State::Malformed };
                let code = code << 4 | digit as u16;
                self.state = State::Unicode { left: left - 1, code };
                if left == 1 {
                    self.text.push_utf16(code);
                    self.state = State::String;
                }
            }
            _ => self.state = State::Malformed,
        }
    }

    /// Bytes of a string. Returns what follows the part that was read.
    #[inline]
    fn string<'b>(&mut self, tree: &PointerTree, values: &mut Values, bytes: &'b [u8]) -> &'b [u8] {
        let (plain, rest) = bytes.split_at(plain_length(bytes));
        if self.text.is_wanted {
            self.text.push(plain);
        }
        let Some((&byte, rest)) = rest.split_first() else { return rest };
        match byte {
            b'"' if self.is_name => self.end_name(tree, values),
            b'"' => {
                if self.text.is_wanted {
                    values.set_text(self.texts(tree), self.text.finish());
                }
                self.end_value(values);
            }
            b'\\' => self.state = State::Escape,
            _control => self.state = State::Malformed,
        }
        rest
    }

    fn end_name(&mut self, tree: &PointerTree, values: &mut Values) {
        self.state = State::Colon;
        self.target = None;
        if self.text.is_wanted
            && let (Some(container), Some(name)) = (self.containers.last(), self.text.finish())
            && let Some(node) = tree.member(container.node, name)
        {
            self.target = Some(node);
            values.begin_member(tree, node);
        }
    }

    /// A byte below the levels that are checked.
    fn skip_deep(&mut self, byte: u8, values: &mut Values) {
        self.state = match (self.state, byte) {
            (State::Deep(levels), b'{' | b'[') => State::Deep(levels + 1),
            (State::Deep(1), b'}' | b']') => return self.end_value(values),
            (State::Deep(levels), b'}' | b']') => State::Deep(levels - 1),
            (State::Deep(levels), b'"') => State::DeepString(levels),
            (State::DeepString(levels), b'"') => State::Deep(levels),
            (State::DeepString(levels), b'\\') => State::DeepEscape(levels),
            (State::DeepEscape(levels), _) => State::DeepString(levels),
            (state, _) => state,
        };
    }
}

impl Text {
    #[inline]
    fn start(&mut self, is_wanted: bool) {
        self.is_wanted = is_wanted;
        if is_wanted {
            self.bytes.clear();
            (self.is_unusable, self.high_surrogate) = (false, 0);
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.is_wanted && !bytes.is_empty() {
            let fits = self.bytes.len() + bytes.len() <= TEXT_MAX_BYTES;
            self.is_unusable |= !fits || self.high_surrogate != 0;
            if fits {
                self.bytes.extend_from_slice(bytes);
            }
        }
    }

    /// A code unit of an escape. A character beyond the basic plane is a pair of them.
    fn push_utf16(&mut self, unit: u16) {
        let high = std::mem::take(&mut self.high_surrogate);
        match (high, unit) {
            (0, 0xD800..=0xDBFF) => self.high_surrogate = unit,
            (0, _) => self.push_code(u32::from(unit)),
            (_, 0xDC00..=0xDFFF) => {
                self.push_code(0x10000 + (u32::from(high - 0xD800) << 10) + u32::from(unit - 0xDC00))
            }
            _ => self.is_unusable = true,
        }
    }

    fn push_code(&mut self, code: u32) {
        match char::from_u32(code) {
            Some(character) => self.push(character.encode_utf8(&mut [0; 4]).as_bytes()),
            None => self.is_unusable = true,
        }
    }

    /// The whole text; `None` if it is unusable.
    fn finish(&self) -> Option<&[u8]> {
        (!self.is_unusable && self.high_surrogate == 0).then_some(&self.bytes)
    }
}

/// The number of bytes before the next quote, backslash or control character.
#[inline]
fn plain_length(bytes: &[u8]) -> usize {
    let is_special = |byte: u8| byte < 0x20 || byte == b'"' || byte == b'\\';
    // Most texts are short. A word at a time costs less than a byte, and than the preparation of longer blocks.
    let mut at = 0;
    while let Some(word) = bytes.get(at..at + 8).filter(|_| at < SHORT_BYTES) {
        let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
        let found = special_bytes(word);
        if found != 0 {
            return at + found.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    // Blocks that the compiler checks with vector instructions.
    for block in bytes[at..].chunks_exact(BLOCK_BYTES) {
        if block.iter().fold(false, |found, byte| found | is_special(*byte)) {
            break;
        }
        at += BLOCK_BYTES;
    }
    at + bytes[at..].iter().position(|byte| is_special(*byte)).unwrap_or(bytes.len() - at)
}

const SHORT_BYTES: usize = 32;
const BLOCK_BYTES: usize = 32;

/// Sets the upper bit of the first byte that is a quote, a backslash or a control character, and none below it.
#[inline]
fn special_bytes(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let below = |word: u64, bound: u64| word.wrapping_sub(ONES * bound) & !word & (ONES << 7);
    let equal = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    below(word, 0x20) | equal(b'"') | equal(b'\\')
}
