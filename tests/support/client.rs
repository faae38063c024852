//! A blocking HTTP/1.1 client over one raw connection, and the responses it receives.
//!
//! The client sends the bytes of the test unchanged, and reads strictly: a response that is not framed as in RFC 9112
//! fails the test.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use serde_json::Value;

use super::DEADLINE;

/// The default Host of requests.
pub const HOST: &str = "gateway.test";

pub struct Client<S = TcpStream> {
    pub stream: S,
    received: Vec<u8>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Client {
        Client::from_tcp(TcpStream::connect(address).unwrap())
    }

    /// From an address of this machine, such as any of 127/8.
    pub fn connect_from(source: &str, address: SocketAddr) -> Client {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&format!("{source}:0").parse::<SocketAddr>().unwrap().into()).unwrap();
        socket.connect(&address.into()).unwrap();
        Client::from_tcp(socket.into())
    }

    pub fn from_tcp(stream: TcpStream) -> Client {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Client::from_stream(stream)
    }

    /// Shuts down the write side; responses can still be read. An error is ignored: the gateway may have closed already.
    pub fn shutdown_write(&mut self) -> &mut Client {
        let _ = self.stream.shutdown(Shutdown::Write);
        self
    }
}

impl<S: Read + Write> Client<S> {
    /// Over a connection of any type. The connection sets its own timeouts.
    pub fn from_stream(stream: S) -> Client<S> {
        Client { stream, received: Vec::new() }
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Client<S> {
        self.stream.write_all(bytes.as_ref()).unwrap();
        self
    }

    /// Sends bytes, and ignores an error: the gateway may have closed the connection already.
    pub fn send_if_open(&mut self, bytes: impl AsRef<[u8]>) -> &mut Client<S> {
        let _ = self.stream.write_all(bytes.as_ref());
        self
    }

    pub fn get(&mut self, target: &str) -> HttpResponse {
        self.request("GET", target, &[], b"")
    }

    pub fn get_with(&mut self, target: &str, fields: &[(&str, &str)]) -> HttpResponse {
        self.request("GET", target, fields, b"")
    }

    pub fn post(&mut self, target: &str, body: impl AsRef<[u8]>) -> HttpResponse {
        self.request("POST", target, &[], body.as_ref())
    }

    /// Sends a request and reads its response. A body that is not empty gets a Content-Length.
    pub fn request(&mut self, method: &str, target: &str, fields: &[(&str, &str)], body: &[u8]) -> HttpResponse {
        self.send(request(method, target, fields, body));
        self.read_response_to(method)
    }

    pub fn read_response(&mut self) -> HttpResponse {
        self.read_response_to("GET")
    }

    /// Reads one response and the informational responses before it. `method` decides whether it has a body.
    pub fn read_response_to(&mut self, method: &str) -> HttpResponse {
        let mut interim = Vec::new();
        loop {
            let mut response = self.read_head().unwrap_or_else(|| panic!("closed without a response to {method}"));
            if (100..200).contains(&response.status) {
                interim.push(response.status);
                continue;
            }
            response.informational = interim;
            self.read_body(&mut response, method);
            return response;
        }
    }

    /// One response, or `None` if the connection was closed instead.
    pub fn read_response_or_end(&mut self) -> Option<HttpResponse> {
        let mut response = self.read_head()?;
        self.read_body(&mut response, "GET");
        Some(response)
    }

    /// Reads the head of a response; `None` if the connection was closed before one.
    pub fn read_head(&mut self) -> Option<HttpResponse> {
        let first = self.read_line_or_end()?;
        let (version, rest) = first.split_once(' ').unwrap_or_else(|| panic!("no status line: {first:?}"));
        let status = rest.get(..3).and_then(|digits| digits.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status code: {first:?}"));
        assert!(version == "HTTP/1.1" || version == "HTTP/1.0", "{first:?}");
        let mut response = HttpResponse { version: version.to_owned(), status, ..HttpResponse::default() };
        response.fields = self.read_fields();
        Some(response)
    }

    pub fn read_body(&mut self, response: &mut HttpResponse, method: &str) {
        let lengths = response.values("content-length");
        if method == "HEAD" || [204, 304].contains(&response.status) {
            return;
        }
        match response.field("transfer-encoding") {
            Some(coding) => {
                assert_eq!(coding, "chunked");
                assert!(lengths.is_empty(), "Content-Length beside Transfer-Encoding");
                response.chunked = true;
                while let Some(chunk) = self.read_chunk() {
                    response.body.extend(chunk);
                }
                response.trailers = self.read_fields();
            }
            None if !lengths.is_empty() => {
                assert_eq!(lengths.len(), 1, "{lengths:?}");
                let length = lengths[0].parse().unwrap();
                response.body = self.read_exactly(length);
            }
            None => response.body = self.read_to_end(),
        }
    }

    /// The next chunk; `None` for the last one. Trailers are not read.
    pub fn read_chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.read_line();
        let size = usize::from_str_radix(&size, 16).unwrap_or_else(|_| panic!("no chunk size: {size:?}"));
        if size == 0 {
            return None;
        }
        let chunk = self.read_exactly(size);
        assert_eq!(self.read_exactly(2), b"\r\n");
        Some(chunk)
    }

    fn read_fields(&mut self) -> Vec<(String, String)> {
        let mut fields = Vec::new();
        loop {
            let line = self.read_line();
            if line.is_empty() {
                return fields;
            }
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no field: {line:?}"));
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    fn read_line(&mut self) -> String {
        self.read_line_or_end().expect("the connection ended within a message")
    }

    /// A line without its end, obs-text as Latin-1; `None` at the end of the connection.
    fn read_line_or_end(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.received.windows(2).position(|two| two == b"\r\n") {
                let line: Vec<u8> = self.received.drain(..end + 2).take(end).collect();
                return Some(line.into_iter().map(char::from).collect());
            }
            if !self.fill() {
                assert!(
                    self.received.is_empty(),
                    "the connection ended within a line: {:?}",
                    String::from_utf8_lossy(&self.received)
                );
                return None;
            }
        }
    }

    pub fn read_exactly(&mut self, length: usize) -> Vec<u8> {
        while self.received.len() < length {
            assert!(self.fill(), "the connection ended after {} of {length} bytes", self.received.len());
        }
        self.received.drain(..length).collect()
    }

    /// Everything until the connection ends.
    pub fn read_to_end(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.received)
    }

    /// Reads available bytes; `false` at the end. A reset counts as an end.
    fn fill(&mut self) -> bool {
        let mut piece = [0; 16 * 1024];
        match self.stream.read(&mut piece) {
            Ok(n) => {
                self.received.extend_from_slice(&piece[..n]);
                n > 0
            }
            // Without `close_notify` of TLS, the end of the connection is an error of this kind.
            Err(error) if [ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof].contains(&error.kind()) => false,
            Err(error) => panic!("no response: {error}"),
        }
    }

    /// Fails unless the gateway closes the connection without sending another byte.
    pub fn expect_closed(&mut self) {
        let rest = self.read_to_end();
        assert!(rest.is_empty(), "bytes after the response: {:?}", String::from_utf8_lossy(&rest));
    }
}

/// A request as bytes. `host` among the fields replaces the default.
pub fn request(method: &str, target: &str, fields: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("{method} {target} HTTP/1.1\r\n");
    if !fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        text.push_str(&format!("Host: {HOST}\r\n"));
    }
    for (name, value) in fields {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if !body.is_empty() {
        text.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    text.push_str("\r\n");
    let mut bytes = text.into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

#[derive(Clone, Debug, Default)]
pub struct HttpResponse {
    pub version: String,
    pub status: u16,
    /// Names in lower case, in the order received.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub chunked: bool,
    pub trailers: Vec<(String, String)>,
    /// The informational responses before this one.
    pub informational: Vec<u16>,
}

impl HttpResponse {
    #[track_caller]
    pub fn expect(self, status: u16) -> HttpResponse {
        assert_eq!(self.status, status, "{:?} {}", self.fields, self.text());
        self
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn values(&self, name: &str) -> Vec<&str> {
        self.fields.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The problem document of the response. Fails unless the body is one with the status of the response.
    #[track_caller]
    pub fn problem(&self) -> Value {
        assert_eq!(self.field("content-type"), Some("application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], self.status, "{problem}");
        assert!(problem["title"].is_string() && problem["type"].is_string(), "{problem}");
        problem
    }
}
