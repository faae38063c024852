//! The upstream's end of a tunnel: a connection of its own that has changed over, or a stream of a shared one.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::http2::Http2Stream;
use super::server_pool::ConnectionPermit;
use crate::io_stream::IoStream;

pub enum FarEnd {
    /// With its room among the connections to its server, where these are limited.
    Connection(IoStream, Option<ConnectionPermit>),
    /// With its place on the connection.
    Stream(TokioIo<Upgraded>, Http2Stream),
}

impl AsyncRead for FarEnd {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            FarEnd::Connection(wire, _) => Pin::new(wire).poll_read(cx, buffer),
            FarEnd::Stream(stream, _) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for FarEnd {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            FarEnd::Connection(wire, _) => Pin::new(wire).poll_write(cx, bytes),
            FarEnd::Stream(stream, _) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            FarEnd::Connection(wire, _) => Pin::new(wire).poll_flush(cx),
            FarEnd::Stream(stream, _) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            FarEnd::Connection(wire, _) => Pin::new(wire).poll_shutdown(cx),
            FarEnd::Stream(stream, _) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
