//! What a line of an access log says. A parsed line consists of positions in the buffer, so that parsing copies nothing.

use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;

use memchr::{memchr, memrchr};

use super::field_names::{DurationUnit, Field};
use super::json_scanner::{Escape, Malformed, Scanner, Span, Value};
use super::timestamp;
use transom_http::client_address::ClientAddress;
use transom_usage::decimal::Decimal;

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
    /// The client behind it if that is a proxy, where the log does not say whether this address is only that of a balancer.
    pub client_behind: Option<ClientAddress>,
    /// The value of `X-Forwarded-For`, if the log has it; the client is then the peer that sent it.
    pub forwarded_for: Span,
    /// Whether the log has a peer beside the client that it has found.
    pub finds_client: bool,
    /// As in the clients file; empty if the log does not name the client.
    pub client_name: Span,
    pub method: Span,
    /// As in the request line: a path, with a query if the log has one.
    pub target: Span,
    /// Whether a target with scheme and host is not what the client sent.
    pub is_url: bool,
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

/// A field of a line: its position among the [`super::field_names::LoggedFields`], first of the request, then of the
/// response, and its value.
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

/// The largest rank of fields that name the client, not the peer.
const NAMED_CLIENT: u8 = 1;

/// The fields of a line, as they are found.
#[derive(Default)]
pub struct LineFields {
    time: Option<(u8, timestamp::Time)>,
    /// How the line calls its time.
    time_field: Option<Field>,
    /// When the response ended, where the log has the start too.
    end: Option<timestamp::Time>,
    /// Its rank, in thousandths of the unit.
    duration: Option<(u8, u64, DurationUnit)>,
    delay_ms: Option<u64>,
    client_name: Span,
    has_decisions: bool,
    client: Option<(u8, ClientAddress, Span)>,
    has_client: bool,
    finds_client: bool,
    connection: Option<ClientAddress>,
    proxy_header: Option<ClientAddress>,
    forwarded_for: Span,
    method: (u8, Span),
    target: (u8, Span),
    is_url: bool,
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

impl LineFields {
    pub fn new(headers: &[HeaderSpan]) -> LineFields {
        LineFields { first_header: headers.len(), ..LineFields::default() }
    }

    /// Notes the first object of a name that says something by being there.
    pub fn set_object(&mut self, field: Field, object: Span) {
        match field {
            Field::Decisions => self.has_decisions = true,
            Field::RefusedBy => self.has_refused_by = true,
            Field::Usage => self.cost.usage = object,
            Field::Reserved => self.cost.reserved = object,
            Field::Cost => self.cost.cost = object,
            _ => {}
        }
    }

    /// Notes the array that the scanner is before. Those of header fields have an element for each line.
    pub fn set_array<'a>(
        &mut self,
        (field, rank): (Field, u8),
        line: &'a [u8],
        scanner: &mut Scanner<'a>,
        headers: &mut Vec<HeaderSpan>,
    ) -> Result<(), Malformed> {
        let header = match field {
            Field::Header(position) | Field::ForwardedForHeader(position) => Some(position),
            _ => None,
        };
        let header = header.filter(|position| !self.has_header(*position, headers));
        let (mut elements, mut last) = (0, None);
        let array = scanner.array(&mut |text| {
            elements += 1;
            last = text;
            headers.extend(header.zip(text.filter(|text| is_value(text.of(line)))));
        })?;
        match field {
            Field::RefusedBy => self.has_refused_by |= elements > 0,
            Field::ForwardedFor | Field::ForwardedForHeader(_) => {
                let lines = if elements > 1 { Some(Span { escape: Escape::Lines, ..array }) } else { last };
                if let Some(lines) = lines {
                    self.set((Field::ForwardedFor, rank), lines, line, headers);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn has_header(&self, position: u16, headers: &[HeaderSpan]) -> bool {
        headers[self.first_header..].iter().any(|(known, _)| *known == position)
    }

    /// Notes a null: a line of this gateway has it without a route.
    pub fn set_null(&mut self, field: Field) {
        if field == Field::Route {
            self.has_route = Some(false);
        }
    }

    /// Notes a text. Of several for the same field, the one with the lowest rank counts.
    pub fn set(&mut self, (field, rank): (Field, u8), text: Span, line: &[u8], headers: &mut Vec<HeaderSpan>) {
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
            Field::Finished => self.end = timestamp::parse(bytes),
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
                if let Some((client, list)) = parse_client(text, line) {
                    self.finds_client |= self.client.is_some_and(|(known, other, _)| known != rank && other != client);
                    if self.client.is_none_or(|(known, ..)| rank < known) {
                        self.client = Some((rank, client, list));
                    }
                }
            }
            Field::Connection | Field::ProxyHeader => {
                self.has_client = true;
                let address = if field == Field::Connection { &mut self.connection } else { &mut self.proxy_header };
                *address = parse_address(bytes);
            }
            Field::ClientAndPort => {
                self.has_client = true;
                // HAProxy writes the number of its socket behind `unix:`.
                let is_unix = bytes.starts_with(b"unix:");
                let end = if is_unix { 5 } else { memrchr(b':', bytes).unwrap_or(bytes.len()) };
                self.client = parse_address(&bytes[..end]).map(|client| (rank, client, Span::default()));
            }
            Field::ForwardedFor if is_value(bytes) => self.forwarded_for = text,
            Field::ForwardedFor => {}
            Field::ForwardedForHeader(position) => {
                self.set((Field::ForwardedFor, rank), text, line, headers);
                self.set((Field::Header(position), rank), text, line, headers);
            }
            Field::Method => replace(&mut self.method),
            Field::Target | Field::Url => {
                replace(&mut self.target);
                if self.target.1 == text {
                    self.is_url = field == Field::Url;
                }
            }
            Field::Balancer => self.is_url = true,
            Field::Query => self.query = text,
            Field::RequestLine => self.request_line = Some(text),
            Field::Host => replace(&mut self.host),
            Field::Scheme => {
                self.secure = Some([&b"https"[..], b"wss", b"on"].iter().any(|name| bytes.eq_ignore_ascii_case(name)))
            }
            Field::Frontend => self.secure = Some(bytes.ends_with(b"~")),
            Field::ServerPort => match bytes {
                b"443" => self.secure = self.secure.or(Some(true)),
                b"80" => self.secure = self.secure.or(Some(false)),
                _ => {}
            },
            Field::Status => {
                if self.status.is_none_or(|(known, _)| rank < known) {
                    self.status = parse_status(bytes).map(|status| (rank, status)).or(self.status);
                }
            }
            Field::Header(position) if is_value(bytes) => {
                if !self.has_header(position, headers) {
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

    /// Sets the client by the variables of nginx, of which `$remote_addr` is that of the client if the module realip has found
    /// it, and otherwise that of the peer, which a PROXY header replaces. Without the address of the connection, the log does not
    /// say which one it is, and the client may be behind that of the PROXY header.
    fn compare_addresses_of_nginx(&mut self) -> Option<ClientAddress> {
        let remote = self.client.map(|(_, client, _)| client);
        let is_found = remote.zip(self.connection).is_some_and(|(remote, connection)| remote != connection);
        self.finds_client |= is_found;
        match self.proxy_header {
            Some(client) if !is_found && self.client.is_none_or(|(rank, ..)| rank > NAMED_CLIENT) => {
                self.client = Some((NAMED_CLIENT, client, Span::default()));
                remote.filter(|_| self.connection.is_none())
            }
            _ => {
                self.client = self.client.or(self.connection.map(|peer| (NAMED_CLIENT, peer, Span::default())));
                None
            }
        }
    }

    /// What the line says, if it is a request.
    pub fn finish(mut self, line: &[u8], headers: &[HeaderSpan]) -> Result<LogLine, NoRequest> {
        if let Some((method, target)) = self.request_line.and_then(|request| split_request(request, line)) {
            self.method.1 = if self.method.1.len == 0 { method } else { self.method.1 };
            self.target.1 = if self.target.1.len == 0 { target } else { self.target.1 };
        }
        let has_start = self.time.is_some();
        let time = self.time.map(|(_, time)| time).or(self.end).ok_or(NoRequest::Bad("it has no time"))?;
        let has_request = self.method.1.len > 0 && self.target.1.len > 0;
        let has_no_request = self.request_line.is_some() || self.has_error;
        let client_behind = self.compare_addresses_of_nginx();
        let (_, client, list) = self.client.ok_or(match self.has_client {
            true => NoRequest::Bad("the client is not an address"),
            // S3 has lines of what it does by itself.
            false if self.request_line.is_some() && !has_request => NoRequest::Rejected,
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
        let elapsed_ms = self.end.filter(|_| has_start).and_then(|end| end.unix_ms.checked_sub(time.unix_ms));
        let duration_ms = duration_ms.or(elapsed_ms);
        let taken_ms = duration_ms.filter(|_| self.time_field == Some(Field::EndTime)).unwrap_or(0);
        Ok(LogLine {
            time_ms: time.unix_ms.saturating_sub(taken_ms),
            duration_ms: duration_ms
                .map(|ms| u32::try_from(ms.saturating_sub(self.delay_ms.unwrap_or(0))).unwrap_or(u32::MAX)),
            client,
            client_behind,
            forwarded_for: if list.len > 0 { list } else { self.forwarded_for },
            finds_client: self.finds_client,
            client_name: self.client_name,
            method: self.method.1,
            target: self.target.1,
            is_url: self.is_url,
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

/// Whether a field of the request or of the response has this value. Caddy replaces secrets by a word.
fn is_value(text: &[u8]) -> bool {
    !matches!(text, b"" | b"-" | b"REDACTED")
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

pub fn span(at: usize, len: usize) -> Span {
    Span { at: at as u32, len: len as u32, escape: Escape::None }
}

/// The span with an escape, if the text has its sign.
pub fn escaped(span: Span, escape: Escape, line: &[u8]) -> Span {
    let sign = match escape {
        Escape::None => return span,
        Escape::Backslash => b'\\',
        Escape::Percent | Escape::EncodedPercent => b'%',
        Escape::Plus => b'+',
        Escape::Hash => b'#',
        Escape::Lines => b'[',
    };
    Span { escape: if memchr(sign, span.of(line)).is_some() { escape } else { Escape::None }, ..span }
}

/// The text between the quote at `at` and the next one that is not escaped.
pub fn quoted(line: &[u8], at: usize) -> Option<Span> {
    let (start, mut end) = (at + 1, at + 1);
    loop {
        end += memchr(b'"', line.get(end..)?)?;
        let backslashes = line[start..end].iter().rev().take_while(|byte| **byte == b'\\').count();
        if backslashes % 2 == 0 {
            return Some(escaped(span(start, end - start), Escape::Backslash, line));
        }
        end += 1;
    }
}

/// Method and target of a request line; `None` if it is none.
pub fn split_request(request: Span, line: &[u8]) -> Option<(Span, Span)> {
    let text = request.of(line);
    let method_len = memchr(b' ', text)?;
    let target_end = memrchr(b' ', text).filter(|end| text[end + 1..].starts_with(b"HTTP/"))?;
    let target_len = target_end.checked_sub(method_len + 1)?;
    let is_method =
        method_len > 0 && text[..method_len].iter().all(|byte| byte.is_ascii_uppercase() || b"-_".contains(byte));
    (is_method && target_len > 0).then(|| (request.part(0, method_len), request.part(method_len + 1, target_len)))
}

/// The client in a text, and `X-Forwarded-For` if the text is a list: its last address is then the client, since clients write
/// the first ones.
pub fn parse_client(text: Span, line: &[u8]) -> Option<(ClientAddress, Span)> {
    let bytes = text.of(line);
    match memrchr(b',', bytes) {
        None => Some((parse_address(bytes)?, Span::default())),
        Some(comma) => Some((parse_address(bytes[comma + 1..].trim_ascii())?, text)),
    }
}

/// Whether a text is what `X-Forwarded-For` has: names of nodes, separated by commas, of which the last is an address. Clients write
/// the first ones, such as `unknown`.
pub fn is_address_list(text: &[u8]) -> bool {
    let is_sign = |byte: &u8| byte.is_ascii_alphanumeric() || b".:[]_-".contains(byte);
    let mut nodes = text.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    nodes.next().and_then(parse_address).is_some() && nodes.all(|node| node.iter().all(is_sign))
}

/// An address, also with a port.
pub fn parse_address(text: &[u8]) -> Option<ClientAddress> {
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

pub fn parse_status(text: &[u8]) -> Option<u16> {
    match *text {
        [a @ b'0'..=b'9', b @ b'0'..=b'9', c @ b'0'..=b'9'] => {
            Some([a, b, c].iter().fold(0, |value, digit| value * 10 + u16::from(digit - b'0')))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn addresses_of_ipv4_are_those_of_the_standard_library(text in "[0-9]{0,4}(\\.[0-9]{0,4}){2,4}", bytes: [u8; 4]) {
            prop_assert_eq!(parse_ipv4(text.as_bytes()), text.parse().ok());
            let address = Ipv4Addr::from(bytes);
            prop_assert_eq!(parse_ipv4(address.to_string().as_bytes()), Some(address));
        }
    }
}
