//! HTTP/2 connections of clients.

mod body_sender;
pub mod connection;
pub mod flood_guard;
pub mod frame_header;
mod header_scanner;
mod hpack;
mod huffman;
mod keepalive;
pub mod monitor;
pub mod stream;
mod tunnel;
