//! Upstream servers: connections to them, load balancing, health, retries, and the bodies in both directions.
//!
//! `forward` sends one request (`attempt_log`): `load_balancer` chooses a server by `server_health`, `pool` provides a `connection`,
//! `dns` resolves the names of servers, `service_records` follows the services of which servers are found, both by `dns_client`.
//! `retry_budget` and `request_limit` bound retries and load, `hold` has the requests that wait for a reachable server,
//! `health_check` probes servers. Every worker has its own
//! connections and load balancer; health and request limits are shared.
//!
//! The layers, from the client to the upstream socket:
//! - Request body: `BodySource` (HTTP/1.1 or HTTP/2), `ClientBody` (leaves an unread rest to `BodyDrain`), `Upload`
//!   (limits, progress, replay), `RequestBody` (what a connection sends).
//! - Response body: `UpstreamBody` (drives the connection, ends at the deadline, returns the connection to the pool),
//!   then `proxy::response`.
//! - Connection: `UpstreamConnection` (HTTP/1.1 or HTTP/2), `Http1Connection`, or `Http2Stream` of an
//!   `Http2Connection` over `NotifyingIo`, each over the TCP, TLS or Unix stream of `io_stream`.

pub mod attempt_log;
pub mod connect;
pub mod connection;
pub mod dns;
pub mod dns_client;
pub mod dns_message;
pub mod echo;
pub mod forward;
pub mod health_check;
pub mod hold;
pub mod http1;
pub mod http2;
pub mod load_balancer;
pub mod pool;
pub mod proxy_header;
pub mod request_body;
pub mod request_limit;
pub mod response_body;
pub mod retry_budget;
pub mod server_health;
pub mod service_records;
pub mod tunnel;
