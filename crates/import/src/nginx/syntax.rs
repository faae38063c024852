//! The syntax of nginx.conf: directives with blocks, quotes, comments, variables, and included files.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::Files;
use crate::source::{ImportError, Position};

/// Deepest nesting of blocks and of included files.
const DEPTH_MAX: usize = 64;
const INCLUDE_DEPTH_MAX: usize = 16;
/// Most files that one configuration may include.
const FILES_MAX: usize = 1000;

/// A directive with its block.
#[derive(Debug)]
pub struct Directive {
    pub name: String,
    pub arguments: Vec<String>,
    pub block: Option<Vec<Directive>>,
    pub position: Position,
    pub fate: Cell<Fate>,
}

/// What became of a directive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Unread,
    Translated,
    /// A note says why not.
    LeftOut,
}

impl Directive {
    /// The first argument; empty if there is none.
    pub fn argument(&self) -> &str {
        self.arguments.first().map_or("", String::as_str)
    }

    pub fn children(&self) -> &[Directive] {
        self.block.as_deref().unwrap_or_default()
    }

    /// `NAME=VALUE` among the arguments.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='))
    }

    pub fn has(&self, word: &str) -> bool {
        self.arguments.iter().any(|argument| argument == word)
    }

    pub fn mark(&self, fate: Fate) {
        if self.fate.get() != Fate::LeftOut {
            self.fate.set(fate);
        }
    }

    /// As it is written, on one line.
    pub fn text(&self) -> String {
        let mut text = self.name.clone();
        for argument in &self.arguments {
            text.push(' ');
            text.push_str(argument);
        }
        if self.block.is_some() {
            text.push_str(" { … }");
        }
        match text.char_indices().nth(100) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        }
    }
}

#[derive(PartialEq, Eq, Debug)]
enum Token {
    Word(String),
    /// `;`, `{` or `}`
    Sign(char),
}

struct Tokenizer<'t> {
    text: &'t str,
    at: usize,
    line: usize,
    file: Rc<str>,
}

impl Tokenizer<'_> {
    fn position(&self) -> Position {
        Position { file: self.file.clone(), line: self.line }
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        self.line += usize::from(c == '\n');
        Some(c)
    }

    fn next(&mut self) -> Result<Option<(Token, Position)>, ImportError> {
        while let Some(c) = self.peek() {
            if c == '#' {
                while self.peek().is_some_and(|c| c != '\n') {
                    self.take();
                }
            } else if !c.is_whitespace() {
                break;
            } else {
                self.take();
            }
        }
        let position = self.position();
        let token = match self.peek() {
            None => return Ok(None),
            Some(sign @ (';' | '{' | '}')) => {
                self.take();
                Token::Sign(sign)
            }
            Some(quote @ ('"' | '\'')) => {
                self.take();
                Token::Word(self.quoted(quote, &position)?)
            }
            Some(_) => Token::Word(self.word()),
        };
        Ok(Some((token, position)))
    }

    fn quoted(&mut self, quote: char, start: &Position) -> Result<String, ImportError> {
        let mut text = String::new();
        while let Some(c) = self.take() {
            match c {
                '\\' => text.push_str(&self.escape()),
                c if c == quote => return Ok(text),
                c => text.push(c),
            }
        }
        Err(ImportError::at(start, format!("the quote {quote} is not closed"), format!("close it with {quote}")))
    }

    fn word(&mut self) -> String {
        let mut text = String::new();
        while let Some(c) = self.peek() {
            match c {
                // A variable: ${name}
                '{' if text.ends_with('$') => {
                    while let Some(c) = self.take() {
                        text.push(c);
                        if c == '}' || c.is_whitespace() {
                            break;
                        }
                    }
                }
                ';' | '{' => break,
                c if c.is_whitespace() => break,
                '\\' => {
                    self.take();
                    text.push_str(&self.escape());
                }
                c => {
                    self.take();
                    text.push(c);
                }
            }
        }
        text
    }

    /// What an escape stands for. Others than these stay as they are, for regular expressions.
    fn escape(&mut self) -> String {
        match self.take() {
            Some(c @ ('"' | '\'' | '\\')) => c.to_string(),
            Some('t') => "\t".to_owned(),
            Some('r') => "\r".to_owned(),
            Some('n') => "\n".to_owned(),
            Some(c) => format!("\\{c}"),
            None => "\\".to_owned(),
        }
    }

    /// Skips a block of Lua behind its brace.
    fn skip_code(&mut self) -> bool {
        let mut depth = 1;
        while let Some(c) = self.take() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return true;
            }
        }
        false
    }
}

/// Blocks that may stand behind a directive whose `;` is missing.
const BLOCKS: [&str; 7] = ["http", "server", "location", "upstream", "if", "map", "geo"];

/// Reads files and what they include.
pub struct Reader<'f> {
    files: &'f Files<'f>,
    included: usize,
}

impl Reader<'_> {
    pub fn new<'f>(files: &'f Files<'f>) -> Reader<'f> {
        Reader { files, included: 0 }
    }

    pub fn read(&mut self, path: &Path) -> Result<Vec<Directive>, ImportError> {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let text = self.files.text(path)?;
        self.parse(&text, path, &folder, 0)
    }

    fn parse(&mut self, text: &str, path: &Path, folder: &Path, depth: usize) -> Result<Vec<Directive>, ImportError> {
        let file = path.display().to_string().into();
        let mut tokens = Tokenizer { text, at: 0, line: 1, file };
        self.parse_block(&mut tokens, folder, None, depth, 0)
    }

    /// `opened`: where the block begins.
    fn parse_block(
        &mut self,
        tokens: &mut Tokenizer,
        folder: &Path,
        opened: Option<&Position>,
        include_depth: usize,
        depth: usize,
    ) -> Result<Vec<Directive>, ImportError> {
        let mut directives = Vec::new();
        let mut words: Vec<String> = Vec::new();
        let mut start = tokens.position();
        while let Some((token, position)) = tokens.next()? {
            match token {
                Token::Word(word) => {
                    if words.is_empty() {
                        start = position;
                    }
                    words.push(word);
                }
                Token::Sign('}') if words.is_empty() && opened.is_some() => return Ok(directives),
                Token::Sign('}') if words.is_empty() => {
                    return Err(ImportError::at(&position, "`}` without a `{`", "remove it"));
                }
                Token::Sign(sign) if words.is_empty() => {
                    return Err(ImportError::at(&position, format!("`{sign}` without a directive"), "remove it"));
                }
                Token::Sign('}') => {
                    let message = format!("`{}` does not end with `;`", words.join(" "));
                    return Err(ImportError::at(&start, message, "write a `;` behind it"));
                }
                Token::Sign('{')
                    if !BLOCKS.contains(&words[0].as_str())
                        && words.iter().any(|word| BLOCKS.contains(&word.as_str())) =>
                {
                    let message = format!("`{}` does not end with `;`", words[0]);
                    return Err(ImportError::at(&start, message, "write a `;` behind it"));
                }
                Token::Sign(sign) => {
                    let mut words = std::mem::take(&mut words).into_iter();
                    let name = words.next().unwrap_or_default();
                    let fate = Cell::new(Fate::Unread);
                    let position = start.clone();
                    let mut directive = Directive { name, arguments: words.collect(), block: None, position, fate };
                    if sign == '{' && directive.name.ends_with("_by_lua_block") {
                        if !tokens.skip_code() {
                            return Err(unclosed(&start));
                        }
                        directive.block = Some(Vec::new());
                    } else if sign == '{' {
                        if depth >= DEPTH_MAX {
                            return Err(ImportError::at(&start, "too many nested blocks", ""));
                        }
                        let block = self.parse_block(tokens, folder, Some(&start), include_depth, depth + 1)?;
                        directive.block = Some(block);
                    }
                    if directive.name == "include" && sign == ';' {
                        directives.extend(self.include(&directive, folder, include_depth)?);
                    }
                    directives.push(directive);
                }
            }
        }
        match (words.is_empty(), opened) {
            (false, _) => {
                let message = format!("`{}` does not end with `;`", words.join(" "));
                Err(ImportError::at(&start, message, "write a `;` behind it"))
            }
            (true, Some(opened)) => Err(unclosed(opened)),
            (true, None) => Ok(directives),
        }
    }

    /// The directives of included files. The directive itself is left out if a file is missing.
    fn include(&mut self, directive: &Directive, folder: &Path, depth: usize) -> Result<Vec<Directive>, ImportError> {
        if depth >= INCLUDE_DEPTH_MAX {
            return Err(ImportError::at(&directive.position, "too many files include one another", ""));
        }
        let pattern = folder.join(directive.argument());
        let Some(paths) = self.matching_files(&pattern) else {
            return Ok(Vec::new());
        };
        let mut directives = Vec::new();
        for path in paths {
            self.included += 1;
            if self.included > FILES_MAX {
                return Err(ImportError::at(&directive.position, "more than 1000 files are included", ""));
            }
            match self.files.text(&path) {
                Ok(text) => directives.extend(self.parse(&text, &path, folder, depth + 1)?),
                Err(_missing) => return Ok(directives),
            }
        }
        directive.mark(Fate::Translated);
        Ok(directives)
    }

    /// The files that a path with `*`, `?` or `[…]` names, sorted; `None` if the folder cannot be read.
    fn matching_files(&self, pattern: &Path) -> Option<Vec<PathBuf>> {
        if !pattern.to_string_lossy().contains(['*', '?', '[']) {
            return Some(vec![pattern.to_owned()]);
        }
        let mut found = vec![PathBuf::new()];
        for part in pattern.components() {
            let part = part.as_os_str().to_string_lossy().into_owned();
            if !part.contains(['*', '?', '[']) {
                found.iter_mut().for_each(|path| path.push(&part));
                continue;
            }
            let mut next = Vec::new();
            for folder in &found {
                let mut names = (self.files.folders)(folder).ok()?;
                names.retain(|name| (!name.starts_with('.') || part.starts_with('.')) && glob_matches(&part, name));
                names.sort();
                next.extend(names.into_iter().map(|name| folder.join(name)));
            }
            found = next;
        }
        Some(found)
    }
}

fn unclosed(opened: &Position) -> ImportError {
    ImportError::at(opened, "this block is not closed", "close it with `}`")
}

/// Whether a name matches a pattern with `*`, `?` and `[abc]`.
fn glob_matches(pattern: &str, name: &str) -> bool {
    let Some(first) = pattern.chars().next() else { return name.is_empty() };
    let rest = &pattern[first.len_utf8()..];
    let next = name.chars().next();
    let after = next.map_or("", |c| &name[c.len_utf8()..]);
    match first {
        '*' => glob_matches(rest, name) || (next.is_some() && glob_matches(pattern, after)),
        '?' => next.is_some() && glob_matches(rest, after),
        '[' if rest.contains(']') => {
            let (class, rest) = rest.split_once(']').unwrap_or_default();
            let (class, is_negated) = match class.strip_prefix(['!', '^']) {
                Some(class) => (class, true),
                None => (class, false),
            };
            let class: Vec<char> = class.chars().collect();
            let is_in = |c: char| {
                let ranges = class.windows(3).any(|range| range[1] == '-' && (range[0]..=range[2]).contains(&c));
                ranges || class.contains(&c)
            };
            next.is_some_and(|c| is_in(c) != is_negated) && glob_matches(rest, after)
        }
        c => next == Some(c) && glob_matches(rest, after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Files;

    fn parse(text: &str) -> Result<Vec<Directive>, ImportError> {
        Reader::new(&Files::NONE).parse(text, Path::new("nginx.conf"), Path::new(""), 0)
    }

    #[test]
    fn words_quotes_comments_and_variables() {
        let all = parse("a 'b c' \"d\\\"e\" ${x}y # comment ; {\n;location ~ ^/v\\d+\\.x$ { b \"#;{\"; }").unwrap();
        assert_eq!((all[0].name.as_str(), all[0].arguments.join("|")), ("a", "b c|d\"e|${x}y".to_owned()));
        assert_eq!(all[1].arguments, ["~", "^/v\\d+\\.x$"]);
        assert_eq!((all[1].position.line, all[1].children()[0].argument()), (2, "#;{"));
        let lua = parse("content_by_lua_block { if x then y = { 1; } end } a;").unwrap();
        assert_eq!(lua.len(), 2);
    }

    #[test]
    fn mistakes_have_a_line() {
        let message = |text: &str| parse(text).unwrap_err().to_string().lines().next().unwrap().to_owned();
        assert_eq!(message("a;\nb {\n c"), "nginx.conf:3: `c` does not end with `;`");
        assert_eq!(message("a;\nb {\n c;"), "nginx.conf:2: this block is not closed");
        assert_eq!(message("a;\n}"), "nginx.conf:2: `}` without a `{`");
        assert_eq!(message("server { listen 80 location / {} }"), "nginx.conf:1: `listen` does not end with `;`");
        assert_eq!(message("\n'x"), "nginx.conf:2: the quote ' is not closed");
        assert_eq!(message(&"a {".repeat(100)), "nginx.conf:1: too many nested blocks");
    }

    #[test]
    fn globs() {
        for (pattern, name) in [("*.conf", "a.conf"), ("a?c", "abc"), ("[a-c]*", "bx"), ("*", ""), ("*b*", "abc")] {
            assert!(glob_matches(pattern, name), "{pattern} {name}");
        }
        assert!(!glob_matches("*.conf", "a.conf.bak") && !glob_matches("[!a]", "a"));
    }
}
