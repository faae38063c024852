//! HTTP/1.1 connections of clients.

pub mod client_stream;
pub mod connection;
pub mod response_sender;
