//! DNS messages (RFC 1035), as far as the gateway needs them: queries for addresses and service records (RFC 2782), with
//! the length of responses that are received (EDNS, RFC 6891), and the answers to them. No I/O.

use std::collections::HashMap;
use std::fmt;
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

/// The type of a record that gives another name for its owner (CNAME).
const CANONICAL_NAME: u16 = 5;
/// Labels, and pointers to labels, of a name: each label has at least two bytes.
const PARTS_MAX: usize = NAME_MAX / 2;

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
    /// Of a host; the root if the service is not available.
    pub target: Name,
}

/// A name in lower case: its labels, each after its length, without the empty label of the root. The bytes of a label are
/// arbitrary: they may be dots, blanks and control characters.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Name(Vec<u8>);

impl Name {
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    fn labels(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.0.as_slice();
        std::iter::from_fn(move || {
            let (length, labels) = rest.split_first()?;
            let (label, others) = labels.split_at_checked(usize::from(*length))?;
            rest = others;
            Some(label)
        })
    }

    /// As text without the last dot. `None`: it is not the name of a host, whose labels consist of letters, digits, `-` and `_`.
    pub fn to_host(&self) -> Option<String> {
        let is_in_host = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
        let is_host = !self.is_root() && self.labels().all(|label| label.iter().all(is_in_host));
        is_host.then(|| self.to_string())
    }
}

/// Labels separated by dots, without the last dot. Dots, quotes and backslashes in labels are escaped by a backslash, and bytes that are
/// not graphic by a backslash and three decimal digits (RFC 1035, section 5.1).
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, label) in self.labels().enumerate() {
            if number > 0 {
                f.write_str(".")?;
            }
            for byte in label {
                match byte {
                    b'.' | b'\\' | b'`' | b'"' => write!(f, "\\{}", char::from(*byte))?,
                    byte if byte.is_ascii_graphic() => write!(f, "{}", char::from(*byte))?,
                    byte => write!(f, "\\{byte:03}")?,
                }
            }
        }
        Ok(())
    }
}

/// A response to a query.
#[derive(PartialEq, Eq, Debug)]
pub struct Response {
    /// 0: no error; 3: the name does not exist.
    pub code: u16,
    /// The response has no room for all records, which TCP has.
    pub is_truncated: bool,
    /// The records of the type and the name that were asked for, each with its time to live in seconds. Names that the answers
    /// give instead of that name (CNAME) are followed, and their times to live count too.
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
    reader.at = HEADER_LENGTH;
    let mut asked = vec![(reader.read_name()?, u32::MAX)];
    reader.at = HEADER_LENGTH + question.len();
    let (mut records, mut other_names) = (Vec::new(), HashMap::new());
    for _ in 0..answers {
        match reader.read_record(record_type) {
            Some(Answer { owner, ttl_s, data: Data::Record(record) }) => records.push((owner, record, ttl_s)),
            Some(Answer { owner, ttl_s, data: Data::OtherName(name) }) => {
                drop(other_names.insert(owner, (name, ttl_s)))
            }
            Some(Answer { data: Data::Unused, .. }) => {}
            // A truncated message may end within a record.
            None if flags & FLAG_TRUNCATED != 0 => break,
            None => return None,
        }
    }
    // Each is followed once, so the loop ends.
    while let Some((name, ttl_s)) = asked.last().and_then(|(name, _)| other_names.remove(name)) {
        let shortest_s = asked.last().map_or(ttl_s, |(_, before_s)| ttl_s.min(*before_s));
        asked.push((name, shortest_s));
    }
    let asked: HashMap<Name, u32> = asked.into_iter().collect();
    // Records of other names are not the answer.
    let answer = |(owner, record, ttl_s): (Name, Record, u32)| Some((record, ttl_s.min(*asked.get(&owner)?)));
    let records = records.into_iter().filter_map(answer).collect();
    Some(Response { code: flags & CODE_MASK, is_truncated: flags & FLAG_TRUNCATED != 0, records })
}

/// A record of an answer.
struct Answer {
    owner: Name,
    ttl_s: u32,
    data: Data,
}

enum Data {
    Record(Record),
    OtherName(Name),
    Unused,
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

    /// Reads a name. Each pointer must lead to before the part of the name that it ends, so a name is read without loops; its length
    /// and the number of its parts are bounded.
    fn read_name(&mut self) -> Option<Name> {
        let (mut name, mut at, mut part_begin, mut end) = (Vec::new(), self.at, self.at, None);
        for _ in 0..=2 * PARTS_MAX {
            let length = *self.message.get(at)?;
            match length & POINTER {
                0 if length == 0 => {
                    self.at = end.unwrap_or(at + 1);
                    return Some(Name(name));
                }
                0 => {
                    let label = self.message.get(at..at + 1 + usize::from(length))?;
                    // With the empty label of the root.
                    if name.len() + label.len() + 1 > NAME_MAX {
                        return None;
                    }
                    // A length is less than 64, and no letter.
                    name.extend(label.iter().map(u8::to_ascii_lowercase));
                    at += label.len();
                }
                POINTER => {
                    let low = *self.message.get(at + 1)?;
                    let target = usize::from(u16::from_be_bytes([length & !POINTER, low]));
                    end = end.or(Some(at + 2));
                    at = Some(target).filter(|target| *target < part_begin)?;
                    part_begin = at;
                }
                _ => return None,
            }
        }
        None
    }

    /// A record, with its data if it has this type, or is another name.
    fn read_record(&mut self, record_type: u16) -> Option<Answer> {
        let owner = self.read_name()?;
        let (found_type, class) = (self.read_u16()?, self.read_u16()?);
        let ttl_s = u32::from_be_bytes(self.read()?);
        // A time to live with the highest bit set is 0 (RFC 2181, section 8).
        let ttl_s = if ttl_s > u32::MAX / 2 { 0 } else { ttl_s };
        let end = usize::from(self.read_u16()?) + self.at;
        // A name in the data may continue in earlier parts of the message, but not in later ones.
        let mut data = Reader { message: self.message.get(..end)?, at: self.at };
        self.at = end;
        let read = match found_type {
            _ if class != CLASS_IN => Data::Unused,
            CANONICAL_NAME => Data::OtherName(data.read_name()?),
            _ if found_type != record_type => Data::Unused,
            1 => Data::Record(Record::Address(Ipv4Addr::from(data.read::<4>()?).into())),
            28 => Data::Record(Record::Address(Ipv6Addr::from(data.read::<16>()?).into())),
            _ => Data::Record(Record::Service(ServiceRecord {
                priority: data.read_u16()?,
                weight: data.read_u16()?,
                port: data.read_u16()?,
                target: data.read_name()?,
            })),
        };
        let is_complete = data.at == end || matches!(read, Data::Unused);
        is_complete.then_some(Answer { owner, ttl_s, data: read })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "_api._tcp.example.internal";

    impl Name {
        /// The name with these labels.
        pub fn of(text: &str) -> Name {
            let label = |label: &str| [&[u8::try_from(label.len()).unwrap()], label.as_bytes()].concat();
            Name(text.split('.').filter(|text| !text.is_empty()).flat_map(label).collect())
        }
    }

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
            (Record::Service(ServiceRecord { priority, weight, port, target: Name::of(target) }), 30)
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

    /// An answer with its owner and its data, as they are in the message.
    fn with_answers(query: &[u8], answers: &[(&[u8], u16, u32, &[u8])]) -> Vec<u8> {
        let mut message = response(query, 0, &[]);
        message[6..8].copy_from_slice(&(answers.len() as u16).to_be_bytes());
        for (owner, record_type, ttl_s, data) in answers {
            message.extend(*owner);
            message.extend(record_type.to_be_bytes());
            message.extend(CLASS_IN.to_be_bytes());
            message.extend(ttl_s.to_be_bytes());
            message.extend((data.len() as u16).to_be_bytes());
            message.extend(*data);
        }
        message
    }

    fn wire(name: &str) -> Vec<u8> {
        [Name::of(name).0, vec![0]].concat()
    }

    #[test]
    fn only_records_of_the_name_in_question_and_its_other_names_are_read() {
        let asked = query(7, "Api.test", RecordType::A).unwrap();
        let addresses = |answers: &[(&str, u16, u32, &[u8])]| -> Vec<(String, u32)> {
            let owners: Vec<Vec<u8>> = answers.iter().map(|(owner, ..)| wire(owner)).collect();
            let answers: Vec<_> = answers
                .iter()
                .zip(&owners)
                .map(|((_, kind, ttl_s, data), owner)| (&**owner, *kind, *ttl_s, *data))
                .collect();
            let read = parse_response(&with_answers(&asked, &answers), &asked).unwrap();
            let address = |(record, ttl_s): &(Record, u32)| match record {
                Record::Address(address) => (address.to_string(), *ttl_s),
                Record::Service(_) => panic!("not asked for"),
            };
            read.records.iter().map(address).collect()
        };
        let (b, c) = (wire("b.test"), wire("c.test"));
        let found = |address: &str, ttl_s| (address.to_owned(), ttl_s);
        // The address of another name, of which nothing was said.
        assert_eq!(
            addresses(&[("b.test", 1, 9, &[10, 0, 0, 1]), ("API.test", 1, 8, &[10, 0, 0, 2])]),
            [found("10.0.0.2", 8)]
        );
        // Over two other names, in any order; the shortest time to live applies.
        let chain = [
            ("c.test", 1, 30, &[10, 0, 0, 1][..]),
            ("b.test", CANONICAL_NAME, 5, &c),
            ("d.test", 1, 30, &[10, 0, 0, 2]),
            ("api.test", CANONICAL_NAME, 60, &b),
        ];
        assert_eq!(addresses(&chain), [found("10.0.0.1", 5)]);
        assert!(addresses(&chain[..3]).is_empty(), "nothing leads to the names");
        // A loop ends.
        let a = wire("api.test");
        let looped = [
            ("api.test", CANONICAL_NAME, 60, &*b),
            ("b.test", CANONICAL_NAME, 60, &a),
            ("c.test", 1, 9, &[10, 0, 0, 1]),
        ];
        assert!(addresses(&looped).is_empty());
        // Of another name, a label that is not text does not make the others useless.
        let other = [&[2, 0xff, b'.'][..], &b].concat();
        let answers = [(&*other, 1, 9, &[10, 0, 0, 1][..]), (&*a, 1, 9, &[10, 0, 0, 2])];
        assert_eq!(parse_response(&with_answers(&asked, &answers), &asked).unwrap().records.len(), 1);
    }

    #[test]
    fn names_are_bounded() {
        let read = |message: &[u8], at: usize| {
            let mut reader = Reader { message, at };
            reader.read_name().map(|name| (name, reader.at))
        };
        // The longest name has 255 bytes with the label of the root.
        let longest = [vec![[1, b'a']; 127].concat(), vec![0]].concat();
        assert_eq!(read(&longest, 0).unwrap().1, NAME_MAX);
        assert_eq!(read(&[&[1, b'b'], &*longest].concat(), 0), None);
        // A pointer into its own name: `a.a.a…`; and one that skips a label.
        assert_eq!(read(&[1, b'a', POINTER, 0], 0), None);
        assert_eq!(read(&[1, b'b', 0, 1, b'a', POINTER, 0], 3), Some((Name::of("a.b"), 7)));
        // Pointers to pointers are few.
        let pointers: Vec<u8> =
            [vec![0, 0], (0..1000).flat_map(|at: u16| (0xc000 | (2 * at)).to_be_bytes()).collect()].concat();
        assert_eq!(read(&pointers, 10), Some((Name::default(), 12)));
        assert_eq!(read(&pointers, 1000), None);
        // A label that has a dot is no part of a host, and is not taken for two.
        let (dotted, _) = read(&[3, b'a', b'.', b'B', 1, b'c', 0], 0).unwrap();
        assert_eq!((dotted.to_host(), dotted.to_string().as_str()), (None, r"a\.b.c"));
        assert_ne!(dotted, Name::of("a.b.c"));
    }
}
