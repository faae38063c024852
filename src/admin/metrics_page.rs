//! `GET /metrics`: the cells of all workers, and what is read at each scrape, in the format and coding that the client accepts.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, VARY};
use http::{HeaderMap, HeaderValue};

use super::{AcceptState, AdminState, accepted};
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_rules::responses::{self, LocalResponse};
use transom_runtime::metrics::events::{
    BUILD_INFO, CLOCK_OFFSET, COUNTERS, DRAINING, NAMES, OVERFLOW, RULE_LIMIT, RULE_WINDOW,
};
use transom_runtime::metrics::exposition::{Reading, render};
use transom_runtime::metrics::process;
use transom_usage::usage::Kind;

/// `fields`: those of the request.
pub fn response(state: &AdminState, fields: &HeaderMap) -> LocalResponse {
    state.registry.remove_unused();
    let mut readings: Vec<Reading> = process::readings().into_iter().chain(readings(state)).collect();
    if let Some(decision_api) = &*state.decision_api.borrow() {
        let served = &decision_api.served;
        served.config.rules.iter().for_each(|rule| add_limits(rule, &mut readings));
        if let (true, Some(plans)) = (served.config.metrics.clients, served.decision_service.clients()) {
            let exists = |client: &str, plan: &str| plans.named(client).is_some_and(|client| client.plan == plan);
            let kinds = Kind::ALL.map(Kind::name);
            readings.extend(state.registry.counted_clients.readings(state.clock.wall_ms(), kinds, exists));
        }
    }
    let format = accepted::format(fields);
    let page = render(&state.registry, NAMES, &readings, format);
    let compressed = if accepted::gzip(fields) { compress(&page) } else { None };
    let is_compressed = compressed.is_some();
    let mut response = responses::metrics_response(compressed.unwrap_or(page.into_bytes()), format.media_type());
    response.headers_mut().insert(VARY, HeaderValue::from_static("Accept, Accept-Encoding"));
    if is_compressed {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// Compresses in memory, which does not fail.
fn compress(page: &str) -> Option<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(page.as_bytes()).ok()?;
    encoder.finish().ok()
}

/// The values that no worker counts.
fn readings(state: &AdminState) -> [Reading; 6] {
    let stats = state.counters.stats(state.clock.now().unix_ms);
    let is_draining = state.is_draining() || *state.accept_state.borrow() == AcceptState::HandedOver;
    [
        Reading::new(&COUNTERS, &[("state", "free")], stats.free as f64),
        Reading::new(&COUNTERS, &[("state", "live")], stats.live as f64),
        Reading::new(&OVERFLOW, &[], state.overflow_total() as f64),
        Reading::new(&CLOCK_OFFSET, &[], state.clock.offset_s() as f64),
        Reading::new(&DRAINING, &[], f64::from(u8::from(is_draining))),
        Reading::new(&BUILD_INFO, &[("version", env!("CARGO_PKG_VERSION"))], 1.0),
    ]
}

/// The configured limits of a rule, for clients without a plan and for each plan.
fn add_limits(rule: &Rule, readings: &mut Vec<Reading>) {
    let mut add = |plan: &str, layers: &[Limit], concurrent: Option<u32>| {
        for limit in layers {
            let window = rule.layer_name(layers, limit);
            let labels = [("rule", rule.name.as_str()), ("window", window.as_str()), ("plan", plan)];
            readings.push(Reading::new(&RULE_LIMIT, &labels, f64::from(limit.tokens)));
            readings.push(Reading::new(&RULE_WINDOW, &labels, limit.windows.typical_ms() as f64 / 1e3));
        }
        if let Some((limit, window)) = concurrent.zip(rule.concurrent_name()) {
            let labels = [("rule", rule.name.as_str()), ("window", window.as_str()), ("plan", plan)];
            readings.push(Reading::new(&RULE_LIMIT, &labels, f64::from(limit)));
        }
    };
    add("", &rule.layers, rule.concurrent);
    rule.plans.iter().for_each(|plan| add(&plan.name, &plan.layers, plan.concurrent));
}
