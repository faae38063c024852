//! Of any text: it is a configuration, or there are problems, each with a place in the text and a fix.

use transom::config::diagnostics::render;
use transom::config::read;

pub fn holds(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Err(problems) = read(text) else { return };
    assert!(!problems.is_empty());
    for problem in &problems {
        assert!(text.get(problem.span.clone()).is_some(), "{problem:?}");
        assert!(!problem.message.is_empty() && !problem.fix.is_empty(), "{problem:?}");
    }
    assert!(!render(&problems, "gateway.toml", text).is_empty());
}
