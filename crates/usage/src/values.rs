//! The values that were found at pointers: in the document that is being read, and in all documents before it.

use super::decimal::Decimal;
use super::json_pointer::{NodeId, PointerTree, SlotId, TextId};

/// What was found at the pointers of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Value {
    #[default]
    Absent,
    /// Something else than a number, or a number that is negative or too small for a [`Decimal`].
    Unreadable,
    /// A number that is greater than a [`Decimal`] can be.
    TooGreat,
    /// An array, with so many elements that are no numbers.
    Array(u64),
    Number(Decimal),
}

/// Longer texts are not read.
pub const TEXT_MAX_BYTES: usize = 1024;

/// What was found at the pointers of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Text<'a> {
    /// Nothing, `null`, an array or an object.
    Absent,
    /// A text that is too long or not Unicode, or a number that a [`Decimal`] cannot hold.
    Unreadable,
    Found(&'a str),
}

#[derive(Clone, Default, Debug)]
struct StoredText {
    bytes: Vec<u8>,
    is_found: bool,
    is_unreadable: bool,
}

impl StoredText {
    fn clear(&mut self) {
        self.bytes.clear();
        (self.is_found, self.is_unreadable) = (false, false);
    }
}

/// The last value of each slot and text.
#[derive(Debug)]
pub struct Values {
    document: Vec<Value>,
    all: Vec<Value>,
    document_texts: Vec<StoredText>,
    texts: Vec<StoredText>,
    /// Members of the current document on the way to a pointer, by node.
    seen: Vec<bool>,
    has_repeated_member: bool,
}

impl Values {
    pub fn new(tree: &PointerTree) -> Values {
        let (absent, texts) = (vec![Value::Absent; tree.slots()], vec![StoredText::default(); tree.texts()]);
        Values {
            document: absent.clone(),
            all: absent,
            document_texts: texts.clone(),
            texts,
            seen: vec![false; tree.nodes()],
            has_repeated_member: false,
        }
    }

    /// A member begins, on the way to a pointer. Forgets what the current document has stated at and below it, if it appears
    /// again: of members with equal names, the last one counts.
    pub fn begin_member(&mut self, tree: &PointerTree, node: NodeId) {
        if !std::mem::replace(&mut self.seen[node.index()], true) {
            return;
        }
        self.has_repeated_member = true;
        let wanted = tree.wanted_below(node);
        self.set(&wanted.numbers, Value::Absent);
        wanted.texts.iter().for_each(|text| self.document_texts[text.index()].clear());
    }

    /// Whether a document has a member twice on the way to a pointer.
    pub fn has_repeated_member(&self) -> bool {
        self.has_repeated_member
    }

    pub fn set(&mut self, slots: &[SlotId], value: Value) {
        for slot in slots {
            self.document[slot.index()] = value;
        }
    }

    /// `None`: a text that is unreadable.
    pub fn set_text(&mut self, texts: &[TextId], text: Option<&[u8]>) {
        for id in texts {
            let stored = &mut self.document_texts[id.index()];
            stored.clear();
            stored.bytes.extend_from_slice(text.unwrap_or_default());
            (stored.is_found, stored.is_unreadable) = (true, text.is_none());
        }
    }

    /// The current document has ended: its values replace those of earlier documents.
    pub fn commit(&mut self) {
        for (value, stated) in self.all.iter_mut().zip(&mut self.document) {
            if *stated != Value::Absent {
                *value = std::mem::take(stated);
            }
        }
        for (text, stated) in self.texts.iter_mut().zip(&mut self.document_texts) {
            // A text that says nothing does not replace one that was read.
            let says_nothing = stated.is_unreadable || stated.bytes.is_empty();
            if stated.is_found && !(text.is_found && says_nothing) {
                std::mem::swap(text, stated);
            }
            stated.clear();
        }
        self.seen.fill(false);
    }

    /// Forgets the current document.
    pub fn discard(&mut self) {
        self.document.fill(Value::Absent);
        self.document_texts.iter_mut().for_each(StoredText::clear);
        self.seen.fill(false);
    }

    /// Of the documents that have ended.
    pub fn get(&self, slot: SlotId) -> Value {
        self.all[slot.index()]
    }

    /// As [`Values::get`].
    pub fn text(&self, text: TextId) -> Text<'_> {
        let StoredText { bytes, is_found, is_unreadable } = &self.texts[text.index()];
        match std::str::from_utf8(bytes) {
            _ if !is_found => Text::Absent,
            Ok(text) if !is_unreadable => Text::Found(text),
            _ => Text::Unreadable,
        }
    }
}
