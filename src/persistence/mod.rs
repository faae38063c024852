//! Persistence of the counters: memory that outlives the process, mapped from a file or anonymous and passed on at a hot
//! upgrade.
//!
//! `counters` are the counters in mapped memory, `open` opens them at start, `file_header` is the layout of the file,
//! `file` finds or creates it, `snapshot` writes and reads copies of the counters, `background` writes them
//! periodically. A file is used only after it was checked; an unusable file is set aside, and counting starts from
//! zero. Nothing here depends on rules or requests.

pub mod background;
pub mod counters;
pub mod file;
pub mod file_header;
pub mod open;
pub mod snapshot;
