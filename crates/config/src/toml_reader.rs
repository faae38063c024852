//! Reads TOML tables key by key, with the positions of keys and values.
//!
//! The reader of a [`Table`] gets the keys that it knows; [`Table::finish`] reports all others as unknown, with the
//! most similar known key. Values of the wrong type are reported and returned as `None`. This file does not know what
//! keys mean.

use std::ops::RangeInclusive;

use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::diagnostics::{Report, Span, quoted, quoted_list};
use super::foreign;

pub mod toml_errors;
mod yaml;

/// What other products take to turn something off.
const OFF_WORDS: [&str; 5] = ["off", "none", "false", "no", "disabled"];

/// A table that is being read.
pub struct Table<'d> {
    entries: &'d DeTable<'d>,
    /// The header, or all of an inline table.
    pub span: Span,
    /// Its name in messages.
    title: String,
    known: Vec<&'static str>,
    /// Required keys that are absent, with their fixes.
    missing: Vec<(&'static str, String)>,
    common_mistakes: Vec<CommonMistake>,
}

/// A key that does not exist, but that operators may write instead of another one.
struct CommonMistake {
    key: String,
    /// The known key to write instead.
    meant: &'static str,
    fix: String,
}

/// A value with its key.
#[derive(Clone)]
pub struct Item<'d> {
    /// For an item of a list: the key of the list.
    pub key: &'d str,
    in_list: bool,
    pub key_span: Span,
    pub span: Span,
    pub value: &'d DeValue<'d>,
}

/// A string with its position.
#[derive(Clone)]
pub struct SpannedStr<'d> {
    pub text: &'d str,
    pub span: Span,
}

/// The string of a setting with its position, kept to be checked together with other settings.
#[derive(Clone, PartialEq, Debug)]
pub struct SpannedString {
    pub key: String,
    pub key_span: Span,
    pub text: String,
    pub span: Span,
}

impl SpannedString {
    /// A string of the list `key`.
    pub fn new(key: &str, word: &SpannedStr) -> SpannedString {
        let (text, span) = (word.text.to_owned(), word.span.clone());
        SpannedString { key: key.to_owned(), key_span: span.clone(), text, span }
    }

    pub fn as_str(&self) -> SpannedStr<'_> {
        SpannedStr { text: &self.text, span: self.span.clone() }
    }

    /// Reads the file of this name. Secrets and certificates themselves are not written in the configuration.
    pub fn read_file(&self, report: &mut Report) -> Option<Vec<u8>> {
        let SpannedString { key, text, span, .. } = self;
        if text.is_empty() {
            return report.reject(span.clone(), format!("`{key}` is empty"), format!("write `{key} = \"FILE\"`"));
        }
        if text.trim_start().starts_with("-----BEGIN ") {
            let message = format!("`{key}` takes the name of a file, not its content");
            return report.reject(span.clone(), message, "save the content in a file, and write the name of the file");
        }
        report.read_file(text, span)
    }
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

    /// The name of the table in messages.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// The value of a key; marks the key as known.
    pub fn get(&mut self, key: &'static str) -> Option<Item<'d>> {
        self.known.push(key);
        self.entries.get_key_value(key).map(|(key, value)| item(key, value))
    }

    /// The value of a required key; `fix` says what to write if the key is missing.
    pub fn require(&mut self, key: &'static str, fix: impl Into<String>) -> Option<Item<'d>> {
        let item = self.get(key);
        if item.is_none() {
            self.missing.push((key, fix.into()));
        }
        item
    }

    /// A required key is not missing: another key states its value.
    pub fn not_missing(&mut self, key: &str) {
        self.missing.retain(|(missing, _)| *missing != key);
    }

    /// Makes a key required that was read before.
    pub fn require_known(&mut self, key: &'static str, fix: impl Into<String>) {
        if self.given(key).is_none() {
            self.missing.push((key, fix.into()));
        }
    }

    /// The fix for a key that does not exist and is probably written instead of the known key `meant`.
    pub fn suggest_for(&mut self, key: &str, meant: &'static str, fix: impl Into<String>) {
        self.common_mistakes.push(CommonMistake { key: key.to_owned(), meant, fix: fix.into() });
    }

    /// The value of a key that was read before.
    pub fn given(&self, key: &str) -> Option<Item<'d>> {
        self.entries.get_key_value(key).map(|(key, value)| item(key, value))
    }

    /// Whether a known key is absent, and no unknown key probably stands for it. Ask after all known keys were read.
    pub fn lacks(&self, key: &str) -> bool {
        self.given(key).is_none() && !self.unknown_keys().iter().any(|unknown| unknown.meant == Some(key))
    }

    /// All entries in the order of the file, for a table whose keys are names that the operator chose.
    pub fn items(&self) -> Vec<Item<'d>> {
        let mut items: Vec<Item> = self.entries.iter().map(|(key, value)| item(key, value)).collect();
        items.sort_by_key(|item| item.key_span.start);
        items
    }

    /// Reports unknown keys and missing required keys. Returns the known keys that unknown keys probably stand for;
    /// these are misspelled rather than missing.
    pub fn finish(self, report: &mut Report) -> Vec<&'static str> {
        let mut meant = Vec::new();
        for UnknownKey { item, meant: known, fix } in self.unknown_keys() {
            meant.extend(known);
            let fix = match known {
                None if report.top_level_keys.contains(&item.key) => {
                    format!("move {} above the first `[table]` of the file", quoted(item.key))
                }
                _ => fix,
            };
            report.problem(item.key_span, format!("unknown key {} in {}", quoted(item.key), self.title), fix);
        }
        for (key, fix) in self.missing {
            if !meant.contains(&key) {
                report.missing(self.span.clone(), format!("{} has no `{key}`", self.title), fix);
            }
        }
        meant
    }

    fn unknown_keys(&self) -> Vec<UnknownKey<'d>> {
        let absent: Vec<&str> = self.known.iter().copied().filter(|key| !self.entries.contains_key(*key)).collect();
        let mut items = self.items();
        items.retain(|item| !self.known.contains(&item.key));
        let unknown_key = |item: Item<'d>| {
            // A key that is already present is less likely to be meant.
            let candidates = absent.iter().copied().chain(self.common_mistakes.iter().map(|mistake| &*mistake.key));
            let guess = nearest(item.key, candidates).or_else(|| nearest(item.key, self.known.iter().copied()));
            let mistake = |key: &str| self.common_mistakes.iter().find(|mistake| mistake.key == key);
            let exact = mistake(item.key).map(|mistake| (mistake.meant, mistake.fix.as_str()));
            let foreign = exact.or_else(|| foreign::setting(&item, &self.known));
            let similar = guess.and_then(mistake).map(|mistake| (mistake.meant, mistake.fix.as_str()));
            let mistake = foreign.or(similar);
            let known = mistake.map(|(meant, _)| meant).or(guess);
            let fix = match (mistake, guess) {
                (Some((_, fix)), _) => match item.value {
                    DeValue::Integer(number) => fix_with_written(fix, number.as_str()),
                    DeValue::String(text) => fix_with_written(fix, &format!("\"{text}\"")),
                    _ => fix.to_owned(),
                },
                (None, Some(guess)) => format!("did you mean {}?", quoted(guess)),
                (None, None) => {
                    format!("remove it; valid keys: {}", quoted_list(self.known.iter().copied(), "and"))
                }
            };
            UnknownKey { item, meant: self.known.iter().copied().find(|key| Some(*key) == known), fix }
        };
        items.into_iter().map(unknown_key).collect()
    }
}

/// A key that does not exist.
struct UnknownKey<'d> {
    item: Item<'d>,
    /// The known key that was probably meant.
    meant: Option<&'static str>,
    fix: String,
}

fn item<'d>(key: &'d Spanned<toml::de::DeString<'d>>, value: &'d Spanned<DeValue<'d>>) -> Item<'d> {
    Item { key: key.get_ref(), in_list: false, key_span: key.span(), span: value.span(), value: value.get_ref() }
}

impl<'d> Item<'d> {
    /// The string. `example` is a valid value, as TOML, for the fix.
    pub fn string(&self, example: &str, report: &mut Report) -> Option<SpannedStr<'d>> {
        match self.value {
            DeValue::String(text) => Some(SpannedStr { text, span: self.span.clone() }),
            _ => self.wrong_type("a string", &self.fix_with(example), report),
        }
    }

    /// The strings of a list, or a single string. Items of other types are reported and skipped.
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

    /// The strings of a list, or a single string. Values of other types are skipped.
    pub fn words(&self) -> Vec<SpannedStr<'d>> {
        let word = |item: &Item<'d>| Some(SpannedStr { text: item.value.as_str()?, span: item.span.clone() });
        self.one_or_all().iter().filter_map(word).collect()
    }

    /// The tables of a list, or a single table. Values of other types are skipped.
    pub fn tables(&self) -> Vec<Table<'d>> {
        let table = |item: &Item<'d>| Some(Table::new(item.value.as_table()?, item.span.clone(), item.key));
        self.one_or_all().iter().filter_map(table).collect()
    }

    pub fn list(&self, example: &str, report: &mut Report) -> Option<Vec<Item<'d>>> {
        match self.value {
            DeValue::Array(_) => Some(self.items()),
            // Texts that are separated as in other formats.
            _ => {
                let written = self.written_list(report).filter(|_| example.starts_with("[\""));
                self.wrong_type("a list", &self.fix_with(written.as_deref().unwrap_or(example)), report)
            }
        }
    }

    /// The texts of a string that are separated as in other formats, as a list.
    fn written_list(&self, report: &Report) -> Option<String> {
        let text = report.source(self.span.clone()).strip_prefix('"')?.strip_suffix('"')?;
        let texts: Vec<&str> = text.split([',', ';']).map(str::trim).filter(|text| !text.is_empty()).collect();
        // A part with a space is several texts, or one of another form.
        let is_one = |text: &&str| !text.contains(['"', '\\', ' ']);
        let is_plain = !texts.is_empty() && texts.iter().all(is_one) && !self.is_off();
        is_plain.then(|| format!("[\"{}\"]", texts.join("\", \"")))
    }

    pub fn table(&self, title: impl Into<String>, fix: &str, report: &mut Report) -> Option<Table<'d>> {
        match self.value {
            DeValue::Table(entries) => Some(Table::new(entries, self.span.clone(), title)),
            _ => self.wrong_type("a table", fix, report),
        }
    }

    pub fn integer(&self, range: RangeInclusive<u64>, report: &mut Report) -> Option<u64> {
        let fix = format!("write a whole number from `{}` to `{}`", range.start(), range.end());
        let value = match self.value {
            DeValue::Integer(integer) => Some(to_u64(integer)),
            DeValue::String(text) if self.is_reference(report) => text.replace('_', "").parse().ok().map(Some),
            _ => None,
        };
        if let Some(value) = value {
            let value = value.filter(|value| range.contains(value));
            if value.is_none() {
                let written = quoted(report.source(self.span.clone()));
                report.problem(self.span.clone(), format!("`{}` cannot be {written}", self.key), fix);
            }
            return value;
        }
        match self.value {
            DeValue::String(text) if text.replace('_', "").parse().is_ok_and(|value| range.contains(&value)) => {
                self.wrong_type("an integer", &format!("write {} without quotes", quoted(text)), report)
            }
            _ => self.wrong_type("an integer", &fix, report),
        }
    }

    /// A number from 0 to 1.
    pub fn share(&self, report: &mut Report) -> Option<f64> {
        let fix = "write a number from `0` to `1`, such as `0.01`";
        let number = match self.value {
            DeValue::Float(number) => number.as_str(),
            DeValue::Integer(number) => number.as_str(),
            DeValue::String(text) if self.is_reference(report) => text,
            _ => return self.wrong_type("a number", fix, report),
        };
        let share = number.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        if share.is_none() {
            let written = quoted(report.source(self.span.clone()));
            report.problem(self.span.clone(), format!("`{}` cannot be {written}", self.key), fix);
        }
        share
    }

    pub fn boolean(&self, report: &mut Report) -> Option<bool> {
        match self.value {
            DeValue::Boolean(flag) => Some(*flag),
            DeValue::String(text) => match parse_boolean(text) {
                Some(meant) if self.is_reference(report) => Some(meant),
                Some(meant) => self.wrong_type("a boolean", &format!("write `{meant}` without quotes"), report),
                None => self.wrong_type("a boolean", "write `true` or `false`", report),
            },
            _ => self.wrong_type("a boolean", "write `true` or `false`", report),
        }
    }

    /// Whether the value was written as one reference, `"${…}"`, which may stand for a value of any type.
    fn is_reference(&self, report: &Report) -> bool {
        let written = report.source(self.span.clone()).trim_matches(['"', '\'']);
        written.starts_with("${") && written.find('}') == Some(written.len() - 1)
    }

    /// One of several words.
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
            let guess = words().find(|word| *word == "off" && self.is_off()).or_else(|| nearest(text, words()));
            let fix = match guess {
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

    /// Whether the value turns something off in other products.
    pub fn is_off(&self) -> bool {
        match self.value {
            DeValue::Boolean(flag) => !flag,
            DeValue::String(text) => OFF_WORDS.contains(&text.trim().to_ascii_lowercase().as_str()),
            _ => false,
        }
    }

    /// The boolean that the value means in other formats.
    pub fn switch(&self) -> Option<bool> {
        match self.value {
            DeValue::Boolean(flag) => Some(*flag),
            DeValue::Integer(number) => parse_boolean(number.as_str()),
            DeValue::String(_) if self.is_off() => Some(false),
            DeValue::String(text) => parse_boolean(text),
            _ => None,
        }
    }

    /// A fix that shows the whole line.
    pub fn fix_with(&self, value: &str) -> String {
        match self.in_list {
            true => format!("write a string here, as in `{} = {value}`", self.key),
            false => format!("write `{} = {value}`", self.key),
        }
    }

    /// The items of a list, or a single value.
    pub fn one_or_all(&self) -> Vec<Item<'d>> {
        if let DeValue::Array(_) = self.value { self.items() } else { vec![self.clone()] }
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

/// A fix with the written number in place of that of its example, `retries = { attempts = 2 }` or `workers = 4`, and with the
/// written string in place of that of a table, `health = { path = "/healthz" }`.
pub fn fix_with_written(fix: &str, written: &str) -> String {
    let bare = written.trim_matches('"');
    let written = if bare.parse::<u32>().is_ok() { bare } else { written };
    let in_table = fix.split_once("{ ").and_then(|(_, rest)| Some((rest.split_once(" }")?.0, " }")));
    let example = in_table.or_else(|| Some((fix.strip_prefix("write `")?.split_once('`')?.0, "`")));
    let example = example.and_then(|(setting, end)| Some((setting.split_once(" = ")?.1, end)));
    let is_like = |(example, end): &(&str, &str)| {
        let is_string = example.starts_with('"');
        is_string == written.starts_with('"') && (!is_string || *end == " }") && !example.contains(['=', '[', '{'])
    };
    match example.filter(is_like) {
        Some((example, end)) => fix.replacen(&format!("= {example}{end}"), &format!("= {written}{end}"), 1),
        None => fix.to_owned(),
    }
}

/// The boolean that a word means in other formats.
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

/// The candidate that a misspelled word most likely stands for.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let normalized = |text: &str| text.to_lowercase().replace('-', "_");
    let word = normalized(word);
    // The distance takes quadratic time.
    if word.len() > 64 {
        return None;
    }
    let distances = candidates.into_iter().filter_map(|candidate| {
        let other = normalized(candidate);
        // Neither measure calls these similar.
        if word.len().max(other.len()) > 2 * word.len().min(other.len()) {
            return None;
        }
        let distance = strsim::damerau_levenshtein(&word, &other);
        let is_similar = distance * 3 <= word.len().max(other.len()) || strsim::jaro_winkler(&word, &other) > 0.9;
        is_similar.then_some((distance, candidate))
    });
    distances.min_by_key(|(distance, _)| *distance).map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fix_states_the_written_value() {
        for (fix, written, stated) in [
            ("write `workers = 4`", "8", "write `workers = 8`"),
            ("write `workers = 4`", "\"8\"", "write `workers = 8`"),
            ("write `workers = 4`", "\"a\"", "write `workers = 4`"),
            ("write `a = { b = 2 }`, or `a = false`", "3", "write `a = { b = 3 }`, or `a = false`"),
            ("write `a = { b = \"/x\" }`", "\"/up\"", "write `a = { b = \"/up\" }`"),
            ("write `host = \"x\"`", "\"y\"", "write `host = \"x\"`"),
            ("write `a = { b = [401] }`", "5", "write `a = { b = [401] }`"),
            ("write `a = { b = 1, c = 2 }`", "5", "write `a = { b = 1, c = 2 }`"),
            ("remove it", "5", "remove it"),
        ] {
            assert_eq!(fix_with_written(fix, written), stated);
        }
    }

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
