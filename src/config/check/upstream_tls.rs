//! TLS settings for connections to upstream and Redis servers: trusted authorities, server name, client certificate.
//!
//! The client configuration of rustls is built here, so that an unusable certificate is reported at the start rather
//! than at the first request. Verification cannot be disabled: a self-signed certificate of a server is trusted by
//! naming it in `ca`. Messages contain nothing of a private key.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use sha2::{Digest, Sha256};

use super::values::read_named_file;
use crate::config::ReadFile;
use crate::config::client_tls::{ClientTls, PinningVerifier};
use crate::config::diagnostics::{Report, Span, quoted};
use crate::config::toml_reader::{Item, Table};

/// The root certificates of the system, loaded once per configuration, and only if an upstream needs them.
#[derive(Default)]
pub struct SystemRoots(Option<Arc<RootCertStore>>);

impl SystemRoots {
    /// `span` is the position of the setting that needs the certificates.
    fn get(&mut self, span: Span, report: &mut Report) -> Arc<RootCertStore> {
        if report.count() > 0 {
            // The configuration is already rejected, so hundreds of files need not be read.
            return Arc::new(RootCertStore::empty());
        }
        let roots = self.0.get_or_insert_with(|| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            Arc::new(roots)
        });
        if roots.is_empty() {
            let fix =
                "install the package `ca-certificates`, or add `ca = \"FILE\"` with the certificate of the authority";
            report.problem(span, "the system has no root certificates to verify a server with", fix);
        }
        Arc::clone(roots)
    }
}

/// Reads the table `tls` of an upstream. `span` is the position of the servers, for a problem without the table.
pub fn read_tls(
    item: Option<&Item>,
    span: Span,
    files: ReadFile,
    roots: &mut SystemRoots,
    report: &mut Report,
) -> Option<ClientTls> {
    let Some(item) = item else { return TlsSettings::default().read(span, &[], files, roots, report) };
    let mut table: Table = item.table("`tls`", "write `tls = { ca = \"FILE\" }`", report)?;
    let settings = TlsSettings {
        ca: table.get("ca"),
        server_name: table.get("server_name"),
        certificate: table.get("certificate"),
        private_key: table.get("private_key"),
    };
    let misspelled = table.finish(report);
    settings.read(item.span.clone(), &misspelled, files, roots, report)
}

/// The settings of the gateway as a TLS client.
#[derive(Default)]
pub struct TlsSettings<'d> {
    pub ca: Option<Item<'d>>,
    pub server_name: Option<Item<'d>>,
    pub certificate: Option<Item<'d>>,
    pub private_key: Option<Item<'d>>,
}

impl TlsSettings<'_> {
    /// `span` is the position of the setting that requires TLS. `misspelled` has the settings that unknown keys were
    /// probably meant to be.
    pub fn read(
        &self,
        span: Span,
        misspelled: &[&str],
        files: ReadFile,
        roots: &mut SystemRoots,
        report: &mut Report,
    ) -> Option<ClientTls> {
        let mut fingerprint = Sha256::new();
        let anchors = match &self.ca {
            Some(item) => read_ca_file(item, files, &mut fingerprint, report),
            None => Some((roots.get(span, report), Vec::new())),
        };
        let name = match &self.server_name {
            Some(item) => Some(read_server_name(item, &mut fingerprint, report)?),
            None => None,
        };
        let identity = match (&self.certificate, &self.private_key) {
            (None, None) => None,
            (Some(certificate), Some(private_key)) => {
                Some(read_identity(certificate, private_key, files, &mut fingerprint, report)?)
            }
            (Some(one), None) | (None, Some(one)) => {
                let other = if one.key == "certificate" { "private_key" } else { "certificate" };
                if !misspelled.contains(&other) {
                    let message = format!("`{}` is given without `{other}`", one.key);
                    report.missing(one.key_span.clone(), message, format!("write `{other} = \"FILE\"` as well"));
                }
                return None;
            }
        };
        let (roots, pinned) = anchors?;
        let builder = verifying_config_builder(roots, pinned)?;
        let client = match identity {
            None => builder.with_no_client_auth(),
            Some((chain, key, span)) => match builder.with_client_auth_cert(chain, key) {
                Ok(client) => client,
                Err(error) => {
                    let message = format!("the certificate and the private key cannot be used together: {error}");
                    report.problem(span, message, "name the private key of the certificate");
                    return None;
                }
            },
        };
        Some(ClientTls::new(client, name, fingerprint.finalize().into()))
    }
}

type Builder = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

/// `pinned` are the certificates of `ca`, which are also accepted as the certificate of a server.
fn verifying_config_builder(roots: Arc<RootCertStore>, pinned: Vec<CertificateDer<'static>>) -> Option<Builder> {
    let provider = Arc::new(default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    // Building cannot fail for a valid configuration: the provider supports both TLS versions, and `roots` is only
    // empty after a problem.
    let builder = builder.with_safe_default_protocol_versions().ok()?;
    let webpki = WebPkiServerVerifier::builder_with_provider(roots, provider).build().ok()?;
    Some(builder.dangerous().with_custom_certificate_verifier(Arc::new(PinningVerifier { webpki, pinned })))
}

/// The root certificates, and the certificates that a server may present itself.
type TrustAnchors = (Arc<RootCertStore>, Vec<CertificateDer<'static>>);

fn read_ca_file(item: &Item, files: ReadFile, fingerprint: &mut Sha256, report: &mut Report) -> Option<TrustAnchors> {
    let (name, bytes) = read_file(item, "\"ca.pem\"", files, fingerprint, report)?;
    let mut roots = RootCertStore::empty();
    let pinned = parse_certificates(item, &name, &bytes, report)?;
    for certificate in &pinned {
        if let Err(error) = roots.add(certificate.clone()) {
            let message = format!("{name} has a certificate that cannot be used as an authority: {error}");
            report.problem(item.span.clone(), message, "name a PEM file with certificates of authorities");
            return None;
        }
    }
    Some((Arc::new(roots), pinned))
}

/// Reads the client certificate chain and its private key, with the position of the key.
fn read_identity(
    certificate: &Item,
    private_key: &Item,
    files: ReadFile,
    fingerprint: &mut Sha256,
    report: &mut Report,
) -> Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, Span)> {
    let chain = read_file(certificate, "\"client.pem\"", files, fingerprint, report);
    let chain = chain.and_then(|(name, bytes)| parse_certificates(certificate, &name, &bytes, report));
    let (name, bytes) = read_file(private_key, "\"client.key\"", files, fingerprint, report)?;
    let Ok(key) = PrivateKeyDer::from_pem_slice(&bytes) else {
        let message = format!("{name} has no PEM private key");
        let fix = "name a file with `-----BEGIN PRIVATE KEY-----`; an encrypted key is not supported";
        report.problem(private_key.span.clone(), message, fix);
        return None;
    };
    Some((chain?, key, private_key.span.clone()))
}

fn parse_certificates(
    item: &Item,
    name: &str,
    bytes: &[u8],
    report: &mut Report,
) -> Option<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let message = match read {
        Ok(certificates) if !certificates.is_empty() => return Some(certificates),
        Ok(_) => format!("{name} has no certificate"),
        Err(error) => format!("{name} is not PEM: {error}"),
    };
    report.problem(item.span.clone(), message, "name a file with `-----BEGIN CERTIFICATE-----`");
    None
}

fn read_server_name(item: &Item, fingerprint: &mut Sha256, report: &mut Report) -> Option<ServerName<'static>> {
    let word = item.string("\"api.internal\"", report)?;
    fingerprint.update([1]);
    fingerprint.update(word.text);
    let name = ServerName::try_from(word.text.to_owned());
    name.map_err(|_no_name| {
        let message = format!("{} is not a valid server name", quoted(word.text));
        report.problem(word.span, message, "write a host name or an IP address, without a port");
    })
    .ok()
}

/// Reads a file: its name for messages, and its content. Adds the content to `fingerprint`.
fn read_file(
    item: &Item,
    example: &str,
    files: ReadFile,
    fingerprint: &mut Sha256,
    report: &mut Report,
) -> Option<(String, Vec<u8>)> {
    let word = item.string(example, report)?;
    let bytes = read_named_file(&word, files, report)?;
    fingerprint.update(item.key);
    fingerprint.update(Sha256::digest(&bytes));
    Some((quoted(word.text), bytes))
}
