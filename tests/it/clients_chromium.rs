//! A browser through the gateway: a page over HTTP/2 and TLS, a stream of events and a WebSocket.
//!
//! The page itself makes the checks (tests/parts/page.html) and tells its server what it found.

use std::fs::File;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::edge::Edge;
use crate::world::parts::program;
use crate::world::process::signal;
use crate::world::scripts::Script;
use crate::world::{DEADLINE, Scratch};

/// A browser takes long to start on a machine that is busy.
const LIMIT: Duration = Duration::from_secs(120);

struct Browser {
    child: Child,
    scratch: Scratch,
}

impl Browser {
    /// Opens `https://gateway.test/`, which is this address, and trusts that key alone.
    fn open(address: SocketAddr, pin: &str) -> Browser {
        let scratch = Scratch::new();
        let log = File::create(scratch.path().join("log")).unwrap();
        // Without a sandbox, which the root of a container can not have; the page is our own. Without
        // /dev/shm, which is small there.
        let child = Command::new(program("chromium"))
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--no-proxy-server", "--disable-background-networking", "--disable-component-update"])
            // Else it writes the page to standard output and ends before the page is through.
            .arg("--remote-debugging-port=0")
            .arg(format!("--user-data-dir={}", scratch.path().join("profile").display()))
            .arg(format!("--ignore-certificate-errors-spki-list={pin}"))
            .arg(format!("--host-resolver-rules=MAP gateway.test {}", address.ip()))
            .arg(format!("https://gateway.test:{}/", address.port()))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Browser { child, scratch }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("log")).unwrap()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Not killed at first, for it has children to end.
        signal(self.child.id(), "TERM");
        let start = Instant::now();
        while let Ok(None) = self.child.try_wait() {
            if start.elapsed() > DEADLINE {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn a_page_with_events_and_a_web_socket() {
    let page = Script::start("page_server.py", &[""; 0]);
    let sockets = Script::start("websocket_server.py", &[""; 0]);
    let edge = Edge::start(&format!(
        "[upstreams.page]\nservers = [\"http://{}\"]\n[upstreams.sockets]\nservers = [\"http://{}\"]\n\
         [[routes]]\npath = \"/echo\"\nupstream = \"sockets\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"page\"\n",
        page.address, sockets.address
    ));
    let browser = Browser::open(edge.tls, &edge.authority.pin);
    let found = page.line(LIMIT).unwrap_or_else(|| panic!("the page was not gone through:\n{}", browser.log()));
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(
        found,
        json!({
            "errors": [],
            "protocol": "h2",
            "secure": true,
            "image": 17,
            "style": "yes",
            "missing": 404,
            "many": true,
            "body": true,
            "events": ["0", "1", "2", "3", "4", "last"],
            "socket": {
                "same": [true, true, true], "subprotocol": "chat.v1",
                "code": 3000, "reason": "enough", "clean": true,
            },
        })
    );
}
