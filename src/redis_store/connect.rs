//! The way to one server until it answers: name, address, TLS, password, database.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, RedisConnectionInfo, RedisError};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connection::{Connection, Failure};
use super::read_limit::LimitedReader;
use crate::config::redis::{Node, Shared};

/// Until a server that is connected to answers its first question.
const PATIENCE: Duration = Duration::from_millis(1000);
/// Until one address of several is given up.
const ADDRESS_PATIENCE: Duration = Duration::from_millis(400);
/// Bytes of calls that are written at once.
const WRITE_BYTES: usize = 64 * 1024;
/// Calls that may wait for their turn to be written.
const QUEUE: usize = 1024;

/// How all servers are connected to.
pub struct Dial {
    tls: Option<Tls>,
    login: RedisConnectionInfo,
}

struct Tls {
    client: Arc<ClientConfig>,
    /// Who the server must be, where it is not the host.
    server_name: Option<ServerName<'static>>,
}

impl Dial {
    pub fn new(settings: &Shared) -> Dial {
        let mut login = RedisConnectionInfo::default().set_db(settings.database).set_skip_set_lib_name();
        if let Some(username) = &settings.username {
            login = login.set_username(username);
        }
        if let Some(password) = &settings.password {
            login = login.set_password(&password.0);
        }
        let tls =
            settings.tls.as_ref().map(|tls| Tls { client: tls.offering(&[]), server_name: tls.server_name.clone() });
        Dial { tls, login }
    }

    /// A connection to a server that answers there.
    pub async fn open(&self, node: &Node) -> Result<Rc<Connection>, String> {
        self.open_as(node, &self.login).await
    }

    /// The same to a sentinel, which has no databases. One that asks for no password refuses to be told one.
    pub async fn open_sentinel(&self, node: &Node) -> Result<Rc<Connection>, String> {
        let opened = self.open_as(node, &self.login.clone().set_db(0)).await;
        if opened.is_ok() || self.login.password().is_none() {
            return opened;
        }
        let stranger = RedisConnectionInfo::default().set_skip_set_lib_name();
        self.open_as(node, &stranger).await.map_err(|_no_better| opened.err().unwrap_or_default())
    }

    async fn open_as(&self, node: &Node, login: &RedisConnectionInfo) -> Result<Rc<Connection>, String> {
        let line = async {
            let sender = self.connect(node, login).await.map_err(|why| format!("{node}: {why}"))?;
            let line = Connection::new(sender, node.clone());
            match line.ask(redis::cmd("PING")).await {
                Ok(_) => Ok(line),
                // It answers, and says that it may not say so.
                Err(Failure::Said(error)) if error.code() == "NOPERM" => Ok(line),
                Err(failure) => Err(line.blame(&failure)),
            }
        };
        in_time(node, PATIENCE, line).await
    }

    async fn connect(&self, node: &Node, login: &RedisConnectionInfo) -> Result<Sender, String> {
        let told = |error: io::Error| error.to_string();
        match (node, &self.tls) {
            (Node::Unix(path), _) => greeted(UnixStream::connect(path).await.map_err(told)?, login).await,
            (Node::Tcp { host, port }, None) => greeted(tcp(host, *port).await.map_err(told)?, login).await,
            (Node::Tcp { host, port }, Some(tls)) => {
                let name = match &tls.server_name {
                    Some(name) => name.clone(),
                    None => ServerName::try_from(host.clone())
                        .map_err(|_invalid| format!("no certificate can be for `{host}`"))?,
                };
                let stream = tcp(host, *port).await.map_err(told)?;
                let shaken = TlsConnector::from(Arc::clone(&tls.client)).connect(name, stream).await;
                greeted(shaken.map_err(|error| format!("TLS: {error}"))?, login).await
            }
        }
    }
}

/// What comes of asking a server, or that it did not answer by then.
pub async fn in_time<T>(
    node: &Node,
    limit: Duration,
    answer: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    timeout(limit, answer).await.unwrap_or_else(|_elapsed| Err(format!("{node}: no answer within {limit:?}")))
}

/// What calls are given to, and what carries them.
pub struct Sender {
    pub calls: MultiplexedConnection,
    pub driver: tokio::task::JoinHandle<()>,
}

/// Tries the addresses of a host one after the other.
async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut failed = io::Error::other("the name has no address");
    for address in lookup_host((host, port)).await? {
        match timeout(ADDRESS_PATIENCE, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Ok(Err(error)) => failed = error,
            Err(_elapsed) => failed = io::Error::from(io::ErrorKind::TimedOut),
        }
    }
    Err(failed)
}

/// Says who the gateway is, and which database it means.
async fn greeted<S>(stream: S, login: &RedisConnectionInfo) -> Result<Sender, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // How long is waited for is decided by who asks: `Line` sees to it that nobody waits for ever.
    let settings = AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_connection_timeout(None)
        .set_pipeline_buffer_size(QUEUE)
        .set_write_backpressure_boundary(WRITE_BYTES);
    let opened = MultiplexedConnection::new_with_config(login, LimitedReader::new(stream), settings).await;
    let (calls, driver) = opened.map_err(|error| refused(&error))?;
    Ok(Sender { calls, driver: tokio::task::spawn_local(driver) })
}

fn refused(error: &RedisError) -> String {
    match error.kind() {
        ErrorKind::AuthenticationFailed => "it does not accept the user and password".to_owned(),
        _ => error.to_string(),
    }
}
