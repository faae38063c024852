//! Fuzzes the property of the same name in `properties`.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../properties/usage.rs"]
mod property;

fuzz_target!(|bytes: &[u8]| property::holds(bytes));
