//! What a response says about the cost of its request: whether the request counts, and a cost stated in a field.

use http::{HeaderMap, HeaderName, StatusCode};

use transom_config::Config;
use transom_config::count_when::CountWhen;
use transom_limiter::handles::{IdVec, PlanPosition, RuleId};
use transom_limiter::rule::Cost;

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// The code of a gRPC response without a valid `grpc-status`: `UNKNOWN`.
pub const GRPC_UNKNOWN: u8 = 2;

/// A rule of a route whose charge depends on the response.
#[derive(Debug)]
pub struct ResponseCostRule {
    pub position: PlanPosition,
    stated: Option<StatedCost>,
    count_when: Option<CountWhen>,
}

/// A cost that the response states.
#[derive(Debug)]
struct StatedCost {
    field: HeaderName,
    /// Upper bound of the cost.
    max: u32,
}

/// What a request costs in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinalCost {
    /// What was charged before forwarding.
    AsCharged,
    Stated(u32),
    /// Nothing: the rule does not count requests with this response.
    NotCounted,
    /// Decided by the trailers.
    KnownAtEnd,
}

impl ResponseCostRule {
    /// Those of `rules` whose charge depends on the response.
    pub fn all_of(config: &Config, rules: &IdVec<PlanPosition, RuleId>) -> Vec<ResponseCostRule> {
        let response_cost = |(position, rule): (PlanPosition, &RuleId)| {
            let rule = &config.rules[*rule];
            let stated = match &rule.cost {
                Cost::Response { header, max, .. } => {
                    HeaderName::from_bytes(header.as_bytes()).ok().map(|field| StatedCost { field, max: *max })
                }
                Cost::Fixed(_) | Cost::Request { .. } => None,
            };
            let count_when = rule.count_when.clone();
            let depends = stated.is_some() || count_when.is_some();
            depends.then_some(ResponseCostRule { position, stated, count_when })
        };
        rules.enumerate().filter_map(response_cost).collect()
    }

    /// The cost by the head of a response. `grpc_status`: the code, if the response does not state it in its trailers.
    pub fn final_cost(&self, status: StatusCode, headers: &HeaderMap, grpc_status: Option<u8>) -> FinalCost {
        let counts = self.count_when.as_ref().map_or(Some(true), |count_when| count_when.counts(status, grpc_status));
        match counts {
            None => FinalCost::KnownAtEnd,
            Some(false) => FinalCost::NotCounted,
            Some(true) => self
                .stated
                .as_ref()
                .and_then(|cost| cost.cost_in(headers))
                .map_or(FinalCost::AsCharged, FinalCost::Stated),
        }
    }
}

impl StatedCost {
    /// The cost in a response, at most `max`. `None` if the field is absent, repeated, or not a whole number.
    fn cost_in(&self, headers: &HeaderMap) -> Option<u32> {
        let mut values = headers.get_all(&self.field).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        let text = value.to_str().ok()?.trim();
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty();
        // A number that does not fit exceeds `max`.
        is_number.then(|| text.parse().unwrap_or(self.max).min(self.max))
    }
}

/// The code in `grpc-status` of a head or of trailers.
pub fn grpc_status(fields: &HeaderMap) -> Option<u8> {
    let value = fields.get(GRPC_STATUS)?;
    Some(value.to_str().ok().and_then(|text| text.parse().ok()).unwrap_or(GRPC_UNKNOWN))
}
