//! Reads the request of a log line as the gateway would receive it, and finds its route.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};

use super::field_names::LoggedFields;
use super::log_line::{HeaderSpan, LogLine};
use transom_config::Config;
use transom_config::key_kind::{BEARER, HEADER, KeyKind, Logged};
use transom_http::client_address::ClientAddress;
use transom_http::error::RequestError;
use transom_http::forwarded::TrustedProxies;
use transom_http::path_normalize::{self, encode_query};
use transom_http::request_validation::{is_valid_method, normalized_host};
use transom_jwt::cache::TokenCache;
use transom_limiter::handles::PlanPosition;
use transom_limiter::key::KeyPart;
use transom_limiter::rule::Cost;
use transom_rules::access::denied_parts;
use transom_rules::client_plans::{ClientPlans, KnownClient};
use transom_rules::compiled_config::CompiledConfig;
use transom_rules::key_source::ConnectionValues;
use transom_rules::resolved_request::{RequestView, ResolvedRequest};
use transom_rules::store_key_text::KeyDigester;

/// Reads requests.
pub struct RequestReader {
    pub compiled: Arc<CompiledConfig>,
    pub fields: LoggedFields,
    tokens: TokenCache,
    digester: KeyDigester,
    /// Whether a key reads the query.
    reads_query: bool,
    /// The request fields with an API key, each with what is before the key. A log of this gateway names the client instead.
    api_key_fields: Vec<(HeaderName, &'static str)>,
    /// By name.
    clients: Option<Arc<ClientPlans>>,
    /// Whether some line so far names one of them.
    names_clients: bool,
    /// Whether requests came by https, where the log does not say.
    pub is_secure: bool,
}

/// Memory that requests reuse.
#[derive(Default)]
pub struct Buffers {
    method: Vec<u8>,
    target: Vec<u8>,
    host: Vec<u8>,
    client_name: Vec<u8>,
    headers: HeaderMap,
}

/// A request as a line of the log describes it.
pub struct LoggedRequest<'a> {
    /// Empty if the log has none.
    pub host: Cow<'a, str>,
    /// The client, if the log names it instead of its API key.
    client: Option<(&'a str, &'a KnownClient)>,
    /// Whether the gateway of the log found no client.
    is_unauthorized: bool,
    /// Whether the log names clients, and none for the request: if the address belongs to a client, the request had the key of none.
    is_of_no_client: bool,
    /// Whether the log has an `X-Forwarded-For` of a peer that is no trusted proxy.
    pub ignores_forwarded: bool,
    address: ClientAddress,
    method: Method,
    path: Cow<'a, str>,
    uri: Uri,
    is_secure: bool,
    /// Whether the log says `is_secure`.
    pub has_scheme: bool,
    headers: &'a HeaderMap,
}

/// The gateway would answer the request with an error.
#[derive(Debug)]
pub struct Rejected;

impl RequestReader {
    /// # Errors
    ///
    /// A message for the user.
    pub fn new(compiled: Arc<CompiledConfig>) -> Result<RequestReader, String> {
        let config = &compiled.config;
        let parts = || key_parts(config);
        let mut request = compiled.key_fields.clone();
        let reads = |logged: Logged| parts().any(|part| KeyKind::of(part).logged == logged);
        if reads(Logged::Authorization) {
            request.push(header::AUTHORIZATION);
        }
        if reads(Logged::Cookie) {
            request.push(header::COOKIE);
        }
        if compiled.trusted_proxies.as_ref().is_some_and(TrustedProxies::reads_forwarded) {
            request.push(header::FORWARDED);
        }
        let reads_query = reads(Logged::Query) || config.routes.iter().any(|route| !route.query.is_empty());
        request.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        request.dedup();
        let response = config.rules.iter().filter_map(|rule| match &rule.cost {
            Cost::Response { source: Some(field), .. } => HeaderName::from_bytes(field.as_bytes()).ok(),
            Cost::Fixed(_) | Cost::Request { .. } | Cost::Response { source: None, .. } => None,
        });
        let response = response.collect();
        let costs = config.rules.iter().any(|rule| rule.usage.is_some() || rule.bytes.is_some());
        let api_keys = config.clients.as_ref().map_or(&[][..], |clients| &clients.api_key);
        let field = |part: &KeyPart| match part.name() {
            Some(name) if HEADER.has(part) => Some((HeaderName::from_bytes(name.as_bytes()).ok()?, "")),
            _ => BEARER.has(part).then_some((header::AUTHORIZATION, "Bearer ")),
        };
        let api_key_fields = api_keys.iter().filter_map(field).collect();
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| format!("no random numbers: {error}"))?;
        Ok(RequestReader {
            digester: KeyDigester::new(&secret, api_keys),
            tokens: compiled.token_checker(),
            reads_query,
            clients: compiled.clients.as_ref().map(|clients| clients.current()),
            is_secure: !config.listen.https.is_empty(),
            fields: LoggedFields { request, response, costs },
            api_key_fields,
            names_clients: false,
            compiled,
        })
    }

    /// Whether the address belongs to a client.
    fn has_client(&self, address: ClientAddress) -> bool {
        self.clients.as_ref().is_some_and(|clients| clients.client_of_network(address).is_some())
    }

    /// Whether requests can come with this scheme.
    fn serves(&self, is_secure: bool) -> bool {
        let listen = &self.compiled.config.listen;
        let has_listener = if is_secure { !listen.https.is_empty() } else { !listen.http.is_empty() };
        has_listener || !listen.forward_auth.is_empty()
    }

    /// Ends the limits of clients that have reached their end.
    pub fn end_limits(&mut self, now_ms: u64) {
        if let Some(clients) = &mut self.clients
            && clients.next_limit_end_ms().is_some_and(|end_ms| end_ms <= now_ms)
        {
            Arc::make_mut(clients).apply_limits(now_ms);
        }
    }

    /// Notes whether the log names clients.
    pub fn note_client(&mut self, line: &LogLine, text: &[u8]) {
        if !self.names_clients && line.client_name.len > 0 {
            let name = std::str::from_utf8(line.client_name.decoded(text, &mut Vec::new())).map(str::to_owned);
            let known = |name: String| self.clients.as_ref()?.named(&name).map(drop);
            self.names_clients = name.is_ok_and(|name| known(name).is_some());
        }
    }

    pub fn read<'a>(
        &'a self,
        line: &LogLine,
        text: &'a [u8],
        headers: &[HeaderSpan],
        buffers: &'a mut Buffers,
    ) -> Result<LoggedRequest<'a>, Rejected> {
        let Buffers { method, target, host, client_name, headers: fields } = buffers;
        let method = Method::from_bytes(line.method.decoded(text, method)).ok();
        let method = method.filter(|method| method != Method::TRACE && is_valid_method(method.as_str()));
        let method = method.ok_or(Rejected)?;
        let target = std::str::from_utf8(line.target.decoded(text, target)).map_err(|_error| Rejected)?;
        let proxies = self.compiled.trusted_proxies.as_ref();
        let (origin, path_and_query) = split_target(target);
        // The gateway refuses another scheme than that of the connection, or of the client behind a trusted proxy.
        let is_accepted = |origin: Origin<'_>| {
            let is_of_connection =
                line.secure.map_or_else(|| self.serves(origin.is_secure), |is| is == origin.is_secure);
            let is_trusted = || proxies.is_some_and(|proxies| proxies.contains(line.client));
            origin.is_http && (is_of_connection || is_trusted())
        };
        if !line.is_url && origin.is_some_and(|origin| !is_accepted(origin)) {
            return Err(Rejected);
        }
        let secure = line.secure.or(origin.map(|origin| origin.is_secure));
        let host = match origin {
            Some(origin) => Some(origin.authority),
            None => std::str::from_utf8(line.host.decoded(text, host)).ok(),
        };
        let host = host.and_then(|host| if matches!(host, "" | "-") { Some("".into()) } else { normalized_host(host) });
        let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
        let path = path_normalize::normalize(path, self.compiled.config.path_reading);
        let uri = match self.reads_query {
            true if line.query.len > 0 => {
                let mut buffer = Vec::new();
                let query = std::str::from_utf8(line.query.decoded(text, &mut buffer)).ok();
                query.and_then(|query| encode_query(&format!("{path_and_query}?{query}")).parse().ok())
            }
            true if !query.is_empty() => encode_query(path_and_query).parse().ok(),
            _ => Some(Uri::from_static("/")),
        };
        let (Some(host), Ok(path), Some(uri)) = (host, path, uri) else { return Err(Rejected) };
        read_headers(fields, headers, text, &self.fields.request, 0);
        let client = self.named_client(line, text, client_name, fields);
        let mut buffer = Vec::new();
        let list = line.forwarded_for.decoded(text, &mut buffer);
        let forwarded = proxies.and_then(|proxies| {
            let behind =
                line.client_behind.filter(|client| proxies.contains(line.client) && !proxies.contains(*client));
            proxies.client_in_log(line.client, list, fields).or(behind.map(|client| (client, None)))
        });
        let secure = forwarded.and_then(|(_, is_secure)| is_secure).or(secure);
        Ok(LoggedRequest {
            host,
            client,
            is_unauthorized: line.is_unauthorized,
            is_of_no_client: self.names_clients && line.client_name.len == 0,
            ignores_forwarded: line.forwarded_for.len > 0 && forwarded.is_none() && !line.finds_client,
            address: forwarded.map_or(line.client, |(client, _)| client),
            method,
            path,
            uri,
            is_secure: secure.unwrap_or(self.is_secure),
            has_scheme: secure.is_some(),
            headers: fields,
        })
    }

    /// The client that a line names. The name stands for the API key, of which the clients file has the digest alone.
    fn named_client<'a>(
        &'a self,
        line: &LogLine,
        text: &'a [u8],
        buffer: &'a mut Vec<u8>,
        fields: &mut HeaderMap,
    ) -> Option<(&'a str, &'a KnownClient)> {
        if line.client_name.len == 0 {
            return None;
        }
        let name = std::str::from_utf8(line.client_name.decoded(text, buffer)).ok()?;
        let client = &**self.clients.as_ref()?.named(name)?;
        if self.api_key_fields.iter().any(|(field, _)| fields.contains_key(field)) {
            return None;
        }
        if let Some((field, scheme)) = self.api_key_fields.first() {
            fields.insert(field.clone(), HeaderValue::from_str(&format!("{scheme}{name}")).ok()?);
        }
        Some((name, client))
    }

    /// The key of the rule at a position as people read it.
    #[cold]
    pub fn label(&self, (line, text, headers): (&LogLine, &[u8], &[HeaderSpan]), position: PlanPosition) -> String {
        let (mut buffers, mut params) = (Buffers::default(), Vec::new());
        let Ok(request) = self.read(line, text, headers, &mut buffers) else { return String::new() };
        let Ok(resolved) = request.resolve(self, &mut params, line.time_ms) else { return String::new() };
        let key = &resolved.rules.charge_plan.rule(position).rule.key;
        match request.client.zip(self.clients.as_ref()) {
            Some(((name, _), plans)) if !plans.client_parts(key).is_empty() => name.to_owned(),
            _ => resolved.describe_key(position, &self.digester).label(),
        }
    }
}

impl LoggedRequest<'_> {
    /// Finds the route of the request. `params` is memory for the values of its parameters.
    pub fn resolve<'a>(
        &'a self,
        reader: &'a RequestReader,
        params: &'a mut Vec<Range<usize>>,
        wall_ms: u64,
    ) -> Result<ResolvedRequest<'a>, RequestError> {
        let view = RequestView {
            address: self.address,
            connection: ConnectionValues::default(),
            is_secure: self.is_secure,
            host: &self.host,
            method: &self.method,
            path: &self.path,
            uri: &self.uri,
            headers: self.headers,
            body: None,
        };
        let resolved = reader.compiled.resolve(view, reader.clients.as_deref(), params, &reader.tokens, || wall_ms)?;
        Ok(match self.client {
            Some((_, client)) => resolved.with_client(Some(client)),
            None if self.is_unauthorized => resolved.with_client(None),
            None if self.is_of_no_client && reader.has_client(self.address) => resolved.with_client(None),
            None => resolved,
        })
    }
}

/// The key parts of all rules, of client identification and of deny entries.
fn key_parts(config: &Config) -> impl Iterator<Item = &KeyPart> {
    let clients = config.clients.iter().flat_map(|clients| clients.sources());
    config.rules.iter().flat_map(|rule| &rule.key).chain(clients).chain(denied_parts(config))
}

/// What a target in absolute form has before its path.
#[derive(Clone, Copy)]
struct Origin<'a> {
    is_secure: bool,
    /// Whether the scheme is `http` or `https`.
    is_http: bool,
    authority: &'a str,
}

/// The origin of an absolute target, and the path with its query.
fn split_target(target: &str) -> (Option<Origin<'_>>, &str) {
    if target.starts_with('/') {
        return (None, target);
    }
    let schemes =
        [("http://", false, true), ("https://", true, true), ("ws://", false, false), ("wss://", true, false)];
    let absolute = schemes
        .iter()
        .find_map(|(scheme, is_secure, is_http)| Some((*is_secure, *is_http, target.strip_prefix(scheme)?)));
    absolute.map_or((None, target), |(is_secure, is_http, rest)| {
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let path = if end == rest.len() { "/" } else { &rest[end..] };
        (Some(Origin { is_secure, is_http, authority: &rest[..end] }), path)
    })
}

/// Replaces the fields by those of a line that `names` has, whose positions in the log's fields begin with `first`.
pub fn read_headers(fields: &mut HeaderMap, headers: &[HeaderSpan], text: &[u8], names: &[HeaderName], first: usize) {
    if !fields.is_empty() {
        fields.clear();
    }
    for (position, value) in headers {
        let Some(name) = usize::from(*position).checked_sub(first).and_then(|position| names.get(position)) else {
            continue;
        };
        let mut buffer = Vec::new();
        if let Ok(value) = HeaderValue::from_bytes(value.decoded(text, &mut buffer)) {
            fields.append(name.clone(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::log_format::{LineReader, LogFormat};
    use transom_limiter::key::Seed;
    use transom_limiter::rule_set::RuleSet;
    use transom_rules::compiled_config::LiveData;

    /// The client that a gateway with these settings of `[listen]` has for a line, and whether the request came by https.
    fn read(listen: &str, line: &str) -> Result<(String, bool), Rejected> {
        let toml = format!(
            "listen = {{ {listen} }}\nupstreams.u.servers = \"http://127.0.0.1:1\"\nroutes = [{{ path = \"/{{*rest}}\", \
             upstream = \"u\" }}]"
        );
        let config = transom_config::read(&toml).unwrap_or_else(|problems| panic!("{toml}: {problems:?}"));
        let compiled =
            CompiledConfig::new(config, Seed(1, 2), RuleSet::new(&[], Seed(1, 2), None), LiveData::default());
        let reader = RequestReader::new(Arc::new(compiled)).unwrap();
        let format = Arc::new(LogFormat::parse("auto", reader.fields.clone()).unwrap());
        let (mut text, mut headers, mut buffers) = (line.as_bytes().to_vec(), Vec::new(), Buffers::default());
        let (place, parsed) = LineReader::new(format, line.as_bytes()).read(&mut text, &mut headers).unwrap();
        let request = reader.read(&parsed.unwrap(), &text[place], &headers, &mut buffers)?;
        Ok((request.address.to_string(), request.is_secure))
    }

    /// A line of JSON with some members.
    fn json(members: &str) -> String {
        format!(r#"{{"time":"2000-10-10T20:55:36Z","request":"GET / HTTP/1.1",{members}}}"#)
    }

    #[test]
    fn the_field_that_is_configured_names_the_client() {
        const FORWARDED: &str = r#"trusted_proxies = "10.0.0.1", forwarded = "forwarded""#;
        let list = r#""client":"10.0.0.1","http_x_forwarded_for":"203.0.113.8","#;
        for (listen, members, client) in [
            (FORWARDED, r#""http_forwarded":"for=8.8.8.8, for=203.0.113.7;proto=https""#, ("203.0.113.7", true)),
            (FORWARDED, r#""request_Forwarded":"proto=http;for=\"203.0.113.7:80\"""#, ("203.0.113.7", false)),
            // The client cannot hide the line of the proxy, and writes no address of its own.
            (
                FORWARDED,
                r#""request":{"headers":{"Forwarded":["for=\"","for=203.0.113.7;proto=https"]}}"#,
                ("203.0.113.7", true),
            ),
            (FORWARDED, r#""http_forwarded":"for=unknown""#, ("10.0.0.1", false)),
            (FORWARDED, r#""scheme":"http","http_forwarded":"for=203.0.113.7;proto=https""#, ("203.0.113.7", true)),
            // Not logged.
            (FORWARDED, r#""http_forwarded":"""#, ("203.0.113.8", false)),
            // Not configured.
            (
                r#"trusted_proxies = "10.0.0.1""#,
                r#""http_forwarded":"for=203.0.113.7;proto=https""#,
                ("203.0.113.8", false),
            ),
            (
                r#"trusted_proxies = "10.0.0.2", forwarded = "forwarded""#,
                r#""http_forwarded":"for=203.0.113.7""#,
                ("10.0.0.1", false),
            ),
        ] {
            let found = read(listen, &json(&format!("{list}{members}"))).unwrap();
            assert_eq!((found.0.as_str(), found.1), client, "{listen}: {members}");
        }
    }

    #[test]
    fn a_target_of_another_scheme_is_refused() {
        const HTTP: &str = "http = \"127.0.0.1:0\"";
        let https = "https = { address = \"127.0.0.1:0\", acme = { domains = [\"h.example\"], storage = \"/a\", email = \"a@h.example\" } }";
        let both = &format!("{HTTP}, {https}");
        let trusting = &format!("{HTTP}, trusted_proxies = \"10.0.0.1\"");
        let combined = |url: &str| format!(r#"10.0.0.1 - - [10/Oct/2000:20:55:36 +0000] "GET {url} HTTP/1.1" 200 1"#);
        let logged = |url: &str, scheme: &str| {
            json(&format!(r#""client":"10.0.0.1","scheme":"{scheme}""#)).replace("GET /", &format!("GET {url}"))
        };
        let elb = |url: &str| {
            format!(
                r#"2000-10-10T20:55:36.000000Z lb 10.0.0.1:41000 - 0 0 0 200 200 0 29 "GET {url} HTTP/1.1" "-" - -"#
            )
        };
        let named = |url: &str| {
            format!(r#"{{"time":"2000-10-10T20:55:36Z","client":"10.0.0.1","method":"GET","url":"{url}"}}"#)
        };
        for (listen, line, is_secure) in [
            (HTTP, combined("/"), Some(false)),
            (HTTP, combined("http://h/"), Some(false)),
            (HTTP, combined("https://h/"), None),
            (HTTP, combined("ws://h/"), None),
            (https, combined("http://h/"), None),
            (https, combined("https://h/"), Some(true)),
            (both, combined("/"), Some(true)),
            // Otherwise the gateway would refuse it.
            (both, combined("http://h/"), Some(false)),
            (both, combined("https://h/"), Some(true)),
            (both, logged("http://h/", "http"), Some(false)),
            (both, logged("http://h/", "https"), None),
            (trusting, logged("http://h/", "https"), Some(true)),
            (trusting, combined("https://h/"), Some(true)),
            (trusting, combined("wss://h/"), None),
            // These logs write URLs.
            (HTTP, elb("https://h:443/"), Some(true)),
            (HTTP, elb("wss://h:443/"), Some(true)),
            (HTTP, named("https://h/a"), Some(true)),
            (https, named("http://h/a"), Some(false)),
        ] {
            let found = read(listen, &line).ok().map(|(_, is_secure)| is_secure);
            assert_eq!(found, is_secure, "{listen}: {line}");
        }
    }

    #[test]
    fn the_addresses_of_nginx_are_compared() {
        // `$remote_addr`, `$realip_remote_addr`, `$proxy_protocol_addr`; the balancer is 10.0.0.1, the proxy 192.0.2.1.
        for (remote, connection, header, client) in [
            ("203.0.113.7", "", "", "203.0.113.7"),
            ("", "10.0.0.1", "", "10.0.0.1"),
            ("", "", "203.0.113.7", "203.0.113.7"),
            ("", "10.0.0.1", "203.0.113.7", "203.0.113.7"),
            ("203.0.113.7", "10.0.0.1", "", "203.0.113.7"),
            ("10.0.0.1", "10.0.0.1", "", "10.0.0.1"),
            // Found in the PROXY header, or in a field behind it.
            ("203.0.113.7", "10.0.0.1", "203.0.113.7", "203.0.113.7"),
            ("203.0.113.7", "10.0.0.1", "192.0.2.1", "203.0.113.7"),
            ("203.0.113.7", "10.0.0.1", "198.51.100.9", "203.0.113.7"),
            ("203.0.113.7", "unix:", "192.0.2.1", "203.0.113.7"),
            // Not found.
            ("10.0.0.1", "10.0.0.1", "203.0.113.7", "203.0.113.7"),
            ("10.0.0.1", "10.0.0.1", "192.0.2.1", "192.0.2.1"),
            ("unix:", "unix:", "203.0.113.7", "203.0.113.7"),
            // The log does not say which.
            ("10.0.0.1", "", "203.0.113.7", "203.0.113.7"),
            ("203.0.113.7", "", "192.0.2.1", "203.0.113.7"),
            ("203.0.113.7", "", "198.51.100.9", "198.51.100.9"),
            ("10.0.0.1", "", "192.0.2.1", "192.0.2.1"),
        ] {
            let names = ["remote_addr", "realip_remote_addr", "proxy_protocol_addr"];
            let members = names.iter().zip([remote, connection, header]).filter(|(_, address)| !address.is_empty());
            let mut members: Vec<_> = members.map(|(name, address)| format!("\"{name}\":\"{address}\"")).collect();
            for _ in 0..members.len() {
                members.rotate_left(1);
                let line = json(&members.join(","));
                let (found, _) = read(r#"trusted_proxies = ["10.0.0.1", "192.0.2.1"]"#, &line).unwrap();
                assert_eq!(found, client, "{line}");
            }
        }
        let behind = r#""remote_addr":"203.0.113.7","proxy_protocol_addr":"192.0.2.1""#;
        assert_eq!(read("http = \"127.0.0.1:0\"", &json(behind)).unwrap().0, "192.0.2.1");
        let list = format!(r#"{behind},"http_x_forwarded_for":"203.0.113.8""#);
        assert_eq!(read(r#"trusted_proxies = "192.0.2.1""#, &json(&list)).unwrap().0, "203.0.113.8");
        let lines =
            r#""remote_addr":"10.0.0.1","request":{"headers":{"X-Forwarded-For":["<x>", "203.0.113.7", "192.0.2.1"]}}"#;
        assert_eq!(read(r#"trusted_proxies = ["10.0.0.1", "192.0.2.1"]"#, &json(lines)).unwrap().0, "203.0.113.7");
        let named = format!(r#"{behind},"client":"203.0.113.9""#);
        assert_eq!(read("http = \"127.0.0.1:0\"", &json(&named)).unwrap().0, "203.0.113.9");
    }
}
