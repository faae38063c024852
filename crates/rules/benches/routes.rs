//! The time to find one of 10,000 routes, by the kind of their paths.
//!
//! `cargo bench -p transom-rules`

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::hint::black_box;
use std::net::IpAddr;
use std::time::Instant;

use http::{HeaderMap, Method};
use transom_http::path_normalize::TrailingSlash;
use transom_rules::router::{RouteQuery, Router};

const ROUTES: usize = 10_000;
/// The kinds take turns.
const ROUNDS: usize = 15;

struct Kind {
    name: &'static str,
    router: Router,
    paths: Vec<String>,
}

impl Kind {
    fn new(name: &'static str, route: fn(usize) -> String, path: fn(usize) -> String) -> Kind {
        let routes =
            (0..ROUTES).map(|n| format!("[[routes]]\nname = \"{n}\"\npath = \"{}\"\nupstream = \"u\"\n", route(n)));
        let text = format!(
            "listen.http = \"127.0.0.1:80\"\n[upstreams.u]\nbuiltin = \"echo\"\n{}",
            routes.collect::<String>()
        );
        let config = transom_config::read_with_files(&text, &|_| Ok(Vec::new()));
        let config = config.unwrap_or_else(|problems| panic!("{:?}", problems.first()));
        // In no simple order.
        let paths = (0..ROUTES).map(|n| path(n * 7_919 % ROUTES)).collect();
        Kind { name, router: Router::new(&config.routes, TrailingSlash::Keep), paths }
    }

    /// Nanoseconds for each look-up.
    fn measure(&self) -> f64 {
        let (headers, mut params) = (HeaderMap::new(), Vec::new());
        let start = Instant::now();
        for path in &self.paths {
            let address = IpAddr::from([192, 0, 2, 1]).into();
            let query = RouteQuery {
                host: "a.example",
                method: &Method::GET,
                headers: &headers,
                address,
                path,
                query: "",
                secure: false,
            };
            assert!(matches!(black_box(self.router.find(&query, &mut params)), Ok(Some(_))));
        }
        start.elapsed().as_secs_f64() * 1e9 / ROUTES as f64
    }
}

fn main() {
    let kinds = [
        Kind::new("literals", |n| format!("/api/t{n}/users/all"), |n| format!("/api/t{n}/users/all")),
        Kind::new("parameters", |n| format!("/api/t{n}/users/{{id}}"), |n| format!("/api/t{n}/users/u7")),
        Kind::new(
            "parts, below literals",
            |n| format!("/api/t{n}/users/{{id}}.json"),
            |n| format!("/api/t{n}/users/u7.json"),
        ),
        Kind::new("parts, side by side", |n| format!("/api/t{n}-{{id}}.json"), |n| format!("/api/t{n}-u7.json")),
        Kind::new(
            "parts, all over",
            |n| format!("/v{{v}}/t{n}-{{user}}/f-*.{}", ["css", "js", "html"][n % 3]),
            |n| format!("/v2/t{n}-u7/f-app.min.{}", ["css", "js", "html"][n % 3]),
        ),
    ];
    let rounds: Vec<Vec<f64>> = (0..ROUNDS).map(|_| kinds.iter().map(Kind::measure).collect()).collect();
    println!("paths of {ROUTES} routes: ns for a look-up");
    for (index, kind) in kinds.iter().enumerate() {
        let mut times: Vec<f64> = rounds.iter().map(|round| round[index]).collect();
        times.sort_by(f64::total_cmp);
        println!("{}: {:.0}", kind.name, times[ROUNDS / 2]);
    }
}
