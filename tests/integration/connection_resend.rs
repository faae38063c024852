//! A request is resent when that is safe, once, and never otherwise.
//!
//! There is one worker, so that there is one connection pool.

use std::sync::{Arc, Barrier};

use crate::support::client::{HOST, request};
use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;
use crate::support::{eventually_eq, forward_all};

fn gateway(upstream: &Upstream) -> Gateway {
    Gateway::start(&format!("workers = 1\n{}", forward_all(upstream)))
}

/// An upstream that responds to all requests, except on connections that `dying` selects by number: there it responds to the
/// first request, and closes the connection after reading the second.
fn dying_after_one(dying: impl Fn(usize) -> bool + Send + Sync + 'static) -> Upstream {
    Upstream::with_script(move |connection| {
        if connection.read_request().is_some() && connection.reply(200, &[], b"") {
            while connection.read_request().is_some() && !dying(connection.number) && connection.reply(200, &[], b"") {}
        }
    })
}

#[test]
fn a_get_on_a_dead_connection_is_resent() {
    let upstream = dying_after_one(|number| number == 0);
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.get("/first").expect(200);
    client.request("GET", "/second?a=%20b", &[("X", "a"), ("Y", ""), ("x", "\"b\";c")], b"").expect(200);
    let received = upstream.received();
    let sent: Vec<_> = received.iter().map(|request| (request.target.as_str(), request.connection)).collect();
    assert_eq!(sent, [("/first", 0), ("/second?a=%20b", 0), ("/second?a=%20b", 1)]);
    assert_eq!((&received[1].method, &received[1].fields), (&received[2].method, &received[2].fields));
    assert_eq!(received[2].values("x"), ["a", "\"b\";c"]);
}

#[test]
fn head_put_and_delete_without_a_body_are_resent() {
    for method in ["HEAD", "OPTIONS", "PUT", "DELETE"] {
        let upstream = dying_after_one(|number| number == 0);
        let gateway = gateway(&upstream);
        let mut client = gateway.client();
        client.get("/first").expect(200);
        client.request(method, "/second", &[], b"").expect(200);
        assert_eq!(upstream.received().len(), 3, "{method}");
    }
}

#[test]
fn a_request_is_resent_only_once() {
    // The first connection ends at its second request, and later connections at their first.
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() && connection.number == 0 && connection.reply(200, &[], b"") {
            connection.read_request();
        }
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.get("/first").expect(200);
    client.get("/second").expect(502).problem();
    assert_eq!(upstream.received().len(), 3);
}

#[test]
fn nothing_is_resent_on_a_new_connection() {
    let upstream = Upstream::with_script(|connection| drop(connection.read_request()));
    let gateway = gateway(&upstream);
    gateway.get("/a").expect(502).problem();
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn a_sent_post_is_not_resent() {
    for body in ["body", ""] {
        let upstream = dying_after_one(|number| number == 0);
        let gateway = gateway(&upstream);
        let mut client = gateway.client();
        client.get("/first").expect(200);
        client.post("/second", body).expect(502).problem();
        assert_eq!(upstream.received().len(), 2, "{body:?}");
    }
}

#[test]
fn a_get_with_a_body_is_not_resent() {
    let upstream = dying_after_one(|number| number == 0);
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.get("/first").expect(200);
    client.request("GET", "/second", &[], b"body").expect(502);
    let mut client = gateway.client();
    client.send(format!("PUT /third HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"));
    client.read_response().expect(200);
    assert_eq!(upstream.received().len(), 3);
}

#[test]
fn a_request_is_not_resent_once_a_response_has_begun() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_request().is_some() && connection.reply(200, &[], b"") && connection.read_request().is_some()
        {
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc");
        }
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.get("/first").expect(200);
    client.send(request("GET", "/second", &[], b""));
    client.read_head().unwrap().expect(200);
    assert_eq!(client.read_to_end(), b"abc");
    assert_eq!(upstream.received().len(), 2);
}

#[test]
fn a_connection_closed_while_idle_is_not_used() {
    // Then a POST is safe, too: nothing was sent.
    let closed = Arc::new(Barrier::new(2));
    let upstream = Upstream::with_script({
        let closed = Arc::clone(&closed);
        move |connection| {
            if connection.read_request().is_some() && connection.reply(200, &[], b"") {
                connection.close();
                closed.wait();
            }
        }
    });
    let gateway = gateway(&upstream);
    let mut client = gateway.client();
    client.get("/first").expect(200);
    closed.wait();
    for n in 2..5 {
        client.post("/next", "body").expect(200);
        closed.wait();
        assert_eq!((upstream.received().len(), upstream.connections()), (n, n));
    }
}

#[test]
fn many_connections_closed_while_idle_are_not_used() {
    // More than tokio lets a task try before it has to wait.
    const CONNECTIONS: usize = 150;
    let all_open = Arc::new(Barrier::new(CONNECTIONS));
    let close = Arc::new(Barrier::new(CONNECTIONS + 1));
    let upstream = Upstream::with_script({
        let (all_open, close) = (Arc::clone(&all_open), Arc::clone(&close));
        move |connection| {
            while connection.read_request().is_some() {
                if connection.number >= CONNECTIONS {
                    connection.reply(200, &[], b"");
                    continue;
                }
                all_open.wait();
                connection.reply(200, &[], b"");
                close.wait();
                connection.close();
                close.wait();
            }
        }
    });
    let gateway = gateway(&upstream);
    let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| gateway.client()).collect();
    for client in &mut clients {
        client.send(request("GET", "/first", &[], b""));
    }
    clients.iter_mut().for_each(|client| drop(client.read_response().expect(200)));
    let idle = || gateway.metrics().sum("transom_upstream_connections", &[("state", "idle")]);
    eventually_eq(idle, CONNECTIONS as u64);
    close.wait();
    close.wait();
    gateway.client().post("/next", "body").expect(200);
    assert_eq!((upstream.received().len(), upstream.connections()), (CONNECTIONS + 1, CONNECTIONS + 1));
}
