//! The integration tests: whole gateways, real sockets, real clients and servers.
//!
//! `support` is the harness; every other module tests one subject. Ports are chosen by the system, on loopback only. Time is
//! a manual clock or, where a process is tested, the real one. A test waits for an event with a deadline, and never for time
//! to pass.

#![allow(clippy::disallowed_methods, reason = "deadlines of tests are about real time")]

#[path = "../support/mod.rs"]
mod support;

mod access_log;
mod actions;
mod activation;
mod admin;
mod bodies;
mod body_limits;
mod cancellation;
mod certificate_files;
mod changed_limits;
mod check_redis;
mod chromium;
mod client_certs;
mod clients;
mod clients_command;
mod clock_steps;
mod concurrency;
mod concurrency_ends;
mod connection_resend;
mod connections;
mod cost;
mod count_when;
mod counter_identity;
mod counters;
mod counters_file_random_bits;
mod counters_file_rejected;
mod curl;
mod decision_api;
mod delay;
mod dns;
mod documentation;
mod drain;
mod event_stream;
mod exactness;
mod failover_real_servers;
mod failover_scripted;
mod framing;
mod full_table;
mod grpc;
mod grpc_clients;
mod h2load;
mod header_fields;
mod health;
mod http2;
mod http2_attacks;
mod http2_resend;
mod httpbin;
mod informational_http2;
mod jwt;
mod key_normalization;
mod keys;
mod kills;
mod load_balancing;
mod malformed_requests;
mod nginx_files;
mod proxy_protocol;
mod quick_start;
mod ratelimit_fields;
mod redis_client_cluster;
mod redis_client_single;
mod redis_harness;
mod refusal_forms;
mod release_training;
mod reload;
mod repeated_refusals;
mod request_validation;
mod retries;
mod routing;
mod schema;
mod shared_cluster;
mod shared_counters;
mod shared_edge_cases;
mod shared_eviction;
mod shared_failures;
mod shared_kills;
mod shared_outages;
mod shared_scripts;
mod shared_sentinel;
mod slow_clients;
mod snapshots;
mod stalled_transfers;
mod startup;
mod tls;
mod trusted_proxies;
mod unix_sockets;
mod unusual_upstreams;
mod upgrade;
mod upgrade_load;
mod upstream_failures;
mod upstream_http2;
mod upstream_http2_violations;
mod upstream_request_limits;
mod upstream_streams;
mod upstream_tls;
mod websocket;
mod websocket_clients;
mod websocket_streams;
mod windows;
