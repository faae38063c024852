//! WebSocket over HTTP/2 streams (RFC 8441): opened by an extended CONNECT, for upstreams of either version. External clients
//! are covered by tests/external/stream_client.py.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::support::client::{Client, request};
use crate::support::external_scripts::{self, ScriptServer};
use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    CANCEL, DATA, END_STREAM, GOAWAY, HEADERS, Http2Client, PING, RST_STREAM, RawHttp2, STATUS_200, WINDOW_UPDATE,
    frame,
};
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::process::Process;
use crate::support::test_ca::ServerFiles;
use crate::support::tls_gateway::{TlsGateway, limited_route_to};
use crate::support::upstream::{Connection, Upstream};
use crate::support::{TempDir, eventually, eventually_eq, forward_all, forward_to, within};

fn upstream(server: &ScriptServer) -> String {
    format!("[upstreams.u]\nservers = [\"http://{}\"]\n", server.address)
}

/// The response of a server that accepts the handshake.
fn switch_response(key: &str) -> String {
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
    let accept = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, digest);
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: {accept}\r\n\r\n"
    )
}

/// Responds with 101, and then runs the script.
pub fn switching_upstream(script: impl Fn(&mut Connection) + Send + Sync + 'static) -> Upstream {
    Upstream::with_script(move |connection| {
        let Some(head) = connection.read_head() else { return };
        let Some(key) = head.field("sec-websocket-key") else {
            connection.reply(200, &[], b"plain\n");
            return;
        };
        connection.send(switch_response(key));
        script(connection);
    })
}

/// Echoes all bytes until the end of the connection.
fn echo(connection: &mut Connection) {
    while let Some(byte) = connection.read_exactly(1) {
        connection.send(byte);
    }
}

/// A connection whose stream 1 is a tunnel.
fn open_tunnel(gateway: &Gateway) -> RawHttp2 {
    let mut client = RawHttp2::connect(gateway.http);
    assert_eq!(client.open_websocket(1, "/chat").read_status(1), STATUS_200);
    client
}

/// A tunnel with full buffers, whose upstream does not read.
fn open_full_tunnel(gateway: &Gateway) -> RawHttp2 {
    let mut client = RawHttp2::connect(gateway.http);
    client.open_websocket(1, "/chat");
    // The windows of the connection and of the stream.
    let mut windows = [65_535; 2];
    let next = |client: &mut RawHttp2, windows: &mut [u32; 2]| {
        let frame = client.next_frame().unwrap();
        if frame.kind == WINDOW_UPDATE {
            windows[frame.stream as usize] += frame.code();
        }
        frame.kind
    };
    while next(&mut client, &mut windows) != HEADERS {}
    // The gateway may forward more bytes between two PING acknowledgements.
    let mut pings = 0;
    while pings < 20 {
        let piece = windows[0].min(windows[1]).min(16 * 1024);
        if piece > 0 {
            client.send(frame(DATA, 0, 1, &vec![b'x'; piece as usize]));
            windows = windows.map(|window| window - piece);
            pings = 0;
        } else {
            client.send(frame(PING, 0, 0, b"12345678"));
            while next(&mut client, &mut windows) != PING {}
            pings += 1;
        }
    }
    client
}

#[test]
fn all_checks_pass_with_prior_knowledge() {
    let server = ScriptServer::start("websocket_server.py", &[""; 0]);
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream(&server), false));
    external_scripts::run_checks("stream_client.py", &tls_gateway.client_arguments()[0]);
    eventually_eq(|| tls_gateway.gateway.metrics().sum("transom_tunnels", &[]), 0);
}

#[test]
fn all_checks_pass_over_tls_on_both_sides() {
    let server_ca = ServerFiles::new();
    let server = ScriptServer::start("websocket_server.py", &server_ca.tls_arguments());
    let upstream = format!(
        "[upstreams.u]\nservers = [\"https://{}\"]\n[upstreams.u.tls]\nca = {:?}\n",
        server.address, server_ca.ca
    );
    let tls_gateway = TlsGateway::start(&limited_route_to(&upstream, false));
    external_scripts::run_checks("stream_client.py", &tls_gateway.client_arguments()[1]);
}

#[test]
fn all_checks_pass_through_two_http2_gateways() {
    let server = ScriptServer::start("websocket_server.py", &[""; 0]);
    let inner = TlsGateway::start(&limited_route_to(&upstream(&server), false));
    let outer = TlsGateway::start(&limited_route_to(
        &format!("[upstreams.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n", inner.plain),
        false,
    ));
    let [plain, tls] = outer.client_arguments();
    external_scripts::run_checks("stream_client.py", &tls);
    // From an upgraded HTTP/1.1 connection to a stream.
    external_scripts::run_checks("websocket_client.py", &plain);
    eventually_eq(|| inner.gateway.metrics().sum("transom_tunnels", &[]), 0);
}

#[test]
fn an_extended_connect_is_counted_as_a_get() {
    let upstream = switching_upstream(|connection| {
        connection.read_exactly(5);
        connection.send("goodbye");
    });
    let scratch = TempDir::new();
    let log = scratch.path().join("access.log");
    let toml = format!("[access_log]\nfile = {log:?}\n[rules.r]\nkey = \"method\"\nwindows = [\"2/minute\"]\n");
    let gateway = Gateway::start(&(toml + &forward_all(&upstream) + "methods = [\"GET\"]\nrules = [\"r\"]\n"));
    let mut client = open_tunnel(&gateway);
    let metric = |name: &str, labels: &[(&str, &str)]| gateway.metrics().sum(name, labels);
    eventually_eq(|| (metric("transom_connections", &[]), metric("transom_tunnels", &[])), (1, 1));
    client.send(frame(DATA, 0, 1, b"hello")).send(frame(DATA, END_STREAM, 1, b""));
    assert_eq!(client.read_until(DATA).payload, b"goodbye");
    while client.next_frame().unwrap().flags & END_STREAM == 0 {}
    let head = upstream.only_request();
    assert_eq!((head.method.as_str(), head.target.as_str()), ("GET", "/chat"));
    assert_eq!((head.values("upgrade"), head.values("connection")), (vec!["websocket"], vec!["upgrade"]));
    assert_eq!(head.values("sec-websocket-version"), ["13"]);
    let mut line = String::new();
    eventually("a line is logged", || {
        line = std::fs::read_to_string(&log).unwrap();
        line.ends_with('\n')
    });
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&line["method"], &line["protocol"], &line["status"]), (&"GET".into(), &"HTTP/2.0".into(), &200.into()));
    assert_eq!((&line["bytes_sent"], &line["bytes_received"]), (&7.into(), &5.into()));
    eventually_eq(|| (metric("transom_requests_total", &[("code", "200")]), metric("transom_tunnels", &[])), (1, 0));
    // The tunnel was counted as one GET; this GET is the second.
    gateway.get("/plain");
    let refused = Http2Client::connect(gateway.http).connect_to("websocket", "/chat", &[]).expect(429);
    assert_eq!(refused.problem()["status"], 429);
}

#[test]
fn a_refused_extended_connect_gets_an_ordinary_response() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!(
        "{}websocket = false\n\
         [[routes]]\npath = \"/own\"\nrespond = {{ status = 200, body = \"fine\" }}\n\
         [[routes]]\npath = \"/gone\"\nrespond = {{ status = 410 }}\n\
         [[routes]]\npath = \"/posts\"\nmethods = [\"POST\"]\nupstream = \"u\"\n\
         [[routes]]\npath = \"/taken\"\nupstream = \"u\"\n",
        forward_all(&upstream)
    ));
    let mut client = Http2Client::connect(gateway.http);
    client.connect_to("websocket", "/a", &[]).expect(501).problem();
    client.connect_to("connect-udp", "/taken", &[]).expect(501).problem();
    client.connect_to("websocket", "/own", &[]).expect(501).problem();
    client.connect_to("websocket", "/gone", &[]).expect(410);
    client.connect_to("websocket", "/../a", &[]).expect(400).problem();
    // The request counts as a GET, which this route does not accept.
    client.connect_to("websocket", "/posts", &[]).expect(501);
    client.get("/a").expect(200);
    let received_before = upstream.received().len();
    // A response other than 101 opens no tunnel, also with status 200.
    client.connect_to("websocket", "/taken", &[]).expect(502).problem();
    // A gRPC error has status 200, which would accept the handshake.
    client.connect_to("websocket", "/a", &[("content-type", "application/grpc")]).expect(501).problem();
    assert_eq!(upstream.received().len(), received_before + 1);
    assert_eq!(gateway.metrics().sum("transom_tunnels", &[]), 0);
}

#[test]
fn an_invalid_handshake_response_is_502() {
    for response in [
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ] {
        let upstream = Upstream::with_script(move |connection| {
            connection.read_head();
            connection.send(response);
            connection.wait_for_close();
        });
        let gateway = Gateway::start(&forward_all(&upstream));
        Http2Client::connect(gateway.http).connect_to("websocket", "/chat", &[]).expect(502).problem();
    }
}

#[test]
fn extended_connect_is_not_offered_without_websocket_routes() {
    let upstream = Upstream::always(200);
    let is_offered = |toml: String| {
        let gateway = Gateway::start(&toml);
        let settings = RawHttp2::connect(gateway.http).read_until(crate::support::http2_client::SETTINGS).payload;
        // SETTINGS_ENABLE_CONNECT_PROTOCOL
        settings.chunks(6).any(|setting| setting == [0, 8, 0, 0, 0, 1])
    };
    assert!(is_offered(forward_all(&upstream)));
    assert!(!is_offered(forward_all(&upstream) + "websocket = false\n"));
}

#[test]
fn an_upstream_reset_becomes_a_stream_reset() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let upstream = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut head, mut byte) = (String::new(), [0]);
        while !head.ends_with("\r\n\r\n") {
            stream.read_exact(&mut byte).unwrap();
            head.push(char::from(byte[0]));
        }
        let key = head.lines().find_map(|line| line.strip_prefix("sec-websocket-key: ")).unwrap();
        stream.write_all(switch_response(key).as_bytes()).unwrap();
        stream.read_exact(&mut byte).unwrap();
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    });
    let gateway = Gateway::start(&forward_to(&[address], ""));
    let mut client = open_tunnel(&gateway);
    client.send(frame(DATA, 0, 1, b"x"));
    let reset = client.read_until(RST_STREAM);
    assert_eq!((reset.stream, reset.code()), (1, CANCEL));
    client.send(frame(PING, 0, 0, b"12345678"));
    assert_eq!(client.read_until(PING).payload, b"12345678");
    upstream.join().unwrap();
}

#[test]
fn an_idle_tunnel_is_closed() {
    let upstream = switching_upstream(|connection| while connection.read_exactly(1).is_some() {});
    let gateway = Gateway::start(&format!("[timeouts]\ntunnel = \"300ms\"\n{}", forward_all(&upstream)));
    let mut client = open_tunnel(&gateway);
    let end = within(Duration::from_millis(300), || client.read_until(DATA));
    assert_eq!((end.stream, end.flags & END_STREAM), (1, END_STREAM));
    eventually("the tunnel has ended", || gateway.metrics().sum("transom_tunnels", &[]) == 0);
}

#[test]
fn a_tunnel_outlives_request_and_connection_limits() {
    let upstream = switching_upstream(echo);
    let toml = "[timeouts]\nbody = \"1s\"\nresponse_head = \"1s\"\nrequest = \"2s\"\n\
                [http2]\nidle = \"1s\"\n[limits]\nmax_body = \"1KiB\"\n";
    let gateway = Gateway::start(&format!("{toml}{}", forward_all(&upstream)));
    let mut client = open_tunnel(&gateway);
    for round in 0..8 {
        thread::sleep(Duration::from_millis(400));
        let message = vec![round; 1000];
        client.send(frame(DATA, 0, 1, &message));
        let mut echoed = Vec::new();
        while echoed.len() < message.len() {
            echoed.extend(client.read_until(DATA).payload);
        }
        assert_eq!(echoed, message);
    }
}

#[test]
fn a_drain_keeps_tunnels_until_the_deadline() {
    let upstream = switching_upstream(echo);
    let mut process = Process::spawn(&format!("{}[timeouts]\ndrain = \"4s\"\n", forward_all(&upstream)));
    let mut client = RawHttp2::connect(process.http);
    assert_eq!(client.open_websocket(1, "/chat").read_status(1), STATUS_200);
    process.signal("TERM");
    assert_eq!(client.read_until(GOAWAY).code(), 0);
    client.send(frame(DATA, 0, 1, b"x"));
    assert_eq!(client.read_until(DATA).payload, b"x");
    within(Duration::from_secs(4), || client.read_to_end());
    assert!(process.wait().success());
}

#[test]
fn an_http2_server_without_extended_connect_receives_an_ordinary_request() {
    let upstream = Http2Upstream::always_ok(Options::default());
    let toml = format!("{}[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n", upstream.toml("u"));
    let gateway = Gateway::start(&toml);
    Http2Client::connect(gateway.http).connect_to("websocket", "/chat", &[]).expect(502).problem();
    assert_eq!(upstream.request_heads()[0].method, "GET");
}

#[test]
fn an_upgraded_connection_is_tunneled_to_a_stream() {
    let inner_upstream = switching_upstream(echo);
    let inner_gateway = Gateway::start(&forward_all(&inner_upstream));
    let gateway = Gateway::start(&format!(
        "[upstreams.u]\nservers = [\"http://{}\"]\nprotocol = \"http2\"\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        inner_gateway.http
    ));
    let mut client: Client = gateway.client();
    let fields =
        [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")];
    client.send(request("GET", "/chat", &fields, b""));
    let response = client.read_head().unwrap().expect(101);
    assert_eq!(response.field("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    client.send("hello");
    assert_eq!(client.read_exactly(5), b"hello");
    eventually_eq(|| inner_gateway.metrics().sum("transom_tunnels", &[]), 1);
    client.shutdown_write();
    client.expect_closed();
}

/// An upstream that runs a script, and keeps the connection open until the returned guard is dropped. The guard is dropped
/// before the upstream, also if the test fails.
fn holding_upstream(script: impl Fn(&mut Connection) + Send + Sync + 'static) -> (Upstream, mpsc::Sender<()>) {
    let (proceed, released) = mpsc::channel();
    let released = Mutex::new(released);
    let upstream = switching_upstream(move |connection| {
        script(connection);
        let _ = released.lock().unwrap().recv();
    });
    (upstream, proceed)
}

#[test]
fn a_client_reset_ends_the_tunnel() {
    for code in [CANCEL, 0, 2] {
        let (upstream, proceed) = holding_upstream(|connection| {
            connection.wait_for_close();
        });
        let gateway = Gateway::start(&forward_all(&upstream));
        let mut client = open_tunnel(&gateway);
        client.send(frame(RST_STREAM, 0, 1, &u32::to_be_bytes(code)));
        eventually("the tunnel has ended", || gateway.metrics().sum("transom_tunnels", &[]) == 0);
        drop(proceed);
    }
}

#[test]
fn a_disconnect_ends_the_tunnel_of_a_stalled_upstream() {
    for code in [Some(CANCEL), Some(0), Some(2), None] {
        let (upstream, proceed) = holding_upstream(|_| {});
        let gateway = Gateway::start(&forward_all(&upstream));
        let mut client = open_full_tunnel(&gateway);
        match code {
            Some(code) => {
                client.send(frame(RST_STREAM, 0, 1, &u32::to_be_bytes(code)));
            }
            // The whole connection ends.
            None => client.stream.shutdown(Shutdown::Both).unwrap(),
        }
        eventually("the tunnel has ended", || gateway.metrics().sum("transom_tunnels", &[]) == 0);
        drop(proceed);
    }
}

#[test]
fn undelivered_bytes_wait_for_the_idle_timeout_at_most() {
    let upstream = switching_upstream(|connection| {
        // Closes the connection once no byte can be written.
        connection.stream().set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        while connection.send([b'x'; 16 * 1024]) {}
    });
    let limits = "[timeouts]\ntunnel = \"1s\"\nbody = \"1s\"\n";
    let gateway = Gateway::start(&format!("{limits}{}", forward_all(&upstream)));
    let mut client = open_tunnel(&gateway);
    eventually("the tunnel has ended", || gateway.metrics().sum("transom_tunnels", &[]) == 0);
    assert_eq!(client.read_until(RST_STREAM).stream, 1);
}

#[test]
fn a_client_may_keep_sending_after_the_upstream_ends() {
    let (report, reported) = mpsc::channel();
    let upstream = switching_upstream(move |connection| {
        connection.send("bye");
        connection.stream().shutdown(Shutdown::Write).unwrap();
        report.send(connection.read_exactly(4)).unwrap();
    });
    let gateway = Gateway::start(&format!("[http2]\nidle = \"500ms\"\n{}", forward_all(&upstream)));
    let mut client = open_tunnel(&gateway);
    assert_eq!(client.read_until(DATA).payload, b"bye");
    while client.next_frame().unwrap().flags & END_STREAM == 0 {}
    // The elapsed time is the subject of the test: this connection is not idle.
    thread::sleep(Duration::from_millis(1500));
    client.send(frame(PING, 0, 0, b"12345678"));
    assert_eq!(client.next_frame().unwrap().kind, PING);
    client.send(frame(DATA, END_STREAM, 1, b"late"));
    assert_eq!(reported.recv().unwrap().as_deref(), Some(&b"late"[..]));
}
