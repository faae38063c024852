//! An axum middleware that limits each client address and responds 429 with `Retry-After`.
//!
//! `cargo run -p transom-limiter --example axum`, then `curl -i http://127.0.0.1:3000/` six times.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use transom_limiter::{Limiter, LimiterDecision};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::builder()
        .layer(5, Duration::from_secs(10))
        .layer(100, Duration::from_secs(3600))
        .capacity(100_000)
        .build()?;
    let app = Router::new()
        .route("/", get(|| async { "hello\n" }))
        .layer(from_fn_with_state(Arc::new(limiter), limit))
        .into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

async fn limit(
    State(limiter): State<Arc<Limiter>>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    match limiter.acquire(&client.ip(), 1, unix_ms()) {
        LimiterDecision::Admitted(_) => next.run(request).await,
        LimiterDecision::Refused(refusal) => {
            let wait = refusal.retry_after().unwrap_or(Duration::MAX);
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, seconds.to_string())], "too many requests\n").into_response()
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "an example reads the clock itself")]
fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
