//! The rules of the house, held by a test: who may use whom, what lives in which room, and how files
//! are written. What breaks one is either in the wrong room, or the rule is; change one of them.
//!
//! It reads the sources as text. That is crude, and enough: a path is a path.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Every room, from the top of the house to its ground, with the rooms it may use. A room uses only
/// what stands below it in this list, so nothing can go round in a circle.
const ROOMS: [(&str, &[&str]); 20] = [
    ("cli", &["clock", "config", "listen", "metrics", "reload", "rule", "run", "shared"]),
    (
        "run",
        &[
            "access", "admin", "clock", "config", "count", "counters", "gateway", "http", "listen", "metrics", "rule",
            "shared", "upstream",
        ],
    ),
    ("listen", &["config", "gateway", "http", "interim", "metrics", "rule", "timer", "wire"]),
    (
        "gateway",
        &[
            "access", "clock", "config", "count", "http", "interim", "metrics", "rule", "shared", "timer", "token",
            "upstream",
        ],
    ),
    ("admin", &["clock", "counters", "http", "metrics", "shared", "upstream"]),
    ("upstream", &["clock", "config", "http", "interim", "metrics", "rule", "timer", "wire"]),
    ("access", &["config", "metrics"]),
    ("counters", &["clock", "config", "count", "metrics", "rule"]),
    ("shared", &["clock", "config", "count", "metrics", "rule"]),
    ("reload", &[]),
    ("metrics", &[]),
    ("timer", &[]),
    ("interim", &[]),
    ("wire", &[]),
    ("clock", &[]),
    ("http", &["config", "count", "rule", "token"]),
    ("config", &["rule", "token"]),
    ("token", &["rule"]),
    ("rule", &["count"]),
    ("count", &[]),
];

/// Rooms of the floors that do no I/O, and of the one that knows nothing of HTTP either.
const FIRST_FLOOR: [&str; 3] = ["http", "config", "token"];
const GROUND_FLOOR: [&str; 2] = ["rule", "count"];

/// Files that may name what others may not, and why.
const STATUS_CODES: [(&str, &str); 2] = [
    ("http/reply.rs", "the room of every answer"),
    ("http/upgrade.rs", "tells an answer of the upstream from a switch of protocols"),
];
const ATOMICS: [(&str, &str); 11] = [
    ("count/sync.rs", "the one door of the counting room, which models replace"),
    ("clock.rs", "what all loops agree upon"),
    ("metrics/cell.rs", "counted by one loop, read by the scrape"),
    ("run.rs", "whether the gateway is ready"),
    ("listen/capacity.rs", "connections are limited in all, and touch it once when they come and once when they go"),
    ("upstream/circuit.rs", "what is under way in all loops, where it is limited"),
    ("upstream/fleet.rs", "what all loops know of the servers"),
    ("upstream/standing.rs", "what all loops know of one server"),
    ("upstream/relay.rs", "wakers may be shared between threads"),
    ("access.rs", "that the file was moved away"),
    ("admin/mod.rs", "whether the gateway is ready"),
];
const MEMORY: &str = "src/count/memory.rs";
const CLOCKS: [(&str, &str); 1] = [("clock.rs", "the only room that reads time")];

const NO_NAMES: [&str; 7] = ["utils", "util", "common", "helpers", "helper", "manager", "types"];

struct Source {
    /// From the folder it was found under.
    name: String,
    text: String,
}

impl Source {
    /// The lines that are no comment, with their numbers.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().map(|(n, line)| (n + 1, line.trim_start()));
        lines.filter(|(_, line)| !line.starts_with("//"))
    }

    /// `file:line` of every line of code in which a word occurs.
    fn places(&self, word: &str) -> Vec<String> {
        self.code().filter(|(_, line)| line.contains(word)).map(|(n, _)| format!("{}:{n}: {word}", self.name)).collect()
    }

    fn room(&self) -> &str {
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

/// All that is written in Rust here.
fn everything() -> Vec<Source> {
    let mut all = Vec::new();
    for folder in ["src", "tests", "benches"] {
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

/// Fails where a word stands in a file that is not listed, and where a listed file no longer has it.
fn only_in(words: &[&str], files: &[(&str, &str)]) {
    let sources = sources("src");
    let listed = |name: &str| files.iter().any(|(file, _)| *file == name);
    let found = |source: &Source| words.iter().flat_map(|word| source.places(word)).collect::<Vec<_>>();
    none("elsewhere", sources.iter().filter(|source| !listed(&source.name)).flat_map(found).collect());
    for (file, _) in files {
        let source = sources.iter().find(|source| source.name == *file);
        assert!(source.is_some_and(|source| !found(source).is_empty()), "{file} needs no exception any more");
    }
}

/// The rooms that a file names, as `crate::room`.
fn used(source: &Source) -> BTreeSet<String> {
    let paths = source.code().flat_map(|(_, line)| line.split("crate::").skip(1));
    let names = paths.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or(""));
    names.filter(|name| *name != source.room()).map(str::to_owned).collect()
}

#[test]
fn a_room_uses_only_the_rooms_it_may() {
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources("src").iter().filter(|source| !["lib.rs", "main.rs"].contains(&source.name.as_str())) {
        assert!(ROOMS.iter().any(|(room, _)| *room == source.room()), "{} is in no room of the list", source.name);
        arrows.entry(source.room().to_owned()).or_default().extend(used(source));
    }
    for (height, (room, may)) in ROOMS.iter().enumerate() {
        let used = arrows.remove(*room).unwrap_or_else(|| panic!("there is no room `{room}`"));
        let may: BTreeSet<String> = may.iter().map(|room| (*room).to_owned()).collect();
        assert_eq!(used, may, "`{room}` uses the left, and may use the right");
        for other in may {
            let below = ROOMS.iter().position(|(room, _)| *room == other);
            assert!(below.is_some_and(|below| below > height), "`{room}` stands below `{other}`");
        }
    }
}

#[test]
fn main_knows_the_commands_only() {
    let main = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/main.rs")).unwrap();
    let rooms = main.split("transom::").skip(1).map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap());
    assert_eq!(rooms.collect::<BTreeSet<_>>(), BTreeSet::from(["cli"]));
}

#[test]
fn the_map_shows_every_room_on_its_floor() {
    let lib = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let floor = |name: &str| {
        let line =
            lib.lines().find(|line| line.starts_with(&format!("//! | {name}"))).unwrap_or_else(|| panic!("{name}"));
        let rooms = line.split("[`").skip(1).map(|rest| rest.split('`').next().unwrap().to_owned());
        rooms.collect::<BTreeSet<_>>()
    };
    let set = |rooms: &[&str]| rooms.iter().map(|room| (*room).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(floor("first"), set(&FIRST_FLOOR));
    assert_eq!(floor("ground"), set(&GROUND_FLOOR));
    let above: Vec<&str> = ROOMS.iter().map(|(room, _)| *room).collect();
    let above: BTreeSet<String> = set(&above).into_iter().filter(|room| !floor("first").contains(room)).collect();
    assert_eq!(floor("top"), above.difference(&floor("ground")).cloned().collect());
    for (room, _) in ROOMS {
        assert!(lib.contains(&format!("pub mod {room};")), "{room}");
    }
}

#[test]
fn the_lower_floors_touch_nothing_outside() {
    let forbidden = [
        "tokio",
        "hyper",
        "tracing",
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
    for source in sources("src") {
        let ground = GROUND_FLOOR.contains(&source.room());
        if ground || FIRST_FLOOR.contains(&source.room()) {
            found.extend(forbidden.iter().flat_map(|word| source.places(word)));
        }
        if ground {
            found.extend(["use http", "http::", "toml", "serde"].iter().flat_map(|word| source.places(word)));
        }
    }
    none("on a floor that knows nothing of the world", found);
}

#[test]
fn status_codes_are_given_in_one_place() {
    only_in(&["StatusCode::"], &STATUS_CODES);
}

#[test]
fn atomics_are_few_and_known() {
    only_in(&["sync::atomic", "portable_atomic"], &ATOMICS);
}

#[test]
fn time_is_read_in_one_room() {
    only_in(&["Instant::now", "SystemTime::now"], &CLOCKS);
}

#[test]
fn nothing_is_unsafe_unfinished_or_skipped() {
    // Put together here, so that this file does not find itself.
    let words = ["uns|afe ", "TO|DO", "FIX|ME", "to|do!", "unimple|mented!", "#[ig|nore", "allow(de|ad_code)", "db|g!"];
    let words = words.map(|word| word.replace('|', ""));
    let mut found = Vec::new();
    for source in everything() {
        // The one file that may, because memory can be mapped in no other way.
        let words = if source.name == MEMORY { &words[1..] } else { &words[..] };
        for word in words {
            for (n, line) in source.text.lines().enumerate().filter(|(_, line)| line.contains(word)) {
                found.push(format!("{}:{}: {}", source.name, n + 1, line.trim()));
            }
        }
    }
    none("not in this house", found);
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
fn rooms_have_names_that_say_something() {
    let named = |source: &Source| {
        let stem = |part: &str| NO_NAMES.contains(&part.trim_end_matches(".rs"));
        source.name.split('/').any(stem).then(|| source.name.clone())
    };
    none("names that say nothing", everything().iter().filter_map(named).collect());
}

#[test]
fn no_room_passes_on_what_is_in_another() {
    only_in(&["pub use ", "pub(crate) use "], &[("count/sync.rs", "the door to atomics is what it is for")]);
}
