//! What a response says about the cost of its request: whether the request counts, and a cost stated in a field or by the usage in
//! its body.

use std::ops::RangeInclusive;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, StatusCode};

use transom_config::Config;
use transom_config::byte_cost::ByteCost;
use transom_config::count_when::CountWhen;
use transom_config::usage_cost::OnMissingUsage;
use transom_limiter::handles::{IdVec, PlanPosition, RuleId};
use transom_limiter::rule::Cost;
use transom_usage::decimal::Decimal;
use transom_usage::learnt_cost::LearntCosts;
use transom_usage::usage::{ModelWeights, RequestedModel, Usage};
use transom_usage::usage_reader::{Missing, Reading, ReadingPlan, SourceId};

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// The code of a gRPC response without a valid `grpc-status`: `UNKNOWN`.
pub const GRPC_UNKNOWN: u8 = 2;

transom_limiter::handles! {
    /// A rule of [`ResponseCosts`].
    ResponseCostId,
}

/// A rule of a route whose charge depends on the response.
#[derive(Debug)]
pub struct ResponseCostRule {
    pub position: PlanPosition,
    stated: Option<StatedCost>,
    count_when: Option<CountWhen>,
    /// Statuses with which a request costs nothing, unless its response states a cost.
    refund_on: Vec<RangeInclusive<u16>>,
    /// Learns the cost of requests.
    learnt: Option<Arc<LearntCosts>>,
}

/// A cost that the response states.
#[derive(Debug)]
enum StatedCost {
    Field {
        name: HeaderName,
        /// Upper bound of the cost.
        max: u32,
    },
    /// In the body.
    Usage { source: SourceId, weights: ModelWeights, on_missing: OnMissingUsage },
    /// The bytes that pass, which are charged meanwhile.
    Bytes(ByteCost),
}

/// The responses of a list of rules: which charges depend on them, and what is read of their bodies.
#[derive(Debug)]
pub struct ResponseCosts {
    pub rules: IdVec<ResponseCostId, ResponseCostRule>,
    /// Without a rule by usage: `None`.
    pub reading_plan: Option<Arc<ReadingPlan>>,
    /// Whether the model of requests is read as they pass: costs depend on it, and it is not read before the decision.
    pub reads_passing_model: bool,
    /// Whether a rule counts bytes.
    pub counts_bytes: bool,
}

/// A response, as far as it is known.
#[derive(Clone, Copy)]
pub struct ResponseEnd<'a> {
    pub status: StatusCode,
    pub headers: &'a HeaderMap,
    /// `None`: the trailers may state it.
    pub grpc_status: Option<u8>,
    /// `None` until the end of the body.
    pub body: Option<&'a BodyEnd<'a>>,
}

/// A body that has ended.
pub struct BodyEnd<'a> {
    pub reading: &'a Reading,
    /// That the request names.
    pub model: RequestedModel<'a>,
    pub bytes: u64,
    /// Whether it broke off.
    pub is_aborted: bool,
}

/// What a request costs in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinalCost {
    /// What was charged before forwarding.
    AsCharged,
    Stated(u32),
    /// Nothing: the rule does not count requests with this response.
    NotCounted,
    /// Decided by the body or the trailers.
    KnownAtEnd,
}

impl ResponseCosts {
    /// Of `rules`, those whose charge depends on the response.
    pub fn of(
        config: &Config,
        rules: &IdVec<PlanPosition, RuleId>,
        learnt: &IdVec<RuleId, Option<Arc<LearntCosts>>>,
    ) -> ResponseCosts {
        let mut plan = ReadingPlan::of_responses();
        let (mut reads_usage, mut depends_on_model, mut counts_bytes) = (false, false, false);
        let response_cost = |(position, id): (PlanPosition, &RuleId)| {
            let (rule, learnt) = (&config.rules[*id], learnt[*id].clone());
            let stated = match (&rule.usage, &rule.cost) {
                (Some(usage), _) => {
                    reads_usage = true;
                    depends_on_model |= !usage.weights.is_for_all();
                    let (source, weights) = (plan.add(&usage.source), usage.weights.clone());
                    Some(StatedCost::Usage { source, weights, on_missing: usage.on_missing })
                }
                (None, _) if rule.bytes.is_some() => {
                    counts_bytes = true;
                    rule.bytes.map(StatedCost::Bytes)
                }
                (None, Cost::Response { source: Some(field), max, .. }) => {
                    HeaderName::from_bytes(field.as_bytes()).ok().map(|name| StatedCost::Field { name, max: *max })
                }
                (None, _) => None,
            };
            let count_when = rule.count_when.clone();
            let depends = stated.is_some() || count_when.is_some();
            let refund_on = rule.refund_on.clone();
            depends.then_some(ResponseCostRule { position, stated, count_when, refund_on, learnt })
        };
        let rules = rules.enumerate().filter_map(response_cost).collect();
        ResponseCosts {
            rules,
            reading_plan: reads_usage.then(|| Arc::new(plan)),
            reads_passing_model: depends_on_model,
            counts_bytes,
        }
    }
}

impl ResponseCostRule {
    /// The cost by a response. `charged`: in advance.
    pub fn final_cost(&self, response: &ResponseEnd<'_>, charged: u32) -> FinalCost {
        let ResponseEnd { status, headers, grpc_status, body } = *response;
        let counts = self.count_when.as_ref().map_or(Some(true), |count_when| count_when.counts(status, grpc_status));
        let stated = match (counts, &self.stated) {
            (None, _) => return FinalCost::KnownAtEnd,
            (Some(false), _) => return FinalCost::NotCounted,
            (Some(true), None) => return FinalCost::AsCharged,
            (Some(true), Some(StatedCost::Bytes(_))) => None,
            (Some(true), Some(StatedCost::Field { name, max })) => stated_in(headers, name, *max),
            (Some(true), Some(StatedCost::Usage { source, weights, on_missing })) => {
                let Some(body) = body else { return FinalCost::KnownAtEnd };
                let model = body.model.or(body.reading.model());
                let stated = body.reading.usage(*source).ok().map(|usage| weights.cost(&usage, model));
                let unstated = match on_missing {
                    OnMissingUsage::Reserve => charged,
                    OnMissingUsage::Estimate => weights.cost(&body.estimated_usage(), model).max(charged),
                };
                match stated {
                    // What is missing of a body that was read in part may have cost more.
                    Some(cost) if body.is_partial() => Some(cost.max(unstated)),
                    None if !self.refunds(status) => Some(unstated),
                    stated => stated,
                }
            }
        };
        match stated {
            Some(cost) => FinalCost::Stated(cost),
            None if self.refunds(status) => FinalCost::Stated(0),
            None => FinalCost::AsCharged,
        }
    }

    /// Learns the cost that a complete body has stated.
    pub fn learn(&self, body: &BodyEnd<'_>, cost: u32) {
        if let Some(learnt) = self.learnt.as_ref().filter(|_| !body.is_partial()) {
            learnt.record(body.model.name(), body.reading.model(), cost);
        }
    }

    /// Whether a response with this status costs nothing if it states no cost.
    pub fn refunds(&self, status: StatusCode) -> bool {
        self.refund_on.iter().any(|statuses| statuses.contains(&status.as_u16()))
    }

    /// Whether the response or its bytes state the cost.
    pub fn states_cost(&self) -> bool {
        self.stated.is_some()
    }

    /// Whether the body states the cost.
    pub fn reads_usage(&self) -> bool {
        matches!(self.stated, Some(StatedCost::Usage { .. }))
    }

    /// The cost of a usage; `None` for a rule that does not read it.
    pub fn cost_of_usage(&self, usage: &Usage, model: Option<&str>) -> Option<u32> {
        let Some(StatedCost::Usage { weights, .. }) = &self.stated else { return None };
        Some(weights.cost(usage, RequestedModel::Unknown.or(model)))
    }

    /// Where it reads usage.
    pub fn usage_source(&self) -> Option<SourceId> {
        match &self.stated {
            Some(StatedCost::Usage { source, .. }) => Some(*source),
            _ => None,
        }
    }

    /// The bytes that it counts.
    pub fn bytes(&self) -> Option<ByteCost> {
        match &self.stated {
            Some(StatedCost::Bytes(bytes)) => Some(*bytes),
            _ => None,
        }
    }

    /// Whether the response decides whether a request costs anything.
    pub fn is_conditional(&self) -> bool {
        self.count_when.is_some() || !self.refund_on.is_empty()
    }

    /// Whether a request that has reached no server costs nothing.
    pub fn refunds_unsent(&self) -> bool {
        !self.refund_on.is_empty()
    }

    /// The usage that a body has stated; `None` for a rule that does not read it.
    pub fn usage(&self, reading: &Reading) -> Option<Result<Usage, Missing>> {
        let Some(StatedCost::Usage { source, .. }) = &self.stated else { return None };
        Some(reading.usage(*source))
    }
}

impl BodyEnd<'_> {
    fn is_partial(&self) -> bool {
        self.is_aborted || self.reading.undecoded().is_some()
    }

    /// What a body without usage may stand for: output, by its length without its content coding.
    fn estimated_usage(&self) -> Usage {
        let bytes = if self.reading.undecoded().is_some() { self.bytes } else { self.reading.decoded_bytes() };
        Usage::of(Decimal::ZERO, Decimal::from(bytes.div_ceil(ESTIMATED_BYTES)))
    }
}

/// Bytes of a body that are estimated as one token.
const ESTIMATED_BYTES: u64 = 4;

/// The cost in a field of a response, at most `max`. `None` if the field is absent, repeated, or not a whole number.
fn stated_in(headers: &HeaderMap, name: &HeaderName, max: u32) -> Option<u32> {
    let mut values = headers.get_all(name).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let text = value.to_str().ok()?.trim();
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty();
    // A number that does not fit exceeds `max`.
    is_number.then(|| text.parse().unwrap_or(max).min(max))
}

/// The code in `grpc-status` of a head or of trailers.
pub fn grpc_status(fields: &HeaderMap) -> Option<u8> {
    let value = fields.get(GRPC_STATUS)?;
    Some(value.to_str().ok().and_then(|text| text.parse().ok()).unwrap_or(GRPC_UNKNOWN))
}
