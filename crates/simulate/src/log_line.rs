//! Parses the lines of access logs: the combined format of nginx and Apache, and JSON of Caddy, Traefik, Envoy, this
//! gateway and others. A parsed line consists of positions in the buffer, so that parsing copies nothing.

use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;

use http::HeaderName;
use memchr::{memchr, memchr_iter, memrchr};

use super::json_scanner::{Malformed, Scanner, Span, Value};
use super::timestamp;
use transom_http::client_address::ClientAddress;
use transom_usage::decimal::Decimal;

/// The form of the lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Syntax {
    /// By the first byte of each line: `{` begins JSON.
    Any,
    Combined,
    Json,
}

/// How to read the lines of a log.
#[derive(Debug)]
pub struct LogFormat {
    syntax: Syntax,
    keys: KeyTree,
    user_agent: Option<u16>,
    referrer: Option<u16>,
}

/// The fields of requests and responses that the configuration reads.
#[derive(Clone, Default, Debug)]
pub struct LoggedFields {
    pub request: Vec<HeaderName>,
    pub response: Vec<HeaderName>,
    /// Whether costs depend on usage or bytes.
    pub costs: bool,
}

/// Keys of JSON objects, and what they say: a hash table by the first eight bytes and the length of a key, because every
/// key of every line is searched.
#[derive(Default, Debug)]
struct KeyTree {
    nodes: Vec<KeyNode>,
    /// A power of two; 0, or one more than a position in `nodes`.
    slots: Vec<u16>,
}

#[derive(Default, Debug)]
struct KeyNode {
    key: Box<[u8]>,
    first_word: u64,
    /// The field, and its rank: the smallest of a line counts.
    field: Option<(Field, u8)>,
    members: KeyTree,
}

/// What a key says about the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Field {
    Time,
    /// The time as Envoy calls it; a `duration` beside it is in milliseconds.
    EnvoyTime,
    /// The time of the response, from which the duration has to be subtracted.
    EndTime,
    Duration(DurationUnit),
    /// Of this gateway: milliseconds for which rules made the request wait.
    Delay,
    Client,
    ForwardedFor,
    Method,
    Target,
    Query,
    /// Method, target and protocol.
    RequestLine,
    Host,
    Scheme,
    Status,
    GrpcStatus,
    /// By position in [`LoggedFields::request`], followed by [`LoggedFields::response`].
    Header(u16),
    /// The name of a client in the clients file.
    ClientName,
    /// Of this gateway: what each rule decided.
    Decisions,
    /// Of this gateway: the rules that refused the request.
    RefusedBy,
    /// What [`LoggedCost`] has.
    Usage,
    Model,
    Reserved,
    Cost,
    BytesReceived,
    BytesSent,
    Route,
    Error,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DurationUnit {
    Seconds,
    Milliseconds,
    Nanoseconds,
    /// Milliseconds in lines of Envoy, else seconds.
    ByTime,
}

/// The names of [`Field`]s in `--format json:…`.
const NAMES: [(&str, Field); 14] = [
    ("time", Field::Time),
    ("end_time", Field::EndTime),
    ("client", Field::Client),
    ("client_name", Field::ClientName),
    ("method", Field::Method),
    ("path", Field::Target),
    ("query", Field::Query),
    ("request", Field::RequestLine),
    ("host", Field::Host),
    ("scheme", Field::Scheme),
    ("status", Field::Status),
    ("grpc_status", Field::GrpcStatus),
    ("duration", Field::Duration(DurationUnit::Seconds)),
    ("duration_ms", Field::Duration(DurationUnit::Milliseconds)),
];

/// Known keys with their rank; a dot separates levels.
const KNOWN_KEYS: [(&str, Field, u8); 69] = [
    ("StartUTC", Field::Time, 1),
    ("start_time", Field::EnvoyTime, 1),
    ("ts", Field::EndTime, 2),
    ("msec", Field::EndTime, 2),
    ("time", Field::Time, 3),
    ("timestamp", Field::Time, 3),
    ("@timestamp", Field::Time, 3),
    ("time_iso8601", Field::EndTime, 3),
    ("time_local", Field::EndTime, 4),
    ("datetime", Field::Time, 4),
    ("date", Field::Time, 5),
    ("duration", Field::Duration(DurationUnit::ByTime), 2),
    ("duration_ms", Field::Duration(DurationUnit::Milliseconds), 1),
    ("Duration", Field::Duration(DurationUnit::Nanoseconds), 1),
    ("request_time", Field::Duration(DurationUnit::Seconds), 1),
    ("client", Field::Client, 1),
    ("client_ip", Field::Client, 1),
    ("request.client_ip", Field::Client, 1),
    ("ClientHost", Field::Client, 1),
    ("remote_addr", Field::Client, 2),
    ("remote_ip", Field::Client, 2),
    ("remote_address", Field::Client, 2),
    ("request.remote_ip", Field::Client, 2),
    ("request.remote_addr", Field::Client, 3),
    ("downstream_remote_address", Field::Client, 2),
    ("downstream_remote_address_without_port", Field::Client, 2),
    ("ClientAddr", Field::Client, 3),
    ("clientip", Field::Client, 3),
    ("ip", Field::Client, 3),
    ("downstream_direct_remote_address", Field::Client, 4),
    ("http_x_forwarded_for", Field::ForwardedFor, 1),
    ("x_forwarded_for", Field::ForwardedFor, 2),
    ("method", Field::Method, 1),
    ("request_method", Field::Method, 1),
    ("request.method", Field::Method, 1),
    ("RequestMethod", Field::Method, 1),
    ("http_method", Field::Method, 2),
    ("verb", Field::Method, 2),
    ("uri", Field::Target, 1),
    ("request_uri", Field::Target, 1),
    ("request.uri", Field::Target, 1),
    ("RequestPath", Field::Target, 1),
    ("path", Field::Target, 2),
    ("request_path", Field::Target, 2),
    ("url", Field::Target, 3),
    ("query", Field::Query, 1),
    ("args", Field::Query, 1),
    ("query_string", Field::Query, 1),
    ("request", Field::RequestLine, 1),
    ("host", Field::Host, 1),
    ("http_host", Field::Host, 1),
    ("request.host", Field::Host, 1),
    ("RequestHost", Field::Host, 1),
    ("authority", Field::Host, 1),
    ("vhost", Field::Host, 2),
    ("server_name", Field::Host, 3),
    ("scheme", Field::Scheme, 1),
    ("RequestScheme", Field::Scheme, 1),
    ("status", Field::Status, 1),
    ("response_code", Field::Status, 1),
    ("DownstreamStatus", Field::Status, 1),
    ("status_code", Field::Status, 2),
    ("grpc_status", Field::GrpcStatus, 1),
    ("delay_ms", Field::Delay, 1),
    ("client_name", Field::ClientName, 1),
    ("rules", Field::Decisions, 1),
    ("refused_by", Field::RefusedBy, 1),
    ("route", Field::Route, 1),
    ("error", Field::Error, 1),
];

/// Keys that are read if costs depend on usage or bytes.
const COST_KEYS: [(&str, Field); 6] = [
    ("usage", Field::Usage),
    ("model", Field::Model),
    ("reserved", Field::Reserved),
    ("cost", Field::Cost),
    ("bytes_received", Field::BytesReceived),
    ("bytes_sent", Field::BytesSent),
];

/// What a line says about the cost of its request, as the log of this gateway has it. Objects are texts, empty if they are absent.
#[derive(Clone, Copy, Default, Debug)]
pub struct LoggedCost {
    /// An object by kinds.
    pub usage: Span,
    pub model: Span,
    /// Objects by the names of rules.
    pub reserved: Span,
    pub cost: Span,
    /// Of the body.
    pub bytes_received: Option<u64>,
    pub bytes_sent: Option<u64>,
}

/// A request of a log. Spans are positions in the buffer that the line was parsed in.
#[derive(Clone, Copy, Debug)]
pub struct LogLine {
    /// The start of the request, Unix milliseconds; the end if the log has no duration.
    pub time_ms: u64,
    /// Until the last byte of the response, without waits for rules.
    pub duration_ms: Option<u32>,
    pub client: ClientAddress,
    /// The value of `X-Forwarded-For`, if the log has it; the client is then the peer that sent it.
    pub forwarded_for: Span,
    /// As in the clients file; empty if the log does not name the client.
    pub client_name: Span,
    pub method: Span,
    /// As in the request line: a path, with a query if the log has one.
    pub target: Span,
    /// A query that the log has apart from the target.
    pub query: Span,
    /// Empty if the log does not say.
    pub host: Span,
    /// Whether the client used https, if the log says so.
    pub secure: Option<bool>,
    pub status: Option<u16>,
    pub grpc_status: Option<u8>,
    /// What the rules decided, if the log is one of this gateway.
    pub decision: Option<LoggedDecision>,
    /// Whether this gateway has responded that it knows no client with this request.
    pub is_unauthorized: bool,
    /// Whether the time was given without a zone.
    pub lacks_zone: bool,
    pub cost: LoggedCost,
    /// Positions in the list of fields.
    pub headers: (u32, u32),
}

/// What the rules of a route decide together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoggedDecision {
    Admitted,
    /// Admitted after a wait for a window or a slot.
    Delayed,
    Refused,
}

/// A field of a line: its position among the [`LoggedFields`], first of the request, then of the response, and its value.
pub type HeaderSpan = (u16, Span);

/// Why a line is not a request that rules decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoRequest {
    /// The line cannot be read.
    Bad(&'static str),
    /// The line is about something that was answered before any rule decided, such as a malformed request.
    Rejected,
}

impl From<Malformed> for NoRequest {
    fn from(_: Malformed) -> NoRequest {
        NoRequest::Bad("it is not a JSON object")
    }
}

impl LogFormat {
    /// Reads `auto`, `combined`, `json`, or `json:FIELD=KEY,…`. `logged` are the fields that the configuration reads.
    ///
    /// # Errors
    ///
    /// A message for the user.
    pub fn parse(text: &str, logged: LoggedFields) -> Result<LogFormat, String> {
        let (name, fields) = text.split_once(':').unwrap_or((text, ""));
        let syntax = match name {
            "auto" => Syntax::Any,
            "combined" | "common" | "nginx" | "apache" => Syntax::Combined,
            "json" | "caddy" | "traefik" | "envoy" | "transom" => Syntax::Json,
            _ => return Err(format!("`{name}` is no format: write `auto`, `combined`, `json` or `json:FIELD=KEY,…`")),
        };
        let mut keys = KeyTree::default();
        for (key, field, rank) in KNOWN_KEYS {
            keys.insert(key, field, rank);
        }
        for (key, field) in COST_KEYS.into_iter().filter(|_| logged.costs) {
            keys.insert(key, field, 1);
        }
        let request_fields = logged.request.len();
        for (position, header) in logged.request.iter().chain(&logged.response).enumerate() {
            let (name, field) = (header.as_str(), Field::Header(position as u16));
            let (canonical, variable) = (canonical_name(name), name.replace('-', "_"));
            // Of Caddy, Traefik and nginx; then the name itself.
            let names = match position >= request_fields {
                false => vec![
                    (format!("request.headers.{canonical}"), 1),
                    (format!("request.headers.{name}"), 1),
                    (format!("request_{canonical}"), 1),
                    (format!("http_{variable}"), 1),
                    (name.to_owned(), 2),
                    (variable, 3),
                ],
                true => vec![
                    (format!("resp_headers.{canonical}"), 1),
                    (format!("resp_headers.{name}"), 1),
                    (format!("downstream_{canonical}"), 1),
                    (format!("origin_{canonical}"), 2),
                    (format!("sent_http_{variable}"), 1),
                    (format!("upstream_http_{variable}"), 2),
                ],
            };
            names.iter().for_each(|(name, rank)| keys.insert(name, field, *rank));
            // As this gateway spells it.
            if *header == http::header::REFERER {
                keys.insert("referrer", field, 3);
            }
        }
        for assignment in fields.split(',').filter(|assignment| !assignment.is_empty()) {
            let (name, key) = assignment.split_once('=').ok_or(format!("`{assignment}` is not `FIELD=KEY`"))?;
            let header = || {
                let (kind, name) = name.split_once(':')?;
                let (names, first) = match kind {
                    "header" => (&logged.request, 0),
                    "response" => (&logged.response, request_fields),
                    _ => return None,
                };
                let position = names.iter().position(|known| known.as_str().eq_ignore_ascii_case(name));
                // Fields that the configuration does not read have no effect.
                Some(Field::Header(position.map_or(u16::MAX, |position| (first + position) as u16)))
            };
            let known = NAMES.iter().find(|(known, _)| *known == name).map(|(_, field)| *field);
            let field = known.or_else(header).ok_or_else(|| {
                let names: Vec<String> = NAMES.iter().map(|(name, _)| format!("`{name}`")).collect();
                format!("`{name}` is no field: write {}, `header:NAME` or `response:NAME`", names.join(", "))
            })?;
            if syntax == Syntax::Combined {
                return Err("only the fields of JSON can be named".to_owned());
            }
            keys.insert(key, field, 0);
        }
        let position = |name: &str| logged.request.iter().position(|known| known.as_str() == name).map(|at| at as u16);
        Ok(LogFormat { syntax, keys, user_agent: position("user-agent"), referrer: position("referer") })
    }

    /// Parses a line without its end. Spans are positions in the line; `headers` receives the request fields.
    pub fn parse_line(&self, line: &[u8], headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        match self.syntax {
            Syntax::Any if line.trim_ascii_start().first() == Some(&b'{') => self.parse_json(line, headers),
            Syntax::Json => self.parse_json(line, headers),
            Syntax::Any | Syntax::Combined => self.parse_combined(line, headers),
        }
    }

    /// `client - user [time] "request" status bytes "referrer" "user agent"`, also with the virtual host in front; anything
    /// may follow, such as `X-Forwarded-For` in quotes at the end (`main` of nginx). In the place of the client there can be the
    /// whole `X-Forwarded-For`. ingress-nginx writes `client - [list] - user`, where the list has the client that it found, or
    /// `X-Forwarded-For` with its own peer.
    fn parse_combined(&self, line: &[u8], headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        let first_end = memchr(b' ', line).ok_or(NoRequest::Bad("it is in no known format"))?;
        let (mut host, mut start) = (Span::default(), 0);
        let mut found = client_or_list(line, start);
        if found.is_none() {
            (host, start) = (span(0, first_end, false), first_end + 1);
            found = client_or_list(line, start);
        }
        let (mut client, mut forwarded_for, client_end) =
            found.ok_or(NoRequest::Bad("the client is not an address"))?;
        let mut before_user = client_end;
        if let Some(list) = line[client_end..].strip_prefix(b" - [")
            && let Some(length) = memchr(b']', list).filter(|length| is_address_list(&list[..*length]))
        {
            before_user = client_end + 4 + length + 1;
            match memchr(b',', &list[..length]) {
                Some(_) => forwarded_for = span(client_end + 4, length, false),
                None => client = parse_address(&list[..length]).unwrap_or(client),
            }
        }
        // The name of the user may contain a bracket, but no quote.
        let starts = memchr_iter(b'[', line).filter_map(|at| {
            let is_time = line.get(at + 27..at + 30) == Some(b"] \"");
            Some((at, timestamp::common_log(line.get(at + 1..at + 27)?).filter(|_| is_time)?))
        });
        let (at, time_ms) =
            { starts }.next().ok_or(NoRequest::Bad("it has no time such as [10/Oct/2000:13:55:36 -0700]"))?;
        let request = quoted(line, at + 29).ok_or(NoRequest::Bad("the request has no closing quote"))?;
        let after = end_of(request);
        let status = line.get(after + 1..after + 4).and_then(parse_status);
        let status = status.ok_or(NoRequest::Bad("it has no status"))?;
        let (method, target) = split_request(request, line).ok_or(NoRequest::Rejected)?;
        let first_header = headers.len() as u32;
        let referrer = next_quoted(line, after);
        let user_agent = referrer.and_then(|referrer| next_quoted(line, end_of(referrer)));
        for (position, value) in [(self.referrer, referrer), (self.user_agent, user_agent)] {
            let value = value.filter(|value| !matches!(value.of(line), b"" | b"-"));
            headers.extend(position.zip(value));
        }
        if forwarded_for.len == 0 && before_user == client_end {
            forwarded_for = user_agent.map_or(Span::default(), |agent| trailing_list(line, end_of(agent)));
        }
        // This gateway names the client where nginx and Apache name the user.
        let user = line[before_user..at].strip_prefix(b" - ").and_then(|user| user.strip_suffix(b" "));
        let client_name = user
            .filter(|user| *user != b"-")
            .map(|user| span(before_user + 3, user.len(), memchr(b'\\', user).is_some()));
        Ok(LogLine {
            time_ms,
            duration_ms: None,
            client,
            forwarded_for,
            client_name: client_name.unwrap_or_default(),
            method,
            target,
            query: Span::default(),
            host,
            secure: None,
            status: Some(status),
            grpc_status: None,
            decision: None,
            is_unauthorized: false,
            lacks_zone: false,
            cost: LoggedCost::default(),
            headers: (first_header, headers.len() as u32),
        })
    }

    fn parse_json(&self, line: &[u8], headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        let mut found = JsonFields { first_header: headers.len(), ..JsonFields::default() };
        let mut scanner = Scanner::new(line);
        found.read_object(&self.keys, line, &mut scanner, headers)?;
        if !scanner.is_at_end() {
            return Err(Malformed.into());
        }
        found.finish(line, headers)
    }
}

impl KeyTree {
    fn insert(&mut self, key: &str, field: Field, rank: u8) {
        self.insert_path(&key.split('.').collect::<Vec<_>>(), field, rank);
        // A name may contain a dot.
        if key.contains('.') {
            self.insert_path(&[key], field, rank);
        }
    }

    fn insert_path(&mut self, path: &[&str], field: Field, rank: u8) {
        let Some((key, rest)) = path.split_first() else { return };
        let key = key.as_bytes();
        let position = self.nodes.iter().position(|node| *node.key == *key).unwrap_or(self.nodes.len());
        if position == self.nodes.len() {
            self.nodes.push(KeyNode { key: key.into(), first_word: first_word(key, key.len()), ..KeyNode::default() });
            self.index();
        }
        let node = &mut self.nodes[position];
        match rest {
            [] if node.field.is_none_or(|(_, known)| rank < known) => node.field = Some((field, rank)),
            [] => {}
            rest => node.members.insert_path(rest, field, rank),
        }
    }

    /// Fills the slots.
    fn index(&mut self) {
        self.slots = vec![0; (4 * self.nodes.len()).next_power_of_two()];
        for position in 0..self.nodes.len() {
            let node = &self.nodes[position];
            let mut slot = self.slot(node.first_word, node.key.len());
            while self.slots[slot] != 0 {
                slot = (slot + 1) % self.slots.len();
            }
            self.slots[slot] = position as u16 + 1;
        }
    }

    fn slot(&self, first_word: u64, len: usize) -> usize {
        let hash = (first_word ^ len as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (hash >> 32) as usize & (self.slots.len() - 1)
    }

    #[inline]
    fn get(&self, key: Span, line: &[u8]) -> Option<&KeyNode> {
        if self.slots.is_empty() {
            return None;
        }
        let len = key.len as usize;
        let first_word = first_word(line.get(key.at as usize..)?, len);
        let mut slot = self.slot(first_word, len);
        loop {
            let node = &self.nodes[usize::from(*self.slots.get(slot)?).checked_sub(1)?];
            if node.first_word == first_word && node.key.len() == len && (len <= 8 || *node.key == *key.of(line)) {
                return Some(node);
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
    }
}

/// The first eight bytes of a key; zeros behind a shorter one. `text` begins with the key.
#[inline]
fn first_word(text: &[u8], len: usize) -> u64 {
    let word = text.first_chunk().copied().unwrap_or_else(|| {
        let mut padded = [0; 8];
        padded[..text.len()].copy_from_slice(text);
        padded
    });
    let word = u64::from_le_bytes(word);
    if len < 8 { word & ((1 << (8 * len)) - 1) } else { word }
}

/// The fields of a line of JSON.
#[derive(Default)]
struct JsonFields {
    time: Option<(u8, timestamp::Time)>,
    /// How the line calls its time.
    time_field: Option<Field>,
    /// Its rank, in thousandths of the unit.
    duration: Option<(u8, u64, DurationUnit)>,
    delay_ms: Option<u64>,
    client_name: Span,
    has_decisions: bool,
    client: Option<(u8, ClientAddress, Span)>,
    has_client: bool,
    forwarded_for: Span,
    method: (u8, Span),
    target: (u8, Span),
    query: Span,
    request_line: Option<Span>,
    host: (u8, Span),
    secure: Option<bool>,
    status: Option<(u8, u16)>,
    grpc_status: Option<u8>,
    has_refused_by: bool,
    /// `None` if there is no route; `Some(false)` if it is `null`.
    has_route: Option<bool>,
    has_error: bool,
    cost: LoggedCost,
    first_header: usize,
}

impl JsonFields {
    fn read_object<'a>(
        &mut self,
        keys: &KeyTree,
        line: &'a [u8],
        scanner: &mut Scanner<'a>,
        headers: &mut Vec<HeaderSpan>,
    ) -> Result<(), Malformed> {
        scanner.object(&mut |scanner, key| {
            let Some(node) = keys.get(key, line) else { return scanner.skip() };
            match scanner.value()? {
                Value::Object if node.members.nodes.is_empty() => {
                    self.has_decisions |= matches!(node.field, Some((Field::Decisions, _)));
                    self.has_refused_by |= matches!(node.field, Some((Field::RefusedBy, _)));
                    let object = scanner.nested()?;
                    match node.field {
                        Some((Field::Usage, _)) => self.cost.usage = object,
                        Some((Field::Reserved, _)) => self.cost.reserved = object,
                        Some((Field::Cost, _)) => self.cost.cost = object,
                        _ => {}
                    }
                }
                Value::Object => self.read_object(&node.members, line, scanner, headers)?,
                Value::Array => {
                    let (first, has_items) = scanner.array()?;
                    match (node.field, first) {
                        (Some((Field::RefusedBy, _)), _) => self.has_refused_by |= has_items,
                        (Some((field @ Field::Header(_), rank)), Some(text)) => {
                            self.set(field, rank, text, line, headers)
                        }
                        _ => {}
                    }
                }
                Value::Text(text) | Value::Number(text) => {
                    if let Some((field, rank)) = node.field {
                        self.set(field, rank, text, line, headers);
                    }
                }
                Value::Null if matches!(node.field, Some((Field::Route, _))) => self.has_route = Some(false),
                Value::Null | Value::Bool(_) => {}
            }
            Ok(())
        })
    }

    fn set(&mut self, field: Field, rank: u8, text: Span, line: &[u8], headers: &mut Vec<HeaderSpan>) {
        let bytes = text.of(line);
        let replace = |known: &mut (u8, Span)| {
            if known.1.len == 0 || rank < known.0 {
                *known = (rank, text);
            }
        };
        match field {
            Field::Time | Field::EnvoyTime | Field::EndTime => {
                if self.time.is_none_or(|(known, _)| rank < known)
                    && let Some(time) = timestamp::parse(bytes)
                {
                    self.time = Some((rank, time));
                    self.time_field = Some(field);
                }
            }
            Field::Duration(unit) => {
                if self.duration.is_none_or(|(known, ..)| rank < known)
                    && let Some(thousandths) = timestamp::in_thousandths(bytes)
                {
                    self.duration = Some((rank, thousandths, unit));
                }
            }
            Field::Delay => self.delay_ms = timestamp::in_thousandths(bytes).map(|thousandths| thousandths / 1000),
            Field::ClientName => self.client_name = text,
            Field::Decisions => {}
            Field::GrpcStatus => self.grpc_status = number(bytes),
            Field::Client => {
                self.has_client = true;
                if self.client.is_none_or(|(known, ..)| rank < known) {
                    self.client = parse_client(text, line).map(|(client, list)| (rank, client, list)).or(self.client);
                }
            }
            Field::ForwardedFor => {
                self.forwarded_for = Some(text).filter(|_| is_address_list(bytes)).unwrap_or_default()
            }
            Field::Method => replace(&mut self.method),
            Field::Target => replace(&mut self.target),
            Field::Query => self.query = text,
            Field::RequestLine => self.request_line = Some(text),
            Field::Host => replace(&mut self.host),
            Field::Scheme => self.secure = Some(bytes.eq_ignore_ascii_case(b"https")),
            Field::Status => {
                if self.status.is_none_or(|(known, _)| rank < known) {
                    self.status = parse_status(bytes).map(|status| (rank, status)).or(self.status);
                }
            }
            // Caddy replaces secrets by this word.
            Field::Header(position) if !matches!(bytes, b"" | b"-" | b"REDACTED") => {
                if !headers[self.first_header..].iter().any(|(known, _)| *known == position) {
                    headers.push((position, text));
                }
            }
            Field::Header(_) => {}
            Field::RefusedBy => self.has_refused_by |= !bytes.is_empty(),
            Field::Model => self.cost.model = text,
            Field::BytesReceived => self.cost.bytes_received = number(bytes),
            Field::BytesSent => self.cost.bytes_sent = number(bytes),
            Field::Usage | Field::Reserved | Field::Cost => {}
            Field::Route => self.has_route = Some(true),
            Field::Error => self.has_error = true,
        }
    }

    fn finish(mut self, line: &[u8], headers: &[HeaderSpan]) -> Result<LogLine, NoRequest> {
        if let Some((method, target)) = self.request_line.and_then(|request| split_request(request, line)) {
            self.method.1 = if self.method.1.len == 0 { method } else { self.method.1 };
            self.target.1 = if self.target.1.len == 0 { target } else { self.target.1 };
        }
        let (_, time) = self.time.ok_or(NoRequest::Bad("it has no time"))?;
        let has_request = self.method.1.len > 0 && self.target.1.len > 0;
        let has_no_request = self.request_line.is_some() || self.has_error;
        let (_, client, list) = self.client.ok_or(match self.has_client {
            true => NoRequest::Bad("the client is not an address"),
            false => NoRequest::Bad("it has no client"),
        })?;
        let status = self.status.map(|(_, status)| status);
        // The gateway answers these requests before rules decide: malformed ones (404 says that there is no route), and those
        // that announce too large a body.
        let is_rejected = self.has_error
            && match self.has_route {
                Some(false) => status != Some(404),
                Some(true) => status == Some(413) && !self.has_decisions,
                None => false,
            };
        match has_request {
            false if has_no_request => return Err(NoRequest::Rejected),
            false => return Err(NoRequest::Bad("it has no method or no path")),
            true if is_rejected => return Err(NoRequest::Rejected),
            true => {}
        }
        // In lines without the decisions of rules, a 429 without the rule may come from the upstream server.
        let is_denied = self.has_error && status == Some(403) && !self.has_decisions;
        let is_known = self.has_route.is_some()
            && !is_denied
            && (self.has_decisions || self.has_refused_by || status != Some(429));
        let decision = is_known.then_some(match self.delay_ms {
            _ if self.has_refused_by => LoggedDecision::Refused,
            Some(_) => LoggedDecision::Delayed,
            None => LoggedDecision::Admitted,
        });
        let duration_ms = self.duration.map(|(_, thousandths, unit)| match unit {
            DurationUnit::ByTime if self.time_field == Some(Field::EnvoyTime) => thousandths / 1000,
            DurationUnit::Seconds | DurationUnit::ByTime => thousandths,
            DurationUnit::Milliseconds => thousandths / 1000,
            DurationUnit::Nanoseconds => thousandths / 1_000_000_000,
        });
        let taken_ms = duration_ms.filter(|_| self.time_field == Some(Field::EndTime)).unwrap_or(0);
        Ok(LogLine {
            time_ms: time.unix_ms.saturating_sub(taken_ms),
            duration_ms: duration_ms
                .map(|ms| u32::try_from(ms.saturating_sub(self.delay_ms.unwrap_or(0))).unwrap_or(u32::MAX)),
            client,
            forwarded_for: if list.len > 0 { list } else { self.forwarded_for },
            client_name: self.client_name,
            method: self.method.1,
            target: self.target.1,
            query: self.query,
            host: self.host.1,
            secure: self.secure,
            status,
            grpc_status: self.grpc_status,
            decision,
            is_unauthorized: self.has_error && self.has_route.is_some() && status == Some(401),
            lacks_zone: !time.has_zone,
            cost: self.cost,
            headers: (self.first_header as u32, headers.len() as u32),
        })
    }
}

fn number<T: FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

impl LoggedCost {
    /// The number of a member of one of the objects.
    pub fn member(object: Span, name: &str, line: &[u8]) -> Option<Decimal> {
        let (text, mut found) = (object.of(line), None);
        let mut scanner = Scanner::new(text);
        let read = scanner.object(&mut |scanner, key| {
            match scanner.value()? {
                Value::Number(number) if key.of(text) == name.as_bytes() => {
                    found = std::str::from_utf8(number.of(text)).ok().and_then(Decimal::parse);
                }
                Value::Object | Value::Array => scanner.skip_nested()?,
                _ => {}
            }
            Ok(())
        });
        read.ok().and(found)
    }

    pub fn model(self, line: &[u8]) -> Option<&str> {
        std::str::from_utf8(self.model.of(line)).ok().filter(|model| !model.is_empty())
    }
}

fn span(at: usize, len: usize, is_escaped: bool) -> Span {
    Span { at: at as u32, len: len as u32, is_escaped }
}

/// The text between the quote at `at` and the next one that is not escaped.
fn quoted(line: &[u8], at: usize) -> Option<Span> {
    let (start, mut end, mut is_escaped) = (at + 1, at + 1, false);
    loop {
        end += memchr(b'"', line.get(end..)?)?;
        let backslashes = line[start..end].iter().rev().take_while(|byte| **byte == b'\\').count();
        is_escaped |= backslashes > 0;
        if backslashes % 2 == 0 {
            let is_escaped = is_escaped || memchr(b'\\', &line[start..end]).is_some();
            return Some(span(start, end - start, is_escaped));
        }
        end += 1;
    }
}

/// The first text in quotes from a position on.
fn next_quoted(line: &[u8], from: usize) -> Option<Span> {
    quoted(line, from + memchr(b'"', line.get(from..)?)?)
}

/// The position behind the closing quote.
fn end_of(quoted: Span) -> usize {
    (quoted.at + quoted.len) as usize + 1
}

/// Method and target of a request line; `None` if it is none.
fn split_request(request: Span, line: &[u8]) -> Option<(Span, Span)> {
    let text = request.of(line);
    let method_len = memchr(b' ', text)?;
    let target_end = memrchr(b' ', text).filter(|end| text[end + 1..].starts_with(b"HTTP/"))?;
    let target_len = target_end.checked_sub(method_len + 1)?;
    let is_method =
        method_len > 0 && text[..method_len].iter().all(|byte| byte.is_ascii_uppercase() || b"-_".contains(byte));
    (is_method && target_len > 0).then(|| (request.part(0, method_len), request.part(method_len + 1, target_len)))
}

/// The text in quotes at the end of a line, if it is a list of addresses. `from` is behind the user agent, which clients choose.
fn trailing_list(line: &[u8], from: usize) -> Span {
    let start =
        line.strip_suffix(b"\"").and_then(|rest| memrchr(b'"', rest.get(from..)?)).map(|quote| from + quote + 1);
    let start = start.filter(|start| is_address_list(&line[*start..line.len() - 1]));
    start.map_or(Span::default(), |start| span(start, line.len() - 1 - start, false))
}

/// The address at a position, or the last of a list, with the list and their end.
fn client_or_list(line: &[u8], start: usize) -> Option<(ClientAddress, Span, usize)> {
    let next_blank = |from: usize| memchr(b' ', &line[from..]).map_or(line.len(), |at| from + at);
    let mut end = next_blank(start);
    while line[..end].ends_with(b",") && end < line.len() {
        end = next_blank(end + 1);
    }
    let text = span(start, end - start, false);
    let (client, list) = parse_client(text, line)?;
    Some((client, list, end))
}

/// The client in a text, and `X-Forwarded-For` if the text is a list: its last address is then the client, since clients write
/// the first ones.
fn parse_client(text: Span, line: &[u8]) -> Option<(ClientAddress, Span)> {
    let bytes = text.of(line);
    match memrchr(b',', bytes) {
        None => Some((parse_address(bytes)?, Span::default())),
        Some(comma) => Some((parse_address(bytes[comma + 1..].trim_ascii())?, text)),
    }
}

/// Whether a text is what `X-Forwarded-For` has: names of nodes, separated by commas, of which the last is an address. Clients write
/// the first ones, such as `unknown`.
fn is_address_list(text: &[u8]) -> bool {
    let is_sign = |byte: &u8| byte.is_ascii_alphanumeric() || b".:[]_-".contains(byte);
    let mut nodes = text.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    nodes.next().and_then(parse_address).is_some() && nodes.all(|node| node.iter().all(is_sign))
}

/// An address, also with a port.
fn parse_address(text: &[u8]) -> Option<ClientAddress> {
    if let Some(address) = parse_ipv4(text) {
        return Some(ClientAddress::Ip(address.into()));
    }
    let text = std::str::from_utf8(text).ok()?;
    let parse = |text: &str| {
        let address = text.parse::<ClientAddress>().ok();
        address.or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip().into()))
    };
    parse(text).or_else(|| parse(text.strip_prefix('[')?.strip_suffix(']')?))
}

/// An address of IPv4 alone, the usual case: faster than `str::parse`, which has to know that the text is UTF-8.
fn parse_ipv4(text: &[u8]) -> Option<Ipv4Addr> {
    let mut octets = [0; 4];
    let mut parts = text.split(|byte| *byte == b'.');
    for octet in &mut octets {
        // A leading zero is octal to some programs.
        let part = parts.next().filter(|part| matches!(part, [_] | [b'1'..=b'9', _] | [b'1'..=b'9', _, _]))?;
        let value = part
            .iter()
            .try_fold(0_u16, |value, byte| byte.is_ascii_digit().then(|| value * 10 + u16::from(byte - b'0')))?;
        *octet = u8::try_from(value).ok()?;
    }
    parts.next().is_none().then(|| octets.into())
}

fn parse_status(text: &[u8]) -> Option<u16> {
    match *text {
        [a @ b'0'..=b'9', b @ b'0'..=b'9', c @ b'0'..=b'9'] => {
            Some([a, b, c].iter().fold(0, |value, digit| value * 10 + u16::from(digit - b'0')))
        }
        _ => None,
    }
}

/// `X-Api-Key` for `x-api-key`.
fn canonical_name(name: &str) -> String {
    let mut upper = true;
    let sign = |sign: char| {
        let cased = if upper { sign.to_ascii_uppercase() } else { sign };
        upper = sign == '-';
        cased
    };
    name.chars().map(sign).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn format(text: &str, request_fields: &[&'static str]) -> LogFormat {
        let request = request_fields.iter().map(|name| HeaderName::from_static(name)).collect();
        LogFormat::parse(
            text,
            LoggedFields { request, response: vec![HeaderName::from_static("x-cost")], costs: false },
        )
        .unwrap()
    }

    /// What a line says: time, client, method, target, host, status, and the fields by their position.
    fn read(format: &LogFormat, line: &str) -> Result<String, NoRequest> {
        let mut headers = Vec::new();
        let parsed = format.parse_line(line.as_bytes(), &mut headers)?;
        let text = |span: Span| String::from_utf8_lossy(span.of(line.as_bytes())).into_owned();
        let (method, target, host) = (text(parsed.method), text(parsed.target), text(parsed.host));
        let status = parsed.status.map(|status| status.to_string()).unwrap_or_default();
        let fields: Vec<String> =
            headers.iter().map(|(position, value)| format!(" {position}={}", text(*value))).collect();
        Ok(format!("{} {} {method} {target} [{host}] {status}{}", parsed.time_ms, parsed.client, fields.concat()))
    }

    #[test]
    fn forwarded_addresses_are_read() {
        let format = format("auto", &["user-agent"]);
        let rest = r#"[10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1" 200 1 "-" "curl/8.5.0""#;
        let agent = |agent: &str| format!("10.0.0.1 - - {}", rest.replace("curl/8.5.0", agent));
        for (line, client, list, user) in [
            (format!(r#"10.0.0.1 - - {rest} "203.0.113.7""#), "10.0.0.1", "203.0.113.7", ""),
            (format!(r#"10.0.0.1 - ann {rest} "203.0.113.7, 10.0.0.9""#), "10.0.0.1", "203.0.113.7, 10.0.0.9", "ann"),
            (format!(r#"10.0.0.1 - - {rest} "2001:db8::7,[2001:db8::8]:80""#), "10.0.0.1", "2001:db8::7,[2001:db8::8]:80", ""),
            (format!(r#"10.0.0.1 - - {rest} "unknown, _x-1, 203.0.113.7""#), "10.0.0.1", "unknown, _x-1, 203.0.113.7", ""),
            (format!(r#"10.0.0.1 - - {rest} "203.0.113.7, unknown""#), "10.0.0.1", "", ""),
            (format!(r#"10.0.0.1 - - {rest} "a b, 203.0.113.7""#), "10.0.0.1", "", ""),
            (format!(r#"10.0.0.1 - - {rest} "-""#), "10.0.0.1", "", ""),
            (format!(r#"10.0.0.1 - - {rest} "0.005""#), "10.0.0.1", "", ""),
            (format!(r#"10.0.0.1 - - {rest} "unknown""#), "10.0.0.1", "", ""),
            (format!("10.0.0.1 - - {rest}"), "10.0.0.1", "", ""),
            // Clients write the user agent and the referrer.
            (agent("8.8.8.8"), "10.0.0.1", "", ""),
            (agent("8.8.8.8").replace(r#" "8.8.8.8""#, "").replace(r#""-""#, r#""8.8.8.8""#), "10.0.0.1", "", ""),
            (agent(r#"\"8.8.8.8"#), "10.0.0.1", "", ""),
            (agent(r#"\" \"8.8.8.8"#) + r#" "203.0.113.7""#, "10.0.0.1", "203.0.113.7", ""),
            // `X-Forwarded-For` in the place of the client.
            (format!("8.8.8.8, 203.0.113.7,10.0.0.1 - ann {rest}"), "10.0.0.1", "8.8.8.8, 203.0.113.7,10.0.0.1", "ann"),
            (format!("example.com 8.8.8.8, 10.0.0.1 - - {rest}"), "10.0.0.1", "8.8.8.8, 10.0.0.1", ""),
            (
                r#"{"time":"2000-10-10T20:55:36Z","remote_addr":"8.8.8.8, 10.0.0.1","request":"GET / HTTP/1.1"}"#.to_owned(),
                "10.0.0.1",
                "8.8.8.8, 10.0.0.1",
                "",
            ),
            // ingress-nginx, before 0.22 and up to 0.25.
            (format!("10.0.0.1 - [203.0.113.7, 10.0.0.1] - - {rest} 85 0.001 [app] 10.1.0.1:80 1 0.001 200"), "10.0.0.1", "203.0.113.7, 10.0.0.1", ""),
            (format!("10.0.0.1 - [203.0.113.7] - ann {rest} 85 0.001 [app] 10.1.0.1:80 1 0.001 200"), "203.0.113.7", "", "ann"),
            (format!("203.0.113.7 - [x] - {rest}"), "203.0.113.7", "", "[x] -"),
            (
                r#"{"time":"2000-10-10T20:55:36Z","remote_addr":"10.0.0.1","request":"GET / HTTP/1.1","http_x_forwarded_for":"203.0.113.7"}"#.to_owned(),
                "10.0.0.1",
                "203.0.113.7",
                "",
            ),
        ] {
            let parsed = format.parse_line(line.as_bytes(), &mut Vec::new()).unwrap();
            let text = |span: Span| std::str::from_utf8(span.of(line.as_bytes())).unwrap();
            let found = (parsed.client.to_string(), text(parsed.forwarded_for), text(parsed.client_name));
            assert_eq!((found.0.as_str(), found.1, found.2), (client, list, user), "{line}");
        }
    }

    #[test]
    fn lines_of_nginx_and_apache_are_read() {
        let format = format("auto", &["user-agent", "referer"]);
        for (line, expected) in [
            (
                r#"203.0.113.7 - - [10/Oct/2000:13:55:36 -0700] "GET /a?b=c HTTP/1.1" 200 2326 "-" "curl/8.5.0""#,
                "971211336000 203.0.113.7 GET /a?b=c [] 200 0=curl/8.5.0",
            ),
            (
                r#"2001:db8::7 - al [ice [10/Oct/2000:20:55:36 +0000] "POST /a b HTTP/2.0" 429 0 "https://x/?\"q\"" "a \x22b\x22" extra"#,
                r#"971211336000 2001:db8::7 POST /a b [] 429 1=https://x/?\"q\" 0=a \x22b\x22"#,
            ),
            (
                r#"api.example.com:443 203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1" 200 1 "-" "-""#,
                "971211336000 203.0.113.7 GET / [api.example.com:443] 200",
            ),
            // The common format.
            (
                r#"203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.0" 304 -"#,
                "971211336000 203.0.113.7 GET / [] 304",
            ),
        ] {
            assert_eq!(read(&format, line).as_deref(), Ok(expected), "{line}");
        }
        for (line, problem) in [
            (r#"203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] "\x16\x03\x01" 400 157 "-" "-""#, NoRequest::Rejected),
            (r#"203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] "-" 408 0 "-" "-""#, NoRequest::Rejected),
            (
                r#"host.example - - [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1" 200 1"#,
                NoRequest::Bad("the client is not an address"),
            ),
            ("nonsense", NoRequest::Bad("it is in no known format")),
            (
                r#"203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1"#,
                NoRequest::Bad("the request has no closing quote"),
            ),
            (
                r#"203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1" - 1"#,
                NoRequest::Bad("it has no status"),
            ),
        ] {
            assert_eq!(read(&format, line), Err(problem), "{line}");
        }
    }

    #[test]
    fn a_user_name_cannot_set_the_time() {
        let line = r#"203.0.113.7 - [01/Jan/1999:00:00:00 +0000] [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1" 200 1"#;
        assert_eq!(read(&format("combined", &[]), line).as_deref(), Ok("971211336000 203.0.113.7 GET / [] 200"));
    }

    #[test]
    fn lines_of_json_are_read() {
        let format = format("auto", &["x-api-key"]);
        for (line, expected) in [
            // This gateway.
            (
                r#"{"bytes":98,"client":"127.0.0.1","duration_ms":0.4,"host":"a","method":"GET","path":"/b","protocol":"HTTP/1.1","route":"all","status":200,"time":"2000-10-10T20:55:36.123Z","upstream":"u"}"#,
                "971211336123 127.0.0.1 GET /b [a] 200",
            ),
            (
                r#"{"time":"2000-10-10T20:55:36.123Z","request_id":"mq2ewd3k6v7nzr4a","method":"GET","host":"a","path":"/b","protocol":"HTTP/1.1","client":"127.0.0.1","client_name":"acme","plan":"free","route":"search","status":429,"bytes_received":0,"bytes_sent":173,"duration_ms":0.05,"rules":{"per-client":"refused"},"refused_by":[{"rule":"per-client","window":"per-client-minute","key":"acme","plan":"free"}]}"#,
                "971211336123 127.0.0.1 GET /b [a] 429",
            ),
            // Caddy logs when the response ends.
            (
                r#"{"level":"info","ts":971211337.5,"logger":"http.log.access","msg":"handled request","request":{"remote_ip":"127.0.0.1","remote_port":"41342","client_ip":"203.0.113.7","proto":"HTTP/2.0","method":"GET","host":"localhost","uri":"/a?b","headers":{"User-Agent":["curl/7.82.0"],"X-Api-Key":["k1"]},"tls":{"version":772}},"bytes_read":0,"user_id":"","duration":1.5,"size":10900,"status":200,"resp_headers":{"Server":["Caddy"]}}"#,
                "971211336000 203.0.113.7 GET /a?b [localhost] 200 0=k1",
            ),
            (
                r#"{"ts":971211336,"request":{"remote_ip":"127.0.0.1","method":"GET","host":"h","uri":"/","headers":{"X-Api-Key":["REDACTED"]}},"duration":0,"status":200}"#,
                "971211336000 127.0.0.1 GET / [h] 200",
            ),
            // Traefik.
            (
                r#"{"ClientAddr":"203.0.113.7:50000","ClientHost":"203.0.113.7","DownstreamStatus":404,"Duration":1000,"OriginStatus":500,"RequestHost":"w","RequestMethod":"PUT","RequestPath":"/x?y=1","RequestProtocol":"HTTP/1.1","StartUTC":"2000-10-10T20:55:36.5Z","request_X-Api-Key":"k2","time":"2000-10-10T20:55:39Z"}"#,
                "971211336500 203.0.113.7 PUT /x?y=1 [w] 404 0=k2",
            ),
            // Envoy, as Istio configures it.
            (
                r#"{"authority":"e:8080","bytes_sent":0,"downstream_remote_address":"[2001:db8::7]:1234","method":"GET","path":"/","protocol":"HTTP/2","response_code":200,"start_time":"2000-10-10T20:55:36.000Z","x_forwarded_for":"198.51.100.1"}"#,
                "971211336000 2001:db8::7 GET / [e:8080] 200",
            ),
            // nginx with `escape=json`.
            (
                r#"{"time_local":"10/Oct/2000:20:55:36 +0000","remote_addr":"203.0.113.7","request":"GET /a HTTP/1.1","status":"200","http_x_api_key":"k3","http_host":"n"}"#,
                "971211336000 203.0.113.7 GET /a [n] 200 0=k3",
            ),
        ] {
            assert_eq!(read(&format, line).as_deref(), Ok(expected), "{line}");
        }
        for (line, problem) in [
            (
                r#"{"client":"127.0.0.1","error":"the head is malformed","status":400,"time":"2000-10-10T20:55:36Z"}"#,
                NoRequest::Rejected,
            ),
            (
                r#"{"client":"127.0.0.1","error":"…","method":"GET","path":"/","route":null,"status":400,"time":"2000-10-10T20:55:36Z"}"#,
                NoRequest::Rejected,
            ),
            (
                r#"{"client":"127.0.0.1","error":"…","method":"POST","path":"/","route":"all","status":413,"time":"2000-10-10T20:55:36Z"}"#,
                NoRequest::Rejected,
            ),
            (r#"{"client":"127.0.0.1","method":"GET","path":"/"}"#, NoRequest::Bad("it has no time")),
            (r#"{"time":"2000-10-10T20:55:36Z","method":"GET","path":"/"}"#, NoRequest::Bad("it has no client")),
            (
                r#"{"time":"2000-10-10T20:55:36Z","client":"x","method":"GET","path":"/"}"#,
                NoRequest::Bad("the client is not an address"),
            ),
            (r#"{"time":"2000-10-10T20:55:36Z","client":"::1"}"#, NoRequest::Bad("it has no method or no path")),
            (r#"{"time":"2000-10-10T20:55:36Z""#, NoRequest::Bad("it is not a JSON object")),
        ] {
            assert_eq!(read(&format, line), Err(problem), "{line}");
        }
    }

    #[test]
    fn keys_of_json_can_be_named() {
        let named =
            format("json:client=peer.address,path=p,method=m,time=t,header:X-Api-Key=key,status=s", &["x-api-key"]);
        let line =
            r#"{"t":971211336,"peer":{"address":"203.0.113.7"},"m":"GET","p":"/a","path":"/other","key":"k","s":200}"#;
        assert_eq!(read(&named, line).as_deref(), Ok("971211336000 203.0.113.7 GET /a [] 200 0=k"));
        for (text, message) in [
            ("xml", "`xml` is no format"),
            ("json:peer=x", "`peer` is no field"),
            ("json:client", "`client` is not `FIELD=KEY`"),
            ("combined:client=x", "only the fields of JSON"),
        ] {
            let error = LogFormat::parse(text, LoggedFields::default()).unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn decisions_are_known_for_this_gateway_only() {
        let format = format("auto", &[]);
        let decision = |fields: &str| {
            let line = format!(r#"{{"time":"2000-10-10T20:55:36Z","client":"::1","method":"GET","path":"/"{fields}}}"#);
            format.parse_line(line.as_bytes(), &mut Vec::new()).unwrap().decision
        };
        let (admitted, delayed, refused) =
            (Some(LoggedDecision::Admitted), Some(LoggedDecision::Delayed), Some(LoggedDecision::Refused));
        for (fields, expected) in [
            (r#","route":"all","refused_by":["r"]"#, refused),
            (r#","route":"all","refused_by":[]"#, admitted),
            (r#","route":"all""#, admitted),
            (r#","route":"all","refused_by":{"rule":"r"}"#, refused),
            (r#","route":"all","status":429"#, None),
            (r#","route":"all","status":429,"rules":{"r":"admitted"}"#, admitted),
            (r#","route":"all","status":429,"rules":{"r":"refused"},"refused_by":[{"rule":"r"}]"#, refused),
            (r#","route":"all","delay_ms":0.25,"rules":{"r":"delayed"}"#, delayed),
            (r#","route":"all","delay_ms":9.5,"rules":{"r":"refused"},"refused_by":[{"rule":"r"}]"#, refused),
            (r#","status":429"#, None),
        ] {
            assert_eq!(decision(fields), expected, "{fields}");
        }
    }

    #[test]
    fn durations_have_the_unit_of_the_format() {
        let format = format("auto", &[]);
        let read = |fields: &str| {
            let line = format!(r#"{{"client":"::1","method":"GET","path":"/",{fields}}}"#);
            let line = format.parse_line(line.as_bytes(), &mut Vec::new()).unwrap();
            (line.time_ms, line.duration_ms)
        };
        for (fields, expected) in [
            // This gateway: the wait is not part of the duration.
            (r#""time":"1970-01-01T00:01:00.5Z","duration_ms":2500.75"#, (60_500, Some(2500))),
            (r#""time":"1970-01-01T00:01:00.5Z","duration_ms":2500,"delay_ms":2000.0"#, (60_500, Some(500))),
            // Caddy, Envoy, Traefik, nginx.
            (r#""ts":971211396.5,"duration":0.25"#, (971_211_396_250, Some(250))),
            (r#""duration":250,"start_time":"1970-01-01T00:01:00.5Z""#, (60_500, Some(250))),
            (r#""StartUTC":"1970-01-01T00:01:00.5Z","Duration":250000000"#, (60_500, Some(250))),
            (r#""msec":"971211396.500","request_time":"0.250""#, (971_211_396_250, Some(250))),
            (r#""time":"1970-01-01T00:01:00Z""#, (60_000, None)),
        ] {
            assert_eq!(read(fields), expected, "{fields}");
        }
    }

    #[test]
    fn fields_of_the_response_are_behind_those_of_the_request() {
        let format = format("json:response:X-Cost=tokens", &["x-api-key"]);
        for fields in [
            r#""tokens":7"#,
            r#""resp_headers":{"X-Cost":["7"]}"#,
            r#""downstream_X-Cost":"7""#,
            r#""sent_http_x_cost":"7""#,
        ] {
            let line = format!(r#"{{"ts":971211336,"ip":"::1","method":"GET","path":"/",{fields}}}"#);
            assert_eq!(read(&format, &line).as_deref(), Ok("971211336000 ::1 GET / []  1=7"), "{fields}");
        }
    }

    proptest! {
        #[test]
        fn addresses_of_ipv4_are_those_of_the_standard_library(text in "[0-9]{0,4}(\\.[0-9]{0,4}){2,4}", bytes: [u8; 4]) {
            prop_assert_eq!(parse_ipv4(text.as_bytes()), text.parse().ok());
            let address = Ipv4Addr::from(bytes);
            prop_assert_eq!(parse_ipv4(address.to_string().as_bytes()), Some(address));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let format = format("auto", &["user-agent"]);
            let combined = [br#"1.1.1.1 - - [10/Oct/2000:20:55:36 +0000] "GET / HTTP/1.1" 200 1 "-" "-""#.as_slice(), &bytes].concat();
            for line in [bytes.as_slice(), &combined, &combined[bytes.len().min(60)..], &[b"{\"time\":", bytes.as_slice()].concat()] {
                let mut headers = Vec::new();
                let _ = format.parse_line(line, &mut headers);
            }
        }
    }
}
