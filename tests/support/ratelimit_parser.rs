//! Parses the RateLimit fields of responses (RFC 9651 lists of strings with integer parameters).

use super::client::HttpResponse;

/// One item of `RateLimit` or `RateLimit-Policy`: its name, and its integer parameters in order. Units are strings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    pub name: String,
    pub params: Vec<(String, u64)>,
}

impl Item {
    pub fn get(&self, key: &str) -> u64 {
        let value = self.params.iter().find(|(name, _)| name == key).map(|(_, value)| *value);
        value.unwrap_or_else(|| panic!("no `{key}` in {self:?}"))
    }
}

/// All items of a field, which may be given on several lines.
pub fn items(response: &HttpResponse, field: &str) -> Vec<Item> {
    let text = response.values(field).join(", ");
    text.split(", ").filter(|item| !item.is_empty()).map(item).collect()
}

fn item(text: &str) -> Item {
    let mut parts = text.split(';');
    let name = parts.next().and_then(|name| name.strip_prefix('"')?.strip_suffix('"'));
    let name = name.unwrap_or_else(|| panic!("no string: {text:?}"));
    let param = |param: &str| {
        let (key, value) = param.split_once('=').unwrap_or_else(|| panic!("no parameter: {text:?}"));
        let number = || value.parse().unwrap_or_else(|_| panic!("no integer: {text:?}"));
        (!value.starts_with('"')).then(|| (key.to_owned(), number()))
    };
    Item { name: name.to_owned(), params: parts.filter_map(param).collect() }
}

/// The remaining tokens of a layer after a response.
pub fn remaining(response: &HttpResponse, layer: &str) -> u64 {
    let items = items(response, "ratelimit");
    let item = items.iter().find(|item| item.name == layer);
    item.unwrap_or_else(|| panic!("no `{layer}` in {items:?}")).get("r")
}
