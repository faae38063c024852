//! The requests to an authority: one connection each, so that names are resolved again.

use std::error::Error as StdError;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use transom_config::acme::Acme;

/// Limit for one request.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Limit of a response: certificate chains have a few KiB.
const RESPONSE_MAX_BYTES: usize = 256 * 1024;

type BoxedError = Box<dyn StdError + Send + Sync>;

pub struct HttpsClient {
    /// `None`: the directory is on loopback, without TLS.
    tls: Option<Arc<ClientConfig>>,
}

impl HttpsClient {
    pub fn new(acme: &Acme) -> HttpsClient {
        HttpsClient { tls: acme.tls.as_ref().map(|tls| tls.with_alpn(&[b"http/1.1"])) }
    }
}

impl HttpClient for HttpsClient {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let tls = self.tls.clone();
        Box::pin(async move {
            let url = request.uri().clone();
            let sent = timeout(TIMEOUT, send(request, tls)).await;
            let sent = sent.unwrap_or_else(|_elapsed| Err("no response in time".into()));
            sent.map(BytesResponse::from).map_err(|error| Error::Other(format!("{url}: {error}").into()))
        })
    }
}

async fn send(
    request: Request<BodyWrapper<Bytes>>,
    tls: Option<Arc<ClientConfig>>,
) -> Result<Response<Full<Bytes>>, BoxedError> {
    let url = request.uri();
    let host = url.host().ok_or("the URL has no host")?.trim_matches(['[', ']']).to_owned();
    let is_tls = url.scheme_str() == Some("https");
    let port = url.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let stream = TcpStream::connect((host.as_str(), port)).await?;
    match tls {
        Some(tls) if is_tls => {
            let name = ServerName::try_from(host)?;
            exchange(TlsConnector::from(tls).connect(name, stream).await?, request).await
        }
        None if !is_tls => exchange(stream, request).await,
        _ => Err(Box::new(io::Error::other("some resources of the authority use TLS, and some do not"))),
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<BodyWrapper<Bytes>>,
) -> Result<Response<Full<Bytes>>, BoxedError> {
    let (mut parts, body) = request.into_parts();
    let authority = parts.uri.authority().ok_or("the URL has no host")?;
    parts.headers.insert(header::HOST, HeaderValue::from_str(authority.as_str())?);
    let target = parts.uri.path_and_query().cloned().ok_or("the URL has no path")?;
    parts.uri = Uri::from(target);
    let body = Full::new(body.collect().await?.to_bytes());
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let response = sender.send_request(Request::from_parts(parts, body)).await?;
    let (parts, body) = response.into_parts();
    let body = Limited::new(body, RESPONSE_MAX_BYTES).collect().await?.to_bytes();
    connection.abort();
    Ok(Response::from_parts(parts, Full::new(body)))
}
