//! What an API says that a request used, read from bodies as they pass: tokens of language models, or any number in JSON.
//!
//! `usage_reader` reads a body as it passes, `passing_model` the model of a request as it passes, and `request_body` the members of a
//! request that rules depend on: `content_decoder` decodes the content coding, `event_stream` splits streams into documents, and
//! `json_scanner` finds the values of JSON Pointers, which `values` keeps. `format` has the formats of the known APIs, `usage` the
//! kinds of usage and their weights, `decimal` exact numbers, `learnt_cost` what requests have cost lately. Nothing here waits, reads
//! a clock or knows of rules, and no body is kept:
//! memory is bounded by a few KiB for a body, and by the windows of its content coding, which `memory_budget` bounds over all bodies.

pub mod content_decoder;
pub mod decimal;
pub mod event_stream;
pub mod format;
pub mod json_pointer;
pub mod json_scanner;
pub mod learnt_cost;
pub mod memory_budget;
pub mod passing_model;
pub mod request_body;
pub mod usage;
pub mod usage_reader;
pub mod values;
