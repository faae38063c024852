//! JSON Pointers (RFC 6901), and the tree of all pointers that are looked for in a document.

use std::fmt;

/// A position of the tree: the value at the root, or a member or element below it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeId(u16);

/// Where the value of a pointer is kept. Several pointers may share a slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SlotId(u16);

/// As [`SlotId`], of a text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TextId(u16);

/// What is read at a node, or at and below it.
#[derive(Default, Debug)]
pub struct Wanted {
    /// The slots that a number is kept in.
    pub numbers: Vec<SlotId>,
    /// Where a text, or a number or Boolean as text, is kept.
    pub texts: Vec<TextId>,
}

/// A pointer, as the names and indices on the way.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct JsonPointer(Vec<Box<str>>);

/// Why a text is no pointer that can be looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PointerError {
    /// It does not begin with a slash.
    NoSlash,
    /// `~` is followed neither by 0 nor by 1.
    InvalidEscape,
    /// It has more than [`DEPTH_MAX`] parts, or a part of more than [`NAME_MAX_BYTES`].
    TooLong,
}

pub const DEPTH_MAX: usize = 16;
pub const NAME_MAX_BYTES: usize = 128;

impl fmt::Display for PointerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PointerError::NoSlash => f.write_str("it does not begin with `/`"),
            PointerError::InvalidEscape => f.write_str("`~` is followed by neither `0` nor `1`"),
            PointerError::TooLong => {
                write!(f, "it has more than {DEPTH_MAX} parts, or a part of more than {NAME_MAX_BYTES} bytes")
            }
        }
    }
}

impl fmt::Display for JsonPointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| write!(f, "/{}", part.replace('~', "~0").replace('/', "~1")))
    }
}

impl JsonPointer {
    /// The name of the member that it points at; `None`: the whole document.
    pub fn name(&self) -> Option<&str> {
        self.0.last().map(|name| &**name)
    }

    pub fn parse(text: &str) -> Result<JsonPointer, PointerError> {
        if text.is_empty() {
            return Ok(JsonPointer(Vec::new()));
        }
        let parts: Vec<&str> = text.strip_prefix('/').ok_or(PointerError::NoSlash)?.split('/').collect();
        if parts.len() > DEPTH_MAX || parts.iter().any(|part| part.len() > NAME_MAX_BYTES) {
            return Err(PointerError::TooLong);
        }
        let unescaped = |part: &str| {
            let is_valid = part.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
            is_valid.then(|| part.replace("~1", "/").replace("~0", "~").into()).ok_or(PointerError::InvalidEscape)
        };
        parts.into_iter().map(unescaped).collect::<Result<_, _>>().map(JsonPointer)
    }
}

#[derive(Default, Debug)]
struct Node {
    children: Vec<Child>,
    here: Wanted,
    /// Of this node and of all nodes below it.
    below: Wanted,
}

#[derive(Debug)]
struct Child {
    name: Box<str>,
    /// The element of an array that the name selects.
    index: Option<u64>,
    node: NodeId,
}

/// The pointers that are looked for. Each node has few children, which are compared one by one.
#[derive(Debug)]
pub struct PointerTree {
    nodes: Vec<Node>,
    slots: u16,
    texts: u16,
    /// Whether names are equal that differ in the case of ASCII letters only, as some servers read them.
    ignores_case: bool,
}

impl Default for PointerTree {
    fn default() -> PointerTree {
        PointerTree { nodes: vec![Node::default(), Node::default()], slots: 0, texts: 0, ignores_case: false }
    }
}

impl PointerTree {
    pub const ROOT: NodeId = NodeId(0);
    /// The root of pointers into the elements of an array at the root.
    pub const ELEMENT: NodeId = NodeId(1);

    pub fn ignoring_case() -> PointerTree {
        PointerTree { ignores_case: true, ..PointerTree::default() }
    }

    pub fn add_text(&mut self) -> TextId {
        self.texts += 1;
        TextId(self.texts - 1)
    }

    pub fn texts(&self) -> usize {
        self.texts.into()
    }

    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    pub fn add_slot(&mut self) -> SlotId {
        self.slots += 1;
        SlotId(self.slots - 1)
    }

    pub fn slots(&self) -> usize {
        self.slots.into()
    }

    /// Looks for a number below a root, to be kept in `slot`.
    pub fn want_number(&mut self, root: NodeId, pointer: &JsonPointer, slot: SlotId) {
        self.want(root, pointer, |wanted| wanted.numbers.push(slot));
    }

    /// Looks for a text below a root.
    pub fn want_text(&mut self, root: NodeId, pointer: &JsonPointer, text: TextId) {
        self.want(root, pointer, |wanted| wanted.texts.push(text));
    }

    fn want(&mut self, root: NodeId, pointer: &JsonPointer, add: impl Fn(&mut Wanted)) {
        let mut node = root;
        add(&mut self.node_mut(node).below);
        for name in &pointer.0 {
            node = self.member(node, name.as_bytes()).unwrap_or_else(|| self.insert(node, name));
            add(&mut self.node_mut(node).below);
        }
        add(&mut self.node_mut(node).here);
    }

    fn insert(&mut self, parent: NodeId, name: &str) -> NodeId {
        let node = NodeId(self.nodes.len() as u16);
        self.nodes.push(Node::default());
        let is_index = name.bytes().all(|byte| byte.is_ascii_digit()) && (name == "0" || !name.starts_with('0'));
        let index = if is_index { name.parse().ok() } else { None };
        self.node_mut(parent).children.push(Child { name: name.into(), index, node });
        node
    }

    #[inline]
    pub fn member(&self, node: NodeId, name: &[u8]) -> Option<NodeId> {
        let mut children = self.node(node).children.iter();
        let is_equal =
            |child: &&Child| child.name.as_bytes() == name || self.ignores_case && is_same_name(&child.name, name);
        children.find(is_equal).map(|child| child.node)
    }

    #[inline]
    pub fn element(&self, node: NodeId, index: u64) -> Option<NodeId> {
        self.node(node).children.iter().find(|child| child.index == Some(index)).map(|child| child.node)
    }

    #[inline]
    pub fn wanted(&self, node: NodeId) -> &Wanted {
        &self.node(node).here
    }

    pub fn wanted_below(&self, node: NodeId) -> &Wanted {
        &self.node(node).below
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.nodes[usize::from(node.0)]
    }

    fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[usize::from(node.0)]
    }
}

impl SlotId {
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl TextId {
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl NodeId {
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// Whether names are equal without regard to case, as Go's decoder compares them: the long s (U+017F) is an s, and the sign of the
/// kelvin (U+212A) a k.
pub fn is_same_name(known: &str, name: &[u8]) -> bool {
    known.as_bytes().eq_ignore_ascii_case(name) || is_folded_equal(known, name)
}

#[cold]
fn is_folded_equal(known: &str, name: &[u8]) -> bool {
    let fold = |sign: char| sign.to_uppercase().flat_map(char::to_lowercase);
    let is_ascii = known.is_ascii() && name.is_ascii();
    let name = std::str::from_utf8(name).ok().filter(|_| !is_ascii);
    name.is_some_and(|name| known.chars().flat_map(fold).eq(name.chars().flat_map(fold)))
}
