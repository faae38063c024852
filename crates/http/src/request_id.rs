//! The id of a request: `X-Request-Id`.

use http::header::{HeaderMap, HeaderName, HeaderValue};

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longer request ids are replaced.
const MAX_BYTES: usize = 128;
/// Bytes of a new id.
const NEW_ID_BYTES: usize = 10;

/// The id of a request. Small, because requests are moved often.
pub enum RequestId {
    /// Random.
    Made([u8; NEW_ID_BYTES]),
    /// From a trusted proxy.
    Received(Box<HeaderValue>),
}

impl RequestId {
    pub fn of(headers: &HeaderMap, is_trusted: bool) -> RequestId {
        let received = if is_trusted { single_value(headers, &X_REQUEST_ID).filter(is_acceptable) } else { None };
        received.map_or_else(
            || {
                let mut id = [0; NEW_ID_BYTES];
                fastrand::fill(&mut id);
                RequestId::Made(id)
            },
            |id| RequestId::Received(Box::new(id)),
        )
    }

    /// The value of `X-Request-Id`. HTTP/2 does not add it to the dynamic table, which such values would fill (RFC 7541,
    /// section 6.2.3).
    pub fn to_value(&self) -> HeaderValue {
        let mut value = match self {
            RequestId::Received(id) => HeaderValue::clone(id),
            RequestId::Made(id) => HeaderValue::from_bytes(&text_of(id)).unwrap_or(HeaderValue::from_static("-")),
        };
        value.set_sensitive(true);
        value
    }

    /// Writes the field of an HTTP/1.1 head.
    pub fn write_field(&self, head: &mut Vec<u8>) {
        head.extend_from_slice(b"x-request-id: ");
        match self {
            RequestId::Received(id) => head.extend_from_slice(id.as_bytes()),
            RequestId::Made(id) => head.extend_from_slice(&text_of(id)),
        }
        head.extend_from_slice(b"\r\n");
    }
}

/// A new id in base 32 (RFC 4648, section 6), with small letters.
fn text_of(id: &[u8; NEW_ID_BYTES]) -> [u8; NEW_ID_BYTES * 8 / 5] {
    const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    // Five bytes are eight digits.
    let halves = [&id[..5], &id[5..]].map(|half| half.iter().fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte)));
    std::array::from_fn(|place| DIGITS[(halves[place / 8] >> (5 * (7 - place % 8))) as usize % DIGITS.len()])
}

fn is_acceptable(id: &HeaderValue) -> bool {
    (1..=MAX_BYTES).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// The value of a field that occurs once.
fn single_value(headers: &HeaderMap, name: &HeaderName) -> Option<HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none()).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn only_a_trusted_and_unambiguous_id_is_taken_over() {
        let long = "a".repeat(129);
        for (values, is_trusted, is_taken) in [
            (&["abc-1"][..], true, true),
            (&["abc-1"], false, false),
            (&[], true, false),
            (&["a", "a"], true, false),
            (&[""], true, false),
            (&["a b"], true, false),
            (&["a\tb"], true, false),
            (&[&long[1..]], true, true),
            (&[&long], true, false),
        ] {
            let id = RequestId::of(&headers("x-request-id", values), is_trusted).to_value();
            assert_eq!(values.first().is_some_and(|value| id == value), is_taken, "{values:?} {is_trusted}");
            assert!(is_taken || (id.len() == 16 && id.as_bytes().iter().all(u8::is_ascii_alphanumeric)), "{id:?}");
        }
        let new = || RequestId::of(&HeaderMap::new(), false).to_value();
        assert_ne!(new(), new());
    }
}
