//! Translates configurations of other products into a gateway.toml.
//!
//! An importer reads the files of one product and fills the intermediate form of `gateway`; `toml_writer` writes it. What cannot be
//! expressed exactly is expressed more strictly or left out, with a note that stands in the report and as a comment in the result.
//! The result is checked as `transom check` does. No server is contacted.
//!
//! - `nginx`, `kong`, `envoy_ratelimit`, `traefik`, `ingress`: the importers; `path`, `rate` and `network` translate parts that several
//!   products have; `route_order` keeps the order in which a product tries routes.
//! - `tree`: documents of YAML and TOML, whose settings know whether they were read.
//! - `gateway`, `toml_writer`: the intermediate form and its text; `source`: positions, notes, errors.

mod envoy_ratelimit;
pub mod gateway;
mod ingress;
mod kong;
mod kong_plugins;
mod network;
mod nginx;
mod path;
mod rate;
mod route_order;
pub mod source;
mod toml_writer;
mod traefik;
mod traefik_rule;
mod tree;

use std::io;
use std::path::{Path, PathBuf};

use gateway::{Gateway, NamedFile, Part};
use source::{Effect, ImportError, Note, Position};
use transom_config::diagnostics::{Inputs, ListFolder, Problem, ReadFile};

/// Access to the files of a configuration.
#[derive(Clone, Copy)]
pub struct Files<'f> {
    pub read: ReadFile<'f>,
    pub folders: ListFolder<'f>,
}

impl Files<'_> {
    /// No files.
    pub const NONE: Files<'static> = Files { read: Inputs::NONE.files, folders: Inputs::NONE.folders };

    /// The text of a file. Bytes that are not UTF-8, such as in comments, are replaced.
    fn text(&self, path: &Path) -> Result<String, ImportError> {
        let bytes = (self.read)(path).map_err(|error| ImportError::unreadable(path, &error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A product whose configuration can be imported.
#[derive(Debug)]
pub struct Product {
    /// On the command line.
    pub name: &'static str,
    /// What its configuration consists of, in the report.
    pub unit: &'static str,
    import: fn(&Files, &[PathBuf]) -> Result<Translated, ImportError>,
}

/// All products.
pub const PRODUCTS: [Product; 5] = [
    Product { name: "nginx", unit: "directives", import: nginx::import },
    Product { name: "kong", unit: "settings", import: kong::import },
    Product { name: "envoy-ratelimit", unit: "settings", import: envoy_ratelimit::import },
    Product { name: "traefik", unit: "settings", import: traefik::import },
    Product { name: "ingress", unit: "settings", import: ingress::import },
];

/// What an importer returns.
struct Translated {
    gateway: Gateway,
    /// Directives, or settings, of the configuration.
    total: usize,
    translated: usize,
}

/// The result of an import.
#[derive(Debug)]
pub struct Import {
    /// The gateway.toml.
    pub text: String,
    /// Further files, which it names.
    pub files: Vec<NamedFile>,
    /// Limits and access rules that are not enforced come first.
    pub notes: Vec<Note>,
    pub total: usize,
    pub translated: usize,
}

impl Import {
    /// How many limits or access rules are missing.
    pub fn not_enforced(&self) -> usize {
        self.notes.iter().filter(|note| note.effect == Effect::NotEnforced).count()
    }

    /// What was translated, and each difference with its line.
    pub fn report(&self, product: &Product) -> String {
        let (translated, total, unit) = (self.translated, self.total, product.unit);
        let mut report = format!("transom: translated {translated} of {total} {unit}\n");
        for note in &self.notes {
            report.push_str(&format!("  {note}\n"));
        }
        match self.not_enforced() {
            0 => {}
            1 => report.push_str("transom: a limit or access rule is not enforced, see above\n"),
            count => report.push_str(&format!("transom: {count} limits or access rules are not enforced, see above\n")),
        }
        report
    }
}

/// Where the dashboard and the commands reach the gateway.
const ADMIN: &str = "127.0.0.1:9900";
/// Translates the files of a product.
pub fn import(product: &Product, files: &Files, paths: &[PathBuf]) -> Result<Import, ImportError> {
    let Translated { mut gateway, total, translated } = (product.import)(files, paths)?;
    gateway.listen.set("admin", ADMIN);
    gateway.remove_repeated_servers();
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let heading = format!("Imported from {} with `transom import {}`.", names.join(", "), product.name);
    loop {
        let (text, parts) = toml_writer::write(&gateway, &heading);
        let Some(problem) = problem(&text, files, &gateway.files) else {
            let mut notes = gateway.notes;
            notes.sort_by(|a, b| a.effect.cmp(&b.effect).then_with(|| a.position.cmp(&b.position)));
            return Ok(Import { text, files: gateway.files, notes, total, translated });
        };
        let start: usize = text.split_inclusive('\n').take(problem.line.saturating_sub(1)).map(str::len).sum();
        let part = parts.iter().rev().find(|(begin, _)| *begin <= start).map_or(Part::General, |(_, part)| *part);
        let section = text[..start].lines().chain([problem.line_text.as_str()]).rfind(|line| line.starts_with('['));
        let position = Position { file: names.first().map_or("", String::as_str).into(), line: 1 };
        if problem.file.is_some() || !gateway.repair(part, section.unwrap_or_default(), &position, &problem) {
            // Without any route, for example. What was left out says why.
            let notes: String = gateway.notes.iter().map(|note| format!("\n  {note}")).collect();
            let message = format!("the gateway cannot use the result: {}{notes}", problem.message);
            return Err(ImportError { position: None, message, fix: String::new() });
        }
    }
}

/// The first problem of a configuration, as `transom check` finds it.
fn problem(text: &str, files: &Files, named: &[NamedFile]) -> Option<Problem> {
    let read = |path: &Path| match named.iter().find(|file| Path::new(file.name) == path) {
        Some(file) => Ok(file.text.clone().into_bytes()),
        None if path.is_absolute() => (files.read)(path),
        None => Err(io::ErrorKind::NotFound.into()),
    };
    let inputs = Inputs { files: &read, ..Inputs::NONE };
    let problems = transom_config::read_with_inputs(text, inputs).err()?;
    problems.into_iter().next()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The files that tests import, with the product of each.
    fn samples() -> Vec<(&'static Product, PathBuf)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/import");
        let mut samples = Vec::new();
        for product in &PRODUCTS {
            for entry in fs::read_dir(folder.join(product.name)).unwrap() {
                let path = entry.unwrap().path();
                if !["expected", "traffic"].iter().any(|extension| path.extension().is_some_and(|is| is == *extension))
                {
                    samples.push((product, path));
                }
            }
        }
        samples.sort_by_key(|(product, path)| (product.name, path.clone()));
        assert!(samples.len() >= 10 * PRODUCTS.len());
        samples
    }

    /// Imports a text as a file of this name.
    fn import_text(product: &Product, name: &str, text: &[u8]) -> Result<Import, ImportError> {
        let read = |path: &Path| match path == Path::new(name) {
            true => Ok(text.to_owned()),
            false => Err(io::ErrorKind::NotFound.into()),
        };
        import(product, &Files { read: &read, ..Files::NONE }, &[PathBuf::from(name)])
    }

    /// Each sample has its result and report beside it, in `NAME.expected`. `UPDATE_EXPECTED=1` rewrites them.
    #[test]
    fn samples_have_the_expected_results() {
        for (product, path) in samples() {
            let name = path.file_name().unwrap().to_str().unwrap();
            let import = import_text(product, name, &fs::read(&path).unwrap()).unwrap();
            let files: String = import.files.iter().map(|file| format!("\n--- {}\n{}", file.name, file.text)).collect();
            let result = format!("{}{files}\n--- report\n{}", import.text, import.report(product));
            let expected = path.with_extension("expected");
            if std::env::var_os("UPDATE_EXPECTED").is_some() {
                fs::write(&expected, &result).unwrap();
            }
            assert_eq!(result, fs::read_to_string(&expected).unwrap_or_default(), "{}", path.display());
            assert!(!result.contains("gateway.toml:"), "{name}: a section was not accepted");
        }
    }

    /// A file with mistakes is an error with its line, or its result passes the check; there is no panic.
    #[test]
    fn damaged_samples_are_reported() {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below.max(1) as u64) as usize
        };
        for (product, path) in samples() {
            let original = fs::read(&path).unwrap();
            for _ in 0..12 {
                let mut text = original.clone();
                for _ in 0..=random(3) {
                    let (at, length) = (random(text.len()), random(30));
                    let end = (at + length).min(text.len());
                    match random(4) {
                        0 => drop(text.drain(at..end)),
                        1 => text.splice(at..at, original[..length.min(original.len())].to_vec()).for_each(drop),
                        2 => text[at] = b"{}[];:\"'$*/~-0 \n\xff"[random(17)],
                        _ => text.truncate(at.max(1)),
                    }
                    if text.is_empty() {
                        text.push(b'x');
                    }
                }
                match import_text(product, "sample", &text) {
                    Ok(import) => {
                        let named = import.files.clone();
                        assert_eq!(problem(&import.text, &Files::NONE, &named), None, "{}", import.text);
                    }
                    Err(error) => assert!(
                        error.position.as_ref().is_none_or(|position| &*position.file != "gateway.toml"),
                        "{error}\n{}",
                        String::from_utf8_lossy(&text)
                    ),
                }
            }
        }
    }
}
