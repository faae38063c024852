//! Reads the model that a request names, as its body passes.
//!
//! What servers read differently names no model: names of members are compared without regard to case, and a repeated member, or a
//! body that only some servers read as JSON, makes it ambiguous.

use std::sync::LazyLock;

use super::format::requested_model;
use super::json_pointer::{PointerTree, TextId};
use super::json_scanner::{Document, JsonScanner, is_blank, may_be_json};
use super::usage::RequestedModel;
use super::values::{Text, Values};

struct Plan {
    tree: PointerTree,
    model: TextId,
}

static PLAN: LazyLock<Plan> = LazyLock::new(|| {
    let mut tree = PointerTree::ignoring_case();
    let model = tree.add_text();
    tree.want_text(PointerTree::ROOT, &requested_model(), model);
    Plan { tree, model }
});

pub struct PassingModel {
    scanner: JsonScanner,
    values: Values,
    /// The beginning of the body without blanks, as long as [`may_be_json`] needs it.
    beginning: Vec<u8>,
    is_ambiguous: bool,
}

impl Default for PassingModel {
    fn default() -> PassingModel {
        let values = Values::new(&PLAN.tree);
        PassingModel { scanner: JsonScanner::of_requests(), values, beginning: Vec::new(), is_ambiguous: false }
    }
}

impl PassingModel {
    /// The next bytes of the body, without a content coding.
    pub fn push(&mut self, bytes: &[u8]) {
        let blanks = match self.beginning.is_empty() {
            true => bytes.iter().take_while(|byte| is_blank(**byte)).count(),
            false => 0,
        };
        let text = &bytes[blanks..];
        self.beginning.extend(text.iter().take(2_usize.saturating_sub(self.beginning.len())));
        self.scanner.push(&PLAN.tree, &mut self.values, text);
    }

    /// The body has ended, or nothing more of it decides.
    pub fn finish(mut self) -> PassingModel {
        let document = self.scanner.finish(&PLAN.tree, &mut self.values);
        let is_unclear = document == Document::Malformed || self.scanner.has_unchecked_levels();
        self.is_ambiguous = self.values.has_repeated_member() || is_unclear && may_be_json(&self.beginning);
        self.values.commit();
        self
    }

    pub fn model(&self) -> RequestedModel<'_> {
        match self.values.text(PLAN.model) {
            _ if self.is_ambiguous => RequestedModel::Ambiguous,
            text => text.into(),
        }
    }
}

impl<'a> From<Text<'a>> for RequestedModel<'a> {
    fn from(text: Text<'a>) -> RequestedModel<'a> {
        match text {
            Text::Found(name) if !name.is_empty() => RequestedModel::Named(name),
            Text::Found(_) | Text::Absent => RequestedModel::Unknown,
            Text::Unreadable => RequestedModel::Ambiguous,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_servers_read_differently_is_ambiguous() {
        use RequestedModel::{Ambiguous, Named, Unknown};
        let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let deep = format!("{{\"model\":\"a\",\"x\":{}{}}}", "[".repeat(300), "]".repeat(300));
        for (body, model) in [
            (&br#" {"messages":[{"model":"b"}],"model":"a"}"#[..], Named("a")),
            (br#"{"MODEL":"a","x":[NaN,Infinity,-Infinity]}"#, Named("a")),
            ("\u{feff}{\"model\":\"a\"}".as_bytes(), Named("a")),
            // The answer came before the end of the body.
            (br#"{"model":"a","x"#, Named("a")),
            (b"{}", Unknown),
            (b"", Unknown),
            (br#"{"model":null}"#, Unknown),
            (br#"[{"model":"a"}]"#, Unknown),
            (b"model=a", Unknown),
            (b"/model/a", Unknown),
            (b"--boundary\r\n", Unknown),
            (br#"{"model":"a","model":"b"}"#, Ambiguous),
            (br#"{"model":"a","Model":"b"}"#, Ambiguous),
            (br#"{"model":"a"}{"model":"b"}"#, Ambiguous),
            (br#"{"model":"a",}"#, Ambiguous),
            (br#"/**/{"model":"a"}"#, Ambiguous),
            (br#"{"model":"\ud800"}"#, Ambiguous),
            (&utf16(r#"{"model":"a"}"#), Ambiguous),
            (deep.as_bytes(), Ambiguous),
        ] {
            for size in [1, 2, body.len().max(1)] {
                let mut passing = PassingModel::default();
                body.chunks(size).for_each(|piece| passing.push(piece));
                let passed = passing.finish();
                assert_eq!(passed.model(), model, "{}", String::from_utf8_lossy(body));
            }
        }
    }
}
