//! Envoy's rate limit service (`envoy.service.ratelimit.v3`) over gRPC, with health checks and reflection.
//!
//! Runs on the workers, on the counters of requests. `grpc` reads and writes the messages, `limit` decides,
//! `reflection` describes the services.

use std::cell::RefCell;
use std::rc::Rc;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use tokio::sync::watch;

use crate::proxy::handler::ResponseFuture;
use crate::proxy::peer::Peer;
use crate::proxy::request_record::record_rejected_head;
use crate::proxy::response::{Content, ResponseBody};
use crate::proxy::worker_state::WorkerState;
use crate::upstream::request_body::{BodySource, ClientBody};
use grpc::{Following, GrpcError, MessageReader, decode, encode};
use limit::ServiceConfig;
use messages::grpc::health::v1::health_check_response::ServingStatus;
use messages::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse};
use transom_http::error::RequestError;
use transom_rules::responses::{self, ErrorFormat};

mod grpc;
mod limit;
pub mod messages;
mod reflection;

/// The services that have a health of their own; empty: the server as a whole.
const HEALTH_SERVICES: [&str; 2] = ["", "envoy.service.ratelimit.v3.RateLimitService"];

/// The service of one worker.
pub struct RatelimitService {
    /// Whether the gateway is ready; `false` once it drains.
    ready: watch::Receiver<bool>,
    config: RefCell<Rc<ServiceConfig>>,
}

/// The methods, by their paths.
#[derive(Clone, Copy)]
enum Method {
    ShouldRateLimit,
    HealthCheck,
    HealthWatch,
    Reflect,
}

impl Method {
    fn of_path(path: &str) -> Option<Method> {
        Some(match path {
            "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit" => Method::ShouldRateLimit,
            "/grpc.health.v1.Health/Check" => Method::HealthCheck,
            "/grpc.health.v1.Health/Watch" => Method::HealthWatch,
            // The messages of both versions are equal.
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            | "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo" => Method::Reflect,
            _ => return None,
        })
    }
}

impl RatelimitService {
    pub fn new(worker: &Rc<WorkerState>, ready: watch::Receiver<bool>) -> RatelimitService {
        RatelimitService { ready, config: RefCell::new(Rc::new(ServiceConfig::new(worker))) }
    }

    /// Uses the worker's configuration for new calls.
    pub fn apply_config(&self, worker: &Rc<WorkerState>) {
        *self.config.borrow_mut() = Rc::new(ServiceConfig::new(worker));
    }

    /// Handles a call up to the head of its response. `error`: of the head.
    pub fn handle(
        self: &Rc<Self>,
        worker: &Rc<WorkerState>,
        peer: &Rc<Peer>,
        parts: Parts,
        body: BodySource,
        error: Option<RequestError>,
    ) -> ResponseFuture {
        let config = Rc::clone(&self.config.borrow());
        let timeout = worker.config().served.config.timeouts.body;
        peer.body_timeout.set(timeout);
        let body = ClientBody::new(body, &parts.headers, peer.body_drain.as_ref());
        let local = |response: responses::LocalResponse| {
            ResponseFuture::Done(Some(response.map(|bytes| ResponseBody::unrecorded(Content::from(bytes)))))
        };
        if let Some(error) = error {
            record_rejected_head(worker, peer.connection.address, &error, None);
            return local(responses::error_response(&error));
        }
        if ErrorFormat::of(&parts) != ErrorFormat::Grpc {
            config.metrics().not_grpc();
            return local(responses::no_grpc_response());
        }
        let Some(method) = Method::of_path(parts.uri.path()) else {
            let error = GrpcError::unimplemented("unknown service or method");
            return ResponseFuture::Done(Some(config.fail(error)));
        };
        let mut reader = MessageReader::new(body, &parts.headers);
        if let Method::Reflect = method {
            config.metrics().reflected();
            return ResponseFuture::Done(Some(grpc::response(None, Following::Answers(reader, reflection::answer))));
        }
        let (service, worker, peer) = (Rc::clone(self), Rc::clone(worker), Rc::clone(peer));
        ResponseFuture::Waiting(Box::pin(async move {
            let answer = async {
                let read = tokio::time::timeout(timeout, reader.read_single()).await;
                let message = read.unwrap_or(Err(GrpcError::unavailable("the message took too long to arrive")))?;
                match method {
                    Method::ShouldRateLimit => {
                        Ok(grpc::response(Some(config.should_rate_limit(&worker, message).await?), Following::End))
                    }
                    Method::HealthCheck | Method::Reflect => {
                        let answer = service.check_health(message)?;
                        config.metrics().health_told();
                        Ok(answer)
                    }
                    Method::HealthWatch => {
                        let answer = service.watch_health(message, &peer)?;
                        config.metrics().health_told();
                        Ok(answer)
                    }
                }
            };
            let answer: Result<Response<ResponseBody>, GrpcError> = answer.await;
            ResponseFuture::Done(Some(answer.unwrap_or_else(|error| config.fail(error))))
        }))
    }

    fn check_health(&self, message: Bytes) -> Result<Response<ResponseBody>, GrpcError> {
        const NOT_FOUND: GrpcError = GrpcError::not_found("unknown service");
        let request: HealthCheckRequest = decode(message)?;
        if !HEALTH_SERVICES.contains(&&*request.service) {
            return Err(NOT_FOUND);
        }
        Ok(grpc::response(Some(health(*self.ready.borrow())), Following::End))
    }

    /// Sends the health at once, and when the gateway drains.
    fn watch_health(&self, message: Bytes, peer: &Peer) -> Result<Response<ResponseBody>, GrpcError> {
        const DRAINING: GrpcError = GrpcError::unavailable("the gateway is stopping");
        // Nothing is sent for as long as the health does not change.
        peer.body_timeout.set(grpc::STREAM_TIMEOUT);
        let request: HealthCheckRequest = decode(message)?;
        let mut ready = self.ready.clone();
        let (first, later) = match HEALTH_SERVICES.contains(&&*request.service) {
            true => (health(*ready.borrow()), health(false)),
            false => (encode_health(ServingStatus::ServiceUnknown), encode_health(ServingStatus::ServiceUnknown)),
        };
        let change = async move {
            // An error means that the gateway is gone.
            let _ = ready.wait_for(|is_ready| !is_ready).await;
            (later, DRAINING)
        };
        Ok(grpc::response(Some(first), Following::Later(Box::pin(change))))
    }
}

fn health(is_ready: bool) -> Bytes {
    encode_health(if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing })
}

fn encode_health(status: ServingStatus) -> Bytes {
    encode(&HealthCheckResponse { status: status.into() })
}
