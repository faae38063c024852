//! Plays access logs against a configuration: what its limits would have done with the requests of a log.
//!
//! `log_files` reads logs and orders their lines, `decompression` and `wrapper` take off what is around them, `log_line` parses
//! them, `request_reader` finds their routes, `replay` plays
//! them, `scenario` decides with the code that decides live, `statistics` counts in bounded memory, and `report` prints the result.
//! The crate opens only the logs, and knows nothing of connections, workers or a shared store.

pub mod decompression;
pub mod json_scanner;
pub mod log_files;
pub mod log_line;
pub mod replay;
pub mod report;
pub mod report_html;
pub mod report_text;
pub mod request_reader;
pub mod scenario;
pub mod statistics;
pub mod timestamp;
pub mod wrapper;
