//! Grants: tokens added once to the current window of a client. A grant raises a limit until the window ends, and is kept with the
//! client as its limits are.

use serde_json::{Value, json};

use super::access::{parse_time, read_until};
use super::client_limits::time_text;
use super::clients::Client;
use super::diagnostics::quoted;
use super::rule::GatewayRule;
use super::settings::{Custom, Integer, Required, Shape, Text, Word};
use super::toml_reader::SpannedString;
use super::values::read_digest;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{ClientWindows, Plan};
use transom_limiter::secret_digest::Digest;
use transom_limiter::window_kind::WindowKind;

/// How long a grant is kept after the end of its window. The clocks of gateways and store may differ; decisions end it in time.
const KEPT_MS: u64 = 10_000;
const FIX: &str = "the gateway writes grants: remove it";

settings! {
    /// A grant of a client in the clients file.
    pub struct GrantSettings {
        /// Name of the rule.
        rule: Option<SpannedString> = Required(Text("name", "\"per-client\""), FIX);
        /// Period of the window.
        window: Option<SpannedString> = Required(Text("period", "\"hour\""), FIX);
        /// Tokens that the window has in addition.
        tokens: u32 = Required(Integer(1, 1..=u32::MAX as u64), FIX);
        /// When the window ends.
        until: Option<u64> =
            Required(Custom::or_empty(|| Shape::Text("RFC 3339 time"), |item, report| read_until(item, report).map(Some)), FIX);
        /// SHA-256 of the `Idempotency-Key` of the request that made it.
        idempotency_key: Option<Digest> =
            Required(Word { shape: "digest", example: "\"sha256:…\"", read: read_digest }, FIX);
    }
}

/// Tokens added once to a window of a client in one rule.
#[derive(Clone, PartialEq, Debug)]
pub struct ClientGrant {
    pub rule: String,
    /// The period of the window, as in [`Limit::period_text`].
    pub window: String,
    pub tokens: u32,
    /// The end of the window, Unix milliseconds.
    pub until_ms: u64,
    /// The digest of the key by which a repeated request is known.
    pub idempotency_key: Digest,
}

impl ClientGrant {
    /// A grant as the clients file has it; `None` if it is incomplete, which is reported.
    pub fn from_settings(settings: GrantSettings) -> Option<ClientGrant> {
        let GrantSettings { rule, window, tokens, until, idempotency_key } = settings;
        let (rule, window) = (rule?.text, window?.text);
        Some(ClientGrant { rule, window, tokens, until_ms: until?, idempotency_key: idempotency_key? })
    }

    /// Reads what [`ClientGrant::to_json`] returns.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn from_json(json: &Value) -> Result<ClientGrant, String> {
        let text = |member: &str| json[member].as_str().ok_or(format!("`{member}` of a grant is no text"));
        let tokens = json["tokens"].as_u64().and_then(|tokens| u32::try_from(tokens).ok()).filter(|tokens| *tokens > 0);
        Ok(ClientGrant {
            rule: text("rule")?.to_owned(),
            window: text("window")?.to_owned(),
            tokens: tokens.ok_or("`tokens` of a grant is no number from 1")?,
            until_ms: parse_time(text("until")?).map_err(|(message, _fix)| message)?,
            idempotency_key: Digest::parse(text("idempotency_key")?).ok_or("`idempotency_key` is no digest")?,
        })
    }

    /// The grants of a client as the store has it. Those that a newer version has written in another form have no effect.
    pub fn from_store(client: &Value) -> Vec<ClientGrant> {
        let grants = client.get("grants").and_then(Value::as_array).into_iter().flatten();
        grants.filter_map(|grant| ClientGrant::from_json(grant).ok()).collect()
    }

    pub fn to_json(&self) -> Value {
        let mut json = self.shown();
        json["idempotency_key"] = json!(self.idempotency_key.to_string());
        json
    }

    /// The grant without its key.
    pub fn shown(&self) -> Value {
        let until = time_text(self.until_ms);
        json!({ "rule": self.rule, "window": self.window, "tokens": self.tokens, "until": until })
    }

    /// From when on nothing depends on the grant.
    pub fn kept_until_ms(&self) -> u64 {
        self.until_ms.saturating_add(KEPT_MS)
    }

    pub fn is_kept(&self, now_ms: u64) -> bool {
        now_ms < self.kept_until_ms()
    }
}

/// The window among the layers of a rule, by its period or by its name in responses.
pub fn find_window<'a>(rule: &GatewayRule, layers: &'a [Limit], window: &str) -> Option<&'a Limit> {
    layers.iter().find(|layer| is_window(rule, layers, layer, window))
}

fn is_window(rule: &GatewayRule, layers: &[Limit], layer: &Limit, window: &str) -> bool {
    layer.period_text == window || rule.layer_name(layers, layer) == window
}

/// Checks whether tokens can be added to a window of a rule.
///
/// # Errors
///
/// Why they cannot.
pub fn check_window(rule: &GatewayRule, limit: &Limit, tokens: u32) -> Result<(), String> {
    let (kind, _) = rule.counter_kind(limit);
    let of_window = format!("the window of period {}", quoted(&limit.period_text));
    match () {
        () if rule.penalty_ms.is_some() => Err(String::from("a rule with `penalty` cannot have grants")),
        () if kind == WindowKind::Sliding => Err(format!("{of_window} slides, so there is no end of a grant")),
        () if rule.has_dependent_windows(limit) => Err(format!(
            "tokens of {of_window} can be used in other windows, by `capacity`, `reserve`, `on_limit = \"delay\"` or a cost that \
             the response states: set limits of the client instead"
        )),
        () if limit.tokens.checked_add(tokens).is_none() => {
            Err(format!("{of_window} would have more than {} tokens", u32::MAX))
        }
        () => Ok(()),
    }
}

impl Client {
    /// Its grants that matter at a time.
    pub fn kept_grants(&self, now_ms: u64) -> impl Iterator<Item = &ClientGrant> {
        self.grants.iter().filter(move |grant| grant.is_kept(now_ms))
    }

    /// The tokens granted for each window at a time, as a part of [`Client::limits_text`].
    pub fn grants_text(&self, now_ms: u64) -> String {
        let grant =
            |grant: &ClientGrant| format!(" {}/{}+{}@{}", grant.rule, grant.window, grant.tokens, grant.until_ms);
        self.kept_grants(now_ms).map(grant).collect()
    }

    /// The limits in a rule with what is granted in addition, one after the other: `base` are those without grants. What cannot be
    /// granted is described in `problems`.
    pub fn with_grants(
        &self,
        now_ms: u64,
        rule: &GatewayRule,
        base: Plan,
        problems: &mut Vec<String>,
    ) -> impl Iterator<Item = ClientWindows> + use<> {
        let of_rule = || self.kept_grants(now_ms).filter(|grant| grant.rule == rule.name);
        let mut ends: Vec<u64> = of_rule().map(|grant| grant.until_ms).collect();
        ends.sort_unstable();
        ends.dedup();
        let mut all = Vec::new();
        for until_ms in ends {
            let (mut plan, mut from_ms) = (base.clone(), 0);
            for grant in of_rule().filter(|grant| grant.until_ms >= until_ms) {
                let mut limits = base.layers.iter().zip(&mut plan.layers);
                let granted = match limits.find(|(limit, _)| is_window(rule, &base.layers, limit, &grant.window)) {
                    Some((_, limit)) => {
                        from_ms = from_ms.max(grant.until_ms.saturating_sub(limit.windows.length_ms(grant.until_ms)));
                        let checked = check_window(rule, limit, grant.tokens);
                        checked.map(|()| limit.tokens += grant.tokens)
                    }
                    None => Err(format!("there is no window {}", quoted(&grant.window))),
                };
                problems.extend(
                    granted
                        .err()
                        .map(|reason| format!("client {}, a grant in rule {}: {reason}", self.name, rule.name)),
                );
            }
            all.push(ClientWindows { plan, during_ms: Some(from_ms..until_ms) });
        }
        all.push(ClientWindows { plan: base, during_ms: None });
        // Only the first has a name: the others follow.
        all.iter_mut().skip(1).for_each(|limits| limits.plan.name.clear());
        all.into_iter()
    }
}
