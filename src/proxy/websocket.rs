//! The end of a WebSocket handshake, and the tunnel that it opens.
//!
//! The handshake with the upstream is always HTTP/1.1 (RFC 6455). The client's is either HTTP/1.1 or an extended CONNECT
//! (RFC 8441). An HTTP/2 stream becomes a tunnel with any 2xx, so a CONNECT gets 2xx only after the upstream has switched.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response};
use tokio::io::{AsyncRead, AsyncWrite};

use super::byte_meter::ByteMeter;
use super::request_record::RequestRecord;
use super::response::{Content, ResponseBody, ResponseFormat};
use crate::timer::Timer;
use crate::upstream::tunnel::{ByteCounts, Tunnel, TunnelEnd};
use transom_http::error::RequestError;
use transom_http::websocket_handshake::{self, HandshakeKey, UpgradeMethod};

/// How a client requested a WebSocket, and the key of the handshake with the upstream.
pub struct WebSocketHandshake {
    method: UpgradeMethod,
    /// The client's own key for an HTTP/1.1 upgrade, a fresh one for CONNECT.
    key: HandshakeKey,
}

impl WebSocketHandshake {
    /// `None`: the request is an ordinary one. `is_supported`: whether the route and its upstream take WebSockets.
    pub fn new(
        method: Option<UpgradeMethod>,
        headers: &HeaderMap,
        is_supported: impl FnOnce() -> bool,
    ) -> Result<Option<Box<WebSocketHandshake>>, RequestError> {
        let key = match method {
            None => None,
            Some(UpgradeMethod::Upgrade) => HandshakeKey::from_headers(headers).filter(|_| is_supported()),
            Some(UpgradeMethod::ExtendedConnect) => Some(HandshakeKey::generate()?),
        };
        Ok(method.zip(key).map(|(method, key)| Box::new(WebSocketHandshake { method, key })))
    }

    /// Adds the fields that ask the upstream to switch protocols.
    pub fn write_request(&self, headers: &mut HeaderMap) {
        websocket_handshake::insert_upgrade_fields(headers);
        self.key.insert_into(headers);
    }

    /// Checks the upstream's or the route's response, and turns it into the client's. With a tunnel, the handshake has succeeded.
    pub async fn finish(
        self: Box<Self>,
        mut response: Response<Content>,
    ) -> Result<(Response<Content>, Option<Tunnel>), RequestError> {
        if !websocket_handshake::is_switching_protocols(&response) {
            return match (self.method, response.body()) {
                (UpgradeMethod::ExtendedConnect, Content::Local(_)) if response.status().is_success() => {
                    Err(RequestError::WEBSOCKET_NOT_SERVED)
                }
                (UpgradeMethod::ExtendedConnect, Content::Upstream(_)) if response.status().is_success() => {
                    Err(RequestError::Upstream("the server did not switch protocols".to_owned()))
                }
                (UpgradeMethod::Upgrade | UpgradeMethod::ExtendedConnect, _) => Ok((response, None)),
            };
        }
        if !self.key.is_accepted(response.headers()) {
            let reason = "the server switched protocols without the `Sec-WebSocket-Accept` of this handshake";
            return Err(RequestError::Upstream(reason.to_owned()));
        }
        match self.method {
            UpgradeMethod::Upgrade => websocket_handshake::insert_upgrade_fields(response.headers_mut()),
            UpgradeMethod::ExtendedConnect => websocket_handshake::to_connect_response(&mut response),
        }
        let (parts, content) = response.into_parts();
        let tunnel = match content {
            Content::Upstream(download) => download.into_tunnel().await,
            Content::Local(_) | Content::Filtered(_) | Content::Stream(_) => None,
        };
        let closed = || RequestError::Upstream("the server closed the connection after switching protocols".to_owned());
        let tunnel = tunnel.ok_or_else(closed)?;
        Ok((Response::from_parts(parts, Content::Local(None)), Some(tunnel)))
    }
}

/// A tunnel with the record of its request. Its client side is attached when the response that opens it has been sent.
pub struct TunnelSession {
    tunnel: Tunnel,
    /// If a rule counts bytes. Dropped before the record, so that the access log states what they have cost.
    meter: Option<Rc<ByteMeter>>,
    record: RequestRecord,
    idle_timeout: Duration,
}

impl TunnelSession {
    /// The session of a tunnel, and the response that opens it.
    pub fn open(
        tunnel: Tunnel,
        mut response: Response<Content>,
        format: ResponseFormat,
        mut record: RequestRecord,
        meter: Option<Rc<ByteMeter>>,
    ) -> (Box<TunnelSession>, Response<ResponseBody>) {
        format.change_fields(response.headers_mut(), &record);
        record.set_status(response.status().as_u16());
        let idle_timeout = record.config().served.config.timeouts.tunnel;
        (Box::new(TunnelSession { tunnel, record, idle_timeout, meter }), response.map(ResponseBody::unrecorded))
    }

    /// Relays bytes until the tunnel ends. Returns `false` if one side closed the connection without closing the tunnel.
    /// `early` is what the client sent before the response.
    pub async fn run(self, client: impl AsyncRead + AsyncWrite + Unpin, early: Bytes, timer: &Timer) -> bool {
        let TunnelSession { tunnel, mut record, idle_timeout, meter } = self;
        record.tunnel_opened();
        // Recorded on drop, which also covers a worker that stops with open tunnels.
        let session = TunnelRecord { own_counts: ByteCounts::default(), meter, record: &mut record };
        let running = tunnel.run(client, early, idle_timeout, timer, session.counts());
        let end = match &session.meter {
            None => Some(running.await),
            Some(meter) => until_cut(running, meter).await,
        };
        let Some(end) = end else {
            session.record.record_error(&RequestError::LimitExceeded);
            return false;
        };
        match end {
            TunnelEnd::Finished => return true,
            TunnelEnd::Idle => {
                session.record.record_tunnel_error("the tunnel was idle for too long");
                return true;
            }
            TunnelEnd::BrokenByClient => {}
            TunnelEnd::BrokenByUpstream => {
                session.record.record_tunnel_error("the upstream server broke off the tunnel")
            }
        }
        false
    }
}

/// Runs a tunnel to its end. `None`: a rule has broken it off.
async fn until_cut(running: impl Future<Output = TunnelEnd>, meter: &ByteMeter) -> Option<TunnelEnd> {
    let (mut running, mut cut_off) = (pin!(running), pin!(meter.cut_off()));
    poll_fn(|cx| {
        if cut_off.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        running.as_mut().poll(cx).map(Some)
    })
    .await
}

struct TunnelRecord<'r> {
    /// Without a meter.
    own_counts: ByteCounts,
    meter: Option<Rc<ByteMeter>>,
    record: &'r mut RequestRecord,
}

impl TunnelRecord<'_> {
    fn counts(&self) -> &ByteCounts {
        self.meter.as_ref().map_or(&self.own_counts, |meter| &meter.counts)
    }
}

impl Drop for TunnelRecord<'_> {
    fn drop(&mut self) {
        let (to_client, to_upstream) = (self.counts().to_client.get(), self.counts().to_upstream.get());
        self.record.record_tunnel_end(to_client, to_upstream);
    }
}
