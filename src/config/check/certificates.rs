//! Certificates, private keys, issuers and revocation lists: the files that hold them, read and tried.
//!
//! What a file holds is never shown, only what is wrong with it.

use std::path::Path;

use rustls_pki_types::CertificateDer;

use crate::config::ReadFile;
use crate::config::certificate::RevocationList;
use crate::config::certificate::{self, Certificate, CertificateFileError};
use crate::config::diagnostics::{Report, quoted};
use crate::config::toml_reader::{Item, SpannedStr, Table};

const FILE_FIX: &str = "name a file that the gateway may read; a relative path starts at the folder of this file";

/// The files of one certificate, as a table names them.
pub struct CertificateFiles<'d> {
    pub certificate: Option<Item<'d>>,
    pub private_key: Option<Item<'d>>,
}

impl<'d> CertificateFiles<'d> {
    /// Both have to be there.
    pub fn take_from(table: &mut Table<'d>) -> CertificateFiles<'d> {
        CertificateFiles {
            certificate: table.require("certificate", "write `certificate = \"FILE\"`: PEM, with the full chain"),
            private_key: table.require("private_key", "write `private_key = \"FILE\"`: PEM"),
        }
    }

    pub fn read(self, files: ReadFile, report: &mut Report) -> Option<Certificate> {
        let chain = self.certificate.and_then(|item| read_file(&item, files, report));
        let key = self.private_key.and_then(|item| read_file(&item, files, report));
        let ((chain_word, chain), (key_word, key)) = (chain?, key?);
        Certificate::read(chain_word.text, &chain, &key)
            .map_err(|flaw| {
                let is_of_key = matches!(
                    flaw,
                    CertificateFileError::NoKey
                        | CertificateFileError::EncryptedKey
                        | CertificateFileError::UnusableKey
                        | CertificateFileError::KeyMismatch
                );
                report_certificate_error(&flaw, if is_of_key { &key_word } else { &chain_word }, report);
            })
            .ok()
    }
}

/// The certificates of those who issue others.
pub fn read_authorities(item: &Item, files: ReadFile, report: &mut Report) -> Option<Vec<CertificateDer<'static>>> {
    let (word, text) = read_file(item, files, report)?;
    certificate::read_authorities(&text).map_err(|flaw| report_certificate_error(&flaw, &word, report)).ok()
}

/// What a file, or several, say about certificates that were taken back.
pub fn read_revocation_lists(item: &Item, files: ReadFile, report: &mut Report) -> Vec<RevocationList> {
    let words = item.strings("\"FILE\"", report);
    if words.as_ref().is_some_and(Vec::is_empty) {
        let fix = format!("{}, or leave it out: nothing is taken back then", item.fix_with("\"FILE\""));
        report.problem(item.span.clone(), format!("`{}` is an empty list", item.key), fix);
    }
    let mut lists = Vec::new();
    for word in words.into_iter().flatten() {
        let Some(text) = read_contents(item, &word, files, report) else { continue };
        match RevocationList::read(word.text, &text) {
            Ok(read) => lists.extend(read),
            Err(flaw) => {
                let (message, fix) = flaw.explain(&quoted(word.text));
                report.problem(word.span, message, fix);
            }
        }
    }
    lists
}

fn report_certificate_error(flaw: &CertificateFileError, word: &SpannedStr, report: &mut Report) {
    let (message, fix) = flaw.explain(&quoted(word.text));
    report.problem(word.span.clone(), message, fix);
}

fn read_file<'d>(item: &Item<'d>, files: ReadFile, report: &mut Report) -> Option<(SpannedStr<'d>, Vec<u8>)> {
    let word = item.string("\"FILE\"", report)?;
    let bytes = read_contents(item, &word, files, report)?;
    Some((word, bytes))
}

/// What is in a file that one of an item's words names.
fn read_contents(item: &Item, word: &SpannedStr, files: ReadFile, report: &mut Report) -> Option<Vec<u8>> {
    if word.text.is_empty() {
        report.problem(word.span.clone(), format!("`{}` is empty", item.key), item.fix_with("\"FILE\""));
        return None;
    }
    if word.text.trim_start().starts_with("-----BEGIN ") {
        let message = format!("`{}` names a file, and this is what such a file holds", item.key);
        report.problem(word.span.clone(), message, "put it into a file, and name that");
        return None;
    }
    let complain =
        |error| report.problem(word.span.clone(), format!("can not read {}: {error}", quoted(word.text)), FILE_FIX);
    files(Path::new(word.text)).map_err(complain).ok()
}
