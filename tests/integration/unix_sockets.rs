//! Upstream servers on this machine, reached by Unix sockets.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::thread;

use crate::support::TempDir;
use crate::support::gateway::Gateway;

fn toml(path: &std::path::Path) -> String {
    format!(
        "workers = 1\n[upstreams.u]\nservers = [\"unix:{}\"]\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        path.display()
    )
}

#[test]
fn requests_share_one_connection() {
    let scratch = TempDir::new();
    let path = scratch.path().join("api.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut heads = Vec::new();
        for _ in 0..3 {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfine\n").unwrap();
            heads.push(String::from_utf8(head).unwrap());
        }
        heads
    });
    let gateway = Gateway::start(&toml(&path));
    let mut client = gateway.client();
    for _ in 0..2 {
        assert_eq!(client.get("/a").expect(200).text(), "fine\n");
    }
    // HTTP/1.0 clients may send no Host, which the server requires.
    let mut client = gateway.client();
    client.send("GET /old HTTP/1.0\r\n\r\n");
    client.read_response().expect(200);
    let heads = server.join().unwrap();
    assert!(heads[2].starts_with("GET /old HTTP/1.1\r\n") && heads[2].contains("host: localhost\r\n"), "{}", heads[2]);
}

#[test]
fn a_socket_without_listener_is_502() {
    let scratch = TempDir::new();
    let path = scratch.path().join("api.sock");
    let gateway = Gateway::start(&toml(&path));
    gateway.get("/a").expect(502).problem();
    drop(UnixListener::bind(&path).unwrap());
    gateway.get("/a").expect(502).problem();
}
