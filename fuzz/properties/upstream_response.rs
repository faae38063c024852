//! For any bytes of a server: the decoded response does not depend on how the bytes are cut, and its head and body end where
//! a simple reader finds their end.

use bytes::Bytes;
use transom_http::http1_body::{BodyDecoder, MalformedMessage};
use transom_http::http1_head::parse_response_head;

/// A response as far as it was decoded: its status, its data, whether it has ended, and the number of bytes behind it.
#[derive(PartialEq, Debug)]
struct Decoded {
    status: u16,
    data: Vec<u8>,
    has_ended: bool,
    rest: usize,
}

/// `None`: the head is incomplete.
fn decode<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Result<Option<Decoded>, MalformedMessage> {
    let mut received = Bytes::new();
    let mut head: Option<(u16, BodyDecoder)> = None;
    let mut data = Vec::new();
    for piece in pieces {
        received = [&received, piece].concat().into();
        if head.is_none() {
            let parsed = parse_response_head(&mut received, false)?;
            head = parsed.map(|parsed| (parsed.response.status().as_u16(), parsed.body));
        }
        let Some((_, body)) = &mut head else { continue };
        while let Some(frame) = body.decode(&mut received)? {
            data.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
        }
    }
    let rest = received.len();
    Ok(head.map(|(status, body)| Decoded { status, data, has_ended: body.has_ended(), rest }))
}

pub fn holds(bytes: &[u8]) {
    let whole = decode(std::iter::once(bytes));
    let (first, second) = bytes.split_at(bytes.len() / 2);
    assert_eq!(whole, decode([first, second].into_iter()), "{:?}", bytes.escape_ascii().to_string());
    assert_eq!(whole, decode(bytes.chunks(1)), "{:?}", bytes.escape_ascii().to_string());
    let Ok(Some(response)) = whole else { return };
    assert!(response.data.len() + response.rest <= bytes.len());
    // What follows a complete response does not change it.
    if response.has_ended {
        let more = [bytes, b"HTTP/1.1 200 OK\r\n\r\n"].concat();
        let longer = decode(std::iter::once(&more[..])).unwrap().unwrap();
        assert_eq!((longer.data, longer.rest), (response.data, response.rest + more.len() - bytes.len()));
    }
}
