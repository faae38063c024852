//! Parses the URL of a Redis or Valkey server.
//!
//! `redis://[user[:password]@]host[:port][/database]`, `rediss://` for TLS, `redis+unix:///path` or `unix:///path` for
//! a Unix socket. User name and password never appear in a message.

use super::upstreams::{parse_authority, parse_socket_path};
use super::values::Parsed;
use crate::config::diagnostics::quoted;
use crate::config::redis::Node;

const PORT: u16 = 6379;
pub const DATABASE_MAX: u64 = 65_535;

/// The parts of a URL.
#[derive(PartialEq, Debug)]
pub struct RedisUrl {
    /// Whether the connection uses TLS.
    pub secure: bool,
    pub node: Node,
    pub username: Option<String>,
    pub password: Option<String>,
    pub database: Option<u64>,
}

pub fn parse_redis_url(url: &str) -> Parsed<RedisUrl> {
    let Some((scheme, rest)) = url.split_once("://") else { return Err(missing_scheme(url)) };
    let secure = match scheme {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        "redis+unix" | "valkey+unix" | "unix" => {
            if rest.contains('@') && !rest.starts_with('/') {
                let fix = "write `redis+unix:///PATH`, and the settings `username` and `password_file`";
                return Err(("the URL of a socket has a user name or password".to_owned(), fix.to_owned()));
            }
            let path = parse_socket_path(url, rest, &format!("{scheme}://"))?;
            let node = Node::Unix(path.into());
            return Ok(RedisUrl { secure: false, node, username: None, password: None, database: None });
        }
        scheme => {
            let message = format!("{} is not the scheme of a Redis server", quoted(scheme));
            let fix = "write `redis://HOST:PORT`, `rediss://HOST:PORT` for TLS, or `redis+unix:///PATH`";
            return Err((message, fix.to_owned()));
        }
    };
    let (login, rest) = rest.rsplit_once('@').map_or((None, rest), |(login, rest)| (Some(login), rest));
    let (username, password) = login.map_or(Ok((None, None)), self::parse_login)?;
    let bare = format!("{scheme}://{rest}");
    if let Some(end) = rest.find(['?', '#']) {
        let message = format!("the URL of {} has parameters after `{}`", quoted(&rest[..end]), &rest[end..=end]);
        return Err((message, "remove them; use the settings of `[counters.shared]` instead".to_owned()));
    }
    let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
    let database = match path {
        "" => None,
        path => {
            let number = path.bytes().all(|byte| byte.is_ascii_digit()).then(|| path.parse::<u64>().ok()).flatten();
            let Some(number) = number.filter(|number| *number <= DATABASE_MAX) else {
                let message = format!("{} has the invalid database number {}", quoted(&bare), quoted(path));
                return Err((message, format!("write a number from `0` to `{DATABASE_MAX}`, or none")));
            };
            Some(number)
        }
    };
    let (host, port) = parse_authority(&bare, host, (scheme, PORT))?;
    Ok(RedisUrl { secure, node: Node::Tcp { host, port }, username, password, database })
}

fn missing_scheme(url: &str) -> (String, String) {
    let fix = match url.strip_prefix("unix:") {
        Some(path) if path.starts_with('/') => format!("write `\"unix://{path}\"`"),
        _ if url.is_empty() || url.contains('@') => "write `\"redis://HOST:PORT\"`".to_owned(),
        _ => format!("write `\"redis://{}\"`", url.trim()),
    };
    let shown = if url.contains('@') { "this".to_owned() } else { quoted(url) };
    (format!("{shown} is not a server URL"), fix)
}

type Login = (Option<String>, Option<String>);

/// Parses `[user][:password]`.
fn parse_login(text: &str) -> Parsed<Login> {
    let (name, password) = text.split_once(':').map_or((text, None), |(name, password)| (name, Some(password)));
    let decoded = |text: &str| {
        percent_decode(text).ok_or_else(|| {
            let fix = "write these characters as `%` and two hex digits (`%40` for `@`, `%2F` for `/`, `%25` for `%`), or \
                       use `password_file`";
            ("the user name or password in the URL has characters that must be percent-encoded".to_owned(), fix.to_owned())
        })
    };
    let non_empty = |text: String| Some(text).filter(|text| !text.is_empty());
    Ok((non_empty(decoded(name)?), non_empty(decoded(password.unwrap_or_default())?)))
}

/// Decodes percent-encoding. `None` if a reserved character is not encoded, or the result is not UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    if text.contains(['@', '/', '?', '#', '[', ']', ' ']) {
        return None;
    }
    let mut pieces = text.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let digits = piece.get(..2).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(&piece.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> RedisUrl {
        let node = Node::Tcp { host: host.to_owned(), port };
        RedisUrl { secure: false, node, username: None, password: None, database: None }
    }

    #[test]
    fn urls_are_read_as_written() {
        let some = |text: &str| Some(text.to_owned());
        for (url, expected) in [
            ("redis://127.0.0.1", tcp("127.0.0.1", 6379)),
            ("redis://Cache.internal:7000/", tcp("cache.internal", 7000)),
            ("valkey://[::1]:7000/3", RedisUrl { database: Some(3), ..tcp("::1", 7000) }),
            ("rediss://cache", RedisUrl { secure: true, ..tcp("cache", 6379) }),
            ("redis://:p%40ss%2f@cache", RedisUrl { password: some("p@ss/"), ..tcp("cache", 6379) }),
            ("redis://me:a:b@cache", RedisUrl { username: some("me"), password: some("a:b"), ..tcp("cache", 6379) }),
            ("unix:///run/r@1.sock", RedisUrl { node: Node::Unix("/run/r@1.sock".into()), ..tcp("", 0) }),
            ("redis+unix:///run/r.sock", RedisUrl { node: Node::Unix("/run/r.sock".into()), ..tcp("", 0) }),
        ] {
            assert_eq!(parse_redis_url(url), Ok(expected), "{url}");
        }
    }

    #[test]
    fn invalid_urls_are_rejected_without_repeating_the_password() {
        for url in [
            "",
            "127.0.0.1:6379",
            "http://127.0.0.1",
            "hunter2@cache:6379",
            "redis://",
            "redis://:hunter2@",
            "redis://:hunter2@cache:0",
            "redis://:hunter2@cache:66666/0",
            "redis://:hunter2@cache/x",
            "redis://:hunter2@cache/-1",
            "redis://:hunter2@cache?db=1",
            "redis://:hunter2@::1",
            "redis://:hunter2/@cache",
            "redis://:hunter2@@cache",
            "redis://:hunter2%@cache",
            "redis://:hunter2%ff@cache",
            "REDIS://:hunter2@cache",
            "redis+unix://:hunter2@/run/r.sock",
            "unix://run/r.sock",
            "unix:/run/r.sock",
        ] {
            let (message, fix) = parse_redis_url(url).expect_err(url);
            assert!(!message.contains("hunter2") && !fix.contains("hunter2"), "{url}: {message}: {fix}");
        }
    }
}
