//! The way to the upstream servers: connections, and the exchange of one request for one answer.
//!
//! Every event loop has its own connections. `names` knows the addresses of a server, `dial` opens a stream to it.
//! `connection` is one HTTP/1.1 connection, `relay` wakes whoever waits for it, `herald` overhears it; `multiplex` is
//! one HTTP/2 connection (which `greeting` tells of), and `carrier` either of the two. `pool` keeps those of one server,
//! `place` counts what is under way there. `fleet` is what all loops know of an upstream's servers, of each a
//! `standing`, `prober` asks them how they are, `balance` chooses one by the arithmetic of `pick`. `exchange` sends a
//! request and decides when to try again, `budget` how often, and `circuit` counts what is under way in all loops.
//! `upload` and `download` are what passes through, `inbound` the body of a request before it does, `loan` one that can
//! be had back, `bounds` what it is held to, `tunnel` what passes when protocols were switched, `far_end` the upstream's
//! end of that, `echo` the upstream that is built in.

pub mod connect;
pub mod connection;
pub mod dns;
pub mod echo;
pub mod forward;
pub mod gated_waker;
pub mod health_check;
pub mod http1;
pub mod http1_tap;
pub mod http2;
pub mod http2_settings;
pub mod lb_algorithms;
pub mod load_balancer;
pub mod pool;
pub mod replay_body;
pub mod request_body;
pub mod request_limit;
pub mod request_upload;
pub mod response_body;
pub mod retry_budget;
pub mod server_health;
pub mod server_pool;
pub mod server_state;
pub mod tunnel;
pub mod tunnel_io;
pub mod upload_limits;
