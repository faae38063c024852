//! Compiles the messages in `proto/`: Rust types, and the descriptors for reflection.

use std::env;
use std::error::Error;
use std::fs;
use std::path::Path;

use prost::Message;
use prost_types::FileDescriptorSet;
use prost_types::field_descriptor_proto::Type;

const FILES: [&str; 3] =
    ["envoy/service/ratelimit/v3/rls.proto", "grpc/health/v1/health.proto", "grpc/reflection/v1/reflection.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let mut compiler = protox::Compiler::new(["proto"])?;
    let mut descriptors = compiler.include_imports(true).open_files(FILES)?.file_descriptor_set();
    let out_dir = env::var("OUT_DIR")?;
    fs::write(Path::new(&out_dir).join("descriptors.bin"), descriptors.encode_to_vec())?;
    read_entry_values_as_bytes(&mut descriptors);
    prost_build::Config::new().bytes(["."]).include_file("messages.rs").compile_fds(descriptors)?;
    Ok(())
}

/// The value of an entry comes from a client of Envoy. A string would make every message with invalid UTF-8 malformed, and
/// Envoy lets requests pass whose rate limit check fails.
fn read_entry_values_as_bytes(descriptors: &mut FileDescriptorSet) {
    let messages = descriptors.file.iter_mut().flat_map(|file| &mut file.message_type);
    let nested = messages.filter(|message| message.name() == "RateLimitDescriptor").flat_map(|of| &mut of.nested_type);
    let fields = nested.filter(|message| message.name() == "Entry").flat_map(|entry| &mut entry.field);
    fields.filter(|field| field.name() == "value").for_each(|field| field.set_type(Type::Bytes));
}
