//! HTTP/1.1 connections of clients, served by hyper.

pub mod chunked;
pub mod connection;
pub mod connection_state;
pub mod head_tracker;
pub mod io;
