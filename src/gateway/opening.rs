//! The end of a handshake for a WebSocket: the upstream's answer opens a tunnel, or is an ordinary one.
//!
//! To the upstream a handshake is always one of HTTP/1.1. What the client made, and is to be answered in, is
//! known here. A stream of HTTP/2 is a tunnel as soon as it is answered with any 2xx, so nothing but the
//! upstream's consent may be told so.

use http::Response;

use super::body::{Body, Content};
use super::hall::{Peer, View};
use super::passage::Passage;
use super::record::Record;
use super::{fail, finish};
use crate::http::fault::Fault;
use crate::http::reply::Dialect;
use crate::http::upgrade::{self, Key, Way};

/// How a tunnel is opened for a client.
pub enum Opening {
    /// Its connection changes over, with what it and the upstream say to each other.
    Upgrade,
    /// A stream of HTTP/2 becomes one; the key is the gateway's own.
    Connect(Box<Key>),
}

impl Opening {
    /// `None`: the request goes on as an ordinary one. `takes`: whether the route and its upstream take WebSockets.
    pub fn of(way: Option<Way>, takes: impl FnOnce() -> bool) -> Result<Option<Opening>, Fault> {
        Ok(match way {
            None => None,
            Some(Way::Upgrade) => takes().then_some(Opening::Upgrade),
            Some(Way::Connect) => Some(Opening::Connect(Box::new(Key::new()?))),
        })
    }

    /// The key of the handshake with the upstream, if it is not the client's.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Opening::Upgrade => None,
            Opening::Connect(key) => Some(key),
        }
    }
}

/// Makes of the upstream's answer, or the route's own, what the client is told.
pub async fn conclude(
    answer: Response<Content>,
    opening: Opening,
    dialect: Dialect,
    record: Record,
    peer: &Peer,
    view: &View,
) -> Response<Body> {
    if upgrade::is_switch(&answer) {
        return open(answer, &opening, dialect, record, peer, view).await;
    }
    let fault = match (opening, answer.body()) {
        (Opening::Connect(_), Content::Own(_)) if answer.status().is_success() => Fault::NO_WEBSOCKET,
        (Opening::Connect(_), Content::Upstream(_)) if answer.status().is_success() => {
            Fault::Upstream("it did not switch protocols".to_owned())
        }
        (Opening::Upgrade | Opening::Connect(_), _) => return finish(answer, record),
    };
    fail(&fault, dialect, record)
}

/// Makes the answer that opens a tunnel, and the tunnel behind it.
async fn open(
    mut answer: Response<Content>,
    opening: &Opening,
    dialect: Dialect,
    mut record: Record,
    peer: &Peer,
    view: &View,
) -> Response<Body> {
    if opening.key().is_some_and(|key| !key.is_accepted(answer.headers())) {
        let why = "it switched protocols without the `Sec-WebSocket-Accept` of this handshake";
        return fail(&Fault::Upstream(why.to_owned()), dialect, record);
    }
    match opening {
        Opening::Upgrade => upgrade::ask(answer.headers_mut()),
        Opening::Connect(_) => upgrade::grant_stream(&mut answer),
    }
    let (parts, content) = answer.into_parts();
    let tunnel = match content {
        Content::Upstream(download) => download.into_tunnel().await,
        Content::Own(_) => None,
    };
    let Some(tunnel) = tunnel else {
        return fail(&Fault::Upstream("it broke off behind its switch of protocols".to_owned()), dialect, record);
    };
    record.answer(parts.status.as_u16());
    peer.passage.replace(Some(Passage::new(tunnel, record, view.snapshot.config.timeouts.tunnel)));
    Response::from_parts(parts, Body::unrecorded(Content::Own(None)))
}
