//! The values that were found at pointers: in the document that is being read, and in all documents before it.

use super::decimal::Decimal;
use super::json_pointer::{NodeId, PointerTree, SlotId};

/// What was found at the pointers of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Value {
    #[default]
    Absent,
    /// Something else than a number, or a number that a [`Decimal`] cannot hold.
    Unreadable,
    Number(Decimal),
}

/// Longer names of models are not read.
pub const MODEL_MAX_BYTES: usize = 128;

/// The last value of each slot.
pub struct Values {
    document: Vec<Value>,
    all: Vec<Value>,
    document_model: Vec<u8>,
    model: Vec<u8>,
}

impl Values {
    pub fn new(tree: &PointerTree) -> Values {
        let absent = vec![Value::Absent; tree.slots()];
        Values { document: absent.clone(), all: absent, document_model: Vec::new(), model: Vec::new() }
    }

    /// Forgets what the current document has stated at and below a node, which appears again: of members with equal names, the last
    /// one counts.
    pub fn forget(&mut self, tree: &PointerTree, node: NodeId) {
        let wanted = tree.wanted_below(node);
        self.set(&wanted.numbers, Value::Absent);
        if wanted.model {
            self.document_model.clear();
        }
    }

    pub fn set(&mut self, slots: &[SlotId], value: Value) {
        for slot in slots {
            self.document[slot.index()] = value;
        }
    }

    pub fn set_model(&mut self, name: &[u8]) {
        self.document_model.clear();
        self.document_model.extend_from_slice(name);
    }

    /// The current document has ended: its values replace those of earlier documents.
    pub fn commit(&mut self) {
        for (value, stated) in self.all.iter_mut().zip(&mut self.document) {
            if *stated != Value::Absent {
                *value = std::mem::take(stated);
            }
        }
        if !self.document_model.is_empty() {
            std::mem::swap(&mut self.model, &mut self.document_model);
            self.document_model.clear();
        }
    }

    /// Forgets the current document.
    pub fn discard(&mut self) {
        self.document.fill(Value::Absent);
        self.document_model.clear();
    }

    /// Of the documents that have ended.
    pub fn get(&self, slot: SlotId) -> Value {
        self.all[slot.index()]
    }

    /// The name of the model; `None` if it is absent or not UTF-8.
    pub fn model(&self) -> Option<&str> {
        std::str::from_utf8(&self.model).ok().filter(|name| !name.is_empty())
    }
}
