//! Verification of JSON Web Tokens (RFC 7519) that identify clients.
//!
//! `token` parses and verifies a token, `verification_key` holds a key and its algorithm, `jwks` reads key sets, `cache`
//! remembers verified tokens. Nothing here opens files, reads a clock, or knows where in a request a token was found.

pub mod cache;
pub mod jwks;
pub mod token;
pub mod verification_key;
