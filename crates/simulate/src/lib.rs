//! Plays access logs against a configuration: what its limits would have done with the requests of a log.
//!
//! `log_files` reads logs and orders their lines, `decompression` and `wrapper` take off what is around them, `log_format`
//! finds their format among those of `formats`, `request_reader` finds their routes, `replay` plays them, `scenario` decides
//! with the code that decides live, `statistics` counts in bounded memory, and `report` prints the result. The crate opens
//! only the logs and a configuration of nginx that has their format, and knows nothing of connections, workers or a shared
//! store.

pub mod columns;
pub mod combined;
pub mod decompression;
pub mod field_names;
pub mod formats;
pub mod json_line;
pub mod json_scanner;
pub mod log_files;
pub mod log_format;
pub mod log_line;
pub mod nginx_conf;
pub mod pattern;
pub mod replay;
pub mod report;
pub mod report_html;
pub mod report_text;
pub mod request_reader;
pub mod scenario;
pub mod statistics;
pub mod timestamp;
pub mod wrapper;
