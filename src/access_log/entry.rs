//! One entry of the access log, and its two forms: a JSON object, and the combined format of Apache and nginx.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::Number;

use transom_config::LogFormat;
use transom_http::client_address::{ClientAddress, UNIX};

/// One request. `None` and empty lists are left out of the JSON object.
#[derive(Serialize, Debug)]
pub struct LogEntry {
    /// Start of the request, Unix milliseconds.
    #[serde(rename = "time", serialize_with = "rfc3339")]
    pub time_ms: u64,
    #[serde(flatten)]
    pub request: Option<LoggedRequest>,
    /// Address of the client.
    #[serde(serialize_with = "address")]
    pub client: ClientAddress,
    #[serde(flatten)]
    pub known_client: Option<KnownClient>,
    pub route: Option<String>,
    pub status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grpc_status: Option<String>,
    /// Bytes of the request body.
    pub bytes_received: u64,
    /// Bytes of the response body.
    pub bytes_sent: u64,
    /// Until the last byte of the response.
    #[serde(rename = "duration_ms", serialize_with = "milliseconds")]
    pub duration: Duration,
    /// How long the rules made the request wait.
    #[serde(rename = "delay_ms", serialize_with = "milliseconds", skip_serializing_if = "Duration::is_zero")]
    pub delay: Duration,
    #[serde(flatten)]
    pub upstream: Option<UpstreamUse>,
    #[serde(flatten)]
    pub costs: Option<Box<LoggedCosts>>,
    /// The decision of each rule, by its name.
    #[serde(serialize_with = "as_map", skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<(String, RuleDecision)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused_by: Vec<FullLimit>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shadowed_by: Vec<FullLimit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denied_by: Option<LoggedDenial>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Why a request was denied.
#[derive(Serialize, Debug)]
pub struct LoggedDenial {
    /// Of the deny entry, or `allow`.
    pub id: String,
    /// Whom the entry denies; secrets as digests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What the head of a request says.
#[derive(Serialize, Debug)]
pub struct LoggedRequest {
    /// `None` for a head that could not be parsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    pub method: String,
    pub host: Option<String>,
    /// Without the query, which may hold secrets.
    pub path: String,
    /// Empty if it is unknown.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub protocol: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_agent: Option<String>,
    /// Without its query.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub referrer: Option<String>,
}

/// A client of the clients file.
#[derive(Serialize, Debug)]
pub struct KnownClient {
    #[serde(rename = "client_name")]
    pub name: String,
    pub plan: String,
}

/// Where a request was forwarded.
#[derive(Serialize, Debug)]
pub struct UpstreamUse {
    pub upstream: String,
    /// The server of the last attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Until the head of the response, or the failure of the last attempt.
    #[serde(rename = "upstream_ms", serialize_with = "milliseconds")]
    pub time: Duration,
    #[serde(rename = "upstream_attempts", skip_serializing_if = "is_one")]
    pub attempts: u32,
    /// How long the request waited for a reachable server.
    #[serde(rename = "held_ms", serialize_with = "milliseconds", skip_serializing_if = "Duration::is_zero")]
    pub held: Duration,
}

/// What a request cost by the rules whose cost its response states, or its bytes are.
#[derive(Serialize, Default, Debug)]
pub struct LoggedCosts {
    /// That the request names, or else the response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What the body of the response states, by kind.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub usage: BTreeMap<&'static str, Number>,
    /// Tokens that each rule charged before the request was forwarded.
    pub reserved: BTreeMap<String, u64>,
    /// Tokens that each rule charged in all.
    pub cost: BTreeMap<String, u64>,
    /// The rule that cut off the transfer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut_by: Option<String>,
    /// Until the first byte of the response's body.
    #[serde(
        rename = "first_byte_ms",
        serialize_with = "optional_milliseconds",
        skip_serializing_if = "Option::is_none"
    )]
    pub first_byte: Option<Duration>,
}

/// What a rule decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuleDecision {
    Admitted,
    Delayed,
    Refused,
    Shadowed,
    /// The rule exempts the request.
    Exempt,
}

impl RuleDecision {
    /// As in the access log.
    pub fn name(self) -> &'static str {
        match self {
            RuleDecision::Admitted => "admitted",
            RuleDecision::Delayed => "delayed",
            RuleDecision::Refused => "refused",
            RuleDecision::Shadowed => "shadowed",
            RuleDecision::Exempt => "exempt",
        }
    }
}

/// A limit without room for the request.
#[derive(Serialize, Debug)]
pub struct FullLimit {
    pub rule: String,
    /// Name of the layer, as in `RateLimit-Policy`.
    pub window: String,
    /// The client's name or the parts of the key; secrets as digests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The plan whose limit applied; `None` for the rule's own limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
}

impl LogEntry {
    /// An entry of a response to `client` that was sent at this time, in Unix milliseconds.
    pub fn new(time_ms: u64, client: ClientAddress) -> LogEntry {
        LogEntry {
            time_ms,
            request: None,
            client: client.to_canonical(),
            known_client: None,
            route: None,
            status: 0,
            grpc_status: None,
            bytes_received: 0,
            bytes_sent: 0,
            duration: Duration::ZERO,
            delay: Duration::ZERO,
            upstream: None,
            costs: None,
            rules: Vec::new(),
            refused_by: Vec::new(),
            shadowed_by: Vec::new(),
            denied_by: None,
            error: None,
        }
    }

    /// The entry as one line.
    pub fn to_line(&self, format: LogFormat) -> Vec<u8> {
        let mut line = Vec::with_capacity(512);
        // Writing to a vector cannot fail.
        let _ = match format {
            LogFormat::Json => serde_json::to_writer(&mut line, self).map_err(std::io::Error::from),
            LogFormat::Combined => self.write_combined(&mut line),
        };
        line.push(b'\n');
        line
    }

    /// `ADDRESS - CLIENT [TIME] "METHOD PATH PROTOCOL" STATUS BYTES "REFERRER" "USER-AGENT"`
    fn write_combined(&self, line: &mut Vec<u8>) -> std::io::Result<()> {
        write!(line, "{} - ", self.client)?;
        write_escaped(line, self.known_client.as_ref().map_or("-", |client| &client.name), b" \"\\");
        let time = jiff::Timestamp::from_millisecond(self.time_ms as i64).unwrap_or_default();
        write!(line, " [{}] \"", time.strftime("%d/%b/%Y:%H:%M:%S +0000"))?;
        let request = self.request.as_ref();
        if let Some(request) = request {
            write_escaped(line, &request.method, QUOTED);
            // A head of which only a part was received ends where that part ends.
            if !request.path.is_empty() || !request.protocol.is_empty() {
                line.push(b' ');
                write_escaped(line, if request.path.is_empty() { "-" } else { &request.path }, QUOTED);
            }
            if !request.protocol.is_empty() {
                write!(line, " {}", request.protocol)?;
            }
        }
        write!(line, "\" {} {} \"", self.status, self.bytes_sent)?;
        write_escaped(line, request.and_then(|request| request.referrer.as_deref()).unwrap_or("-"), QUOTED);
        line.extend_from_slice(b"\" \"");
        write_escaped(line, request.and_then(|request| request.user_agent.as_deref()).unwrap_or("-"), QUOTED);
        line.push(b'"');
        Ok(())
    }
}

/// Bytes that end or escape a quoted text.
const QUOTED: &[u8] = b"\"\\";

/// Writes a text with control characters, bytes beyond ASCII and the bytes of `special` as `\xHH`, as nginx does.
fn write_escaped(line: &mut Vec<u8>, text: &str, special: &[u8]) {
    for byte in text.bytes() {
        if (b' '..=b'~').contains(&byte) && !special.contains(&byte) {
            line.push(byte);
        } else {
            let _ = write!(line, "\\x{byte:02X}");
        }
    }
}

fn rfc3339<S: Serializer>(time_ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    let time = jiff::Timestamp::from_millisecond(*time_ms as i64).unwrap_or_default();
    serializer.collect_str(&format_args!("{time:.3}"))
}

/// An address of IP is written without a formatter.
fn address<S: Serializer>(address: &ClientAddress, serializer: S) -> Result<S::Ok, S::Error> {
    match address {
        ClientAddress::Ip(ip) => ip.serialize(serializer),
        ClientAddress::Unix => serializer.serialize_str(UNIX),
    }
}

fn milliseconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_micros() as f64 / 1e3)
}

#[allow(clippy::ref_option, reason = "the signature that serde asks for")]
fn optional_milliseconds<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    milliseconds(&duration.unwrap_or_default(), serializer)
}

fn as_map<S: Serializer>(rules: &[(String, RuleDecision)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(rules.iter().map(|(rule, decision)| (rule, decision.name())))
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_one(attempts: &u32) -> bool {
    *attempts <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> LogEntry {
        let mut entry = LogEntry::new(1_760_000_000_123, "::ffff:192.0.2.7".parse().unwrap());
        entry.status = 429;
        entry.bytes_sent = 120;
        entry.duration = Duration::from_micros(1500);
        entry
    }

    fn request() -> LoggedRequest {
        LoggedRequest {
            request_id: Some("0af7".to_owned()),
            trace_id: None,
            method: "GET".to_owned(),
            host: Some("api.test".to_owned()),
            path: "/a\"b\\c\u{e9}".to_owned(),
            protocol: "HTTP/1.1",
            user_agent: Some("curl\n".to_owned()),
            referrer: None,
        }
    }

    #[test]
    fn absent_values_are_left_out() {
        let line = entry().to_line(LogFormat::Json);
        let expected = "{\"time\":\"2025-10-09T08:53:20.123Z\",\"client\":\"192.0.2.7\",\"route\":null,\"status\":429,\
                        \"bytes_received\":0,\"bytes_sent\":120,\"duration_ms\":1.5}\n";
        assert_eq!(String::from_utf8(line).unwrap(), expected);
    }

    #[test]
    fn a_refusal_names_rule_window_key_and_plan() {
        let mut entry = entry();
        entry.rules =
            vec![("all".to_owned(), RuleDecision::Admitted), ("per-client".to_owned(), RuleDecision::Refused)];
        entry.refused_by.push(FullLimit {
            rule: "per-client".to_owned(),
            window: "per-client-minute".to_owned(),
            key: Some("acme".to_owned()),
            plan: Some("free".to_owned()),
        });
        let line: serde_json::Value = serde_json::from_slice(&entry.to_line(LogFormat::Json)).unwrap();
        assert_eq!(line["rules"], serde_json::json!({ "all": "admitted", "per-client": "refused" }));
        let full = serde_json::json!(
            [{ "rule": "per-client", "window": "per-client-minute", "key": "acme", "plan": "free" }]
        );
        assert_eq!(line["refused_by"], full);
    }

    #[test]
    fn the_combined_format_escapes_what_clients_send() {
        let combined = |entry: &LogEntry| String::from_utf8(entry.to_line(LogFormat::Combined)).unwrap();
        let mut entry = entry();
        assert_eq!(combined(&entry), "192.0.2.7 - - [09/Oct/2025:08:53:20 +0000] \"\" 429 120 \"-\" \"-\"\n");
        entry.request = Some(request());
        entry.known_client = Some(KnownClient { name: "acme inc".to_owned(), plan: "free".to_owned() });
        let expected = "192.0.2.7 - acme\\x20inc [09/Oct/2025:08:53:20 +0000] \"GET /a\\x22b\\x5Cc\\xC3\\xA9 HTTP/1.1\" \
                        429 120 \"-\" \"curl\\x0A\"\n";
        assert_eq!(combined(&entry), expected);
        // A first line of which only a part was received, and one whose path is left out.
        for (method, protocol, expected) in [("GE", "", "\"GE\""), ("CONNECT", "HTTP/1.1", "\"CONNECT - HTTP/1.1\"")] {
            let (method, path) = (method.to_owned(), String::new());
            entry.request = Some(LoggedRequest { method, path, protocol, ..request() });
            assert!(combined(&entry).contains(&format!("] {expected} 429 ")), "{}", combined(&entry));
        }
    }
}
