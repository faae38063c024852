//! The sockets that the gateway listens on: for every address, one for each event loop. They are opened before
//! the loops stand, so that an address which is taken is a refusal to start. This file accepts nothing.

use std::io;
use std::net::{SocketAddr, TcpListener};

use super::socket::{self, Inherited};
use crate::config::listen::Listen;

/// All listeners.
pub struct Doors {
    /// Addresses, with the ports that were chosen.
    pub http: Vec<SocketAddr>,
    pub https: Vec<SocketAddr>,
    pub by_loop: Vec<Vec<Door>>,
}

/// A socket on which one loop accepts.
pub struct Door {
    pub socket: TcpListener,
    /// As configured.
    pub address: SocketAddr,
    /// Position in `listen.https`.
    pub https: Option<usize>,
}

impl Doors {
    /// Opens them for so many loops, but for those that were `inherited`. An error tells the address.
    pub fn open(listen: &Listen, workers: usize, inherited: &mut Inherited) -> Result<Doors, (SocketAddr, io::Error)> {
        let by_loop = (0..workers).map(|_| Vec::new()).collect();
        let mut doors = Doors { http: Vec::new(), https: Vec::new(), by_loop };
        for address in &listen.http {
            let chosen = doors.add(*address, None, inherited)?;
            doors.http.push(chosen);
        }
        for (position, https) in listen.https.iter().enumerate() {
            for address in &https.addresses {
                let chosen = doors.add(*address, Some(position), inherited)?;
                doors.https.push(chosen);
            }
        }
        Ok(doors)
    }

    fn add(
        &mut self,
        address: SocketAddr,
        https: Option<usize>,
        inherited: &mut Inherited,
    ) -> Result<SocketAddr, (SocketAddr, io::Error)> {
        let opened = socket::open(address, self.by_loop.len(), inherited);
        let (chosen, sockets) = opened.map_err(|source| (address, source))?;
        for (doors, socket) in self.by_loop.iter_mut().zip(sockets) {
            doors.push(Door { socket, address, https });
        }
        Ok(chosen)
    }
}
