//! A question: a request given as to curl, or as the JSON of `POST /v1/explain`.

use std::net::{IpAddr, Ipv4Addr};

use http::header::{HOST, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Method, Request, Uri};
use serde_json::{Map, Value};

use transom_http::client_address::ClientAddress;
use transom_http::path_normalize::encode_query;

/// The fields of a question in JSON.
const FIELDS: [&str; 6] = ["method", "url", "headers", "body", "client", "as_client"];

/// A request to explain, in the form of HTTP/1.1.
#[derive(Debug)]
pub struct Question {
    pub parts: Parts,
    /// Empty: the request has none.
    pub body: String,
    /// Host and port of the URL.
    pub authority: String,
    pub is_secure: bool,
    /// The address that the request comes from.
    pub client: ClientAddress,
    /// The name of the client whose request it is, whatever its fields and its address say.
    pub as_client: Option<String>,
}

impl Question {
    /// The address of a client that a question does not name.
    pub const CLIENT: ClientAddress = ClientAddress::Ip(IpAddr::V4(Ipv4Addr::LOCALHOST));

    /// An URL without a scheme is of http. A Host field replaces the host of the URL.
    ///
    /// # Errors
    ///
    /// The message for the user.
    pub fn new(
        method: &str,
        url: &str,
        fields: &[(String, String)],
        client: ClientAddress,
    ) -> Result<Question, String> {
        let not_a_url = || {
            format!(
                "`{url}` is not a URL of http or https: write `http://HOST/PATH` or `https://HOST/PATH`, with blanks and \
                 characters beyond ASCII as `%XX`"
            )
        };
        // The fragment stays with the client (RFC 9110, section 4.2.5).
        let target = encode_query(url.split_once('#').map_or(url, |(target, _fragment)| target));
        let uri = match target.contains("://") {
            true => target.parse::<Uri>(),
            false => format!("http://{target}").parse(),
        };
        let uri = uri.map_err(|_invalid| not_a_url())?;
        let is_secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            Some(_) | None => return Err(not_a_url()),
        };
        let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
        if authority.contains('@') {
            return Err(String::from("the URL has a user name: write it as the header `Authorization: Basic …`"));
        }
        let method = Method::from_bytes(method.as_bytes()).map_err(|_invalid| format!("`{method}` is not a method"))?;
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = method;
        parts.uri = uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/")).into();
        for (name, value) in fields {
            let named = HeaderName::from_bytes(name.as_bytes());
            let named = named.map_err(|_invalid| format!("`{name}` is not the name of a header"))?;
            let value = HeaderValue::from_bytes(value.trim().as_bytes());
            // The value may be a secret.
            let value =
                value.map_err(|_invalid| format!("the value of the header `{name}` has a control character"))?;
            parts.headers.try_append(named, value).map_err(|_full| String::from("there are too many headers"))?;
        }
        if !parts.headers.contains_key(HOST) {
            let host = HeaderValue::from_str(&authority).map_err(|_invalid| not_a_url())?;
            parts.headers.insert(HOST, host);
        }
        Ok(Question { parts, body: String::new(), authority, is_secure, client, as_client: None })
    }

    /// Parses `{"method": …, "url": …, "headers": {…}, "body": …, "client": …, "as_client": …}`. The value of a header is a string, or a list for a
    /// header that is given several times.
    ///
    /// # Errors
    ///
    /// The message for the caller.
    pub fn from_json(text: &[u8]) -> Result<Question, String> {
        let question: Map<String, Value> =
            serde_json::from_slice(text).map_err(|_| String::from("the question is not a JSON object"))?;
        if let Some(other) = question.keys().find(|name| !FIELDS.contains(&name.as_str())) {
            let other: String = other.chars().take(64).collect();
            return Err(format!("`{other}` is not one of `{}`", FIELDS.join("`, `")));
        }
        let text = |name: &str| match question.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str())),
            Some(_) => Err(format!("`{name}` is not a string")),
        };
        let url = text("url")?.ok_or("`url` is missing")?;
        let client = match text("client")? {
            None => Question::CLIENT,
            Some(client) => {
                client.parse().map_err(|_| String::from("`client` is neither an IP address nor `unix:`"))?
            }
        };
        let fields = match question.get("headers") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Object(headers)) => fields_of(headers).ok_or(NOT_HEADERS)?,
            Some(_) => return Err(NOT_HEADERS.to_owned()),
        };
        let as_client = text("as_client")?.map(str::to_owned);
        let body = text("body")?.unwrap_or_default().to_owned();
        let method = text("method")?.unwrap_or(Question::method_with(&body));
        Ok(Question { as_client, body, ..Question::new(method, url, &fields, client)? })
    }

    /// The method of a request that names none, as curl has it.
    pub fn method_with(body: &str) -> &'static str {
        if body.is_empty() { "GET" } else { "POST" }
    }
}

const NOT_HEADERS: &str = "`headers` is not an object of strings or lists of strings";

/// `None` if a value is neither a string nor a list of strings.
fn fields_of(headers: &Map<String, Value>) -> Option<Vec<(String, String)>> {
    let mut fields = Vec::new();
    for (name, value) in headers {
        let values = match value {
            Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        };
        for value in values {
            fields.push((name.clone(), value.as_str()?.to_owned()));
        }
    }
    Some(fields)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn question(url: &str, fields: &[(&str, &str)]) -> Result<Question, String> {
        let fields: Vec<_> = fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let asked = Question::new("GET", url, &fields, Question::CLIENT);
        let mut headers: Map<String, Value> = Map::new();
        for (name, value) in &fields {
            let values = headers.entry(name.to_ascii_lowercase()).or_insert_with(|| json!([]));
            values.as_array_mut().unwrap().push(json!(value));
        }
        let body = json!({ "method": "GET", "url": url, "headers": headers }).to_string();
        let parsed = Question::from_json(body.as_bytes());
        let head = |question: &Result<Question, String>| {
            question.as_ref().map(|q| (q.parts.uri.clone(), q.parts.headers.clone(), q.is_secure)).map_err(Clone::clone)
        };
        assert_eq!(head(&asked), head(&parsed));
        asked
    }

    #[test]
    fn a_url_is_read_as_curl_reads_it() {
        for (url, host, target, is_secure) in [
            ("http://a.test/x?y=1#z", "a.test", "/x?y=1", false),
            ("https://a.test:8443", "a.test:8443", "/", true),
            ("a.test/x", "a.test", "/x", false),
            ("localhost:8080/a%2Fb/../c", "localhost:8080", "/a%2Fb/../c", false),
            ("HTTP://[::1]:80/?q", "[::1]:80", "/?q", false),
            ("a.test/?q=\"<x>\"", "a.test", "/?q=%22%3Cx%3E%22", false),
        ] {
            let question = question(url, &[]).unwrap();
            assert_eq!(question.parts.uri.to_string(), target, "{url}");
            assert_eq!((question.parts.headers[HOST].to_str().unwrap(), question.is_secure), (host, is_secure));
        }
        let other_host =
            question("http://127.0.0.1:8080/", &[("Host", "api.test"), ("X-A", "1"), ("x-a", "2")]).unwrap();
        assert_eq!(other_host.parts.headers[HOST], "api.test");
        assert_eq!(other_host.parts.headers.get_all("x-a").iter().count(), 2);
    }

    #[test]
    fn wrong_questions_name_what_is_wrong() {
        for url in ["", "http://", "ftp://a/", "http://a b/", "http:///x", "://a", "http://a/\u{0}"] {
            let error = question(url, &[]).unwrap_err();
            assert!(error.contains("is not a URL of http or https"), "{url}: {error}");
        }
        assert!(question("http://me:secret@a/", &[]).unwrap_err().contains("Authorization"));
        assert!(question("http://a/", &[("a b", "c")]).unwrap_err().contains("`a b` is not the name of a header"));
        let error = question("http://a/", &[("x-key", "se\ncret")]).unwrap_err();
        assert!(error.contains("`x-key`") && !error.contains("cret`"), "{error}");
        for (body, message) in [
            ("[]", "not a JSON object"),
            ("{}", "`url` is missing"),
            (r#"{"url": 1}"#, "`url` is not a string"),
            (r#"{"url": "http://a/", "method": "G T"}"#, "`G T` is not a method"),
            (r#"{"url": "http://a/", "client": "acme"}"#, "`client` is neither an IP address nor `unix:`"),
            (r#"{"url": "http://a/", "headers": {"a": 1}}"#, "`headers` is not"),
            (r#"{"url": "http://a/", "headers": []}"#, "`headers` is not"),
            (r#"{"url": "http://a/", "host": "b"}"#, "`host` is not one of"),
        ] {
            let error = Question::from_json(body.as_bytes()).unwrap_err();
            assert!(error.contains(message), "{body}: {error}");
        }
    }
}
