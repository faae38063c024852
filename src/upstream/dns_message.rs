//! DNS messages (RFC 1035), as far as the gateway needs them: queries for addresses and service records (RFC 2782), with
//! the length of responses that are received (EDNS, RFC 6891), and the answers to them. No I/O.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Of a message, in bytes.
const HEADER_LENGTH: usize = 12;
/// Of a name with the lengths of its labels, in bytes.
const NAME_MAX: usize = 255;
const LABEL_MAX: usize = 63;
/// The class of the Internet.
const CLASS_IN: u16 = 1;
const FLAG_RESPONSE: u16 = 1 << 15;
const FLAG_TRUNCATED: u16 = 1 << 9;
const FLAG_RECURSION_DESIRED: u16 = 1 << 8;
const CODE_MASK: u16 = 0xf;
/// The two first bits of a length byte that is a pointer to a name earlier in the message.
const POINTER: u8 = 0xc0;

/// The longest response over UDP that is asked for, in bytes. It fits in a packet of every usual network.
const UDP_MAX_BYTES: u16 = 1232;
/// The record that follows the question: for the root, of type OPT (41), with that length instead of a class, version 0, and
/// no options.
const OPT: [u8; 11] = {
    let [high, low] = UDP_MAX_BYTES.to_be_bytes();
    [0, 0, 41, high, low, 0, 0, 0, 0, 0, 0]
};
/// Where a header has the number of records that follow the answers.
const ADDITIONAL: std::ops::Range<usize> = 10..12;
/// The server does not understand the query: perhaps it does not know OPT.
pub const FORMAT_ERROR: u16 = 1;

/// The types of records that are asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordType {
    A = 1,
    Aaaa = 28,
    Srv = 33,
}

/// The data of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    Address(IpAddr),
    Service(ServiceRecord),
}

/// A server of a service. The smallest priority comes first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServiceRecord {
    pub priority: u16,
    pub weight: u16,
    pub port: u16,
    /// Host name, without the last dot; empty if the service is not available.
    pub target: String,
}

/// A response to a query.
#[derive(PartialEq, Eq, Debug)]
pub struct Response {
    /// 0: no error; 3: the name does not exist.
    pub code: u16,
    /// The response has no room for all records, which TCP has.
    pub is_truncated: bool,
    /// The records of the type that was asked for, each with its time to live in seconds.
    pub records: Vec<(Record, u32)>,
}

/// A query for the records of a name. `None`: the name is not valid.
pub fn query(id: u16, name: &str, record_type: RecordType) -> Option<Vec<u8>> {
    let mut message = Vec::with_capacity(HEADER_LENGTH + name.len() + 6 + OPT.len());
    // One question, and one record after it.
    for field in [id, FLAG_RECURSION_DESIRED, 1, 0, 0, 1] {
        message.extend(field.to_be_bytes());
    }
    for label in name.strip_suffix('.').unwrap_or(name).split('.') {
        if !(1..=LABEL_MAX).contains(&label.len()) {
            return None;
        }
        message.push(label.len() as u8);
        message.extend(label.as_bytes());
    }
    message.push(0);
    if message.len() - HEADER_LENGTH > NAME_MAX {
        return None;
    }
    message.extend((record_type as u16).to_be_bytes());
    message.extend(CLASS_IN.to_be_bytes());
    message.extend(OPT);
    Some(message)
}

/// A query without OPT.
pub fn without_opt(query: &[u8]) -> Vec<u8> {
    let mut message = [&query[..HEADER_LENGTH], question(query)].concat();
    message[ADDITIONAL].fill(0);
    message
}

fn question(query: &[u8]) -> &[u8] {
    let question = &query[HEADER_LENGTH..];
    question.strip_suffix(&OPT).filter(|_| query[ADDITIONAL] != [0, 0]).unwrap_or(question)
}

/// Reads the response to a query. `None`: the message is malformed, or no response to it.
pub fn parse_response(message: &[u8], query: &[u8]) -> Option<Response> {
    let mut reader = Reader { message, at: 0 };
    let (id, flags) = (reader.read_u16()?, reader.read_u16()?);
    let (questions, answers) = (reader.read_u16()?, reader.read_u16()?);
    let question = question(query);
    let asked = message.get(HEADER_LENGTH..HEADER_LENGTH + question.len());
    let is_response = flags & FLAG_RESPONSE != 0 && id.to_be_bytes() == query[..2];
    // A server that does not understand the query may respond with a header alone.
    if is_response && flags & CODE_MASK == FORMAT_ERROR && message.len() == HEADER_LENGTH {
        return Some(Response { code: FORMAT_ERROR, is_truncated: false, records: Vec::new() });
    }
    // Servers may change the case of names.
    if !is_response || questions != 1 || !asked.is_some_and(|asked| asked.eq_ignore_ascii_case(question)) {
        return None;
    }
    let record_type = question.last_chunk::<4>().map(|[high, low, ..]| u16::from_be_bytes([*high, *low]))?;
    reader.at = HEADER_LENGTH + question.len();
    let mut records = Vec::new();
    for _ in 0..answers {
        match reader.read_record(record_type) {
            Some(record) => records.extend(record),
            // A truncated message may end within a record.
            None if flags & FLAG_TRUNCATED != 0 => break,
            None => return None,
        }
    }
    Some(Response { code: flags & CODE_MASK, is_truncated: flags & FLAG_TRUNCATED != 0, records })
}

struct Reader<'m> {
    message: &'m [u8],
    at: usize,
}

impl Reader<'_> {
    fn read<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.message.get(self.at..)?.first_chunk()?;
        self.at += N;
        Some(*bytes)
    }

    fn read_u16(&mut self) -> Option<u16> {
        self.read().map(u16::from_be_bytes)
    }

    /// A name in lower case, without the last dot.
    fn read_name(&mut self) -> Option<String> {
        let (mut name, mut at, mut end) = (String::new(), self.at, None);
        loop {
            let length = *self.message.get(at)?;
            match length & POINTER {
                0 if length == 0 => {
                    self.at = end.unwrap_or(at + 1);
                    return Some(name);
                }
                0 => {
                    let label = self.message.get(at + 1..at + 1 + usize::from(length))?;
                    let label = std::str::from_utf8(label).ok().filter(|label| !label.contains('.'))?;
                    if !name.is_empty() {
                        name.push('.');
                    }
                    name.push_str(&label.to_ascii_lowercase());
                    at += 1 + usize::from(length);
                }
                POINTER => {
                    let low = *self.message.get(at + 1)?;
                    let target = usize::from(u16::from_be_bytes([length & !POINTER, low]));
                    end = end.or(Some(at + 2));
                    // Only backwards, so the loop ends.
                    at = Some(target).filter(|target| *target < at)?;
                }
                _ => return None,
            }
            if name.len() > NAME_MAX {
                return None;
            }
        }
    }

    /// A record, with its time to live, if it has this type.
    fn read_record(&mut self, record_type: u16) -> Option<Option<(Record, u32)>> {
        self.read_name()?;
        let (found_type, class) = (self.read_u16()?, self.read_u16()?);
        let ttl_s = u32::from_be_bytes(self.read()?);
        let end = usize::from(self.read_u16()?) + self.at;
        // A name in the data may continue in earlier parts of the message, but not in later ones.
        let mut data = Reader { message: self.message.get(..end)?, at: self.at };
        self.at = end;
        if (found_type, class) != (record_type, CLASS_IN) {
            return Some(None);
        }
        let record = match found_type {
            1 => Record::Address(Ipv4Addr::from(data.read::<4>()?).into()),
            28 => Record::Address(Ipv6Addr::from(data.read::<16>()?).into()),
            _ => Record::Service(ServiceRecord {
                priority: data.read_u16()?,
                weight: data.read_u16()?,
                port: data.read_u16()?,
                target: data.read_name()?,
            }),
        };
        // A time to live with the highest bit set is 0 (RFC 2181, section 8).
        Some((data.at == end).then_some((record, if ttl_s > u32::MAX / 2 { 0 } else { ttl_s })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "_api._tcp.example.internal";

    /// A response with these answers, each with the name of the question.
    fn response(query: &[u8], flags: u16, answers: &[(u16, &[u8])]) -> Vec<u8> {
        let mut message = without_opt(query);
        message[2..4].copy_from_slice(&(FLAG_RESPONSE | flags).to_be_bytes());
        message[6..8].copy_from_slice(&(answers.len() as u16).to_be_bytes());
        for (record_type, data) in answers {
            message.extend([POINTER, HEADER_LENGTH as u8]);
            message.extend(record_type.to_be_bytes());
            message.extend([0, 1, 0, 0, 0, 30]);
            message.extend((data.len() as u16).to_be_bytes());
            message.extend(*data);
        }
        message
    }

    #[test]
    fn records_of_the_type_in_question_are_read() {
        let asked = query(7, NAME, RecordType::Srv).unwrap();
        assert_eq!(asked.len(), HEADER_LENGTH + NAME.len() + 2 + 4 + OPT.len());
        // The target ends with the last two labels of the question.
        let suffix = HEADER_LENGTH + "_api._tcp.".len();
        let data = [&[0, 10, 0, 3, 31, 144, 2, b'A', b'1', POINTER, suffix as u8], &[][..]].concat();
        let answers = [(5, &[POINTER, 12][..]), (33, &data), (33, &[0, 20, 0, 0, 0, 80, 0])];
        let read = parse_response(&response(&asked, 0, &answers), &asked).unwrap();
        let record = |priority, weight, port, target: &str| {
            (Record::Service(ServiceRecord { priority, weight, port, target: target.to_owned() }), 30)
        };
        assert_eq!(read.records, [record(10, 3, 8080, "a1.example.internal"), record(20, 0, 80, "")]);
        assert_eq!((read.code, read.is_truncated), (0, false));
        let asked = query(7, "a1.example.internal.", RecordType::A).unwrap();
        let read = parse_response(&response(&asked, 3 | FLAG_TRUNCATED, &[(1, &[10, 0, 0, 1])]), &asked).unwrap();
        assert_eq!(read.records, [(Record::Address("10.0.0.1".parse().unwrap()), 30)]);
        assert_eq!((read.code, read.is_truncated), (3, true));
    }

    #[test]
    fn other_messages_are_no_response() {
        let asked = query(7, NAME, RecordType::Srv).unwrap();
        let answer = response(&asked, 0, &[(33, &[0, 20, 0, 0, 0, 80, 0])]);
        assert!(parse_response(&answer.to_ascii_uppercase(), &asked).is_some());
        for other in
            [query(8, NAME, RecordType::Srv), query(7, "b.internal", RecordType::Srv), query(7, NAME, RecordType::A)]
        {
            assert_eq!(parse_response(&answer, &other.unwrap()), None);
        }
        assert_eq!(parse_response(&asked, &asked), None, "a query");
        let header = |code| response(&asked, code, &[])[..HEADER_LENGTH].to_vec();
        assert_eq!(parse_response(&header(FORMAT_ERROR), &asked).unwrap().code, FORMAT_ERROR);
        assert_eq!(parse_response(&header(0), &asked), None);
        // A message that is cut anywhere, a pointer to itself, and one to a later name.
        assert!((0..answer.len()).all(|length| parse_response(&answer[..length], &asked).is_none()));
        // No bytes cause a panic.
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..10_000 {
            let mut changed = answer.clone();
            (0..3).for_each(|_| changed[random.usize(2..answer.len())] = random.u8(..));
            let _ = parse_response(&changed, &asked);
        }
        let own = asked.len() - OPT.len() + 12 + 6;
        for pointer in [own, own + 2] {
            let data = [&[0, 1, 0, 1, 0, 80, POINTER, pointer as u8], &[1, b'a', 0][..]].concat();
            assert_eq!(parse_response(&response(&asked, 0, &[(33, &data)]), &asked), None);
        }
        for name in ["", ".", "a..b", &"a".repeat(64), &"abcdefg.".repeat(32)] {
            assert_eq!(query(1, name, RecordType::A), None, "{name}");
        }
    }
}
