//! Settings, each declared once: key, kind of value, default, bounds and description.
//!
//! `settings!` declares a table of the configuration file as a struct, a field per setting. The declaration yields the
//! reader with its diagnostics, the defaults, and the rows of the configuration reference.

use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;
use transom_limiter::window::duration_ms;

use super::diagnostics::{Report, quoted};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table, fix_with_written};

pub const DAY_MS: u64 = 24 * HOUR_MS;
const HOUR_MS: u64 = 60 * 60 * 1000;
pub const KIB: u64 = 1024;
pub const MIB: u64 = 1024 * KIB;
pub const GIB: u64 = 1024 * MIB;
const TIB: u64 = 1024 * GIB;

/// Units of a size, and their bytes.
pub const SIZE_UNITS: [(&str, u64); 10] = [
    ("KiB", KIB),
    ("MiB", MIB),
    ("GiB", GIB),
    ("TiB", TIB),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

/// How a setting is written in the file, and which value it yields.
pub trait Kind {
    type Value;

    /// The value; `None` after a problem was reported.
    fn read(&self, item: &Item, report: &mut Report) -> Option<Self::Value>;

    /// The value of an absent setting. It also stands in for a value that could not be read.
    fn default(&self) -> Self::Value;

    /// The default as TOML; `None`: the setting has none.
    fn default_text(&self) -> Option<String> {
        None
    }

    /// What the file may contain, for the configuration reference.
    fn shape(&self) -> Shape;

    /// How to mend a file without the setting; `None`: the setting may be absent.
    fn required_fix(&self) -> Option<&'static str> {
        None
    }

    /// Whether a reload does not apply a change.
    fn needs_restart(&self) -> bool {
        false
    }
}

/// What the file may contain for a setting.
#[derive(Clone, PartialEq, Debug)]
pub enum Shape {
    Boolean,
    Integer(RangeInclusive<u64>),
    /// A number from 0 to 1.
    Share,
    /// A number that is not negative.
    Number,
    /// Bounds in milliseconds.
    Duration(RangeInclusive<u64>),
    /// Bounds in bytes.
    Size(RangeInclusive<u64>),
    /// One of several strings.
    Words(Vec<&'static str>),
    /// A text: what it is called in the reference.
    Text(&'static str),
    List(Box<Shape>),
    /// One, or a list.
    OneOrList(Box<Shape>),
    /// A table with these keys.
    Table(Vec<Setting>),
    /// A table whose keys the operator chooses.
    Map(Box<Shape>),
    AnyOf(Vec<Shape>),
    /// A shape that the reference describes in other words.
    Described(&'static str, Box<Shape>),
}

/// One setting of a table.
#[derive(Clone, PartialEq, Debug)]
pub struct Setting {
    pub key: &'static str,
    /// Markdown.
    pub description: String,
    /// The default as TOML.
    pub default: Option<String>,
    pub is_required: bool,
    pub needs_restart: bool,
    pub shape: Shape,
}

impl Setting {
    pub fn new(key: &'static str, description: &str, kind: &impl Kind) -> Setting {
        let description = description.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        Setting {
            key,
            description: description.trim().to_owned(),
            default: kind.default_text(),
            is_required: kind.required_fix().is_some(),
            needs_restart: kind.needs_restart(),
            shape: kind.shape(),
        }
    }
}

impl Setting {
    /// A section: a table, or a list of tables.
    pub fn section(key: &'static str, description: &str, shape: Shape) -> Setting {
        Setting {
            key,
            description: description.to_owned(),
            default: None,
            is_required: false,
            needs_restart: false,
            shape,
        }
    }
}

/// A table of the file that is read into a struct.
pub trait Section: Sized {
    /// The settings in the order of the declaration.
    fn settings() -> Vec<Setting>;

    /// The keys in the order of the declaration.
    const KEYS: &'static [&'static str];

    /// Reads the settings of `table`, and checks them together. Other keys of the table are left to the caller.
    fn read(table: &mut Table, report: &mut Report) -> Self;

    /// Reads an optional table with a header of its own. An unknown key is a problem.
    fn read_section(item: Option<Item>, report: &mut Report) -> Self
    where
        Self: Default,
    {
        section_table(item, report).map_or_else(Self::default, |table| Self::read_all(table, report))
    }

    /// Reads a table without other settings. An unknown key is a problem.
    fn read_all(mut table: Table, report: &mut Report) -> Self {
        let section = Self::read(&mut table, report);
        table.finish(report);
        section
    }
}

/// An optional table with a header of its own.
pub fn section_table<'d>(item: Option<Item<'d>>, report: &mut Report) -> Option<Table<'d>> {
    let item = item?;
    let header = format!("[{}]", item.key);
    let fix = match item.is_off() {
        true => OFF_FIX.to_owned(),
        false => format!("write `{header}`, then its settings, each on a line"),
    };
    item.table(format!("`{header}`"), &fix, report)
}

/// Declares a table of settings as a struct, with its `Section` and its `Default`:
///
/// ```text
/// settings! {
///     /// Limits on one HTTP/2 connection of a client.
///     pub struct Http2 {
///         /// Concurrent requests.
///         max_concurrent_streams: u32 = Integer(100, 1..=10_000);
///     }
/// }
/// ```
///
/// A key that is no Rust name follows its field: `request_header as "request-header": …`.
/// `pub struct Http2 checked by check` calls `check(&mut http2, &table, report)` after all settings are read.
macro_rules! settings {
    ($(#[doc = $title:literal])* pub struct $Section:ident $(checked by $check:path)? {
        $($(#[doc = $doc:literal])* $key:ident $(as $name:literal)?: $Type:ty = $kind:expr;)*
    }) => {
        $(#[doc = $title])*
        #[derive(Clone, PartialEq, Debug)]
        pub struct $Section {
            $($(#[doc = $doc])* pub $key: $Type,)*
        }

        impl $crate::settings::Section for $Section {
            fn settings() -> Vec<$crate::settings::Setting> {
                vec![$(
                    $crate::settings::Setting::new(key!($key $($name)?), concat!($($doc, "\n",)*), &$kind),
                )*]
            }

            const KEYS: &'static [&'static str] = &[$(key!($key $($name)?)),*];

            fn read(
                table: &mut $crate::toml_reader::Table,
                report: &mut $crate::diagnostics::Report,
            ) -> $Section {
                #[allow(unused_mut, reason = "changed by the check, if there is one")]
                let mut section = $Section { $($key: table.read(key!($key $($name)?), &$kind, report),)* };
                $($check(&mut section, table, report);)?
                section
            }
        }

        impl Default for $Section {
            fn default() -> $Section {
                $Section { $($key: $crate::settings::Kind::default(&$kind),)* }
            }
        }
    };
}

/// The key of a setting.
macro_rules! key {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $key:literal) => {
        $key
    };
}

impl Table<'_> {
    /// The value of a setting, or its default.
    pub fn read<K: Kind>(&mut self, key: &'static str, kind: &K, report: &mut Report) -> K::Value {
        let item = match kind.required_fix() {
            Some(fix) => self.require(key, fix),
            None => self.get(key),
        };
        let item = item.filter(|item| !self.reports_off(item, kind, report));
        item.and_then(|item| kind.read(&item, report)).unwrap_or_else(|| kind.default())
    }

    /// Reports a value such as `"off"`, which would be taken for the name of a file or another place.
    fn reports_off<K: Kind>(&self, item: &Item, kind: &K, report: &mut Report) -> bool {
        let is_default = matches!(item.value, DeValue::String(text) if ["auto", "default"].contains(&&**text));
        if !item.is_off() && !is_default {
            return false;
        }
        let shape = kind.shape();
        let is_number = matches!(shape, Shape::Integer(_) | Shape::Duration(_) | Shape::Size(_));
        let fix = match (shape.is_place(), kind.required_fix()) {
            (false, None) if is_number && is_default => String::from("remove the line: the default applies without it"),
            _ if !item.is_off() || kind.default_text().is_some() => return false,
            (true, None) => OFF_FIX.to_owned(),
            (true, Some(_)) if self.title().starts_with("`[") => {
                format!("remove {}: an absent section is off", self.title())
            }
            (false, None) if is_number => String::from("remove the line"),
            _ => return false,
        };
        let written = quoted(report.source(item.span.clone()).trim_matches('"'));
        report.problem(item.span.clone(), format!("`{}` cannot be {written}", item.key), fix);
        true
    }
}

/// The fix for a word that turns a setting off in other products.
pub const OFF_FIX: &str = "remove the line: an absent setting is off";

/// `true` or `false`; the field is the default.
pub struct Boolean(pub bool);

impl Kind for Boolean {
    type Value = bool;

    fn read(&self, item: &Item, report: &mut Report) -> Option<bool> {
        item.boolean(report)
    }

    fn default(&self) -> bool {
        self.0
    }

    fn default_text(&self) -> Option<String> {
        Some(self.0.to_string())
    }

    fn shape(&self) -> Shape {
        Shape::Boolean
    }
}

/// A whole number: default and bounds.
pub struct Integer<T>(pub T, pub RangeInclusive<u64>);

impl<T: Copy + ToString + TryFrom<u64>> Kind for Integer<T> {
    type Value = T;

    fn read(&self, item: &Item, report: &mut Report) -> Option<T> {
        // The bounds fit the type.
        item.integer(self.1.clone(), report).and_then(|value| T::try_from(value).ok())
    }

    fn default(&self) -> T {
        self.0
    }

    fn default_text(&self) -> Option<String> {
        Some(grouped(&self.0, "_"))
    }

    fn shape(&self) -> Shape {
        Shape::Integer(self.1.clone())
    }
}

/// A number from 0 to 1; the field is the default.
pub struct Share(pub f64);

impl Kind for Share {
    type Value = f64;

    fn read(&self, item: &Item, report: &mut Report) -> Option<f64> {
        item.share(report)
    }

    fn default(&self) -> f64 {
        self.0
    }

    fn default_text(&self) -> Option<String> {
        Some(self.0.to_string())
    }

    fn shape(&self) -> Shape {
        Shape::Share
    }
}

/// A duration: default, and bounds in milliseconds.
pub struct Time(pub Duration, pub RangeInclusive<u64>);

impl Kind for Time {
    type Value = Duration;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Duration> {
        let Time(default, range) = self;
        let example = format!("\"{}\"", format_ms(default.as_millis() as u64));
        let in_seconds = |seconds| format!("{}, if seconds are meant", item.fix_with(&format!("\"{seconds}s\"")));
        if let DeValue::Integer(_) = item.value {
            return item.wrong_type("a string", &in_seconds(report.source(item.span.clone())), report);
        }
        let written = item.string(&example, report)?;
        let (message, fix) = match duration_ms(written.text) {
            Some(ms) if range.contains(&ms) => return Some(Duration::from_millis(ms)),
            Some(ms) if ms > *range.end() => {
                (format!("{} is too long", quoted(written.text)), format!("at most `{}`", format_ms(*range.end())))
            }
            Some(0) => (format!("`{}` cannot be {}", item.key, quoted(written.text)), item.fix_with(&example)),
            None if item.is_off() && range.contains(&0) => {
                (format!("`{}` cannot be {}", item.key, quoted(written.text)), item.fix_with("\"0s\""))
            }
            Some(_) => (format!("{} is too short", quoted(written.text)), format!("at least `{}ms`", range.start())),
            None => {
                let fix = match (written.text.parse::<u32>(), guess_duration(written.text)) {
                    (Ok(_), _) => in_seconds(written.text),
                    (_, Some(meant)) => item.fix_with(&format!("\"{meant}\"")),
                    _ => format!("write a whole number with `ms`, `s`, `m`, `h`, `d` or `w`, such as `{example}`"),
                };
                (format!("{} is not a duration", quoted(written.text)), fix)
            }
        };
        report.problem(written.span, message, fix);
        None
    }

    fn default(&self) -> Duration {
        self.0
    }

    fn default_text(&self) -> Option<String> {
        Some(format!("\"{}\"", format_ms(self.0.as_millis() as u64)))
    }

    fn shape(&self) -> Shape {
        Shape::Duration(self.1.clone())
    }
}

/// The duration that is most likely intended by an invalid one, such as `1 s` or `2min`.
fn guess_duration(text: &str) -> Option<String> {
    let plain: String = text.to_lowercase().split_whitespace().collect();
    let unit = plain.trim_start_matches(|c: char| c.is_ascii_digit());
    let short = match unit.strip_suffix('s').filter(|unit| unit.len() > 1).unwrap_or(unit) {
        "msec" | "milli" | "millisecond" => "ms",
        "sec" | "second" => "s",
        "min" | "minute" => "m",
        "hr" | "hour" => "h",
        "day" => "d",
        "week" => "w",
        _ => unit,
    };
    let meant = format!("{}{short}", &plain[..plain.len() - unit.len()]);
    duration_ms(&meant).map(|_ms| meant)
}

/// A duration in the largest unit that divides it.
fn format_ms(ms: u64) -> String {
    match ms {
        DAY_MS => "1d".to_owned(),
        ms if ms > 0 && ms.is_multiple_of(HOUR_MS) => format!("{}h", ms / HOUR_MS),
        ms if ms.is_multiple_of(1000) => format!("{}s", ms / 1000),
        ms => format!("{ms}ms"),
    }
}

/// A duration up to a day whose default is zero. The field is the example in messages.
pub struct TimeOrZero(pub Duration);

impl Kind for TimeOrZero {
    type Value = Duration;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Duration> {
        Time(self.0, 0..=DAY_MS).read(item, report)
    }

    fn default(&self) -> Duration {
        Duration::ZERO
    }

    fn default_text(&self) -> Option<String> {
        Some("\"0s\"".to_owned())
    }

    fn shape(&self) -> Shape {
        Shape::Duration(0..=DAY_MS)
    }
}

/// A setting without a default. The default of the inner kind is the example in messages.
pub struct Optional<K>(pub K);

impl<K: Kind> Kind for Optional<K> {
    type Value = Option<K::Value>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Option<K::Value>> {
        self.0.read(item, report).map(Some)
    }

    fn default(&self) -> Option<K::Value> {
        None
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }
}

/// A number of bytes, with or without a unit: the default, the default as TOML, and the bounds.
pub struct Size<T>(pub T, pub &'static str, pub RangeInclusive<u64>);

impl<T: Copy + TryFrom<u64>> Kind for Size<T> {
    type Value = T;

    fn read(&self, item: &Item, report: &mut Report) -> Option<T> {
        let Size(_, example, range) = self;
        let DeValue::String(text) = item.value else {
            let bytes: Option<u64> = match item.value {
                DeValue::Integer(_) => item.integer(range.clone(), report),
                _ => item.wrong_type("a size", &item.fix_with(example), report),
            };
            return bytes.and_then(|bytes| T::try_from(bytes).ok());
        };
        let (message, fix) = match size_bytes(text) {
            Some(bytes) if range.contains(&bytes) => return T::try_from(bytes).ok(),
            Some(_) => (
                format!("`{}` cannot be {}", item.key, quoted(text)),
                format!("write a size from `{}` to `{}` bytes", range.start(), range.end()),
            ),
            None => {
                let fix = match guess_size(text) {
                    _ if item.is_off() && range.contains(&0) => item.fix_with("0"),
                    Some(meant) => item.fix_with(&format!("\"{meant}\"")),
                    None => {
                        format!("write a whole number of bytes, or one with `KiB`, `MiB` or `GiB`, such as `{example}`")
                    }
                };
                (format!("{} is not a size", quoted(text)), fix)
            }
        };
        report.problem(item.span.clone(), message, fix);
        None
    }

    fn default(&self) -> T {
        self.0
    }

    fn default_text(&self) -> Option<String> {
        Some(self.1.to_owned())
    }

    fn shape(&self) -> Shape {
        Shape::Size(self.2.clone())
    }
}

/// The bytes of a size with a unit.
pub fn size_bytes(text: &str) -> Option<u64> {
    SIZE_UNITS.iter().find_map(|(unit, bytes)| {
        let digits = text.strip_suffix(unit)?.trim_end();
        let digits = Some(digits).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse::<u64>().ok()?.checked_mul(*bytes)
    })
}

/// The size that is most likely intended by an invalid one: nginx and HAProxy write `20m`, Kubernetes writes `20Mi`. Their
/// units are powers of 1024.
fn guess_size(text: &str) -> Option<String> {
    let plain: String = text.to_lowercase().split_whitespace().collect();
    let unit_at = plain.find(|c: char| !c.is_ascii_digit()).filter(|at| *at > 0)?;
    let (number, unit) = plain.split_at(unit_at);
    let unit = match unit {
        "k" | "ki" | "kib" | "kb" => "KiB",
        "m" | "mi" | "mib" | "mb" => "MiB",
        "g" | "gi" | "gib" | "gb" => "GiB",
        "b" | "byte" | "bytes" => "B",
        _ => return None,
    };
    Some(format!("{number}{unit}"))
}

/// A number of bytes, or `"unlimited"`, which is the default. The field is the example in messages.
pub struct SizeOrUnlimited(pub &'static str);

impl Kind for SizeOrUnlimited {
    type Value = Option<u64>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Option<u64>> {
        match item.value {
            DeValue::String(text) if text == "unlimited" => Some(None),
            _ if item.is_off() => {
                let message = format!("`{}` cannot be {}", item.key, quoted(report.source(item.span.clone())));
                report.reject(item.span.clone(), message, item.fix_with("\"unlimited\""))
            }
            _ => Size(0_u64, self.0, 0..=u64::MAX / 2).read(item, report).map(Some),
        }
    }

    fn default(&self) -> Option<u64> {
        None
    }

    fn default_text(&self) -> Option<String> {
        Some("\"unlimited\"".to_owned())
    }

    fn shape(&self) -> Shape {
        Shape::AnyOf(vec![Shape::Size(0..=u64::MAX / 2), Shape::Words(vec!["unlimited"])])
    }
}

/// One of several strings: the default, and each string with its value.
pub struct Choice<T: 'static>(pub T, pub &'static [(&'static str, T)]);

impl<T: Copy + PartialEq> Kind for Choice<T> {
    type Value = T;

    fn read(&self, item: &Item, report: &mut Report) -> Option<T> {
        item.choice(self.1, report)
    }

    fn default(&self) -> T {
        self.0
    }

    fn default_text(&self) -> Option<String> {
        self.1.iter().find(|(_, value)| *value == self.0).map(|(word, _)| format!("\"{word}\""))
    }

    fn shape(&self) -> Shape {
        Shape::Words(self.1.iter().map(|(word, _)| *word).collect())
    }
}

/// A setting that must be present. `default` stands in for an absent one; the second field is the fix.
pub struct Required<K>(pub K, pub &'static str);

impl<K: Kind> Kind for Required<K> {
    type Value = K::Value;

    fn read(&self, item: &Item, report: &mut Report) -> Option<K::Value> {
        self.0.read(item, report)
    }

    fn default(&self) -> K::Value {
        self.0.default()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn required_fix(&self) -> Option<&'static str> {
        Some(self.1)
    }
}

/// A setting of which a reload does not apply a change.
pub struct Restart<K>(pub K);

impl<K: Kind> Kind for Restart<K> {
    type Value = K::Value;

    fn read(&self, item: &Item, report: &mut Report) -> Option<K::Value> {
        self.0.read(item, report)
    }

    fn default(&self) -> K::Value {
        self.0.default()
    }

    fn default_text(&self) -> Option<String> {
        self.0.default_text()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn required_fix(&self) -> Option<&'static str> {
        self.0.required_fix()
    }

    fn needs_restart(&self) -> bool {
        true
    }
}

/// A setting with a reader of its own.
pub struct Custom<T> {
    pub default: T,
    /// The default as TOML.
    pub default_text: Option<&'static str>,
    pub shape: fn() -> Shape,
    pub read: fn(&Item, &mut Report) -> Option<T>,
}

impl<T: Default> Custom<T> {
    /// A setting whose default is the empty value.
    pub fn or_empty(shape: fn() -> Shape, read: fn(&Item, &mut Report) -> Option<T>) -> Custom<T> {
        Custom { default: T::default(), default_text: None, shape, read }
    }
}

impl<T: Clone> Kind for Custom<T> {
    type Value = T;

    fn read(&self, item: &Item, report: &mut Report) -> Option<T> {
        (self.read)(item, report)
    }

    fn default(&self) -> T {
        self.default.clone()
    }

    fn default_text(&self) -> Option<String> {
        self.default_text.map(str::to_owned)
    }

    fn shape(&self) -> Shape {
        (self.shape)()
    }
}

/// A string that is checked together with other settings: what it is called in the reference, and an example as TOML.
pub struct Text(pub &'static str, pub &'static str);

impl Kind for Text {
    type Value = Option<SpannedString>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Option<SpannedString>> {
        let SpannedStr { text, span } = item.string(self.1, report)?;
        let (key, key_span) = (item.key.to_owned(), item.key_span.clone());
        Some(Some(SpannedString { key, key_span, text: text.to_owned(), span }))
    }

    fn default(&self) -> Option<SpannedString> {
        None
    }

    fn shape(&self) -> Shape {
        Shape::Text(self.0)
    }
}

/// Strings that are checked together with other settings, in a list or a single one: what one is called in the
/// reference, and an example as TOML.
pub struct Texts(pub &'static str, pub &'static str);

impl Kind for Texts {
    type Value = Vec<SpannedString>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Vec<SpannedString>> {
        let words = item.strings(self.1, report)?;
        Some(words.iter().map(|word| SpannedString::new(item.key, word)).collect())
    }

    fn default(&self) -> Vec<SpannedString> {
        Vec::new()
    }

    fn default_text(&self) -> Option<String> {
        None
    }

    fn shape(&self) -> Shape {
        Shape::OneOrList(Box::new(Shape::Text(self.0)))
    }
}

/// A string that is read into a value, without a default.
pub struct Word<T> {
    pub shape: &'static str,
    /// As TOML.
    pub example: &'static str,
    pub read: fn(&SpannedStr, &mut Report) -> Option<T>,
}

impl<T> Kind for Word<T> {
    type Value = Option<T>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Option<T>> {
        (self.read)(&item.string(self.example, report)?, report).map(Some)
    }

    fn default(&self) -> Option<T> {
        None
    }

    fn shape(&self) -> Shape {
        Shape::Text(self.shape)
    }
}

/// A string or a list of strings, each read into a value. Without a default.
pub struct Words<T> {
    /// What one string is called in the reference.
    pub shape: &'static str,
    /// As TOML.
    pub example: &'static str,
    /// Follows the example in the fix for an empty list.
    pub or: &'static str,
    pub read: fn(&SpannedStr, &mut Report) -> Option<T>,
}

impl<T> Kind for Words<T> {
    type Value = Vec<T>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Vec<T>> {
        let words = item.strings(self.example, report)?;
        if words.is_empty() {
            let fix = format!("{}{}", item.fix_with(self.example), self.or);
            report.problem(item.span.clone(), format!("`{}` is an empty list", item.key), fix);
        }
        Some(words.iter().filter_map(|word| (self.read)(word, report)).collect())
    }

    fn default(&self) -> Vec<T> {
        Vec::new()
    }

    fn shape(&self) -> Shape {
        Shape::one_or_list(self.shape)
    }
}

/// A list of tables: the title of one in messages, and the fix for a value of another type.
pub struct Tables<S>(&'static str, &'static str, PhantomData<S>);

impl<S> Tables<S> {
    pub fn or(title: &'static str, fix: &'static str) -> Tables<S> {
        Tables(title, fix, PhantomData)
    }
}

impl<S: Section> Kind for Tables<S> {
    type Value = Vec<S>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Vec<S>> {
        let DeValue::Array(_) = item.value else { return item.wrong_type("a list of tables", self.1, report) };
        let items = item.list("[]", report)?;
        let read = |item: &Item| Some(S::read_all(item.table(self.0, self.1, report)?, report));
        Some(items.iter().filter_map(read).collect())
    }

    fn default(&self) -> Vec<S> {
        Vec::new()
    }

    fn shape(&self) -> Shape {
        Shape::List(Box::new(Shape::Table(S::settings())))
    }
}

/// An inline table. The field is the fix for a value of another type.
pub struct Inline<S>(&'static str, PhantomData<S>);

impl<S> Inline<S> {
    pub fn or(fix: &'static str) -> Inline<S> {
        Inline(fix, PhantomData)
    }
}

impl<S: Section + Default> Kind for Inline<S> {
    type Value = S;

    fn read(&self, item: &Item, report: &mut Report) -> Option<S> {
        let fix = match item.value {
            _ if item.is_off() => String::from("remove the line"),
            DeValue::Integer(_) | DeValue::String(_) => fix_with_written(self.0, report.source(item.span.clone())),
            _ => self.0.to_owned(),
        };
        Some(S::read_all(item.table(format!("`{}`", item.key), &fix, report)?, report))
    }

    fn default(&self) -> S {
        S::default()
    }

    fn shape(&self) -> Shape {
        Shape::Table(S::settings())
    }
}

/// An inline table, or `false` for none. An absent setting and `true` yield the defaults of the table.
pub struct InlineOrFalse<S>(pub Inline<S>);

impl<S: Section + Default> Kind for InlineOrFalse<S> {
    type Value = Option<S>;

    fn read(&self, item: &Item, report: &mut Report) -> Option<Option<S>> {
        match item.value {
            DeValue::Boolean(_) => item.boolean(report).map(|is_on| is_on.then(S::default)),
            DeValue::String(_) if item.is_off() => item.wrong_type("a table", &item.fix_with("false"), report),
            _ => self.0.read(item, report).map(Some),
        }
    }

    fn default(&self) -> Option<S> {
        Some(S::default())
    }

    fn default_text(&self) -> Option<String> {
        Some("true".to_owned())
    }

    fn shape(&self) -> Shape {
        Shape::AnyOf(vec![Shape::Boolean, self.0.shape()])
    }
}

/// A percentage, with or without `%`.
pub struct Percent<T>(pub T);

impl<T: Copy + ToString + TryFrom<u64>> Kind for Percent<T> {
    type Value = T;

    fn read(&self, item: &Item, report: &mut Report) -> Option<T> {
        let DeValue::String(text) = item.value else { return Integer(self.0, 0..=100).read(item, report) };
        let percent = text.strip_suffix('%').and_then(|digits| digits.trim().parse::<u64>().ok());
        let percent = percent.filter(|percent| *percent <= 100);
        if percent.is_none() {
            let message = format!("`{}` cannot be {}", item.key, quoted(text));
            report.problem(item.span.clone(), message, "write a whole number from `0` to `100`");
        }
        percent.and_then(|percent| T::try_from(percent).ok())
    }

    fn default(&self) -> T {
        self.0
    }

    fn default_text(&self) -> Option<String> {
        Some(self.0.to_string())
    }

    fn shape(&self) -> Shape {
        Shape::AnyOf(vec![Shape::Integer(0..=100), Shape::Text("`\"N%\"`")])
    }
}

impl Shape {
    /// A text or a list of texts.
    pub fn one_or_list(name: &'static str) -> Shape {
        Shape::OneOrList(Box::new(Shape::Text(name)))
    }

    /// A list whose items have one of several shapes.
    pub fn list_of(shapes: Vec<Shape>) -> Shape {
        Shape::List(Box::new(Shape::AnyOf(shapes)))
    }

    /// A table whose keys the operator chooses.
    pub fn map_of(shape: Shape) -> Shape {
        Shape::Map(Box::new(shape))
    }

    /// A shape that the reference describes in these words.
    pub fn described(text: &'static str, shape: Shape) -> Shape {
        Shape::Described(text, Box::new(shape))
    }

    /// Whether a text names a file, an address or another place.
    fn is_place(&self) -> bool {
        match self {
            Shape::Text(name) => ["file", "path", "network", "ADDRESS", "URL"].iter().any(|place| name.contains(place)),
            Shape::List(of) | Shape::OneOrList(of) | Shape::Described(_, of) => of.is_place(),
            Shape::AnyOf(shapes) => shapes.iter().any(Shape::is_place),
            _ => false,
        }
    }

    /// The type and the bounds, as the configuration reference prints them.
    pub fn reference_text(&self) -> String {
        match self {
            Shape::Boolean => "boolean".to_owned(),
            Shape::Integer(range) => format!("{} to {}", grouped(range.start(), ","), grouped(range.end(), ",")),
            Shape::Share => "0 to 1".to_owned(),
            Shape::Number => "number".to_owned(),
            Shape::Duration(range) => {
                format!("duration, `\"{}\"` to `\"{}\"`", format_ms(*range.start()), format_ms(*range.end()))
            }
            Shape::Size(range) if *range.end() > GIB => "size".to_owned(),
            Shape::Size(range) => format!("size, {} to {}", size_text(*range.start()), size_text(*range.end())),
            Shape::Words(words) => words.iter().map(|word| format!("`\"{word}\"`")).collect::<Vec<_>>().join(", "),
            Shape::Text(name) => (*name).to_owned(),
            Shape::List(of) if matches!(**of, Shape::Table(_)) => "list of tables".to_owned(),
            Shape::List(of) => format!("list of {}", of.reference_text()),
            Shape::OneOrList(of) => format!("{} or list", of.reference_text()),
            Shape::Map(of) if matches!(**of, Shape::Table(_)) => "tables by name".to_owned(),
            Shape::Table(_) | Shape::Map(_) => "table".to_owned(),
            Shape::Described(text, _) => (*text).to_owned(),
            Shape::AnyOf(shapes) => shapes.iter().map(Shape::reference_text).collect::<Vec<_>>().join(", "),
        }
    }
}

/// A number with a separator between groups of three digits, from five digits on.
fn grouped(number: &impl ToString, separator: &'static str) -> String {
    let digits = number.to_string();
    let is_group_start = |at: usize| digits.len() > 4 && at > 0 && (digits.len() - at).is_multiple_of(3);
    let with_separator =
        |(at, digit)| [if is_group_start(at) { separator } else { "" }.to_owned(), String::from(digit)];
    digits.chars().enumerate().flat_map(with_separator).collect()
}

/// A size in the largest unit that divides it.
fn size_text(bytes: u64) -> String {
    let units = [("GiB", GIB), ("MiB", MIB), ("KiB", KIB)];
    match units.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("`\"{}{name}\"`", bytes / unit),
        None => format!("`{bytes}`"),
    }
}

/// The rows of the settings in the configuration reference, which is Markdown.
pub fn reference_rows(settings: &[Setting]) -> Vec<String> {
    let row = |setting: &Setting| {
        let Setting { key, description, shape, default, is_required, needs_restart } = setting;
        let absent = if *is_required { "required" } else { "none" };
        let default = default.as_ref().map_or_else(|| absent.to_owned(), |default| format!("`{default}`"));
        let restart = if *needs_restart { " A change needs a restart." } else { "" };
        format!("| `{key}` | {} | {default} | {description}{restart} |", shape.reference_text())
    };
    settings.iter().map(row).collect()
}
