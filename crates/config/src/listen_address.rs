//! Addresses to listen on: an IP address and a port, or the path of a Unix socket with its permissions.
//!
//! Addresses are IP addresses: host names are not resolved, because a name may resolve to another address at the next start. This
//! file binds no socket.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use toml::de::DeValue;

use super::diagnostics::{Parsed, Report, quoted};
use super::host::parse_socket_path;
use super::settings::{Custom, Required, Section, Shape, Text, Word};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};

pub const EXAMPLE: &str = "\"127.0.0.1:8080\"";
const UNIX_FIX: &str = "write `address = \"unix:/run/transom/http.sock\"`";

/// An address to listen on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ListenAddress {
    Tcp(SocketAddr),
    /// The absolute path of a Unix socket.
    Unix(PathBuf),
}

impl ListenAddress {
    /// The address of TCP.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            ListenAddress::Tcp(address) => Some(*address),
            ListenAddress::Unix(_) => None,
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Tcp(address) => address.fmt(f),
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A socket to listen on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListenSocket {
    pub address: ListenAddress,
    pub permissions: Permissions,
}

/// What the file of a Unix socket gets; `None`: what the system gives it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Permissions {
    pub mode: Option<u32>,
    /// The number of a user.
    pub owner: Option<u32>,
    /// The number of a group.
    pub group: Option<u32>,
}

impl From<ListenAddress> for ListenSocket {
    fn from(address: ListenAddress) -> ListenSocket {
        ListenSocket { address, permissions: Permissions::default() }
    }
}

settings! {
    /// An address that is a table.
    pub struct SocketTable {
        /// `"unix:/PATH"`.
        address: Option<SpannedString> = Required(Text("`\"unix:/PATH\"`", "\"unix:/run/transom/http.sock\""), UNIX_FIX);
        /// Permissions of the file, in octal. Connecting needs write permission. Without it: what the umask leaves.
        mode: Option<u32> = Word { shape: "octal text", example: "\"0660\"", read: read_mode };
        /// User that the file belongs to, by name or number.
        owner: Option<u32> = Custom::or_empty(name_or_number, |item, report| {
            read_id(item, ("user", "/etc/passwd"), report).map(Some)
        });
        /// Group that the file belongs to, by name or number.
        group: Option<u32> = Custom::or_empty(name_or_number, |item, report| {
            read_id(item, ("group", "/etc/group"), report).map(Some)
        });
    }
}

/// The keys of a table that only a Unix socket has.
const PERMISSIONS: [&str; 3] = ["mode", "owner", "group"];

/// Whether a table is an address, and not a listener with TLS, which has addresses and a certificate.
pub fn is_socket_table(table: &Table) -> bool {
    let is_unix = table
        .given("address")
        .is_some_and(|address| address.value.as_str().is_some_and(|address| address.starts_with("unix:")));
    let is_given = |key: &&str| table.given(key).is_some();
    !["certificate", "private_key"].iter().any(is_given) && (is_unix || PERMISSIONS.iter().any(is_given))
}

/// What the file may contain for one address.
pub fn address_shape() -> Shape {
    Shape::described(
        "`\"ADDRESS:PORT\"`, `\"unix:/PATH\"`, [table](#unix-sockets)",
        Shape::AnyOf(vec![Shape::Text("ADDRESS"), Shape::Table(SocketTable::settings())]),
    )
}

/// Reads an address or a list of addresses. The fix for an empty list is the example, and `or`.
pub fn read_sockets(item: &Item, example: &str, or: &str, report: &mut Report) -> Option<Vec<ListenSocket>> {
    let items = item.one_or_all();
    if items.is_empty() {
        report.problem(item.span.clone(), format!("`{}` is an empty list", item.key), item.fix_with(example) + or);
    }
    Some(items.iter().filter_map(|item| read_socket(item, example, report)).collect())
}

pub fn read_socket(item: &Item, example: &str, report: &mut Report) -> Option<ListenSocket> {
    let DeValue::Table(_) = item.value else {
        let word = item.string(example, report)?;
        return report.accept(word.span, parse_address(word.text)).map(ListenSocket::from);
    };
    let table = item.table("an address", UNIX_FIX, report)?;
    let given = PERMISSIONS.iter().find_map(|key| table.given(key));
    let SocketTable { address, mode, owner, group } = SocketTable::read_all(table, report);
    let address = address?;
    let address = report.accept(address.span.clone(), parse_address(&address.text))?;
    if let (ListenAddress::Tcp(_), Some(item)) = (&address, given) {
        let message = format!("`{}` has no effect: only the socket of a path has it", item.key);
        report.problem(item.key_span, message, format!("remove it, or {UNIX_FIX}"));
    }
    Some(ListenSocket { address, permissions: Permissions { mode, owner, group } })
}

/// The addresses that are written in an item, in whatever form, with their places.
pub fn written_addresses<'d>(item: &Item<'d>) -> Vec<(ListenAddress, SpannedStr<'d>)> {
    let of_tables = item.tables().into_iter().filter_map(|table| table.given("address"));
    let of_tables = of_tables.flat_map(|address| written_addresses(&address));
    let words = item.words().into_iter().filter_map(|word| Some((parse_address(word.text).ok()?, word)));
    words.chain(of_tables).collect()
}

fn read_mode(word: &SpannedStr, report: &mut Report) -> Option<u32> {
    let is_octal = !word.text.is_empty() && word.text.len() <= 4 && word.text.bytes().all(|byte| byte.is_ascii_digit());
    let mode = u32::from_str_radix(word.text, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
    let Some(mode) = mode else {
        let message = format!("{} is not a mode of three octal digits", quoted(word.text));
        return report.reject(word.span.clone(), message, "write `mode = \"0660\"`: user and group can connect");
    };
    if mode & 0o222 == 0 {
        let message = format!(
            "no client could connect with the mode {}: connecting requires write permission",
            quoted(word.text)
        );
        return report.reject(word.span.clone(), message, "write `mode = \"0660\"`: user and group can connect");
    }
    Some(mode)
}

fn name_or_number() -> Shape {
    Shape::AnyOf(vec![Shape::Text("name"), Shape::Integer(0..=u64::from(u32::MAX - 1))])
}

/// Reads the number of a user or group, or its name, which a file of this machine has.
fn read_id(item: &Item, (what, file): (&str, &str), report: &mut Report) -> Option<u32> {
    let largest = u64::from(u32::MAX - 1);
    if let DeValue::Integer(_) = item.value {
        return item.integer(0..=largest, report).and_then(|number| u32::try_from(number).ok());
    }
    let SpannedStr { text: name, span } = item.string("\"www-data\"", report)?;
    if let Ok(number) = name.parse::<u32>()
        && u64::from(number) <= largest
    {
        return Some(number);
    }
    let names = report.read_file(file, &span)?;
    let names = String::from_utf8_lossy(&names);
    let found = names.lines().find_map(|line| {
        let (known, rest) = line.split_once(':')?;
        (known == name).then(|| rest.split(':').nth(1)?.parse().ok()).flatten()
    });
    found.or_else(|| {
        let message = format!("there is no {what} {} in `{file}`", quoted(name));
        report.reject(span, message, format!("make the {what}, or write its number"))
    })
}

pub fn parse_address(text: &str) -> Parsed<ListenAddress> {
    let is = |what: &str| format!("{} {what}", quoted(text));
    if let Some(path) = text.strip_prefix("unix:") {
        return parse_socket_path(text, path, "unix:").map(|path| ListenAddress::Unix(path.into()));
    }
    let parsed = text.parse::<SocketAddr>();
    let address = parsed.map_err(|_error| (is("is not an address to listen on"), address_fix(text)))?;
    if let IpAddr::V6(ip) = address.ip()
        && let Some(mapped) = ip.to_ipv4_mapped()
    {
        let fix = format!("write `\"{mapped}:{}\"`", address.port());
        return Err((is("is an IPv4 address in IPv6 notation"), fix));
    }
    Ok(ListenAddress::Tcp(address))
}

/// The fix for a text that is not an address: the most likely intended address.
fn address_fix(text: &str) -> String {
    let text = text.trim();
    if text.starts_with('/') {
        return format!("write `\"unix:{text}\"`");
    }
    let bare = text.split_once("://").map_or(text, |(_, rest)| rest);
    let bare = bare.split('/').next().unwrap_or(bare);
    let (host, port) = bare.rsplit_once(':').unwrap_or(("", bare));
    // `::1:8080` parses as an IPv6 address, but most likely a port was intended.
    if let (Ok(ip), 2.., Ok(port)) = (host.parse::<Ipv6Addr>(), port.len(), port.parse::<u16>()) {
        return format!("put an IPv6 address in brackets: write `\"[{ip}]:{port}\"`");
    }
    if let Ok(ip) = bare.trim_matches(['[', ']']).parse::<IpAddr>() {
        return format!("add a port: write `\"{}\"`", SocketAddr::new(ip, 8080));
    }
    if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
        return format!("write an IP address and a port, such as `{EXAMPLE}`");
    }
    let Ok(port) = port.parse::<u16>() else {
        return String::from("a port is at most `65535`");
    };
    match host {
        "" | "*" => format!("write `\"0.0.0.0:{port}\"` for all addresses, or `\"127.0.0.1:{port}\"` for this machine"),
        "localhost" => format!("write `\"127.0.0.1:{port}\"`; names are not resolved"),
        _ => match host.trim_matches(['[', ']']).parse::<IpAddr>() {
            Ok(ip) => format!("write `\"{}\"`", SocketAddr::new(ip, port)),
            Err(_) => {
                format!("write the IP address of a network interface, such as `\"0.0.0.0:{port}\"` for all of them")
            }
        },
    }
}
