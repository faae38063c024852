//! The sockets that the gateway listens on: for every address, one for each event loop. They are opened before
//! the loops stand, so that an address which is taken is a refusal to start. This file accepts nothing.

use std::io;
use std::net::{SocketAddr, TcpListener};

use super::listener::{self, InheritedSockets};
use crate::config::listen::Listen;

/// All listeners.
pub struct Listeners {
    /// Addresses, with the ports that were chosen.
    pub http: Vec<SocketAddr>,
    pub https: Vec<SocketAddr>,
    pub by_worker: Vec<Vec<WorkerListener>>,
    /// Every queue once, with its address as configured, to be handed to a successor.
    pub sockets: Vec<(SocketAddr, TcpListener)>,
}

/// A socket on which one loop accepts.
pub struct WorkerListener {
    pub socket: TcpListener,
    /// As configured.
    pub address: SocketAddr,
    /// Position in `listen.https`.
    pub https: Option<usize>,
}

impl Listeners {
    /// Opens them for so many loops, but for those that were `inherited`. An error tells the address.
    pub fn open(
        listen: &Listen,
        workers: usize,
        inherited: &mut InheritedSockets,
    ) -> Result<Listeners, (SocketAddr, io::Error)> {
        let by_loop = (0..workers).map(|_| Vec::new()).collect();
        let mut doors = Listeners { http: Vec::new(), https: Vec::new(), by_worker: by_loop, sockets: Vec::new() };
        for address in &listen.http {
            let chosen = doors.add(*address, None, inherited).map_err(|source| (*address, source))?;
            doors.http.push(chosen);
        }
        for (position, https) in listen.https.iter().enumerate() {
            for address in &https.addresses {
                let chosen = doors.add(*address, Some(position), inherited).map_err(|source| (*address, source))?;
                doors.https.push(chosen);
            }
        }
        Ok(doors)
    }

    fn add(
        &mut self,
        address: SocketAddr,
        https: Option<usize>,
        inherited: &mut InheritedSockets,
    ) -> io::Result<SocketAddr> {
        let workers = self.by_worker.len();
        let opened = listener::open_address(address, workers, inherited)?;
        for socket in &opened.listeners[..opened.queues] {
            self.sockets.push((address, socket.try_clone()?));
        }
        // A loop may get several: there may have been more loops when they were opened.
        for (position, socket) in opened.listeners.into_iter().enumerate() {
            self.by_worker[position % workers].push(WorkerListener { socket, address, https });
        }
        Ok(opened.address)
    }
}
