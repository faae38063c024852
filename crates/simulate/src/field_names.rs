//! What the fields of log lines are called: keys of JSON, variables of nginx, columns. A name says what the field is about.

use http::HeaderName;

use super::json_scanner::Span;

/// The fields of requests and responses that the configuration reads.
#[derive(Clone, Default, Debug)]
pub struct LoggedFields {
    pub request: Vec<HeaderName>,
    pub response: Vec<HeaderName>,
    /// Whether costs depend on usage or bytes.
    pub costs: bool,
}

/// What a field says about the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Field {
    Time,
    /// The time as Envoy calls it; a `duration` beside it is in milliseconds.
    EnvoyTime,
    /// The time of the response, from which the duration has to be subtracted.
    EndTime,
    /// The time of the response, beside that of the start.
    Finished,
    Duration(DurationUnit),
    /// Of this gateway: milliseconds for which rules made the request wait.
    Delay,
    Client,
    /// Of nginx: the peer of the connection, also where `$remote_addr` has been replaced by the client.
    Connection,
    /// Of nginx: the address in the PROXY header.
    ProxyHeader,
    /// An address, a colon and a port, also of IPv6 without brackets.
    ClientAndPort,
    ForwardedFor,
    /// As `ForwardedFor`, where the configuration reads the field too: its position, as of `Header`.
    ForwardedForHeader(u16),
    Method,
    Target,
    /// A path, or a URL that the program behind the log has made.
    Url,
    Query,
    /// Method, target and protocol.
    RequestLine,
    Host,
    Scheme,
    /// Of HAProxy: a frontend, with `~` if the connection has TLS.
    Frontend,
    /// Of ELB, which writes the URL of its listener where others have the target that they received.
    Balancer,
    /// The port of the server, which may say the scheme.
    ServerPort,
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
    /// What `LoggedCost` has.
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
pub enum DurationUnit {
    Seconds,
    Milliseconds,
    Nanoseconds,
    /// Milliseconds in lines of Envoy, else seconds.
    ByTime,
}

/// The names of [`Field`]s in `--format json:…`.
pub const NAMES: [(&str, Field); 14] = [
    ("time", Field::Time),
    ("end_time", Field::EndTime),
    ("client", Field::Client),
    ("client_name", Field::ClientName),
    ("method", Field::Method),
    ("path", Field::Url),
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
const KNOWN_KEYS: [(&str, Field, u8); 85] = [
    ("StartUTC", Field::Time, 1),
    ("EdgeStartTimestamp", Field::Time, 1),
    ("EdgeEndTimestamp", Field::Finished, 1),
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
    ("proxy_protocol_addr", Field::ProxyHeader, 1),
    ("realip_remote_addr", Field::Connection, 1),
    ("request.client_ip", Field::Client, 1),
    ("ClientHost", Field::Client, 1),
    ("ClientIP", Field::Client, 1),
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
    // Of Caddy and Traefik.
    ("request.headers.X-Forwarded-For", Field::ForwardedFor, 1),
    ("request_X-Forwarded-For", Field::ForwardedFor, 1),
    // Of Envoy Gateway.
    ("x-forwarded-for", Field::ForwardedFor, 2),
    ("x-envoy-origin-path", Field::Target, 1),
    (":authority", Field::Host, 1),
    ("method", Field::Method, 1),
    ("request_method", Field::Method, 1),
    ("request.method", Field::Method, 1),
    ("RequestMethod", Field::Method, 1),
    ("ClientRequestMethod", Field::Method, 1),
    ("http_method", Field::Method, 2),
    ("verb", Field::Method, 2),
    ("uri", Field::Url, 1),
    ("request_uri", Field::Target, 1),
    ("request.uri", Field::Target, 1),
    ("RequestPath", Field::Target, 1),
    ("ClientRequestURI", Field::Target, 1),
    ("ClientRequestPath", Field::Target, 2),
    ("path", Field::Url, 2),
    ("request_path", Field::Url, 2),
    ("url", Field::Url, 3),
    ("query", Field::Query, 1),
    ("args", Field::Query, 1),
    ("query_string", Field::Query, 1),
    ("request", Field::RequestLine, 1),
    ("host", Field::Host, 1),
    ("http_host", Field::Host, 1),
    ("request.host", Field::Host, 1),
    ("RequestHost", Field::Host, 1),
    ("ClientRequestHost", Field::Host, 1),
    ("authority", Field::Host, 1),
    ("vhost", Field::Host, 2),
    ("server_name", Field::Host, 3),
    ("scheme", Field::Scheme, 1),
    ("RequestScheme", Field::Scheme, 1),
    ("ClientRequestScheme", Field::Scheme, 1),
    ("status", Field::Status, 1),
    ("response_code", Field::Status, 1),
    ("DownstreamStatus", Field::Status, 1),
    ("EdgeResponseStatus", Field::Status, 1),
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

/// Names of variables in the formats of `formats.rs`, beside those of nginx.
const VARIABLES: [(&str, Field, u8); 13] = [
    ("start", Field::Time, 1),
    ("end", Field::Finished, 1),
    ("client_port", Field::ClientAndPort, 1),
    ("client_list", Field::Client, 1),
    ("peer", Field::Client, 2),
    ("ms", Field::Duration(DurationUnit::Milliseconds), 1),
    ("elb", Field::Balancer, 1),
    // This gateway names the client where others name the user.
    ("user", Field::ClientName, 1),
    ("remote_user", Field::ClientName, 1),
    ("proxy_add_x_forwarded_for", Field::Client, 1),
    ("https", Field::Scheme, 2),
    // Of a pattern of `formats.rs`.
    ("haproxy_frontend", Field::Frontend, 1),
    // Without the query, and as nginx has rewritten it.
    ("uri", Field::Target, 2),
];

/// Names of columns in the extended log file format of the W3C.
const COLUMNS: [(&str, Field, u8); 13] = [
    ("date", Field::EndTime, 1),
    ("c-ip", Field::Client, 1),
    ("cs-method", Field::Method, 1),
    ("cs-uri-stem", Field::Target, 1),
    ("cs-uri-query", Field::Query, 1),
    ("x-host-header", Field::Host, 1),
    ("cs-host", Field::Host, 2),
    ("cs(host)", Field::Host, 2),
    ("cs-protocol", Field::Scheme, 1),
    ("s-port", Field::ServerPort, 2),
    ("sc-status", Field::Status, 1),
    ("x-forwarded-for", Field::ForwardedFor, 1),
    ("x_forwarded_for", Field::ForwardedFor, 1),
];

/// Keys of JSON objects, and what they say: a hash table by the first eight bytes and the length of a key, because every
/// key of every line is searched.
#[derive(Default, Debug)]
pub struct KeyTree {
    nodes: Vec<KeyNode>,
    /// A power of two; 0, or one more than a position in `nodes`.
    slots: Vec<u16>,
}

#[derive(Default, Debug)]
pub struct KeyNode {
    key: Box<[u8]>,
    first_word: u64,
    /// The field, and its rank: the smallest of a line counts.
    pub field: Option<(Field, u8)>,
    pub members: KeyTree,
}

/// The position of a request field among the [`LoggedFields`].
pub fn request_field(logged: &LoggedFields, name: &str) -> Option<u16> {
    logged.request.iter().position(|known| known.as_str().eq_ignore_ascii_case(name)).map(|at| at as u16)
}

/// The position of a response field among the [`LoggedFields`].
pub fn response_field(logged: &LoggedFields, name: &str) -> Option<u16> {
    let position = logged.response.iter().position(|known| known.as_str().eq_ignore_ascii_case(name));
    position.map(|at| (logged.request.len() + at) as u16)
}

/// The known field, which the configuration may read as a header too.
fn read_twice(field: Field, logged: &LoggedFields) -> Field {
    match (field, request_field(logged, "x-forwarded-for")) {
        (Field::ForwardedFor, Some(position)) => Field::ForwardedForHeader(position),
        (field, _) => field,
    }
}

/// What a column of the W3C's format is about. Names do not depend on their case.
pub fn of_column(name: &str, logged: &LoggedFields) -> Option<(Field, u8)> {
    let name = name.to_ascii_lowercase();
    let known = COLUMNS.iter().find(|(known, ..)| *known == name);
    let known = known.map(|(_, field, rank)| (read_twice(*field, logged), *rank));
    let in_parentheses = |prefix: &str| name.strip_prefix(prefix)?.strip_suffix(')');
    known.or_else(|| {
        let request = in_parentheses("cs(").and_then(|name| request_field(logged, name));
        let position = request.or_else(|| in_parentheses("sc(").and_then(|name| response_field(logged, name)))?;
        Some((Field::Header(position), 1))
    })
}

impl KeyTree {
    /// All names that are known without being told. `logged` are the fields that the configuration reads.
    pub fn known(logged: &LoggedFields) -> KeyTree {
        let mut keys = KeyTree::default();
        for (key, field, rank) in KNOWN_KEYS {
            keys.insert(key, read_twice(field, logged), rank);
        }
        for (key, field) in COST_KEYS.into_iter().filter(|_| logged.costs) {
            keys.insert(key, field, 1);
        }
        let request_fields = logged.request.len();
        for (position, header) in logged.request.iter().chain(&logged.response).enumerate() {
            let (name, field) = (header.as_str(), Field::Header(position as u16));
            let (canonical, variable) = (canonical_name(name), name.replace('-', "_"));
            // Of Caddy, Traefik, Cloudflare and nginx; then the name itself.
            let names = match position >= request_fields {
                false => vec![
                    (format!("request.headers.{canonical}"), 1),
                    (format!("request.headers.{name}"), 1),
                    (format!("request_{canonical}"), 1),
                    (format!("RequestHeaders.{name}"), 1),
                    (format!("http_{variable}"), 1),
                    (name.to_owned(), 2),
                    (variable, 3),
                ],
                true => vec![
                    (format!("resp_headers.{canonical}"), 1),
                    (format!("resp_headers.{name}"), 1),
                    (format!("downstream_{canonical}"), 1),
                    (format!("ResponseHeaders.{name}"), 1),
                    (format!("origin_{canonical}"), 2),
                    (format!("sent_http_{variable}"), 1),
                    (format!("upstream_http_{variable}"), 2),
                ],
            };
            names.iter().for_each(|(name, rank)| keys.insert(name, field, *rank));
            // As this gateway and Cloudflare spell them.
            if *header == http::header::REFERER {
                keys.insert("referrer", field, 3);
                keys.insert("ClientRequestReferer", field, 1);
            }
            if *header == http::header::USER_AGENT {
                keys.insert("ClientRequestUserAgent", field, 1);
            }
        }
        keys
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// What a variable of nginx, or of a format of `formats.rs`, is about.
    pub fn of_variable(&self, name: &str) -> Option<(Field, u8)> {
        let known = VARIABLES.iter().find(|(known, ..)| *known == name).map(|(_, field, rank)| (*field, *rank));
        let key = || self.nodes.iter().find(|node| *node.key == *name.as_bytes())?.field;
        // nginx has variables of these names that mean something else, or none.
        let is_of_gateway = |field: Field| {
            matches!(
                field,
                Field::Delay
                    | Field::ClientName
                    | Field::Decisions
                    | Field::RefusedBy
                    | Field::Route
                    | Field::Error
                    | Field::Usage
                    | Field::Model
                    | Field::Reserved
                    | Field::Cost
            )
        };
        let is_variable = |field: Field| !matches!(field, Field::Header(_)) || name.contains("http_");
        known.or_else(|| key().filter(|(field, _)| !is_of_gateway(*field) && is_variable(*field)))
    }

    pub fn insert(&mut self, key: &str, field: Field, rank: u8) {
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
    pub fn get(&self, key: Span, line: &[u8]) -> Option<&KeyNode> {
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
