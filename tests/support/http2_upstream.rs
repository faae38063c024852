//! An HTTP/2 upstream, over cleartext or TLS; the test decides on each request.
//!
//! It uses the h2 library directly, so that it can violate the protocol.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use bytes::Bytes;
use h2::server::{Builder, SendResponse};
use h2::{Reason, RecvStream};
use http::{HeaderMap, Request, Response};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

use super::upstream::bind;

pub struct Http2Upstream {
    pub address: SocketAddr,
    pub state: Arc<State>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
pub struct State {
    pub connections: AtomicUsize,
    /// All requests received, in order.
    pub heads: Mutex<Vec<RequestHead>>,
    /// Connections that have ended.
    pub connections_ended: AtomicUsize,
    /// TLS handshakes that resumed a session.
    pub sessions_resumed: AtomicUsize,
}

#[derive(Clone, Debug)]
pub struct RequestHead {
    pub method: String,
    pub uri: String,
    pub fields: HeaderMap,
    pub connection: usize,
}

/// One request on a stream.
pub struct Exchange {
    pub head: RequestHead,
    /// The position of this request on its connection, from 0.
    pub nth: usize,
    pub body: RecvStream,
    pub respond: SendResponse<Bytes>,
}

/// What happens to the connection after a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AfterRequest {
    Continue,
    /// Send GOAWAY, as a restarting server does.
    GoAway,
}

pub type Script = dyn Fn(Exchange) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync;

pub struct Options {
    pub address: SocketAddr,
    pub tls: Option<Arc<ServerConfig>>,
    pub max_streams: u32,
    /// Chooses by the numbers of the connection and of the request, from 0.
    pub after: fn(usize, usize) -> AfterRequest,
}

impl Default for Options {
    fn default() -> Options {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        Options { address, tls: None, max_streams: 100, after: |_, _| AfterRequest::Continue }
    }
}

impl Http2Upstream {
    pub fn with_script<F>(setup: Options, script: impl Fn(Exchange) -> F + Send + Sync + 'static) -> Http2Upstream
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let state = Arc::new(State::default());
        let (stop, stopped) = oneshot::channel();
        let listener = bind(setup.address);
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let script: Arc<Script> = Arc::new(move |stream| Box::pin(script(stream)));
        let run = {
            let state = Arc::clone(&state);
            async move {
                let listener = TcpListener::from_std(listener).unwrap();
                let setup = Arc::new(setup);
                let accept = async {
                    loop {
                        let (stream, _) = listener.accept().await.unwrap();
                        stream.set_nodelay(true).unwrap();
                        let number = state.connections.fetch_add(1, Ordering::SeqCst);
                        let (state, setup, script) = (Arc::clone(&state), Arc::clone(&setup), Arc::clone(&script));
                        tokio::spawn(async move {
                            match &setup.tls {
                                None => serve(stream, number, &setup, state, script).await,
                                Some(tls) => {
                                    let accepted = TlsAcceptor::from(Arc::clone(tls)).accept(stream).await;
                                    let Ok(stream) = accepted else { return };
                                    let resumed =
                                        stream.get_ref().1.handshake_kind() == Some(rustls::HandshakeKind::Resumed);
                                    state.sessions_resumed.fetch_add(usize::from(resumed), Ordering::SeqCst);
                                    serve(stream, number, &setup, state, script).await;
                                }
                            }
                        });
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
            }
        };
        let thread = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run);
        });
        Http2Upstream { address, state, stop: Some(stop), thread: Some(thread) }
    }

    /// Responds to every request with status 200 and one line.
    pub fn always_ok(setup: Options) -> Http2Upstream {
        Http2Upstream::with_script(setup, |mut stream| async move { stream.reply("fine\n") })
    }

    pub fn request_heads(&self) -> Vec<RequestHead> {
        self.state.heads.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// The upstream's section of a configuration, with prior knowledge.
    pub fn toml(&self, name: &str) -> String {
        format!("[upstreams.{name}]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n", self.address)
    }
}

impl Drop for Http2Upstream {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().unwrap().join();
        assert!(std::thread::panicking() || ended.is_ok(), "an upstream panicked");
    }
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    number: usize,
    setup: &Options,
    state: Arc<State>,
    script: Arc<Script>,
) {
    let Ok(mut connection) =
        Builder::new().max_concurrent_streams(setup.max_streams).handshake::<_, Bytes>(stream).await
    else {
        return;
    };
    let mut nth = 0;
    while let Some(Ok((request, respond))) = connection.accept().await {
        let (parts, body): (http::request::Parts, RecvStream) = Request::into_parts(request);
        let head = RequestHead {
            method: parts.method.to_string(),
            uri: parts.uri.to_string(),
            fields: parts.headers,
            connection: number,
        };
        state.heads.lock().unwrap().push(head.clone());
        if (setup.after)(number, nth) == AfterRequest::GoAway {
            connection.graceful_shutdown();
        }
        tokio::spawn(script(Exchange { head, nth, body, respond }));
        nth += 1;
    }
    state.connections_ended.fetch_add(1, Ordering::SeqCst);
}

impl Exchange {
    pub fn reply(&mut self, text: &str) {
        let mut body = self.send_head(Response::new(()));
        // An error means that the test has ended.
        let _ = body.send_data(Bytes::copy_from_slice(text.as_bytes()), true);
    }

    pub fn send_head(&mut self, response: Response<()>) -> h2::SendStream<Bytes> {
        self.respond.send_response(response, false).unwrap()
    }

    pub fn refuse_stream(&mut self) {
        self.respond.send_reset(Reason::REFUSED_STREAM);
    }

    /// The next data of the request body; `None` at its end.
    pub async fn read_data(&mut self) -> Option<Result<Bytes, h2::Error>> {
        let data = self.body.data().await?;
        if let Ok(data) = &data {
            let _ = self.body.flow_control().release_capacity(data.len());
        }
        Some(data)
    }

    pub async fn read_body(&mut self) -> usize {
        let mut length = 0;
        while let Some(Ok(data)) = self.read_data().await {
            length += data.len();
        }
        length
    }
}
