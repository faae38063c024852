//! What happens to a connection before its first request: who opened it, and what is spoken on it.

use std::net::IpAddr;
use std::rc::Rc;

use tokio::net::TcpStream;

use super::drain::Guest;
use super::serve::serve;
use crate::gateway::hall::{Hall, Origin};
use crate::wire::Wire;

/// Takes in a connection, and serves it until it ends.
pub async fn arrive(stream: TcpStream, address: IpAddr, hall: Rc<Hall>, guest: Guest) {
    hall.meter.connected();
    let origin = Rc::new(Origin::new(address, false));
    serve(Wire::tcp(stream), origin, Rc::clone(&hall), guest).await;
    hall.meter.disconnected();
}
