//! The idle connections to one server, of one event loop.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connection::Connection;
use crate::clock::Clock;
use crate::config::Server;
use crate::http::fault::Fault;
use crate::wire::Wire;

/// Idle connections that a loop keeps to one server.
const IDLE_MAX: usize = 256;

pub struct Pool {
    server: Server,
    /// The last one used is on top: it is the likeliest to be alive, and the rest can age.
    #[allow(clippy::vec_box, reason = "a connection is moved often, and large")]
    idle: RefCell<Vec<Box<Connection>>>,
    clock: Clock,
}

impl Pool {
    pub fn new(server: Server, clock: Clock) -> Rc<Pool> {
        Rc::new(Pool { server, idle: RefCell::default(), clock })
    }

    /// An idle connection. Whether it is still alive is found out when it is used.
    pub fn take(&self) -> Option<Box<Connection>> {
        self.idle.borrow_mut().pop()
    }

    /// Keeps a connection whose last answer has ended. Whether it takes another request is found out
    /// when there is one; but one that still sends a body is not kept.
    pub fn put(&self, mut connection: Box<Connection>) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < IDLE_MAX && connection.is_done() {
            connection.idle_since.get_or_insert_with(|| self.clock.instant());
            idle.push(connection);
        }
    }

    /// Closes what has been idle for longer than `limit`, or was closed by the server.
    pub fn sweep(&self, limit: Duration) {
        let now = self.clock.instant();
        self.idle.borrow_mut().retain_mut(|idle| {
            let lasted = idle.idle_since.map_or(Duration::ZERO, |since| now.duration_since(since));
            lasted < limit && idle.is_ready()
        });
    }

    pub async fn connect(&self, within: Duration) -> Result<Box<Connection>, Fault> {
        let connect = async {
            let stream = TcpStream::connect((self.server.host.as_str(), self.server.port)).await?;
            stream.set_nodelay(true)?;
            Connection::new(Wire::tcp(stream)).await.map_err(io::Error::other)
        };
        match timeout(within, connect).await {
            Ok(Ok(connection)) => Ok(Box::new(connection)),
            Ok(Err(error)) => Err(Fault::Connect(format!("{}: {error}", self.server.url))),
            Err(_elapsed) => Err(Fault::ConnectTimeout),
        }
    }
}
