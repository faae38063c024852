//! A server that follows a script and records the requests.
//!
//! Every connection gets a thread, and the script a [`Talk`] to read requests from and to send bytes to, valid or not. A
//! script that panics fails the test when the upstream is dropped.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use socket2::{Domain, Socket, Type};

use super::DEADLINE;

pub struct Upstream {
    pub address: SocketAddr,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
    /// Holds a port that has no listener.
    _bound: Option<Socket>,
}

#[derive(Default)]
struct State {
    received: Mutex<Vec<Received>>,
    bytes: AtomicUsize,
    connections: AtomicUsize,
    stop: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A request as the upstream saw it.
#[derive(Clone, Debug, Default)]
pub struct Received {
    pub method: String,
    pub target: String,
    /// Names in lower case, in the order they came.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    /// Which connection it came on, from 0.
    pub connection: usize,
}

impl Received {
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.fields.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect()
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.all(name).first().copied()
    }
}

impl Upstream {
    /// Follows a script on every connection.
    pub fn with(script: impl Fn(&mut Talk) + Send + Sync + 'static) -> Upstream {
        Upstream::at(SocketAddr::from(([127, 0, 0, 1], 0)), script)
    }

    /// Like `with`, at an address of the test's choice.
    pub fn at(address: SocketAddr, script: impl Fn(&mut Talk) + Send + Sync + 'static) -> Upstream {
        let listener = TcpListener::bind(address).unwrap();
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
                    state.open.lock().unwrap().push(stream.try_clone().unwrap());
                    let number = state.connections.fetch_add(1, Ordering::SeqCst);
                    let mut talk = Talk { number, stream, state: Arc::clone(&state), buffer: Vec::new(), place: 0 };
                    let script = Arc::clone(&script);
                    let thread = thread::spawn(move || {
                        script(&mut talk);
                        // The copy in `open` would keep the connection up.
                        let _ = talk.stream.shutdown(Shutdown::Both);
                    });
                    state.threads.lock().unwrap().push(thread);
                }
            }
        });
        Upstream { address, state, acceptor: Some(acceptor), _bound: None }
    }

    /// Answers every request alike, and keeps connections open.
    pub fn replying(status: u16) -> Upstream {
        Upstream::with(move |talk| while talk.request().is_some() && talk.reply(status, &[], b"fine\n") {})
    }

    /// Maps every request to a response.
    pub fn answering(answer: impl Fn(&Received) -> Vec<u8> + Send + Sync + 'static) -> Upstream {
        Upstream::with(move |talk| {
            while let Some(received) = talk.request() {
                if !talk.send(answer(&received)) {
                    return;
                }
            }
        })
    }

    /// An address that refuses connections, and that no other process can listen on meanwhile.
    pub fn refusing() -> Upstream {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        Upstream { address, state: Arc::default(), acceptor: None, _bound: Some(socket) }
    }

    /// Its section of a configuration.
    pub fn toml(&self, name: &str) -> String {
        format!("[upstreams.{name}]\nservers = [\"http://{}\"]\n", self.address)
    }

    /// The requests so far, in the order in which their heads were read.
    pub fn received(&self) -> Vec<Received> {
        self.state.received.lock().unwrap().clone()
    }

    /// The only request so far.
    pub fn only(&self) -> Received {
        let received = self.received();
        assert_eq!(received.len(), 1, "{received:?}");
        received.into_iter().next().unwrap()
    }

    pub fn bytes(&self) -> usize {
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

/// One connection, as a script sees it.
pub struct Talk {
    /// Which connection this is, from 0.
    pub number: usize,
    stream: TcpStream,
    state: Arc<State>,
    buffer: Vec<u8>,
    /// The position of the last request among all requests.
    place: usize,
}

impl Talk {
    /// Reads a request with its body; `None` when the connection has ended.
    pub fn request(&mut self) -> Option<Received> {
        let mut received = self.head()?;
        self.body_of(&mut received)?;
        // Another connection may have put down a request since.
        self.state.received.lock().unwrap()[self.place] = received.clone();
        Some(received)
    }

    /// Reads a request's head only.
    pub fn head(&mut self) -> Option<Received> {
        let first = self.line()?;
        let words: Vec<&str> = first.split(' ').collect();
        assert!(words.len() == 3 && words[2] == "HTTP/1.1", "{first:?}");
        let mut received = Received {
            method: words[0].to_owned(),
            target: words[1].to_owned(),
            connection: self.number,
            ..Received::default()
        };
        received.fields = self.fields()?;
        let mut all = self.state.received.lock().unwrap();
        self.place = all.len();
        all.push(received.clone());
        Some(received)
    }

    /// The body that belongs to a head.
    pub fn body(&mut self, head: &Received) -> Option<Vec<u8>> {
        let mut received = head.clone();
        self.body_of(&mut received)?;
        Some(received.body)
    }

    pub fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    fn body_of(&mut self, received: &mut Received) -> Option<()> {
        if received.field("transfer-encoding").is_some() {
            assert_eq!(received.all("transfer-encoding"), ["chunked"]);
            assert!(received.all("content-length").is_empty());
            loop {
                let size = usize::from_str_radix(&self.line()?, 16).unwrap();
                if size == 0 {
                    break;
                }
                received.body.extend(self.exactly(size)?);
                assert_eq!(self.line()?, "");
            }
            received.trailers = self.fields()?;
        } else if let Some(length) = received.field("content-length") {
            assert_eq!(received.all("content-length").len(), 1);
            received.body = self.exactly(length.parse().unwrap())?;
        }
        Some(())
    }

    fn fields(&mut self) -> Option<Vec<(String, String)>> {
        let mut fields = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Some(fields);
            }
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no field: {line:?}"));
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..end + 2).take(end).collect();
                return Some(line.into_iter().map(char::from).collect());
            }
            self.fill()?;
        }
    }

    pub fn exactly(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            self.fill()?;
        }
        Some(self.buffer.drain(..length).collect())
    }

    fn fill(&mut self) -> Option<()> {
        let mut piece = [0; 16 * 1024];
        let n = self.stream.read(&mut piece).ok().filter(|n| *n > 0)?;
        self.state.bytes.fetch_add(n, Ordering::SeqCst);
        self.buffer.extend_from_slice(&piece[..n]);
        Some(())
    }

    /// Sends bytes as they are; `false` if the other side is gone.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    pub fn reply(&mut self, status: u16, fields: &[(&str, &str)], body: &[u8]) -> bool {
        self.send(reply(status, fields, body))
    }

    /// Closes the connection, before the script is over.
    pub fn hang_up(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Waits until the other side has closed the connection; `false` if it sent something instead.
    pub fn closed(&mut self) -> bool {
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
