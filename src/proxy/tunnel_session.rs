//! A tunnel between a client and an upstream, after both have changed over to another protocol, with the
//! record of the request that asked for it.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};

use super::request_record::Record;
use crate::timer::Timer;
use crate::upstream::tunnel::{End, Toll, Tunnel};

/// A tunnel whose client's end is still to come: the answer that opens it must have left first.
pub struct Passage {
    tunnel: Tunnel,
    record: Record,
    /// How long it may be silent.
    limit: Duration,
}

impl Passage {
    pub fn new(tunnel: Tunnel, record: Record, limit: Duration) -> Passage {
        Passage { tunnel, record, limit }
    }

    /// Passes bytes until the tunnel has ended; `false` if one side broke it off. `early` is what the client sent
    /// before the answer.
    pub async fn open(self, client: impl AsyncRead + AsyncWrite + Unpin, early: Bytes, timer: &Timer) -> bool {
        let Passage { tunnel, mut record, limit } = self;
        record.tunnel_opened();
        // Told when it is dropped, as when the loop ends with tunnels still open.
        let told = Told { toll: Toll::default(), record: &mut record };
        match tunnel.run(client, early, limit, timer, &told.toll).await {
            End::Finished => return true,
            End::Silent => {
                told.record.tunnel_broke("the tunnel was silent for too long");
                return true;
            }
            End::BrokenByClient => {}
            End::BrokenByUpstream => told.record.tunnel_broke("the upstream server broke off the tunnel"),
        }
        false
    }
}

struct Told<'r> {
    toll: Toll,
    record: &'r mut Record,
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.record.tunneled(self.toll.to_client.get(), self.toll.to_upstream.get());
    }
}
