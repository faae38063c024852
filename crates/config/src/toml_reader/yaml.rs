//! Translates a line of YAML to TOML, for the fix of a configuration that is written as YAML.
//!
//! Supported are nested `key: value` lines, lists of `- item` lines, and lists and tables in brackets on one line.
//! Other values become `…`.

/// Of longer lists, the fix shows the first item.
const LIST_MAX_BYTES: usize = 120;

/// A line that is neither empty nor a comment.
struct YamlLine<'t> {
    /// Columns before the dash of a list item, or before the key.
    indent: usize,
    is_item: bool,
    /// Columns before the key or the value.
    content_indent: usize,
    /// The text after the dash, or the whole line, without a comment.
    content: &'t str,
}

impl<'t> YamlLine<'t> {
    fn parse(line: &'t str) -> Option<YamlLine<'t>> {
        let line = without_comment(line);
        let start = line.trim_start();
        let indent = line.len() - start.len();
        let item = if start == "-" { Some("") } else { start.strip_prefix("- ") };
        let content = item.unwrap_or(start).trim_start();
        let content_indent = if item.is_some() && content.is_empty() { indent + 2 } else { line.len() - content.len() };
        (!start.is_empty()).then_some(YamlLine {
            indent,
            is_item: item.is_some(),
            content_indent,
            content: content.trim_end(),
        })
    }

    /// Key and value of `key: value`; the value is empty if it follows on the next lines.
    fn setting(&self) -> Option<(&'t str, &'t str)> {
        split_setting(self.content)
    }
}

/// The fix for a line, counted from 0, if it is YAML.
pub fn toml_fix(text: &str, number: usize) -> Option<String> {
    let lines: Vec<Option<YamlLine>> = text.lines().map(YamlLine::parse).collect();
    let line = lines.get(number)?.as_ref()?;
    let (before, after) = (&lines[..number], &lines[number + 1..]);
    let parents = parent_keys(before, line);
    let Some((key, value)) = line.setting() else {
        let is_in_list = line.is_item && !parents.is_empty();
        if is_in_list && line.content.is_empty() {
            let section = parents.join(".");
            let header = if is_named(&section) { format!("[{section}.NAME]") } else { format!("[[{section}]]") };
            return Some(format!("write `{header}`"));
        }
        return is_in_list
            .then(|| format!("write `{}` in the list `{} = […]`", to_toml(line.content), parents[parents.len() - 1]));
    };
    let whole = [parents.as_slice(), &[key]].concat().join(".");
    let toml = if value.is_empty() {
        block_to_toml(key, &whole, line, after)
    } else {
        format!("`{key} = {}`", to_toml(value))
    };
    // The first key of a list item begins a table of the list.
    let header = match parents.join(".") {
        _ if !line.is_item => String::new(),
        section if is_named(&section) && key == "name" && !value.is_empty() => {
            return Some(format!("write `[{section}.{}]`", value.trim_matches(['"', '\''])));
        }
        section if is_named(&section) => format!("`[{section}.NAME]`, then "),
        list => format!("`[[{list}]]`, then "),
    };
    Some(format!("write {header}{toml}"))
}

/// Whether a section has a table for each name, instead of a list.
fn is_named(section: &str) -> bool {
    ["rules", "upstreams"].contains(&section)
}

/// The keys above a line in the hierarchy, outermost first.
fn parent_keys<'t>(before: &[Option<YamlLine<'t>>], line: &YamlLine) -> Vec<&'t str> {
    let mut keys = Vec::new();
    // A list item may have the same indentation as the key of its list.
    let mut level = if line.is_item { line.indent + 1 } else { line.indent };
    for line in before.iter().rev().flatten() {
        if line.content_indent < level
            && let Some((key, "")) = line.setting()
        {
            keys.push(key);
            level = if line.is_item { line.indent + 1 } else { line.indent };
        }
    }
    keys.reverse();
    keys
}

/// A key whose value is the block that follows.
fn block_to_toml(key: &str, path: &str, line: &YamlLine, after: &[Option<YamlLine>]) -> String {
    let belongs = |other: &&YamlLine| {
        other.indent > line.content_indent || (other.is_item && other.indent == line.content_indent)
    };
    let inner: Vec<&YamlLine> = after.iter().flatten().take_while(belongs).collect();
    let items = inner.iter().all(|inner| inner.is_item && inner.setting().is_none());
    match inner.first() {
        Some(first) if items && first.is_item => {
            let values: Vec<String> = inner.iter().map(|item| to_toml(item.content)).collect();
            let values = values.join(", ");
            if values.len() > LIST_MAX_BYTES {
                format!("`{key} = [{}, …]`", to_toml(first.content))
            } else {
                format!("`{key} = [{values}]`")
            }
        }
        Some(first) if first.is_item && is_named(path) => format!("`[{path}.NAME]` above the settings of each"),
        Some(first) if first.is_item => format!("`[[{path}]]` above each of its tables"),
        _ => format!("`[{path}]`"),
    }
}

fn split_setting(text: &str) -> Option<(&str, &str)> {
    let (key, value) = text.split_once(':')?;
    let key = key.trim_end();
    let is_key = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    (is_key && (value.is_empty() || value.starts_with([' ', '\t']))).then_some((key, value.trim()))
}

/// A value on one line.
fn to_toml(value: &str) -> String {
    if value.contains(char::is_control) {
        return "…".to_owned();
    }
    let inside = |open, close| value.strip_prefix(open).and_then(|rest: &str| rest.strip_suffix(close));
    let joined = |values: Option<Vec<String>>| values.map(|values| values.join(", "));
    if let Some(items) = inside('[', ']') {
        let items = split_list(items).map(|items| items.into_iter().map(to_toml).collect());
        return joined(items).map_or("…".to_owned(), |items| format!("[{items}]"));
    }
    if let Some(entries) = inside('{', '}') {
        let entry = |entry| split_setting(entry).map(|(key, value)| format!("{key} = {}", to_toml(value)));
        let entries = split_list(entries).and_then(|entries| entries.into_iter().map(entry).collect());
        return joined(entries).map_or("…".to_owned(), |entries| format!("{{ {entries} }}"));
    }
    let is_quoted = |quote| value.len() > 1 && value.starts_with(quote) && value.ends_with(quote);
    match value {
        "true" | "yes" | "on" => "true".to_owned(),
        "false" | "no" => "false".to_owned(),
        _ if is_quoted('"') || is_quoted('\'') || value.parse::<i64>().is_ok() => value.to_owned(),
        // Block strings, anchors, tags and unmatched quotes.
        "" => "…".to_owned(),
        _ if value.starts_with(['|', '>', '&', '!', '[', '{', '"', '\'']) || value.contains(['"', '\\']) => {
            "…".to_owned()
        }
        word => format!("\"{word}\""),
    }
}

/// Splits at commas outside of brackets and quotes; `None` if these do not match.
fn split_list(text: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    let (mut depth, mut quote, mut start) = (0_usize, None, 0);
    for (at, c) in text.char_indices() {
        match (c, quote) {
            (c, Some(end)) if c == end => quote = None,
            (_, Some(_)) => {}
            ('"' | '\'', None) => quote = Some(c),
            ('[' | '{', None) => depth += 1,
            (']' | '}', None) => depth = depth.checked_sub(1)?,
            (',', None) if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() {
        parts.push(text[start..].trim());
    }
    (depth == 0 && quote.is_none()).then_some(parts)
}

fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (at, c) in line.char_indices() {
        match (c, quote) {
            (c, Some(end)) if c == end => quote = None,
            (_, Some(_)) => {}
            ('"' | '\'', None) => quote = Some(c),
            ('#', None) if line[..at].ends_with([' ', '\t']) || at == 0 => return &line[..at],
            _ => {}
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_translated_to_toml() {
        let text = "\
listen:
  http: 127.0.0.1:8080 # a comment
  admin: \"127.0.0.1:9900\"
workers: 2

rules:
  per-client:
    key: [ip, 'header:x']
    count_refused: yes
    windows:
      - 2000/hour
      - \"33/minute\"
    overrides:
    - key: a
      windows: [5/hour]
upstreams: { demo: { builtin: echo } }
routes:
  - path: /api/{*rest}
    rules:
    - per-client
  -
    request_headers:
      remove: [x]
  - path: \"/b
http://a
";
        let fixes: Vec<Option<String>> = (0..text.lines().count()).map(|line| toml_fix(text, line)).collect();
        let fixes: Vec<&str> = fixes.iter().map(|fix| fix.as_deref().unwrap_or("")).collect();
        let expected = [
            "write `[listen]`",
            "write `http = \"127.0.0.1:8080\"`",
            "write `admin = \"127.0.0.1:9900\"`",
            "write `workers = 2`",
            "",
            "write `[rules]`",
            "write `[rules.per-client]`",
            "write `key = [\"ip\", 'header:x']`",
            "write `count_refused = true`",
            "write `windows = [\"2000/hour\", \"33/minute\"]`",
            "write `\"2000/hour\"` in the list `windows = […]`",
            "write `\"33/minute\"` in the list `windows = […]`",
            "write `[[rules.per-client.overrides]]` above each of its tables",
            "write `[[rules.per-client.overrides]]`, then `key = \"a\"`",
            "write `windows = [\"5/hour\"]`",
            "write `upstreams = { demo = { builtin = \"echo\" } }`",
            "write `[[routes]]` above each of its tables",
            "write `[[routes]]`, then `path = \"/api/{*rest}\"`",
            "write `rules = [\"per-client\"]`",
            "write `\"per-client\"` in the list `rules = […]`",
            "write `[[routes]]`",
            "write `[routes.request_headers]`",
            "write `remove = [\"x\"]`",
            "write `[[routes]]`, then `path = …`",
            "",
        ];
        assert_eq!(fixes, expected);
    }
}
