//! HTTP/1.1 connections of clients.

pub mod chunked;
pub mod connection;
pub mod connection_state;
pub mod head_tracker;
pub mod io;
