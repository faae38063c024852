//! The messages of `proto/`. `make docs` generates the files; a test compares them.

#![allow(clippy::all, clippy::pedantic, clippy::too_many_lines, reason = "generated")]

include!("../../proto/generated/mod.rs");
