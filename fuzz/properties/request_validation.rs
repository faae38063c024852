//! For any request head that parses: a head that validation accepts has one host, a method and a target that the
//! gateway serves, and an unambiguous body length.

use http::{HeaderName, HeaderValue, Method, Request, Uri, Version};
use transom::http::request_validation;

pub fn holds(bytes: &[u8]) {
    let Some(request) = parsed(bytes) else { return };
    let (parts, ()) = request.into_parts();
    let Ok(valid) = request_validation::validate(&parts) else { return };
    assert!(parts.method != Method::CONNECT && parts.method != Method::TRACE);
    assert!(parts.uri.path().starts_with('/') || (parts.uri.path() == "*" && parts.method == Method::OPTIONS));
    let hosts = parts.headers.get_all("host").iter().count();
    assert!(hosts == 1 || (hosts == 0 && parts.version == Version::HTTP_10));
    assert!(
        !valid.host.contains(['@', '/', ' ', '?', '#']) && !valid.host.bytes().any(|byte| byte.is_ascii_uppercase())
    );
    let codings: Vec<_> = parts.headers.get_all("transfer-encoding").iter().collect();
    assert!(codings.len() <= 1 && codings.iter().all(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked")));
    assert!(codings.is_empty() || !parts.headers.contains_key("content-length"));
}

/// The request that hyper would pass on.
fn parsed(bytes: &[u8]) -> Option<Request<()>> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Request::new(&mut fields);
    if !head.parse(bytes).ok()?.is_complete() {
        return None;
    }
    let version = if head.version? == 0 { Version::HTTP_10 } else { Version::HTTP_11 };
    let uri: Uri = head.path?.parse().ok()?;
    let mut request = Request::new(());
    *request.method_mut() = Method::from_bytes(head.method?.as_bytes()).ok()?;
    *request.uri_mut() = uri;
    *request.version_mut() = version;
    for field in head.headers {
        let name = HeaderName::from_bytes(field.name.as_bytes()).ok()?;
        request.headers_mut().append(name, HeaderValue::from_bytes(field.value).ok()?);
    }
    Some(request)
}
