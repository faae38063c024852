//! The texts of a configuration: the main file, and the files that its setting `include` names.
//!
//! The texts are joined into one TOML document, so that a table may be anywhere, and is defined once. Positions in the joined
//! text are translated to a file and a line of it.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::diagnostics::{Inputs, Parsed, Report, Span, quoted};
use super::toml_reader::toml_errors::{self, blank_out, line_start};

/// Included files beyond this number are an error.
const INCLUDED_MAX: usize = 1000;

/// The joined texts.
#[derive(Debug, Default)]
pub struct Sources {
    pub text: String,
    pub included: Vec<IncludedFile>,
    /// Problems of `include`, with their messages and fixes.
    problems: Vec<(Span, String, String)>,
}

/// A file that the main file includes.
#[derive(Debug)]
pub struct IncludedFile {
    /// As the configuration names it.
    pub path: PathBuf,
    /// Where its text starts in the joined text.
    pub start: usize,
}

impl Sources {
    /// Reads the files that the main file includes.
    pub fn read(main: &str, inputs: Inputs) -> Sources {
        let mut sources = Sources { text: main.to_owned(), ..Sources::default() };
        let (document, _) = DeTable::parse_recoverable(main);
        let Some(include) = document.get_ref().get("include") else { return sources };
        let patterns = match include.get_ref() {
            DeValue::Array(items) => items.iter().collect(),
            _ => vec![include],
        };
        for pattern in patterns {
            // Values of other types are reported where settings are read.
            let DeValue::String(text) = pattern.get_ref() else { continue };
            if let Err((message, fix)) = sources.include(text, inputs) {
                sources.problems.push((pattern.span(), message, fix));
            }
        }
        sources
    }

    fn include(&mut self, pattern: &str, inputs: Inputs) -> Parsed<()> {
        for path in matching_files(pattern, inputs)? {
            let what = quoted(&path.display().to_string());
            let fix = "name a file that the gateway may read; a relative path starts at the folder of this file";
            let bytes =
                (inputs.files)(&path).map_err(|error| (format!("cannot read {what}: {error}"), fix.to_owned()))?;
            let text = String::from_utf8(bytes);
            let text = text.map_err(|_invalid| (format!("{what} is not UTF-8 text"), "save it as UTF-8".to_owned()))?;
            if self.included.iter().any(|file| file.path == path) {
                return Err((format!("{what} is included twice"), "name each file once".to_owned()));
            }
            if self.included.len() == INCLUDED_MAX {
                return Err((format!("more than {INCLUDED_MAX} files are included"), "join some files".to_owned()));
            }
            if !self.text.ends_with('\n') {
                self.text.push('\n');
            }
            self.included.push(IncludedFile { path, start: self.text.len() });
            self.text += text.strip_prefix('\u{feff}').unwrap_or(&text);
        }
        Ok(())
    }

    /// Reports the problems of `include`, and settings of the top level in included files: they would belong to the last
    /// table of the file before. Returns the text without those.
    pub fn report_problems(&self, report: &mut Report) -> Cow<'_, str> {
        for (span, message, fix) in &self.problems {
            report.problem(span.clone(), message, fix);
        }
        let mut valid = Cow::Borrowed(self.text.as_str());
        let ends = self.included.iter().skip(1).map(|file| file.start).chain([self.text.len()]);
        for (file, end) in self.included.iter().zip(ends) {
            let (document, _) = DeTable::parse_recoverable(&self.text[file.start..end]);
            let spans = document.get_ref().keys().map(|key| file.start + key.span().start..file.start + key.span().end);
            let is_in_header = |span: &Span| toml_errors::is_header(&self.text[line_start(&self.text, span.start)..]);
            let (in_headers, strays): (Vec<Span>, Vec<Span>) = spans.partition(is_in_header);
            for stray in &strays {
                let message = format!("{} belongs to no table of this file", quoted(&self.text[stray.clone()]));
                report.problem(stray.clone(), message, "write it into a table, or at the top of the main file");
            }
            if !strays.is_empty() {
                let first_header = in_headers.iter().map(|span| line_start(&self.text, span.start)).min();
                valid = Cow::Owned(blank_out(&valid, file.start..first_header.unwrap_or(end)));
            }
        }
        valid
    }
}

/// The files that a pattern names, in the order of their names. Only a name with `*` may match no file.
fn matching_files(pattern: &str, inputs: Inputs) -> Parsed<Vec<PathBuf>> {
    let path = Path::new(pattern);
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let folder = path.parent().unwrap_or(Path::new(""));
    if folder.to_string_lossy().contains('*') {
        let message = format!("{} has a `*` in the name of a folder", quoted(pattern));
        return Err((message, "use `*` in the last part only, as in `\"conf.d/*.toml\"`".to_owned()));
    }
    if !name.contains('*') {
        return Ok(vec![path.to_owned()]);
    }
    let listed = (inputs.folders)(folder);
    let listed = listed.map_err(|error| {
        let message = format!("cannot list the folder of {}: {error}", quoted(pattern));
        (message, "name a folder that the gateway may read".to_owned())
    })?;
    // As in shells, `*` does not match hidden files.
    let mut matching: Vec<String> =
        listed.into_iter().filter(|listed| !listed.starts_with('.') && matches(name, listed)).collect();
    matching.sort();
    Ok(matching.into_iter().map(|listed| folder.join(listed)).collect())
}

/// Whether a name matches a pattern, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    let suffixes = rest.char_indices().map(|(at, _)| &rest[at..]).chain([""]);
    suffixes.into_iter().any(|suffix| matches(after, suffix))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::super::diagnostics::render;
    use super::super::read_with_inputs;
    use super::*;
    use transom_limiter::handles::{Handle, RuleId};

    const MAIN: &str = "include = [\"conf.d/*.toml\"]\n[upstreams.u]\nbuiltin = \"echo\"\n";

    fn read(main: &str, files: &[(&str, &str)]) -> Result<crate::Config, String> {
        let read_file = |path: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| text.as_bytes().to_vec()).ok_or_else(|| ErrorKind::NotFound.into())
        };
        let list = |folder: &Path| {
            let names = files.iter().filter_map(|(name, _)| Path::new(name).strip_prefix(folder).ok());
            Ok(names.filter_map(|name| name.to_str().map(str::to_owned)).collect())
        };
        let inputs = Inputs { files: &read_file, folders: &list, ..Inputs::NONE };
        read_with_inputs(main, inputs).map_err(|problems| render(&problems, "dir/gateway.toml"))
    }

    #[test]
    fn included_tables_are_those_of_the_main_file() {
        let route = "[[routes]]\npath = \"/b\"\nupstream = \"u\"\nrules = [\"r\"]\n";
        let files = [
            ("conf.d/b.toml", route),
            (
                "conf.d/a.toml",
                "[[routes]]\npath = \"/a\"\nupstream = \"u\"\n[rules.r]\nkey = \"ip\"\nwindows = [\"1/minute\"]",
            ),
            ("conf.d/.hidden.toml", "nonsense"),
            ("conf.d/c.toml.old", "nonsense"),
        ];
        let config = read(MAIN, &files).unwrap();
        let names: Vec<&str> = config.routes.iter().map(|route| route.name.as_str()).collect();
        assert_eq!(names, ["/a", "/b"]);
        assert_eq!(config.rules[RuleId::at(0)].name, "r");
    }

    #[test]
    fn problems_have_their_file_line_and_text() {
        let files = [
            ("conf.d/a.toml", "workers = 2\n[[routes]]\npath = \"/a\"\nupstream = \"u\"\n"),
            ("conf.d/b.toml", "# a comment\n[upstreams.u]\nbuiltin = \"echo\"\n"),
            ("conf.d/c.toml", "[[routes]]\npath = \"/c\"\nupstraem = \"u\"\n"),
        ];
        let shown = read(MAIN, &files).unwrap_err();
        for part in [
            "dir/conf.d/a.toml:1:1: `workers` belongs to no table of this file\n  1 | workers = 2\n",
            "1 problem in dir/conf.d/a.toml",
            "dir/conf.d/b.toml:2:12: `u` is already defined on line 2 of the main file",
            "dir/conf.d/c.toml:3:1: unknown key `upstraem`",
            "  3 | upstraem = \"u\"\n    | ^^^^^^^^\n  fix: did you mean `upstream`?",
            "1 problem in dir/conf.d/c.toml",
        ] {
            assert!(shown.contains(part), "{part}\n{shown}");
        }
        assert!(!shown.contains("in dir/gateway.toml"), "{shown}");
    }

    #[test]
    fn unusable_includes_are_problems_of_the_main_file() {
        for (include, message) in [
            ("\"missing.toml\"", "dir/gateway.toml:1:11: cannot read `missing.toml`: entity not found"),
            ("[\"a/*/b.toml\"]", "dir/gateway.toml:1:12: `a/*/b.toml` has a `*` in the name of a folder"),
            ("[\"a.toml\", \"*.toml\"]", "dir/gateway.toml:1:22: `a.toml` is included twice"),
            ("7", "dir/gateway.toml:1:11: `include`: expected a string or a list of strings"),
        ] {
            let shown = read(&format!("include = {include}\n"), &[("a.toml", "")]).unwrap_err();
            assert!(shown.contains(message), "{message}\n{shown}");
        }
    }

    #[test]
    fn a_star_matches_any_characters() {
        for (pattern, name, is_match) in [
            ("*.toml", "a.toml", true),
            ("*.toml", ".toml", true),
            ("*.toml", "a.toml.old", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c", false),
            ("a*", "\u{e9}", false),
            ("*", "\u{e9}", true),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern} {name}");
        }
    }
}
