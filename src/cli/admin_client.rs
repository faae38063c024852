//! Sends a request to the admin address of a running gateway.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONNECTION, HOST, HeaderName};
use http::{HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, LocalOptions};

use super::{Exit, Failure, read_config};
use crate::file_watch::FileWatch;
use crate::io_stream::StreamSocket;
use transom_config::Config;
use transom_config::listen_address::{ListenAddress, ListenSocket};

/// For the whole exchange with the gateway.
const TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_MAX_BYTES: usize = 16 * 1024 * 1024;
/// Items of a list that are asked for at once.
const PAGE: usize = 1000;

/// The gateway that a command asks.
#[derive(clap::Args)]
pub struct AdminAddress {
    /// Admin address of the gateway, instead of that of the configuration file: `HOST:PORT` or `unix:/PATH`
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    admin: Option<String>,
}

/// The token that a command sends.
#[derive(clap::Args)]
pub struct TokenFile {
    /// File with a token of the admin address, instead of one that the configuration names
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl TokenFile {
    /// The token: of the file, or of a configuration, where that of `token_file` has every right.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn read(&self, config: Option<&Config>) -> Result<Option<String>, String> {
        match &self.token_file {
            Some(file) => std::fs::read_to_string(file)
                .map(|token| Some(token.trim_ascii().to_owned()))
                .map_err(|error| format!("cannot read `{}`: {error}", file.display())),
            None => {
                Ok(config.and_then(|config| config.admin.known_tokens().next()).map(|token| token.secret.0.clone()))
            }
        }
    }
}

/// The gateway that is asked about data which are in no file.
#[derive(clap::Args)]
pub struct AskedGateway {
    #[command(flatten)]
    pub address: AdminAddress,
    #[command(flatten)]
    pub token: TokenFile,
}

impl AskedGateway {
    /// As [`AdminAddress::find`].
    pub fn find(&self, config: &Path) -> Result<RunningGateway, Failure> {
        let found = self.address.find(config, &self.token);
        found.map_err(|message| Failure(Exit::Failed, format!("{message}\n")))
    }
}

/// A gateway that may run, and the token for it.
pub struct RunningGateway {
    /// `HOST:PORT` or `unix:/PATH`.
    pub address: String,
    pub token: Option<String>,
}

/// A request about data that a gateway has.
pub struct Question<'q> {
    pub method: Method,
    pub target: &'q str,
    /// A precondition.
    pub field: Option<(HeaderName, &'q str)>,
    /// Null for none.
    pub body: Value,
}

impl<'q> Question<'q> {
    pub fn get(target: &'q str) -> Question<'q> {
        Question { method: Method::GET, target, field: None, body: Value::Null }
    }
}

impl RunningGateway {
    /// Asks, and returns the JSON of a successful response, with its fields.
    ///
    /// # Errors
    ///
    /// No gateway runs there, or it responds with a problem.
    pub fn ask(&self, question: Question) -> Result<Response<Value>, Failure> {
        let response = self.respond_to(question)?;
        self.success(response.ok_or_else(|| self.not_running())?)
    }

    /// The response of any status; `None` if nothing listens at the address.
    pub fn respond_to(&self, question: Question) -> Result<Option<Response<String>>, Failure> {
        let failed = |reason: &str| self.failure(Exit::Failed, reason);
        let Question { method, target, field, body } = question;
        let body = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let mut request = Request::builder().method(method).uri(target);
        if let Some((name, value)) = field {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(body)).map_err(|error| failed(&error.to_string()))?;
        let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        let runtime = runtime.map_err(|error| failed(&error.to_string()))?;
        runtime.block_on(self.respond(request)).map_err(|reason| failed(&reason))
    }

    /// The JSON of a response, unless it is a problem.
    pub fn success(&self, response: Response<String>) -> Result<Response<Value>, Failure> {
        if !response.status().is_success() {
            // As for an edit of a file that is refused.
            let exit = match response.status().as_u16() {
                400 | 404 | 409 | 412 | 422 => Exit::BadConfig,
                _ => Exit::Failed,
            };
            return Err(self.failure(exit, &problem_of(&response)));
        }
        let (parts, body) = response.into_parts();
        let value = if body.is_empty() { Ok(Value::Null) } else { serde_json::from_str(&body) };
        let value = value.map_err(|error| self.failure(Exit::Failed, &error.to_string()))?;
        Ok(Response::from_parts(parts, value))
    }

    /// The items of a list that is returned in pages; `None` if nothing listens at the address. `filters`: `&NAME=VALUE` each.
    pub fn pages(&self, path: &str, list: &str, filters: &str) -> Result<Option<Vec<Value>>, Failure> {
        let (mut items, mut after) = (Vec::new(), String::new());
        loop {
            let response = self.respond_to(Question::get(&format!("{path}?limit={PAGE}{filters}{after}")))?;
            let Some(response) = response else { return Ok(None) };
            let mut page = self.success(response)?.into_body();
            items.append(page[list].as_array_mut().unwrap_or(&mut Vec::new()));
            let Some(next) = page["next"].as_str() else { return Ok(Some(items)) };
            after = format!("&after={}", encoded(next));
        }
    }

    pub fn not_running(&self) -> Failure {
        self.failure(Exit::Failed, "no gateway runs there")
    }

    fn failure(&self, exit: Exit, reason: &str) -> Failure {
        Failure(exit, format!("transom: http://{}: {reason}\n", self.address))
    }
}

/// Percent-encodes a segment of a path or a value of a query.
pub fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// The reason that a response which is no success gives.
fn problem_of(response: &Response<String>) -> String {
    let problem: Value = serde_json::from_str(response.body()).unwrap_or_default();
    problem["detail"].as_str().map_or_else(|| response.status().to_string(), str::to_owned)
}

/// Accepts the URL of the dashboard, too.
fn parse_address(text: &str) -> Result<String, String> {
    let address = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    if address.starts_with("unix:/") {
        return Ok(address.to_owned());
    }
    let port =
        address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).and_then(|(_, port)| port.parse::<u16>().ok());
    match port {
        Some(1..) if !address.contains(['/', '@', ' ']) => Ok(address.to_owned()),
        _ => Err(String::from(
            "write `HOST:PORT`, such as `127.0.0.1:9900`, or `unix:/PATH`; the admin address has no TLS",
        )),
    }
}

impl AdminAddress {
    /// The address that the command names.
    pub fn given(&self) -> Option<&str> {
        self.admin.as_deref()
    }

    /// Reads the configuration only if the command names no address.
    ///
    /// # Errors
    ///
    /// The configuration is invalid, or has no admin address, or the token cannot be read.
    pub fn find(&self, config: &Path, token: &TokenFile) -> Result<RunningGateway, String> {
        let read = self.read_config(config)?;
        let address = self.address(config, read.as_ref(), admin_address)?;
        let token = token.read(read.as_ref()).map_err(|message| format!("transom: {message}"))?;
        Ok(RunningGateway { address, token })
    }

    /// An address that serves `/readyz`, which needs no token.
    pub fn find_readiness(&self, config: &Path) -> Result<RunningGateway, String> {
        let address = |config: &Config| admin_address(config).or_else(|| metrics_address(config));
        let address = self.address(config, self.read_config(config)?.as_ref(), address)?;
        Ok(RunningGateway { address, token: None })
    }

    fn read_config(&self, config: &Path) -> Result<Option<Config>, String> {
        if self.admin.is_some() {
            return Ok(None);
        }
        let read = read_config(config, &mut FileWatch::default());
        read.map(Some).map_err(|invalid| invalid.to_string().trim_end().to_owned())
    }

    fn address(
        &self,
        file: &Path,
        config: Option<&Config>,
        address: impl Fn(&Config) -> Option<String>,
    ) -> Result<String, String> {
        self.admin.clone().or_else(|| address(config?)).ok_or_else(|| {
            let file = file.display();
            format!("transom: {file} sets no admin address with a port\n  fix: name it with `--admin HOST:PORT`")
        })
    }
}

/// The address by which this machine reaches the admin address; `None` if the configuration does not tell it: it has none,
/// or one with port 0.
pub fn admin_address(config: &Config) -> Option<String> {
    local_address(config.listen.admin.as_ref()?)
}

/// As [`admin_address`], of the first address that serves only metrics.
fn metrics_address(config: &Config) -> Option<String> {
    config.listen.metrics.iter().find_map(local_address)
}

fn local_address(socket: &ListenSocket) -> Option<String> {
    let mut address = match &socket.address {
        ListenAddress::Tcp(address) => *address,
        unix @ ListenAddress::Unix(_) => return Some(unix.to_string()),
    };
    if address.port() == 0 {
        return None;
    }
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    Some(address.to_string())
}

impl RunningGateway {
    /// Sends a request. Returns the body of a successful response, or `None` if nothing listens at the address.
    ///
    /// # Errors
    ///
    /// The reason why there is no successful response: of the gateway, if it responds with a problem.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Option<String>, String> {
        match self.respond(request).await? {
            Some(response) if !response.status().is_success() => Err(problem_of(&response)),
            response => Ok(response.map(Response::into_body)),
        }
    }

    async fn respond(&self, mut request: Request<Full<Bytes>>) -> Result<Option<Response<String>>, String> {
        let field = |value: &str| HeaderValue::from_str(value).map_err(|error| error.to_string());
        let headers = request.headers_mut();
        let socket = self.address.strip_prefix("unix:");
        headers.insert(HOST, field(if socket.is_some() { "localhost" } else { &self.address })?);
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, field(&format!("Bearer {token}"))?);
        }
        let connect = async {
            match socket {
                Some(path) => UnixStream::connect(path).await.map(StreamSocket::Unix),
                None => TcpStream::connect(&self.address).await.map(StreamSocket::Tcp),
            }
        };
        let is_absent =
            |kind| kind == io::ErrorKind::ConnectionRefused || (socket.is_some() && kind == io::ErrorKind::NotFound);
        let stream = match tokio::time::timeout(TIMEOUT, connect).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) if is_absent(error.kind()) => return Ok(None),
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_elapsed) => return Err(String::from("it does not accept the connection")),
        };
        match tokio::time::timeout(TIMEOUT, exchange(stream, request)).await {
            Ok(exchanged) => exchanged.map(Some),
            Err(_elapsed) => Err(String::from("it does not respond")),
        }
    }
}

async fn exchange(stream: StreamSocket, request: Request<Full<Bytes>>) -> Result<Response<String>, String> {
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
    let respond = async {
        let (parts, body) = sender.send_request(request).await.map_err(|error| error.to_string())?.into_parts();
        let body = Limited::new(body, RESPONSE_MAX_BYTES).collect().await.map_err(|error| error.to_string())?;
        Ok(Response::from_parts(parts, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
    };
    tokio::pin!(respond);
    tokio::select! {
        responded = &mut respond => responded,
        _ = connection => respond.await,
    }
}
