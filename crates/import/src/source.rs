//! Where the settings of an imported configuration stand, and what became of each.

use std::fmt;
use std::path::Path;
use std::rc::Rc;

/// A line of an imported file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Position {
    /// As it was named on the command line, or by an `include`.
    pub file: Rc<str>,
    /// Counted from 1.
    pub line: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A file that cannot be imported.
#[derive(PartialEq, Eq, Debug)]
pub struct ImportError {
    /// `None` if the file as a whole is unusable; then the message names it.
    pub position: Option<Position>,
    pub message: String,
    pub fix: String,
}

impl ImportError {
    pub fn at(position: &Position, message: impl Into<String>, fix: impl Into<String>) -> ImportError {
        ImportError { position: Some(position.clone()), message: message.into(), fix: fix.into() }
    }

    pub fn unreadable(file: &Path, error: &std::io::Error) -> ImportError {
        let message = format!("cannot read `{}`: {error}", file.display());
        ImportError { position: None, message, fix: String::new() }
    }
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.position {
            Some(position) => write!(f, "{position}: {}", self.message)?,
            None => write!(f, "transom: {}", self.message)?,
        }
        match self.fix.as_str() {
            "" => Ok(()),
            fix => write!(f, "\n  fix: {fix}"),
        }
    }
}

/// In what the gateway differs from the imported configuration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Effect {
    /// A limit or an access rule is missing: the gateway admits more.
    NotEnforced,
    /// Left out; it limits no requests.
    LeftOut,
    /// Translated, and the gateway admits less.
    Stricter,
    /// Translated, and the gateway behaves in another way.
    Differs,
}

impl Effect {
    pub fn name(self) -> &'static str {
        match self {
            Effect::NotEnforced => "not enforced",
            Effect::LeftOut => "left out",
            Effect::Stricter => "stricter",
            Effect::Differs => "differs",
        }
    }
}

/// One difference, for the report and a comment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Note {
    pub effect: Effect,
    pub position: Position,
    /// What is concerned, as written, and why.
    pub text: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.position, self.effect.name(), self.text)
    }
}
