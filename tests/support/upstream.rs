//! A server that follows a script and records the requests.
//!
//! Every connection gets a thread. The script reads requests from a [`Connection`] and sends bytes, valid or not. A script
//! that panics fails the test when the upstream is dropped.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use socket2::{Domain, Socket, Type};

use super::{DEADLINE, eventually};

pub struct Upstream {
    pub address: SocketAddr,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
    /// Holds a port that has no listener.
    bound: Option<Socket>,
}

#[derive(Default)]
struct State {
    received: Mutex<Vec<ReceivedRequest>>,
    bytes: AtomicUsize,
    connections: AtomicUsize,
    stop: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl State {
    /// Releases the descriptors and threads of connections that both sides have closed.
    fn forget_closed_connections(&self) {
        // These have no peer.
        self.open.lock().unwrap().retain(|stream| stream.peer_addr().is_ok());
        let ended: Vec<_> = self.threads.lock().unwrap().extract_if(.., |thread| thread.is_finished()).collect();
        ended.into_iter().for_each(|thread| thread.join().expect("an upstream's script panicked"));
    }
}

/// A request as received by the upstream.
#[derive(Clone, Debug, Default)]
pub struct ReceivedRequest {
    pub method: String,
    pub target: String,
    /// Names in lower case, in the order received.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    /// The number of its connection, from 0.
    pub connection: usize,
}

impl ReceivedRequest {
    pub fn values(&self, name: &str) -> Vec<&str> {
        self.fields.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect()
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.values(name).first().copied()
    }
}

/// Listens at an address, once it is free: a process that another test is starting has a copy of a listener that was closed, until
/// it runs its program.
pub fn bind(address: SocketAddr) -> TcpListener {
    let mut listener = None;
    eventually("the address is free", || {
        listener = match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => return false,
            bound => Some(bound.unwrap()),
        };
        true
    });
    listener.unwrap()
}

impl Upstream {
    /// Follows a script on every connection.
    pub fn with_script(script: impl Fn(&mut Connection) + Send + Sync + 'static) -> Upstream {
        Upstream::at_address(SocketAddr::from(([127, 0, 0, 1], 0)), script)
    }

    /// As [`Upstream::with_script`], at an address chosen by the test.
    pub fn at_address(address: SocketAddr, script: impl Fn(&mut Connection) + Send + Sync + 'static) -> Upstream {
        Upstream::on_listener(bind(address), script)
    }

    /// Follows a script from now on, at an address that has refused connections until now.
    pub fn listen(mut self, script: impl Fn(&mut Connection) + Send + Sync + 'static) -> Upstream {
        let socket = self.bound.take().expect("the upstream refuses connections");
        socket.listen(128).unwrap();
        Upstream::on_listener(socket.into(), script)
    }

    fn on_listener(listener: TcpListener, script: impl Fn(&mut Connection) + Send + Sync + 'static) -> Upstream {
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let acceptor = thread::spawn({
            let (state, script) = (Arc::clone(&state), Arc::new(script));
            move || {
                for stream in listener.incoming() {
                    if state.stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let stream = stream.unwrap();
                    stream.set_nodelay(true).unwrap();
                    stream.set_read_timeout(Some(DEADLINE)).unwrap();
                    state.forget_closed_connections();
                    state.open.lock().unwrap().push(stream.try_clone().unwrap());
                    let number = state.connections.fetch_add(1, Ordering::SeqCst);
                    let mut connection =
                        Connection { number, stream, state: Arc::clone(&state), buffer: Vec::new(), index: 0 };
                    let script = Arc::clone(&script);
                    let thread = thread::spawn(move || {
                        script(&mut connection);
                        // Dropping the stream does not close the connection, because `open` has a copy.
                        let _ = connection.stream.shutdown(Shutdown::Both);
                    });
                    state.threads.lock().unwrap().push(thread);
                }
            }
        });
        Upstream { address, state, acceptor: Some(acceptor), bound: None }
    }

    /// Responds to every request with this status, and keeps connections open.
    pub fn always(status: u16) -> Upstream {
        Upstream::with_script(
            move |connection| while connection.read_request().is_some() && connection.reply(status, &[], b"fine\n") {},
        )
    }

    /// Responds to every request with the bytes that a function returns.
    pub fn responding(response: impl Fn(&ReceivedRequest) -> Vec<u8> + Send + Sync + 'static) -> Upstream {
        Upstream::with_script(move |connection| {
            while let Some(received) = connection.read_request() {
                if !connection.send(response(&received)) {
                    return;
                }
            }
        })
    }

    /// An address that refuses connections, and on which no other process can listen.
    pub fn refusing_connections() -> Upstream {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        Upstream { address, state: Arc::default(), acceptor: None, bound: Some(socket) }
    }

    /// The upstream's section of a configuration.
    pub fn toml(&self, name: &str) -> String {
        format!("[upstreams.{name}]\nservers = [\"http://{}\"]\n", self.address)
    }

    /// The requests so far, in the order in which their heads were read.
    pub fn received(&self) -> Vec<ReceivedRequest> {
        self.state.received.lock().unwrap().clone()
    }

    /// The only request so far.
    pub fn only_request(&self) -> ReceivedRequest {
        let received = self.received();
        assert_eq!(received.len(), 1, "{received:?}");
        received.into_iter().next().unwrap()
    }

    pub fn bytes_received(&self) -> usize {
        self.state.bytes.load(Ordering::SeqCst)
    }

    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.state.stop.store(true, Ordering::SeqCst);
        // Wakes the acceptor.
        let _ = TcpStream::connect(self.address);
        let mut ended = vec![acceptor.join()];
        for stream in self.state.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let threads: Vec<_> = self.state.threads.lock().unwrap().drain(..).collect();
        ended.extend(threads.into_iter().map(JoinHandle::join));
        assert!(thread::panicking() || ended.iter().all(Result::is_ok), "an upstream's script panicked");
    }
}

/// One accepted connection, handled by a script.
pub struct Connection {
    /// The number of this connection, from 0.
    pub number: usize,
    stream: TcpStream,
    state: Arc<State>,
    buffer: Vec<u8>,
    /// The position of the last request among all received requests.
    index: usize,
}

impl Connection {
    /// Reads a request with its body; `None` when the connection has ended.
    pub fn read_request(&mut self) -> Option<ReceivedRequest> {
        let mut received = self.read_head()?;
        self.read_body_into(&mut received)?;
        // By position, because another connection may have added a request since.
        self.state.received.lock().unwrap()[self.index] = received.clone();
        Some(received)
    }

    /// Reads a request's head only.
    pub fn read_head(&mut self) -> Option<ReceivedRequest> {
        let first = self.read_line()?;
        let words: Vec<&str> = first.split(' ').collect();
        assert!(words.len() == 3 && words[2] == "HTTP/1.1", "{first:?}");
        let mut received = ReceivedRequest {
            method: words[0].to_owned(),
            target: words[1].to_owned(),
            connection: self.number,
            ..ReceivedRequest::default()
        };
        received.fields = self.read_fields()?;
        let mut all = self.state.received.lock().unwrap();
        self.index = all.len();
        all.push(received.clone());
        Some(received)
    }

    /// The body that belongs to a head.
    pub fn read_body(&mut self, head: &ReceivedRequest) -> Option<Vec<u8>> {
        let mut received = head.clone();
        self.read_body_into(&mut received)?;
        Some(received.body)
    }

    pub fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    fn read_body_into(&mut self, received: &mut ReceivedRequest) -> Option<()> {
        if received.field("transfer-encoding").is_some() {
            assert_eq!(received.values("transfer-encoding"), ["chunked"]);
            assert!(received.values("content-length").is_empty());
            loop {
                let size = usize::from_str_radix(&self.read_line()?, 16).unwrap();
                if size == 0 {
                    break;
                }
                received.body.extend(self.read_exactly(size)?);
                assert_eq!(self.read_line()?, "");
            }
            received.trailers = self.read_fields()?;
        } else if let Some(length) = received.field("content-length") {
            assert_eq!(received.values("content-length").len(), 1);
            received.body = self.read_exactly(length.parse().unwrap())?;
        }
        Some(())
    }

    fn read_fields(&mut self) -> Option<Vec<(String, String)>> {
        let mut fields = Vec::new();
        loop {
            let line = self.read_line()?;
            if line.is_empty() {
                return Some(fields);
            }
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("the line has no colon: {line:?}"));
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    fn read_line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..end + 2).take(end).collect();
                return Some(line.into_iter().map(char::from).collect());
            }
            self.fill()?;
        }
    }

    pub fn read_exactly(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            self.fill()?;
        }
        Some(self.buffer.drain(..length).collect())
    }

    fn fill(&mut self) -> Option<()> {
        let mut buffer = [0; 16 * 1024];
        let n = self.stream.read(&mut buffer).ok().filter(|n| *n > 0)?;
        self.state.bytes.fetch_add(n, Ordering::SeqCst);
        self.buffer.extend_from_slice(&buffer[..n]);
        Some(())
    }

    /// Sends bytes unchanged; `false` if the connection is closed.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    pub fn reply(&mut self, status: u16, fields: &[(&str, &str)], body: &[u8]) -> bool {
        self.send(reply(status, fields, body))
    }

    /// Closes the connection before the script ends.
    pub fn close(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Waits until the gateway has closed the connection; `false` if the gateway sent bytes instead.
    pub fn wait_for_close(&mut self) -> bool {
        self.fill().is_none()
    }
}

/// A response as bytes, with a Content-Length.
pub fn reply(status: u16, fields: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status} Scripted\r\n").into_bytes();
    for (name, value) in fields {
        bytes.extend(format!("{name}: {value}\r\n").bytes());
    }
    bytes.extend(format!("Content-Length: {}\r\n\r\n", body.len()).bytes());
    bytes.extend_from_slice(body);
    bytes
}
