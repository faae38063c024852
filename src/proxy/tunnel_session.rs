//! A tunnel between a client and an upstream, after both have changed over to another protocol, with the
//! record of the request that asked for it.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};

use super::request_record::RequestRecord;
use crate::timer::Timer;
use crate::upstream::tunnel::{ByteCounts, End, Tunnel};

/// A tunnel whose client's end is still to come: the answer that opens it must have left first.
pub struct TunnelSession {
    tunnel: Tunnel,
    record: RequestRecord,
    /// How long it may be silent.
    idle_timeout: Duration,
}

impl TunnelSession {
    pub fn new(tunnel: Tunnel, record: RequestRecord, limit: Duration) -> TunnelSession {
        TunnelSession { tunnel, record, idle_timeout: limit }
    }

    /// Passes bytes until the tunnel has ended; `false` if one side broke it off. `early` is what the client sent
    /// before the answer.
    pub async fn run(self, client: impl AsyncRead + AsyncWrite + Unpin, early: Bytes, timer: &Timer) -> bool {
        let TunnelSession { tunnel, mut record, idle_timeout: limit } = self;
        record.tunnel_opened();
        // Told when it is dropped, as when the loop ends with tunnels still open.
        let told = TunnelRecord { byte_counts: ByteCounts::default(), record: &mut record };
        match tunnel.run(client, early, limit, timer, &told.byte_counts).await {
            End::Finished => return true,
            End::Silent => {
                told.record.record_tunnel_error("the tunnel was silent for too long");
                return true;
            }
            End::BrokenByClient => {}
            End::BrokenByUpstream => told.record.record_tunnel_error("the upstream server broke off the tunnel"),
        }
        false
    }
}

struct TunnelRecord<'r> {
    byte_counts: ByteCounts,
    record: &'r mut RequestRecord,
}

impl Drop for TunnelRecord<'_> {
    fn drop(&mut self) {
        self.record.record_tunnel_end(self.byte_counts.to_client.get(), self.byte_counts.to_upstream.get());
    }
}
