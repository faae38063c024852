//! Load balancing: round robin, least requests, and consistent hashing.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};

use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;
use crate::support::{eventually, forward_to};

fn counts(servers: &[Upstream]) -> Vec<usize> {
    servers.iter().map(|server| server.received().len()).collect()
}

/// Servers that respond with their number.
fn numbered(count: usize) -> Vec<Upstream> {
    let server = |number: usize| {
        Upstream::with_script(move |connection| {
            while connection.read_request().is_some() && connection.reply(200, &[], number.to_string().as_bytes()) {}
        })
    };
    (0..count).map(server).collect()
}

fn addresses(servers: &[Upstream]) -> Vec<std::net::SocketAddr> {
    servers.iter().map(|server| server.address).collect()
}

#[test]
fn round_robin_follows_weights() {
    let servers = numbered(3);
    let urls: Vec<String> = servers.iter().map(|server| format!("http://{}", server.address)).collect();
    let toml = format!(
        "workers = 1\n[upstreams.u]\nbalance = \"round-robin\"\nservers = [\n  \"{}\",\n  {{ url = \"{}\", weight = 3 }},\n  \
         {{ url = \"{}\" }},\n]\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        urls[0], urls[1], urls[2]
    );
    let gateway = Gateway::start(&toml);
    let mut client = gateway.client();
    let order: String = (0..10).map(|_| client.get("/a").expect(200).text()).collect();
    assert_eq!(order, "1012110121");
    assert_eq!(counts(&servers), [2, 6, 2]);
}

#[test]
fn a_backup_server_is_used_only_while_no_other_is_available() {
    let server = |number: &'static str| {
        move |connection: &mut crate::support::upstream::Connection| {
            while connection.read_request().is_some() && connection.reply(200, &[], number.as_bytes()) {}
        }
    };
    let (first, backup) = (Upstream::with_script(server("first")), Upstream::with_script(server("backup")));
    let address = first.address;
    let toml = format!(
        "[upstreams.u]\nservers = [\"http://{address}\", {{ url = \"http://{}\", backup = true, weight = 9 }}]\n\
         health = {{ path = \"/health\", interval = \"50ms\", unhealthy_after = 1, healthy_after = 1 }}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        backup.address
    );
    let gateway = Gateway::start(&toml);
    let mut client = gateway.client();
    let is_up = |up: u64| {
        let url = format!("http://{address}");
        gateway.metrics().sum("transom_upstream_server_up", &[("server", &url)]) == up
    };
    let mut responses = |number| (0..20).all(|_| client.get("/a").expect(200).text() == number);
    assert!(responses("first"));
    drop(first);
    // Retries first, then the health checks.
    assert!(responses("backup"));
    eventually("the server is unhealthy", || is_up(0));
    assert!(responses("backup"));
    let _first = Upstream::at_address(address, server("first"));
    eventually("the server is healthy", || is_up(1));
    assert!(responses("first"));
}

#[test]
fn least_requests_avoids_busy_servers() {
    let (held, arrived) = (Arc::new((Mutex::new(true), Condvar::new())), Arc::new(Mutex::new(Vec::new())));
    let server = |number: usize| {
        let (held, arrived) = (Arc::clone(&held), Arc::clone(&arrived));
        Upstream::with_script(move |connection| {
            while let Some(request) = connection.read_request() {
                if request.target == "/slow" {
                    arrived.lock().unwrap().push(number);
                    let held = held.1.wait_while(held.0.lock().unwrap(), |held| *held).unwrap();
                    drop(held);
                }
                connection.reply(200, &[], number.to_string().as_bytes());
            }
        })
    };
    let servers = [server(0), server(1)];
    let gateway = Gateway::start(&format!("workers = 1\n{}", forward_to(&addresses(&servers), "")));
    let mut slow = gateway.client();
    slow.send(crate::support::client::request("GET", "/slow", &[], b""));
    eventually("the request is in flight", || !arrived.lock().unwrap().is_empty());
    let busy = arrived.lock().unwrap()[0];
    let in_flight = |server: usize| {
        let url = format!("http://{}", servers[server].address);
        gateway.metrics().sum("transom_upstream_requests_active", &[("server", &url)])
    };
    assert_eq!((in_flight(busy), in_flight(1 - busy)), (1, 0));
    let mut client = gateway.client();
    for _ in 0..20 {
        assert_eq!(client.get("/quick").expect(200).text(), (1 - busy).to_string());
    }
    *held.0.lock().unwrap() = false;
    held.1.notify_all();
    slow.read_response().expect(200);
    eventually("no request is in flight", || in_flight(busy) == 0);
    // Both servers have the same load again, so both get requests.
    eventually("the other server gets requests", || client.get("/quick").expect(200).text() == busy.to_string());
}

/// The server that responds to each user.
fn servers_of_users(gateway: &Gateway, users: usize) -> HashMap<usize, String> {
    let mut client = gateway.client();
    let mut home = |user: usize| client.get_with("/a", &[("x-user", &user.to_string())]).expect(200).text();
    (0..users).map(|user| (user, home(user))).collect()
}

#[test]
fn consistent_hashing_keeps_keys_on_their_servers() {
    let servers = numbered(4);
    let hash = "balance = { hash = \"header:x-user\" }";
    let all = forward_to(&addresses(&servers), hash);
    let mut gateway = Gateway::start(&all);
    let before = servers_of_users(&gateway, 60);
    assert_eq!(servers_of_users(&gateway, 60), before);
    for server in 0..4 {
        let share = before.values().filter(|home| **home == server.to_string()).count();
        // The unit tests of the algorithms cover the balance; here it depends on the ports of the servers.
        assert!(share > 0, "server {server} has no user");
    }
    // Another gateway chooses the same servers.
    assert_eq!(servers_of_users(&Gateway::start(&all), 60), before);
    // Without a key, any server may respond.
    gateway.get("/a").expect(200);
    // The last server is removed, and only its keys move.
    gateway.reload(&forward_to(&addresses(&servers[..3]), hash));
    eventually("the last server is not used", || servers_of_users(&gateway, 60).values().all(|home| home != "3"));
    let after = servers_of_users(&gateway, 60);
    for (user, home) in &before {
        assert!(home == "3" || after[user] == *home, "{user} moved from {home} to {}", after[user]);
    }
}

#[test]
fn keys_of_a_dead_server_move_to_the_next_and_return() {
    let servers = numbered(3);
    let dead = Upstream::refusing_connections();
    let mut with_dead = addresses(&servers);
    with_dead.push(dead.address);
    let settings = "balance = { hash = [\"path\", \"query:u\"] }\nejection = { failures = 1, time = \"1h\" }";
    let gateway = Gateway::start(&forward_to(&with_dead, settings));
    let without = Gateway::start(&forward_to(&addresses(&servers), settings));
    let mut clients = (gateway.client(), without.client());
    for user in 0..60 {
        let target = format!("/a?u={user}");
        let responses = (clients.0.get(&target).expect(200).text(), clients.1.get(&target).expect(200).text());
        assert_eq!(responses.0, responses.1, "{target}");
    }
    assert_eq!(gateway.metrics().sum("transom_upstream_server_ejected", &[]), 1);
}
