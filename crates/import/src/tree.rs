//! Documents of YAML, JSON and TOML as trees in which each setting has its line, and knows whether it was read.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use saphyr_parser::{Event, Parser};

use crate::gateway::{Gateway, Section};
use crate::source::{Effect, ImportError, Position};
use crate::{Files, Translated};

/// Most nodes of a document: aliases repeat what they name.
const NODES_MAX: usize = 200_000;
/// Bytes of texts that count as a node where an alias repeats them.
const NODE_BYTES: usize = 64;
const DEPTH_MAX: usize = 100;

#[derive(Clone, Debug)]
pub struct Node {
    pub content: Content,
    pub position: Position,
}

#[derive(Clone, Debug)]
pub enum Content {
    /// Also numbers, Booleans, and nothing: `""`.
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A setting.
#[derive(Clone, Debug)]
pub struct Entry {
    pub key: String,
    pub node: Node,
    fate: Cell<Fate>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Unread,
    Read,
    LeftOut,
}

impl Entry {
    fn new(key: String, node: Node) -> Entry {
        Entry { key, node, fate: Cell::new(Fate::Unread) }
    }

    /// Notes why a setting is left out, or in what it differs.
    pub fn note(&self, gateway: &mut Gateway, effect: Effect, why: &str) {
        self.mark(effect);
        gateway.note(effect, &self.node.position, format!("`{}`: {why}", self.text()));
    }

    /// As [`Entry::note`], with a comment in a section.
    pub fn note_at(&self, gateway: &mut Gateway, section: &mut Section, effect: Effect, why: &str) {
        let effect = section.effect(effect);
        self.mark(effect);
        section.comment(gateway.placed_note(effect, &self.node.position, format!("`{}`: {why}", self.text())));
    }

    /// Counts as not translated, without a note of its own.
    pub fn leave_out(&self) {
        self.fate.set(Fate::LeftOut);
    }

    fn mark(&self, effect: Effect) {
        self.fate.set(if effect <= Effect::LeftOut { Fate::LeftOut } else { Fate::Read });
    }

    /// As in a file, on one line; without long values.
    fn text(&self) -> String {
        match &self.node.content {
            Content::Text(value) if value.len() <= 60 => format!("{}: {value}", self.key),
            _ => self.key.clone(),
        }
    }
}

impl Node {
    fn entry(&self, key: &str) -> Option<&Entry> {
        match &self.content {
            Content::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// A setting that is read. `null` counts as missing.
    pub fn setting(&self, key: &str) -> Option<&Entry> {
        let entry = self.entry(key)?;
        if entry.fate.get() == Fate::Unread {
            entry.fate.set(Fate::Read);
        }
        (!matches!(&entry.node.content, Content::Text(text) if text.is_empty())).then_some(entry)
    }

    /// The value of a setting that is read.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.setting(key).map(|entry| &entry.node)
    }

    /// Follows a path of keys, such as `["metadata", "annotations"]`.
    pub fn at(&self, keys: &[&str]) -> Option<&Node> {
        keys.iter().try_fold(self, |node, key| node.get(key))
    }

    pub fn text(&self) -> Option<&str> {
        match &self.content {
            Content::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The text of a setting.
    pub fn text_of(&self, key: &str) -> Option<&str> {
        self.get(key)?.text()
    }

    pub fn number_of(&self, key: &str) -> Option<u64> {
        self.text_of(key)?.parse().ok()
    }

    /// A Boolean; a text that is none is `None`.
    pub fn bool_of(&self, key: &str) -> Option<bool> {
        match self.text_of(key)? {
            "true" | "True" | "TRUE" => Some(true),
            "false" | "False" | "FALSE" => Some(false),
            _ => None,
        }
    }

    /// The items of a list; a single value is a list of one.
    pub fn items(&self) -> &[Node] {
        match &self.content {
            Content::List(items) => items,
            Content::Text(text) if text.is_empty() => &[],
            _ => std::slice::from_ref(self),
        }
    }

    /// The items of a setting.
    pub fn list_of(&self, key: &str) -> &[Node] {
        self.get(key).map_or(&[], Node::items)
    }

    pub fn texts_of(&self, key: &str) -> Vec<&str> {
        self.list_of(key).iter().filter_map(Node::text).collect()
    }

    /// All settings, which count as read.
    pub fn settings(&self) -> &[Entry] {
        let Content::Map(entries) = &self.content else { return &[] };
        for entry in entries.iter().filter(|entry| entry.fate.get() == Fate::Unread) {
            entry.fate.set(Fate::Read);
        }
        entries
    }

    /// All settings, without reading them.
    pub fn entries(&self) -> &[Entry] {
        if let Content::Map(entries) = &self.content { entries } else { &[] }
    }

    /// Whether none of the settings was read.
    pub fn is_unread(&self) -> bool {
        self.entries().iter().all(|entry| entry.fate.get() == Fate::Unread)
    }

    /// Marks the settings as not translated, without a note of their own.
    pub fn leave_out(&self) {
        self.settings().iter().for_each(Entry::leave_out);
    }

    /// Marks all settings below as read: nothing is left to translate.
    pub fn mark_read(&self) {
        match &self.content {
            Content::Text(_) => {}
            Content::List(items) => items.iter().for_each(Node::mark_read),
            Content::Map(_) => self.settings().iter().for_each(|entry| entry.node.mark_read()),
        }
    }

    /// Marks the settings of these names as read, with all below them.
    pub fn ignore(&self, names: &[&str]) {
        names.iter().filter_map(|name| self.setting(name)).for_each(|entry| entry.node.mark_read());
    }

    /// Notes the unread settings below. Of a setting with settings, only itself.
    pub fn note_unread(&self, gateway: &mut Gateway, effect: Effect) {
        match &self.content {
            Content::Text(_) => {}
            Content::List(items) => items.iter().for_each(|item| item.note_unread(gateway, effect)),
            Content::Map(entries) => {
                for entry in entries {
                    match entry.fate.get() {
                        Fate::Unread => entry.note(gateway, effect, "it has no equivalent"),
                        Fate::Read => entry.node.note_unread(gateway, effect),
                        Fate::LeftOut => {}
                    }
                }
            }
        }
    }

    /// Adds the settings that have no settings below them, and those of them that were translated.
    pub fn count(&self, total: &mut usize, translated: &mut usize) {
        self.count_in(total, translated, true);
    }

    fn count_in(&self, total: &mut usize, translated: &mut usize, is_read: bool) {
        match &self.content {
            Content::Text(_) => {}
            Content::List(items) => items.iter().for_each(|item| item.count_in(total, translated, is_read)),
            Content::Map(entries) => {
                for entry in entries {
                    let is_read = is_read && entry.fate.get() == Fate::Read;
                    let has_settings = entry.node.items().iter().any(|item| matches!(item.content, Content::Map(_)));
                    if has_settings {
                        entry.node.count_in(total, translated, is_read);
                    } else {
                        *total += 1;
                        *translated += usize::from(is_read);
                    }
                }
            }
        }
    }
}

/// The error of files without what an importer needs.
pub fn nothing_in(documents: &[Node], message: &str, fix: &str) -> ImportError {
    let position = documents.first().map(|document| document.position.clone());
    ImportError { position, message: message.to_owned(), fix: fix.to_owned() }
}

/// Notes and counts what was not read.
pub fn translated<'d>(documents: impl IntoIterator<Item = &'d Node>, mut gateway: Gateway) -> Translated {
    let (mut total, mut translated) = (0, 0);
    for document in documents {
        document.note_unread(&mut gateway, Effect::LeftOut);
        document.count(&mut total, &mut translated);
    }
    Translated { gateway, total, translated }
}

/// The documents of all files. A file whose name ends with `.toml` is TOML, others are YAML or JSON.
pub fn read_all(files: &Files, paths: &[PathBuf]) -> Result<Vec<Node>, ImportError> {
    let mut documents = Vec::new();
    for path in paths {
        let text = files.text(path)?;
        match path.extension().is_some_and(|extension| extension == "toml") {
            true => documents.push(parse_toml(&text, path)?),
            false => documents.extend(parse_yaml(&text, path)?),
        }
    }
    Ok(documents)
}

struct YamlReader<'t> {
    parser: Parser<'t, saphyr_parser::StrInput<'t>>,
    file: Rc<str>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

fn parse_yaml(text: &str, path: &Path) -> Result<Vec<Node>, ImportError> {
    let file = path.display().to_string().into();
    let mut reader = YamlReader { parser: Parser::new_from_str(text), file, anchors: HashMap::new(), nodes: 0 };
    let mut documents = Vec::new();
    loop {
        let (event, position) = reader.next()?;
        match event {
            Event::StreamEnd => return Ok(documents),
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
            event => documents.push(reader.node(event, position, 0)?),
        }
    }
}

impl<'t> YamlReader<'t> {
    fn next(&mut self) -> Result<(Event<'t>, Position), ImportError> {
        let position = |line| Position { file: self.file.clone(), line };
        match self.parser.next() {
            Some(Ok((event, span))) => Ok((event, position(span.start.line()))),
            Some(Err(error)) => Err(ImportError::at(
                &position(error.marker().line()),
                format!("this is not YAML: {}", error.info()),
                "",
            )),
            None => Ok((Event::StreamEnd, position(1))),
        }
    }

    /// Counts nodes, of which a document has a limited number.
    fn count(&mut self, nodes: usize, depth: usize, position: &Position) -> Result<(), ImportError> {
        self.nodes += nodes;
        match self.nodes > NODES_MAX || depth > DEPTH_MAX {
            true => Err(ImportError::at(position, "the document is too large or too deep", "")),
            false => Ok(()),
        }
    }

    fn node(&mut self, event: Event<'t>, position: Position, depth: usize) -> Result<Node, ImportError> {
        self.count(1, depth, &position)?;
        let (content, anchor) = match event {
            Event::Alias(anchor) => {
                let mut node = self.anchors.get(&anchor).cloned();
                if let Some(node) = &mut node {
                    self.count(size(node), depth, &position)?;
                    node.position = position.clone();
                }
                return node.ok_or_else(|| ImportError::at(&position, "the alias names nothing", ""));
            }
            Event::Scalar(text, style, anchor, _) => {
                let is_null = style == saphyr_parser::ScalarStyle::Plain && ["~", "null", "Null"].contains(&&*text);
                (Content::Text(if is_null { String::new() } else { text.into_owned() }), anchor)
            }
            Event::SequenceStart(anchor, _) => {
                let mut items = Vec::new();
                loop {
                    match self.next()? {
                        (Event::SequenceEnd, _) => break,
                        (event, position) => items.push(self.node(event, position, depth + 1)?),
                    }
                }
                (Content::List(items), anchor)
            }
            Event::MappingStart(anchor, _) => (Content::Map(self.entries(depth)?), anchor),
            _ => return Err(ImportError::at(&position, "a value is missing", "")),
        };
        let node = Node { content, position };
        if anchor != 0 {
            // Nested anchors have copies of what is in them.
            self.count(size(&node), depth, &node.position)?;
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn entries(&mut self, depth: usize) -> Result<Vec<Entry>, ImportError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut keys = HashSet::new();
        let mut merged = Vec::new();
        loop {
            let (key, position) = match self.next()? {
                (Event::MappingEnd, _) => break,
                (event, position) => (self.node(event, position.clone(), depth + 1)?, position),
            };
            let (event, at) = self.next()?;
            let mut value = self.node(event, at, depth + 1)?;
            let Some(key) = key.text().map(str::to_owned) else {
                return Err(ImportError::at(&position, "a key is no text", ""));
            };
            if key == "<<" {
                merged.push(value);
                continue;
            }
            if !keys.insert(key.clone()) {
                return Err(ImportError::at(&position, format!("`{key}` is given twice"), "remove one of them"));
            }
            value.position = position;
            entries.push(Entry::new(key, value));
        }
        for map in merged.iter().flat_map(Node::items) {
            let Content::Map(more) = &map.content else { continue };
            for entry in more {
                if keys.insert(entry.key.clone()) {
                    entries.push(entry.clone());
                }
            }
        }
        Ok(entries)
    }
}

/// What a copy of a node counts.
fn size(node: &Node) -> usize {
    1 + match &node.content {
        Content::Text(text) => text.len() / NODE_BYTES,
        Content::List(items) => items.iter().map(size).sum(),
        Content::Map(entries) => entries.iter().map(|entry| entry.key.len() / NODE_BYTES + size(&entry.node)).sum(),
    }
}

fn parse_toml(text: &str, path: &Path) -> Result<Node, ImportError> {
    let file: Rc<str> = path.display().to_string().into();
    let position = |offset: usize| Position {
        file: file.clone(),
        line: text[..offset].bytes().filter(|byte| *byte == b'\n').count() + 1,
    };
    let table = toml::de::DeTable::parse(text).map_err(|error| {
        let at = position(error.span().map_or(0, |span| span.start));
        ImportError::at(&at, format!("this is not TOML: {}", error.message()), "")
    })?;
    Ok(Node { content: toml_map(table.get_ref(), &position), position: position(0) })
}

fn toml_map(table: &toml::de::DeTable, position: &dyn Fn(usize) -> Position) -> Content {
    let entry = |(key, value): (&toml::Spanned<std::borrow::Cow<str>>, &toml::Spanned<toml::de::DeValue>)| {
        let node = Node { position: position(key.span().start), ..toml_node(value, position) };
        Entry::new(key.get_ref().to_string(), node)
    };
    Content::Map(table.iter().map(entry).collect())
}

fn toml_node(value: &toml::Spanned<toml::de::DeValue>, position: &dyn Fn(usize) -> Position) -> Node {
    use toml::de::DeValue;
    let content = match value.get_ref() {
        DeValue::String(text) => Content::Text(text.to_string()),
        DeValue::Integer(number) => Content::Text(number.to_string()),
        DeValue::Float(number) => Content::Text(number.to_string()),
        DeValue::Boolean(value) => Content::Text(value.to_string()),
        DeValue::Datetime(time) => Content::Text(time.to_string()),
        DeValue::Array(items) => Content::List(items.iter().map(|item| toml_node(item, position)).collect()),
        DeValue::Table(table) => toml_map(table, position),
    };
    Node { content, position: position(value.span().start) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yaml(text: &str) -> Result<Vec<Node>, ImportError> {
        parse_yaml(text, Path::new("a.yml"))
    }

    #[test]
    fn settings_have_lines_and_are_counted() {
        let text = "a: 1\nb: &x\n  c: [1, 2]\n  d: ~\ne:\n  - <<: *x\n    f: yes\n---\nsecond: 2\n";
        let all = yaml(text).unwrap();
        let [first, second] = &all[..] else { panic!("{all:?}") };
        assert_eq!((first.number_of("a"), second.text_of("second")), (Some(1), Some("2")));
        let merged = &first.list_of("e")[0];
        assert_eq!((merged.texts_of("c"), merged.text_of("d")), (vec!["1", "2"], None));
        assert_eq!(merged.setting("f").unwrap().node.position.to_string(), "a.yml:7");
        let (mut total, mut translated) = (0, 0);
        first.count(&mut total, &mut translated);
        assert_eq!((total, translated), (6, 4));
        let mut gateway = Gateway::default();
        first.note_unread(&mut gateway, Effect::LeftOut);
        assert_eq!(gateway.notes.len(), 1);
    }

    #[test]
    fn mistakes_have_a_line() {
        let line = |text: &str| yaml(text).unwrap_err().position.unwrap().line;
        assert_eq!((line("a: 1\nb: [1\n"), line("a: 1\na: 2\n"), line("a: *b")), (3, 2, 1));
        let laughs = "a: &a [1,1,1,1,1,1,1,1]\n".to_owned()
            + &(0..9)
                .map(|n| {
                    let (this, next) = ((b'a' + n) as char, (b'b' + n) as char);
                    format!("{next}: &{next} [{}]\n", vec![format!("*{this}"); 9].join(","))
                })
                .collect::<String>();
        assert!(yaml(&laughs).unwrap_err().message.contains("too large"));
        let nested: String = (0..90).map(|n| format!("&n{n} [")).collect();
        let nested = format!("{nested}{}{}", "1,".repeat(10_000), "]".repeat(90));
        assert!(yaml(&nested).unwrap_err().message.contains("too large"));
        // Long texts and long keys, which aliases repeat.
        let long = "x".repeat(100_000);
        for anchor in [format!("\"{long}\""), format!("{{ ? {long} : 1 }}")] {
            let repeated = |times| yaml(&format!("a: &a {anchor}\nb:\n{}", "- { url: *a }\n".repeat(times)));
            assert!(repeated(100).is_ok());
            assert!(repeated(200).unwrap_err().message.contains("too large"));
        }
    }

    #[test]
    fn toml_is_a_tree_as_well() {
        let node = parse_toml("[http.routers.a]\nrule = \"x\"\nlist = [1, 2]\n", Path::new("a.toml")).unwrap();
        let router = node.at(&["http", "routers", "a"]).unwrap();
        assert_eq!((router.text_of("rule"), router.texts_of("list")), (Some("x"), vec!["1", "2"]));
        assert_eq!(router.setting("list").unwrap().node.position.line, 3);
        assert_eq!(parse_toml("a = 1\nb = ", Path::new("a.toml")).unwrap_err().position.unwrap().line, 2);
    }
}
