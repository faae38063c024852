//! Comments in TOML files that the gateway edits: those of what is removed go, and all others stay.

use toml_edit::Table;

/// The empty lines and comments above a table.
pub fn text_above(table: &Table) -> String {
    table.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default().to_owned()
}

/// The text between what precedes a removed table and what follows it. `above`: the text above the removed table; `below`: the text
/// above the next one, or at the end of the file. A comment that an empty line separates from the header is not about this table
/// alone, and stays.
pub fn text_after_removal(above: &str, below: &str, is_end: bool) -> String {
    let remaining = above.rfind("\n\n").map_or("", |end| &above[..=end]);
    let is_first = !above.starts_with('\n') && remaining.is_empty();
    let below = if is_first && !is_end { below.trim_start_matches('\n') } else { below };
    let has_no_gap = remaining.is_empty() || below.starts_with('\n') || (is_end && below.is_empty());
    format!("{remaining}{}{below}", if has_no_gap { "" } else { "\n" })
}
