//! Verification of JSON Web Tokens (RFC 7519) that identify clients.
//!
//! `token` parses and verifies a token, `verification_key` holds a key and its algorithm, `jwks` reads key sets,
//! `published_keys` holds a fetched one, `cache` remembers verified tokens. Nothing here opens files or connections, reads a
//! clock, or knows where in a request a token was found.

pub mod cache;
pub mod jwks;
pub mod published_keys;
pub mod token;
pub mod verification_key;
