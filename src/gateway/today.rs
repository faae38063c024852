//! The date as answers tell it: worked out once a second, and by each loop for itself.

use std::cell::{Cell, RefCell};

use http::{HeaderValue, Version};

use crate::clock::Moment;
use crate::http::fields;

#[derive(Debug, Default)]
pub struct Today {
    unix_s: Cell<Option<u64>>,
    text: RefCell<Option<HeaderValue>>,
}

impl Today {
    /// For an answer that is used again: `None` where whoever sends it tells the date.
    pub fn of(&self, version: Version, now: Moment) -> Option<HeaderValue> {
        if version == Version::HTTP_2 { self.text(now.unix_ms) } else { None }
    }

    /// `None` only where time is none that a date can tell.
    pub fn text(&self, unix_ms: u64) -> Option<HeaderValue> {
        let unix_s = Some(unix_ms / 1000);
        if self.unix_s.replace(unix_s) != unix_s {
            self.text.replace(fields::date(unix_ms / 1000));
        }
        self.text.borrow().clone()
    }
}
