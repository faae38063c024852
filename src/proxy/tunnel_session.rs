//! A tunnel between a client and an upstream, after both have changed over to another protocol, with the
//! record of the request that asked for it.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};

use super::request_record::Record;
use crate::timer::Timer;
use crate::upstream::tunnel::{ByteCounts, End, Tunnel};

/// A tunnel whose client's end is still to come: the answer that opens it must have left first.
pub struct TunnelSession {
    tunnel: Tunnel,
    record: Record,
    /// How long it may be silent.
    limit: Duration,
}

impl TunnelSession {
    pub fn new(tunnel: Tunnel, record: Record, limit: Duration) -> TunnelSession {
        TunnelSession { tunnel, record, limit }
    }

    /// Passes bytes until the tunnel has ended; `false` if one side broke it off. `early` is what the client sent
    /// before the answer.
    pub async fn open(self, client: impl AsyncRead + AsyncWrite + Unpin, early: Bytes, timer: &Timer) -> bool {
        let TunnelSession { tunnel, mut record, limit } = self;
        record.tunnel_opened();
        // Told when it is dropped, as when the loop ends with tunnels still open.
        let told = TunnelRecord { toll: ByteCounts::default(), record: &mut record };
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

struct TunnelRecord<'r> {
    toll: ByteCounts,
    record: &'r mut Record,
}

impl Drop for TunnelRecord<'_> {
    fn drop(&mut self) {
        self.record.tunneled(self.toll.to_client.get(), self.toll.to_upstream.get());
    }
}
