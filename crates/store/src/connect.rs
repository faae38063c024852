//! Opens connections to servers: name lookup, TCP or Unix socket, TLS, login, database. Also limits how much a server
//! may send.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, RedisConnectionInfo, RedisError};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connection::{CallError, Connection, Transport};
use transom_config::redis::{Node, StoreConfig};
use transom_config::values::Secret;

/// Limit for opening a connection, up to the reply to PING.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1000);
/// Limit for each address of a name, and for the TLS handshake with it.
const ADDRESS_TIMEOUT: Duration = Duration::from_millis(400);
/// Bytes of calls written at once.
const WRITE_BYTES: usize = 64 * 1024;
/// Calls that may wait to be written.
const QUEUED_CALLS_MAX: usize = 1024;
/// Longest reply that is read, bytes. The slot map of a cluster with thousands of nodes fits.
const REPLY_MAX_BYTES: usize = 4 << 20;
/// Bytes that may arrive for each byte sent, for counters: their replies are shorter than their requests.
const REPLY_BYTES_PER_BYTE_SENT: usize = 8;

/// How to connect to the configured servers.
pub struct Connector {
    tls: Option<Tls>,
    login: RedisConnectionInfo,
    /// The login of sentinels, if it is another.
    sentinel_login: Option<RedisConnectionInfo>,
    /// Bytes that may arrive for each byte sent.
    reply_bytes_per_byte_sent: usize,
}

struct Tls {
    client: Arc<ClientConfig>,
    /// The name that the server's certificate must be for, if it is not the host.
    server_name: Option<ServerName<'static>>,
}

impl Connector {
    pub fn new(settings: &StoreConfig) -> Connector {
        let login = login(settings.username.as_deref(), settings.password.as_ref()).set_db(settings.database);
        let sentinel_login =
            settings.sentinel_login.as_ref().map(|own| self::login(own.username.as_deref(), Some(&own.password)));
        let tls =
            settings.tls.as_ref().map(|tls| Tls { client: tls.with_alpn(&[]), server_name: tls.server_name.clone() });
        Connector { tls, login, sentinel_login, reply_bytes_per_byte_sent: REPLY_BYTES_PER_BYTE_SENT }
    }

    /// As [`Connector::new`], for calls whose replies may be as long as is read at all.
    pub fn for_maps(settings: &StoreConfig) -> Connector {
        Connector { reply_bytes_per_byte_sent: REPLY_MAX_BYTES, ..Connector::new(settings) }
    }

    /// Opens a connection and waits until the server replies to PING.
    pub async fn open(&self, node: &Node) -> Result<Rc<Connection>, String> {
        self.open_as(node, &self.login).await
    }

    /// As [`Connector::open`], to a sentinel: without a database, and with the login of sentinels. Without such a login, that of the
    /// servers is used; a sentinel without a password rejects it, so it is retried without a login.
    pub async fn open_sentinel(&self, node: &Node) -> Result<Rc<Connection>, String> {
        if let Some(login) = &self.sentinel_login {
            return self.open_as(node, login).await;
        }
        let opened = self.open_as(node, &self.login.clone().set_db(0)).await;
        if opened.is_ok() || self.login.password().is_none() {
            return opened;
        }
        self.open_as(node, &login(None, None)).await.map_err(|_rejected| opened.err().unwrap_or_default())
    }

    async fn open_as(&self, node: &Node, login: &RedisConnectionInfo) -> Result<Rc<Connection>, String> {
        let connection = async {
            let sender = self.connect(node, login).await.map_err(|why| format!("{node}: {why}"))?;
            let connection = Connection::new(sender, node.clone());
            match connection.call(redis::cmd("PING")).await {
                Ok(_) => Ok(connection),
                // The server replies, and does not permit PING.
                Err(CallError::Rejected(error)) if error.code() == "NOPERM" => Ok(connection),
                Err(failure) => Err(connection.describe(&failure)),
            }
        };
        with_timeout(node, CONNECT_TIMEOUT, connection).await
    }

    async fn connect(&self, node: &Node, login: &RedisConnectionInfo) -> Result<Transport, String> {
        let result = |error: io::Error| error.to_string();
        #[cfg(test)]
        if let Some(opened) = super::simulated_store::network::Network::connect(node) {
            return self.log_in(opened.map_err(result)?, login).await;
        }
        match (node, &self.tls) {
            (Node::Unix(path), _) => self.log_in(UnixStream::connect(path).await.map_err(result)?, login).await,
            (Node::Tcp { host, port }, None) => {
                let stream = connect_tcp(host, *port, async |stream| Ok(stream)).await.map_err(result)?;
                self.log_in(stream, login).await
            }
            (Node::Tcp { host, port }, Some(tls)) => {
                let name = match &tls.server_name {
                    Some(name) => name.clone(),
                    None => ServerName::try_from(host.clone())
                        .map_err(|_invalid| format!("`{host}` is not a valid server name for TLS"))?,
                };
                let handshake = async |stream| {
                    let connected = TlsConnector::from(Arc::clone(&tls.client)).connect(name.clone(), stream).await;
                    connected.map_err(|error| io::Error::other(format!("TLS: {error}")))
                };
                let stream = connect_tcp(host, *port, handshake).await.map_err(result)?;
                self.log_in(stream, login).await
            }
        }
    }

    /// Logs in and selects the database.
    async fn log_in<S>(&self, stream: S, login: &RedisConnectionInfo) -> Result<Transport, String>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Callers set their own time limits, and `Connection` detects a silent server.
        let settings = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(None)
            .set_pipeline_buffer_size(QUEUED_CALLS_MAX)
            .set_write_backpressure_boundary(WRITE_BYTES);
        let opened = MultiplexedConnection::new_with_config(
            login,
            LimitedReader::new(stream, self.reply_bytes_per_byte_sent),
            settings,
        )
        .await;
        let (calls, driver) = opened.map_err(|error| login_error(&error))?;
        Ok(Transport { calls, driver: tokio::task::spawn_local(driver) })
    }
}

fn login(username: Option<&str>, password: Option<&Secret<String>>) -> RedisConnectionInfo {
    let mut login = RedisConnectionInfo::default().set_skip_set_lib_name();
    if let Some(username) = username {
        login = login.set_username(username);
    }
    if let Some(password) = password {
        login = login.set_password(&password.0);
    }
    login
}

/// Awaits a reply for at most `limit`.
pub async fn with_timeout<T>(
    node: &Node,
    limit: Duration,
    future: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    timeout(limit, future).await.unwrap_or_else(|_elapsed| Err(format!("{node}: no reply within {limit:?}")))
}

/// Tries the addresses of a host in turn, until `handshake` succeeds on a connection.
async fn connect_tcp<S>(host: &str, port: u16, handshake: impl AsyncFn(TcpStream) -> io::Result<S>) -> io::Result<S> {
    let mut failed = io::Error::other("the name has no address");
    let mut addresses = lookup_host((host, port)).await?.peekable();
    while let Some(address) = addresses.next() {
        let connected = async {
            let stream = timeout(ADDRESS_TIMEOUT, TcpStream::connect(address)).await??;
            stream.set_nodelay(true)?;
            match addresses.peek() {
                Some(_) => timeout(ADDRESS_TIMEOUT, handshake(stream)).await?,
                // As long as the caller waits.
                None => handshake(stream).await,
            }
        };
        match connected.await {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

fn login_error(error: &RedisError) -> String {
    match error.kind() {
        ErrorKind::AuthenticationFailed => "the server does not accept the user and password".to_owned(),
        _ => error.to_string(),
    }
}

/// Limits the bytes read from a server. A reply is kept in memory until it is complete, and a broken server, or one
/// that is not Redis, might never complete it.
pub struct LimitedReader<S> {
    stream: S,
    bytes_left: usize,
    bytes_per_byte_sent: usize,
}

impl<S> LimitedReader<S> {
    pub fn new(stream: S, bytes_per_byte_sent: usize) -> LimitedReader<S> {
        LimitedReader { stream, bytes_left: REPLY_MAX_BYTES, bytes_per_byte_sent }
    }

    fn allow_for(&mut self, bytes: usize) {
        self.bytes_left =
            self.bytes_left.saturating_add(bytes.saturating_mul(self.bytes_per_byte_sent)).min(REPLY_MAX_BYTES);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedReader<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, into))?;
        let more = into.filled().len().saturating_sub(before);
        Poll::Ready(match self.bytes_left.checked_sub(more) {
            Some(left) => {
                self.bytes_left = left;
                Ok(())
            }
            None => Err(io::Error::other("the server sent far more than was requested")),
        })
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedReader<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.allow_for(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bytes))?;
        self.allow_for(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
