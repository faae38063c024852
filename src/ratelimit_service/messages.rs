//! The messages of `proto/`, compiled by `build.rs`.

#![allow(clippy::all, clippy::pedantic, clippy::too_many_lines, reason = "generated")]

include!(concat!(env!("OUT_DIR"), "/messages.rs"));
