//! Problems of a configuration: where they are, and how to fix them.
//!
//! A [`Report`] collects all [`Problem`]s while a file is read, so that an operator can fix them in one attempt. It also
//! reads the files that the text names. This file does not know settings; it only points into a text.

use std::fmt::Write;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::redaction::{HiddenValues, Secrets};
use super::sources::IncludedFile;

/// A parsed value, or the message and the fix of a problem.
pub type Parsed<T> = Result<T, (String, String)>;

/// A range of bytes in the text.
pub type Span = Range<usize>;

/// Returns the contents of a file that the configuration names.
pub type ReadFile<'f> = &'f dyn Fn(&Path) -> io::Result<Vec<u8>>;

/// Returns the names of the files in a folder.
pub type ListFolder<'l> = &'l dyn Fn(&Path) -> io::Result<Vec<String>>;

/// Returns the value of an environment variable, if it is set.
pub type ReadVariable<'v> = &'v dyn Fn(&str) -> Option<Vec<u8>>;

/// What a configuration may name.
#[derive(Clone, Copy)]
pub struct Inputs<'i> {
    pub files: ReadFile<'i>,
    pub folders: ListFolder<'i>,
    pub variables: ReadVariable<'i>,
    /// A client that is about to be added to the clients file, and may be named already.
    pub new_client: Option<&'i str>,
}

impl Inputs<'_> {
    /// No files, no folders and no variables.
    pub const NONE: Inputs<'static> = Inputs {
        files: &|_path| Err(io::ErrorKind::Unsupported.into()),
        folders: &|_path| Err(io::ErrorKind::Unsupported.into()),
        variables: &|_name| None,
        new_client: None,
    };
}

/// Longer values are truncated in messages.
const VALUE_CHARS: usize = 60;
/// Of longer lines, messages show a part around the problem.
const LINE_CHARS: usize = 120;

/// One problem, with its position and fix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// `None` for the configuration itself; otherwise a file that it names, as written there.
    pub file: Option<PathBuf>,
    /// Always inside the text and at character boundaries.
    pub span: Span,
    /// Counted from 1.
    pub line: usize,
    /// Counted from 1, in characters.
    pub column: usize,
    pub message: String,
    /// What to write instead, or what to do.
    pub fix: String,
    /// The line, with secrets masked; empty if the file may be secret as a whole.
    pub line_text: String,
}

/// Collects the problems of one text.
pub struct Report<'t> {
    pub text: &'t str,
    /// As in [`Problem::file`]. Messages do not repeat the text of such a file: it may be secret.
    file: Option<PathBuf>,
    line_starts: Vec<usize>,
    problems: Vec<Problem>,
    /// Statements that are not TOML were skipped, so a setting that seems missing may be in one of them.
    pub has_syntax_errors: bool,
    /// Keys that belong before the first table header.
    pub top_level_keys: Vec<&'static str>,
    pub inputs: Inputs<'t>,
    included: &'t [IncludedFile],
    pub hidden: HiddenValues,
    /// The bytes that a token stands for, while a rule is read that counts bytes.
    pub size_unit: Option<u64>,
    /// Values that are not known, because of a problem that is reported already.
    unknown: Vec<Span>,
}

impl<'t> Report<'t> {
    /// A report on a text that names no files and environment variables.
    pub fn new(text: &'t str) -> Report<'t> {
        Report::with_inputs(text, &[], Inputs::NONE)
    }

    /// A report on a configuration, joined with the files that it includes.
    pub fn with_inputs(text: &'t str, included: &'t [IncludedFile], inputs: Inputs<'t>) -> Report<'t> {
        Report {
            text,
            file: None,
            line_starts: line_starts(text),
            problems: Vec::new(),
            has_syntax_errors: false,
            top_level_keys: Vec::new(),
            inputs,
            included,
            hidden: HiddenValues::default(),
            size_unit: None,
            unknown: Vec::new(),
        }
    }

    /// A report on a file that the configuration names.
    pub fn for_named_file(text: &'t str, file: &Path) -> Report<'t> {
        Report { file: Some(file.to_owned()), ..Report::new(text) }
    }

    /// Adds the problems of a file that this one names.
    pub fn append(&mut self, other: Report) {
        self.problems.extend(other.problems);
    }

    /// Ignores later problems of a value that is not known.
    pub fn ignore_within(&mut self, value: Span) {
        self.unknown.push(value);
    }

    pub fn problem(&mut self, span: Span, message: impl Into<String>, fix: impl Into<String>) {
        if self.unknown.iter().any(|value| value.start <= span.start && span.end <= value.end) {
            return;
        }
        let span = self.clamp(span);
        let line = self.line_of_text(span.start);
        let column = self.text[self.line_starts[line - 1]..span.start].chars().count() + 1;
        let included = self.included_file(span.start).map(|file| file.path.clone());
        let (file, message, fix) = (self.file.clone().or(included), message.into(), fix.into());
        let is_secret = self.file.is_some();
        let line_text =
            self.text[self.line_starts[line - 1]..].lines().next().filter(|_| !is_secret).unwrap_or_default();
        let line_text = line_text.to_owned();
        self.problems.push(Problem { file, line: self.line(span.start), span, column, message, fix, line_text });
    }

    /// Reports a problem because of which there is no value.
    pub fn reject<T>(&mut self, span: Span, message: impl Into<String>, fix: impl Into<String>) -> Option<T> {
        self.problem(span, message, fix);
        None
    }

    /// The value of a text, unless the text is a problem.
    pub fn accept<T>(&mut self, span: Span, parsed: Parsed<T>) -> Option<T> {
        parsed.map_err(|(message, fix)| self.problem(span, message, fix)).ok()
    }

    /// Reports something that is missing or undefined. Ignored after syntax errors: the skipped text may contain it.
    pub fn missing(&mut self, span: Span, message: impl Into<String>, fix: impl Into<String>) {
        if !self.has_syntax_errors {
            self.problem(span, message, fix);
        }
    }

    /// Reads a file whose name is at `span`.
    pub fn read_file(&mut self, name: &str, span: &Span) -> Option<Vec<u8>> {
        let read = (self.inputs.files)(Path::new(name));
        read.map_err(|error| {
            let fix = "name a file that the gateway may read; a relative path starts at the folder of this file";
            self.problem(span.clone(), format!("cannot read {}: {error}", quoted(name)), fix);
        })
        .ok()
    }

    /// The line of a byte in its file, counted from 1.
    pub fn line(&self, offset: usize) -> usize {
        let first = self.included_file(offset).map_or(1, |file| self.line_of_text(file.start));
        self.line_of_text(offset) + 1 - first
    }

    /// The line of a byte, for a message about a byte at `seen_from`: `7`, or `7` of `conf.d/a.toml`.
    pub fn line_seen_from(&self, offset: usize, seen_from: usize) -> String {
        let line = self.line(offset).to_string();
        let path = |offset| self.included_file(offset).map(|file| file.path.display().to_string());
        match path(offset) {
            at if at == path(seen_from) => line,
            Some(at) => format!("{line} of {}", quoted(&at)),
            None => format!("{line} of the main file"),
        }
    }

    /// The included file of a byte; `None` for the main file.
    fn included_file(&self, offset: usize) -> Option<&'t IncludedFile> {
        self.included.iter().rev().find(|file| file.start <= offset)
    }

    fn line_of_text(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= offset).max(1)
    }

    /// The text of a span for a message, or `…` if the file may be secret.
    pub fn source(&self, span: Span) -> &'t str {
        if self.file.is_some() { "…" } else { &self.text[self.clamp(span)] }
    }

    /// The number of problems so far.
    pub fn count(&self) -> usize {
        self.problems.len()
    }

    /// The problems in the order of their positions, without secrets.
    pub fn into_problems(mut self) -> Vec<Problem> {
        if self.problems.is_empty() {
            return self.problems;
        }
        self.problems.sort_by(|a, b| (&a.file, a.span.start).cmp(&(&b.file, b.span.start)));
        self.problems.dedup();
        let secrets = Secrets::find(self.text);
        let masked = secrets.masked_text();
        for problem in self.problems.iter_mut().filter(|problem| !problem.line_text.is_empty()) {
            // A mask may have another length, but the same lines.
            let line = self.line_starts.partition_point(|start| *start <= problem.span.start).max(1);
            problem.line_text = masked.split('\n').nth(line - 1).unwrap_or_default().to_owned();
        }
        self.hidden.set_public_text(self.text);
        for Problem { file, span, message, fix, .. } in &mut self.problems {
            [&mut *message, fix].into_iter().for_each(|text| secrets.remove_from(text));
            let is_here = |file: &PathBuf| self.included.iter().any(|included| included.path == *file);
            let span = Some(&*span).filter(|_| file.as_ref().is_none_or(is_here));
            self.hidden.remove_from_problem(span, message, fix);
            if let Some(shown) = file.as_ref().and_then(|file| self.hidden.shown_name(file.to_str()?)) {
                *file = Some(PathBuf::from(shown));
            }
        }
        self.problems
    }

    /// Moves a position in trailing whitespace directly behind the last visible character.
    fn clamp(&self, span: Span) -> Span {
        let end_of_text = self.text.trim_end().len();
        let start = self.text.floor_char_boundary(span.start.min(end_of_text));
        let end = self.text.floor_char_boundary(span.end.min(self.text.len())).max(start);
        start..end
    }
}

fn line_starts(text: &str) -> Vec<usize> {
    std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect()
}

/// A value for a message: in backticks, on one line, truncated, with invisible characters escaped.
pub fn quoted(value: &str) -> String {
    if value.is_empty() {
        return String::from("`\"\"`");
    }
    let mut out = String::from("`");
    for (i, c) in value.chars().enumerate() {
        if i == VALUE_CHARS {
            out.push('…');
            break;
        }
        match c {
            '"' | '\'' | '\\' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    out.push('`');
    out
}

/// A list of values for a message: `a`, `b` or `c`.
pub fn quoted_list<'v>(values: impl IntoIterator<Item = &'v str>, last_word: &str) -> String {
    let values: Vec<String> = values.into_iter().map(quoted).collect();
    match values.as_slice() {
        [] => String::from("nothing"),
        [one] => one.clone(),
        [init @ .., last] => format!("{} {last_word} {last}", init.join(", ")),
    }
}

/// Formats problems for the operator: position, message, line and fix of each, then their number for each file. `main` is
/// the configuration; the paths of other files are relative to its folder.
pub fn render(problems: &[Problem], main: &str) -> String {
    let mut out = String::new();
    let mut files: Vec<Option<&Path>> = problems.iter().map(|problem| problem.file.as_deref()).collect();
    files.sort_unstable();
    files.dedup();
    for file in files {
        let path = file.map(|file| Path::new(main).parent().unwrap_or(Path::new("")).join(file));
        let name = path.map_or_else(|| main.to_owned(), |path| path.display().to_string());
        let of_file = sorted(problems.iter().filter(|problem| problem.file.as_deref() == file).collect());
        of_file.iter().for_each(|problem| write_problem(problem, &name, &mut out));
        // Writing to a string cannot fail.
        let _ =
            writeln!(out, "{} {} in {name}", of_file.len(), if of_file.len() == 1 { "problem" } else { "problems" });
    }
    out
}

fn sorted(mut problems: Vec<&Problem>) -> Vec<&Problem> {
    problems.sort_by_key(|problem| (problem.line, problem.column));
    problems
}

fn write_problem(problem: &Problem, file_name: &str, out: &mut String) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{file_name}:{}:{}: {}", problem.line, problem.column, problem.message);
    let (excerpt, carets) = excerpt(&problem.line_text, problem);
    if !excerpt.trim().is_empty() {
        let number = problem.line.to_string();
        let gutter = " ".repeat(number.len());
        let _ = writeln!(out, "  {number} | {excerpt}\n  {gutter} | {carets}");
    }
    let _ = writeln!(out, "  fix: {}\n", problem.fix);
}

/// The line of a problem and the carets to print below it, aligned with it.
fn excerpt(line: &str, problem: &Problem) -> (String, String) {
    let line = line.trim_end();
    let chars: Vec<char> = line.chars().collect();
    let from = (problem.column - 1).min(chars.len());
    let marked = problem.span.end.saturating_sub(problem.span.start);
    let rest: String = chars[from..].iter().collect();
    // A span may continue on later lines; the carets end with this line.
    let width = rest.char_indices().take_while(|(at, _)| *at < marked).count().max(1);
    let first = if chars.len() > LINE_CHARS { from.saturating_sub(LINE_CHARS / 3) } else { 0 };
    let last = chars.len().min(first + LINE_CHARS);
    let (mut shown, mut carets) = (String::new(), String::new());
    if first > 0 {
        shown.push_str("… ");
        carets.push_str("  ");
    }
    for (i, c) in chars.iter().enumerate().take(last).skip(first) {
        // Both lines keep tabs, so that they stay aligned at any tab width.
        shown.push(if c.is_control() && *c != '\t' { '\u{fffd}' } else { *c });
        carets.push(match c {
            _ if (from..from + width).contains(&i) => '^',
            '\t' => '\t',
            _ => ' ',
        });
    }
    if last < chars.len() {
        shown.push_str(" …");
    }
    if from == chars.len() {
        carets.push('^');
    }
    (shown, carets.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem_at(text: &str, span: Span) -> Problem {
        let mut report = Report::new(text);
        report.problem(span, "it is wrong", "correct it");
        report.into_problems().remove(0)
    }

    #[test]
    fn columns_count_characters() {
        let text = "é = 1\r\nüü = \"ß\"\r\n";
        let problem = problem_at(text, 15..19);
        assert_eq!((problem.line, problem.column), (2, 6));
        assert_eq!(
            render(&[problem], "gateway.toml"),
            "gateway.toml:2:6: it is wrong\n  2 | üü = \"ß\"\n    |      ^^^\n  fix: correct it\n\n1 problem in gateway.toml\n"
        );
    }

    #[test]
    fn every_position_is_inside_the_text() {
        for text in ["", "\n", "a", "a\r\n", "\r", "é\n\n\n", "\t\tx\n", "\u{feff}a"] {
            for start in 0..text.len() + 3 {
                for end in 0..text.len() + 3 {
                    let problem = problem_at(text, start..end);
                    assert!(problem.span.end <= text.len() && problem.line >= 1 && problem.column >= 1);
                    let rendered = render(&[problem], "f");
                    assert!(rendered.contains("fix: correct it"), "{rendered}");
                }
            }
        }
    }

    #[test]
    fn carets_keep_the_tabs_before_them() {
        let problem = problem_at("\tx = 1", 1..2);
        assert_eq!(excerpt("\tx = 1", &problem), ("\tx = 1".to_owned(), "\t^".to_owned()));
    }

    #[test]
    fn a_long_line_is_shown_around_the_problem() {
        let text = format!("{}x{}", "a".repeat(500), "b".repeat(500));
        let (excerpt, carets) = excerpt(&text, &problem_at(&text, 500..501));
        assert!(excerpt.chars().count() < LINE_CHARS + 6);
        let at = carets.chars().count() - 1;
        assert_eq!(excerpt.chars().nth(at), Some('x'));
    }

    #[test]
    fn values_are_shown_on_one_line() {
        assert_eq!(quoted("a\nb"), "`a\\nb`");
        assert_eq!(quoted("say \"hi\""), "`say \"hi\"`");
        assert_eq!(quoted(&"x".repeat(100)).chars().count(), VALUE_CHARS + 3);
        assert_eq!(quoted_list(["a", "b", "c"], "or"), "`a`, `b` or `c`");
    }
}
