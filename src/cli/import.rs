//! `transom import`: translates the configuration of another product, and reports what was not translated.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;

use super::{Exit, Failure, exit_of, list_folder, read_file};
use transom_import::{Files, PRODUCTS, import};

/// Options of `transom import`.
#[derive(clap::Args)]
pub struct Options {
    /// Whose configuration the files are
    #[arg(value_parser = PossibleValuesParser::new(PRODUCTS.map(|product| product.name)))]
    product: String,
    /// Its files; included ones are found
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write the configuration to this file instead of standard output, and files that it names beside it
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace files that exist
    #[arg(long, requires = "output")]
    force: bool,
    /// Exit 2 if a limit or access rule is not enforced
    #[arg(long)]
    strict: bool,
}

pub fn run(options: &Options) -> Exit {
    exit_of(import_files(options))
}

fn import_files(options: &Options) -> Result<(), Failure> {
    let product = PRODUCTS.iter().find(|product| product.name == options.product);
    let product = product.ok_or_else(|| Failure(Exit::BadConfig, "transom: unknown product\n".to_owned()))?;
    let files = Files { read: &read_file, folders: &list_folder };
    let import =
        import(product, &files, &options.files).map_err(|error| Failure(Exit::BadConfig, format!("{error}\n")))?;
    match &options.output {
        // Such as `/dev/stdout`: nothing is replaced, and no file can be beside it.
        Some(output) if is_stream(output) && import.files.is_empty() => {
            let stream = OpenOptions::new().append(true).open(output);
            let written = stream.and_then(|mut stream| stream.write_all(import.text.as_bytes()));
            written.map_err(|error| Failure::io(output, &error))?;
        }
        Some(output) if !is_stream(output) => {
            let folder = output.parent().unwrap_or(Path::new(""));
            let named = import.files.iter().map(|file| (folder.join(file.name), &file.text));
            let all: Vec<(PathBuf, &String)> = std::iter::once((output.clone(), &import.text)).chain(named).collect();
            if let Some((file, _)) = all.iter().find(|(file, _)| !options.force && file.exists()) {
                return Err(exists(file));
            }
            all.into_iter().try_for_each(|(file, text)| write(&file, text, options.force))?;
        }
        None if import.files.is_empty() => print_out!("{}", import.text.trim_end()),
        Some(_) | None => {
            let message = format!("the result needs another file, `{}`", import.files[0].name);
            return Err(Failure::usage(message, "name where to write it with `--output gateway.toml`"));
        }
    }
    print_err!("{}", import.report(product).trim_end());
    match options.strict && import.not_enforced() > 0 {
        true => {
            Err(Failure(Exit::BadConfig, "transom: limits or access rules are not enforced (`--strict`)\n".to_owned()))
        }
        false => Ok(()),
    }
}

/// Whether a file is a pipe, a terminal or another device. What a descriptor leads to may also be a regular file, which a shell has opened.
fn is_stream(file: &Path) -> bool {
    ["/dev/stdout", "/dev/stderr", "/dev/fd"].iter().any(|stream| file.starts_with(stream))
        || fs::metadata(file).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

fn exists(file: &Path) -> Failure {
    Failure::usage(format!("`{}` exists", file.display()), "choose another file, or replace it with `--force`")
}

fn write(file: &Path, text: &str, force: bool) -> Result<(), Failure> {
    if force {
        return fs::write(file, text).map_err(|error| Failure::io(file, &error));
    }
    let mut new = OpenOptions::new().write(true).create_new(true).open(file).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => exists(file),
        _ => Failure::io(file, &error),
    })?;
    new.write_all(text.as_bytes()).map_err(|error| Failure::io(file, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_memory_file_systems_are_no_streams() {
        for (file, expected) in
            [("/dev/stdout", true), ("/dev/fd/1", true), ("/dev/null", true), ("/dev/shm/new.toml", false)]
        {
            assert_eq!(is_stream(Path::new(file)), expected, "{file}");
        }
    }
}
