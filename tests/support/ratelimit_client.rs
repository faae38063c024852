//! A client of the rate limit service, with the messages of the gateway. `tests/external/ratelimit_client.py` checks the
//! messages themselves with another library.

use std::net::SocketAddr;

use prost::Message;
use transom::ratelimit_service::messages::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use transom::ratelimit_service::messages::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use transom::ratelimit_service::messages::envoy::service::ratelimit::v3::rate_limit_response::Code;
use transom::ratelimit_service::messages::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

use super::client::HttpResponse;
use super::http2_client::Http2Client;

pub const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A descriptor with these entries.
pub fn descriptor<V: AsRef<[u8]>>(entries: &[(&str, V)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, V)| Entry { key: (*key).to_owned(), value: value.as_ref().to_vec().into() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

/// A request in the domain `api`.
pub fn request(descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest { domain: "api".to_owned(), descriptors: descriptors.to_vec(), hits_addend: 0 }
}

/// A message with its prefix.
pub fn framed(message: &impl Message) -> Vec<u8> {
    let mut body = vec![0];
    body.extend((message.encoded_len() as u32).to_be_bytes());
    body.extend(message.encode_to_vec());
    body
}

/// The status of a call, in the trailers or in the head.
pub fn grpc_status(response: &HttpResponse) -> u8 {
    let fields = response.trailers.iter().chain(&response.fields);
    let mut status = fields.filter(|(name, _)| name == "grpc-status");
    status.next().unwrap_or_else(|| panic!("no status: {response:?}")).1.parse().unwrap()
}

pub fn is_ok(response: &RateLimitResponse) -> bool {
    match response.overall_code() {
        Code::Ok => true,
        Code::OverLimit => false,
        Code::Unknown => panic!("{response:?}"),
    }
}

pub struct RatelimitClient(Http2Client);

impl RatelimitClient {
    pub fn connect(address: SocketAddr) -> RatelimitClient {
        RatelimitClient(Http2Client::connect(address))
    }

    /// One call with this body.
    pub fn call(&mut self, path: &str, fields: &[(&str, &str)], body: &[u8]) -> HttpResponse {
        let fields = [&[("content-type", "application/grpc"), ("te", "trailers")], fields].concat();
        self.0.request_path("POST", path, &fields, body).expect(200)
    }

    pub fn send(&mut self, request: &RateLimitRequest) -> RateLimitResponse {
        let response = self.call(SHOULD_RATE_LIMIT, &[], &framed(request));
        assert_eq!(grpc_status(&response), 0, "{response:?}");
        RateLimitResponse::decode(&response.body[5..]).unwrap()
    }

    pub fn ask(&mut self, descriptors: &[RateLimitDescriptor]) -> RateLimitResponse {
        self.send(&request(descriptors))
    }

    /// How many of `times` requests with one descriptor are within the limit.
    pub fn count_ok(&mut self, entries: &[(&str, &str)], times: usize) -> usize {
        (0..times).filter(|_| is_ok(&self.ask(&[descriptor(entries)]))).count()
    }

    /// An arbitrary request.
    pub fn http(&mut self) -> &mut Http2Client {
        &mut self.0
    }
}
