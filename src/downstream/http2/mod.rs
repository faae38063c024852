//! HTTP/2 connections of clients, served by h2.

pub mod connection;
pub mod flood_guard;
pub mod frame_header;
mod header_scanner;
mod hpack;
mod huffman;
pub mod monitor;
pub mod stream;
mod tunnel;
