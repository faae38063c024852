//! The layering of the source, as far as Cargo does not enforce it: which module of a crate may use which, in which order the maps
//! of `src/lib.rs` and `ARCHITECTURE.md` list them, and which files may read the clock, use atomics, contain `unsafe` or name
//! status codes.
//!
//! The test reads the source as text and looks for `crate::module` and `super::module`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Every module of the gateway, from the top layer to the bottom, with the modules of the gateway that it may use. A module uses only
/// modules below it in this list, so there are no cycles.
const MODULES: [(&str, &[&str]); 24] = [
    (
        "cli",
        &[
            "access_file",
            "admin",
            "atomic_file",
            "downstream",
            "explain",
            "file_watch",
            "io_stream",
            "key_set_fetcher",
            "server",
            "shared_data",
            "toml_comments",
        ],
    ),
    ("file_watch", &[]),
    (
        "server",
        &[
            "access_log",
            "acme",
            "admin",
            "downstream",
            "key_set_fetcher",
            "notify",
            "persistence",
            "proxy",
            "shared_data",
            "spans",
            "upstream",
        ],
    ),
    (
        "admin",
        &[
            "access_file",
            "decision",
            "downstream",
            "explain",
            "notify",
            "persistence",
            "proxy",
            "shared_data",
            "upstream",
        ],
    ),
    ("explain", &["decision", "proxy"]),
    (
        "downstream",
        &["acme", "http1_stream", "informational", "io_stream", "proxy", "ratelimit_service", "timer", "upstream"],
    ),
    ("ratelimit_service", &["decision", "proxy", "upstream"]),
    ("access_file", &["atomic_file", "toml_comments"]),
    ("acme", &["atomic_file"]),
    ("persistence", &["atomic_file"]),
    ("shared_data", &["atomic_file"]),
    ("atomic_file", &[]),
    ("proxy", &["access_log", "decision", "informational", "notify", "spans", "timer", "upstream"]),
    ("spans", &["access_log"]),
    ("access_log", &[]),
    ("decision", &["notify"]),
    ("key_set_fetcher", &["upstream"]),
    ("notify", &["upstream"]),
    ("upstream", &["http1_stream", "informational", "io_stream", "timer"]),
    ("http1_stream", &["io_stream"]),
    ("informational", &[]),
    ("io_stream", &[]),
    ("timer", &[]),
    ("toml_comments", &[]),
];

/// The modules of the other crates: a module uses only modules behind it in its list. The sections of the configuration use one
/// another, so `config` has no list.
const ORDERS: [(&str, &[&str]); 9] = [
    (
        "http",
        &[
            "forward_auth",
            "request_id",
            "request_validation",
            "headers",
            "forwarded",
            "client_address",
            "http1_head",
            "http1_body",
            "path_normalize",
            "percent_encoding",
            "request_values",
            "trace_context",
            "websocket_handshake",
            "error",
        ],
    ),
    (
        "import",
        &[
            "envoy_ratelimit",
            "ingress",
            "kong",
            "nginx",
            "traefik",
            "traefik_rule",
            "kong_plugins",
            "route_order",
            "tree",
            "path",
            "rate",
            "toml_writer",
            "gateway",
            "network",
            "source",
        ],
    ),
    ("jwt", &["cache", "jwks", "published_keys", "token", "verification_key"]),
    (
        "limiter",
        &[
            "atomics_loom",
            "burst_bound",
            "deferred_refunds",
            "delay",
            "ending_limits",
            "leased_tokens",
            "memory_loom",
            "penalty",
            "shared_counting",
            "slot_decision",
            "tower",
            "limiter",
            "verdict",
            "decision",
            "decision_context",
            "charge_plan",
            "decision_time",
            "rule_set",
            "acquire",
            "concurrency",
            "identity",
            "sliding_counter",
            "sharded_counter",
            "store_key",
            "rule",
            "ip_prefix",
            "key",
            "limit",
            "secret_digest",
            "table",
            "bucket",
            "memory",
            "waiter_limit",
            "atomics",
            "window_kind",
            "counter",
            "window",
            "handles",
        ],
    ),
    (
        "rules",
        &[
            "resolved_query",
            "resolved_request",
            "compiled_config",
            "access",
            "descriptors",
            "response_cost",
            "route_actions",
            "public_location",
            "responses",
            "ratelimit_headers",
            "router",
            "top_keys",
            "rate_limit_key",
            "overrides",
            "store_key_text",
            "live_clients",
            "client_plans",
            "sharded_table",
            "key_source",
            "acme_challenges",
        ],
    ),
    ("runtime", &["clock", "metrics"]),
    (
        "simulate",
        &[
            "report_html",
            "report_text",
            "report",
            "replay",
            "request_reader",
            "scenario",
            "log_files",
            "decompression",
            "log_format",
            "wrapper",
            "nginx_conf",
            "formats",
            "combined",
            "json_line",
            "pattern",
            "columns",
            "log_line",
            "field_names",
            "json_scanner",
            "statistics",
            "timestamp",
        ],
    ),
    (
        "store",
        &[
            "exploration",
            "delayed_charges",
            "settlement",
            "counter_access",
            "decision_queries",
            "exact_mode",
            "map_follower",
            "outage",
            "test_worker",
            "token_fetch",
            "shared_decision",
            "known_usage",
            "shared_counters",
            "circuit_breaker",
            "shared_map",
            "outage_log",
            "diagnose",
            "reported_usage",
            "client",
            "cluster",
            "hash_slot",
            "reconnecting",
            "sentinel",
            "connect",
            "simulated_store",
            "connection",
            "unreported_usage",
            "usage_order",
            "lease_sizing",
            "scripts",
        ],
    ),
    (
        "usage",
        &[
            "usage_reader",
            "request_body",
            "passing_model",
            "learnt_cost",
            "content_decoder",
            "event_stream",
            "format",
            "json_scanner",
            "values",
            "json_pointer",
            "memory_budget",
            "usage",
            "decimal",
        ],
    ),
];

/// Crates without I/O and waiting.
const PURE: [&str; 5] = ["http", "jwt", "config", "rules", "usage"];

/// Files that may name status codes, with the reason.
const STATUS_CODES: [(&str, &str); 4] = [
    ("crates/rules/src/responses.rs", "builds every response of the gateway"),
    ("crates/http/src/http1_head.rs", "the status of a response says whether it has a body"),
    ("crates/http/src/websocket_handshake.rs", "distinguishes a 101 from other responses of the upstream"),
    ("crates/limiter/src/tower.rs", "the middleware refuses with 429"),
];
/// Files that may use atomics, with the reason.
const ATOMICS: [(&str, &str); 15] = [
    ("crates/runtime/src/clock.rs", "workers share the offset of the clock"),
    ("crates/runtime/src/metrics/storage.rs", "counted by one worker, read by a scrape"),
    (
        "src/downstream/connection_limit.rs",
        "connections of all workers are counted, once at their start and once at their end",
    ),
    ("crates/store/src/usage_order.rs", "calls of all workers to the store are numbered in one order"),
    ("crates/store/src/unreported_usage.rs", "all workers state usage that one of them has yet to report"),
    ("src/upstream/request_limit.rs", "requests of all workers are counted where they are limited"),
    ("src/upstream/server_health.rs", "workers share the health of servers"),
    ("src/access_log/mod.rs", "whether the file was moved"),
    ("crates/usage/src/memory_budget.rs", "bodies of all workers share one bound of memory"),
    ("crates/jwt/src/published_keys.rs", "workers notice changed keys without a lock"),
    ("crates/rules/src/access.rs", "workers notice changed deny entries without a lock"),
    ("crates/rules/src/live_clients.rs", "workers notice changed clients without a lock"),
    ("crates/limiter/src/atomics.rs", "the only access of the counter table to atomics"),
    ("crates/limiter/src/atomics_loom.rs", "the same for the loom models"),
    ("crates/limiter/src/tower.rs", "its tests count requests"),
];
/// The only file of the workspace with `unsafe`.
const UNSAFE: &str = "crates/limiter/src/memory.rs";
/// Files that may read time, with the reason.
const CLOCKS: [(&str, &str); 2] = [
    ("crates/runtime/src/clock.rs", "the only module of the gateway that reads time"),
    ("crates/limiter/src/tower.rs", "the middleware"),
];

/// Names of files that do not say what the file holds.
const GENERIC_NAMES: [&str; 7] = ["utils", "util", "common", "helpers", "helper", "manager", "types"];

struct Source {
    /// The path below the folder that was searched.
    name: String,
    text: String,
}

impl Source {
    /// The lines without comments, with their numbers.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().map(|(n, line)| (n + 1, line.trim_start()));
        lines.filter(|(_, line)| !line.starts_with("//"))
    }

    /// `file:line: word` for every line of code that contains the word.
    fn lines_with(&self, word: &str) -> Vec<String> {
        self.code().filter(|(_, line)| line.contains(word)).map(|(n, _)| format!("{}:{n}: {word}", self.name)).collect()
    }

    fn module(&self) -> &str {
        self.name.split('/').next().unwrap().trim_end_matches(".rs")
    }
}

fn sources(folder: &str) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            let name = path.strip_prefix(&root).unwrap().display().to_string();
            if path.is_dir() && name != "target" && !name.starts_with('.') && !name.ends_with("/target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(Source { text: fs::read_to_string(&path).unwrap(), name });
            }
        }
    }
    assert!(!found.is_empty(), "nothing under {folder}");
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The sources of all crates, by their paths in the repository.
fn code() -> Vec<Source> {
    let is_code = |source: &Source| source.name.starts_with("src/") || source.name.split('/').nth(2) == Some("src");
    everything().into_iter().filter(|source| !source.name.starts_with("benches/") && is_code(source)).collect()
}

/// All Rust files of the workspace.
fn everything() -> Vec<Source> {
    let mut all = Vec::new();
    for folder in ["src", "crates", "tests", "benches"] {
        for mut source in sources(folder) {
            source.name = format!("{folder}/{}", source.name);
            all.push(source);
        }
    }
    all
}

#[track_caller]
fn none(what: &str, found: Vec<String>) {
    assert!(found.is_empty(), "{what}:\n{}", found.join("\n"));
}

/// Fails for a file that contains one of the words and is not listed, and for a listed file that contains none.
fn only_in(words: &[&str], files: &[(&str, &str)]) {
    let sources = code();
    let listed = |name: &str| files.iter().any(|(file, _)| *file == name);
    let found = |source: &Source| words.iter().flat_map(|word| source.lines_with(word)).collect::<Vec<_>>();
    none("elsewhere", sources.iter().filter(|source| !listed(&source.name)).flat_map(found).collect());
    for (file, _) in files {
        let source = sources.iter().find(|source| source.name == *file);
        assert!(source.is_some_and(|source| !found(source).is_empty()), "{file} needs no exception");
    }
}

/// The modules of its crate that a file names, as `crate::module` or with as many `super` as lead to the root of the crate, outside of
/// its unit tests.
fn used(source: &Source) -> BTreeSet<String> {
    let depth = source.name.matches('/').count() + usize::from(!source.name.ends_with("/mod.rs"));
    let to_root = "super::".repeat(depth);
    let code = source.code().map(|(_, line)| line).take_while(|line| !line.ends_with("mod tests {"));
    let paths = code.flat_map(|line| line.split("crate::").skip(1).chain(line.split(to_root.as_str()).skip(1)));
    let names = paths.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or(""));
    names.filter(|name| *name != source.module()).map(str::to_owned).collect()
}

/// The sources of a crate besides its root.
fn modules(folder: &str) -> Vec<Source> {
    let is_module = |source: &Source| !["lib.rs", "main.rs"].contains(&source.name.as_str());
    sources(folder).into_iter().filter(is_module).collect()
}

#[test]
fn a_module_uses_only_the_modules_it_may() {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in &modules("src") {
        assert!(MODULES.iter().any(|(name, _)| *name == source.module()), "{} is in no listed module", source.name);
        uses.entry(source.module().to_owned()).or_default().extend(used(source));
    }
    let mut wrong = Vec::new();
    for (layer, (module, may)) in MODULES.iter().enumerate() {
        let used = uses.remove(*module).unwrap_or_else(|| panic!("there is no module `{module}`"));
        let may: BTreeSet<String> = may.iter().map(|name| (*name).to_owned()).collect();
        if used != may {
            wrong.push(format!("`{module}` uses {used:?}, and may use {may:?}"));
        }
        for other in used {
            if MODULES.iter().position(|(name, _)| *name == other).is_none_or(|below| below <= layer) {
                wrong.push(format!("`{module}` is not above `{other}`"));
            }
        }
    }
    none("layering", wrong);
}

#[test]
fn a_module_of_a_crate_uses_only_the_modules_behind_it() {
    let mut wrong = Vec::new();
    for (name, order) in ORDERS {
        let sources = modules(&format!("crates/{name}/src"));
        let found: BTreeSet<&str> = sources.iter().map(Source::module).collect();
        assert_eq!(found, order.iter().copied().collect(), "modules of `{name}`");
        let place = |module: &str| order.iter().position(|listed| *listed == module);
        for source in &sources {
            let above = |other: &String| place(other).is_some_and(|at| Some(at) < place(source.module()));
            let above = used(source).into_iter().filter(above);
            wrong.extend(above.map(|other| format!("{name}: `{}` uses `{other}`", source.module())));
        }
    }
    none("layering", wrong);
}

#[test]
fn main_uses_only_the_commands() {
    let main = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/main.rs")).unwrap();
    let used = main.split("transom::").skip(1).map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap());
    assert_eq!(used.collect::<BTreeSet<_>>(), BTreeSet::from(["cli"]));
}

fn document(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// Fails unless a map lists every module once, and above the modules that it may use.
#[track_caller]
fn assert_order(map: &str, listed: &[&str]) {
    let names = |modules: &mut dyn Iterator<Item = &str>| modules.map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(names(&mut listed.iter().copied()), names(&mut MODULES.iter().map(|(module, _)| *module)), "{map}");
    assert_eq!(listed.len(), MODULES.len(), "{map}");
    let place = |module: &str| listed.iter().position(|name| *name == module);
    for (module, may) in MODULES {
        for other in may {
            assert!(place(module) < place(other), "{map}: `{module}` is not above `{other}`");
        }
    }
}

#[test]
fn the_map_in_lib_is_in_order() {
    let lib = document("src/lib.rs");
    assert!(MODULES.iter().all(|(module, _)| lib.contains(&format!("pub mod {module};"))));
    let rows = lib.lines().filter(|line| line.starts_with("//! | "));
    let names = rows.flat_map(|row| row.split("[`").skip(1)).filter_map(|rest| rest.split('`').next());
    assert_order("src/lib.rs", &names.collect::<Vec<_>>());
}

/// The map lists each crate once, and above the crates on which it depends.
#[test]
fn the_crates_in_the_architecture_are_in_order() {
    let page = document("ARCHITECTURE.md");
    let names = page.lines().filter_map(|line| line.strip_prefix("crates/")?.split_once("/src/"));
    let listed: Vec<&str> = names.map(|(name, _)| name).collect();
    let folders = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("crates")).unwrap();
    let folders: BTreeSet<String> = folders.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(listed.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>(), folders);
    for (place, name) in listed.iter().enumerate() {
        let manifest = document(&format!("crates/{name}/Cargo.toml"));
        let uses = |other: &&&str| manifest.lines().any(|line| line == format!("transom-{other}.workspace = true"));
        assert_eq!(listed[..=place].iter().find(uses), None, "`{name}` uses a crate above it");
    }
}

/// In the map of the architecture, a line with a module begins with two spaces and its name.
#[test]
fn the_map_in_the_architecture_is_in_order() {
    let page = document("ARCHITECTURE.md");
    let (_, map) = page.split_once("\nsrc/\n").unwrap();
    let (map, _) = map.split_once("\ncrates/").unwrap();
    let lines = map.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with(' '));
    let names = lines.filter_map(|line| line.split([' ', '/']).next()).filter(|name| *name != "main");
    assert_order("ARCHITECTURE.md", &names.collect::<Vec<_>>());
}

#[test]
fn pure_crates_and_the_limiter_do_no_io() {
    let forbidden = [
        "std::fs",
        "std::env",
        "std::thread",
        "TcpStream",
        "TcpListener",
        "Instant",
        "SystemTime",
        "async ",
        ".await",
        "println!",
    ];
    let mut found = Vec::new();
    for source in PURE.iter().flat_map(|name| sources(&format!("crates/{name}/src"))) {
        found.extend(forbidden.iter().flat_map(|word| source.lines_with(word)));
    }
    // The middleware is the only part of the limiter that knows HTTP and has a clock.
    for source in sources("crates/limiter/src").iter().filter(|source| source.name != "tower.rs") {
        found.extend(forbidden.iter().chain(&["use http", "http::"]).flat_map(|word| source.lines_with(word)));
    }
    none("in a crate without I/O", found);
}

#[test]
fn status_codes_are_named_in_listed_files_only() {
    only_in(&["StatusCode::"], &STATUS_CODES);
}

#[test]
fn atomics_are_used_in_listed_files_only() {
    only_in(&["sync::atomic", "portable_atomic"], &ATOMICS);
}

#[test]
fn time_is_read_in_one_module() {
    only_in(&["Instant::now", "SystemTime::now"], &CLOCKS);
}

#[test]
fn nothing_is_unsafe_unfinished_or_ignored() {
    // Split by `|`, so that this file does not contain the words.
    let words = ["uns|afe ", "TO|DO", "FIX|ME", "to|do!", "unimple|mented!", "#[ig|nore", "allow(de|ad_code)", "db|g!"];
    let words = words.map(|word| word.replace('|', ""));
    let mut found = Vec::new();
    for source in everything() {
        // Memory can be mapped only by `unsafe` code.
        let words = if source.name == UNSAFE { &words[1..] } else { &words[..] };
        for word in words {
            for (n, line) in source.text.lines().enumerate().filter(|(_, line)| line.contains(word)) {
                found.push(format!("{}:{}: {}", source.name, n + 1, line.trim()));
            }
        }
    }
    none("not allowed here", found);
}

#[test]
fn every_exception_to_a_lint_gives_its_reason() {
    let mut found = Vec::new();
    for source in everything() {
        let code: Vec<(usize, &str)> = source.code().collect();
        for (i, (n, line)) in code.iter().enumerate() {
            let attribute: String = code[i..].iter().take(4).map(|(_, line)| *line).collect();
            let is_exception = ["#[allow(", "#![allow(", "#[expect(", "#![expect("].iter().any(|a| line.starts_with(a));
            if is_exception && !attribute.split(")]").next().unwrap_or("").contains("reason = ") {
                found.push(format!("{}:{n}: {line}", source.name));
            }
        }
    }
    none("without a reason", found);
}

#[test]
fn every_file_opens_with_a_description() {
    let sources = everything();
    let undescribed = sources.iter().filter(|source| !source.text.starts_with("//! "));
    none("files without a `//!` header", undescribed.map(|source| source.name.clone()).collect());
}

#[test]
fn file_names_are_not_generic() {
    let named = |source: &Source| {
        let stem = |part: &str| GENERIC_NAMES.contains(&part.trim_end_matches(".rs"));
        source.name.split('/').any(stem).then(|| source.name.clone())
    };
    none("generic names", everything().iter().filter_map(named).collect());
}

#[test]
fn no_module_reexports_another() {
    // The limiter has a public interface for other programs.
    let sources = code().into_iter().filter(|source| !source.name.starts_with("crates/limiter/"));
    let found = |source: Source| ["pub use ", "pub(crate) use "].map(|word| source.lines_with(word)).concat();
    none("reexports", sources.flat_map(found).collect());
}
