//! A TOML file with the place of everything in it, read key by key.
//!
//! Whoever reads a [`Table`] asks for the keys that it knows; what is left over at the end is
//! unknown, and reported with the likeliest of the known ones. A value that has the wrong type is
//! reported here and comes back as `None`. This file knows TOML, but not what any key means.

use std::ops::RangeInclusive;

use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::diagnostics::{Report, Span, quoted, quoted_list};

pub mod toml_errors;
mod yaml;

/// A table that is being read.
pub struct Table<'d> {
    entries: &'d DeTable<'d>,
    /// The header, or the whole of an inline table.
    pub span: Span,
    /// How messages call it.
    title: String,
    known: Vec<&'static str>,
    missing: Vec<(&'static str, String)>,
    common_mistakes: Vec<CommonMistake>,
}

/// A key that there is none of, and that is written all the same.
struct CommonMistake {
    key: &'static str,
    /// The known key that is meant by it.
    meant: &'static str,
    fix: String,
}

/// A value and the key that it belongs to.
#[derive(Clone)]
pub struct Item<'d> {
    /// Of a list's item: the key of the list.
    pub key: &'d str,
    in_list: bool,
    pub key_span: Span,
    pub span: Span,
    pub value: &'d DeValue<'d>,
}

/// A string and where it stands.
#[derive(Clone)]
pub struct SpannedStr<'d> {
    pub text: &'d str,
    pub span: Span,
}

impl<'d> Table<'d> {
    pub fn new(entries: &'d DeTable<'d>, span: Span, title: impl Into<String>) -> Table<'d> {
        Table {
            entries,
            span,
            title: title.into(),
            known: Vec::new(),
            missing: Vec::new(),
            common_mistakes: Vec::new(),
        }
    }

    /// The value of a key, which is known from here on.
    pub fn get(&mut self, key: &'static str) -> Option<Item<'d>> {
        self.known.push(key);
        self.entries.get_key_value(key).map(|(key, value)| item(key, value))
    }

    /// The value of a key that must be there; `fix` says what to write if it is not.
    pub fn require(&mut self, key: &'static str, fix: impl Into<String>) -> Option<Item<'d>> {
        let item = self.get(key);
        if item.is_none() {
            self.missing.push((key, fix.into()));
        }
        item
    }

    /// What to write where somebody writes a key that there is none of, and means one that there is.
    pub fn suggest_for(&mut self, key: &'static str, meant: &'static str, fix: impl Into<String>) {
        self.common_mistakes.push(CommonMistake { key, meant, fix: fix.into() });
    }

    /// All entries in the order of the file, for a table whose keys are the operator's own names.
    pub fn items(&self) -> Vec<Item<'d>> {
        let mut items: Vec<Item> = self.entries.iter().map(|(key, value)| item(key, value)).collect();
        items.sort_by_key(|item| item.key_span.start);
        items
    }

    /// Reports the keys that nobody asked for and those that are missing. Returns the known keys
    /// that unknown ones were taken for: they are not missing, but misspelt.
    pub fn finish(self, report: &mut Report) -> Vec<&'static str> {
        let mut meant = Vec::new();
        let absent: Vec<&str> = self.known.iter().copied().filter(|key| !self.entries.contains_key(*key)).collect();
        for item in self.items() {
            if self.known.contains(&item.key) {
                continue;
            }
            let name = quoted(item.key);
            // A key that is there already is hardly the one that was meant.
            let likely = absent.iter().copied().chain(self.common_mistakes.iter().map(|stray| stray.key));
            let guess = nearest(item.key, likely).or(nearest(item.key, self.known.iter().copied()));
            let stray = self.common_mistakes.iter().find(|stray| Some(stray.key) == guess);
            let known = stray.map(|stray| stray.meant).or(guess);
            meant.extend(self.known.iter().copied().filter(|key| Some(*key) == known));
            let fix = match (stray, guess) {
                (Some(stray), _) => stray.fix.clone(),
                (None, Some(guess)) => format!("did you mean {}?", quoted(guess)),
                (None, None) => {
                    format!("remove it; {} knows {}", self.title, quoted_list(self.known.iter().copied(), "and"))
                }
            };
            report.problem(item.key_span, format!("unknown key {name} in {}", self.title), fix);
        }
        for (key, fix) in self.missing {
            if !meant.contains(&key) {
                report.missing(self.span.clone(), format!("{} has no `{key}`", self.title), fix);
            }
        }
        meant
    }
}

fn item<'d>(key: &'d Spanned<toml::de::DeString<'d>>, value: &'d Spanned<DeValue<'d>>) -> Item<'d> {
    Item { key: key.get_ref(), in_list: false, key_span: key.span(), span: value.span(), value: value.get_ref() }
}

impl<'d> Item<'d> {
    /// The string; `example` is a value that could stand here, as TOML.
    pub fn string(&self, example: &str, report: &mut Report) -> Option<SpannedStr<'d>> {
        match self.value {
            DeValue::String(text) => Some(SpannedStr { text, span: self.span.clone() }),
            _ => self.wrong_type("a string", &self.fix_with(example), report),
        }
    }

    /// The strings of a list, or the only one where no list is needed. What is no string is left out.
    pub fn strings(&self, example: &str, report: &mut Report) -> Option<Vec<SpannedStr<'d>>> {
        match self.value {
            DeValue::String(text) => Some(vec![SpannedStr { text, span: self.span.clone() }]),
            DeValue::Array(_) => {
                let items = self.items();
                let words: Vec<SpannedStr> = items.iter().filter_map(|item| item.string(example, report)).collect();
                (items.is_empty() || !words.is_empty()).then_some(words)
            }
            _ => self.wrong_type("a string or a list of strings", &self.fix_with(example), report),
        }
    }

    pub fn list(&self, example: &str, report: &mut Report) -> Option<Vec<Item<'d>>> {
        match self.value {
            DeValue::Array(_) => Some(self.items()),
            _ => self.wrong_type("a list", &self.fix_with(example), report),
        }
    }

    pub fn table(&self, title: impl Into<String>, fix: &str, report: &mut Report) -> Option<Table<'d>> {
        match self.value {
            DeValue::Table(entries) => Some(Table::new(entries, self.span.clone(), title)),
            _ => self.wrong_type("a table", fix, report),
        }
    }

    pub fn integer(&self, range: RangeInclusive<u64>, report: &mut Report) -> Option<u64> {
        let fix = format!("write a whole number from `{}` to `{}`", range.start(), range.end());
        match self.value {
            DeValue::Integer(integer) => {
                let value = to_u64(integer).filter(|value| range.contains(value));
                if value.is_none() {
                    let written = quoted(report.source(self.span.clone()));
                    report.problem(self.span.clone(), format!("`{}` cannot be {written}", self.key), fix);
                }
                value
            }
            DeValue::String(text) if text.replace('_', "").parse().is_ok_and(|value| range.contains(&value)) => {
                self.wrong_type("an integer", &format!("write {} without quotes", quoted(text)), report)
            }
            _ => self.wrong_type("an integer", &fix, report),
        }
    }

    pub fn boolean(&self, report: &mut Report) -> Option<bool> {
        match self.value {
            DeValue::Boolean(flag) => Some(*flag),
            DeValue::String(text) => match parse_boolean(text) {
                Some(meant) => self.wrong_type("a boolean", &format!("write `{meant}` without quotes"), report),
                None => self.wrong_type("a boolean", "write `true` or `false`", report),
            },
            _ => self.wrong_type("a boolean", "write `true` or `false`", report),
        }
    }

    /// One of a few words.
    pub fn choice<T: Copy>(&self, choices: &[(&str, T)], report: &mut Report) -> Option<T> {
        let words = || choices.iter().map(|(word, _)| *word);
        let DeValue::String(text) = self.value else {
            let quoted: Vec<String> = words().map(|word| format!("\"{word}\"")).collect();
            return self.wrong_type(
                "a string",
                &format!("write {}", quoted_list(quoted.iter().map(|q| &**q), "or")),
                report,
            );
        };
        let found = choices.iter().find(|(word, _)| word == text).map(|(_, choice)| *choice);
        if found.is_none() {
            let fix = match nearest(text, words()) {
                Some(guess) => format!("did you mean `\"{guess}\"`?"),
                None => format!("write {}", quoted_list(words(), "or")),
            };
            report.problem(self.span.clone(), format!("`{}` cannot be {}", self.key, quoted(text)), fix);
        }
        found
    }

    pub fn wrong_type<T>(&self, expected: &str, fix: &str, report: &mut Report) -> Option<T> {
        let written = report.source(self.span.clone()).lines().next().unwrap_or("");
        let found = match self.value {
            DeValue::String(_) => format!("a string {}", quoted(written)),
            DeValue::Integer(_) => format!("an integer {}", quoted(written)),
            DeValue::Float(_) => format!("a float {}", quoted(written)),
            DeValue::Boolean(_) => format!("a boolean {}", quoted(written)),
            DeValue::Datetime(_) => format!("a date-time {}", quoted(written)),
            DeValue::Array(_) => String::from("a list"),
            DeValue::Table(_) => String::from("a table"),
        };
        report.problem(self.span.clone(), format!("`{}`: expected {expected}, found {found}", self.key), fix);
        None
    }

    /// The fix that spells out the whole line.
    pub fn fix_with(&self, value: &str) -> String {
        match self.in_list {
            true => format!("write a string here, as in `{} = {value}`", self.key),
            false => format!("write `{} = {value}`", self.key),
        }
    }

    fn items(&self) -> Vec<Item<'d>> {
        let DeValue::Array(array) = self.value else { return Vec::new() };
        let item = |value: &'d Spanned<DeValue<'d>>| Item {
            in_list: true,
            span: value.span(),
            value: value.get_ref(),
            ..self.clone()
        };
        array.iter().map(item).collect()
    }
}

/// The boolean that a word means, as other formats write it.
fn parse_boolean(word: &str) -> Option<bool> {
    match word.trim().to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some(true),
        "false" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

fn to_u64(integer: &DeInteger) -> Option<u64> {
    u64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

/// The candidate that a misspelt word was most likely meant to be.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let plain = |text: &str| text.to_lowercase().replace('-', "_");
    let word = plain(word);
    // The distance takes quadratic time, and nobody misspells a key at such length.
    if word.len() > 64 {
        return None;
    }
    let distances = candidates.into_iter().filter_map(|candidate| {
        let other = plain(candidate);
        let distance = strsim::damerau_levenshtein(&word, &other);
        let alike = distance * 3 <= word.len().max(other.len()) || strsim::jaro_winkler(&word, &other) > 0.9;
        alike.then_some((distance, candidate))
    });
    distances.min_by_key(|(distance, _)| *distance).map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found() {
        let known = ["key", "windows", "on_missing_key", "cost", "on_limit", "headers"];
        for (word, meant) in [
            ("window", Some("windows")),
            ("on-missing-key", Some("on_missing_key")),
            ("on_missing", Some("on_missing_key")),
            ("Cost", Some("cost")),
            ("header", Some("headers")),
            ("burst", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, known), meant, "{word}");
        }
    }
}
