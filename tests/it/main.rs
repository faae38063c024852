//! The integration tests: a whole gateway, real sockets, real neighbours.
//!
//! `world` is the language they are written in; every other module is a subject. Ports are chosen by
//! the system and loopback only. Time is a manual clock or, where a process is under test, the real
//! one; a test waits for a thing to happen, with a deadline, and never for time to pass.

#![allow(clippy::disallowed_methods, reason = "deadlines of tests are about real time")]

mod world;

mod access_log;
mod actions;
mod activation;
mod admin;
mod again;
mod answers;
mod any_bits;
mod balance;
mod bodies;
mod cancel;
mod certificate_files;
mod changed_limits;
mod circuit;
mod client_certs;
mod client_orders;
mod clients;
mod clients_chromium;
mod clients_curl;
mod clients_grpc;
mod clients_h2load;
mod clients_slow;
mod clients_websocket;
mod clock;
mod connect;
mod connections;
mod cost;
mod counters;
mod damaged_counters;
mod decision_api;
mod delay;
mod drain;
mod event_stream;
mod exactness;
mod failover;
mod faults;
mod files;
mod first_minutes;
mod framing;
mod full_table;
mod gate;
mod grpc;
mod health;
mod http2;
mod http2_attacks;
mod httpbin;
mod identity;
mod interim;
mod keys;
mod kills;
mod limits;
mod malformed;
mod names;
mod outages;
mod passing;
mod proxies;
mod proxy_protocol;
mod redis_servers;
mod refusal_forms;
mod reload;
mod retries;
mod retry;
mod shared_cluster;
mod shared_corners;
mod shared_counters;
mod shared_hazards;
mod shared_kills;
mod shared_nodes;
mod shared_outages;
mod shared_scripts;
mod shared_sentinel;
mod shared_store;
mod snapshots;
mod spellings;
mod stalls;
mod startup;
mod surprises;
mod tls;
mod tokens;
mod training;
mod unix;
mod unprocessed;
mod upgrade;
mod upgrade_load;
mod upstream_http2;
mod upstream_tls;
mod websocket;
mod websocket_streams;
mod windows;
