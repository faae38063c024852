//! Edits the text of a clients file and keeps everything else as the operator wrote it.

use std::fmt;

use toml_edit::{Array, DocumentMut, Item, Table, TableLike, TomlError, Value};
use transom_config::client_grants::ClientGrant;
use transom_config::client_limits::{ClientLimits, to_toml};
use transom_config::clients::Client;

use crate::toml_comments::{text_above, text_after_removal};

/// The text of a clients file.
pub struct ClientsDocument(DocumentMut);

/// The identifiers of a client, as written in the file.
pub struct Identifiers {
    pub api_keys: Vec<String>,
    pub subjects: Vec<String>,
    pub networks: Vec<String>,
}

impl Identifiers {
    pub fn of(client: Option<&Client>) -> Identifiers {
        let Some(client) = client else { return Identifiers { api_keys: vec![], subjects: vec![], networks: vec![] } };
        Identifiers {
            api_keys: client.api_keys.iter().map(ToString::to_string).collect(),
            subjects: client.subjects.clone(),
            networks: client.networks.iter().map(ToString::to_string).collect(),
        }
    }

    pub fn without(&self, others: &Identifiers) -> Identifiers {
        let rest =
            |own: &[String], others: &[String]| own.iter().filter(|one| !others.contains(one)).cloned().collect();
        Identifiers {
            api_keys: rest(&self.api_keys, &others.api_keys),
            subjects: rest(&self.subjects, &others.subjects),
            networks: rest(&self.networks, &others.networks),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.lists().iter().all(|(_, values)| values.is_empty())
    }

    fn lists(&self) -> [(&'static str, &[String]); 3] {
        [("api_keys", &self.api_keys), ("subjects", &self.subjects), ("networks", &self.networks)]
    }
}

impl ClientsDocument {
    pub fn read(text: &str) -> Result<ClientsDocument, TomlError> {
        text.parse().map(ClientsDocument)
    }

    /// Adds a client, or identifiers that it does not have yet.
    pub fn add(&mut self, name: &str, plan: Option<&str>, identifiers: &Identifiers) {
        let Some(client) = self.client(name) else { return };
        if let Some(plan) = plan {
            match client.get_mut("plan").and_then(Item::as_value_mut) {
                Some(known) => replace_value(known, plan),
                None => drop(client.insert("plan", toml_edit::value(plan))),
            }
        }
        for (key, values) in identifiers.lists().into_iter().filter(|(_, values)| !values.is_empty()) {
            let item = client.entry(key).or_insert(toml_edit::value(Array::new()));
            values.iter().for_each(|value| add_value(item, value));
        }
    }

    /// Removes a client, and the comment right above it.
    pub fn remove(&mut self, name: &str) {
        let Some(clients) = self.0.get_mut("clients").and_then(Item::as_table_like_mut) else { return };
        let Some(Item::Table(removed)) = clients.remove(name) else { return };
        let above = text_above(&removed);
        let is_after = |table: &Table| table.position() > removed.position();
        let tables = clients.iter_mut().filter_map(|(_, item)| item.as_table_mut());
        match tables.filter(|table| is_after(table)).min_by_key(|table| table.position()) {
            Some(next) => {
                let below = text_after_removal(&above, &text_above(next), false);
                next.decor_mut().set_prefix(below);
            }
            None => {
                let end = self.0.trailing().as_str().unwrap_or_default().to_owned();
                self.0.set_trailing(text_after_removal(&above, &end, true));
            }
        }
    }

    /// Replaces a client, or adds or removes it: changes only what differs.
    pub fn replace(&mut self, name: &str, before: Option<&Client>, after: Option<&Client>) {
        let Some(after) = after else { return self.remove(name) };
        let (had, has) = (Identifiers::of(before), Identifiers::of(Some(after)));
        self.remove_identifiers(name, &had.without(&has));
        self.add(name, Some(&after.plan), &has.without(&had));
        self.replace_limits(name, before.map_or(&[], |client| &client.limits), &after.limits);
        self.replace_grants(name, before.map_or(&[], |client| &client.grants), &after.grants);
        if has.is_empty()
            && let Some(client) = self.client(name)
            && !client.contains_key("api_keys")
        {
            // Says that the client is meant to have no identifier yet.
            client.insert("api_keys", toml_edit::value(Array::new()));
        }
    }

    /// Replaces the limits of a client in single rules, where they differ.
    fn replace_limits(&mut self, name: &str, had: &[ClientLimits], has: &[ClientLimits]) {
        if had == has {
            return;
        }
        let Some(client) = self.client(name) else { return };
        if !client.contains_key("limits") {
            let mut tables = Table::new();
            tables.set_implicit(true);
            // Becomes an inline table where the client is one, and so do those below.
            client.insert("limits", Item::Table(tables));
        }
        let Some(tables) = client.get_mut("limits").and_then(Item::as_table_like_mut) else { return };
        for gone in had.iter().filter(|former| has.iter().all(|limits| limits.rule != former.rule)) {
            tables.remove(&gone.rule);
        }
        for limits in has.iter().filter(|limits| !had.contains(limits)) {
            let windows = to_toml(&limits.windows).parse::<Value>().ok().map(|windows| ("windows", windows));
            let until = limits.until_text().and_then(|text| text.parse::<Value>().ok()).map(|until| ("until", until));
            let mut table = Table::new();
            table.extend(windows.into_iter().chain(until));
            tables.insert(&limits.rule, Item::Table(table));
        }
        if tables.is_empty() {
            client.remove("limits");
        }
    }

    /// Replaces the grants of a client, a line each, if they differ.
    fn replace_grants(&mut self, name: &str, had: &[ClientGrant], has: &[ClientGrant]) {
        let Some(client) = self.client(name).filter(|_| had != has) else { return };
        let lines: String = has.iter().map(|grant| format!("\n    {},", to_toml(&grant.to_json()))).collect();
        match format!("[{lines}\n]").parse::<Value>() {
            Ok(grants) if !has.is_empty() => drop(client.insert("grants", Item::Value(grants))),
            _ => drop(client.remove("grants")),
        }
    }

    /// Removes some identifiers of a client.
    pub fn remove_identifiers(&mut self, name: &str, identifiers: &Identifiers) {
        let Some(client) = self.client(name) else { return };
        for (key, values) in identifiers.lists() {
            let Some(item) = client.get_mut(key) else { continue };
            if let Some(array) = item.as_array_mut() {
                values.iter().for_each(|value| remove_value(array, value));
            }
            let is_gone = match item.as_value() {
                Some(Value::Array(array)) => array.is_empty(),
                Some(Value::String(text)) => values.iter().any(|value| is_equivalent(text.value(), value)),
                _ => false,
            };
            if is_gone && !values.is_empty() {
                client.remove(key);
            }
        }
    }

    /// A client, created if needed. `None`: the file has another form, which the check reports.
    fn client(&mut self, name: &str) -> Option<&mut dyn TableLike> {
        // Comments in a file without clients go above the first one.
        let is_empty = self.0.is_empty();
        let comments = self.0.trailing().as_str().unwrap_or_default().to_owned();
        if is_empty {
            self.0.set_trailing("");
        }
        let clients = self.0.entry("clients").or_insert_with(|| {
            let mut clients = Table::new();
            clients.set_implicit(true);
            Item::Table(clients)
        });
        let item = match clients {
            Item::Table(table) => table.entry(name).or_insert_with(|| {
                let mut client = Table::new();
                let gap = if is_empty && comments.is_empty() { "" } else { "\n" };
                let comments = if is_empty { comments.as_str() } else { "" };
                client.decor_mut().set_prefix(format!("{comments}{gap}"));
                Item::Table(client)
            }),
            Item::Value(Value::InlineTable(table)) => {
                if !table.contains_key(name) {
                    if let Some((_, last)) = table.iter_mut().last() {
                        last.decor_mut().set_suffix("");
                    }
                    table.insert(name, Value::InlineTable(Default::default()));
                }
                return table.get_mut(name).and_then(|value| value.as_inline_table_mut()).map(|t| t as _);
            }
            Item::None | Item::Value(_) | Item::ArrayOfTables(_) => return None,
        };
        item.as_table_like_mut()
    }
}

impl fmt::Display for ClientsDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Replaces a value and keeps the text around it.
fn replace_value(known: &mut Value, text: &str) {
    let decor = known.decor().clone();
    *known = Value::from(text);
    *known.decor_mut() = decor;
}

/// Whether two texts are the same digest, subject or network.
fn is_equivalent(one: &str, other: &str) -> bool {
    use transom_limiter::ip_prefix::Network;
    use transom_limiter::secret_digest::Digest;
    let (networks, digests) = (|text: &str| text.parse::<Network>().ok(), Digest::parse);
    one == other
        || networks(one).is_some_and(|network| networks(other) == Some(network))
        || digests(one).is_some_and(|digest| digests(other) == Some(digest))
}

/// Adds a text to a list, or turns a single text into a list, unless the text is in it.
fn add_value(item: &mut Item, text: &str) {
    if let Some(only) = item.as_str().map(str::to_owned) {
        *item = toml_edit::value(Array::from_iter([only]));
    }
    let Some(array) = item.as_array_mut() else { return };
    if array.iter().any(|known| known.as_str().is_some_and(|known| is_equivalent(known, text))) {
        return;
    }
    // In a list with one line per value, the new value gets a line as well; comments after the last value stay.
    let behind = text_behind(array);
    let line_break = array.iter().last().and_then(|last| {
        let prefix = last.decor().prefix()?.as_str()?;
        prefix.rfind('\n').map(|at| prefix[at..].to_owned())
    });
    match line_break {
        Some(line_break) => {
            let (comment, end) = first_line(&behind);
            array.push_formatted(Value::from(text).decorated(format!("{comment}{line_break}"), ""));
            array.set_trailing(end);
            array.set_trailing_comma(true);
        }
        None => {
            array.push(text);
            array.set_trailing(behind);
        }
    }
}

fn remove_value(array: &mut Array, text: &str) {
    let position = array.iter().position(|known| known.as_str().is_some_and(|known| is_equivalent(known, text)));
    let Some(position) = position else { return };
    let mut behind = text_behind(array);
    let removed = array.remove(position);
    // The prefix of a value has the comment of the previous one, which stays; the value's own comment follows it.
    let before = removed.decor().prefix().and_then(|text| text.as_str()).unwrap_or_default().to_owned();
    if let Some(next) = array.get_mut(position) {
        let own = next.decor().prefix().and_then(|text| text.as_str()).unwrap_or_default().to_owned();
        next.decor_mut().set_prefix(joined(&before, &own));
    } else if behind.contains('\n') {
        behind = joined(&before, &behind);
    }
    array.set_trailing(behind);
}

/// The first line of one text, then all but the first line of another; only the former, if the latter has one line.
fn joined(one: &str, other: &str) -> String {
    let (comment, rest) = (first_line(one).0, first_line(other).1);
    if rest.is_empty() { one.to_owned() } else { format!("{comment}{rest}") }
}

/// Splits a text after its first line.
fn first_line(text: &str) -> (&str, &str) {
    text.split_at(text.find('\n').unwrap_or(text.len()))
}

/// Takes the text after the last value out of a list.
fn text_behind(array: &mut Array) -> String {
    let trailing = array.trailing().as_str().unwrap_or_default().to_owned();
    let last = array.len().checked_sub(1).and_then(|last| array.get_mut(last));
    let Some(last) = last else { return trailing };
    let suffix = last.decor().suffix().and_then(|text| text.as_str()).unwrap_or_default().to_owned();
    last.decor_mut().set_suffix("");
    suffix + &trailing
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_limiter::secret_digest::Digest;

    const FILE: &str = "\
# Who is on which plan.
# Ask sales before you change it.

# since 2019
[clients.acme]
plan     = \"gold\"   # paid
api_keys = [
    \"sha256:aa\", # the old one
    \"sha256:bb\",
]

[clients.beta]
plan = \"silver\"
networks = \"203.0.113.0/24\"

# Partners.

[clients.\"gamma.example\"]
plan = 'silver'
networks = [ \"192.0.2.1/32\", \"10.0.0.0/8\" ]
# the end
";

    fn identifiers(api_keys: &[&str], networks: &[&str]) -> Identifiers {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Identifiers { api_keys: owned(api_keys), subjects: vec![], networks: owned(networks) }
    }

    /// The text after an edit.
    fn edited(text: &str, edit: impl FnOnce(&mut ClientsDocument)) -> String {
        let mut document = ClientsDocument::read(text).unwrap();
        edit(&mut document);
        document.to_string()
    }

    #[track_caller]
    fn assert_replaces(edit: impl FnOnce(&mut ClientsDocument), changes: &[(&str, &str)]) {
        let expected = changes.iter().fold(FILE.to_owned(), |text, (old, new)| {
            assert!(text.contains(old), "{old}");
            text.replacen(old, new, 1)
        });
        assert_eq!(edited(FILE, edit), expected);
    }

    #[test]
    fn an_edit_without_changes_keeps_the_text() {
        assert_eq!(edited(FILE, |_| {}), FILE);
        let known = identifiers(&["sha256:bb"], &[]);
        assert_eq!(edited(FILE, |document| document.add("acme", Some("gold"), &known)), FILE);
        assert_eq!(
            edited(FILE, |document| document.add("gamma.example", None, &identifiers(&[], &["192.0.2.1"]))),
            FILE
        );
    }

    #[test]
    fn a_new_client_is_added_at_the_end() {
        let add =
            |document: &mut ClientsDocument| document.add("delta", Some("gold"), &identifiers(&["sha256:dd"], &[]));
        let new = "[clients.delta]\nplan = \"gold\"\napi_keys = [\"sha256:dd\"]\n";
        assert_eq!(edited("", add), new);
        assert_eq!(edited("# Clients.\n", add), format!("# Clients.\n\n{new}"));
        assert_replaces(add, &[("# the end\n", &format!("\n{new}# the end\n"))]);
        let inline = edited("clients = { acme = { plan = \"gold\" } }\n", add);
        let expected = "{ acme = { plan = \"gold\" }, delta = { plan = \"gold\", api_keys = [\"sha256:dd\"] } }";
        assert_eq!(inline, format!("clients = {expected}\n"));
    }

    #[test]
    fn new_identifiers_are_added_to_the_lists_of_the_client() {
        let add = |document: &mut ClientsDocument| {
            document.add("acme", Some("silver"), &identifiers(&["sha256:cc"], &["::1/128"]))
        };
        let keys = "    \"sha256:bb\",\n    \"sha256:cc\",\n]\nnetworks = [\"::1/128\"]\n";
        assert_replaces(add, &[("\"gold\"", "\"silver\""), ("    \"sha256:bb\",\n]\n", keys)]);
        let commented = FILE.replace("bb\",", "bb\" # the new one");
        let add = |document: &mut ClientsDocument| document.add("acme", None, &identifiers(&["sha256:cc"], &[]));
        let both = "    \"sha256:bb\", # the new one\n    \"sha256:cc\",\n]\n";
        assert!(edited(&commented, add).contains(both), "{}", edited(&commented, add));
        let add = |document: &mut ClientsDocument| document.add("beta", None, &identifiers(&[], &["::1/128"]));
        assert_replaces(add, &[("\"203.0.113.0/24\"", "[\"203.0.113.0/24\", \"::1/128\"]")]);
    }

    #[test]
    fn removed_identifiers_are_gone() {
        let take =
            |document: &mut ClientsDocument| document.remove_identifiers("acme", &identifiers(&["sha256:bb"], &[]));
        assert_replaces(take, &[("    \"sha256:bb\",\n", "")]);
        let take =
            |document: &mut ClientsDocument| document.remove_identifiers("acme", &identifiers(&["sha256:aa"], &[]));
        assert_replaces(take, &[("    \"sha256:aa\", # the old one\n", "")]);
        let take = |document: &mut ClientsDocument| {
            document.remove_identifiers("beta", &identifiers(&[], &["203.0.113.0/24"]))
        };
        assert_replaces(take, &[("networks = \"203.0.113.0/24\"\n", "")]);
        let take = |document: &mut ClientsDocument| {
            document.remove_identifiers("gamma.example", &identifiers(&[], &["192.0.2.1/32"]))
        };
        assert_replaces(take, &[("\"192.0.2.1/32\", ", "")]);
    }

    #[test]
    fn limits_are_tables_of_the_client_and_grants_are_a_list() {
        let with = |limits: serde_json::Value| {
            let client = serde_json::json!({ "plan": "gold", "limits": limits }).to_string();
            Client::from_json("acme", &client).unwrap()
        };
        let limits = serde_json::json!({
            "r": { "windows": ["5000/day", { "limit": 9, "period": "hour" }], "until": "2030-01-31T18:00:00Z" },
        });
        let (without, with) = (with(serde_json::json!({})), with(limits));
        let table = "\n[clients.acme.limits.r]\nwindows = [\"5000/day\", { limit = 9, period = \"hour\" }]\n\
                     until = 2030-01-31T18:00:00Z\n";
        let file = FILE.replacen("    \"sha256:bb\",\n]\n", &format!("    \"sha256:bb\",\n]\n{table}"), 1);
        let bare = |client: &Client| Client { api_keys: vec![], ..client.clone() };
        let set = edited(FILE, |document| document.replace("acme", Some(&bare(&without)), Some(&with)));
        assert_eq!(set, file);
        assert_eq!(edited(&set, |document| document.replace("acme", Some(&with), Some(&without))), FILE);
        let inline = edited("clients = { acme = { plan = \"gold\", api_keys = [] } }\n", |document| {
            document.replace("acme", Some(&without), Some(&with));
        });
        assert!(inline.contains("limits = { r = { windows = [\"5000/day\""), "{inline}");
        let digest = Digest::of(b"key").to_string();
        let grant = serde_json::json!({
            "rule": "r", "window": "day", "tokens": 5, "until": "2030-01-31T00:00:00Z", "idempotency_key": digest,
        });
        let client = serde_json::json!({ "plan": "gold", "grants": [grant] }).to_string();
        let granted = Client::from_json("acme", &client).unwrap();
        assert_eq!(granted.to_json()["grants"], serde_json::json!([grant]));
        let set = edited(FILE, |document| document.replace("acme", Some(&bare(&without)), Some(&granted)));
        let line = format!(
            "    {{ idempotency_key = \"{digest}\", rule = \"r\", tokens = 5, until = \"2030-01-31T00:00:00Z\", window = \"day\" }},\n"
        );
        assert!(set.contains(&format!("grants = [\n{line}]\n")), "{set}");
        assert_eq!(edited(&set, |document| document.replace("acme", Some(&granted), Some(&without))), FILE);
    }

    #[test]
    fn a_client_is_removed_with_its_own_comment_only() {
        let between = |from: &str, to: &str| FILE[FILE.find(from).unwrap()..FILE.find(to).unwrap()].to_owned();
        assert_replaces(|document| document.remove("acme"), &[(&between("# since", "[clients.beta]"), "")]);
        assert_replaces(|document| document.remove("beta"), &[(&between("\n[clients.beta]", "\n# Partners"), "")]);
        let last = between("[clients.\"gamma", "# the end");
        assert_replaces(|document| document.remove("gamma.example"), &[(&last, "")]);
        let all = |document: &mut ClientsDocument| {
            ["acme", "beta", "gamma.example"].iter().for_each(|name| document.remove(name))
        };
        let rest = edited(FILE, all);
        let lines: Vec<&str> = rest.lines().filter(|line| !line.is_empty()).collect();
        assert_eq!(lines, ["# Who is on which plan.", "# Ask sales before you change it.", "# Partners.", "# the end"]);
    }
}
