//! A DNS server with the records of a test, over UDP and TCP.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

const A: u16 = 1;
const SRV: u16 = 33;
/// Of a response over UDP to a query without OPT.
const UDP_MAX_BYTES: usize = 512;
/// Of a query.
const QUERY_MAX_BYTES: usize = 512;
const FORMAT_ERROR: u8 = 1;
const NAME_ERROR: u8 = 3;

/// Ends with its test process.
pub struct DnsServer {
    pub address: SocketAddr,
    zone: Arc<Zone>,
}

/// The data of records, by name in lower case and type.
type Records = HashMap<(String, u16), Vec<Vec<u8>>>;

#[derive(Default)]
struct Zone {
    records: Mutex<Records>,
    /// Queries get no response.
    is_silent: AtomicBool,
    refuses_opt: AtomicBool,
    tcp_queries: AtomicUsize,
    /// The time to live of records, beyond one second.
    longer_s: AtomicU32,
}

impl DnsServer {
    pub fn start() -> DnsServer {
        let (socket, listener) = sockets();
        let zone = Arc::<Zone>::default();
        let address = socket.local_addr().unwrap();
        thread::spawn({
            let zone = Arc::clone(&zone);
            move || {
                let mut buffer = [0; QUERY_MAX_BYTES];
                while let Ok((length, client)) = socket.recv_from(&mut buffer) {
                    let query = &buffer[..length];
                    let Some(mut response) = zone.respond(query) else { continue };
                    let question_end = question_end(query);
                    // OPT has the length instead of a class.
                    let announced = query.get(question_end + 3..question_end + 5);
                    let max = announced.map_or(UDP_MAX_BYTES, |max| usize::from(u16::from_be_bytes([max[0], max[1]])));
                    if response.len() > max {
                        // Truncated, without records.
                        response.truncate(question_end);
                        response[2] |= 2;
                        response[6..8].fill(0);
                    }
                    let _ = socket.send_to(&response, client);
                }
            }
        });
        thread::spawn({
            let zone = Arc::clone(&zone);
            move || {
                for mut stream in listener.incoming().map_while(Result::ok) {
                    let mut length = [0; 2];
                    let _ = stream.read_exact(&mut length);
                    let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
                    let _ = stream.read_exact(&mut query);
                    zone.tcp_queries.fetch_add(1, Ordering::SeqCst);
                    let Some(response) = zone.respond(&query) else { continue };
                    let length = u16::try_from(response.len()).unwrap().to_be_bytes();
                    let _ = stream.write_all(&[&length[..], &response].concat());
                }
            }
        });
        DnsServer { address, zone }
    }

    /// The setting of an upstream that uses this server.
    pub fn toml(&self) -> String {
        format!("dns_servers = [\"{}\"]\n", self.address)
    }

    /// Sets the servers of a service: priority, weight, port, target.
    pub fn set_service(&self, name: &str, servers: &[(u16, u16, u16, &str)]) {
        let data = |(priority, weight, port, target): &(u16, u16, u16, &str)| {
            let numbers = [priority, weight, port].map(|number| number.to_be_bytes()).concat();
            [numbers, encode_name(target)].concat()
        };
        self.set(name, SRV, servers.iter().map(data).collect());
    }

    pub fn set_addresses(&self, name: &str, addresses: &[IpAddr]) {
        let data = |address: &IpAddr| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(_) => panic!("only IPv4"),
        };
        self.set(name, A, addresses.iter().map(data).collect());
    }

    fn set(&self, name: &str, record_type: u16, data: Vec<Vec<u8>>) {
        self.zone.records.lock().unwrap().insert((name.to_owned(), record_type), data);
    }

    /// Removes all records: the names no longer exist.
    pub fn clear(&self) {
        self.zone.records.lock().unwrap().clear();
    }

    pub fn set_ttl(&self, seconds: u32) {
        self.zone.longer_s.store(seconds - 1, Ordering::SeqCst);
    }

    /// Queries with OPT get an error, as from servers that do not know it.
    pub fn refuse_opt(&self) {
        self.zone.refuses_opt.store(true, Ordering::SeqCst);
    }

    pub fn set_silent(&self, is_silent: bool) {
        self.zone.is_silent.store(is_silent, Ordering::SeqCst);
    }

    pub fn tcp_queries(&self) -> usize {
        self.zone.tcp_queries.load(Ordering::SeqCst)
    }
}

/// Sockets of both protocols on one port.
fn sockets() -> (UdpSocket, TcpListener) {
    for _ in 0..10 {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        if let Ok(listener) = TcpListener::bind(socket.local_addr().unwrap()) {
            return (socket, listener);
        }
    }
    panic!("no port is free for both protocols");
}

fn encode_name(name: &str) -> Vec<u8> {
    let label = |label: &str| [&[u8::try_from(label.len()).unwrap()][..], label.as_bytes()].concat();
    let labels = name.split('.').filter(|label| !label.is_empty());
    [labels.flat_map(label).collect(), vec![0]].concat()
}

/// Where the question of a query ends, and OPT may follow.
fn question_end(query: &[u8]) -> usize {
    let mut at = 12;
    while query[at] != 0 {
        at += 1 + usize::from(query[at]);
    }
    at + 5
}

impl Zone {
    fn respond(&self, query: &[u8]) -> Option<Vec<u8>> {
        if self.is_silent.load(Ordering::SeqCst) {
            return None;
        }
        let (mut name, mut at) = (Vec::new(), 12);
        while query[at] != 0 {
            let end = at + 1 + usize::from(query[at]);
            name.push(String::from_utf8(query[at + 1..end].to_vec()).unwrap().to_lowercase());
            at = end;
        }
        let record_type = u16::from_be_bytes([query[at + 1], query[at + 2]]);
        let records = self.records.lock().unwrap();
        let name = name.join(".");
        let exists = records.keys().any(|(known, _)| *known == name);
        let data = records.get(&(name, record_type)).map(Vec::as_slice).unwrap_or_default();
        let mut response = query[..question_end(query)].to_vec();
        response[2] |= 0x80;
        if self.refuses_opt.load(Ordering::SeqCst) && response.len() < query.len() {
            response.truncate(12);
            response[3] = FORMAT_ERROR;
            response[4..].fill(0);
            return Some(response);
        }
        // Without the OPT of the query.
        response[10..12].fill(0);
        response[3] = if exists { 0 } else { NAME_ERROR };
        response[6..8].copy_from_slice(&u16::try_from(data.len()).unwrap().to_be_bytes());
        for data in data {
            // The name of the question.
            response.extend([0xc0, 12]);
            response.extend(record_type.to_be_bytes());
            response.extend([0, 1]);
            response.extend((1 + self.longer_s.load(Ordering::SeqCst)).to_be_bytes());
            response.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
            response.extend(data);
        }
        Some(response)
    }
}
