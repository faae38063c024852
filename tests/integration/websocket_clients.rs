//! WebSocket through the gateway, with Python's `websockets` on both sides: messages of every size, fragments, pings, close
//! codes and abrupt ends. The checks are in tests/external/websocket_client.py.

use crate::support::external_scripts::{self, ScriptServer};
use crate::support::test_ca::ServerFiles;
use crate::support::tls_gateway::{TlsGateway, limited_route_to};

fn upstream(server: &ScriptServer) -> String {
    format!("[upstreams.u]\nservers = [\"http://{}\"]\n", server.address)
}

/// If this test fails, the cause is not the gateway.
#[test]
fn the_client_script_passes_without_a_gateway() {
    let server_ca = ServerFiles::new();
    let server = ScriptServer::start("websocket_server.py", &server_ca.tls_arguments());
    let ca = server_ca.ca.display().to_string();
    external_scripts::run_checks("websocket_client.py", &[server.address.to_string(), "--ca".to_owned(), ca]);
}

#[test]
fn all_checks_pass_over_plain_http() {
    let server = ScriptServer::start("websocket_server.py", &[""; 0]);
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream(&server), false));
    let [plain, _] = tls_gateway.client_arguments();
    external_scripts::run_checks("websocket_client.py", &plain);
}

#[test]
fn all_checks_pass_over_tls() {
    let server = ScriptServer::start("websocket_server.py", &[""; 0]);
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream(&server), false));
    let [_, tls] = tls_gateway.client_arguments();
    external_scripts::run_checks("websocket_client.py", &tls);
}

#[test]
fn all_checks_pass_to_a_tls_upstream() {
    let server_ca = ServerFiles::new();
    let server = ScriptServer::start("websocket_server.py", &server_ca.tls_arguments());
    let upstream = format!(
        "[upstreams.u]\nservers = [\"https://{}\"]\n[upstreams.u.tls]\nca = {:?}\n",
        server.address, server_ca.ca
    );
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream, false));
    let [_, tls] = tls_gateway.client_arguments();
    external_scripts::run_checks("websocket_client.py", &tls);
}

#[test]
fn a_handshake_is_counted() {
    let server = ScriptServer::start("websocket_server.py", &[""; 0]);
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream(&server), true));
    let [plain, tls] = tls_gateway.client_arguments();
    // The handshake uses up the limit; messages are not counted.
    external_scripts::run_checks(
        "websocket_client.py",
        &[plain.as_slice(), &["--only".to_owned(), "many_at_once".to_owned()]].concat(),
    );
    for arguments in [plain, tls] {
        external_scripts::run_checks(
            "websocket_client.py",
            &[arguments.as_slice(), &["--refused".to_owned()]].concat(),
        );
    }
}
