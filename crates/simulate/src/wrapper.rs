//! Takes the lines of access logs out of what container runtimes and syslog put around them.

use std::ops::Range;

use memchr::memchr;

use super::json_scanner::{Escape, Scanner, Value, unescape};
use super::log_line::NoRequest;
use super::timestamp::{self, MONTHS};

/// Wrappers around a line: of syslog, in that of a container runtime.
const WRAPPERS_MAX: usize = 2;
const PART: NoRequest = NoRequest::Bad("it is a part of a line: container runtimes split lines of more than 16 KiB");

/// Takes off what is around the lines of one file.
#[derive(Default, Debug)]
pub struct Unwrapper {
    /// Memory for texts without escapes.
    buffer: Vec<u8>,
    /// Whether a line of standard output, or of standard error, goes on in the next one of the stream.
    goes_on: [bool; 2],
}

impl Unwrapper {
    /// The place of the text in a line of the file, without a carriage return at its end. Texts that are escaped are decoded
    /// in place.
    pub fn unwrap(&mut self, line: &mut [u8]) -> Result<Range<usize>, NoRequest> {
        let mut range = behind_byte_order_mark(line, 0)..line.len();
        for _ in 0..WRAPPERS_MAX {
            let text = &mut line[range.clone()];
            let Some(inner) = (match text {
                [b'{', ..] => self.docker(text)?,
                [b'0'..=b'9', _, _, _, b'-', _, _, b'-', _, _, b'T', ..] => self.cri(text)?.or_else(|| syslog(text)),
                [b'<' | b'A'..=b'S', ..] => syslog(text),
                _ => None,
            }) else {
                break;
            };
            range = range.start + inner.start..range.start + inner.end;
        }
        range.end -= usize::from(line[range.clone()].ends_with(b"\r"));
        Ok(range)
    }

    /// Docker's driver `json-file`: `{"log":"…\n","stream":"stdout","time":"…"}`, perhaps with `attrs` between.
    fn docker(&mut self, line: &mut [u8]) -> Result<Option<Range<usize>>, NoRequest> {
        let mut start = &*line;
        for token in [&b"{"[..], b"\"log\"", b":"] {
            let Some(behind) = start.strip_prefix(token) else { return Ok(None) };
            start = behind.trim_ascii_start();
        }
        let (mut log, mut stream) = (None, None);
        let mut scanner = Scanner::new(line);
        scanner.object(&mut |scanner, key| {
            match (key.of(line), scanner.value()?) {
                (b"log", Value::Text(text)) => log = Some(text),
                (b"stream", Value::Text(text)) => stream = Some(text),
                (_, Value::Object | Value::Array) => scanner.skip_nested()?,
                _ => {}
            }
            Ok(())
        })?;
        let Some((log, stream)) = log.zip(stream) else { return Ok(None) };
        let is_error = stream.of(line) == b"stderr";
        let text = if log.escape == Escape::None { log.of(line) } else { unescape(log.of(line), &mut self.buffer) };
        let (at, length) = (log.at as usize, text.len().saturating_sub(1));
        let is_part = self.goes_on[usize::from(is_error)];
        self.goes_on[usize::from(is_error)] = !text.ends_with(b"\n");
        if is_part || !text.ends_with(b"\n") {
            return Err(PART);
        }
        line[at..at + length].copy_from_slice(&self.buffer[..length]);
        Ok(Some(at..at + length))
    }

    /// The Container Runtime Interface (containerd, CRI-O, Podman): `2016-10-06T00:17:09.669794202Z stdout F text`; `P` says
    /// that the text goes on in the next line.
    fn cri(&mut self, line: &[u8]) -> Result<Option<Range<usize>>, NoRequest> {
        let Some(stream_at) = behind_blank(line, 0) else { return Ok(None) };
        let stream = &line[stream_at..];
        let is_error = stream.starts_with(b"stderr ");
        if !is_error && !stream.starts_with(b"stdout ") {
            return Ok(None);
        }
        let goes_on = match &stream[7..] {
            [b'F', b' ' | b':', ..] => false,
            [b'P', b' ' | b':', ..] => true,
            _ => return Ok(None),
        };
        match std::mem::replace(&mut self.goes_on[usize::from(is_error)], goes_on) || goes_on {
            true => Err(PART),
            false => Ok(behind_blank(line, stream_at + 7).map(|at| at..line.len())),
        }
    }
}

/// RFC 5424, `<165>1 2003-10-11T22:14:15.003Z host app 1 id [a b="c"] text`; RFC 3164, `<34>Oct 11 22:14:15 host app[1]:
/// text`, as it is sent, and as it is in files: without the priority, and perhaps with a time of RFC 3339.
fn syslog(line: &[u8]) -> Option<Range<usize>> {
    let priority = match line {
        [b'<', b'0'..=b'9', b'>', ..] => 3,
        [b'<', b'0'..=b'9', b'0'..=b'9', b'>', ..] => 4,
        [b'<', b'0'..=b'9', b'0'..=b'9', b'0'..=b'9', b'>', ..] => 5,
        _ => 0,
    };
    let text = if priority > 0 && line[priority..].starts_with(b"1 ") {
        rfc5424_text(line, priority + 2)
    } else {
        rfc3164_text(line, priority)
    };
    // HAProxy can send the text behind the priority.
    let start = text.or((priority > 0).then_some(priority))?;
    Some(start..line.len())
}

fn rfc5424_text(line: &[u8], at: usize) -> Option<usize> {
    // Time, host, application, process, kind of message.
    let mut at = (0..5).try_fold(at, |at, _| behind_blank(line, at))?;
    if line.get(at) == Some(&b'-') {
        at += 1;
    }
    while line.get(at) == Some(&b'[') {
        let mut is_quoted = false;
        loop {
            match line.get(at)? {
                b'\\' if is_quoted => at += 1,
                b'"' => is_quoted = !is_quoted,
                b']' if !is_quoted => break,
                _ => {}
            }
            at += 1;
        }
        at += 1;
    }
    (at < line.len()).then(|| behind_byte_order_mark(line, at + 1))
}

fn rfc3164_text(line: &[u8], at: usize) -> Option<usize> {
    let time = line.get(at..at + 16)?;
    let is_month = MONTHS.chunks_exact(3).any(|month| time.starts_with(month));
    let host_at = match time {
        [_, _, _, b' ', _, _, b' ', _, _, b':', _, _, b':', _, _, b' '] if is_month => at + 16,
        [_, _, _, _, b'-', _, _, b'-', _, _, b'T', ..] => behind_blank(line, at)?,
        _ => return None,
    };
    // The host can be left out.
    let behind_first = behind_blank(line, host_at)?;
    let is_tag = |end: usize| line[..end].ends_with(b": ");
    if is_tag(behind_first) {
        return Some(behind_first);
    }
    behind_blank(line, behind_first).filter(|end| is_tag(*end))
}

/// The position behind the time of RFC 3339 that `kubectl logs --timestamps` writes before each line.
pub fn behind_time(line: &[u8]) -> Option<usize> {
    let end = behind_blank(line, 0)?;
    let is_time = matches!(line, [b'0'..=b'9', _, _, _, b'-', ..]) && timestamp::parse(&line[..end - 1]).is_some();
    is_time.then_some(end)
}

fn behind_byte_order_mark(line: &[u8], at: usize) -> usize {
    if line[at..].starts_with(b"\xef\xbb\xbf") { at + 3 } else { at }
}

/// The position behind the next blank.
fn behind_blank(line: &[u8], at: usize) -> Option<usize> {
    Some(at + memchr(b' ', line.get(at..)?)? + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = r#"10.0.0.1 - - [10/Oct/2000:20:55:36 +0000] "GET /a HTTP/1.1" 200 1 "-" "a \"b\"""#;

    #[track_caller]
    fn text_of(line: &str) -> Result<String, NoRequest> {
        let mut bytes = line.as_bytes().to_vec();
        let range = Unwrapper::default().unwrap(&mut bytes)?;
        Ok(String::from_utf8(bytes[range].to_vec()).unwrap())
    }

    #[test]
    fn texts_are_found_in_their_wrappers() {
        let docker = |text: &str| {
            let log = serde_json::to_string(&format!("{text}\n")).unwrap();
            format!(r#"{{"log":{log},"stream":"stdout","attrs":{{"a":"b"}},"time":"2000-10-10T20:55:36.1Z"}}"#)
        };
        for prefix in [
            "",
            "2000-10-10T20:55:36.669794202Z stdout F ",
            "2000-10-10T20:55:36.669794202+02:00 stderr F ",
            "<190>Oct 10 20:55:36 host nginx: ",
            "<190>Oct  1 20:55:36 nginx: ",
            "Oct 10 20:55:36 host haproxy[14389]: ",
            "2000-10-10T20:55:36.123456+02:00 host haproxy[14389]: ",
            "<165>1 2000-10-10T20:55:36.003Z host app 1 ID47 - ",
            "<5>1 - - - - - [a@1 b=\"c]\\\"\\\\\"][d] \u{feff}",
            "<134>",
        ] {
            let line = format!("{prefix}{TEXT}");
            assert_eq!(text_of(&line).as_deref(), Ok(TEXT), "{line}");
            assert_eq!(text_of(&format!("{line}\r")).as_deref(), Ok(TEXT), "{line}");
            assert_eq!(text_of(&docker(&line)).as_deref(), Ok(TEXT), "{line}");
            let spaced =
                docker(&line).replacen("{\"log\":", "{ \"log\" : ", 1).replace(",\"stream\":", ", \"stream\": ");
            assert_eq!(text_of(&spaced).as_deref(), Ok(TEXT), "{spaced}");
        }
        assert_eq!(text_of("2000-10-10T20:55:36Z stdout F ").as_deref(), Ok(""));
        assert_eq!(text_of(&format!("\u{feff}{TEXT}")).as_deref(), Ok(TEXT));
        for line in [
            "2000-10-10T20:55:36Z stdout P 10.0.0.1 - -",
            r#"{"log":"10.0.0.1 - - [10","stream":"stdout","time":"2000-10-10T20:55:36Z"}"#,
            r#"{"log":"\"a\" - - [10","stream":"stdout","time":"2000-10-10T20:55:36Z"}"#,
        ] {
            assert_eq!(text_of(line), Err(PART), "{line}");
        }
    }

    /// Of a line that a runtime has split, no part is a line, also if the other stream comes between.
    #[test]
    fn the_end_of_a_split_line_is_a_part_too() {
        let cri = |stream: &str, tag: &str, text: &str| format!("2000-10-10T20:55:36Z {stream} {tag} {text}");
        let docker = |stream: &str, tag: &str, text: &str| {
            let end = if tag == "F" { "\n" } else { "" };
            serde_json::json!({ "log": format!("{text}{end}"), "stream": stream, "time": "2000-10-10T20:55:36Z" })
                .to_string()
        };
        for wrap in [&cri as &dyn Fn(&str, &str, &str) -> String, &docker] {
            let mut unwrapper = Unwrapper::default();
            let mut found = |stream, tag, text| {
                let mut line = wrap(stream, tag, text).into_bytes();
                let range = unwrapper.unwrap(&mut line)?;
                Ok(String::from_utf8(line[range].to_vec()).unwrap())
            };
            for (stream, tag, text, expected) in [
                ("stdout", "P", "10.0.0.1 \"", Err(PART)),
                ("stderr", "F", "an error", Ok("an error")),
                ("stdout", "P", "x", Err(PART)),
                ("stdout", "F", TEXT, Err(PART)),
                ("stdout", "F", TEXT, Ok(TEXT)),
                ("stderr", "P", "x", Err(PART)),
                ("stdout", "F", TEXT, Ok(TEXT)),
                ("stderr", "F", TEXT, Err(PART)),
                ("stderr", "F", "", Ok("")),
            ] {
                assert_eq!(found(stream, tag, text), expected.map(str::to_owned), "{stream} {tag} {text}");
            }
        }
    }

    #[test]
    fn other_lines_stay_as_they_are() {
        for line in [
            "",
            "{",
            r#"{"log":"a\n","time":"2000-10-10T20:55:36Z"}"#,
            r#"{"time":"2000-10-10T20:55:36Z","log":"a\n","stream":"b"}"#,
            "2000-10-10T20:55:36Z stdout X text",
            "2000-10-10 20:55:36 10.0.0.1 GET /",
            "Oct 10 20:55:36 host no tag",
            "<1>1 a",
        ] {
            let expected = if line.starts_with("<1>") { "1 a" } else { line };
            assert_eq!(text_of(line).as_deref(), Ok(expected));
        }
        assert!(text_of(r#"{"log":"a\n","stream":"b""#).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60), cut in 0_usize..70) {
            for start in [
                &b""[..], b"{\"log\":\"", b"<1>1 ", b"<1>1 a a a a a [", b"Oct 10 20:55:36 ", b"2000-10-10T20:55:36Z ",
                b"2000-10-10T20:55:36Z stdout F ", b"{\"log\":\"\\n\",\"stream\":\"a\"}",
            ] {
                let mut line = [start, &bytes[..]].concat();
                line.truncate(cut);
                let _ = Unwrapper::default().unwrap(&mut line);
            }
        }
    }
}
