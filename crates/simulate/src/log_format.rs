//! Which format the lines of a log have: the one that `--format` names, or the one that its first lines are in.

use std::fs;
use std::ops::Range;
use std::sync::Arc;

use super::columns::Columns;
use super::combined;
use super::field_names::{Field, KeyTree, LoggedFields, NAMES, request_field, response_field};
use super::formats::{DIALECTS, FORMATS, Shape};
use super::json_line;
use super::log_line::{HeaderSpan, LogLine, NoRequest};
use super::nginx_conf;
use super::pattern::Pattern;
use super::wrapper::{self, Unwrapper};

/// Lines at the start of a file that decide its format, and the bytes that they may have.
const FIRST_LINES: usize = 200;
const FIRST_BYTES: usize = 64 << 10;

/// How to read the lines of a log.
#[derive(Debug)]
pub struct LogFormat {
    shapes: Vec<Compiled>,
    /// Whether the format of each file is to be found.
    is_auto: bool,
    keys: KeyTree,
    combined: combined::Fields,
    logged: LoggedFields,
}

#[derive(Debug)]
enum Compiled {
    Json,
    Combined,
    Pattern(Pattern),
    /// By position in [`DIALECTS`], with the columns of a log that does not name them.
    Columns(usize, Columns),
}

/// Reads the lines of one file, in their order.
#[derive(Debug)]
pub struct LineReader {
    format: Arc<LogFormat>,
    /// Positions of shapes, the one that most of the first lines are in first.
    order: Vec<usize>,
    /// Whether the first lines are in some shape.
    is_known: bool,
    /// The columns of the lines that follow, for each of [`DIALECTS`].
    columns: [Option<Columns>; DIALECTS.len()],
    /// Whether lines have a time before them, see [`wrapper::behind_time`].
    has_times: bool,
    unwrapper: Unwrapper,
}

impl LogFormat {
    /// Reads `auto`, the name of a format, `json:FIELD=KEY,…`, or `FILE:NAME` for a `log_format` of nginx. `logged` are the
    /// fields that the configuration reads.
    ///
    /// # Errors
    ///
    /// A message for the user.
    pub fn parse(text: &str, logged: LoggedFields) -> Result<LogFormat, String> {
        let mut keys = KeyTree::known(&logged);
        let (name, assignments) = text.split_once(':').unwrap_or((text, ""));
        let is_known = |name: &str| name == "auto" || FORMATS.iter().any(|format| format.name == name);
        let shapes = match text.rsplit_once(':') {
            Some((file, name)) if !is_known(text.split(':').next().unwrap_or_default()) => {
                vec![Compiled::Pattern(nginx_pattern(file, name, &keys)?)]
            }
            _ => {
                let named = FORMATS.iter().filter(|format| name == "auto" || format.name == name);
                let mut shapes: Vec<&Shape> = Vec::new();
                for shape in named.flat_map(|format| format.shapes) {
                    if !shapes.contains(&shape) {
                        shapes.push(shape);
                    }
                }
                shapes.into_iter().map(|shape| Compiled::new(shape, &keys, &logged)).collect::<Result<_, _>>()?
            }
        };
        if shapes.is_empty() {
            let names: Vec<String> = FORMATS.iter().map(|format| format!("`{}`", format.name)).collect();
            return Err(format!(
                "`{name}` is no format: write `auto`, {}, `json:FIELD=KEY,…`, or `nginx.conf:NAME` for a `log_format` of \
                 nginx",
                names.join(", ")
            ));
        }
        if is_known(name) && !assignments.is_empty() {
            if !shapes.iter().any(|shape| matches!(shape, Compiled::Json)) {
                return Err("only the fields of JSON can be named".to_owned());
            }
            name_keys(&mut keys, assignments, &logged)?;
        }
        let combined = combined::Fields {
            user_agent: request_field(&logged, "user-agent"),
            referrer: request_field(&logged, "referer"),
        };
        Ok(LogFormat { shapes, is_auto: name == "auto", keys, combined, logged })
    }
}

impl Compiled {
    fn new(shape: &Shape, keys: &KeyTree, logged: &LoggedFields) -> Result<Compiled, String> {
        Ok(match *shape {
            Shape::Json => Compiled::Json,
            Shape::Combined => Compiled::Combined,
            Shape::Pattern(text, escape) => Compiled::Pattern(Pattern::parse(text, escape, keys)?),
            Shape::Columns(position) => {
                let dialect = DIALECTS[position];
                Compiled::Columns(position, Columns::new(dialect.default_columns, dialect, logged))
            }
        })
    }
}

/// Adds the keys of `FIELD=KEY,…`.
fn name_keys(keys: &mut KeyTree, assignments: &str, logged: &LoggedFields) -> Result<(), String> {
    for assignment in assignments.split(',').filter(|assignment| !assignment.is_empty()) {
        let (name, key) = assignment.split_once('=').ok_or(format!("`{assignment}` is not `FIELD=KEY`"))?;
        let header = || {
            let position = match name.split_once(':')? {
                ("header", name) => request_field(logged, name),
                ("response", name) => response_field(logged, name),
                _ => return None,
            };
            // Fields that the configuration does not read have no effect.
            Some(Field::Header(position.unwrap_or(u16::MAX)))
        };
        let known = NAMES.iter().find(|(known, _)| *known == name).map(|(_, field)| *field);
        let field = known.or_else(header).ok_or_else(|| {
            let names: Vec<String> = NAMES.iter().map(|(name, _)| format!("`{name}`")).collect();
            format!("`{name}` is no field: write {}, `header:NAME` or `response:NAME`", names.join(", "))
        })?;
        keys.insert(key, field, 0);
    }
    Ok(())
}

/// The pattern of a `log_format` in a configuration of nginx.
fn nginx_pattern(file: &str, name: &str, keys: &KeyTree) -> Result<Pattern, String> {
    let text = fs::read_to_string(file)
        .map_err(|error| format!("`{file}` is no format, and no configuration of nginx that can be read ({error})"))?;
    let format = nginx_conf::log_format(&text, name).map_err(|problem| format!("`{file}`: {problem}"))?;
    let pattern = Pattern::parse(&format.text, format.escape, keys);
    pattern.map_err(|problem| format!("`log_format {name}` of `{file}`: {problem}"))
}

impl LineReader {
    /// `start` is the beginning of the file, which decides the order in which formats are tried.
    pub fn new(format: Arc<LogFormat>, start: &[u8]) -> LineReader {
        let count = format.shapes.len();
        let mut reader = LineReader {
            format,
            order: (0..count).collect(),
            is_known: false,
            columns: Default::default(),
            has_times: false,
            unwrapper: Unwrapper::default(),
        };
        let start = &start[..start.len().min(FIRST_BYTES)];
        let (mut found, mut timed) = (vec![0; count], 0);
        let mut headers = Vec::new();
        for line in start.split(|byte| *byte == b'\n').take(FIRST_LINES) {
            let mut line = line.to_vec();
            let Ok(inner) = reader.unwrapper.unwrap(&mut line) else { continue };
            if reader.read_directive(&line[inner.clone()]) {
                continue;
            }
            // The last of the table are in what others are, too.
            let mut shape_of = |text: &[u8]| {
                (0..count).find(|position| {
                    headers.clear();
                    reader.read_in(*position, text, &mut headers).is_ok()
                })
            };
            let text = &line[inner];
            let position = shape_of(text).or_else(|| {
                let position = shape_of(&text[wrapper::behind_time(text)?..]);
                timed += usize::from(position.is_some());
                position
            });
            if let Some(position) = position {
                found[position] += 1;
            }
        }
        reader.order.sort_by_key(|position| usize::MAX - found[*position]);
        let read: usize = found.iter().sum();
        reader.is_known = read > 0;
        reader.has_times = timed > read / 2;
        reader.columns = Default::default();
        reader.unwrapper = Unwrapper::default();
        reader
    }

    /// Reads a line without its end; `None` if it is blank, or says something about the lines that follow. Returns the
    /// place of the line without what is around it, where spans are positions. `headers` receives the fields.
    pub fn read(
        &mut self,
        line: &mut [u8],
        headers: &mut Vec<HeaderSpan>,
    ) -> Option<(Range<usize>, Result<LogLine, NoRequest>)> {
        let mut inner = match self.unwrapper.unwrap(line) {
            Ok(inner) => inner,
            Err(problem) => return Some((0..line.len(), Err(problem))),
        };
        if self.has_times {
            inner.start += wrapper::behind_time(&line[inner.clone()]).unwrap_or(0);
        }
        let text = &line[inner.clone()];
        if text.is_empty() || self.read_directive(text) {
            return None;
        }
        Some((inner, self.read_text(text, headers)))
    }

    fn read_text(&self, text: &[u8], headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        let first_header = headers.len();
        let is_json = text.trim_ascii_start().first() == Some(&b'{');
        let mut problem = NoRequest::Bad("it is not in the format of the log");
        let mut is_first = true;
        for position in &self.order {
            if self.format.is_auto && is_json != matches!(self.format.shapes[*position], Compiled::Json) {
                continue;
            }
            match self.read_in(*position, text, headers) {
                Err(NoRequest::Bad(reason)) => {
                    headers.truncate(first_header);
                    // In a file of an unknown format, the problem is that of the most general one.
                    if is_first || !self.is_known {
                        problem = NoRequest::Bad(reason);
                    }
                    is_first = false;
                }
                found => return found,
            }
        }
        Err(problem)
    }

    fn read_in(&self, position: usize, line: &[u8], headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        let format = &*self.format;
        match &format.shapes[position] {
            Compiled::Json => json_line::read(line, &format.keys, headers),
            Compiled::Combined => combined::read(line, &format.combined, headers),
            Compiled::Pattern(pattern) => pattern.read(line, headers),
            Compiled::Columns(dialect, default) => {
                self.columns[*dialect].as_ref().unwrap_or(default).read(line, headers)
            }
        }
    }

    /// Whether a line is a directive of the W3C's format, such as `#Fields:`.
    fn read_directive(&mut self, line: &[u8]) -> bool {
        const DIRECTIVES: [&[u8]; 7] =
            [b"#Fields:", b"#Version:", b"#Software:", b"#Date:", b"#Start-Date:", b"#End-Date:", b"#Remark:"];
        let has_columns = self.format.shapes.iter().any(|shape| matches!(shape, Compiled::Columns(..)));
        if line.first() != Some(&b'#') || !has_columns || !DIRECTIVES.iter().any(|name| line.starts_with(name)) {
            return false;
        }
        for (dialect, columns) in DIALECTS.into_iter().zip(&mut self.columns) {
            if let Some(names) = Columns::names(line, dialect, &DIALECTS) {
                *columns = Some(Columns::new(&names, dialect, &self.format.logged));
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;
    use crate::json_scanner::{Escape, Span};
    use crate::log_line::LoggedDecision;
    use proptest::prelude::*;

    fn format(text: &str, request_fields: &[&'static str]) -> Arc<LogFormat> {
        let request = request_fields.iter().map(|name| HeaderName::from_static(name)).collect();
        let logged = LoggedFields { request, response: vec![HeaderName::from_static("x-cost")], costs: false };
        Arc::new(LogFormat::parse(text, logged).unwrap())
    }

    /// Reads a file of one line.
    fn parse_line(format: &Arc<LogFormat>, line: &str, headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        let mut reader = LineReader::new(Arc::clone(format), line.as_bytes());
        reader.read(&mut line.as_bytes().to_vec(), headers).unwrap().1
    }

    /// What a line says: time, client, method, target, host, status, and the fields by their position.
    fn read(format: &Arc<LogFormat>, line: &str) -> Result<String, NoRequest> {
        let mut headers = Vec::new();
        let parsed = parse_line(format, line, &mut headers)?;
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
            // Caddy, with lines of the client and of the proxy; Traefik; nginx behind PROXY headers.
            (
                r#"{"ts":971211336,"request":{"remote_ip":"10.0.0.1","client_ip":"10.0.0.1","method":"GET","host":"h","uri":"/","headers":{"X-Forwarded-For":["8.8.8.8, \"x\"","203.0.113.7", "10.0.0.9"]}},"duration":0,"status":200}"#.to_owned(),
                "10.0.0.1",
                "8.8.8.8, \"x\", 203.0.113.7, 10.0.0.9",
                "",
            ),
            (
                r#"{"StartUTC":"2000-10-10T20:55:36Z","ClientAddr":"10.0.0.1:5","ClientHost":"10.0.0.1","RequestMethod":"GET","RequestPath":"/","request_X-Forwarded-For":"8.8.8.8, 203.0.113.7"}"#.to_owned(),
                "10.0.0.1",
                "8.8.8.8, 203.0.113.7",
                "",
            ),
            (
                r#"{"time":"2000-10-10T20:55:36Z","remote_addr":"10.0.0.1","proxy_protocol_addr":"203.0.113.7","request":"GET / HTTP/1.1"}"#.to_owned(),
                "203.0.113.7",
                "",
                "",
            ),
            (
                r#"{"time":"2000-10-10T20:55:36Z","remote_addr":"10.0.0.1","proxy_protocol_addr":"","request":"GET / HTTP/1.1"}"#.to_owned(),
                "10.0.0.1",
                "",
                "",
            ),
        ] {
            let parsed = parse_line(&format, &line, &mut Vec::new()).unwrap();
            let text = |span: Span| {
                String::from_utf8(span.decoded(line.as_bytes(), &mut Vec::new()).to_vec()).unwrap()
            };
            let found = (parsed.client.to_string(), text(parsed.forwarded_for), text(parsed.client_name));
            assert_eq!((found.0.as_str(), found.1.as_str(), found.2.as_str()), (client, list, user), "{line}");
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
            parse_line(&format, &line, &mut Vec::new()).unwrap().decision
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
            let line = parse_line(&format, &line, &mut Vec::new()).unwrap();
            (line.time_ms, line.duration_ms)
        };
        for (fields, expected) in [
            // This gateway: the wait is not part of the duration.
            (r#""time":"2000-01-01T00:01:00.5Z","duration_ms":2500.75"#, (946_684_860_500, Some(2500))),
            (r#""time":"2000-01-01T00:01:00.5Z","duration_ms":2500,"delay_ms":2000.0"#, (946_684_860_500, Some(500))),
            // Caddy, Envoy, Traefik, nginx.
            (r#""ts":971211396.5,"duration":0.25"#, (971_211_396_250, Some(250))),
            (r#""duration":250,"start_time":"2000-01-01T00:01:00.5Z""#, (946_684_860_500, Some(250))),
            (r#""StartUTC":"2000-01-01T00:01:00.5Z","Duration":250000000"#, (946_684_860_500, Some(250))),
            (r#""msec":"971211396.500","request_time":"0.250""#, (971_211_396_250, Some(250))),
            (r#""time":"2000-01-01T00:01:00Z""#, (946_684_860_000, None)),
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

    /// It names the client, and is a field of the request.
    #[test]
    fn forwarded_for_may_be_the_key_of_a_rule() {
        let format = format("json", &["x-forwarded-for"]);
        for field in [
            r#""x_forwarded_for":"203.0.113.7""#,
            r#""http_x_forwarded_for":"203.0.113.7""#,
            r#""request_X-Forwarded-For":"203.0.113.7""#,
            r#""request":{"headers":{"X-Forwarded-For":["203.0.113.7"]}}"#,
        ] {
            let line = format!(r#"{{"ts":971211336,"ip":"::1","method":"GET","path":"/",{field}}}"#);
            assert_eq!(
                read_file(&format, &line),
                [Ok("971211336000 ::1 (203.0.113.7) GET / ?  []  0=203.0.113.7".to_owned())],
                "{field}"
            );
        }
    }

    /// What lines of a file say, each as [`read`] writes it, with `X-Forwarded-For`, scheme and duration; values are decoded.
    fn read_file(format: &Arc<LogFormat>, text: &str) -> Vec<Result<String, NoRequest>> {
        let mut reader = LineReader::new(Arc::clone(format), text.as_bytes());
        let (mut found, mut headers) = (Vec::new(), Vec::new());
        for line in text.lines() {
            headers.clear();
            let mut bytes = line.as_bytes().to_vec();
            let Some((inner, parsed)) = reader.read(&mut bytes, &mut headers) else { continue };
            found.push(parsed.map(|line| {
                let decoded = |span: Span| {
                    let mut buffer = Vec::new();
                    String::from_utf8_lossy(span.decoded(&bytes[inner.clone()], &mut buffer)).into_owned()
                };
                let fields: Vec<String> =
                    headers.iter().map(|(position, value)| format!(" {position}={}", decoded(*value))).collect();
                let taken = line.duration_ms.map(|ms| format!(" {ms}ms")).unwrap_or_default();
                let scheme = line.secure.map_or("", |is_secure| if is_secure { " https" } else { " http" });
                let status = line.status.map(|status| status.to_string()).unwrap_or_default();
                format!(
                    "{} {} ({}){scheme} {} {} ? {} [{}] {status}{taken}{}",
                    line.time_ms,
                    line.client,
                    decoded(line.forwarded_for),
                    decoded(line.method),
                    decoded(line.target),
                    decoded(line.query),
                    decoded(line.host),
                    fields.concat()
                )
            }));
        }
        found
    }

    #[test]
    fn values_are_decoded_as_their_format_escapes_them() {
        let auto = format("auto", &["user-agent"]);
        for (text, expected) in [
            (
                "#Version: 1.0\n#Fields: date time x-edge-location c-ip cs-method cs(Host) cs-uri-stem sc-status \
                 cs(User-Agent) cs-uri-query x-host-header time-taken x-forwarded-for\n\
                 2000-10-10\t20:55:36\tLHR\t10.0.0.1\tGET\td.cloudfront.net\t/a%2520b\t200\tcurl%20%22x%22%25\tq=%2541\t\
                 w\t1.25\t198.51.100.1,%2010.0.0.2",
                "971211334750 10.0.0.1 (198.51.100.1, 10.0.0.2) GET /a%20b ? q=%41 [w] 200 1250ms 0=curl \"x\"%",
            ),
            (
                "#Software: Microsoft Internet Information Services 10.0\r\n#Fields: date time s-ip cs-method cs-uri-stem \
                 cs-uri-query s-port cs-username c-ip cs(User-Agent) cs(Referer) sc-status sc-substatus sc-win32-status \
                 time-taken X-Forwarded-For\r\n2000-10-10 20:55:36 10.0.0.5 GET /a q=1 80 - ::1 curl/8+(x) - 404 0 2 250 \
                 198.51.100.1",
                "971211335750 ::1 (198.51.100.1) http GET /a ? q=1 [] 404 250ms 0=curl/8 (x)",
            ),
            (
                "2001:db8::7:3331 [10/Oct/2000:20:55:36.123] in~ static/srv1 10/0/30/69/+109 200 2750 - - ---- 1/1/1/1/0 \
                 0/0 {a|b} {} \"GET /#22#23?x HTTP/1.1\" 0/0/0/0/0 -/TLSv1.3/x",
                "971211336123 2001:db8::7 () https GET /\"#?x ?  [] 200 109ms",
            ),
            (
                "[2000-10-10T20:55:36.123Z] \"GET /a HTTP/2\" 0 DC 0 0 12 - \"198.51.100.1, 10.0.0.2\" \"a\\\" \"id\" \"h\" \"-\"",
                "971211336123 10.0.0.2 (198.51.100.1, 10.0.0.2) GET /a ?  [h]  12ms 0=a\\",
            ),
        ] {
            let mut found = read_file(&auto, text);
            assert_eq!((found.len(), found.pop()), (1, Some(Ok(expected.to_owned()))), "{text}");
        }
    }

    #[test]
    fn a_time_before_each_line_is_no_virtual_host() {
        let auto = format("auto", &[]);
        let combined = "203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"-\"";
        let request = "971211336000 203.0.113.7 () GET / ?  [] 200";
        let text = format!(
            "2024-01-01T00:00:00.123456789Z {combined}\n2024-01-01T00:00:00Z starting\n2024-01-01T00:00:01Z {combined}\n{combined}"
        );
        let expected = [
            Ok(request.to_owned()),
            Err(NoRequest::Bad("it is in no known format")),
            Ok(request.to_owned()),
            Ok(request.to_owned()),
        ];
        assert_eq!(read_file(&auto, &text), expected);
        // The time of another format stays.
        let elb = "2000-10-10T20:55:36.000000Z lb 203.0.113.7:41000 - 0 0 0 200 200 0 29 \"GET http://h:80/ HTTP/1.1\" \"-\" - -";
        assert_eq!(read_file(&auto, elb), [Ok("971211336000 203.0.113.7 () GET http://h:80/ ?  [] 200".to_owned())]);
        let word = format!("@@ {combined}");
        assert_eq!(read_file(&auto, &word), [Err(NoRequest::Bad("the client is not an address"))]);
    }

    #[test]
    fn lines_without_a_request_say_so() {
        let auto = format("auto", &[]);
        let tcp = "203.0.113.7:33313 [09/Oct/2026:14:01:10.655] fnt bck/srv1 0/0/5007 212 -- 0/0/0/0/3 0/0";
        let expiration =
            "o b [06/Feb/2019:00:00:38 +0000] - AmazonS3 3E S3.EXPIRE.OBJECT a.txt \"-\" - - - 113 - - \"-\" \"-\" -";
        let found = read_file(&auto, tcp);
        assert_eq!(found, [Err(NoRequest::Bad("it has no request such as \"GET / HTTP/1.1\""))]);
        assert_eq!(read_file(&format("s3", &[]), expiration), [Err(NoRequest::Rejected)]);
        assert_eq!(read_file(&auto, expiration), [Err(NoRequest::Rejected)]);
    }

    #[test]
    fn clients_cannot_write_other_values() {
        let auto = format("auto", &["user-agent"]);
        // Envoy does not escape quotes.
        let good = "[2000-10-10T20:55:36.123Z] \"GET /a HTTP/2\" 200 - 0 0 12 - \"10.0.0.2\" \"a\" \"id\" \"h\" \"-\"";
        let bad = good.replace("\"10.0.0.2\"", "\"198.51.100.1\" \"x\" \"y\" \"z\", 10.0.0.2\"");
        let found = read_file(&auto, &format!("{good}\n{bad}"));
        assert_eq!(found[1], Err(NoRequest::Bad("it has more or fewer quotes than the format")));
        // The user is before the time.
        let line = "203.0.113.7 - a [01/Jan/1999:00:00:00 +0000] [10/Oct/2000:20:55:36 +0000] h \"GET / HTTP/1.1\" 200 1 \
                    0.000 \"-\" \"-\" 10.0.0.9:80, 10.0.0.8:80 : 10.0.0.7:80 502, 200 : 200 0.1, 0.2 : 0.3 \"http://x/\"";
        let found = read_file(&auto, line);
        assert_eq!(found, [Ok("971211336000 203.0.113.7 () GET / ?  [h] 200 0ms".to_owned())]);
    }

    #[test]
    fn a_file_has_the_format_of_most_of_its_first_lines() {
        let auto = format("auto", &[]);
        let combined = "203.0.113.7 - - [10/Oct/2000:20:55:36 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"-\"";
        let traefik = format!("{combined} 1 \"r@file\" \"http://10.0.0.9:80\" 250ms");
        let json = r#"{"time":"2000-10-10T20:55:36Z","client":"203.0.113.7","method":"GET","path":"/"}"#;
        let request = "971211336000 203.0.113.7 () GET / ?  [] 200";
        let expected = [
            Err(NoRequest::Bad("it is not in the format of the log")),
            // Cut off behind the user agent.
            Ok(request.to_owned()),
            Ok(format!("{request} 250ms")),
            Ok(format!("{request} 250ms")),
            Ok("971211336000 203.0.113.7 () GET / ?  [] ".to_owned()),
        ];
        let found = read_file(&auto, &format!("starting\n{combined}\n{traefik}\n{traefik}\n{json}"));
        assert_eq!(found, expected);
        // A format that is named is that of all lines.
        let found = read_file(&format("combined", &[]), &format!("{traefik}\n{json}\n#Fields: date time"));
        assert_eq!(found[0], Ok(request.to_owned()));
        assert!(found[1].is_err() && found[2].is_err());
    }

    #[test]
    fn a_line_without_a_time_of_its_own_is_bad() {
        let auto = format("auto", &[]);
        for line in [
            r#"{"EdgeStartTimestamp":0,"ClientIP":"::1","ClientRequestMethod":"GET","ClientRequestURI":"/"}"#,
            r#"{"time":"1970-01-01T00:00:00Z","client":"::1","method":"GET","path":"/"}"#,
            "2000-10-10\t-\tLHR\t1\t::1\tGET\th\t/\t200\t-\t-\t-\t-\tHit\tid\th\thttp\t1\t0.1\t-",
            "[-] \"GET /a HTTP/2\" 200 - 0 0 12 - \"10.0.0.2\" \"a\" \"id\" \"h\" \"-\"",
            "http - elb 10.0.0.1:2817 - 0 0 0 200 - 1 1 \"GET http://h:80/ HTTP/1.1\" \"-\" - - - \"-\" \"-\" \"-\" 0 - \"-\"",
            "203.0.113.7 - - [01/Jan/1970:00:00:00 +0000] \"GET / HTTP/1.1\" 200 1",
        ] {
            assert!(matches!(&read_file(&auto, line)[..], [Err(NoRequest::Bad(_))]), "{line}");
        }
    }

    #[test]
    fn a_log_format_of_nginx_is_read() {
        let pattern = |text: &str| {
            let keys = KeyTree::known(&LoggedFields::default());
            Pattern::parse(text, Escape::Backslash, &keys).map(drop)
        };
        for (text, problem) in [
            ("$remote_addr \"$request\" $status", "it has no variable for the time of a request"),
            ("$time_local \"$request\"", "it has no variable for the client of a request"),
            ("$time_local $remote_addr $request_method", "it has no variable for the path of a request"),
            ("$time_local$remote_addr $request", "nothing is between `$remote_addr` and the variable before it"),
            (
                "$remote_addr;$msec;$http_user_agent;$request",
                "a value of `$http_user_agent` can contain `;`, the text behind it, so that its end is unknown: let nginx \
                 write it in quotes",
            ),
        ] {
            assert_eq!(pattern(text).unwrap_err(), problem, "{text}");
        }
        let keys = KeyTree::known(&LoggedFields::default());
        let text = "${remote_addr}|$msec|$request_method $scheme://$host$request_uri|$status";
        let pattern = Pattern::parse(text, Escape::Backslash, &keys).unwrap();
        let line = b"203.0.113.7|971211336.123|GET https://h.example/a?b=c|200";
        let found = pattern.read(line, &mut Vec::new()).unwrap();
        assert_eq!((found.time_ms, found.secure, found.status), (971_211_336_123, Some(true), Some(200)));
        assert_eq!((found.host.of(line), found.target.of(line)), (&b"h.example"[..], &b"/a?b=c"[..]));
        for (text, line) in [
            ("$remote_addr|$time_local|$request|$status", "::1|10/Oct/2000:20:55:36 +0000|GET /a?b HTTP/1.1|200"),
            (
                "$remote_addr\t$time_iso8601\t$request\t$status",
                "::1\t2000-10-10T20:55:36+00:00\tGET /a?b HTTP/1.1\t200",
            ),
            ("$remote_addr $msec $request $status", "::1 971211336.000 GET /a?b HTTP/1.1 200"),
            ("$time_local $remote_addr $request $status", "10/Oct/2000:20:55:36 +0000 ::1 GET /a?b HTTP/1.1 200"),
            (
                "$remote_addr;$time_local;\"$http_user_agent\";$request;$status",
                "::1;10/Oct/2000:20:55:36 +0000;\"a; b\";GET /a?b HTTP/1.1;200",
            ),
            (
                "$proxy_protocol_addr - [$time_local] \"$request\" $status",
                "::1 - [10/Oct/2000:20:55:36 +0000] \"GET /a?b HTTP/1.1\" 200",
            ),
            (
                "$remote_addr|$time_local|$http_user_agent|$request_method|$uri|$args|$status",
                "::1|10/Oct/2000:20:55:36 +0000|a (b; c)|GET|/a|b|200",
            ),
        ] {
            let pattern = Pattern::parse(text, Escape::Backslash, &keys).unwrap();
            let read = |line: &str| pattern.read(line.as_bytes(), &mut Vec::new());
            let found = read(line).unwrap_or_else(|problem| panic!("{text}: {problem:?}"));
            assert_eq!((found.time_ms, found.status), (971_211_336_000, Some(200)), "{text}");
            assert!(found.target.of(line.as_bytes()).starts_with(b"/a"), "{text}");
            if text.contains("$request$") || text.contains("$request ") {
                assert!(matches!(read(&line.replace(" HTTP/1.1", "")), Err(NoRequest::Bad(_))), "{text}");
                assert_eq!(read(&line.replace("GET /a?b HTTP/1.1", "-")).unwrap_err(), NoRequest::Rejected, "{text}");
            }
        }
        for (text, message) in [
            ("missing.conf:main", "`missing.conf` is no format, and no configuration of nginx that can be read"),
            ("alb:client=x", "only the fields of JSON"),
        ] {
            let error = LogFormat::parse(text, LoggedFields::default()).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60), at: proptest::sample::Index, row: proptest::sample::Index) {
            const LINES: [&[u8]; 8] = [
                b"1.1.1.1 - - [10/Oct/2000:20:55:36 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"-\"",
                b"{\"time\":",
                b"#Fields: date time c-ip cs-method cs-uri-stem date\n2000-10-10 20:55:36 ::1 GET / 2000-10-10",
                b"#Fields: x-edge-location date\nLHR\t2000-10-10",
                b"1.1.1.1:1 [10/Oct/2000:20:55:36.123] in static/srv1 10/0/30/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 \"GET / HTTP/1.1\"",
                b"[2000-10-10T20:55:36.123Z] \"GET /a HTTP/2\" 0 DC 0 0 12 - \"10.0.0.2\" \"a\" \"id\" \"h\" \"-\"",
                b"http 2000-10-10T20:55:36Z elb [::1]:2817 - 0 0 0 200 - 1 1 \"GET http://h:80/ HTTP/1.1\" \"-\" - - - \"-\" \"-\" \"-\" 0 2000-10-10T20:55:36Z \"-\"",
                b"o b [06/Feb/2019:00:00:38 +0000] 192.0.2.3 - 3E REST.GET.OBJECT - \"GET / HTTP/1.1\" 200 - 113 - 7 - \"-\" \"S3\"",
            ];
            let line = LINES[row.index(LINES.len())];
            let cut = at.index(line.len() + 1);
            let format = format("auto", &["user-agent"]);
            for text in [[&line[..cut], &bytes, &line[cut..]].concat(), [&line[..cut], &bytes].concat(), bytes] {
                let mut reader = LineReader::new(Arc::clone(&format), &text);
                for line in text.split(|byte| *byte == b'\n') {
                    let _ = reader.read(&mut line.to_vec(), &mut Vec::new());
                }
            }
        }
    }
}
