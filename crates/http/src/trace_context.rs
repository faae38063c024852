//! The place of a request in a distributed trace: `traceparent` and `tracestate` (W3C Trace Context).

use http::header::{HeaderMap, HeaderName, HeaderValue};

pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// A longer `tracestate` is not part of the span. Every participant has to pass on this much (section 3.3.1.5).
const TRACESTATE_MAX_BYTES: usize = 512;

/// The value of `traceparent`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceParent {
    pub trace_id: u128,
    /// The id of the span that sends the request.
    pub span_id: u64,
    /// Whether the sender records this request.
    pub is_sampled: bool,
}

impl TraceParent {
    /// Reads `traceparent` (section 3.2). Ids of zeros and capital letters are invalid.
    pub fn of(headers: &HeaderMap) -> Option<TraceParent> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next().filter(|_| values.next().is_none())?;
        let mut fields = value.to_str().ok()?.split('-');
        let mut field = |digits: usize| {
            let is_hex = |text: &&str| text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
            fields.next().filter(|text| text.len() == digits).filter(is_hex)
        };
        let (version, trace_id, span_id, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
        // Later versions may append fields.
        let is_valid = version != "ff" && (version != "00" || fields.next().is_none());
        let trace_id = u128::from_str_radix(trace_id, 16).ok().filter(|id| is_valid && *id != 0)?;
        let span_id = u64::from_str_radix(span_id, 16).ok().filter(|id| *id != 0)?;
        Some(TraceParent { trace_id, span_id, is_sampled: u8::from_str_radix(flags, 16).ok()? & 1 != 0 })
    }

    pub fn to_value(self) -> HeaderValue {
        let TraceParent { trace_id, span_id, is_sampled } = self;
        let text = format!("00-{trace_id:032x}-{span_id:016x}-{:02x}", u8::from(is_sampled));
        // Hexadecimal digits are valid in fields.
        let mut value = HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""));
        value.set_sensitive(true);
        value
    }
}

/// The span of a traced request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpanContext {
    pub trace_id: u128,
    pub span_id: u64,
    /// The span of the client; `None`: the trace begins here.
    pub parent_id: Option<u64>,
    pub tracestate: Option<String>,
}

impl SpanContext {
    /// The span of a request; `None` if the request is not traced. A trusted `traceparent` says whether it is, otherwise
    /// `share` does. The share is drawn and not computed from the trace id, which clients choose.
    pub fn begin(headers: &HeaderMap, is_trusted: bool, share: f64) -> Option<SpanContext> {
        let parent = TraceParent::of(headers);
        let is_traced = match parent.filter(|_| is_trusted) {
            Some(parent) => parent.is_sampled,
            None => fastrand::f64() < share,
        };
        is_traced.then(|| SpanContext {
            trace_id: parent.map_or_else(|| fastrand::u128(1..), |parent| parent.trace_id),
            span_id: new_span_id(),
            parent_id: parent.map(|parent| parent.span_id),
            // Without a valid `traceparent`, the field belongs to no trace (section 4.3).
            tracestate: parent.and_then(|_| tracestate(headers)),
        })
    }
}

pub fn new_span_id() -> u64 {
    fastrand::u64(1..)
}

/// The list of all lines of `tracestate`.
fn tracestate(headers: &HeaderMap) -> Option<String> {
    let lines: Vec<&str> = headers.get_all(TRACESTATE).iter().filter_map(|line| line.to_str().ok()).collect();
    Some(lines.join(",")).filter(|list| (1..=TRACESTATE_MAX_BYTES).contains(&list.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";

    fn headers(fields: &[(HeaderName, &str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap())).collect()
    }

    fn parse(value: &str) -> Option<TraceParent> {
        TraceParent::of(&headers(&[(TRACEPARENT, value)]))
    }

    #[test]
    fn only_a_valid_traceparent_is_read() {
        let ids = format!("{TRACE_ID}-b7ad6b7169203331");
        let expected = TraceParent {
            trace_id: 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c,
            span_id: 0xb7ad_6b71_6920_3331,
            is_sampled: true,
        };
        for (value, is_valid) in [
            (format!("00-{ids}-01"), true),
            (format!("00-{ids}-ff"), true),
            (format!("cc-{ids}-01"), true),
            (format!("cc-{ids}-01-more"), true),
            (format!("00-{ids}-01-more"), false),
            (format!("ff-{ids}-01"), false),
            (format!("00-{ids}-01").to_uppercase(), false),
            (format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)), false),
            (format!("00-{TRACE_ID}-0000000000000000-01"), false),
            (format!("00-{TRACE_ID}-+7ad6b7169203331-01"), false),
            (format!("00-{ids}"), false),
            (String::new(), false),
        ] {
            assert_eq!(parse(&value), Some(expected).filter(|_| is_valid), "{value}");
        }
        assert!(!parse(&format!("00-{ids}-02")).unwrap().is_sampled);
        assert_eq!(TraceParent::of(&HeaderMap::new()), None);
        let twice = format!("00-{ids}-01");
        assert_eq!(TraceParent::of(&headers(&[(TRACEPARENT, &twice), (TRACEPARENT, &twice)])), None);
    }

    #[test]
    fn a_value_is_written_as_it_is_read() {
        for value in [TraceParent { trace_id: 1, span_id: 2, is_sampled: false }, parse_sampled()] {
            assert_eq!(parse(value.to_value().to_str().unwrap()), Some(value));
        }
    }

    fn parse_sampled() -> TraceParent {
        parse(&format!("00-{TRACE_ID}-b7ad6b7169203331-01")).unwrap()
    }

    #[test]
    fn a_trusted_traceparent_decides_and_otherwise_the_share() {
        let begin = |flags: &str, is_trusted, share| {
            let parent = format!("00-{TRACE_ID}-b7ad6b7169203331-{flags}");
            SpanContext::begin(&headers(&[(TRACEPARENT, &parent), (TRACESTATE, "a=1")]), is_trusted, share)
        };
        for (flags, is_trusted, share, is_traced) in
            [("01", true, 0.0, true), ("00", true, 1.0, false), ("01", false, 0.0, false), ("00", false, 1.0, true)]
        {
            let context = begin(flags, is_trusted, share);
            assert_eq!(context.is_some(), is_traced, "{flags} {is_trusted} {share}");
            let Some(context) = context else { continue };
            let parent = parse_sampled();
            assert_eq!((context.trace_id, context.parent_id), (parent.trace_id, Some(parent.span_id)));
            assert_ne!(context.span_id, parent.span_id);
            assert_eq!(context.tracestate.as_deref(), Some("a=1"));
        }
    }

    #[test]
    fn a_request_without_a_traceparent_begins_a_trace() {
        let fields = headers(&[(TRACESTATE, "a=1")]);
        for is_trusted in [false, true] {
            assert_eq!(SpanContext::begin(&fields, is_trusted, 0.0), None);
            let [one, other] = [(); 2].map(|()| SpanContext::begin(&fields, is_trusted, 1.0).unwrap());
            assert_eq!((one.parent_id, &one.tracestate), (None, &None));
            assert!(one.trace_id != 0 && one.trace_id != other.trace_id && one.span_id != other.span_id);
        }
    }
}
