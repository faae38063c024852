//! A reverse proxy with two layers of fixed windows per client address, built from Pingora and pingora-limits: a peer of the
//! benchmarks (`benches/peers.py`).
//!
//! Counts are estimates: keys share the slots of a count-min sketch, and a refused request counts as well.

use std::env;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use pingora_core::apps::HttpServerOptions;
use pingora_core::protocols::l4::socket::SocketAddr as Peer;
use pingora_core::server::configuration::ServerConf;
use pingora_core::{Result, prelude::*};
use pingora_http::{RequestHeader, ResponseHeader};
use pingora_limits::rate::Rate;
use pingora_proxy::{ProxyHttp, Session, http_proxy_service};

const REFUSAL: &str = r#"{"type":"about:blank","title":"Too Many Requests","status":429}"#;

struct Layer {
    name: String,
    limit: isize,
    window: Duration,
    counts: Rate,
}

struct Proxy {
    layers: Vec<Layer>,
    policy: String,
    upstream: SocketAddr,
    start: Instant,
}

struct Decision {
    is_admitted: bool,
    fields: String,
    client: IpAddr,
}

impl Proxy {
    /// Counts the request in each layer.
    fn decide(&self, client: IpAddr) -> Decision {
        let (mut is_admitted, mut fields) = (true, String::new());
        let elapsed = self.start.elapsed();
        for layer in &self.layers {
            let remaining = layer.limit - layer.counts.observe(&client, 1);
            is_admitted &= remaining >= 0;
            let reset = layer.window.as_secs() - elapsed.as_secs() % layer.window.as_secs();
            let separator = if fields.is_empty() { "" } else { ", " };
            let _ = write!(fields, "{separator}\"{}\";r={};t={reset}", layer.name, remaining.max(0));
        }
        Decision { is_admitted, fields, client }
    }

    fn report(&self, decision: &Decision, header: &mut ResponseHeader) -> Result<()> {
        header.insert_header("RateLimit-Policy", &self.policy)?;
        header.insert_header("RateLimit", &decision.fields)
    }
}

#[async_trait]
impl ProxyHttp for Proxy {
    type CTX = Option<Decision>;

    fn new_ctx(&self) -> Self::CTX {
        None
    }

    async fn request_filter(&self, session: &mut Session, context: &mut Self::CTX) -> Result<bool> {
        let client = match session.client_addr() {
            Some(Peer::Inet(address)) => address.ip(),
            _ => return Error::e_explain(InternalError, "no address of the client"),
        };
        let decision = self.decide(client);
        if decision.is_admitted {
            *context = Some(decision);
            return Ok(false);
        }
        let mut header = ResponseHeader::build(429, None)?;
        header.insert_header("Content-Type", "application/problem+json")?;
        header.insert_header("Content-Length", REFUSAL.len())?;
        self.report(&decision, &mut header)?;
        session.write_response_header(Box::new(header), false).await?;
        session.write_response_body(Some(REFUSAL.into()), true).await?;
        Ok(true)
    }

    async fn upstream_peer(&self, _: &mut Session, _: &mut Self::CTX) -> Result<Box<HttpPeer>> {
        Ok(Box::new(HttpPeer::new(self.upstream, false, String::new())))
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        request: &mut RequestHeader,
        context: &mut Self::CTX,
    ) -> Result<()> {
        if let Some(decision) = context {
            request.insert_header("X-Forwarded-For", decision.client.to_string())?;
        }
        let is_tls = session.digest().is_some_and(|digest| digest.ssl_digest.is_some());
        request.insert_header("X-Forwarded-Proto", if is_tls { "https" } else { "http" })
    }

    async fn response_filter(
        &self,
        _: &mut Session,
        response: &mut ResponseHeader,
        context: &mut Self::CTX,
    ) -> Result<()> {
        context.as_ref().map_or(Ok(()), |decision| self.report(decision, response))
    }
}

/// Arguments: port, port of the upstream, layers as `LIMIT/SECONDS,LIMIT/SECONDS`; for TLS, certificate and key.
fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let layer = |text: &str| {
        let (limit, seconds) = text.split_once('/').expect("LIMIT/SECONDS");
        let window = Duration::from_secs(seconds.parse().expect("seconds"));
        Layer { name: format!("{seconds}s"), limit: limit.parse().expect("a limit"), window, counts: Rate::new(window) }
    };
    let layers: Vec<Layer> = arguments[2].split(',').map(layer).collect();
    let policy = |each: &Layer| format!("\"{}\";q={};w={}", each.name, each.limit, each.window.as_secs());
    let proxy = Proxy {
        policy: layers.iter().map(policy).collect::<Vec<_>>().join(", "),
        layers,
        upstream: SocketAddr::from(([127, 0, 0, 1], arguments[1].parse().expect("a port"))),
        start: Instant::now(),
    };
    // One thread, which steals no work; idle connections to the upstream for all clients.
    let settings =
        ServerConf { threads: 1, work_stealing: false, upstream_keepalive_pool_size: 10_000, ..Default::default() };
    let mut server = Server::new_with_opt_and_conf(None, settings);
    server.bootstrap();
    let mut options = HttpServerOptions::default();
    options.h2c = true;
    let mut service = http_proxy_service(&server.configuration, proxy);
    service.app_logic_mut().expect("the proxy").server_options = Some(options);
    let address = format!("127.0.0.1:{}", arguments[0]);
    match &arguments[3..] {
        [certificate, key] => service.add_tls(&address, certificate, key).expect("certificate and key"),
        _ => service.add_tcp(&address),
    }
    server.add_service(service);
    server.run_forever();
}
