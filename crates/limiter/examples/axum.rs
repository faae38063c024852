//! An axum service that limits each client address, and failed logins.
//!
//! `cargo run -p transom-limiter --features tower --example axum`, then `curl -i http://127.0.0.1:3000/` six times.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::routing::{get, post};
use transom_limiter::Limiter;
use transom_limiter::ip_prefix::Network;
use transom_limiter::tower::LimitLayer;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://{}", listener.local_addr()?);
    axum::serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

pub fn app() -> Result<Router, Box<dyn std::error::Error>> {
    let requests =
        Limiter::builder().layer(5, Duration::from_secs(10)).layer(100, Duration::from_secs(3600)).capacity(100_000);
    let failures = Limiter::builder().layer(3, Duration::from_secs(60)).capacity(100_000);
    let per_client = LimitLayer::new("per-client", requests.build()?, client);
    let failed_logins = LimitLayer::new("failed-logins", failures.build()?, client)
        .count_when(|status| status == StatusCode::UNAUTHORIZED);
    let app = Router::new()
        .route("/login", post(log_in).layer(failed_logins))
        .route("/", get(|| async { "hello\n" }))
        .layer(per_client);
    Ok(app)
}

/// The address of the connection; for IPv6, its /64 network, all of which a client usually has.
fn client(request: &Parts) -> Option<Network> {
    let ConnectInfo(address) = request.extensions.get::<ConnectInfo<SocketAddr>>()?;
    Some(Network::containing(address.ip().to_canonical(), 64))
}

async fn log_in(password: String) -> (StatusCode, &'static str) {
    match password.as_str() {
        "open sesame" => (StatusCode::OK, "welcome\n"),
        _ => (StatusCode::UNAUTHORIZED, "wrong password\n"),
    }
}
