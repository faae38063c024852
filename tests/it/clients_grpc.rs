//! gRPC through the gateway, by the library of gRPC itself on both sides: all kinds of calls, statuses,
//! deadlines, cancelling, reflection and health. The checks stand in tests/parts/grpc_client.py.

use crate::world::authority::Authority;
use crate::world::edge::{Edge, all_to};
use crate::world::scripts::{self, Script};

fn upstream(server: &Script) -> String {
    format!("[upstreams.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n", server.address)
}

/// What fails here as well is not the gateway's fault.
#[test]
fn the_checks_hold_without_a_gateway() {
    let theirs = Authority::new();
    let server = Script::start("grpc_server.py", &theirs.tls_arguments());
    let ca = theirs.ca.display().to_string();
    scripts::check("grpc_client.py", &[server.address.to_string(), "--ca".to_owned(), ca]);
}

#[test]
fn every_kind_of_call_in_the_clear() {
    let server = Script::start("grpc_server.py", &[""; 0]);
    let edge = Edge::start(&all_to(&upstream(&server), false));
    let [clear, _] = edge.ways();
    scripts::check("grpc_client.py", &clear);
}

#[test]
fn every_kind_of_call_through_tls() {
    let server = Script::start("grpc_server.py", &[""; 0]);
    let edge = Edge::start(&all_to(&upstream(&server), false));
    let [_, tls] = edge.ways();
    scripts::check("grpc_client.py", &tls);
}

#[test]
fn every_kind_of_call_to_a_server_that_speaks_tls() {
    let theirs = Authority::new();
    let server = Script::start("grpc_server.py", &theirs.tls_arguments());
    let upstream = format!(
        "[upstreams.u]\nservers = [\"https://{}\"]\nprotocol = \"http2\"\n[upstreams.u.tls]\nca = {:?}\n",
        server.address, theirs.ca
    );
    let edge = Edge::start(&all_to(&upstream, false));
    let [_, tls] = edge.ways();
    scripts::check("grpc_client.py", &tls);
}

#[test]
fn a_refusal_is_one_in_terms_of_grpc() {
    let server = Script::start("grpc_server.py", &[""; 0]);
    let edge = Edge::start(&all_to(&upstream(&server), true));
    let [clear, tls] = edge.ways();
    // This one uses up the limit.
    scripts::check("grpc_client.py", &[clear.as_slice(), &["--only".to_owned(), "unary_once".to_owned()]].concat());
    for way in [clear, tls] {
        scripts::check("grpc_client.py", &[way.as_slice(), &["--refused".to_owned()]].concat());
    }
}
