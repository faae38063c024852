//! What happens to a connection before its first request: who opened it, and what is spoken on it.

use std::net::IpAddr;
use std::rc::Rc;

use tokio::net::TcpStream;

use super::drain::Guest;
use super::preface::{Spoken, listen_for};
use super::{http2, serve};
use crate::gateway::hall::{Hall, Origin};
use crate::wire::Wire;

/// Takes in a connection, and serves it until it ends.
pub async fn arrive(stream: TcpStream, address: IpAddr, hall: Rc<Hall>, guest: Guest) {
    hall.meter.connected();
    let origin = Rc::new(Origin::new(address, false));
    let wire = Wire::tcp(stream);
    let found = if hall.view().snapshot.config.http2.h2c {
        listen_for(wire, &hall, &guest).await
    } else {
        Some((wire, Spoken::Http1))
    };
    match found {
        Some((wire, Spoken::Http1)) => serve::serve(wire, origin, Rc::clone(&hall), guest).await,
        // Apart, so that the others take no memory for it.
        Some((wire, Spoken::Http2)) => Box::pin(http2::serve(wire, origin, Rc::clone(&hall), guest)).await,
        None => {}
    }
    hall.meter.disconnected();
}
