//! Replaces, in responses of servers that do not know their public name, what names these servers: URLs in `Location`,
//! `Content-Location` and `Refresh`, and the `Domain` and `Path` of cookies. The path change of the route is undone.
//!
//! URLs of other hosts and relative references stay, and so do paths that the route's path change cannot have made.

use http::header::{self, HeaderMap, HeaderValue};

use crate::router::{capture_wildcards, end_of_segment};
use transom_config::path::{PathPattern, Segment};
use transom_config::route_actions::PathChange;

/// Of the names of cookies that browsers bind to a host (RFC 6265bis, section 4.1.3.2).
const HOST_PREFIX: &str = "__Host-";

/// How the path change of a route is undone.
#[derive(Debug)]
pub struct PathInverse {
    /// The path of the route.
    path: PathPattern,
    change: Option<PathChange>,
}

/// The names by which a client has asked for a route.
#[derive(Debug)]
pub struct PublicLocation {
    /// `https://public.example:8443`; empty if the request names no host.
    pub origin: String,
    /// The host of the request with its port, as the server was sent it unless its upstream has `host`.
    pub authority: String,
    /// The values of the route's parameters, in their order.
    pub params: Vec<String>,
}

/// The host and the port of a URL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UrlAuthority<'u> {
    /// Without brackets.
    pub host: &'u str,
    /// The default port of the scheme, where the URL names none.
    pub port: u16,
}

impl<'u> UrlAuthority<'u> {
    /// `None` if the text is no host with an optional port.
    pub fn parse(text: &'u str, default_port: u16) -> Option<UrlAuthority<'u>> {
        let port_at = text.rfind(':').filter(|at| !text[*at..].contains(']'));
        let (host, port) = match port_at {
            Some(at) => (&text[..at], text[at + 1..].parse().ok()?),
            None => (text, default_port),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        (!host.is_empty() && !host.contains(['@', '\\'])).then_some(UrlAuthority { host, port })
    }
}

impl PathInverse {
    pub fn new(path: &PathPattern, change: Option<&PathChange>) -> PathInverse {
        PathInverse { path: path.clone(), change: change.cloned() }
    }

    /// The path of a request that the server receives with this path; `None` if there is none.
    fn public_path(&self, path: &str, location: &PublicLocation) -> Option<String> {
        let public = match &self.change {
            None => path.to_owned(),
            Some(PathChange::Prefix { from, to }) => {
                let rest = path.strip_prefix(to.as_str()).filter(|rest| rest.is_empty() || rest.starts_with('/'))?;
                // A route for the prefix alone matches no path below it.
                let is_prefix_alone = rest == "/" && self.path.text == *from;
                if is_prefix_alone { from.clone() } else { format!("{from}{rest}") }
            }
            Some(PathChange::Rewrite(rewrite)) => {
                let values = captures(&rewrite.segments, path)?;
                let mut params = location.params.iter();
                let mut value = |name: Option<&str>| {
                    let of_request = params.next().map(String::as_str).unwrap_or_default();
                    let found = values.iter().find(|(known, _)| Some(*known) == name);
                    found.map_or(of_request, |(_, value)| value).to_owned()
                };
                let mut public = String::new();
                for segment in &self.path.segments {
                    public.push('/');
                    match segment {
                        Segment::Literal(text) => public += text,
                        Segment::Param(name) | Segment::Rest(name) => public += &value(Some(name)),
                        Segment::Wildcards(own) => {
                            for (position, text) in own.texts.iter().enumerate() {
                                public += text;
                                if let Some(name) = own.names.get(position) {
                                    public += &value(name.as_deref());
                                }
                            }
                        }
                    }
                }
                public
            }
        };
        let public = if public.is_empty() { String::from("/") } else { public };
        // Two slashes would begin a host. Browsers read `\` as `/`, and ignore tabs.
        let is_clear =
            !public.starts_with("//") && !public.starts_with("/\\") && public.bytes().all(|byte| byte >= b' ');
        is_clear.then_some(public)
    }

    /// The `Path` of a cookie for the requests that the server receives with this path or below it.
    fn public_cookie_path(&self, path: &str, location: &PublicLocation) -> Option<String> {
        let public = self.public_path(path, location)?;
        let is_below = path == "/" && public.len() > 1;
        // `/api/` would not match `/api`.
        Some(if is_below { public.trim_end_matches('/').to_owned() } else { public })
    }
}

/// The values of the parameters of a rewritten path; `None` if it does not match or its parameters cannot be distinguished.
fn captures<'p>(segments: &'p [Segment], path: &'p str) -> Option<Vec<(&'p str, &'p str)>> {
    let mut values = Vec::new();
    let mut start = path.starts_with('/').then_some(1);
    for segment in segments {
        let (from, (end, next)) = (start?, end_of_segment(path, start?));
        match segment {
            Segment::Literal(text) if *text == path[from..end] => {}
            Segment::Literal(_) => return None,
            Segment::Param(_) if from == end => return None,
            Segment::Param(name) => values.push((name.as_str(), &path[from..end])),
            Segment::Rest(name) => {
                values.push((name.as_str(), &path[from..]));
                return Some(values);
            }
            Segment::Wildcards(own) => {
                let mut ranges = Vec::new();
                let is_clear = own.texts[1..own.names.len()].iter().all(|text| !text.is_empty());
                if !is_clear || !capture_wildcards(&own.texts, &path[from..end], from, &mut ranges) {
                    return None;
                }
                let names = own.names.iter().map(|name| name.as_deref().unwrap_or_default());
                values.extend(names.zip(ranges).map(|(name, range)| (name, &path[range])));
            }
        }
        start = next;
    }
    start.is_none().then_some(values)
}

impl PublicLocation {
    /// Replaces what names a server in the fields of its response. `is_server`: whether this is a server of the upstream, or
    /// the host that it is sent.
    pub fn replace(
        &self,
        inverse: &PathInverse,
        headers: &mut HeaderMap,
        is_server: impl Fn(UrlAuthority<'_>) -> bool,
    ) {
        let is_own = |authority: UrlAuthority<'_>, default_port| {
            UrlAuthority::parse(&self.authority, default_port)
                .is_some_and(|sent| sent.host.eq_ignore_ascii_case(authority.host) && sent.port == authority.port)
                || is_server(authority)
        };
        let url = |url: &str| self.public_url(inverse, url, &is_own);
        for (name, value) in headers.iter_mut() {
            // Also with characters beyond ASCII, which many servers do not encode.
            let Ok(text) = std::str::from_utf8(value.as_bytes()) else { continue };
            let replaced = if [header::LOCATION, header::CONTENT_LOCATION].contains(name) {
                url(text)
            } else if *name == header::REFRESH {
                let parts = url_of_refresh(text);
                parts.and_then(|(before, old, behind)| Some(format!("{before}{}{behind}", url(old)?)))
            } else if *name == header::SET_COOKIE {
                self.public_cookie(inverse, text, &is_server)
            } else {
                continue;
            };
            if let Some(replaced) = replaced.and_then(|replaced| HeaderValue::try_from(replaced).ok()) {
                *value = replaced;
            }
        }
    }

    /// The public URL of a URL or an absolute path of the server; `None` if it stays.
    fn public_url(
        &self,
        inverse: &PathInverse,
        url: &str,
        is_own: &impl Fn(UrlAuthority<'_>, u16) -> bool,
    ) -> Option<String> {
        let scheme = |name: &str| url.get(..name.len()).filter(|start| start.eq_ignore_ascii_case(name));
        let (rest, default_port) = match () {
            () if scheme("https://").is_some() => (&url[8..], 443),
            () if scheme("http://").is_some() => (&url[7..], 80),
            () if url.starts_with("//") => (&url[2..], if self.origin.starts_with("https:") { 443 } else { 80 }),
            () if url.starts_with('/') => {
                let (path, behind) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
                return Some(inverse.public_path(path, self)? + behind);
            }
            () => return None,
        };
        let (authority, target) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if !is_own(UrlAuthority::parse(authority, default_port)?, default_port) {
            return None;
        }
        let (path, behind) = target.split_at(target.find(['?', '#']).unwrap_or(target.len()));
        let path = if path.is_empty() { "/" } else { path };
        // Other paths of the server may have a route of their own.
        let public = inverse.public_path(path, self).unwrap_or_else(|| path.to_owned());
        // Browsers read `\` as `/`, and ignore tabs.
        let is_host = self.origin.is_empty() && (public.starts_with("//") || public.starts_with("/\\"));
        let is_unclear = is_host || public.bytes().any(|byte| byte < b' ');
        (!is_unclear).then(|| format!("{}{public}{behind}", self.origin))
    }

    /// A cookie with the public domain and path; `None` if it stays.
    fn public_cookie(
        &self,
        inverse: &PathInverse,
        cookie: &str,
        is_server: &impl Fn(UrlAuthority<'_>) -> bool,
    ) -> Option<String> {
        // A browser accepts such a cookie only with the path `/` and without a domain.
        if cookie.get(..HOST_PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(HOST_PREFIX)) {
            return None;
        }
        let mut attributes = cookie.split(';');
        let mut public = attributes.next()?.to_owned();
        for attribute in attributes {
            let (name, value) = attribute.split_once('=').unwrap_or((attribute, ""));
            let (name, value) = (name.trim(), value.trim());
            if name.eq_ignore_ascii_case("domain") && self.is_domain_of_server(value, is_server) {
                // Without a domain, the cookie is for the host of the request.
                if let Some(host) = self.domain() {
                    public += &format!("; Domain={host}");
                }
            } else if let Some(path) = Some(value)
                .filter(|value| name.eq_ignore_ascii_case("path") && value.starts_with('/'))
                .and_then(|value| inverse.public_cookie_path(value, self))
                // A parameter of the request may have it.
                .filter(|path| !path.contains(';'))
            {
                public += &format!("; Path={path}");
            } else {
                public += &format!(";{attribute}");
            }
        }
        (public != cookie).then_some(public)
    }

    fn is_domain_of_server(&self, domain: &str, is_server: &impl Fn(UrlAuthority<'_>) -> bool) -> bool {
        let host = domain.strip_prefix('.').unwrap_or(domain);
        self.domain().is_none_or(|own| !own.eq_ignore_ascii_case(host)) && is_server(UrlAuthority { host, port: 0 })
    }

    /// The host of the request, if a cookie can have it as its domain.
    fn domain(&self) -> Option<&str> {
        let host = UrlAuthority::parse(&self.authority, 0)?.host;
        // RFC 3986 also allows characters that end an attribute.
        let is_name = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
        (is_name && host.parse::<std::net::IpAddr>().is_err()).then_some(host)
    }
}

/// The URL in `Refresh: 5; url=URL`, and what is before and behind it.
fn url_of_refresh(text: &str) -> Option<(&str, &str, &str)> {
    let lower = text.to_ascii_lowercase();
    let at = lower.find("url")?;
    let is_parameter = text[..at].trim_end().ends_with([';', ',']);
    let value = text[at + 3..].trim_start().strip_prefix('=').filter(|_| is_parameter)?.trim_start();
    let url = value.trim_start_matches(['"', '\'']);
    let end = url.find(['"', '\'']).unwrap_or(url.len());
    let before = &text[..text.len() - url.len()];
    Some((before, &url[..end], &url[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_config::path::WildcardSegment;

    fn pattern(text: &str) -> PathPattern {
        let segment = |segment: &str| match segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            Some(name) if !name.contains('{') => match name.strip_prefix('*') {
                Some(name) => Segment::Rest(name.to_owned()),
                None => Segment::Param(name.to_owned()),
            },
            _ if segment.contains('{') => {
                let pieces: Vec<String> = segment.split(['{', '}']).map(str::to_owned).collect();
                Segment::Wildcards(WildcardSegment {
                    texts: pieces.iter().step_by(2).cloned().collect(),
                    names: pieces.into_iter().skip(1).step_by(2).map(Some).collect(),
                })
            }
            _ => Segment::Literal(segment.to_owned()),
        };
        PathPattern { text: text.to_owned(), segments: text[1..].split('/').map(segment).collect() }
    }

    fn prefix(from: &str, to: &str) -> Option<PathChange> {
        Some(PathChange::Prefix { from: from.to_owned(), to: to.to_owned() })
    }

    fn rewrite(to: &str) -> Option<PathChange> {
        Some(PathChange::Rewrite(pattern(to)))
    }

    fn location(params: &[&str]) -> PublicLocation {
        PublicLocation {
            origin: String::from("https://public.example"),
            authority: String::from("public.example"),
            params: params.iter().map(|value| (*value).to_owned()).collect(),
        }
    }

    /// A field of a response of `app.internal:8080` after it was replaced.
    fn replaced(path: &str, change: Option<PathChange>, params: &[&str], name: &'static str, value: &str) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        let is_server = |authority: UrlAuthority<'_>| {
            authority.host.eq_ignore_ascii_case("app.internal") && [0, 8080].contains(&authority.port)
        };
        location(params).replace(&PathInverse::new(&pattern(path), change.as_ref()), &mut headers, is_server);
        String::from_utf8(headers[name].as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn the_path_change_of_a_route_is_undone() {
        for (path, change, params, of_server, public) in [
            ("/api/{*r}", prefix("/api", ""), &["x"][..], "/login?a=/b#c", "/api/login?a=/b#c"),
            ("/api/{*r}", prefix("/api", ""), &["x"], "/", "/api/"),
            ("/api", prefix("/api", ""), &[], "/", "/api"),
            ("/a/{*r}", prefix("/a", "/v2/b"), &["x"], "/v2/b/login", "/a/login"),
            ("/a/{*r}", prefix("/a", "/v2/b"), &["x"], "/v2/b", "/a"),
            ("/a/{*r}", prefix("/a", "/v2/b"), &["x"], "/v2/bc", "/v2/bc"),
            ("/{*r}", prefix("", "/all"), &["x"], "/all/login", "/login"),
            ("/{*r}", prefix("", "/all"), &["x"], "/all", "/"),
            // The rest would be another host.
            ("/{*r}", prefix("", "/all"), &["x"], "/all//evil.example", "/all//evil.example"),
            ("/{*r}", prefix("", "/all"), &["x"], "/all/\\evil.example", "/all/\\evil.example"),
            ("/{*r}", prefix("", "/all"), &["x"], "/all/\t/evil.example", "/all/\t/evil.example"),
            ("/{*r}", rewrite("/app/{*r}"), &["x"], "/app/\t/evil.example", "/app/\t/evil.example"),
            ("/u/{id}/{*r}", rewrite("/v2/{id}/of/{*r}"), &["7", "x"], "/v2/8/of/a/b?c", "/u/8/a/b?c"),
            ("/u/{id}/{*r}", rewrite("/v2/{id}/of/{*r}"), &["7", "x"], "/v2/8/at/a", "/v2/8/at/a"),
            // What the rewritten path does not say is as in the request.
            ("/t/{tenant}/{*r}", rewrite("/{*r}"), &["acme", "x"], "/login", "/t/acme/login"),
            ("/f/{name}.{ext}", rewrite("/{ext}/{name}"), &["a", "b"], "/gz/x.tar", "/f/x.tar.gz"),
            ("/{a}/{b}", rewrite("/{a}-{b}"), &["1", "2"], "/3-4", "/3/4"),
            // Not encoded by the server.
            ("/{a}/{b}", rewrite("/{a}-{b}"), &["1", "2"], "/é-x", "/é/x"),
            ("/{a}/{b}", rewrite("/{a}-{b}"), &["1", "2"], "/x-é", "/x/é"),
            ("/{a}/{b}", rewrite("/{a}-é-{b}"), &["1", "2"], "/日-é-日", "/日/日"),
            ("/{a}/{b}", rewrite("/{a}-{b}"), &["1", "2"], "/-é", "/-é"),
            ("/{a}/{b}", rewrite("/{a}-{b}"), &["1", "2"], "/é-", "/é-"),
            ("/{a}/{b}", rewrite("/{a}{b}"), &["1", "2"], "/34", "/34"),
            ("/old/{*r}", rewrite("/new"), &["x"], "/new", "/old/x"),
        ] {
            assert_eq!(replaced(path, change, params, "location", of_server), public, "{path}");
        }
    }

    #[test]
    fn only_urls_of_the_server_are_replaced() {
        for (of_server, public) in [
            ("http://app.internal:8080/login", "https://public.example/api/login"),
            ("HTTP://APP.internal:8080", "https://public.example/api/"),
            ("//app.internal:8080/a?b", "https://public.example/api/a?b"),
            ("http://public.example/a", "https://public.example/api/a"),
            ("https://public.example:443/a", "https://public.example/api/a"),
            ("http://public.example:8080/a", "http://public.example:8080/a"),
            ("http://app.internal/a", "http://app.internal/a"),
            ("http://app.internal:8080@evil.example/a", "http://app.internal:8080@evil.example/a"),
            ("http://other.example/a", "http://other.example/a"),
            ("login", "login"),
            ("?page=2", "?page=2"),
            ("../a", "../a"),
            ("", ""),
            ("/café", "/api/café"),
            ("http://app.internal:8080/café?ü#é", "https://public.example/api/café?ü#é"),
            ("mailto:a@app.internal", "mailto:a@app.internal"),
        ] {
            assert_eq!(replaced("/api/{*r}", prefix("/api", ""), &["x"], "location", of_server), public);
            assert_eq!(replaced("/api/{*r}", prefix("/api", ""), &["x"], "content-location", of_server), public);
        }
        let refresh = |text| replaced("/api/{*r}", prefix("/api", ""), &["x"], "refresh", text);
        for (of_server, public) in [
            ("5; url=http://app.internal:8080/a", "5; url=https://public.example/api/a"),
            ("5;URL = \"/a?url=/b\"", "5;URL = \"/api/a?url=/b\""),
            ("5", "5"),
            ("5; url=other", "5; url=other"),
        ] {
            assert_eq!(refresh(of_server), public);
        }
    }

    #[test]
    fn cookies_get_the_public_domain_and_path() {
        let cookie = |change, text| replaced("/api/{*r}", change, &["x"], "set-cookie", text);
        let strip = || prefix("/api", "");
        for (of_server, public) in [
            ("a=b; Path=/; HttpOnly", "a=b; Path=/api; HttpOnly"),
            ("a=b; path=/x/; Secure", "a=b; Path=/api/x/; Secure"),
            ("a=/; Domain=app.internal", "a=/; Domain=public.example"),
            ("a=b;domain=.APP.internal;Max-Age=5", "a=b; Domain=public.example;Max-Age=5"),
            ("a=b; Domain=public.example", "a=b; Domain=public.example"),
            ("a=b; Domain=other.example", "a=b; Domain=other.example"),
            ("a=b", "a=b"),
            ("naïve=é; Domain=app.internal; Path=/é", "naïve=é; Domain=public.example; Path=/api/é"),
            ("__Host-a=b; Path=/; Secure", "__Host-a=b; Path=/; Secure"),
            ("__host-a=b; Path=/; Secure", "__host-a=b; Path=/; Secure"),
        ] {
            assert_eq!(cookie(strip(), of_server), public);
        }
        assert_eq!(cookie(prefix("/api", "/v2"), "a=b; Path=/v2"), "a=b; Path=/api");
        assert_eq!(cookie(prefix("/api", "/v2"), "a=b; Path=/"), "a=b; Path=/");
        assert_eq!(cookie(None, "a=b; Path=/x"), "a=b; Path=/x");
    }

    #[test]
    fn without_a_host_only_paths_are_left() {
        let inverse = PathInverse::new(&pattern("/api/{*r}"), prefix("/api", "").as_ref());
        let location = PublicLocation { origin: String::new(), authority: String::new(), params: vec![] };
        let mut headers = HeaderMap::new();
        headers.insert(header::LOCATION, HeaderValue::from_static("http://app.internal/a"));
        headers.insert(header::SET_COOKIE, HeaderValue::from_static("a=b; Domain=app.internal"));
        location.replace(&inverse, &mut headers, |_| true);
        assert_eq!(["location", "set-cookie"].map(|name| headers[name].to_str().unwrap()), ["/api/a", "a=b"]);
    }

    /// Neither the host nor the path of a request can add an attribute to a cookie.
    #[test]
    fn a_request_adds_no_attribute() {
        let inverse = PathInverse::new(&pattern("/t/{tenant}/{*r}"), rewrite("/{*r}").as_ref());
        let authority = String::from("public.example;domain=example.com");
        let params = vec![String::from("a;Domain=example.com"), String::from("x")];
        let location = PublicLocation { origin: format!("https://{authority}"), authority, params };
        let mut headers = HeaderMap::new();
        headers.insert(header::SET_COOKIE, HeaderValue::from_static("a=b; Domain=app.internal; Path=/x"));
        location.replace(&inverse, &mut headers, |authority| authority.host == "app.internal");
        assert_eq!(headers[header::SET_COOKIE], "a=b; Path=/x");
    }
}
