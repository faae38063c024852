//! What HTTP's words mean, without I/O: nothing in this room waits or touches a socket.
//!
//! `gate` decides whether this is one clear request, `path` which endpoint its path names, `route`
//! which route that is, `caller` who is asking, by the parts that `part` finds and `key_text` spells, of which `cookie`, `query` and
//! `bearer` read what may be spelt in several ways, with the help of `escapes`; `affinity` which requests belong to one
//! server; `clients` whether that is somebody who is known, `exceptions` whom a rule treats otherwise than everyone, `fields` what
//! is added and taken away in passing, `forwarded` who asks behind proxies, `action` what a route changes,
//! `quota` how the limits are told to the client, `repeat` what was said of them last, `fault` what can go wrong and on whose side, and
//! `reply` is every answer that the gateway makes itself: the only place with status codes.

pub mod action;
pub mod affinity;
pub mod bearer;
pub mod caller;
pub mod clients;
pub mod cookie;
pub mod date;
pub mod decision;
pub mod escapes;
pub mod exceptions;
pub mod fault;
pub mod fields;
pub mod forwarded;
pub mod gate;
pub mod key_text;
pub mod part;
pub mod path;
pub mod query;
pub mod quota;
pub mod repeat;
pub mod reply;
pub mod route;
pub mod upgrade;
