//! Finds the key of a rule in a request, with the cost of the request and the windows that apply to it.
//!
//! [`RuleKey`] is compiled once for each route that uses the rule. Its parts are read before any header field is added
//! or removed and are hashed without a copy. A part that occurs twice is an error: the upstream might use the other
//! value.

use std::sync::Arc;

use http::header::HeaderName;
use serde_json::{Value, json};

use super::PartPosition;
use super::client_plans::{ClientCheck, ClientLookup};
use super::key_source::{KeyError, KeySource, RequestAttributes};
use super::overrides::{self, KnownPlans, Overrides, RuleTreatment};
use super::store_key_text::{DIGEST, KeyDigester, KeyTextFormat};
use transom_config::body_condition::BodyCondition;
use transom_config::key_kind::{CLIENT, GLOBAL};
use transom_config::route::Route;
use transom_config::rule::GatewayRule;
use transom_config::usage_cost::{Reserve, UsageCost};
use transom_http::error::RequestError;
use transom_jwt::token::TokenError;
use transom_limiter::handles::{IdVec, VariantId};
use transom_limiter::identity;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::rule_set::{CompiledRule, KeyedRequest, NotCounted};
use transom_usage::decimal::Decimal;
use transom_usage::learnt_cost::LearntCosts;
use transom_usage::request_body::BodyValues;
use transom_usage::usage::{RequestedModel, Usage};
use transom_usage::values::Text;

/// Finds the key of one rule in the requests of one route.
#[derive(Debug)]
pub struct RuleKey {
    /// The name of the rule.
    rule: String,
    key: KeyRecipe,
    on_missing: MissingPart,
    /// Set if keys that name no client are not counted.
    client_check: Option<ClientCheck>,
    cost: RequestCost,
    overrides: Option<Arc<Overrides>>,
    /// The requests that the rule counts; `None`: all.
    condition: Option<BodyCondition>,
    /// Whether the client is a part of the key.
    is_by_client: bool,
}

/// What to do with a request that lacks a part of the key.
#[derive(Debug)]
enum MissingPart {
    Refuse,
    Skip,
    Fallback(Box<KeyRecipe>),
}

/// What a request costs under one rule, as far as known before the response.
#[derive(Debug)]
enum RequestCost {
    Fixed(u32),
    Header {
        name: HeaderName,
        default: u32,
        max: u32,
    },
    /// Charged in advance, if the body of the response states the cost: for each variant at most its smallest capacity.
    Reserve(IdVec<VariantId, u32>),
    OfBody(Box<BodyReserve>),
}

/// A reserve that depends on the body of the request.
#[derive(Debug)]
struct BodyReserve {
    /// For each variant the greatest reserve.
    most: IdVec<VariantId, u32>,
    usage: UsageCost,
    learnt: Option<Arc<LearntCosts>>,
}

impl BodyReserve {
    /// At least 1: with a reserve of 0, a request would always be admitted. `from` receives what it is taken from: settings of
    /// the reserve, and `max` if it is lowered to that or to the smallest capacity.
    fn of_request(&self, body: Option<&BodyValues>, variant: VariantId, mut from: impl FnMut(&'static str)) -> u32 {
        let model = body.map_or(RequestedModel::Unknown, BodyValues::model);
        let reserve = match &self.usage.reserve {
            Reserve::OfRequest { output, times, bytes_per_input, default } => {
                let stated = body.and_then(|body| output.iter().filter_map(|pointer| body.number(pointer)).max());
                from(if stated.is_some() { "json" } else { "default" });
                let bytes = body.map_or(0, BodyValues::bytes);
                let input = bytes_per_input.map_or(0, |per_token| bytes.div_ceil(per_token as usize));
                if input > 0 {
                    from("bytes");
                }
                let answer = stated.unwrap_or(u64::from(*default).into());
                let answers = times.iter().filter_map(|pointer| Some(body?.answers(pointer)));
                let answers = answers.fold(Decimal::ONE, Decimal::saturating_mul);
                if answers > Decimal::ONE {
                    from("times");
                }
                let usage = Usage::of((input as u64).into(), answer.saturating_mul(answers));
                self.usage.weights.cost(&usage, model)
            }
            Reserve::Learnt { default } | Reserve::Fixed(default) => {
                let learnt = self.learnt.as_ref().and_then(|learnt| learnt.reserve(model.name(), *default));
                from(if learnt.is_some() { "learnt" } else { "default" });
                learnt.unwrap_or(*default)
            }
        };
        let most = self.most(variant);
        if reserve > most {
            from("max");
        }
        reserve.clamp(1, most)
    }

    fn most(&self, variant: VariantId) -> u32 {
        *self.most.get(variant).unwrap_or(&self.most[VariantId::DEFAULT])
    }
}

/// The parts of a key, and the hash of everything that is the same for all requests.
#[derive(Debug)]
struct KeyRecipe {
    hashers: KeyHashers,
    parts: IdVec<PartPosition, PartSource>,
    /// The text of the key in the shared store, and the names of its parts in errors.
    text_format: Box<KeyTextFormat>,
}

/// What a part of a key is found in.
#[derive(Debug)]
enum PartSource {
    /// The client of the request.
    Client,
    /// The request itself.
    Request(KeySource),
}

impl PartSource {
    fn new(part: &KeyPart, params: &[&str]) -> PartSource {
        if CLIENT.has(part) { PartSource::Client } else { PartSource::Request(KeySource::new(part, params)) }
    }

    /// As [`KeySource::feed_key`].
    #[inline]
    fn feed_key(
        &self,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
        take: &mut impl FnMut(u8, &[u8]),
    ) -> Result<(), KeyError> {
        match self {
            PartSource::Client => clients.feed_client(request, take),
            PartSource::Request(source) => source.feed_key(request, take),
        }
    }
}

/// What a rule makes of a request: its key, or why the rule does not count it, or an error.
pub type FoundKey = Result<Result<KeyedRequest, NotCounted>, KeyFailure>;

/// Why the key, plan or cost of a request under a rule is unknown.
#[derive(PartialEq, Eq, Debug)]
pub struct KeyFailure {
    pub error: RequestError,
    /// The key to charge nevertheless, in the default windows: set if key and cost are known and only the plan is not.
    pub keyed_request: Option<KeyedRequest>,
}

impl From<RequestError> for KeyFailure {
    fn from(error: RequestError) -> KeyFailure {
        KeyFailure { error, keyed_request: None }
    }
}

/// Digits of a digest in a label.
const SHORT_DIGEST_DIGITS: usize = 8;

/// How a rule finds the key of a request, for explanations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyDescription {
    /// Whether the address of the client is exempt.
    pub is_network_exempt: bool,
    /// Whether the rule counts other requests only, by the condition on their bodies.
    pub is_left_out: bool,
    /// Why another key applies, or none.
    pub missing: Option<MissingKeyPart>,
    /// Whether the key is the one of `on_missing_key`.
    pub is_fallback: bool,
    /// The names and values of the parts of the key. A secret value is a digest; a value that cannot be read is `None`.
    pub parts: Vec<(String, Option<String>)>,
    /// The name of the client that a part of the key names.
    pub client: Option<String>,
}

impl KeyDescription {
    /// The key on one line: the name of the client that it names, or its values, with digests shortened.
    pub fn label(&self) -> String {
        if let Some(client) = &self.client {
            return client.clone();
        }
        if self.parts.iter().all(|(name, _value)| name == GLOBAL.part.name) {
            return String::from("all requests");
        }
        let values = self.parts.iter().filter_map(|(_name, value)| value.as_deref());
        values.map(label_of_part).collect::<Vec<_>>().join(" ")
    }

    /// The parts as a list of `part` and `value`.
    pub fn parts_json(&self) -> Value {
        self.parts.iter().map(|(part, value)| json!({ "part": part, "value": value })).collect()
    }
}

/// A value without control characters, and a digest shortened.
fn label_of_part(value: &str) -> String {
    match value.strip_prefix(DIGEST) {
        Some(digest) => format!("{DIGEST}{}", digest.get(..SHORT_DIGEST_DIGITS).unwrap_or(digest)),
        None if value.is_empty() => String::from("\"\""),
        None => value.chars().map(|sign| if sign.is_control() { char::REPLACEMENT_CHARACTER } else { sign }).collect(),
    }
}

/// A part of the key that counts as missing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingKeyPart {
    pub name: String,
    /// Whether the request has a value, which names no client.
    pub is_unknown: bool,
}

/// Why a key could not be computed.
struct PartError {
    position: PartPosition,
    error: KeyError,
}

impl RuleKey {
    pub fn new(rule: &CompiledRule, route: &Route, seed: Seed) -> RuleKey {
        let recipe = |is_fallback: bool, parts: &[KeyPart]| {
            let params = route.path.param_names();
            KeyRecipe {
                hashers: KeyHashers::new(rule, seed, is_fallback.then_some(parts)),
                parts: parts.iter().map(|part| PartSource::new(part, &params)).collect(),
                text_format: Box::new(KeyTextFormat::new(&rule.rule, parts, is_fallback)),
            }
        };
        RuleKey {
            rule: rule.rule.name.clone(),
            key: recipe(false, &rule.rule.key),
            on_missing: match &rule.rule.on_missing {
                OnMissing::Never | OnMissing::Refuse => MissingPart::Refuse,
                OnMissing::Skip => MissingPart::Skip,
                OnMissing::Fallback(parts) => MissingPart::Fallback(Box::new(recipe(true, parts))),
            },
            client_check: None,
            cost: RequestCost::new(&rule.rule, route),
            overrides: None,
            condition: None,
            is_by_client: rule.rule.key.iter().any(|part| CLIENT.has(part)),
        }
    }

    /// Adds the overrides of the rule, see [`RuleKey::compile_overrides`].
    pub fn with_overrides(self, overrides: Option<Arc<Overrides>>) -> RuleKey {
        RuleKey { overrides, ..self }
    }

    /// Reserves by the body of requests. `learnt`: what requests have cost.
    pub fn with_reserve(self, rule: &GatewayRule, learnt: Option<&Arc<LearntCosts>>) -> RuleKey {
        let Some(usage) = rule.usage.as_ref().filter(|usage| usage.reserve.reads_bodies()) else { return self };
        let most = rule.variants().map(|layers| capacity(layers).min(usage.reserve_max).max(1)).collect();
        let reserve = BodyReserve { most, usage: usage.clone(), learnt: learnt.cloned() };
        RuleKey { cost: RequestCost::OfBody(Box::new(reserve)), ..self }
    }

    /// Counts only requests for which a condition holds.
    pub fn with_condition(self, condition: Option<BodyCondition>) -> RuleKey {
        RuleKey { condition, ..self }
    }

    /// Checks that keys name clients.
    pub fn with_client_check(self, client_check: Option<ClientCheck>) -> RuleKey {
        RuleKey { client_check, ..self }
    }

    /// Compiles the exemptions and overrides of a rule; the result serves all routes that use the rule.
    pub fn compile_overrides(rule: &CompiledRule, plans: Option<KnownPlans<'_>>, seed: Seed) -> Option<Overrides> {
        Overrides::new(rule, &key_hasher(seed, rule.hash_prefix, None), plans)
    }

    /// The key, variant and cost of a request under the rule, or why the rule does not count the request.
    pub fn keyed_request(&self, request: &RequestAttributes<'_>, clients: &ClientLookup<'_>) -> FoundKey {
        if self.overrides.as_ref().is_some_and(|overrides| overrides.exempts(request.address)) {
            return Ok(Err(NotCounted::Exempt));
        }
        if self.condition.as_ref().is_some_and(|condition| !holds(condition, request.body)) {
            return Ok(Err(NotCounted::Skipped));
        }
        let Some((key, offset)) = self.key_hash(request, clients)? else { return Ok(Err(NotCounted::Skipped)) };
        let keyed_request = |variant, cost| KeyedRequest { key, offset, variant, cost };
        let treatment = self.overrides.as_ref().map(|overrides| self.treatment(overrides, key, request, clients));
        let variant = match treatment {
            None => VariantId::DEFAULT,
            Some(Ok(RuleTreatment::Exempt)) => return Ok(Err(NotCounted::Exempt)),
            Some(Ok(RuleTreatment::Variant(variant))) => variant,
            Some(Err(error)) => {
                let cost = self.cost.of_request(request, &self.rule, VariantId::DEFAULT).ok();
                return Err(KeyFailure {
                    error,
                    keyed_request: cost.map(|cost| keyed_request(VariantId::DEFAULT, cost)),
                });
            }
        };
        Ok(Ok(keyed_request(variant, self.cost.of_request(request, &self.rule, variant)?)))
    }

    /// Of a request whose body is not known, with what was reserved for it by its body.
    pub fn with_reserved(&self, keyed_request: KeyedRequest, reserved: u32) -> KeyedRequest {
        let RequestCost::OfBody(reserve) = &self.cost else { return keyed_request };
        KeyedRequest { cost: reserved.clamp(1, reserve.most(keyed_request.variant)), ..keyed_request }
    }

    /// What the cost of a request in a variant is taken from, if it is a reserve: settings, or `reserve` for its number.
    pub fn reserve_sources(&self, request: &RequestAttributes<'_>, variant: VariantId) -> Option<Vec<&'static str>> {
        match &self.cost {
            RequestCost::Fixed(_) | RequestCost::Header { .. } => None,
            RequestCost::Reserve(_) => Some(vec!["reserve"]),
            RequestCost::OfBody(reserve) => {
                let mut sources = Vec::new();
                reserve.of_request(request.body, variant, |source| sources.push(source));
                Some(sources)
            }
        }
    }

    /// How the rule treats a key. An override of the key takes precedence over the plan of the client.
    fn treatment(
        &self,
        overrides: &Overrides,
        key: KeyHash,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
    ) -> Result<RuleTreatment, RequestError> {
        if let Some(treatment) = self.key_treatment(overrides, key, request, clients) {
            return Ok(treatment);
        }
        if !overrides.has_plans() {
            return Ok(RuleTreatment::Variant(overrides.variant_of(None)));
        }
        let plan = match self.is_by_client {
            false => clients.plan_of(request),
            // A rule by client knows no other client than the one that it counts.
            true => clients.plan_of_identity(request),
        };
        let plan = plan.map_err(|(part, error)| self.request_error(clients, part, &error))?;
        Ok(RuleTreatment::Variant(overrides.variant_of(plan)))
    }

    /// The exemption or override of a single key.
    fn key_treatment(
        &self,
        overrides: &Overrides,
        key: KeyHash,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
    ) -> Option<RuleTreatment> {
        if !overrides.has_keys() {
            return None;
        }
        let hasher = overrides.digest_hasher.as_ref();
        let key = hasher.map_or(Some(key), |hasher| self.key.digest_hash(hasher, request, clients));
        key.and_then(|key| overrides.treatment_of(key))
    }

    /// The hash of the key, and the offset of its windows.
    fn key_hash(
        &self,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
    ) -> Result<Option<(KeyHash, u64)>, RequestError> {
        let failed = match self.key.hash(request, clients) {
            Ok(key) => match self.check_client(request, clients) {
                Ok(()) => return Ok(Some(key)),
                Err(failed) => failed,
            },
            Err(failed) => failed,
        };
        match (self.is_missing(&failed.error), &self.on_missing) {
            (true, MissingPart::Skip) => Ok(None),
            (true, MissingPart::Fallback(key)) => {
                let found = key.hash(request, clients).map(Some);
                found.map_err(|failed| self.request_error(clients, &key.part_name(&failed), &failed.error))
            }
            (is_missing, _) => {
                let error = if is_missing { KeyError::Missing } else { failed.error };
                let failed = PartError { error, ..failed };
                Err(self.request_error(clients, &self.key.failed_part(&failed, request, clients), &failed.error))
            }
        }
    }

    /// Whether `on_missing_key` decides about a key with this error.
    fn is_missing(&self, error: &KeyError) -> bool {
        match error {
            KeyError::Missing => true,
            KeyError::Unknown => self.client_check.as_ref().is_some_and(|check| check.is_missing),
            _ => false,
        }
    }

    /// Fails for a complete key that names no client, if the rule does not count such keys. Keys with an exemption or
    /// override are known as well.
    #[inline(always)]
    fn check_client(&self, request: &RequestAttributes<'_>, clients: &ClientLookup<'_>) -> Result<(), PartError> {
        self.client_check.as_ref().map_or(Ok(()), |check| self.check_parts(check, request, clients))
    }

    fn check_parts(
        &self,
        check: &ClientCheck,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
    ) -> Result<(), PartError> {
        let unknown = check.unknown_part(request, clients);
        let unknown = unknown.map_err(|(position, error)| PartError { position, error })?;
        let Some(position) = unknown else { return Ok(()) };
        if let Some(overrides) = self.overrides.as_ref().filter(|overrides| overrides.has_keys())
            && self.key_treatment(overrides, self.key.hash(request, clients)?.0, request, clients).is_some()
        {
            return Ok(());
        }
        Err(PartError { position, error: KeyError::Unknown })
    }

    /// Appends the text of the key that [`RuleKey::keyed_request`] finds, `RULE|PART|PART`, by which the shared store knows
    /// it. Returns whether there is a key; appends nothing if there is none.
    pub fn write_store_key(
        &self,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
        digester: &KeyDigester,
        out: &mut String,
    ) -> bool {
        let start = out.len();
        let written = self.key.write_text(request, clients, digester, out);
        let written = written.and_then(|()| self.check_client(request, clients).map_err(|failed| failed.error));
        if written.is_err() {
            out.truncate(start);
        }
        match (written, &self.on_missing) {
            (Ok(()), _) => true,
            (Err(error), MissingPart::Fallback(key)) if self.is_missing(&error) => {
                key.write_text(request, clients, digester, out).is_ok()
            }
            (Err(_), _) => false,
        }
    }

    /// Describes the key that [`RuleKey::keyed_request`] finds.
    pub fn describe(
        &self,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
        digester: &KeyDigester,
    ) -> KeyDescription {
        let found = self.key.hash(request, clients);
        let failed = found.and_then(|_key| self.check_client(request, clients)).err();
        let missing = failed.filter(|failed| self.is_missing(&failed.error)).map(|failed| MissingKeyPart {
            name: self.key.failed_part(&failed, request, clients),
            is_unknown: matches!(failed.error, KeyError::Unknown),
        });
        let fallback = match (&missing, &self.on_missing) {
            (Some(_), MissingPart::Fallback(key)) => Some(&**key),
            _ => None,
        };
        let (parts, client) = fallback.unwrap_or(&self.key).describe(request, clients, digester);
        KeyDescription {
            is_network_exempt: self.overrides.as_ref().is_some_and(|overrides| overrides.exempts(request.address)),
            is_left_out: self.condition.as_ref().is_some_and(|condition| !holds(condition, request.body)),
            missing,
            is_fallback: fallback.is_some(),
            parts,
            client,
        }
    }

    #[cold]
    fn request_error(&self, clients: &ClientLookup<'_>, part: &str, error: &KeyError) -> RequestError {
        let of_clients = match (error, clients.plans) {
            (KeyError::Missing, Some(plans)) => plans.missing_credentials(&self.rule, part),
            (KeyError::Unknown, Some(plans)) => Some(plans.unknown_key(&self.rule, part)),
            _ => None,
        };
        if let Some(error) = of_clients {
            return error;
        }
        let (rule, part) = (self.rule.clone(), part.to_owned());
        match *error {
            // Without a clients file, no key is unknown.
            KeyError::Missing | KeyError::Unknown => RequestError::KeyMissing { rule, part },
            KeyError::Ambiguous => RequestError::KeyAmbiguous { rule, part },
            KeyError::RepeatedAuthorization => RequestError::KeyAmbiguous { rule, part: String::from("authorization") },
            KeyError::InvalidEscape => RequestError::Query("the query contains a `%` without two hex digits"),
            KeyError::NotPrintable | KeyError::MalformedCredentials | KeyError::UnreadableMember => {
                RequestError::KeyMalformed { rule, part }
            }
            KeyError::Token(TokenError::KeysUnavailable) => RequestError::KeySetUnavailable,
            KeyError::Token(error) => RequestError::Token(error.reason()),
        }
    }
}

/// Whether a body meets a condition. One that is not a JSON object does: servers may read more than JSON, and a list of requests
/// has no such member. So does an array or an object in place of the value, because some servers read what is in it.
fn holds(condition: &BodyCondition, body: Option<&BodyValues>) -> bool {
    let (Some(pointer), Some(body)) = (&condition.json, body) else { return true };
    match body.text(pointer) {
        _ if !body.is_object() => true,
        Text::Absent => body.is_container(pointer),
        Text::Unreadable => true,
        Text::Found(text) => condition.values.iter().any(|pattern| pattern.matches(text)),
    }
}

/// The hashes of everything in a key that is the same for all requests.
#[derive(Debug)]
pub struct KeyHashers {
    /// Finds the counters.
    pub counter: KeyHasher,
    /// Finds the offset of windows that start at random, in a seed common to all gateways. `None` for other windows.
    pub window_offset: Option<KeyHasher>,
}

impl KeyHashers {
    pub fn new(rule: &CompiledRule, seed: Seed, fallback: Option<&[KeyPart]>) -> KeyHashers {
        let is_random = rule.rule.variants().flatten().any(|limit| limit.windows.have_offsets());
        let name_hash = || Seed::SHARED.hash(&[&rule.rule.name]);
        KeyHashers {
            counter: key_hasher(seed, rule.hash_prefix, fallback),
            window_offset: is_random.then(|| key_hasher(Seed::SHARED, name_hash(), fallback)),
        }
    }
}

fn key_hasher(seed: Seed, rule: u64, fallback: Option<&[KeyPart]>) -> KeyHasher {
    // The parts of a fallback are hashed too, so that its keys never equal keys of the rule or of another fallback.
    let fallback_parts = fallback.map(identity::key_text).unwrap_or_default();
    let mut hasher = KeyHasher::new(seed, rule);
    hasher.add_part(u8::from(fallback.is_some()), fallback_parts.as_bytes());
    hasher
}

impl KeyRecipe {
    /// The name of the part that an error is about.
    fn part_name(&self, failed: &PartError) -> String {
        self.text_format.part_name(failed.position)
    }

    /// As [`KeyRecipe::part_name`]; of the client, what has named it, or should have.
    #[cold]
    fn failed_part(&self, failed: &PartError, request: &RequestAttributes<'_>, clients: &ClientLookup<'_>) -> String {
        match self.parts[failed.position] {
            PartSource::Client => clients.failed_part(request).map(str::to_owned),
            PartSource::Request(_) => None,
        }
        .unwrap_or_else(|| self.part_name(failed))
    }

    /// Appends the text of the key, or nothing. A wrong part takes precedence over a missing one, as in
    /// [`KeyRecipe::hash_from`].
    fn write_text(
        &self,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
        digester: &KeyDigester,
        out: &mut String,
    ) -> Result<(), KeyError> {
        let start = out.len();
        self.text_format.write_prefix(out);
        let mut result = Ok(());
        for (position, part) in self.parts.enumerate() {
            let mut write = |kind, bytes: &[u8]| self.text_format.write_part(position, kind, bytes, digester, out);
            match part.feed_key(request, clients, &mut write) {
                Ok(()) => {}
                Err(KeyError::Missing) => result = result.and(Err(KeyError::Missing)),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        match result {
            Ok(()) => self.text_format.write_suffix(out),
            Err(_) => out.truncate(start),
        }
        result
    }

    /// The names and readable values of the parts, and the client that they name.
    fn describe(
        &self,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
        digester: &KeyDigester,
    ) -> (Vec<(String, Option<String>)>, Option<String>) {
        let mut client = None;
        let describe = |(position, part): (PartPosition, &PartSource)| {
            let mut value = None;
            let mut take = |kind, bytes: &[u8]| {
                client = client.take().or_else(|| self.text_format.client_of_part(position, bytes, clients.plans));
                value = Some(self.text_format.readable_part(position, kind, bytes, digester));
            };
            let is_usable = part.feed_key(request, clients, &mut take).is_ok();
            (self.text_format.part_name(position), value.filter(|_| is_usable))
        };
        (self.parts.enumerate().map(describe).collect(), client)
    }

    /// The hash of the key, and the offset of its windows if they start at random.
    fn hash(&self, request: &RequestAttributes<'_>, clients: &ClientLookup<'_>) -> Result<(KeyHash, u64), PartError> {
        let offset = match &self.hashers.window_offset {
            Some(hasher) => self.hash_from(hasher, request, clients)?.bucket_hash,
            None => 0,
        };
        Ok((self.hash_from(&self.hashers.counter, request, clients)?, offset))
    }

    fn hash_from(
        &self,
        hasher: &KeyHasher,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
    ) -> Result<KeyHash, PartError> {
        let mut hasher = hasher.clone();
        let mut missing = None;
        for (position, part) in self.parts.enumerate() {
            match part.feed_key(request, clients, &mut |kind, bytes| hasher.add_part(kind, bytes)) {
                Ok(()) => {}
                // A missing part does not hide a wrong one: an invalid token is refused whatever else the key consists
                // of.
                Err(KeyError::Missing) => missing = missing.or(Some(position)),
                Err(error) => return Err(PartError { position, error }),
            }
        }
        match missing {
            Some(position) => Err(PartError { position, error: KeyError::Missing }),
            None => Ok(hasher.finish()),
        }
    }

    /// The hash of the digests of the parts, by which overrides of secret keys are found; `None` if a part is missing.
    fn digest_hash(
        &self,
        hasher: &KeyHasher,
        request: &RequestAttributes<'_>,
        clients: &ClientLookup<'_>,
    ) -> Option<KeyHash> {
        let mut hasher = hasher.clone();
        for part in &self.parts {
            let mut add = |kind, bytes: &[u8]| overrides::feed_part(&mut hasher, kind, bytes, true);
            match part {
                PartSource::Client => clients.feed_client(request, &mut add),
                PartSource::Request(source) => source.feed(request, &mut add),
            }
            .ok()?;
        }
        Some(hasher.finish())
    }
}

/// What a request can cost at most.
fn capacity(layers: &[Limit]) -> u32 {
    layers.iter().map(Limit::capacity).min().unwrap_or(u32::MAX)
}

impl RequestCost {
    fn new(rule: &Rule, route: &Route) -> RequestCost {
        match (&rule.cost, route.cost) {
            (Cost::Response { source: None, reserve, .. }, _) => {
                let lowered = rule.variants().map(|layers| capacity(layers).min(*reserve));
                RequestCost::Reserve(lowered.collect())
            }
            (Cost::Request { source: field, default, max }, _) => match HeaderName::from_bytes(field.as_bytes()) {
                Ok(name) => RequestCost::Header { name, default: *default, max: *max },
                // The configuration check rejects invalid names.
                Err(_) => RequestCost::Fixed(*default),
            },
            (Cost::Fixed(_), Some(cost)) => RequestCost::Fixed(cost),
            (Cost::Fixed(cost) | Cost::Response { reserve: cost, .. }, _) => RequestCost::Fixed(*cost),
        }
    }

    /// The cost of a request, from its header field if the rule names one.
    fn of_request(
        &self,
        RequestAttributes { headers, body, .. }: &RequestAttributes<'_>,
        rule: &str,
        variant: VariantId,
    ) -> Result<u32, RequestError> {
        let (name, default, max) = match self {
            RequestCost::Fixed(cost) => return Ok(*cost),
            RequestCost::Reserve(reserves) => {
                return Ok(*reserves.get(variant).unwrap_or(&reserves[VariantId::DEFAULT]));
            }
            RequestCost::OfBody(reserve) => return Ok(reserve.of_request(*body, variant, |_source| ())),
            RequestCost::Header { name, default, max } => (name, *default, *max),
        };
        let mut values = headers.get_all(name).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return if headers.contains_key(name) { Err(cost_error(rule, name, max)) } else { Ok(default) };
        };
        let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let cost = text.and_then(|text| text.parse().ok()).filter(|cost| *cost <= max);
        cost.ok_or_else(|| cost_error(rule, name, max))
    }
}

fn cost_error(rule: &str, field: &HeaderName, max: u32) -> RequestError {
    RequestError::Cost { rule: rule.to_owned(), field: field.to_string(), max }
}

#[cfg(test)]
pub mod tests {
    use http::HeaderMap;

    use super::*;
    use http::{Method, Uri};

    use crate::client_plans::ClientPlans;
    use crate::key_source::tests::CONNECTION;
    use transom_config::clients::{Client, Clients, ClientsSource};
    use transom_config::key::OnUnknownKey;
    use transom_config::key_kind::{HEADER, HOST, IP, METHOD, PARAM, PATH, ROUTE};
    use transom_config::path::{PathPattern, Segment};
    use transom_jwt::cache::TokenCache;
    use transom_jwt::token::TokenVerifier;
    use transom_limiter::decision::Decision;
    use transom_limiter::decision_context::DecisionContext;
    use transom_limiter::decision_time::DecisionTime;
    use transom_limiter::handles::{Handle, RuleId};
    use transom_limiter::limit::Limit;
    use transom_limiter::rule::Rule;
    use transom_limiter::rule_set::RuleSet;
    use transom_limiter::secret_digest::Digest;
    use transom_limiter::table::Table;

    pub const SEED: Seed = Seed(1, 2);

    fn rule_key(key: &[KeyPart], on_missing: OnMissing) -> RuleKey {
        RuleKey::new(&RuleSet::new(&[rule(key, on_missing)], SEED, None).rules[RuleId::at(0)], &route(), SEED)
    }

    pub fn rule(key: &[KeyPart], on_missing: OnMissing) -> Rule {
        Rule::new("r", key.to_vec(), on_missing, vec![Limit::parse("1/minute").unwrap()])
    }

    pub fn route() -> Route {
        let segments = vec![Segment::Literal("u".to_owned()), Segment::Param("id".to_owned())];
        Route {
            name: "route".to_owned(),
            hosts: vec![],
            methods: vec![],
            headers: vec![],
            query: vec![],
            networks: vec![],
            path: PathPattern { text: "/u/{id}".to_owned(), segments },
            secure: None,
            actions: None,
            upstream: None,
            rules: vec![RuleId::at(0)],
            cost: None,
            websocket: true,
            allow: vec![],
        }
    }

    /// The key of a request without a clients file.
    pub fn resolve(rule: &RuleKey, address: &str, headers: &HeaderMap) -> Result<Option<KeyedRequest>, RequestError> {
        let tokens = TokenCache::new(TokenVerifier::default(), Vec::new(), KeyHasher::new(SEED, 0));
        with_request(address, headers, &tokens, |request| rule.keyed_request(request, &ClientLookup::new(None)))
            .map(Result::ok)
            .map_err(|failure| failure.error)
    }

    /// Calls a function with the attributes of an example request.
    pub fn with_request<T>(
        address: &str,
        headers: &HeaderMap,
        tokens: &TokenCache,
        call: impl FnOnce(&RequestAttributes<'_>) -> T,
    ) -> T {
        let id = 3..5;
        call(&RequestAttributes {
            address: address.parse().unwrap(),
            connection: CONNECTION,
            host: "example.com",
            method: &Method::GET,
            path: "/u/77",
            params: std::slice::from_ref(&id),
            uri: &Uri::from_static("/u/77?token=a%20b"),
            headers,
            route: "route",
            tokens,
            wall_ms: 0,
            body: None,
        })
    }

    #[test]
    fn addresses_are_grouped_by_prefix_and_mapped_ones_are_ipv4() {
        let none = HeaderMap::new();
        let ip = rule_key(&[IP.of_prefixes(32, 64)], OnMissing::Never);
        let key = |address| resolve(&ip, address, &none).unwrap();
        assert_eq!(key("2001:db8::1"), key("2001:db8::ffff:ffff:ffff:ffff"));
        assert_ne!(key("2001:db8::1"), key("2001:db8:0:1::1"));
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
        assert_ne!(key("10.0.0.1"), key("10.0.0.2"));
        let wide = rule_key(&[IP.of_prefixes(24, 128)], OnMissing::Never);
        assert_eq!(resolve(&wide, "10.0.0.1", &none), resolve(&wide, "10.0.0.99", &none));
        assert_ne!(resolve(&wide, "2001:db8::1", &none), resolve(&wide, "2001:db8::2", &none));
    }

    #[test]
    fn a_missing_part_is_handled_as_the_rule_says() {
        let none = HeaderMap::new();
        let user = || [HEADER.of_name("x-user")];
        let missing = RequestError::KeyMissing { rule: "r".to_owned(), part: "header:x-user".to_owned() };
        assert_eq!(resolve(&rule_key(&user(), OnMissing::Refuse), "10.0.0.1", &none), Err(missing));
        assert_eq!(resolve(&rule_key(&user(), OnMissing::Skip), "10.0.0.1", &none), Ok(None));
        let fallback = rule_key(&user(), OnMissing::Fallback(vec![IP.of_prefixes(32, 64)]));
        assert_ne!(resolve(&fallback, "10.0.0.1", &none), resolve(&fallback, "10.0.0.2", &none));
        let mut named = HeaderMap::new();
        named.insert("x-user", "bob".parse().unwrap());
        assert_eq!(resolve(&fallback, "10.0.0.1", &named), resolve(&fallback, "10.0.0.2", &named));
        named.insert("x-user", "".parse().unwrap());
        assert_eq!(resolve(&fallback, "10.0.0.1", &named), resolve(&fallback, "10.0.0.1", &none));
    }

    /// If this fails, the counters of fallback keys of the version before are no longer found: see `identity.rs` of the limiter.
    #[test]
    fn fallback_keys_are_those_of_the_version_before() {
        let fallback = OnMissing::Fallback(vec![HOST.part(), METHOD.part()]);
        let key =
            resolve(&rule_key(&[HEADER.of_name("x-user")], fallback), "10.0.0.1", &HeaderMap::new()).unwrap().unwrap();
        assert_eq!((key.key.bucket_hash, key.key.tag), (0x07cf_4493_feec_978f, 0xdbe1_b9f6_3f42_a7fa));
    }

    #[test]
    fn a_part_given_twice_is_refused() {
        let mut twice = HeaderMap::new();
        twice.append("x-user", "bob".parse().unwrap());
        twice.append("x-user", "eve".parse().unwrap());
        let skip = rule_key(&[HEADER.of_name("x-user")], OnMissing::Skip);
        assert!(matches!(resolve(&skip, "10.0.0.1", &twice), Err(RequestError::KeyAmbiguous { .. })));
    }

    #[test]
    fn every_part_of_a_composite_key_counts() {
        let mut headers = HeaderMap::new();
        headers.insert("x-user", "bob".parse().unwrap());
        let parts =
            [HEADER.of_name("x-user"), PARAM.of_name("id"), METHOD.part(), HOST.part(), PATH.part(), ROUTE.part()];
        let all = rule_key(&parts, OnMissing::Refuse);
        let fewer = rule_key(&parts[..5], OnMissing::Refuse);
        assert!(resolve(&all, "10.0.0.1", &headers).unwrap().is_some());
        assert_ne!(resolve(&all, "10.0.0.1", &headers), resolve(&fewer, "10.0.0.1", &headers));
    }

    /// The integration tests send some of these keys through sockets.
    #[test]
    fn invented_keys_get_neither_quota_nor_counter() {
        const KEYS: u64 = 100_000;
        const LIMIT: usize = 10;
        let clients = Clients {
            source: ClientsSource::File,
            file: "clients.toml".into(),
            api_key: vec![HEADER.of_name("x-api-key")],
            subject: None,
            plan_claim: None,
            defined_plans: Vec::new(),
            list: vec![Client {
                name: "acme".to_owned(),
                plan: "gold".to_owned(),
                api_keys: vec![Digest::of(b"known")],
                subjects: Vec::new(),
                networks: Vec::new(),
                limits: Vec::new(),
                grants: Vec::new(),
            }],
            limit_texts: Vec::new(),
        };
        let clients = ClientPlans::new(&clients, false);
        let ip = || OnMissing::Fallback(vec![IP.of_prefixes(32, 64)]);
        for (on_unknown, on_missing, admitted, live) in [
            (OnUnknownKey::Refuse, OnMissing::Skip, 0, 0),
            (OnUnknownKey::Refuse, ip(), 0, 0),
            (OnUnknownKey::Missing, OnMissing::Refuse, 0, 0),
            // Not counted at all: the rule does not apply.
            (OnUnknownKey::Missing, OnMissing::Skip, 0, 0),
            (OnUnknownKey::Missing, ip(), LIMIT, 1),
        ] {
            let mut rule = rule(&[HEADER.of_name("x-api-key")], on_missing);
            rule.layers = vec![Limit::parse("10/week").unwrap()];
            let rule_set = Arc::new(RuleSet::new(&[rule.clone()], SEED, None));
            let plan = rule_set.charge_plan([RuleId::at(0)]);
            let table = Table::with_capacity(4096).unwrap();
            let check = ClientCheck::new(on_unknown, &rule.key, Some(&clients));
            let rule_key = RuleKey::new(&rule_set.rules[RuleId::at(0)], &route(), SEED).with_client_check(check);
            let tokens = TokenCache::new(TokenVerifier::default(), Vec::new(), KeyHasher::new(SEED, 0));
            let mut context = DecisionContext::default();
            let mut count = |key: &str| {
                let mut headers = HeaderMap::new();
                headers.insert("x-api-key", key.parse().unwrap());
                let lookup = ClientLookup::new(Some(&clients));
                let keyed =
                    with_request("10.0.0.1", &headers, &tokens, |request| rule_key.keyed_request(request, &lookup));
                let Ok(Ok(keyed)) = keyed else { return false };
                context.inputs.keyed_requests.clear();
                context.inputs.keyed_requests.push(Some(keyed));
                let now = DecisionTime::read(&|| 1_000_000);
                matches!(plan.decide(&table, now, &mut context), Decision::Admitted)
            };
            let mut rng = fastrand::Rng::with_seed(7);
            let found = (0..KEYS).filter(|_| count(&format!("{:032x}", rng.u128(..)))).count();
            assert_eq!((found, table.stats(1_000_000).live), (admitted, live), "{on_unknown:?}, {:?}", rule.on_missing);
            assert!(count("known"));
            assert_eq!(table.stats(1_000_000).live, live + 1);
        }
    }
}
