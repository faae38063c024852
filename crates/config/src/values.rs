//! Names, networks and digests that several sections of the configuration read.
//!
//! Each reader returns the value, or reports a problem and returns `None`. Nothing here depends on a section.

use std::fmt;
use std::net::IpAddr;

use http::HeaderName;

use super::diagnostics::{Report, Span, quoted, quoted_list};
use super::toml_reader::{Item, SpannedStr, Table, nearest};
use transom_limiter::handles::{Handle, IdVec};
use transom_limiter::ip_prefix::{Network, NetworkError};
use transom_limiter::secret_digest::Digest;

/// The prefix of an address that a part of a key leaves to the settings of its rule.
pub const PREFIX_NOT_STATED: u8 = 0;

pub const FIELD_NAME_FIX: &str =
    "write a name such as `x-api-key`: letters, digits and `-`; each name is listed by itself";

/// A value that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(pub T);

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The definitions of a section such as `[rules.NAME]`, in the order of the file.
pub struct Definitions<I, T> {
    pub entries: IdVec<I, Definition<T>>,
    /// False if some definitions may be missing here, because the section or part of the file cannot be read.
    pub complete: bool,
}

pub struct Definition<T> {
    pub name: String,
    /// The position of the name.
    pub span: Span,
    pub value: T,
}

impl<I: Handle, T> Definitions<I, T> {
    /// Reads each table of a section. `read` takes the name, and the table unless the value has another type.
    pub fn read(
        item: Option<Item>,
        report: &mut Report,
        mut read: impl FnMut(&str, Option<Table>, &mut Report) -> T,
    ) -> Definitions<I, T> {
        let mut definitions = Definitions { entries: IdVec::new(), complete: !report.has_syntax_errors };
        let Some(item) = item else { return definitions };
        let header = format!("[{}.NAME]", item.key);
        let fix = format!("write `{header}`, then its settings, each on a line");
        let Some(table) = item.table(format!("`[{}]`", item.key), &fix, report) else {
            definitions.complete = false;
            return definitions;
        };
        for entry in table.items() {
            check_name(&entry, report);
            let title = format!("`[{}.{}]`", item.key, entry.key);
            let value = read(entry.key, entry.table(title, &fix, report), report);
            definitions.entries.push(Definition { name: entry.key.to_owned(), span: entry.key_span, value });
        }
        definitions
    }

    /// The definition with this name. Reports a name that is not defined; `kind` is `rule` or `upstream`.
    pub fn find(&self, kind: &str, name: &str, span: Span, report: &mut Report) -> Option<I> {
        let found = self.entries.position(|entry| entry.name == name);
        if found.is_none() && self.complete {
            let names: Vec<&str> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
            let fix = definition_fix(name, &format!("{kind}s"), &names);
            report.problem(span, format!("{kind} {} is not defined", quoted(name)), fix);
        }
        found
    }

    pub fn into_values(self) -> IdVec<I, T> {
        self.entries.into_iter().map(|entry| entry.value).collect()
    }
}

/// The fix for a name that is not defined: one of the defined names, or the table that defines it.
pub fn definition_fix(name: &str, section: &str, defined: &[&str]) -> String {
    let table = match nearest_name(name) {
        _ if name.contains("://") => {
            format!("`[{section}.NAME]` with `servers = [\"{name}\"]`, and write its name here")
        }
        key if key.contains('.') => format!("`[{section}.\"{key}\"]`"),
        key => format!("`[{section}.{key}]`"),
    };
    let fix = format!("define it: {table}");
    match nearest(name, defined.iter().copied()) {
        Some(guess) => format!("did you mean {}?", quoted(guess)),
        None if defined.is_empty() => fix,
        None => format!("{fix}; defined are {}", quoted_list(defined.iter().copied(), "and")),
    }
}

/// Reports a name that cannot be used in header fields and metric labels as it is.
pub fn check_name(entry: &Item, report: &mut Report) {
    if !is_name(entry.key) {
        let message = format!("{} cannot be a name", quoted(entry.key));
        let fix = format!("write {}: at most 64 letters, digits, `_`, `-` and `.`", quoted(&nearest_name(entry.key)));
        report.problem(entry.key_span.clone(), message, fix);
    }
}

/// Whether a text can be a name.
pub fn is_name(text: &str) -> bool {
    text == nearest_name(text)
}

/// The name with each unsuitable character replaced by `-`, cut to 64 characters. `.` and `..` cannot stand in a path of the API.
fn nearest_name(name: &str) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
    let valid: String = name.chars().map(fits).take(64).collect();
    if ["", ".", ".."].contains(&&*valid) { String::from("NAME") } else { valid }
}

/// The name of a header field in lower case; `None` if the text is not a field name (RFC 9110, section 5.1). Names are not
/// matched to patterns, and no field has a name with the characters of one.
pub fn parse_field_name(text: &str) -> Option<String> {
    let name = HeaderName::from_bytes(text.as_bytes()).ok().filter(|_| !text.contains(['*', '~', '^', '|']));
    name.map(|name| name.as_str().to_owned())
}

/// Whether a value is a regular expression or a wildcard of another product. Values are compared as a whole.
pub fn is_pattern(text: &str) -> bool {
    let is_wildcard = text.len() > 1 && text != "*/*" && (text.starts_with('*') || text.ends_with('*'));
    is_wildcard || text.starts_with(['~', '^']) || text.contains(".*")
}

/// Reads the name of a header field.
pub fn read_field_name(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let message = || format!("{} is not a header field name", quoted(word.text));
    parse_field_name(word.text).or_else(|| report.reject(word.span.clone(), message(), FIELD_NAME_FIX))
}

/// Reads an address or a network in CIDR notation.
pub fn read_network(word: &SpannedStr, report: &mut Report) -> Option<Network> {
    let explain = |error| match error {
        NetworkError::Syntax if long_prefix(word.text).is_some() => {
            let bits = long_prefix(word.text).unwrap_or_default();
            (format!("{} has a prefix longer than the address", quoted(word.text)), format!("write at most `/{bits}`"))
        }
        NetworkError::Syntax if host_of(word.text) == "localhost" => {
            let fix = "write `\"127.0.0.0/8\"`, and `\"::1\"` for IPv6: names are not resolved";
            (format!("{} is not a network", quoted(word.text)), fix.to_owned())
        }
        NetworkError::Syntax if host_of(word.text).parse::<IpAddr>().is_ok() => {
            let fix = format!("write `\"{}\"`: a network has no port", host_of(word.text));
            (format!("{} is not a network", quoted(word.text)), fix)
        }
        NetworkError::Syntax => {
            let fix = "write a network such as `\"10.0.0.0/8\"`, or an address";
            (format!("{} is not a network", quoted(word.text)), fix.to_owned())
        }
        NetworkError::HostBits(network) => {
            let message = format!("{} has bits set after its first `{}` bits", quoted(word.text), network.prefix);
            let address = word.text.split('/').next().unwrap_or_default();
            (message, format!("write `\"{network}\"`, or `\"{address}\"` for the one address"))
        }
    };
    report.accept(word.span.clone(), word.text.parse().map_err(explain))
}

/// A text without a port and the brackets of an IPv6 address.
fn host_of(text: &str) -> &str {
    let host = text.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(text, |(host, _)| host);
    host.trim_matches(['[', ']'])
}

/// The bits of the address, if a text is an address with a prefix of more.
fn long_prefix(text: &str) -> Option<u8> {
    let (address, prefix) = text.split_once('/')?;
    let bits = if address.parse::<IpAddr>().ok()?.is_ipv4() { 32 } else { 128 };
    (prefix.parse::<u32>().ok()? > u32::from(bits)).then_some(bits)
}

/// Reads the SHA-256 fingerprint of a certificate: 64 lower-case hex digits, the form in which requests are counted.
/// Accepts the output of `openssl x509 -fingerprint -sha256` too, and a `sha256:` prefix.
pub fn read_fingerprint(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let digits = word.text.strip_prefix(Digest::PREFIX).unwrap_or(word.text).replace(':', "").to_ascii_lowercase();
    if digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Some(digits);
    }
    let fix = "write its SHA-256, as `openssl x509 -in FILE -noout -fingerprint -sha256` does";
    report.reject(word.span.clone(), format!("{} is not a certificate fingerprint", quoted(word.text)), fix)
}

/// Reads the digest of a secret: `sha256:` and 64 hex digits.
pub fn read_digest(word: &SpannedStr, report: &mut Report) -> Option<Digest> {
    let message = "this is not a digest: `sha256:` is followed by 64 hex digits";
    let fix = "copy all of it from `printf %s KEY | sha256sum`";
    Digest::parse(word.text).or_else(|| report.reject(word.span.clone(), message, fix))
}

/// The text without the mark with which editors on Windows begin a file. In PEM, it would hide the first line from the parser.
pub fn without_byte_order_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// Removes the line end that editors add to a secret in a text file. Binary secrets stay as they are.
pub fn strip_line_end(bytes: &[u8]) -> &[u8] {
    let line = bytes.strip_suffix(b"\n").map_or(bytes, |line| line.strip_suffix(b"\r").unwrap_or(line));
    let is_text = std::str::from_utf8(line).is_ok_and(|line| !line.contains(char::is_control));
    if is_text { line } else { bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_end_is_removed_from_text_only() {
        for (bytes, secret) in [
            (&b"text\n"[..], &b"text"[..]),
            (b"text\r\n", b"text"),
            (b"text", b"text"),
            (b"text\n\n", b"text\n\n"),
            (b"\x80\x01\n", b"\x80\x01\n"),
            (b"\x01\n", b"\x01\n"),
            (b"", b""),
        ] {
            assert_eq!(strip_line_end(bytes), secret);
        }
    }
}
