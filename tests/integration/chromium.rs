//! A browser through the gateway: a page over HTTP/2 and TLS, a stream of events and a WebSocket.
//!
//! The page makes the checks (tests/external/page.html); tests/external/browser.cjs opens it and prints its results. A smaller page
//! uses an API of another origin.

use std::process::Stdio;

use serde_json::{Value, json};

use super::cors::{ORIGIN, guide};
use crate::support::TempDir;
use crate::support::external_scripts::ScriptServer;
use crate::support::external_servers::{CHROMIUM, node, program};
use crate::support::tls_gateway::TlsGateway;

/// Opens the page `/` of the gateway, and returns its results.
fn open_page(tls_gateway: &TlsGateway) -> Value {
    let output = node("browser.cjs")
        .arg(program(CHROMIUM))
        .args([tls_gateway.tls.to_string(), tls_gateway.authority.pin.clone()])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the browser failed:\n{stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

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
    let results = open_page(&tls_gateway);
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

/// Uses an API of another origin, with and without the field changes on refusals.
const OTHER_ORIGIN_PAGE: &str = r#"<!doctype html><link rel="icon" href="data:,"><script>
  const get = async path => {
    const response = await fetch(`https://api.test:${location.port}${path}`, { headers: { "x-api-key": "k" } });
    const fields = ["ratelimit", "retry-after"].map(name => response.headers.get(name));
    return [response.status, ...fields, (await response.text()).includes("per-key")];
  };
  const finished = (async () => {
    const results = [];
    for (const path of ["/plain/a", "/api/a", "/api/b", "/api/c", "/plain/b"]) {
      results.push(await get(path).catch(error => error.name));
    }
    return results;
  })();
</script>"#;

#[test]
fn a_page_of_another_origin_sees_refusals() {
    let guide = guide("builtin = \"echo\"").replace(ORIGIN, "*");
    // The same routes, without changes of refusals.
    let routes = guide.split_once("[[routes]]").unwrap().1;
    let plain = format!("[[routes]]{routes}").replace("/api/", "/plain/").replace("on = \"all\"", "");
    let tls_gateway = TlsGateway::start(&format!(
        "{guide}{plain}[[routes]]\npath = \"/\"\n\
         respond = {{ body = {OTHER_ORIGIN_PAGE:?}, content_type = \"text/html\" }}\n"
    ));
    let results = open_page(&tls_gateway);
    let limits = |left: u64, all: u64| format!("\"per-key\";r={left};t=60, \"per-address\";r={all};t=60");
    let admitted = |left: u64, all: u64| json!([200, limits(left, all), null, false]);
    let refused = json!([429, limits(0, 597), "60", true]);
    // Without `on`, the page cannot tell a refusal from a broken connection.
    let expected = json!([admitted(2, 599), admitted(1, 598), admitted(0, 597), refused, "TypeError"]);
    assert_eq!(results["results"], expected);
}
