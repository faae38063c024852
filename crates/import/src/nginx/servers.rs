//! `server` blocks: which of them the gateway can serve, their addresses, names and certificates.
//!
//! Routes apply to all addresses of the gateway. So servers are taken that share one address; others would become reachable where
//! nginx does not serve them.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;

use super::locations::ServerRoutes;
use super::redirects::{Redirect, redirects};
use super::syntax::{Directive, Fate};
use super::{Importer, Scope, heading, note_unread_at};
use crate::gateway::{Section, Value};
use crate::source::{Effect, ImportError};

/// Where the gateway listens while the certificates cannot be read.
const LOOPBACK: &str = "127.0.0.1:8080";

/// A `listen` directive.
struct Listen<'d> {
    address: String,
    is_tls: bool,
    is_default: bool,
    directive: Option<&'d Directive>,
}

pub struct Server<'d> {
    pub block: &'d Directive,
    pub scope: Scope<'d>,
    pub names: Vec<String>,
    listens: Vec<Listen<'d>>,
}

impl Server<'_> {
    /// A word for rules of this server.
    pub fn label(&self) -> String {
        let name = self.names.first().map_or("default", String::as_str);
        name.trim_start_matches("*.").to_owned()
    }

    /// Those of a block of the server.
    pub fn redirects<'d>(&self, scope: &Scope<'d>) -> Vec<Redirect<'d>> {
        redirects(scope.levels.last().map_or(&[], Vec::as_slice), self.names.first().map(String::as_str))
    }

    fn listens_at(&self, address: &str, is_tls: bool) -> bool {
        self.listens.iter().any(|listen| listen.address == address && listen.is_tls == is_tls)
    }

    fn has(&self, is_tls: bool) -> bool {
        self.listens.iter().any(|listen| listen.is_tls == is_tls)
    }
}

/// An address with its port, or the path of a Unix socket, as the gateway has it; `None` for others.
fn address(text: &str) -> Option<String> {
    if text.starts_with("unix:") {
        return Some(text.to_owned());
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(format!("0.0.0.0:{text}"));
    }
    let text = text.replace('*', "0.0.0.0").replace("localhost", "127.0.0.1");
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let text = if has_port { text } else { format!("{text}:80") };
    text.parse::<SocketAddr>().is_ok().then_some(text)
}

impl<'d> Importer<'d> {
    pub(super) fn import_servers(&mut self) -> Result<(), ImportError> {
        let http = self.http.clone();
        let blocks: Vec<&'d Directive> =
            http.levels[0].iter().copied().filter(|directive| directive.name == "server").collect();
        let servers: Vec<Server<'d>> = blocks.into_iter().map(|block| self.server(block)).collect();
        if servers.is_empty() {
            let file = self.http.levels[0].first().map(|directive| directive.position.clone());
            let message = "there is no `server` block";
            let fix = "name the file with the servers, or all files, such as nginx.conf";
            return Err(ImportError { position: file, message: message.to_owned(), fix: fix.to_owned() });
        }
        let tls = self.listen_with_tls(&servers);
        let schemes = match tls {
            Tls::None => vec![(None, false)],
            Tls::Unreadable => vec![(None, true)],
            Tls::Ready => {
                let differ = servers.iter().any(|server| server.has(true) != server.has(false));
                match (servers.iter().any(|server| server.has(false)), differ) {
                    (true, true) => vec![(Some("http"), false), (Some("https"), true)],
                    (true, false) => vec![(None, false)],
                    (false, _) => vec![(None, true)],
                }
            }
        };
        for (scheme, is_tls) in schemes {
            self.import_servers_of(&servers, scheme, is_tls, matches!(tls, Tls::Unreadable));
        }
        Ok(())
    }

    fn server(&mut self, block: &'d Directive) -> Server<'d> {
        let scope = self.http.inner(block.children());
        let mut listens = Vec::new();
        let is_on = |name: &str| scope.own(name).is_some_and(|directive| directive.argument() == "on");
        let all_tls = is_on("ssl");
        for directive in block.children().iter().filter(|directive| directive.name == "listen") {
            let Some(address) = address(directive.argument()) else {
                self.note(Effect::LeftOut, directive, "it is no address with a port");
                continue;
            };
            if directive.has("quic") {
                self.note(Effect::LeftOut, directive, "HTTP/3 is not translated");
                continue;
            }
            let is_default = directive.has("default_server") || directive.has("default");
            let is_tls = directive.has("ssl") || all_tls;
            listens.push(Listen { address, is_tls, is_default, directive: Some(directive) });
        }
        if !block.children().iter().any(|directive| directive.name == "listen") {
            listens.push(Listen {
                address: "0.0.0.0:80".to_owned(),
                is_tls: all_tls,
                is_default: false,
                directive: None,
            });
        }
        let mut names = Vec::new();
        for directive in block.children().iter().filter(|directive| directive.name == "server_name") {
            directive.mark(Fate::Translated);
            for name in &directive.arguments {
                match name.as_str() {
                    "_" | "" | "\"\"" => {}
                    name if name.starts_with('~') || name.ends_with(".*") => {
                        let why = format!("the name `{name}` cannot be expressed");
                        self.note(Effect::LeftOut, directive, &why);
                    }
                    name => match name.strip_prefix('.') {
                        Some(domain) => names.extend([domain.to_lowercase(), format!("*.{}", domain.to_lowercase())]),
                        None => names.push(name.to_lowercase()),
                    },
                }
            }
        }
        Server { block, scope, names, listens }
    }

    /// The servers at the address that most of them share.
    fn import_servers_of(&mut self, all: &[Server<'d>], scheme: Option<&'static str>, is_tls: bool, loopback: bool) {
        let mut addresses: BTreeMap<&str, usize> = BTreeMap::new();
        let listens = all.iter().flat_map(|server| &server.listens).filter(|listen| listen.is_tls == is_tls);
        listens.for_each(|listen| *addresses.entry(&listen.address).or_default() += 1);
        let most = addresses.values().max().copied().unwrap_or(0);
        let first = all.iter().flat_map(|server| &server.listens);
        let Some(main) =
            first.filter(|listen| listen.is_tls == is_tls).find(|listen| addresses[&*listen.address] == most)
        else {
            return;
        };
        let main = main.address.clone();
        let (servers, others): (Vec<&Server<'d>>, Vec<&Server<'d>>) =
            all.iter().partition(|server| server.listens_at(&main, is_tls));
        for server in others {
            if scheme.is_none() || !server.has(!is_tls) {
                let why = match server.has(is_tls) {
                    true => format!(
                        "routes apply to all addresses: import the servers at other addresses than {main} alone"
                    ),
                    false => "the certificates cannot be read here, and without them its redirect would have no end"
                        .to_owned(),
                };
                self.note(Effect::LeftOut, server.block, &why);
            }
        }
        match is_tls && loopback {
            true => {
                for directive in servers.iter().flat_map(|server| &server.listens).filter_map(|listen| listen.directive)
                {
                    let why = format!("without the certificates, the gateway listens on {LOOPBACK}");
                    self.note(Effect::LeftOut, directive, &why);
                }
                self.gateway.listen.set("http", LOOPBACK);
            }
            false => self.add_addresses(&servers, is_tls),
        }
        // All servers have both kinds of addresses.
        if scheme.is_none() && !is_tls && !self.gateway.https.is_empty() {
            self.add_addresses(&servers, true);
        }
        let is_default = |server: &&&Server<'d>| {
            server.listens.iter().any(|listen| listen.address == main && listen.is_tls == is_tls && listen.is_default)
        };
        let default = servers.iter().position(|server| is_default(&server)).unwrap_or(0);
        let count = servers.len();
        let mut taken: HashSet<&String> = HashSet::new();
        for (index, server) in servers.iter().enumerate() {
            server.block.mark(Fate::Translated);
            let is_new = |name: &&String| !taken.contains(name);
            let names: Vec<String> = server.names.iter().filter(is_new).cloned().collect();
            let is_repeated = names.is_empty() && !server.names.is_empty();
            taken.extend(&server.names);
            let hosts = if index == default { Vec::new() } else { names };
            if index != default && is_repeated {
                self.note(Effect::LeftOut, server.block, "nginx ignores it: other servers have its names");
                continue;
            }
            if index != default && hosts.is_empty() {
                self.note(Effect::LeftOut, server.block, "it has no name that the gateway can match");
                continue;
            }
            self.import_server(server, &ServerRoutes { hosts, scheme, needs_fallback: index != default && count > 1 });
        }
    }

    /// Listens at the addresses that all servers have.
    fn add_addresses(&mut self, servers: &[&Server<'d>], is_tls: bool) {
        let mut addresses: Vec<String> = Vec::new();
        for listen in servers.iter().flat_map(|server| &server.listens).filter(|listen| listen.is_tls == is_tls) {
            if !servers.iter().all(|server| server.listens_at(&listen.address, is_tls)) {
                if let Some(directive) = listen.directive {
                    let why = "routes apply to all addresses, and not all servers have this one";
                    self.note(Effect::LeftOut, directive, why);
                }
                continue;
            }
            listen.directive.iter().for_each(|directive| directive.mark(Fate::Translated));
            if !addresses.contains(&listen.address) {
                addresses.push(listen.address.clone());
            }
        }
        if addresses.is_empty() {
            return;
        }
        let addresses = crate::gateway::one_or_list(addresses);
        match is_tls {
            false => self.gateway.listen.set("http", addresses),
            true => self
                .gateway
                .https
                .iter_mut()
                .for_each(|https| https.settings.insert(0, ("address".to_owned(), addresses.clone()))),
        }
    }

    fn import_server(&mut self, server: &Server<'d>, routes: &ServerRoutes) {
        let title = match server.names.is_empty() {
            true => "Server".to_owned(),
            false => format!("Server {}", server.names.join(", ")),
        };
        let before = self.gateway.routes.len();
        let mut section = Section::default();
        section.comment(heading(&title, &server.block.position));
        self.add_locations(server, routes);
        note_unread_at(server.block.children(), &mut self.gateway, &mut section);
        if let Some(first) = self.gateway.routes.get_mut(before) {
            section.comments.append(&mut first.section.comments);
            first.section.comments = section.comments;
        }
    }

    /// The section for TLS, without its addresses.
    fn listen_with_tls(&mut self, servers: &[Server<'d>]) -> Tls {
        let tls: Vec<&Server<'d>> = servers.iter().filter(|server| server.has(true)).collect();
        let Some(first) =
            tls.iter().find(|server| server.listens.iter().any(|listen| listen.is_default)).or(tls.first())
        else {
            return Tls::None;
        };
        let mut section = Section::default();
        let mut pairs: Vec<(String, String)> = Vec::new();
        let mut unreadable = Vec::new();
        for server in [first].into_iter().chain(tls.iter()) {
            let (certificates, keys) =
                (server.scope.all(&["ssl_certificate"]), server.scope.all(&["ssl_certificate_key"]));
            for (certificate, key) in certificates.into_iter().zip(keys) {
                certificate.mark(Fate::Translated);
                key.mark(Fate::Translated);
                let pair = [certificate, key].map(|directive| self.path_text(directive.argument()));
                for (directive, path) in [certificate, key].into_iter().zip(&pair) {
                    if self.readable_file(path).is_none() {
                        unreadable.push(directive);
                    }
                }
                let [certificate, key] = pair;
                if !pairs.contains(&(certificate.clone(), key.clone())) {
                    pairs.push((certificate, key));
                }
            }
        }
        let mut pairs = pairs.into_iter();
        if let Some((certificate, key)) = pairs.next() {
            section.set("certificate", certificate);
            section.set("private_key", key);
        }
        let further: Vec<Value> = pairs
            .map(|(certificate, key)| {
                crate::gateway::table([("certificate", certificate.into()), ("private_key", key.into())])
            })
            .collect();
        if !further.is_empty() {
            section.set("certificates", Value::List(further));
        }
        self.set_client_certificates(&mut section, first, &mut unreadable);
        self.set_tls_versions(&mut section, first);
        if section.get("certificate").is_some() && unreadable.is_empty() {
            self.gateway.https.push(section);
            return Tls::Ready;
        }
        let mut comments = vec![
            format!(
                "The certificates cannot be read here, so the gateway listens on {LOOPBACK} without TLS. Once they are in \
                 place, write:"
            ),
            "[listen.https]".to_owned(),
        ];
        let addresses: Vec<&str> =
            first.listens.iter().filter(|listen| listen.is_tls).map(|listen| listen.address.as_str()).collect();
        comments.push(format!("address = \"{}\"", addresses.first().unwrap_or(&"0.0.0.0:443")));
        for (name, value) in &section.settings {
            if let Value::Text(text) = value {
                comments.push(format!("{name} = \"{text}\""));
            }
        }
        self.gateway.https.push(Section { comments, ..Section::default() });
        for directive in unreadable {
            self.note(Effect::LeftOut, directive, "the file cannot be read here");
        }
        Tls::Unreadable
    }

    fn set_client_certificates(
        &mut self,
        section: &mut Section,
        server: &Server<'d>,
        unreadable: &mut Vec<&'d Directive>,
    ) {
        let verify = server.scope.one("ssl_verify_client");
        let Some(verify) = verify.filter(|verify| ["on", "optional"].contains(&verify.argument())) else { return };
        let Some(authority) = server.scope.one("ssl_client_certificate") else { return };
        let path = self.path_text(authority.argument());
        if self.readable_file(&path).is_none() {
            unreadable.push(authority);
        }
        section.set("client_ca", path);
        if verify.argument() == "optional" {
            section.set("client_auth", "optional");
        }
        for directive in [verify, authority].into_iter().chain(server.scope.one("ssl_verify_depth")) {
            directive.mark(Fate::Translated);
        }
    }

    fn set_tls_versions(&mut self, section: &mut Section, server: &Server<'d>) {
        let Some(protocols) = server.scope.one("ssl_protocols") else { return };
        protocols.mark(Fate::Translated);
        if !protocols.has("TLSv1.2") {
            section.set("min_version", "1.3");
        }
        if ["SSLv2", "SSLv3", "TLSv1", "TLSv1.1"].iter().any(|old| protocols.has(old)) {
            self.note_at(section, Effect::Stricter, protocols, "the gateway supports TLS 1.2 and 1.3");
        }
    }

    /// A path of a file, which nginx reads from its folder.
    fn path_text(&self, path: &str) -> String {
        if path.is_empty() || Path::new(path).is_absolute() {
            return path.to_owned();
        }
        let path = self.folder.join(path);
        std::path::absolute(&path).unwrap_or(path).display().to_string()
    }

    /// The path of a file that can be read here.
    pub(super) fn readable_file(&self, path: &str) -> Option<String> {
        let path = self.path_text(path);
        (self.files.read)(Path::new(&path)).is_ok().then_some(path)
    }
}

/// Whether the gateway can serve TLS.
#[derive(Clone, Copy)]
enum Tls {
    None,
    Ready,
    /// There are servers with TLS, whose certificates cannot be read here.
    Unreadable,
}
