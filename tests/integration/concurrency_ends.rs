//! Every way in which a request can end gives its slot back, and at no moment are more requests at the upstream than a
//! rule allows.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;

use crate::support::client::{Client, HOST, request};
use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    CANCEL, DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, RawHttp2, STATUS_200, frame, header_block,
};
use crate::support::upstream::{Connection, Upstream};
use crate::support::{eventually, eventually_eq, seeded_rng};

const LIMIT: usize = 10;
const CLIENTS: usize = 64;

const HANDSHAKE: [(&str, &str); 4] = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

/// The requests at the upstream.
#[derive(Default)]
struct Requests {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By connection.
    open: HashMap<usize, TcpStream>,
    most: usize,
    /// Whether responses may end.
    is_released: bool,
}

/// Whether the gateway has closed a connection, even if unread bytes precede the end.
fn is_closed(stream: &TcpStream) -> bool {
    let mut ends = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut ends, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

impl Requests {
    /// Counts a request. A request whose connection the gateway has closed is over, even if its script has not noticed; this
    /// may be the request to count.
    fn begin(&self, connection: &mut Connection) {
        let mut state = self.state.lock().unwrap();
        state.open.insert(connection.number, connection.stream().try_clone().unwrap());
        state.open.retain(|_, stream| !is_closed(stream));
        state.most = state.most.max(state.open.len());
    }

    /// To be called before the last byte of the response is sent.
    fn end(&self, connection: &Connection) {
        self.state.lock().unwrap().open.remove(&connection.number);
    }

    /// Waits until responses may end; `false` if the gateway closes the connection before.
    fn wait(&self, connection: &mut Connection) -> bool {
        let mut state = self.state.lock().unwrap();
        while !state.is_released {
            if is_closed(connection.stream()) {
                return false;
            }
            state = self.changed.wait_timeout(state, Duration::from_millis(5)).unwrap().0;
        }
        true
    }

    fn release(&self, is_released: bool) {
        self.state.lock().unwrap().is_released = is_released;
        self.changed.notify_all();
    }
}

/// Uploads are answered when they are complete. Downloads and `/die` send one half at once; then the others end, and `/die`
/// closes the connection. WebSockets echo.
fn serve(requests: &Requests, connection: &mut Connection) {
    while let Some(head) = connection.read_head() {
        requests.begin(connection);
        let goes_on = match head.target.as_str() {
            "/upload" => connection.read_body(&head).is_some_and(|_| {
                requests.end(connection);
                connection.reply(200, &[], b"done")
            }),
            "/socket" => {
                let key = head.field("sec-websocket-key").expect("a handshake").to_owned();
                connection.send(switch_response(&key));
                while let Some(byte) = connection.read_exactly(1).filter(|byte| byte != b"q") {
                    connection.send(byte);
                }
                requests.end(connection);
                false
            }
            download => {
                connection.send("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc");
                let may_end = requests.wait(connection);
                requests.end(connection);
                may_end && download != "/die" && connection.send("def")
            }
        };
        if !goes_on {
            requests.end(connection);
            return;
        }
    }
    requests.end(connection);
}

fn switch_response(key: &str) -> String {
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    let accept = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, digest);
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: {accept}\r\n\r\n"
    )
}

fn upstream() -> (Arc<Requests>, Upstream) {
    let requests = Arc::new(Requests::default());
    let upstream = Upstream::with_script({
        let requests = Arc::clone(&requests);
        move |connection| serve(&requests, connection)
    });
    (requests, upstream)
}

fn toml(upstream: &Upstream, settings: &str) -> String {
    format!(
        "workers = 3\n{}[rules.r]\nkey = \"ip\"\n{settings}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u")
    )
}

fn under_way(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_concurrent_requests", &[])
}

fn decided(gateway: &Gateway, outcome: &str) -> u64 {
    gateway.metrics().sum("transom_decisions_total", &[("outcome", outcome)])
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Upload,
    Download,
    WebSocket,
    /// A download that the upstream breaks off.
    Die,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Ending {
    /// The request is completed, and its response read.
    Finish,
    Close,
    /// The connection is reset.
    Reset,
    /// The stream is reset, and the connection stays open. Over HTTP/1.1, as `Close`.
    Cancel,
}

/// A request that has begun. Whether it was admitted is not known yet.
enum Begun {
    Http1(Client),
    Http2(RawHttp2),
}

fn begin(gateway: &Gateway, kind: Kind, is_http2: bool) -> Begun {
    if is_http2 {
        let mut client = RawHttp2::connect(gateway.http);
        match kind {
            Kind::Upload => {
                let block = header_block(&[
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":authority", HOST),
                    (":path", "/upload"),
                    ("content-length", "3"),
                ]);
                client.send(frame(HEADERS, END_HEADERS, 1, &block)).send(frame(DATA, 0, 1, b"a"))
            }
            Kind::Download => client.get(1, "/download"),
            Kind::Die => client.get(1, "/die"),
            Kind::WebSocket => client.open_websocket(1, "/socket"),
        };
        return Begun::Http2(client);
    }
    let mut client = gateway.client();
    client.send(match kind {
        Kind::Upload => format!("POST /upload HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 3\r\n\r\na").into_bytes(),
        Kind::Download => request("GET", "/download", &[], b""),
        Kind::Die => request("GET", "/die", &[], b""),
        Kind::WebSocket => request("GET", "/socket", &HANDSHAKE, b""),
    });
    Begun::Http1(client)
}

impl Begun {
    fn stream(&self) -> &TcpStream {
        match self {
            Begun::Http1(client) => &client.stream,
            Begun::Http2(client) => &client.stream,
        }
    }

    /// Ends the request. A connection that outlives the request is returned.
    fn end(mut self, kind: Kind, ending: Ending) -> Option<Begun> {
        match (&mut self, ending) {
            (_, Ending::Finish) => {
                self.finish(kind);
                // A tunnel is open until both sides have closed it.
                return Some(self).filter(|_| kind != Kind::WebSocket);
            }
            (_, Ending::Reset) => SockRef::from(self.stream()).set_linger(Some(Duration::ZERO)).unwrap(),
            (Begun::Http2(client), Ending::Cancel) => {
                client.send_if_open(frame(RST_STREAM, 0, 1, &CANCEL.to_be_bytes()));
                return Some(self);
            }
            (_, Ending::Close) | (Begun::Http1(_), Ending::Cancel) => {}
        }
        None
    }

    /// Completes the request, and reads its response, be it a refusal, as far as it comes.
    fn finish(&mut self, kind: Kind) {
        match self {
            Begun::Http1(client) => {
                if kind == Kind::Upload {
                    client.send_if_open("bc");
                }
                let Some(head) = client.read_head() else { return };
                match (kind, head.status) {
                    (Kind::WebSocket, 101) => {
                        client.send_if_open("q");
                        read_to_end(&mut client.stream);
                    }
                    (Kind::Die, 200) => read_to_end(&mut client.stream),
                    (_, status) => {
                        assert!([200, 429].contains(&status), "{kind:?}: {status}");
                        client.read_body(&mut head.clone(), "GET");
                    }
                }
            }
            Begun::Http2(client) => {
                if kind == Kind::Upload {
                    client.send_if_open(frame(DATA, END_STREAM, 1, b"bc"));
                }
                while let Some(next) = client.next_frame() {
                    match next.kind {
                        HEADERS if kind == Kind::WebSocket && next.payload[0] == STATUS_200 => {
                            client.send_if_open(frame(DATA, 0, 1, b"q"));
                        }
                        RST_STREAM => return,
                        _ => {}
                    }
                    if next.stream == 1 && [HEADERS, DATA].contains(&next.kind) && next.flags & END_STREAM != 0 {
                        return;
                    }
                }
            }
        }
    }
}

fn read_to_end(stream: &mut TcpStream) {
    loop {
        match stream.read(&mut [0; 1024]) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// The number of rounds; few by default.
fn rounds() -> usize {
    std::env::var("TRANSOM_ROUNDS").map_or(16, |text| text.parse().expect("`TRANSOM_ROUNDS` is a number"))
}

/// In each round 64 clients begin at once, of which 10 are admitted, and end in random ways while refused clients try again.
#[test]
fn random_ends_give_all_slots_back() {
    let (requests, upstream) = upstream();
    let gateway = Gateway::start(&toml(&upstream, &format!("concurrent = {LIMIT}")));
    let (mut rng, rounds) = (seeded_rng(), rounds());
    for round in 0..rounds {
        requests.release(false);
        let (admitted, refused) = (decided(&gateway, "admitted"), decided(&gateway, "refused"));
        let begun: Vec<(Begun, Kind, Ending, bool)> = thread::scope(|scope| {
            let start = |_| {
                let kind = *rng.choice(&[Kind::Upload, Kind::Download, Kind::WebSocket, Kind::Die]).unwrap();
                let endings = [Ending::Finish, Ending::Close, Ending::Reset, Ending::Cancel];
                let (ending, is_http2) = (*rng.choice(&endings).unwrap(), rng.bool());
                let gateway = &gateway;
                scope.spawn(move || (begin(gateway, kind, is_http2), kind, ending, is_http2))
            };
            let started: Vec<_> = (0..CLIENTS).map(start).collect();
            started.into_iter().map(|client| client.join().unwrap()).collect()
        });
        eventually_eq(|| decided(&gateway, "admitted") - admitted, LIMIT as u64);
        eventually_eq(|| decided(&gateway, "refused") - refused, (CLIENTS - LIMIT) as u64);
        assert_eq!(under_way(&gateway), LIMIT as u64);
        requests.release(true);
        // Cancelled streams keep their connection until all slots are free.
        let open: Vec<Option<Begun>> = thread::scope(|scope| {
            let end = |(begun, kind, ending, is_http2): (Begun, Kind, Ending, bool)| {
                let gateway = &gateway;
                scope.spawn(move || {
                    let open = begun.end(kind, ending);
                    let again = begin(gateway, kind, is_http2).end(kind, ending);
                    drop(again.filter(|_| ending != Ending::Cancel));
                    open
                })
            };
            let ended: Vec<_> = begun.into_iter().map(end).collect();
            ended.into_iter().map(|client| client.join().unwrap()).collect()
        });
        eventually("all slots are free", || under_way(&gateway) == 0);
        drop(open);
        let most = requests.state.lock().unwrap().most;
        assert!(most <= LIMIT, "round {round}: {most} requests were at the upstream at once");
    }
    assert_eq!(requests.state.lock().unwrap().most, LIMIT);
    let (admitted, refused) = (decided(&gateway, "admitted"), decided(&gateway, "refused"));
    println!(
        "{rounds} rounds, {admitted} requests admitted, {refused} refused: at most {LIMIT} at the upstream at once, and \
         none in flight after each round"
    );
}

/// Each way alone, with one slot: another request is refused before the end, and admitted after it.
#[test]
fn each_end_gives_the_slot_back() {
    let (requests, upstream) = upstream();
    let gateway = Gateway::start(&toml(&upstream, "concurrent = 1"));
    for kind in [Kind::Upload, Kind::Download, Kind::WebSocket, Kind::Die] {
        for ending in [Ending::Finish, Ending::Close, Ending::Reset, Ending::Cancel] {
            for is_http2 in [false, true] {
                requests.release(false);
                let begun = begin(&gateway, kind, is_http2);
                eventually("the request is under way", || under_way(&gateway) == 1);
                gateway.get("/download").expect(429);
                requests.release(true);
                let _open = begun.end(kind, ending);
                let what = format!("{kind:?}, {ending:?}, HTTP/2: {is_http2}: the slot is free");
                eventually(&what, || under_way(&gateway) == 0);
                gateway.get("/download").expect(200);
                eventually_eq(|| under_way(&gateway), 0);
            }
        }
    }
}

#[test]
fn failures_give_the_slot_back() {
    let timeouts = "[timeouts]\nresponse_head = \"300ms\"\nbody = \"300ms\"\n[limits]\nmax_body = 10\n";
    let settings = "concurrent = 1";
    let silent = Upstream::with_script(|connection| {
        while connection.read_head().is_some() {
            while !connection.wait_for_close() {}
        }
    });
    let head = |field: &str| format!("POST /a HTTP/1.1\r\nHost: {HOST}\r\n{field}\r\n\r\n");
    let slow_upload = head("Content-Length: 5") + "a";
    let large_upload = head("Transfer-Encoding: chunked") + "14\r\n01234567890123456789\r\n0\r\n\r\n";
    let get = String::from_utf8(request("GET", "/a", &[], b"")).unwrap();
    for (server, text, statuses) in [
        (&silent, &get, &[504][..]),
        (&silent, &slow_upload, &[408]),
        (&silent, &large_upload, &[413]),
        (&Upstream::refusing_connections(), &get, &[502]),
        (&Upstream::with_script(|connection| drop(connection.read_head())), &get, &[502]),
    ] {
        let gateway = Gateway::start(&format!("{}{timeouts}", toml(server, settings)));
        for _ in 0..3 {
            let mut client = gateway.client();
            client.send(text);
            let response = client.read_response_to("POST");
            assert!(statuses.contains(&response.status), "{text}: {}", response.status);
            eventually_eq(|| under_way(&gateway), 0);
        }
        assert_eq!(decided(&gateway, "admitted"), 3);
    }
}

/// A client that does not read its download holds the slot.
#[test]
fn a_slot_is_held_until_the_last_byte_of_the_response() {
    const BYTES: usize = 16 * 1024 * 1024;
    let upstream = Upstream::with_script(|connection| {
        if connection.read_head().is_some() {
            connection.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {BYTES}\r\n\r\n"));
            connection.send(vec![b'x'; BYTES]);
        }
    });
    let gateway = Gateway::start(&toml(&upstream, "concurrent = 1"));
    let mut slow = gateway.client();
    slow.send(request("GET", "/a", &[], b""));
    slow.read_head().unwrap().expect(200);
    let mut second = gateway.client();
    second.send(request("GET", "/a", &[], b""));
    assert_eq!(second.read_head().unwrap().status, 429);
    assert_eq!(slow.read_exactly(BYTES).len(), BYTES);
    eventually_eq(|| under_way(&gateway), 0);
}
