//! For any text: reading it returns a configuration, or problems that each have a position in the text and a fix.

use transom_config::diagnostics::render;
use transom_config::read;

pub fn holds(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Err(problems) = read(text) else { return };
    assert!(!problems.is_empty());
    for problem in &problems {
        assert!(text.get(problem.span.clone()).is_some(), "{problem:?}");
        assert!(!problem.message.is_empty() && !problem.fix.is_empty(), "{problem:?}");
    }
    assert!(!render(&problems, "gateway.toml").is_empty());
}
