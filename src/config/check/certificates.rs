//! Certificates, private keys and issuers: the files that hold them, read and tried.
//!
//! What a file holds is never shown, only what is wrong with it.

use std::path::Path;

use rustls_pki_types::CertificateDer;

use crate::config::Files;
use crate::config::certificate::{self, Certificate, Flaw};
use crate::config::document::{Item, Table, Word};
use crate::config::problem::{Report, shown};

const FILE_FIX: &str = "name a file that the gateway may read; a relative path starts at the folder of this file";

/// The files of one certificate, as a table names them.
pub struct Pair<'d> {
    pub certificate: Option<Item<'d>>,
    pub private_key: Option<Item<'d>>,
}

impl<'d> Pair<'d> {
    /// Both have to be there.
    pub fn required(table: &mut Table<'d>) -> Pair<'d> {
        Pair {
            certificate: table.require("certificate", "write `certificate = \"FILE\"`: PEM, with the full chain"),
            private_key: table.require("private_key", "write `private_key = \"FILE\"`: PEM"),
        }
    }

    pub fn read(self, files: Files, report: &mut Report) -> Option<Certificate> {
        let chain = self.certificate.and_then(|item| file(&item, files, report));
        let key = self.private_key.and_then(|item| file(&item, files, report));
        let ((chain_word, chain), (key_word, key)) = (chain?, key?);
        Certificate::read(chain_word.text, &chain, &key)
            .map_err(|flaw| {
                let is_of_key = matches!(flaw, Flaw::NoKey | Flaw::EncryptedKey | Flaw::BadKey | Flaw::OtherKey);
                complain(&flaw, if is_of_key { &key_word } else { &chain_word }, report);
            })
            .ok()
    }
}

/// The certificates of those who issue others.
pub fn authorities(item: &Item, files: Files, report: &mut Report) -> Option<Vec<CertificateDer<'static>>> {
    let (word, text) = file(item, files, report)?;
    certificate::authorities(&text).map_err(|flaw| complain(&flaw, &word, report)).ok()
}

fn complain(flaw: &Flaw, word: &Word, report: &mut Report) {
    let (message, fix) = flaw.explain(&shown(word.text));
    report.problem(word.span.clone(), message, fix);
}

fn file<'d>(item: &Item<'d>, files: Files, report: &mut Report) -> Option<(Word<'d>, Vec<u8>)> {
    let word = item.text("\"FILE\"", report)?;
    if word.text.is_empty() {
        report.problem(word.span, format!("`{}` is empty", item.key), item.write("\"FILE\""));
        return None;
    }
    if word.text.trim_start().starts_with("-----BEGIN ") {
        let message = format!("`{}` names a file, and this is what such a file holds", item.key);
        report.problem(word.span, message, "put it into a file, and name that");
        return None;
    }
    match files(Path::new(word.text)) {
        Ok(bytes) => Some((word, bytes)),
        Err(error) => {
            report.problem(word.span, format!("can not read {}: {error}", shown(word.text)), FILE_FIX);
            None
        }
    }
}
