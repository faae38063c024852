//! HTTP/1.1 in both directions, compared with hyper and h11: random messages, mutated, cut or reset at any point. The gateway may
//! refuse what hyper accepts; what the gateway passes on is what hyper reads in the same bytes, and h11 in those passed on.

use std::convert::Infallible;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::header::{CONNECTION, HeaderName, HeaderValue, TRAILER};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::runtime::{Builder, Runtime};

use crate::support::external_scripts::run_checks;
use crate::support::gateway::Gateway;
use crate::support::{DEADLINE, TempDir, forward_to, seeded_rng};

/// Random cases of each test, divided between the threads. Most end at once, some with a timeout.
const CASES: usize = 1200;
const THREADS: usize = 4;
/// For clients that wait for more. The upstream answers at once, and its answers must not arrive in the next case.
const SHORT_TIMEOUTS: &str = "[timeouts]\nrequest_head = \"300ms\"\nbody = \"300ms\"\nresponse_head = \"2s\"\n";

/// A request that hyper has read whole.
#[derive(Clone, PartialEq, Debug)]
struct ReadRequest {
    method: String,
    path: String,
    fields: Fields,
    body: Bytes,
    trailers: Fields,
}

/// Names in lower case and values of the fields that the gateway passes on, by name.
type Fields = Vec<(String, String)>;

/// Fields of one connection, which a proxy does not pass on, and those that the gateway sets.
const NOT_COMPARED: [&str; 12] = [
    "connection",
    "keep-alive",
    "te",
    "transfer-encoding",
    "content-length",
    "expect",
    "trailer",
    "upgrade",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-request-id",
];

fn fields_of(headers: &HeaderMap) -> Fields {
    let connection = headers.get_all(CONNECTION);
    let is_compared = |name: &HeaderName| {
        let is_named = connection.iter().any(|list| has_token(list.as_bytes(), name.as_str()));
        !is_named && !NOT_COMPARED.contains(&name.as_str())
    };
    let fields = headers.iter().filter(|(name, _)| is_compared(name));
    let mut fields: Fields =
        fields.map(|(name, value)| (name.to_string(), value.as_bytes().escape_ascii().to_string())).collect();
    // Fields of one name keep their order.
    fields.sort_by(|(one, _), (other, _)| one.cmp(other));
    fields
}

fn has_field(fields: &Fields, name: &str) -> bool {
    fields.iter().any(|(known, _)| known == name)
}

/// Whether a list has this element.
fn has_token(list: &[u8], name: &str) -> bool {
    list.split(|byte| *byte == b',').any(|token| token.trim_ascii().eq_ignore_ascii_case(name.as_bytes()))
}

type ReadRequests = Arc<Mutex<Vec<ReadRequest>>>;

/// A connection to the upstream: what was received, and the complete requests that hyper has read in it.
#[derive(Clone, Default)]
struct ReceivedConnection {
    bytes: Arc<Mutex<Vec<u8>>>,
    requests: ReadRequests,
}

/// Records what is read.
struct RecordingReader<R> {
    inner: R,
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl<R: AsyncRead + Unpin> AsyncRead for RecordingReader<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buffer);
        self.bytes.lock().unwrap().extend_from_slice(&buffer.filled()[before..]);
        read
    }
}

/// Serves a connection with hyper, and adds its complete requests to these lists.
async fn serve<const N: usize>(io: impl AsyncRead + AsyncWrite + Unpin, lists: [ReadRequests; N]) {
    let service = service_fn(move |request: Request<Incoming>| {
        let lists = lists.clone();
        async move {
            let (parts, body) = request.into_parts();
            if let Ok(body) = body.collect().await {
                let (method, path) = (parts.method.to_string(), parts.uri.path().to_owned());
                let (mut fields, mut trailers) =
                    (fields_of(&parts.headers), body.trailers().map_or_else(Vec::new, fields_of));
                // Names that servers confuse with others are removed, and trailers that are not announced.
                let is_plain = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
                fields.retain(|(name, _)| is_plain(name));
                let announced = parts.headers.get_all(TRAILER);
                trailers.retain(|(name, _)| announced.iter().any(|list| has_token(list.as_bytes(), name)));
                let request = ReadRequest { method, path, fields, body: body.to_bytes(), trailers };
                lists.iter().for_each(|list| list.lock().unwrap().push(request.clone()));
            }
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"fine"))))
        }
    });
    // An error is the end of the connection too.
    let _ =
        hyper::server::conn::http1::Builder::new().half_close(true).serve_connection(TokioIo::new(io), service).await;
}

/// The requests that hyper reads in these bytes.
fn requests_in(runtime: &Runtime, bytes: &[u8]) -> Vec<ReadRequest> {
    let read = ReadRequests::default();
    runtime.block_on(async {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        client.write_all(bytes).await.unwrap();
        client.shutdown().await.unwrap();
        tokio::join!(serve(server, [Arc::clone(&read)]), async { drop(client.read_to_end(&mut Vec::new()).await) });
    });
    Arc::into_inner(read).unwrap().into_inner().unwrap()
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Pieces that decide where a message ends.
const PIECES: [&[u8]; 34] = [
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\n\n",
    b" ",
    b"\t",
    b"\0",
    b"\x0b",
    b"\x7f",
    b"\xff",
    b":",
    b";",
    b",",
    b"-",
    b"+",
    b"_",
    b"0",
    b"1",
    b"5",
    b"a",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b"chunked",
    b"HTTP/1.0",
    b"Content-Length: 0\r\n",
    b"Content-Length: 3\r\n",
    b"Content-Length: 33\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"transfer-encoding : chunked\r\n",
    b" Content-Length: 5\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
];

fn piece(rng: &mut Rng) -> &'static [u8] {
    PIECES[rng.usize(..PIECES.len())]
}

/// Changes up to three places.
fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..rng.usize(..=3) {
        let mut at = rng.usize(..bytes.len());
        if rng.bool() {
            // Before or behind a line end.
            at = (at..bytes.len()).find(|at| bytes[*at] == b'\r').unwrap_or(at) + [0, 2][rng.usize(..2)];
            at = at.min(bytes.len() - 1);
        }
        match rng.u8(..4) {
            0 => drop(bytes.remove(at)),
            1 => drop(bytes.splice(at..at, piece(rng).iter().copied())),
            2 => drop(bytes.splice(at..=at, piece(rng).iter().copied())),
            _ => {
                let end = (at + rng.usize(1..40)).min(bytes.len());
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
        }
    }
}

/// The body of a message, which looks like a part of others, and the fields and bytes with which it is sent.
fn framed_body(rng: &mut Rng) -> Vec<u8> {
    let smuggled = &b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"[..];
    let body = [&b"hello"[..], b"", smuggled, b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", &[b'x'; 3000]][rng.usize(..6)];
    let more = [&b""[..], b"X-More: 1\r\n", b"Trailer: X-End\r\n"][rng.usize(..3)];
    if rng.bool() {
        return [format!("Content-Length: {}\r\n", body.len()).as_bytes(), more, b"\r\n", body].concat();
    }
    let mut framed = [b"Transfer-Encoding: chunked\r\n", more, b"\r\n"].concat();
    for chunk in body.chunks(rng.usize(1..=body.len().max(1))).take(20) {
        let extension = ["", ";a=b", ";\"\""][rng.usize(..3)];
        framed.extend(format!("{:x}{extension}\r\n", chunk.len()).bytes());
        framed.extend([chunk, b"\r\n"].concat());
    }
    framed.extend([&b"0\r\n"[..], [&b""[..], b"X-End: 1\r\n"][rng.usize(..2)], b"\r\n"].concat());
    framed
}

/// Some requests on one connection; the last one asks for its end.
fn requests(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in 0..rng.usize(1..=3) {
        let method = ["GET", "POST", "PUT", "DELETE", "HEAD"][rng.usize(..5)];
        let version = if rng.u8(..8) == 0 { "1.0" } else { "1.1" };
        bytes.extend(format!("{method} /{number} HTTP/{version}\r\nHost: a\r\n").bytes());
        if method == "POST" || method == "PUT" { bytes.extend(framed_body(rng)) } else { bytes.extend(b"\r\n") }
    }
    mutate(&mut bytes, rng);
    bytes.extend(b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    bytes
}

/// A response in what a client has received.
struct ReceivedResponse {
    status: u16,
    /// The response says that the gateway serves no further request on the connection.
    closes: bool,
}

fn responses_in(received: &[u8]) -> Vec<ReceivedResponse> {
    let received = String::from_utf8_lossy(received);
    let responses = received.split("HTTP/1.").skip(1);
    // An error that names a version has no status behind it.
    let read = |response: &str| {
        let status = response.get(2..5)?.parse().ok()?;
        Some(ReceivedResponse { status, closes: response.contains("\r\nconnection: close\r\n") })
    };
    responses.filter_map(read).collect()
}

/// Runs a function in several threads, each with a random generator of its own.
fn in_threads(run: impl Fn(&mut Rng) + Sync) {
    let mut rng = seeded_rng();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let (mut rng, run) = (rng.fork(), &run);
            scope.spawn(move || run(&mut rng));
        }
    });
}

#[test]
fn forwarded_requests_are_those_that_hyper_and_h11_read() {
    let connections: Arc<Mutex<Vec<ReceivedConnection>>> = Arc::default();
    in_threads(|rng| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let gateway = Gateway::start(&format!("{}{SHORT_TIMEOUTS}", forward_to(&[listener.local_addr().unwrap()], "")));
        let forwarded = ReadRequests::default();
        let (all_requests, all_connections) = (Arc::clone(&forwarded), Arc::clone(&connections));
        thread::spawn(move || {
            listener.set_nonblocking(true).unwrap();
            runtime().block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                while let Ok((stream, _)) = listener.accept().await {
                    let connection = ReceivedConnection::default();
                    all_connections.lock().unwrap().push(connection.clone());
                    let (inner, writer) = stream.into_split();
                    let reader = RecordingReader { inner, bytes: connection.bytes };
                    let lists = [connection.requests, Arc::clone(&all_requests)];
                    tokio::spawn(serve(tokio::io::join(reader, writer), lists));
                }
            });
        });
        let (runtime, mut all_forwarded) = (runtime(), 0);
        for _ in 0..CASES / THREADS {
            let bytes = requests(rng);
            let expected = requests_in(&runtime, &bytes);
            let mut client = TcpStream::connect(gateway.http).unwrap();
            client.set_read_timeout(Some(DEADLINE)).unwrap();
            // The gateway may refuse the request, and end the connection, before all of it is sent.
            let _ = client.write_all(&bytes);
            let mut received = Vec::new();
            let _ = client.read_to_end(&mut received);
            let mut forwarded = std::mem::take(&mut *forwarded.lock().unwrap());
            // A request of HTTP/1.0 without Host gets that of the server.
            for (forwarded, expected) in forwarded.iter_mut().zip(&expected) {
                if !has_field(&expected.fields, "host") {
                    forwarded.fields.retain(|(name, _)| name != "host");
                }
            }
            let bytes = bytes.escape_ascii();
            assert!(expected.starts_with(&forwarded), "{bytes}\nforwarded: {forwarded:?}\nhyper: {expected:?}");
            // Each forwarded request has a response. If others were not forwarded, the last response is an error or closes.
            let responses = responses_in(&received);
            let answered = responses.iter().take_while(|response| response.status == 200).count();
            let is_announced = responses.last().is_some_and(|last| last.status >= 400 || last.closes);
            let (received, count) = (received.escape_ascii(), forwarded.len());
            assert_eq!(answered, count, "{bytes}\nforwarded: {forwarded:?}\nreceived: {received}");
            assert!(responses.len() - count <= 1, "{bytes}\nreceived: {received}");
            assert!(count == expected.len() || is_announced, "{bytes}\nreceived: {received}\nhyper: {expected:?}");
            all_forwarded += forwarded.len();
        }
        assert!(all_forwarded > CASES / THREADS / 2, "only {all_forwarded} requests were forwarded");
    });
    let folder = TempDir::new();
    for (number, connection) in connections.lock().unwrap().iter().enumerate() {
        let hex = |body: &Bytes| body.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let requests = connection.requests.lock().unwrap();
        let requests: Vec<_> = requests.iter().map(|read| json!([read.method, read.path, hex(&read.body)])).collect();
        fs::write(folder.path().join(format!("{number}.bytes")), &*connection.bytes.lock().unwrap()).unwrap();
        fs::write(folder.path().join(format!("{number}.json")), json!(requests).to_string()).unwrap();
    }
    run_checks("h11_requests.py", &[folder.path().to_str().unwrap()]);
}

/// What an upstream sends, and how it ends the connection.
#[derive(Clone, Debug)]
struct ScriptedResponse {
    bytes: Vec<u8>,
    is_mutated: bool,
    is_reset: bool,
}

impl ScriptedResponse {
    fn random(rng: &mut Rng) -> ScriptedResponse {
        let status = ["200 OK", "404 Not Found", "204 No Content", "304 Not Modified", "500 Oops"][rng.usize(..5)];
        let version = if rng.u8(..4) == 0 { "1.0" } else { "1.1" };
        let mut bytes = format!("HTTP/{version} {status}\r\nDate: now\r\n").into_bytes();
        match rng.u8(..4) {
            // The end of the connection ends the body.
            0 => bytes.extend(b"\r\nuntil the end"),
            _ if status.starts_with(['2', '4', '5']) && !status.starts_with("204") => bytes.extend(framed_body(rng)),
            _ => bytes.extend(b"\r\n"),
        }
        let is_mutated = rng.bool();
        if is_mutated {
            mutate(&mut bytes, rng);
        }
        if rng.bool() {
            bytes.truncate(rng.usize(..=bytes.len()));
        }
        ScriptedResponse { bytes, is_mutated, is_reset: rng.u8(..3) == 0 }
    }

    fn is_chunked(&self) -> bool {
        self.bytes.to_ascii_lowercase().windows(7).any(|bytes| bytes == b"chunked")
    }

    /// Sends the response in two pieces, and ends the connection. What follows a piece arrives together with it, or later.
    fn send(&self, mut stream: TcpStream, rng: &mut Rng) {
        let (first, second) = self.bytes.split_at(rng.usize(..=self.bytes.len()));
        for piece in [first, second] {
            // The gateway may refuse the response before all of it is sent.
            let _ = stream.write_all(piece);
            thread::sleep(Duration::from_millis(rng.u64(..4)));
        }
        if self.is_reset {
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
            return;
        }
        // Unread bytes of the request would make the end of the connection a reset.
        let _ = stream.shutdown(Shutdown::Write);
        thread::spawn(move || io::copy(&mut stream, &mut io::sink()));
    }
}

/// The body of a request: none, or one that is sent while the response arrives.
enum Upload {
    Empty,
    Length,
    Chunked,
}

impl Upload {
    const PIECE_BYTES: usize = 64_000;
    const PIECES: usize = 60;

    fn random(rng: &mut Rng, version: &str) -> Upload {
        match rng.u8(..4) {
            0 => Upload::Length,
            1 if version == "1.1" => Upload::Chunked,
            _ => Upload::Empty,
        }
    }

    fn field(&self) -> String {
        match self {
            Upload::Empty => String::new(),
            Upload::Length => format!("Content-Length: {}\r\n", Self::PIECES * Self::PIECE_BYTES),
            Upload::Chunked => "Transfer-Encoding: chunked\r\n".to_owned(),
        }
    }

    /// Sends the body, which lasts longer than the response, until the connection ends. Returns whether the gateway has reset the
    /// connection instead of ending it: the failed write consumes that error, and the end of the stream is read behind it.
    fn send(&self, mut stream: &TcpStream, pause: Duration, is_ended: &AtomicBool) -> bool {
        let data = [b'x'; Self::PIECE_BYTES];
        let (piece, end) = match self {
            Upload::Empty => return false,
            Upload::Length => (data.to_vec(), &b""[..]),
            Upload::Chunked => {
                ([format!("{:x}\r\n", data.len()).as_bytes(), &data, b"\r\n"].concat(), &b"0\r\n\r\n"[..])
            }
        };
        for _ in 0..Self::PIECES {
            if is_ended.load(Ordering::Relaxed) {
                return false;
            }
            if let Err(error) = stream.write_all(&piece) {
                return error.kind() == io::ErrorKind::ConnectionReset;
            }
            thread::sleep(pause);
        }
        stream.write_all(end).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
    }
}

/// The connection of a hyper client to an upstream that sends its response as soon as it gets a byte.
struct RecordedStream {
    response: ScriptedResponse,
    is_requested: bool,
    waker: Option<Waker>,
}

impl AsyncRead for RecordedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.is_requested {
            self.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let ScriptedResponse { bytes, is_reset, .. } = &mut self.response;
        if bytes.is_empty() && *is_reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let length = bytes.len().min(buffer.remaining());
        buffer.put_slice(&bytes.drain(..length).collect::<Vec<u8>>());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RecordedStream {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.is_requested = true;
        self.waker.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A complete response.
#[derive(PartialEq, Debug)]
struct ReadResponse {
    status: u16,
    fields: Fields,
    body: Bytes,
}

/// A complete response, as hyper reads it.
fn response_by_hyper(runtime: &Runtime, response: ScriptedResponse) -> Option<ReadResponse> {
    runtime.block_on(async {
        let io = TokioIo::new(RecordedStream { response, is_requested: false, waker: None });
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.ok()?;
        let request = Request::post("/").header("host", "a").body(Empty::<Bytes>::new()).unwrap();
        let receiving = async {
            let response = sender.send_request(request).await.ok()?;
            let (status, fields) = (response.status().as_u16(), fields_of(response.headers()));
            Some(ReadResponse { status, fields, body: response.into_body().collect().await.ok()?.to_bytes() })
        };
        tokio::select! {
            biased;
            received = receiving => received,
            _ = async { drop(connection.await); std::future::pending::<()>().await } => None,
        }
    })
}

/// A response on a connection that has ended; `None` if the response is not complete, or not valid.
fn response_by_strict_client(mut received: &[u8], is_reset: bool) -> Option<ReadResponse> {
    // Bytes beyond ASCII as Latin-1.
    let line = |received: &mut &[u8]| {
        let end = received.windows(2).position(|two| two == b"\r\n")?;
        let line: String = received[..end].iter().copied().map(char::from).collect();
        *received = &received[end + 2..];
        Some(line)
    };
    let first = line(&mut received)?;
    let status = first.strip_prefix("HTTP/1.1 ").or_else(|| first.strip_prefix("HTTP/1.0 "))?.get(..3)?.parse().ok()?;
    let (mut length, mut is_chunked, mut headers) = (None, false, HeaderMap::new());
    loop {
        let field = line(&mut received)?;
        if field.is_empty() {
            break;
        }
        let (name, value) = field.split_once(": ")?;
        let bytes: Vec<u8> = value.chars().map(|char| char as u8).collect();
        headers.append(HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_bytes(&bytes).ok()?);
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = Some(value.parse::<usize>().ok()?),
            "transfer-encoding" => is_chunked = value == "chunked",
            _ => {}
        }
    }
    let mut body = Vec::new();
    if status == 204 || status == 304 {
        let (fields, body) = (fields_of(&headers), Bytes::new());
        return received.is_empty().then_some(ReadResponse { status, fields, body });
    } else if is_chunked {
        loop {
            let size = usize::from_str_radix(&line(&mut received)?, 16).ok()?;
            if size == 0 {
                while !line(&mut received)?.is_empty() {}
                break;
            }
            body.extend_from_slice(received.get(..size)?);
            received = received[size..].strip_prefix(b"\r\n")?;
        }
    } else if let Some(length) = length {
        body.extend_from_slice(received.get(..length)?);
        received = &received[length..];
    } else if !is_reset {
        body.extend_from_slice(std::mem::take(&mut received));
    } else {
        return None;
    }
    let (fields, body) = (fields_of(&headers), body.into());
    received.is_empty().then_some(ReadResponse { status, fields, body })
}

#[test]
fn a_response_that_looks_complete_is_that_which_hyper_reads() {
    in_threads(|rng| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // The gateway waits to send the rest of an upload when the response ends.
        SockRef::from(&listener).set_recv_buffer_size(4096).unwrap();
        let gateway = Gateway::start(&forward_to(&[listener.local_addr().unwrap()], ""));
        let next: Arc<Mutex<Option<ScriptedResponse>>> = Arc::default();
        let (scripts, mut upstream_rng) = (Arc::clone(&next), rng.fork());
        thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                // The head is short. The body is not read while the response is sent.
                let _ = stream.read(&mut [0; 2000]);
                if let Some(script) = scripts.lock().unwrap().take() {
                    script.send(stream, &mut upstream_rng);
                }
            }
        });
        let (runtime, mut complete, mut refused) = (runtime(), 0, 0);
        for _ in 0..CASES / THREADS {
            let response = ScriptedResponse::random(rng);
            let expected = response_by_hyper(&runtime, response.clone());
            next.lock().unwrap().replace(response.clone());
            let mut client = TcpStream::connect(gateway.http).unwrap();
            client.set_read_timeout(Some(DEADLINE)).unwrap();
            let version = ["1.0", "1.1"][rng.usize(..2)];
            // Not idempotent, so that it is sent once.
            let (upload, pause) = (Upload::random(rng, version), Duration::from_millis(rng.u64(..2)));
            let field = upload.field();
            let request = format!("POST / HTTP/{version}\r\nHost: a\r\nConnection: close\r\n{field}\r\n");
            client.write_all(request.as_bytes()).unwrap();
            let (mut received, is_ended) = (Vec::new(), AtomicBool::new(false));
            let uploading = client.try_clone().unwrap();
            let is_reset = thread::scope(|scope| {
                let uploading = scope.spawn(|| upload.send(&uploading, pause, &is_ended));
                let is_reset = client.read_to_end(&mut received).is_err();
                is_ended.store(true, Ordering::Relaxed);
                is_reset | uploading.join().unwrap()
            });
            let mut got = response_by_strict_client(&received, is_reset);
            // Without Date, the gateway adds it.
            if !expected.as_ref().is_some_and(|expected| has_field(&expected.fields, "date")) {
                got.iter_mut().for_each(|got| got.fields.retain(|(name, _)| name != "date"));
            }
            let is_status = |statuses: &[u16]| got.as_ref().is_some_and(|got| statuses.contains(&got.status));
            let (is_error, is_empty) = (is_status(&[502, 504]), is_status(&[204, 304]));
            // Malformed trailers end a response that has begun.
            let is_refused = is_error || got.is_none() && response.is_chunked();
            // The response is not complete, or complete with its head, whatever follows; the gateway refuses some of what hyper accepts; a
            // reset discards what the gateway has not read by then. Every other response passes whole.
            let may_differ = match expected {
                None => got.is_none() || is_error || is_empty,
                Some(_) => response.is_mutated && is_refused || response.is_reset && (got.is_none() || is_error),
            };
            complete += usize::from(expected.is_some());
            refused += usize::from(expected.is_some() && may_differ && !response.is_reset);
            let bytes = response.bytes.escape_ascii();
            assert!(may_differ || got == expected, "{request}{bytes}\n{response:?}\n{got:?}\n{expected:?}");
        }
        assert!(complete > CASES / THREADS / 4 && refused < complete / 16, "{refused} of {complete} were refused");
    });
}
