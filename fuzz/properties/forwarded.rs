//! For any `X-Forwarded-For` or `Forwarded` fields: fields from an untrusted peer are ignored, and with a trusted peer the
//! client is the last address that is not a trusted proxy, whatever precedes it.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use transom_http::client_address::ClientAddress;
use transom_http::forwarded::{ClientPlace, ForwardedField, TrustedProxies};

const PROXY: &str = "10.0.0.1";
const CLIENT: &str = "192.0.2.7";
const UNTRUSTED: &str = "203.0.113.9";

pub fn holds(bytes: &[u8]) {
    let parse = |text: &str| text.parse::<ClientAddress>().expect("an address");
    for (field, name, element) in [
        (ForwardedField::XForwardedFor, "x-forwarded-for", CLIENT),
        (ForwardedField::Forwarded, "forwarded", "for=192.0.2.7"),
    ] {
        let networks = ["10.0.0.0/8", "fd00::/8"].map(|text| text.parse().expect("a network"));
        let trust = TrustedProxies::new(&networks, field, ClientPlace::FirstUntrusted);
        let name = HeaderName::from_static(name);
        let mut headers = HeaderMap::new();
        let mut last = Vec::new();
        for text in bytes.split(|byte| *byte == b'\n') {
            let Ok(value) = HeaderValue::from_bytes(text) else { continue };
            headers.append(name.clone(), value);
            last = text.to_vec();
        }
        assert_eq!(trust.client(parse(UNTRUSTED), false, &headers).address, parse(UNTRUSTED));
        trust.client(parse(PROXY), false, &headers);
        let by_place = TrustedProxies::new(&networks, field, ClientPlace::Hop(1 + bytes.len() % 3));
        let by_field = TrustedProxies::new(&networks, field, ClientPlace::Field(name.clone()));
        by_place.client(parse(PROXY), false, &headers);
        by_field.client_of_proxy(parse(PROXY), &headers);
        assert_eq!(by_place.client(parse(UNTRUSTED), false, &headers).address, parse(UNTRUSTED));
        assert_eq!(by_field.client(parse(UNTRUSTED), false, &headers).address, parse(UNTRUSTED));

        // The address in a field of its own, and at the end of the last field.
        let mut own_field = headers.clone();
        own_field.append(name.clone(), HeaderValue::from_static(element));
        assert_eq!(trust.client(parse(PROXY), false, &own_field).address, parse(CLIENT));
        last.extend_from_slice(b", ");
        last.extend_from_slice(element.as_bytes());
        let mut same_field = HeaderMap::new();
        same_field.insert(name, HeaderValue::from_bytes(&last).expect("a value"));
        let found = trust.client(parse(PROXY), false, &same_field).address;
        // A quoted string that an earlier field leaves open makes the field invalid: then the proxy counts as the client.
        assert!(found == parse(CLIENT) || (field == ForwardedField::Forwarded && found == parse(PROXY)), "{found}");
    }
}
