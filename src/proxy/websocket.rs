//! The end of a handshake for a WebSocket: the upstream's answer opens a tunnel, or is an ordinary one.
//!
//! To the upstream a handshake is always one of HTTP/1.1. What the client made, and is to be answered in, is
//! known here. A stream of HTTP/2 is a tunnel as soon as it is answered with any 2xx, so nothing but the
//! upstream's consent may be told so.

use http::{HeaderMap, Response};

use super::request_record::RequestRecord;
use super::response_body::{Content, ResponseBody};
use super::tunnel_session::TunnelSession;
use super::worker_state::{Peer, WorkerConfig};
use super::{error_response, finish};
use crate::http::error::RequestError;
use crate::http::responses::ErrorFormat;
use crate::http::websocket_handshake::{self, Key, UpgradeMethod};

/// How a tunnel is opened for a client.
pub struct WebSocketHandshake {
    method: UpgradeMethod,
    /// Of the handshake with the upstream: the client's where its connection changes over, or else the gateway's own.
    key: Key,
}

impl WebSocketHandshake {
    /// `None`: the request goes on as an ordinary one. `takes`: whether the route and its upstream take WebSockets.
    pub fn new(
        way: Option<UpgradeMethod>,
        headers: &HeaderMap,
        takes: impl FnOnce() -> bool,
    ) -> Result<Option<Box<WebSocketHandshake>>, RequestError> {
        let key = match way {
            None => None,
            Some(UpgradeMethod::Upgrade) => Key::of(headers).filter(|_| takes()),
            Some(UpgradeMethod::Connect) => Some(Key::new()?),
        };
        Ok(way.zip(key).map(|(way, key)| Box::new(WebSocketHandshake { method: way, key })))
    }

    /// Asks the upstream to change protocols.
    pub fn write_request(&self, headers: &mut HeaderMap) {
        websocket_handshake::ask(headers);
        self.key.put(headers);
    }
}

/// Makes of the upstream's answer, or the route's own, what the client is told.
pub async fn finish_handshake(
    answer: Response<Content>,
    opening: Box<WebSocketHandshake>,
    dialect: ErrorFormat,
    record: RequestRecord,
    peer: &Peer,
    view: &WorkerConfig,
) -> Response<ResponseBody> {
    if websocket_handshake::is_switch(&answer) {
        return open_tunnel(answer, &opening, dialect, record, peer, view).await;
    }
    let fault = match (opening.method, answer.body()) {
        (UpgradeMethod::Connect, Content::Local(_)) if answer.status().is_success() => RequestError::NO_WEBSOCKET,
        (UpgradeMethod::Connect, Content::Upstream(_)) if answer.status().is_success() => {
            RequestError::Upstream("it did not switch protocols".to_owned())
        }
        (UpgradeMethod::Upgrade | UpgradeMethod::Connect, _) => return finish(answer, record),
    };
    error_response(&fault, dialect, record)
}

/// Makes the answer that opens a tunnel, and the tunnel behind it.
async fn open_tunnel(
    mut answer: Response<Content>,
    opening: &WebSocketHandshake,
    dialect: ErrorFormat,
    mut record: RequestRecord,
    peer: &Peer,
    view: &WorkerConfig,
) -> Response<ResponseBody> {
    if !opening.key.is_accepted(answer.headers()) {
        let why = "it switched protocols without the `Sec-WebSocket-Accept` of this handshake";
        return error_response(&RequestError::Upstream(why.to_owned()), dialect, record);
    }
    match opening.method {
        UpgradeMethod::Upgrade => websocket_handshake::ask(answer.headers_mut()),
        UpgradeMethod::Connect => websocket_handshake::grant_stream(&mut answer),
    }
    let (parts, content) = answer.into_parts();
    let tunnel = match content {
        Content::Upstream(download) => download.into_tunnel().await,
        Content::Local(_) => None,
    };
    let Some(tunnel) = tunnel else {
        return error_response(
            &RequestError::Upstream("it broke off behind its switch of protocols".to_owned()),
            dialect,
            record,
        );
    };
    record.set_status(parts.status.as_u16());
    peer.tunnel.replace(Some(TunnelSession::new(tunnel, record, view.compiled.config.timeouts.tunnel)));
    Response::from_parts(parts, ResponseBody::unrecorded(Content::Local(None)))
}
