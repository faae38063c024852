//! Server reflection of gRPC: clients such as grpcurl ask for the services and their messages.

use std::sync::LazyLock;

use bytes::Bytes;
use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorProto, FileDescriptorSet};

use super::grpc::{GrpcError, decode, encode};
use super::messages::grpc::reflection::v1::server_reflection_request::MessageRequest;
use super::messages::grpc::reflection::v1::server_reflection_response::MessageResponse;
use super::messages::grpc::reflection::v1::{
    ErrorResponse, ExtensionNumberResponse, FileDescriptorResponse, ListServiceResponse, ServerReflectionRequest,
    ServerReflectionResponse, ServiceResponse,
};

const NOT_FOUND: i32 = 5;

static FILES: LazyLock<Vec<FileDescriptorProto>> = LazyLock::new(|| {
    let set = FileDescriptorSet::decode(&include_bytes!("../../proto/generated/descriptors.bin")[..]);
    set.unwrap_or_default().file
});

/// Answers one message of `ServerReflectionInfo`.
pub fn answer(message: Bytes) -> Result<Bytes, GrpcError> {
    let request: ServerReflectionRequest = decode(message)?;
    let not_found = |what: &str| {
        MessageResponse::ErrorResponse(ErrorResponse {
            error_code: NOT_FOUND,
            error_message: format!("unknown {what}"),
        })
    };
    let file = |found: Option<&'static FileDescriptorProto>, what| match found {
        None => not_found(what),
        Some(file) => MessageResponse::FileDescriptorResponse(FileDescriptorResponse {
            file_descriptor_proto: with_imports(file).iter().map(|file| file.encode_to_vec().into()).collect(),
        }),
    };
    let response = match &request.message_request {
        Some(MessageRequest::ListServices(_)) => MessageResponse::ListServicesResponse(ListServiceResponse {
            service: FILES.iter().flat_map(services).map(|name| ServiceResponse { name }).collect(),
        }),
        Some(MessageRequest::FileByFilename(name)) => file(FILES.iter().find(|file| file.name() == name), "file"),
        Some(MessageRequest::FileContainingSymbol(symbol)) => {
            file(FILES.iter().find(|file| defines(file, symbol)), "symbol")
        }
        Some(MessageRequest::FileContainingExtension(_)) => not_found("extension"),
        Some(MessageRequest::AllExtensionNumbersOfType(name)) if FILES.iter().any(|file| defines(file, name)) => {
            let base_type_name = name.clone();
            let response = ExtensionNumberResponse { base_type_name, extension_number: Vec::new() };
            MessageResponse::AllExtensionNumbersResponse(response)
        }
        Some(MessageRequest::AllExtensionNumbersOfType(_)) => not_found("type"),
        None => return Err(GrpcError::invalid_argument("the request asks for nothing")),
    };
    Ok(encode(&ServerReflectionResponse {
        valid_host: request.host.clone(),
        original_request: Some(request),
        message_response: Some(response),
    }))
}

/// A file and the files that it imports, each once.
fn with_imports(file: &'static FileDescriptorProto) -> Vec<&'static FileDescriptorProto> {
    let mut files = vec![file];
    let mut next = 0;
    while let Some(file) = files.get(next) {
        let imports = FILES.iter().filter(|other| file.dependency.iter().any(|name| name == other.name()));
        let new: Vec<_> = imports.filter(|import| files.iter().all(|known| known.name() != import.name())).collect();
        files.extend(new);
        next += 1;
    }
    files
}

/// The full names of the services in a file.
fn services(file: &FileDescriptorProto) -> impl Iterator<Item = String> {
    file.service.iter().map(|service| format!("{}.{}", file.package(), service.name()))
}

/// Whether a file defines a service, method, message or enumeration of this full name.
fn defines(file: &FileDescriptorProto, symbol: &str) -> bool {
    let Some(name) = symbol.strip_prefix(file.package()).and_then(|rest| rest.strip_prefix('.')) else { return false };
    let is_service = file.service.iter().any(|service| match name.strip_prefix(service.name()) {
        Some("") => true,
        Some(rest) => service.method.iter().any(|method| rest.strip_prefix('.') == Some(method.name())),
        None => false,
    });
    is_service
        || file.enum_type.iter().any(|of| of.name() == name)
        || file.message_type.iter().any(|message| defines_message(message, name))
}

fn defines_message(message: &DescriptorProto, name: &str) -> bool {
    match name.strip_prefix(message.name()) {
        Some("") => true,
        Some(rest) => rest.strip_prefix('.').is_some_and(|nested| {
            message.enum_type.iter().any(|of| of.name() == nested)
                || message.nested_type.iter().any(|message| defines_message(message, nested))
        }),
        None => false,
    }
}
