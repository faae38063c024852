//! The checked-in messages and descriptors of `proto/generated` are those that `proto/` gives. A build compiles no `.proto` file.

use std::fs;
use std::path::{Path, PathBuf};

use prost::Message;
use prost_types::FileDescriptorSet;
use prost_types::field_descriptor_proto::Type;

use crate::support::TempDir;

const FILES: [&str; 3] =
    ["envoy/service/ratelimit/v3/rls.proto", "grpc/health/v1/health.proto", "grpc/reflection/v1/reflection.proto"];

/// `make docs` sets the variable `TRANSOM_WRITE_DOCS`, and writes the files instead of comparing them.
#[test]
fn checked_in_messages_are_those_of_the_proto_files() {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let checked_in = proto.join("generated");
    if std::env::var_os("TRANSOM_WRITE_DOCS").is_some() {
        generate(&proto, &checked_in);
    }
    let generated = TempDir::new();
    generate(&proto, generated.path());
    assert_eq!(file_names(&checked_in), file_names(generated.path()), "`make docs` writes the files");
    for name in file_names(generated.path()) {
        let is_equal = fs::read(checked_in.join(&name)).unwrap() == fs::read(generated.path().join(&name)).unwrap();
        assert!(is_equal, "proto/generated/{} is not what proto/ gives: run `make docs`", name.display());
    }
}

fn file_names(folder: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into()).collect();
    names.sort();
    names
}

/// Writes Rust types for the messages in `proto`, and the descriptors for reflection.
fn generate(proto: &Path, folder: &Path) {
    let mut compiler = protox::Compiler::new([proto]).unwrap();
    let mut descriptors = compiler.include_imports(true).open_files(FILES).unwrap().file_descriptor_set();
    fs::write(folder.join("descriptors.bin"), descriptors.encode_to_vec()).unwrap();
    read_entry_values_as_bytes(&mut descriptors);
    let mut config = prost_build::Config::new();
    config.bytes(["."]).out_dir(folder).include_file("mod.rs").compile_fds(descriptors).unwrap();
}

/// The value of an entry comes from a client of Envoy. A string would make every message with invalid UTF-8 malformed, and
/// Envoy lets requests pass whose rate limit check fails.
fn read_entry_values_as_bytes(descriptors: &mut FileDescriptorSet) {
    let messages = descriptors.file.iter_mut().flat_map(|file| &mut file.message_type);
    let nested = messages.filter(|message| message.name() == "RateLimitDescriptor").flat_map(|of| &mut of.nested_type);
    let fields = nested.filter(|message| message.name() == "Entry").flat_map(|entry| &mut entry.field);
    fields.filter(|field| field.name() == "value").for_each(|field| field.set_type(Type::Bytes));
}
