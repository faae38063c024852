//! The hallway: the whole life of one request.
//!
//! `snapshot` is the configuration made ready, `hall` what an event loop keeps between requests, `turn`
//! the wait for a window to come, `abandoned` the places of those who did not wait for theirs,
//! `settlement` a cost that the answer tells, `record` what is written down of a request, `complaints`
//! how often the operator is told of failures, `body` the body of an answer on its way out.

use std::cell::OnceCell;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::rc::Rc;

use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response, Version, header};
use hyper::body::Incoming;

pub mod abandoned;
pub mod body;
pub mod complaints;
pub mod hall;
pub mod record;
pub mod settlement;
pub mod snapshot;
pub mod turn;

use crate::clock::Moment;
use crate::config::ForwardPath;
use crate::http::caller::Caller;
use crate::http::fault::Fault;
use crate::http::fields::Marks;
use crate::http::quota::Stamp;
use crate::http::reply::{self, Reply};
use crate::http::route::Asked;
use crate::http::{fields, gate, path};
use crate::rule::book::Judgement;
use crate::upstream::echo;
use crate::upstream::upload::Upload;
use body::{Body, Content};
use hall::{Hall, Peer, Scratch, Target, View};
use record::Record;
use settlement::Settlement;
use turn::Turn;

/// A request on its way: what needs no upstream is answered at once, without a future.
#[allow(clippy::large_enum_variant, reason = "the large one is there to save an allocation")]
pub enum Passing {
    /// `None` once it was taken.
    Done(Option<Response<Body>>),
    Forward(Pin<Box<dyn Future<Output = Response<Body>>>>),
}

/// What the rules made of a request.
enum Decision {
    Forward {
        lane: usize,
        server_key: Option<NonZeroU64>,
        stamp: Stamp,
        turn: Option<Box<Turn>>,
        settlement: Option<Box<Settlement>>,
    },
    Refuse(Reply),
}

/// Takes a request from its head to the head of its answer. `doubtful` tells of one with chunks
/// whether it may have given a length beside them.
pub fn pass(hall: &Rc<Hall>, peer: &Rc<Peer>, request: Request<Incoming>, doubtful: impl FnOnce() -> bool) -> Passing {
    let now = hall.clock.now();
    let view = hall.view();
    let (mut parts, body) = request.into_parts();
    let mut record = Record::new(hall, &view, peer.origin.address, &parts, now);
    match decide(hall, &view, peer, &mut parts, doubtful, now, &mut record) {
        Ok(Decision::Forward { lane, server_key, mut stamp, turn, mut settlement }) => {
            let (peer, hall) = (Rc::clone(peer), Rc::clone(hall));
            let request = Box::new(Request::from_parts(parts, Upload::new(body)));
            Passing::Forward(Box::pin(async move {
                if let Some(turn) = turn {
                    stamp = match turn.come(&mut record, &mut settlement).await {
                        Ok(stamp) => stamp,
                        Err(refusal) => return finish(refusal.map(Content::from), record),
                    };
                }
                let mut answer = match forward(&view, &peer, lane, server_key, request, &mut record).await {
                    Ok(answer) => {
                        if let Some(settlement) = settlement {
                            stamp = settlement.settle(&hall, &view, answer.headers()).unwrap_or(stamp);
                        }
                        finish(answer, record)
                    }
                    Err(fault) => fail(&fault, record),
                };
                // A request that was admitted has consumed, whatever became of it.
                stamp.put(answer.headers_mut());
                answer
            }))
        }
        Ok(Decision::Refuse(reply)) => Passing::Done(Some(finish(reply.map(Content::from), record))),
        Err(fault) => Passing::Done(Some(fail(&fault, record))),
    }
}

fn fail(fault: &Fault, mut record: Record) -> Response<Body> {
    record.fault(fault);
    finish(reply::fault(fault).map(Content::from), record)
}

fn finish(answer: Response<Content>, mut record: Record) -> Response<Body> {
    record.answer(answer.status().as_u16());
    answer.map(|content| Body::new(content, record))
}

/// Finds the route, identifies the caller, charges, judges. Nothing is waited for.
fn decide(
    hall: &Rc<Hall>,
    view: &Rc<View>,
    peer: &Peer,
    parts: &mut Parts,
    doubtful: impl FnOnce() -> bool,
    now: Moment,
    record: &mut Record,
) -> Result<Decision, Fault> {
    let snapshot = &*view.snapshot;
    let clear = gate::check(parts)?;
    if clear.marks.has(Marks::TRANSFER_ENCODING) && doubtful() {
        return Err(Fault::DOUBTFUL_LENGTH);
    }
    let path = match parts.uri.path() {
        "*" => return Err(Fault::NoRoute),
        path => path::normalize(path, snapshot.config.encoded_slash)?,
    };
    let mut scratch = view.scratch();
    let Scratch { desk, params, text } = &mut *scratch;
    let asked = Asked { host: &clear.host, method: &parts.method, headers: &parts.headers, path: &path };
    let lane_index = snapshot.router.find(&asked, params).ok_or(Fault::NoRoute)?;
    let lane = &snapshot.lanes[lane_index];
    let slate = snapshot.slate_of(lane);
    record.route(lane_index);

    let caller = Caller {
        address: peer.origin.address,
        host: &clear.host,
        method: &parts.method,
        path: &path,
        params,
        uri: &parts.uri,
        headers: &parts.headers,
        route: snapshot.name_of(lane_index),
        tokens: &view.tokens,
        unix_ms: now.unix_ms,
        clients: snapshot.clients.as_ref(),
        plan: OnceCell::new(),
    };
    desk.askers.clear();
    for (position, identity) in slate.identities.iter().enumerate() {
        desk.askers.push(match identity.of(&caller) {
            Ok(key) => key,
            // A rule that is only tried out refuses nobody, for whatever reason.
            Err(_) if snapshot.book.is_shadow(&slate.roster, position) => {
                view.meters[lane_index].shadowed(position);
                None
            }
            Err(fault) => return Err(fault),
        });
    }
    let judgement = snapshot.book.judge(&slate.roster, &hall.table, now.unix_ms, desk);
    hall.meter.decided(hall.clock.instant().duration_since(now.instant));
    record.decision(lane.slate as usize, desk, &judgement);
    let stamp = slate.sheet.render(desk, view.policies[lane.slate as usize].as_ref(), now.unix_ms, text);
    if let Judgement::Refused = judgement {
        let (now_ms, map) = (now.unix_ms, std::mem::take(&mut parts.headers));
        let reply = reply::refusal(&snapshot.book, &slate.roster, desk, &snapshot.forms, now_ms, stamp, text, map);
        return Ok(Decision::Refuse(reply));
    }
    let turn = Turn::of(judgement, hall, view, peer, lane.slate as usize, desk, now.unix_ms);
    let settlement = Settlement::of(slate, lane.slate as usize, desk);
    let affinity = snapshot.affinities[lane.upstream as usize].as_ref();
    let server_key = affinity.and_then(|affinity| affinity.of(&caller));
    let marks = clear.marks;
    let normalized = (snapshot.config.forward_path == ForwardPath::Normalized).then(|| path.into_owned());
    fields::forward_request(&mut parts.headers, marks, &peer.origin.text, peer.origin.is_secure, &snapshot.key_fields);
    if normalized.is_some() || parts.uri.authority().is_some() {
        parts.uri = origin_form(&parts.uri, normalized)?;
    }
    Ok(Decision::Forward { lane: lane_index, server_key, stamp, turn, settlement })
}

/// The target as it goes upstream: path and query only, which can not name another host.
fn origin_form(uri: &Uri, path: Option<String>) -> Result<Uri, Fault> {
    let target = match (path, uri.path_and_query()) {
        (Some(path), _) => {
            let text = uri.query().map_or_else(|| path.clone(), |query| format!("{path}?{query}"));
            PathAndQuery::from_maybe_shared(text)
                .map_err(|_invalid| Fault::Target("the request target is malformed"))?
        }
        (None, Some(target)) => target.clone(),
        (None, None) => PathAndQuery::from_static("/"),
    };
    let mut parts = http::uri::Parts::default();
    parts.path_and_query = Some(target);
    Uri::from_parts(parts).map_err(|_invalid| Fault::Target("the request target is malformed"))
}

/// Sends a request on, and makes the answer ready for the client.
async fn forward(
    view: &View,
    peer: &Peer,
    lane: usize,
    server_key: Option<NonZeroU64>,
    mut request: Box<Request<Upload>>,
    record: &mut Record,
) -> Result<Response<Content>, Fault> {
    let snapshot = &*view.snapshot;
    let upstream = snapshot.lanes[lane].upstream as usize;
    record.upstream(&snapshot.config.upstreams[upstream].name);
    match &view.targets[upstream] {
        Target::Echo => echo::answer(*request, snapshot.config.timeouts.body, &peer.timer)
            .await
            .map(|reply| reply.map(Content::from)),
        Target::Servers(servers) => {
            // HTTP/1.0 knows no informational answers.
            let interim = (request.version() == Version::HTTP_11).then(|| Rc::clone(&peer.interim));
            // Only older clients may leave Host out.
            if interim.is_none() && !request.headers().contains_key(header::HOST) {
                request.headers_mut().insert(header::HOST, servers.authority());
            }
            *request.version_mut() = Version::HTTP_11;
            let mut answer =
                servers.exchange(request, server_key, &snapshot.config.timeouts, &peer.timer, interim).await?;
            fields::forward_response(answer.headers_mut());
            *answer.version_mut() = Version::HTTP_11;
            Ok(answer.map(Content::from))
        }
    }
}
