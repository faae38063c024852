//! A browser through the gateway: a page over HTTP/2 and TLS, a stream of events and a WebSocket.
//!
//! The page makes the checks (tests/external/page.html); tests/external/browser.cjs opens it and prints its results.

use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::TempDir;
use crate::support::external_scripts::ScriptServer;
use crate::support::external_servers::{node, program};
use crate::support::tls_gateway::TlsGateway;

#[test]
fn a_browser_uses_event_streams_and_websockets() {
    let page = ScriptServer::start("page_server.py", &[""; 0]);
    let sockets = ScriptServer::start("websocket_server.py", &[""; 0]);
    let scratch = TempDir::new();
    let log = scratch.path().join("access.log");
    let tls_gateway = TlsGateway::start(&format!(
        "[access_log]\nfile = {log:?}\n\
         [upstreams.page]\nservers = [\"http://{}\"]\n[upstreams.sockets]\nservers = [\"http://{}\"]\n\
         [[routes]]\npath = \"/echo\"\nupstream = \"sockets\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"page\"\n",
        page.address, sockets.address
    ));
    let output = node("browser.cjs")
        .arg(program("chromium"))
        .args([tls_gateway.tls.to_string(), tls_gateway.authority.pin.clone()])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the browser failed:\n{stderr}");
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        results["results"],
        json!({
            "errors": [],
            "protocol": "h2",
            "secure": true,
            "image": 17,
            "style": "yes",
            "missing": "404 no such page\n",
            "many": true,
            "body": true,
            "events": ["0", "1", "2", "3", "4", "last"],
            "socket": {
                "same": [true, true, true], "subprotocol": "chat.v1",
                "code": 3000, "reason": "enough", "clean": true,
            },
        })
    );
    assert_eq!(results["observed"], json!({ "errors": [], "protocols": { "h2": true }, "sockets": [200] }));
    drop(tls_gateway);
    // The WebSocket was a stream on the HTTP/2 connection of the page.
    let lines = std::fs::read_to_string(&log).unwrap();
    let mut lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let socket = lines.find(|line| line["path"] == "/echo").unwrap();
    assert_eq!(
        (&socket["protocol"], &socket["method"], &socket["status"]),
        (&"HTTP/2.0".into(), &"GET".into(), &200.into())
    );
}
