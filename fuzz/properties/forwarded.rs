//! Of any fields that claim to tell who asks: nobody is believed who is not trusted, and what stands before the
//! first address that is not a trusted proxy's changes nothing.

use std::net::IpAddr;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use transom::config::listen::{ForwardedField, TrustedProxies};
use transom::http::forwarded::Trust;

const PROXY: &str = "10.0.0.1";
const CLIENT: &str = "192.0.2.7";
const STRANGER: &str = "203.0.113.9";

pub fn holds(bytes: &[u8]) {
    let parse = |text: &str| text.parse::<IpAddr>().expect("an address");
    for (by, name, element) in [
        (ForwardedField::XForwardedFor, "x-forwarded-for", CLIENT),
        (ForwardedField::Forwarded, "forwarded", "for=192.0.2.7"),
    ] {
        let networks = ["10.0.0.0/8", "fd00::/8"].map(|text| text.parse().expect("a network")).to_vec();
        let trust = Trust::new(&TrustedProxies { networks, field: by });
        let name = HeaderName::from_static(name);
        let mut headers = HeaderMap::new();
        let mut last = Vec::new();
        for line in bytes.split(|byte| *byte == b'\n') {
            let Ok(value) = HeaderValue::from_bytes(line) else { continue };
            headers.append(name.clone(), value);
            last = line.to_vec();
        }
        assert_eq!(trust.client(parse(STRANGER), false, &headers).address, parse(STRANGER));
        trust.client(parse(PROXY), false, &headers);

        // On a line of its own, and at the end of what somebody else began.
        let mut own_line = headers.clone();
        own_line.append(name.clone(), HeaderValue::from_static(element));
        assert_eq!(trust.client(parse(PROXY), false, &own_line).address, parse(CLIENT));
        last.extend_from_slice(b", ");
        last.extend_from_slice(element.as_bytes());
        let mut same_line = HeaderMap::new();
        same_line.insert(name, HeaderValue::from_bytes(&last).expect("a value"));
        let found = trust.client(parse(PROXY), false, &same_line).address;
        // A quotation that the client did not end makes the line unreadable, and the proxy the client.
        assert!(found == parse(CLIENT) || (by == ForwardedField::Forwarded && found == parse(PROXY)), "{found}");
    }
}
