//! TOML files that the configuration names: the clients file and the access file.
//!
//! Such a file may contain a secret in plain text by mistake. Problems give the position in the file, and never show a line
//! or a value that could be a secret.

use std::path::{Path, PathBuf};

use toml::de::DeTable;

use super::diagnostics::{Problem, Report, quoted};
use super::toml_reader::{SpannedString, Table, toml_errors};

const SYNTAX_ERROR: &str = "this is not TOML";
const ALREADY_DEFINED: &str = "this name is already defined";
const SYNTAX_FIX: &str = "a line is `key = value` or `[table]`; texts go in quotes";

/// Reads the file of this name. `add_command` creates it. `read` takes the top-level table, which is called `title`.
pub fn read_named_file<T>(
    file: &SpannedString,
    title: &str,
    add_command: &str,
    report: &mut Report,
    read: impl FnOnce(&mut Table, &mut Report) -> T,
) -> Option<(PathBuf, T)> {
    let path = PathBuf::from(&file.text);
    let name = quoted(&file.text);
    let unreadable =
        |error| (format!("cannot read {name}: {error}"), format!("name the file, or create it: `{add_command}`"));
    let bytes = report.accept(file.span.clone(), (report.inputs.files)(&path).map_err(unreadable))?;
    let text = String::from_utf8(bytes).ok();
    let text =
        text.or_else(|| report.reject(file.span.clone(), format!("{name} is not UTF-8 text"), "save it as UTF-8"))?;
    let mut file_report = Report::for_named_file(&text, &path);
    let read = read_text(&text, title, &mut file_report, read);
    report.append(file_report);
    Some((path, read))
}

/// Reads the text of such a file alone, or returns its problems.
pub fn read_text_alone<T>(
    text: &str,
    path: &Path,
    title: &str,
    read: impl FnOnce(&mut Table, &mut Report) -> T,
) -> Result<T, Vec<Problem>> {
    let mut report = Report::for_named_file(text, path);
    let read = read_text(text, title, &mut report, read);
    match report.into_problems() {
        problems if problems.is_empty() => Ok(read),
        problems => Err(problems),
    }
}

fn read_text<T>(text: &str, title: &str, report: &mut Report, read: impl FnOnce(&mut Table, &mut Report) -> T) -> T {
    let mut syntax_report = Report::new(text);
    let valid_text = toml_errors::skip_syntax_errors(text, &mut syntax_report);
    report.has_syntax_errors = syntax_report.has_syntax_errors;
    for problem in syntax_report.into_problems() {
        // Most syntax errors quote the file, so their text is replaced.
        let (message, fix) = match problem.message.as_str() {
            message if message.contains("is already defined") => (ALREADY_DEFINED.to_owned(), problem.fix),
            message if message.contains('`') => (SYNTAX_ERROR.to_owned(), SYNTAX_FIX.to_owned()),
            _ => (problem.message, problem.fix),
        };
        report.problem(problem.span, message, fix);
    }
    let (document, _) = DeTable::parse_recoverable(&valid_text);
    let mut top = Table::new(document.get_ref(), 0..0, title);
    let read = read(&mut top, report);
    top.finish(report);
    read
}
