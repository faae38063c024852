//! TLS to upstream servers: whom the gateway trusts, and what it shows of itself.
//!
//! Everything is put together here, so that a certificate that is none is a problem of the file and not
//! of the first request. There is no setting that verifies nothing: a server whose certificate nobody
//! signed is reached by naming that certificate as `ca`. Nothing of a private key goes into a message.

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

/// The roots that the system trusts, looked for once for each configuration, and only if some upstream
/// needs them.
#[derive(Default)]
pub struct SystemRoots(Option<Arc<RootCertStore>>);

impl SystemRoots {
    /// `span` is what needs them.
    fn get(&mut self, span: Span, report: &mut Report) -> Arc<RootCertStore> {
        if report.count() > 0 {
            // Nothing will come of this configuration, and there are hundreds of files to read.
            return Arc::new(RootCertStore::empty());
        }
        let roots = self.0.get_or_insert_with(|| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            Arc::new(roots)
        });
        if roots.is_empty() {
            let fix = "install the package `ca-certificates`, or name the authority: `ca = \"FILE\"`";
            report.problem(span, "the system has no certificates of authorities to verify a server by", fix);
        }
        Arc::clone(roots)
    }
}

/// Reads the table `tls` of an upstream; `span` is what takes TLS, where there is no table.
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

/// What says how the gateway is a client of TLS.
#[derive(Default)]
pub struct TlsSettings<'d> {
    pub ca: Option<Item<'d>>,
    pub server_name: Option<Item<'d>>,
    pub certificate: Option<Item<'d>>,
    pub private_key: Option<Item<'d>>,
}

impl TlsSettings<'_> {
    /// `span` is what takes TLS, `misspelled` what other settings were likely meant to be.
    pub fn read(
        &self,
        span: Span,
        misspelled: &[&str],
        files: ReadFile,
        roots: &mut SystemRoots,
        report: &mut Report,
    ) -> Option<ClientTls> {
        let mut print = Sha256::new();
        let anchors = match &self.ca {
            Some(item) => read_ca_file(item, files, &mut print, report),
            None => Some((roots.get(span, report), Vec::new())),
        };
        let name = match &self.server_name {
            Some(item) => Some(read_server_name(item, &mut print, report)?),
            None => None,
        };
        let identity = match (&self.certificate, &self.private_key) {
            (None, None) => None,
            (Some(certificate), Some(private_key)) => {
                Some(read_identity(certificate, private_key, files, &mut print, report)?)
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
        let (anchors, named) = anchors?;
        let builder = builder(anchors, named)?;
        let client = match identity {
            None => builder.with_no_client_auth(),
            Some((chain, key, span)) => match builder.with_client_auth_cert(chain, key) {
                Ok(client) => client,
                Err(error) => {
                    let message = format!("the certificate and the private key can not be used together: {error}");
                    report.problem(span, message, "name the key that the certificate was made for");
                    return None;
                }
            },
        };
        Some(ClientTls::new(client, name, print.finalize().into()))
    }
}

type Builder = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

/// `named` are certificates that a server may show itself.
fn builder(roots: Arc<RootCertStore>, named: Vec<CertificateDer<'static>>) -> Option<Builder> {
    let provider = Arc::new(default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    // The provider that is named here has suites for both versions; there are no roots only beside a problem.
    let builder = builder.with_safe_default_protocol_versions().ok()?;
    let usual = WebPkiServerVerifier::builder_with_provider(roots, provider).build().ok()?;
    Some(
        builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PinningVerifier { webpki: usual, pinned: named })),
    )
}

type TrustAnchors = (Arc<RootCertStore>, Vec<CertificateDer<'static>>);

fn read_ca_file(item: &Item, files: ReadFile, print: &mut Sha256, report: &mut Report) -> Option<TrustAnchors> {
    let (name, bytes) = read_file(item, "\"ca.pem\"", files, print, report)?;
    let mut roots = RootCertStore::empty();
    let named = parse_certificates(item, &name, &bytes, report)?;
    for certificate in &named {
        if let Err(error) = roots.add(certificate.clone()) {
            let message = format!("{name} has a certificate that can not be an authority's: {error}");
            report.problem(item.span.clone(), message, "name a file of certificates of authorities, in PEM");
            return None;
        }
    }
    Some((Arc::new(roots), named))
}

/// The client's own chain and key, and where the key is named.
fn read_identity(
    certificate: &Item,
    private_key: &Item,
    files: ReadFile,
    print: &mut Sha256,
    report: &mut Report,
) -> Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, Span)> {
    let chain = read_file(certificate, "\"client.pem\"", files, print, report);
    let chain = chain.and_then(|(name, bytes)| parse_certificates(certificate, &name, &bytes, report));
    let (name, bytes) = read_file(private_key, "\"client.key\"", files, print, report)?;
    let Ok(key) = PrivateKeyDer::from_pem_slice(&bytes) else {
        let message = format!("{name} has no private key in PEM");
        let fix = "name a file with `-----BEGIN PRIVATE KEY-----`; one that takes a password can not be used";
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
        Err(error) => format!("{name} is no PEM: {error}"),
    };
    report.problem(item.span.clone(), message, "name a file with `-----BEGIN CERTIFICATE-----`");
    None
}

fn read_server_name(item: &Item, print: &mut Sha256, report: &mut Report) -> Option<ServerName<'static>> {
    let word = item.string("\"api.internal\"", report)?;
    print.update([1]);
    print.update(word.text);
    let name = ServerName::try_from(word.text.to_owned());
    name.map_err(|_no_name| {
        let message = format!("{} is no name that a certificate can have", quoted(word.text));
        report.problem(word.span, message, "write a host name or an IP address, without port");
    })
    .ok()
}

/// What a file is called in messages, and what is in it.
fn read_file(
    item: &Item,
    example: &str,
    files: ReadFile,
    print: &mut Sha256,
    report: &mut Report,
) -> Option<(String, Vec<u8>)> {
    let word = item.string(example, report)?;
    let bytes = read_named_file(&word, files, report)?;
    print.update(item.key);
    print.update(Sha256::digest(&bytes));
    Some((quoted(word.text), bytes))
}
