//! Reads the common and the combined format of nginx and Apache.

use memchr::{memchr, memchr_iter, memrchr};

use super::json_scanner::{Escape, Span};
use super::log_line::{
    HeaderSpan, LogLine, LoggedCost, NoRequest, escaped, is_address_list, parse_address, parse_client, parse_status,
    quoted, span, split_request,
};
use super::timestamp;
use transom_http::client_address::ClientAddress;
use transom_http::request_validation::normalized_host;

/// The positions of fields that a line has.
#[derive(Debug)]
pub struct Fields {
    pub user_agent: Option<u16>,
    pub referrer: Option<u16>,
}

/// `client - user [time] "request" status bytes "referrer" "user agent"`, also with the virtual host in front; anything
/// may follow, such as `X-Forwarded-For` in quotes at the end (`main` of nginx). In the place of the client there can be the
/// whole `X-Forwarded-For`. ingress-nginx writes `client - [list] - user`, where the list has the client that it found, or
/// `X-Forwarded-For` with its own peer.
pub fn read(line: &[u8], fields: &Fields, headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
    let first_end = memchr(b' ', line).ok_or(NoRequest::Bad("it is in no known format"))?;
    let (mut host, mut start) = (Span::default(), 0);
    let mut found = client_or_list(line, start);
    // Another word, such as a time of `kubectl logs --timestamps`, is no virtual host.
    if found.is_none() && std::str::from_utf8(&line[..first_end]).is_ok_and(|host| normalized_host(host).is_some()) {
        (host, start) = (span(0, first_end), first_end + 1);
        found = client_or_list(line, start);
    }
    let (mut client, mut forwarded_for, client_end) = found.ok_or(NoRequest::Bad("the client is not an address"))?;
    let mut before_user = client_end;
    if let Some(list) = line[client_end..].strip_prefix(b" - [")
        && let Some(length) = memchr(b']', list).filter(|length| is_address_list(&list[..*length]))
    {
        before_user = client_end + 4 + length + 1;
        match memchr(b',', &list[..length]) {
            Some(_) => forwarded_for = span(client_end + 4, length),
            None => client = parse_address(&list[..length]).unwrap_or(client),
        }
    }
    // The name of the user may contain a bracket, but no quote.
    let starts = memchr_iter(b'[', line).filter_map(|at| {
        let is_time = line.get(at + 27..at + 30) == Some(b"] \"");
        Some((at, timestamp::common_log(line.get(at + 1..at + 27)?).filter(|_| is_time)?))
    });
    let (at, time_ms) = { starts }.next().ok_or(NoRequest::Bad(match memchr(b'"', line) {
        Some(_) => "it has no time such as [10/Oct/2000:13:55:36 -0700]",
        None => "it has no request such as \"GET / HTTP/1.1\"",
    }))?;
    let request = quoted(line, at + 29).ok_or(NoRequest::Bad("the request has no closing quote"))?;
    let after = end_of(request);
    let status = line.get(after + 1..after + 4).and_then(parse_status);
    let status = status.ok_or(NoRequest::Bad("it has no status"))?;
    let (method, target) = split_request(request, line).ok_or(NoRequest::Rejected)?;
    let first_header = headers.len() as u32;
    let referrer = next_quoted(line, after);
    let user_agent = referrer.and_then(|referrer| next_quoted(line, end_of(referrer)));
    for (position, value) in [(fields.referrer, referrer), (fields.user_agent, user_agent)] {
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
        .map(|user| escaped(span(before_user + 3, user.len()), Escape::Backslash, line));
    Ok(LogLine {
        time_ms,
        duration_ms: None,
        client,
        client_behind: None,
        forwarded_for,
        finds_client: false,
        client_name: client_name.unwrap_or_default(),
        method,
        target,
        is_url: false,
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

/// The first text in quotes from a position on.
fn next_quoted(line: &[u8], from: usize) -> Option<Span> {
    quoted(line, from + memchr(b'"', line.get(from..)?)?)
}

/// The position behind the closing quote.
fn end_of(quoted: Span) -> usize {
    (quoted.at + quoted.len) as usize + 1
}

/// The text in quotes at the end of a line, if it is a list of addresses. `from` is behind the user agent, which clients choose.
fn trailing_list(line: &[u8], from: usize) -> Span {
    let start =
        line.strip_suffix(b"\"").and_then(|rest| memrchr(b'"', rest.get(from..)?)).map(|quote| from + quote + 1);
    let start = start.filter(|start| is_address_list(&line[*start..line.len() - 1]));
    start.map_or(Span::default(), |start| span(start, line.len() - 1 - start))
}

/// The address at a position, or the last of a list, with the list and their end.
fn client_or_list(line: &[u8], start: usize) -> Option<(ClientAddress, Span, usize)> {
    let next_blank = |from: usize| memchr(b' ', &line[from..]).map_or(line.len(), |at| from + at);
    let mut end = next_blank(start);
    while line[..end].ends_with(b",") && end < line.len() {
        end = next_blank(end + 1);
    }
    let text = span(start, end - start);
    let (client, list) = parse_client(text, line)?;
    Some((client, list, end))
}
