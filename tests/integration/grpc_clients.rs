//! gRPC through the gateway, with the gRPC library on both sides: all kinds of calls, statuses, deadlines, cancellation,
//! reflection and health. The checks are in tests/external/grpc_client.py.

use crate::support::external_scripts::{self, ScriptServer};
use crate::support::test_ca::ServerFiles;
use crate::support::tls_gateway::{TlsGateway, limited_route_to};

fn upstream(server: &ScriptServer) -> String {
    format!("[upstreams.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n", server.address)
}

/// If this test fails, the cause is not the gateway.
#[test]
fn the_client_script_passes_without_a_gateway() {
    let server_ca = ServerFiles::new();
    let server = ScriptServer::start("grpc_server.py", &server_ca.tls_arguments());
    let ca = server_ca.ca.display().to_string();
    external_scripts::run_checks("grpc_client.py", &[server.address.to_string(), "--ca".to_owned(), ca]);
}

#[test]
fn every_kind_of_call_works_over_h2c() {
    let server = ScriptServer::start("grpc_server.py", &[""; 0]);
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream(&server), false));
    let [plain, _] = tls_gateway.client_arguments();
    external_scripts::run_checks("grpc_client.py", &plain);
}

#[test]
fn every_kind_of_call_works_over_tls() {
    let server = ScriptServer::start("grpc_server.py", &[""; 0]);
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream(&server), false));
    let [_, tls] = tls_gateway.client_arguments();
    external_scripts::run_checks("grpc_client.py", &tls);
}

#[test]
fn every_kind_of_call_works_to_a_tls_upstream() {
    let server_ca = ServerFiles::new();
    let server = ScriptServer::start("grpc_server.py", &server_ca.tls_arguments());
    let upstream = format!(
        "[upstreams.u]\nservers = [\"https://{}\"]\nprotocol = \"http2\"\n[upstreams.u.tls]\nca = {:?}\n",
        server.address, server_ca.ca
    );
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream, false));
    let [_, tls] = tls_gateway.client_arguments();
    external_scripts::run_checks("grpc_client.py", &tls);
}

#[test]
fn a_refusal_is_a_grpc_error() {
    let server = ScriptServer::start("grpc_server.py", &[""; 0]);
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream(&server), true));
    let [plain, tls] = tls_gateway.client_arguments();
    // The only admitted request.
    external_scripts::run_checks(
        "grpc_client.py",
        &[plain.as_slice(), &["--only".to_owned(), "unary_once".to_owned()]].concat(),
    );
    for arguments in [plain, tls] {
        external_scripts::run_checks("grpc_client.py", &[arguments.as_slice(), &["--refused".to_owned()]].concat());
    }
}
