//! Two HTTP/2 clients. `Http2Client` is hyper's client and follows the protocol. `RawHttp2` writes single frames, valid or
//! not, and reads the frames that the gateway sends.
//!
//! `RawHttp2` writes heads without compression, and decodes received heads only as far as a test needs.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper::ext::Protocol;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::runtime::{Builder, Runtime};

use super::DEADLINE;
use super::client::{HOST, HttpResponse};

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const ACK: u8 = 1;

/// RFC 9113, section 7.
pub const NO_ERROR: u32 = 0;
pub const PROTOCOL_ERROR: u32 = 1;
pub const INTERNAL_ERROR: u32 = 2;
pub const FRAME_SIZE_ERROR: u32 = 6;
pub const CANCEL: u32 = 8;
pub const ENHANCE_YOUR_CALM: u32 = 11;

/// The first byte of the head of a response, for statuses in the static table (RFC 7541, appendix A).
pub const STATUS_200: u8 = 0x88;
pub const STATUS_400: u8 = 0x8c;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// The error code of RST_STREAM and GOAWAY.
    pub fn code(&self) -> u32 {
        let at = if self.kind == GOAWAY { 4 } else { 0 };
        u32::from_be_bytes(self.payload[at..at + 4].try_into().unwrap())
    }
}

/// A frame as bytes.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A header block of literal fields that are never indexed.
pub fn header_block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in fields {
        bytes.push(0);
        for text in [name, value] {
            encode_integer(text.len(), &mut bytes);
            bytes.extend(text.bytes());
        }
    }
    bytes
}

/// An integer with a prefix of seven bits (RFC 7541, section 5.1).
fn encode_integer(n: usize, bytes: &mut Vec<u8>) {
    if n < 127 {
        return bytes.push(n as u8);
    }
    bytes.push(127);
    let mut rest = n - 127;
    while rest >= 128 {
        bytes.push((rest % 128 + 128) as u8);
        rest /= 128;
    }
    bytes.push(rest as u8);
}

/// A SETTINGS frame.
pub fn settings(settings: &[(u16, u32)]) -> Vec<u8> {
    let parameter = |(id, value): &(u16, u32)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
    frame(SETTINGS, 0, 0, &settings.iter().flat_map(parameter).collect::<Vec<u8>>())
}

/// The block of an ordinary request.
pub fn request_block(method: &str, path: &str) -> Vec<u8> {
    header_block(&[(":method", method), (":scheme", "http"), (":authority", HOST), (":path", path)])
}

pub struct RawHttp2 {
    pub stream: TcpStream,
    received: Vec<u8>,
}

impl RawHttp2 {
    /// Connects without sending the preface.
    pub fn connect_without_preface(address: SocketAddr) -> RawHttp2 {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        RawHttp2 { stream, received: Vec::new() }
    }

    /// The server side of a connection on which nothing was read yet: skips the preface and sends SETTINGS.
    pub fn accept(stream: TcpStream) -> RawHttp2 {
        RawHttp2::accept_with(stream, &[])
    }

    /// The same, with settings.
    pub fn accept_with(stream: TcpStream, settings: &[(u16, u32)]) -> RawHttp2 {
        let mut raw = RawHttp2 { stream, received: Vec::new() };
        let mut preface = [0; 24];
        raw.stream.read_exact(&mut preface).unwrap();
        raw.send(self::settings(settings));
        raw
    }

    /// Connects, and sends the preface and SETTINGS.
    pub fn connect_with(address: SocketAddr, settings: &[(u16, u32)]) -> RawHttp2 {
        let mut raw = RawHttp2::connect_without_preface(address);
        raw.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").send(self::settings(settings));
        raw
    }

    pub fn connect(address: SocketAddr) -> RawHttp2 {
        RawHttp2::connect_with(address, &[])
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut RawHttp2 {
        self.stream.write_all(bytes.as_ref()).unwrap();
        self
    }

    /// Sends bytes; `false` if the connection is closed.
    pub fn send_if_open(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// A request without a body.
    pub fn get(&mut self, stream: u32, path: &str) -> &mut RawHttp2 {
        self.send(frame(HEADERS, END_STREAM | END_HEADERS, stream, &request_block("GET", path)))
    }

    /// An extended CONNECT for a WebSocket.
    pub fn open_websocket(&mut self, stream: u32, path: &str) -> &mut RawHttp2 {
        let pseudo = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http"), (":authority", HOST)];
        let head = [header_block(&pseudo), header_block(&[(":path", path), ("sec-websocket-version", "13")])].concat();
        self.send(frame(HEADERS, END_HEADERS, stream, &head))
    }

    /// The next frame; `None` at the end of the connection or a reset. Acknowledges no frame.
    pub fn next_frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(head) = self.received.first_chunk::<9>() {
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                let (kind, flags) = (head[3], head[4]);
                if self.received.len() >= 9 + length {
                    let payload = self.received.drain(..9 + length).skip(9).collect();
                    return Some(Frame { kind, flags, stream, payload });
                }
            }
            let mut piece = [0; 16 * 1024];
            match self.stream.read(&mut piece) {
                Ok(0) => return None,
                Ok(n) => self.received.extend_from_slice(&piece[..n]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no frame: {error}"),
            }
        }
    }

    /// Reads frames up to one of a kind; fails if the connection ends first.
    pub fn read_until(&mut self, kind: u8) -> Frame {
        loop {
            let frame = self.next_frame().unwrap_or_else(|| panic!("closed before a frame of kind {kind}"));
            if frame.kind == kind {
                return frame;
            }
        }
    }

    /// The first byte of the head of the response on a stream.
    pub fn read_status(&mut self, stream: u32) -> u8 {
        loop {
            let frame = self.read_until(HEADERS);
            if frame.stream == stream {
                return frame.payload[0];
            }
        }
    }

    /// All frames until the gateway closes the connection.
    pub fn read_to_end(&mut self) -> Vec<Frame> {
        std::iter::from_fn(|| self.next_frame()).collect()
    }
}

/// A client that follows the protocol.
pub struct Http2Client {
    runtime: Runtime,
    sender: SendRequest<BoxBody<Bytes, std::io::Error>>,
}

impl Http2Client {
    pub fn connect(address: SocketAddr) -> Http2Client {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let sender = runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            stream.set_nodelay(true).unwrap();
            let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            sender
        });
        Http2Client { runtime, sender }
    }

    pub fn get(&mut self, path: &str) -> HttpResponse {
        self.request_path("GET", path, &[], b"")
    }

    pub fn request_path(&mut self, method: &str, path: &str, fields: &[(&str, &str)], body: &[u8]) -> HttpResponse {
        self.request_uri(method, &format!("http://{HOST}{path}"), fields, body)
    }

    /// Sends a request with a complete URI.
    pub fn request_uri(&mut self, method: &str, uri: &str, fields: &[(&str, &str)], body: &[u8]) -> HttpResponse {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let body = Full::new(Bytes::copy_from_slice(body)).map_err(|never| match never {}).boxed();
        self.send(request.body(body).unwrap())
    }

    /// Requests a tunnel by an extended CONNECT, and expects an ordinary response.
    pub fn connect_to(&mut self, protocol: &'static str, path: &str, fields: &[(&str, &str)]) -> HttpResponse {
        let mut request = Request::connect(format!("http://{HOST}{path}"));
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let body = Full::new(Bytes::new()).map_err(|never| match never {}).boxed();
        self.send(request.extension(Protocol::from_static(protocol)).body(body).unwrap())
    }

    pub fn send(&mut self, request: Request<BoxBody<Bytes, std::io::Error>>) -> HttpResponse {
        self.try_send(request).expect("the response was aborted")
    }

    /// Sends a request; `None` if the response was aborted after its head.
    pub fn try_send(&mut self, request: Request<BoxBody<Bytes, std::io::Error>>) -> Option<HttpResponse> {
        let Http2Client { runtime, sender } = self;
        runtime.block_on(async {
            let response = tokio::time::timeout(DEADLINE, async {
                sender.ready().await.unwrap();
                read(sender.send_request(request).await.unwrap()).await
            });
            response.await.expect("no response in time")
        })
    }

    /// Many concurrent requests; the responses in the order of the requests.
    pub fn get_many(&mut self, path: &str, count: usize) -> Vec<HttpResponse> {
        let Http2Client { runtime, sender } = self;
        runtime.block_on(async {
            let mut tasks = Vec::new();
            for _ in 0..count {
                let body = Full::new(Bytes::new()).map_err(|never| match never {}).boxed();
                let request = Request::get(format!("http://{HOST}{path}")).body(body).unwrap();
                sender.ready().await.unwrap();
                let response = sender.send_request(request);
                tasks.push(tokio::spawn(async move { read(response.await.unwrap()).await.unwrap() }));
            }
            let mut responses = Vec::new();
            for task in tasks {
                responses.push(tokio::time::timeout(DEADLINE, task).await.expect("no response in time").unwrap());
            }
            responses
        })
    }
}

async fn read(response: Response<Incoming>) -> Option<HttpResponse> {
    let (head, body) = response.into_parts();
    let text = |bytes: &[u8]| bytes.iter().copied().map(char::from).collect::<String>();
    let fields = |map: &http::HeaderMap| map.iter().map(|(n, v)| (n.to_string(), text(v.as_bytes()))).collect();
    let collected = body.collect().await.ok()?;
    let trailers = collected.trailers().map(fields).unwrap_or_default();
    Some(HttpResponse {
        version: format!("{:?}", head.version),
        status: head.status.as_u16(),
        fields: fields(&head.headers),
        body: collected.to_bytes().to_vec(),
        trailers,
        ..HttpResponse::default()
    })
}
