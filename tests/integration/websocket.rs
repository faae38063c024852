//! WebSocket over HTTP/1.1: valid handshakes are forwarded, and all bytes after them unchanged.

use std::net::Shutdown;
use std::sync::mpsc;
use std::time::Duration;

use crate::support::client::{Client, HOST, HttpResponse, request};
use crate::support::gateway::Gateway;
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::process::Process;
use crate::support::upstream::{Connection, Upstream};
use crate::support::{eventually, eventually_eq, forward_all, within};

const HANDSHAKE: [(&str, &str); 4] = [
    ("Connection", "keep-alive, Upgrade"),
    ("Upgrade", "WebSocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// Responds with 101, and then runs the script.
fn switching_upstream(script: impl Fn(&mut Connection) + Send + Sync + 'static) -> Upstream {
    Upstream::with_script(move |connection| {
        if let Some(head) = connection.read_head() {
            if head.field("upgrade").is_none() {
                connection.reply(200, &[], b"plain\n");
                return;
            }
            connection.send(SWITCH);
            script(connection);
        }
    })
}

/// Echoes all bytes until the end of the connection.
fn echo(connection: &mut Connection) {
    while let Some(byte) = connection.read_exactly(1) {
        connection.send(byte);
    }
}

fn handshake(client: &mut Client) -> HttpResponse {
    client.send(request("GET", "/chat", &HANDSHAKE, b""));
    client.read_head().unwrap()
}

fn open_tunnel(gateway: &Gateway) -> Client {
    let mut client = gateway.client();
    handshake(&mut client).expect(101);
    client
}

#[test]
fn idle_connections_are_closed_for_a_tunnel() {
    let upstream = switching_upstream(echo);
    let upstreams = forward_all(&upstream).replacen("[[routes]]", "max_connections = 1\n[[routes]]", 1);
    // Shorter than the interval of five seconds in which the gateway checks idle connections.
    let gateway = Gateway::start(&format!("workers = 1\n{upstreams}\n[timeouts]\nconnect = \"3s\"\n"));
    gateway.get("/plain").expect(200);
    let mut client = open_tunnel(&gateway);
    client.send("hello");
    assert_eq!(client.read_exactly(5), b"hello");
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn a_handshake_and_the_bytes_after_it_are_forwarded() {
    let upstream = switching_upstream(echo);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    let response = handshake(&mut client).expect(101);
    assert_eq!((response.field("upgrade"), response.field("connection")), (Some("websocket"), Some("upgrade")));
    assert_eq!(response.field("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    // The tunnel interprets nothing, not even bytes that look like HTTP.
    for message in ["hello", "HTTP/1.1 400 Bad Request\r\n\r\n", "GET /other HTTP/1.1\r\nHost: a\r\n\r\n", "\r\n"] {
        client.send(message);
        assert_eq!(client.read_exactly(message.len()), message.as_bytes());
    }
    let head = upstream.only_request();
    assert_eq!((head.target.as_str(), head.field("host")), ("/chat", Some(HOST)));
    assert_eq!((head.values("upgrade"), head.values("connection")), (vec!["websocket"], vec!["upgrade"]));
    assert_eq!(head.field("sec-websocket-key"), Some("dGhlIHNhbXBsZSBub25jZQ=="));
}

#[test]
fn bytes_before_the_101_wait_for_it() {
    let (report, reported) = mpsc::channel();
    let (proceed, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let upstream = Upstream::with_script(move |connection| {
        connection.read_head();
        connection.stream().set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        // No byte arrives for a while.
        report.send(connection.read_exactly(1).is_none()).unwrap();
        connection.stream().set_read_timeout(None).unwrap();
        released.lock().unwrap().recv().unwrap();
        connection.send(format!("{SWITCH}welcome"));
        echo(connection);
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.send([request("GET", "/chat", &HANDSHAKE, b""), b"early".to_vec()].concat());
    assert_eq!(reported.recv(), Ok(true));
    proceed.send(()).unwrap();
    client.read_head().unwrap().expect(101);
    assert_eq!(client.read_exactly(12), b"welcomeearly");
}

#[test]
fn a_response_other_than_101_is_ordinary() {
    let upstream =
        Upstream::with_script(
            |connection| while connection.read_request().is_some() && connection.reply(426, &[], b"no\n") {},
        );
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    let mut response = handshake(&mut client).expect(426);
    client.read_body(&mut response, "GET");
    assert_eq!(response.text(), "no\n");
    // The connection continues, and later bytes on it are requests.
    client.get("/next").expect(426);
    assert_eq!(upstream.received()[1].field("upgrade"), None);
}

#[test]
fn a_101_to_another_protocol_is_502() {
    for response in [
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        // `Sec-WebSocket-Accept` is missing, wrong, or repeated.
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
    ] {
        let upstream = Upstream::with_script(move |connection| {
            connection.read_head();
            connection.send(response);
            connection.wait_for_close();
        });
        let gateway = Gateway::start(&forward_all(&upstream));
        handshake(&mut gateway.client()).expect(502);
    }
}

#[test]
fn other_upgrade_protocols_are_removed_and_the_request_forwarded() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    for fields in [
        &[("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABk")][..],
        &[("Connection", "Upgrade"), ("Upgrade", "websocket, h2c"), ("Sec-WebSocket-Key", "a")],
        &[("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Upgrade", "h2c"), ("Sec-WebSocket-Key", "a")],
        &[("Connection", "Upgrade"), ("Upgrade", "websocket")],
        &[("Upgrade", "websocket"), ("Sec-WebSocket-Key", "a")],
    ] {
        client.get_with("/a", fields).expect(200);
    }
    client.request("POST", "/a", &HANDSHAKE, b"").expect(200);
    client.request("POST", "/a", &[("Connection", "Upgrade"), ("Upgrade", "h2c")], b"body").expect(200);
    assert!(upstream.received().iter().all(|received| received.field("upgrade").is_none()));
}

#[test]
fn a_handshake_with_a_body_is_refused() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = gateway.client();
    client.request("GET", "/a", &HANDSHAKE, b"body").expect(400).problem();
    client.expect_closed();
    assert!(upstream.received().is_empty());
}

#[test]
fn a_route_can_disable_websockets() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("{}websocket = false\n", forward_all(&upstream)));
    handshake(&mut gateway.client()).expect(200);
    assert_eq!(upstream.only_request().field("upgrade"), None);
}

#[test]
fn an_http2_upstream_receives_an_ordinary_request() {
    let upstream = Http2Upstream::always_ok(Options::default());
    let toml = format!("{}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u"));
    handshake(&mut Gateway::start(&toml).client()).expect(200);
}

#[test]
fn a_websocket_counts_as_one_request() {
    let upstream = switching_upstream(echo);
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"2/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    let mut client = gateway.client();
    let response = handshake(&mut client).expect(101);
    assert_eq!(response.field("ratelimit"), Some("\"r\";r=1;t=60"));
    for _ in 0..10 {
        client.send("many messages");
        assert_eq!(client.read_exactly(13), b"many messages");
    }
    let mut other = open_tunnel(&gateway);
    other.send("x");
    assert_eq!(other.read_exactly(1), b"x");
    handshake(&mut gateway.client()).expect(429);
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn large_amounts_are_forwarded_both_ways_at_once() {
    const LENGTH: usize = 64 * 1024 * 1024;
    let upstream = switching_upstream(|connection| {
        let mut stream = connection.stream().try_clone().unwrap();
        let sender = std::thread::spawn(move || std::io::Write::write_all(&mut stream, &vec![b'd'; LENGTH]));
        let received = connection.read_exactly(LENGTH).unwrap();
        assert!(received.iter().all(|byte| *byte == b'u'));
        sender.join().unwrap().unwrap();
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = open_tunnel(&gateway);
    let mut stream = client.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || std::io::Write::write_all(&mut stream, &vec![b'u'; LENGTH]));
    assert!(client.read_exactly(LENGTH).iter().all(|byte| *byte == b'd'));
    sender.join().unwrap().unwrap();
}

#[test]
fn half_closed_tunnels_are_supported() {
    let upstream = switching_upstream(|connection| {
        echo(connection);
        connection.send("goodbye");
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = open_tunnel(&gateway);
    client.send("hello").shutdown_write();
    assert_eq!(client.read_to_end(), b"hellogoodbye");

    let (report, reported) = mpsc::channel();
    let upstream = switching_upstream(move |connection| {
        connection.send("goodbye");
        connection.stream().shutdown(Shutdown::Write).unwrap();
        report.send(connection.read_exactly(5)).unwrap();
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let mut client = open_tunnel(&gateway);
    assert_eq!(client.read_to_end(), b"goodbye");
    client.send("hello");
    assert_eq!(reported.recv().unwrap().unwrap(), b"hello");
}

#[test]
fn a_reset_on_one_side_resets_the_other() {
    let (report, reported) = mpsc::channel();
    let upstream = switching_upstream(move |connection| {
        report.send(connection.wait_for_close()).unwrap();
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let client = open_tunnel(&gateway);
    socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    assert_eq!(reported.recv(), Ok(true));

    let upstream = switching_upstream(|connection| {
        socket2::SockRef::from(&*connection.stream()).set_linger(Some(Duration::ZERO)).unwrap();
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    open_tunnel(&gateway).expect_closed();
    eventually("no connection is open", || gateway.metrics().sum("transom_connections", &[]) == 0);
}

#[test]
fn an_idle_tunnel_is_closed_and_an_active_one_is_not() {
    let upstream = switching_upstream(echo);
    let limits = "[timeouts]\ntunnel = \"3s\"\nbody = \"500ms\"\nrequest_head = \"500ms\"\n";
    let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
    let mut client = open_tunnel(&gateway);
    for _ in 0..6 {
        // The elapsed time is the subject of the test.
        std::thread::sleep(Duration::from_millis(700));
        client.send("x");
        assert_eq!(client.read_exactly(1), b"x");
    }
    within(Duration::from_secs(3), || client.expect_closed());
}

/// Sends until no more byte can be written.
fn fill_buffers(stream: &std::net::TcpStream) {
    let mut stream = stream;
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    while std::io::Write::write_all(&mut stream, &[b'x'; 16 * 1024]).is_ok() {}
}

#[test]
fn undelivered_bytes_wait_for_the_idle_timeout_at_most() {
    let limits = "[timeouts]\ntunnel = \"1s\"\n";
    for is_reset in [false, true] {
        // The client disconnects, and the upstream does not read.
        let (proceed, released) = mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let upstream = switching_upstream(move |_| {
            let _ = released.lock().unwrap().recv();
        });
        // Dropped before the upstream, whose script waits for it, also if the test fails.
        let proceed = proceed;
        let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
        let client = open_tunnel(&gateway);
        fill_buffers(&client.stream);
        if is_reset {
            socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
        drop(client);
        eventually("the tunnel has ended", || gateway.metrics().sum("transom_tunnels", &[]) == 0);
        drop(proceed);

        // The upstream disconnects, and the client does not read.
        let upstream = switching_upstream(move |connection| {
            fill_buffers(connection.stream());
            if is_reset {
                socket2::SockRef::from(&*connection.stream()).set_linger(Some(Duration::ZERO)).unwrap();
            }
        });
        let gateway = Gateway::start(&format!("{}{limits}", forward_all(&upstream)));
        let _client = open_tunnel(&gateway);
        eventually("the tunnel has ended", || gateway.metrics().sum("transom_tunnels", &[]) == 0);
    }
}

#[test]
fn a_tunnel_is_logged_at_its_end() {
    let upstream = switching_upstream(|connection| {
        connection.read_exactly(5);
        connection.send("goodbye");
    });
    let scratch = crate::support::TempDir::new();
    let log = scratch.path().join("access.log");
    let gateway = Gateway::start(&format!("[access_log]\nfile = \"{}\"\n{}", log.display(), forward_all(&upstream)));
    let mut client = open_tunnel(&gateway);
    let metric = |name: &str, labels: &[(&str, &str)]| gateway.metrics().sum(name, labels);
    eventually_eq(|| metric("transom_connections", &[]), 1);
    eventually_eq(|| metric("transom_tunnels", &[]), 1);
    client.send("hello").shutdown_write();
    assert_eq!(client.read_to_end(), b"goodbye");
    let mut line = String::new();
    eventually("a line is logged", || {
        line = std::fs::read_to_string(&log).unwrap();
        line.ends_with('\n')
    });
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&line["status"], &line["bytes_sent"], &line["bytes_received"]), (&101.into(), &7.into(), &5.into()));
    eventually_eq(|| metric("transom_requests_total", &[("code", "101")]), 1);
    eventually_eq(|| metric("transom_upstream_requests_total", &[("outcome", "responded")]), 1);
    eventually_eq(|| metric("transom_tunnels", &[]), 0);
}

#[test]
fn a_tunnel_has_its_own_upstream_connection() {
    let upstream = Upstream::with_script(|connection| {
        while let Some(head) = connection.read_head() {
            if head.field("upgrade").is_some() {
                connection.send(SWITCH);
                return echo(connection);
            }
            connection.reply(200, &[], b"plain\n");
        }
    });
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_all(&upstream)));
    gateway.get("/a").expect(200);
    let client = open_tunnel(&gateway);
    gateway.get("/b").expect(200);
    drop(client);
    gateway.get("/c").expect(200);
    let connections: Vec<usize> = upstream.received().iter().map(|received| received.connection).collect();
    assert_eq!(connections, [0, 1, 0, 0]);
}

#[test]
fn a_drain_closes_tunnels_at_its_deadline() {
    let upstream = switching_upstream(echo);
    let mut process = Process::spawn(&format!("{}[timeouts]\ndrain = \"300ms\"\n", forward_all(&upstream)));
    let mut client = process.client();
    handshake(&mut client).expect(101);
    process.signal("TERM");
    within(Duration::from_millis(300), || client.expect_closed());
    assert!(process.wait().success());
}
