//! Reads the configurations of `tests/config`: files in `good` are accepted, files in `bad` are rejected with exactly
//! the messages in `NAME.txt`, and no text causes a panic.
//!
//! `UPDATE_EXPECTED=1 cargo test --test config_files` rewrites the messages. Review them before you commit: an
//! operator in a hurry must understand each at once.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;

use proptest::prelude::*;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use transom_config::byte_cost::{ByteCost, CountedBytes, OnExceeded};
use transom_config::count_when::CountWhen;
use transom_config::diagnostics::{Inputs, Problem, render};
use transom_config::key::OnUnknownKey;
use transom_config::key_kind::{HEADER, HOST, IP, METHOD};
use transom_config::lint::{self, Kind};
use transom_config::listen_address::ListenAddress;
use transom_config::path::{ForwardPath, Segment};
use transom_config::redis::{Node, Nodes};
use transom_config::rule::{RateLimitStyle, RefusalResponse};
use transom_config::upstream::{HostField, Scheme, Target, UpstreamProtocol};
use transom_config::usage_cost::{OnMissingUsage, UsageCost};
use transom_config::{
    AccessLog, Config, LogFormat, LogTarget, RouteId, UpstreamId, read, read_with_files, read_with_inputs,
};
use transom_http::path_normalize::{EncodedSlash, PathParameters, PathReading, TrailingSlash};
use transom_limiter::handles::{Handle, RuleId};
use transom_limiter::identity;
use transom_limiter::key::OnMissing;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, KeyValue, OnLimit, OnOutage, Sharing};
use transom_limiter::secret_digest::Digest;
use transom_limiter::window::Windows;
use transom_usage::usage::{self, RequestedModel, Usage};
use transom_usage::usage_reader::UsageSource;

fn files(kind: &str, extension: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(kind);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|found| found == extension));
    files.sort();
    files
}

fn good(name: &str) -> Config {
    read_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/good").join(name)).1.unwrap()
}

/// Reads a configuration and the files that it names, relative to its folder.
fn read_file(file: &Path) -> (String, Result<Config, Vec<Problem>>) {
    let text = fs::read_to_string(file).unwrap();
    let read = read_with_files(&text, &|other| fs::read(file.with_file_name(other)));
    (text, read)
}

/// Lines that only one side has, marked like `diff` output.
fn difference(expected: &str, found: &str) -> String {
    let only = |mark: &str, lines: &str, others: &str| -> String {
        let others: BTreeSet<&str> = others.lines().collect();
        lines.lines().filter(|line| !others.contains(line)).map(|line| format!("{mark} {line}\n")).collect()
    };
    only("-", expected, found) + &only("+", found, expected)
}

#[test]
fn limits_of_http2_are_read() {
    let http2 = good("http2.toml").http2;
    assert_eq!((http2.h2c, http2.max_concurrent_streams, http2.ping), (false, 32, None));
    assert_eq!((http2.idle.as_secs(), http2.max_resets, http2.max_control_frames), (180, 50, 5000));
    let http2 = good("minimal.toml").http2;
    assert_eq!((http2.h2c, http2.max_concurrent_streams, http2.idle.as_secs()), (true, 100, 60));
}

#[test]
fn every_good_file_is_accepted() {
    let files = files("good", "toml");
    assert!(files.len() >= 8);
    for file in files {
        let (_, read) = read_file(&file);
        if let Err(problems) = read {
            panic!("{}", render(&problems, &file.display().to_string()));
        }
    }
}

#[test]
fn every_bad_file_is_rejected_with_exactly_its_message() {
    let update = std::env::var_os("UPDATE_EXPECTED").is_some();
    let files = files("bad", "toml");
    assert!(files.len() >= 40);
    let mut failures = String::new();
    for file in &files {
        let (_, read) = read_file(file);
        let name = file.file_name().unwrap().to_str().unwrap();
        let problems = read.expect_err(name);
        let found = render(&problems, name);
        let expected_file = file.with_extension("txt");
        if update {
            fs::write(&expected_file, &found).unwrap();
            continue;
        }
        match fs::read_to_string(&expected_file) {
            Ok(expected) if expected == found => {}
            Ok(expected) => failures += &format!("{name} (- expected, + found):\n{}\n", difference(&expected, &found)),
            Err(_) => failures += &format!("{name}: no {} yet; found:\n{found}\n", expected_file.display()),
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// The TOML blocks of a Markdown file, with the numbers of their first lines.
fn toml_blocks(text: &str) -> Vec<(usize, String)> {
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (number, line) in text.lines().enumerate() {
        match line.trim_start() {
            "```toml" => {
                is_open = true;
                blocks.push((number + 2, String::new()));
            }
            fence if fence.starts_with("```") => is_open = false,
            _ if is_open => blocks.iter_mut().last().unwrap().1 += &format!("{line}\n"),
            _ => {}
        }
    }
    blocks
}

/// A block of the documentation, completed to a whole configuration.
fn completed(block: &str) -> String {
    const CLIENTS: &str = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\nsubject = \"jwt:sub\"\n";
    const JWT: &str = "[jwt]\nkeys = [{ algorithm = \"HS256\", secret_file = \"hs.key\" }]\n";
    const RULE: &str = "[rules.by-claim]\nkey = \"jwt:sub\"\non_missing_key = \"skip\"\nwindows = [\"1/minute\"]\n\
                        [rules.by-claim.plans.gold]\nwindows = [\"2/minute\"]\n\
                        [rules.requests]\nkey = \"ip\"\nwindows = [\"9/minute\"]\n";
    const ROUTE: &str = "[upstreams.any]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"any\"\n";
    const DENY: &str = "[access]\nfile = \"access.toml\"\n";
    const LOGIN: &str = "[upstreams.any]\nbuiltin = \"echo\"\n[[routes]]\nname = \"login\"\npath = \"/{*rest}\"\n\
                         upstream = \"any\"\n";
    let mut text = match block {
        _ if block.starts_with("[clients.") => CLIENTS.to_owned(),
        _ if block.starts_with("[[deny]]") => [DENY, CLIENTS, LOGIN].concat(),
        _ if block.starts_with("servers = [") => String::from("[upstreams.api]\nservers_file = \"servers.toml\"\n"),
        _ => format!("{block}\n"),
    };
    if text.contains("[clients]") {
        text += JWT;
    }
    if text.contains("[jwt]") {
        text += RULE;
    }
    if !text.contains("[[routes]]") {
        text += ROUTE;
    }
    text
}

/// The contents of a test file that replaces one named by the documentation.
fn test_file_for(name: &Path, clients: &str, block: &str) -> io::Result<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config");
    let file = match name.file_name().unwrap().to_str().unwrap() {
        "clients.toml" => return Ok(clients.as_bytes().to_vec()),
        "access.toml" if block.starts_with("[[deny]]") => return Ok(block.as_bytes().to_vec()),
        "access.toml" => return Ok(Vec::new()),
        "servers.toml" if block.starts_with("servers = [") => return Ok(block.as_bytes().to_vec()),
        "servers.toml" => return Ok(b"servers = []".to_vec()),
        "fullchain.pem" | "client.pem" => "keys/tls-without-names.pem",
        "privkey.pem" | "client.key" => "keys/tls-other.key",
        "other.pem" => "keys/tls.pem",
        "other.key" => "keys/tls.key",
        "hs.key" => "keys/hmac.key",
        "rsa.pem" => "keys/rsa.pem",
        "jwks.json" => "keys/jwks.json",
        "authority.pem" => "good/authority.pem",
        "redis.password" => "good/redis.password",
        "admin.token" | "admin-token" | "notify.secret" | "portal.token" => "good/admin.token",
        "cloudflare-v4.txt" | "cloudflare-v6.txt" | "front-door.txt" | "fastly.txt" => "good/proxies.txt",
        "passwd" | "group" => return Ok(b"www-data:x:33:33\n".to_vec()),
        "support.token" => "good/support.token",
        "on-call.token" => "good/on-call.token",
        other => panic!("the documentation names `{other}`: choose a test file for it here"),
    };
    fs::read(folder.join(file))
}

/// README, ARCHITECTURE and all pages in the folders of `docs`.
fn documents(root: &Path) -> Vec<PathBuf> {
    let mut pages = vec![root.join("README.md"), root.join("ARCHITECTURE.md")];
    for folder in ["guides", "reference", "explanation"] {
        for page in fs::read_dir(root.join("docs").join(folder)).unwrap() {
            pages.push(page.unwrap().path());
        }
    }
    pages.retain(|page| page.extension() == Some("md".as_ref()));
    pages.sort();
    pages
}

/// A folder of `examples` is named like its guide, has the guide's first configuration, and no line of its other files that
/// the guide does not show.
#[test]
fn every_example_is_accepted_and_is_that_of_its_guide() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let index = fs::read_to_string(root.join("examples/README.md")).unwrap();
    let folders = fs::read_dir(root.join("examples")).unwrap().map(|entry| entry.unwrap().path());
    let mut examples = 0;
    for folder in folders.filter(|path| path.is_dir()) {
        let name = folder.file_name().unwrap().to_str().unwrap();
        assert!(index.contains(&format!("]({name}/gateway.toml)")), "examples/README.md lacks {name}");
        let guide = fs::read_to_string(root.join(format!("docs/guides/{name}.md"))).unwrap();
        let (before, rest) = guide.split_once("```toml\n").unwrap();
        let indent = before.len() - before.trim_end_matches(' ').len();
        let (block, _) = rest.split_once("```").unwrap();
        let block: Vec<&str> = block.lines().map(|line| line.get(indent..).unwrap_or("")).collect();
        let text = fs::read_to_string(folder.join("gateway.toml")).unwrap();
        assert!(text.contains(block.join("\n").trim_end()), "examples/{name}/gateway.toml differs from its guide");
        if let Err(problems) = read_with_files(&text, &|file| test_file_for(file, "", "")) {
            panic!("{}", render(&problems, &format!("examples/{name}/gateway.toml")));
        }
        for entry in fs::read_dir(&folder).unwrap() {
            let file = entry.unwrap().path();
            let text = fs::read_to_string(&file).unwrap();
            let name = file.file_name().unwrap().to_str().unwrap();
            if !["gateway.toml", "clients.toml", "access.log"].contains(&name) {
                // Blocks in lists are indented.
                let without_indent = |text: &str| text.lines().map(str::trim_start).collect::<Vec<_>>().join("\n");
                let is_in_guide = without_indent(&guide).contains(&without_indent(&text));
                assert!(is_in_guide, "{} differs from its guide", file.display());
            }
        }
        examples += 1;
    }
    assert!(examples >= 10, "only {examples} examples");
}

/// The configurations in the manifests of Kubernetes: the lines below `gateway.toml: |` that are indented more.
fn configurations_in_manifests(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for manifest in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(&manifest).unwrap();
        for (before, block) in text.match_indices("gateway.toml: |\n").map(|(at, mark)| text.split_at(at + mark.len()))
        {
            let indent = before.lines().last().unwrap().len() - before.lines().last().unwrap().trim_start().len();
            let is_inside = |line: &&str| line.trim().is_empty() || line.len() - line.trim_start().len() > indent;
            let lines: Vec<&str> = block.lines().take_while(is_inside).map(str::trim_start).collect();
            found.push((manifest.clone(), lines.join("\n")));
        }
    }
    found
}

/// `transom check --strict` is what a pipeline runs, so shipped files must pass it.
#[test]
fn no_shipped_configuration_has_a_warning() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["deploy/package", "examples"].map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let files = folders.into_iter().flatten().map(|entry| entry.unwrap().path());
    let files = files.map(|path| if path.is_dir() { path.join("gateway.toml") } else { path });
    let files = files.filter(|path| path.exists() && path.extension().is_some_and(|extension| extension == "toml"));
    let files = files.chain([root.join("gateway.toml")]);
    let mut configurations: Vec<(PathBuf, String)> =
        files.map(|path| (path.clone(), fs::read_to_string(&path).unwrap())).collect();
    configurations.extend(configurations_in_manifests(&root.join("deploy/kubernetes")));
    assert!(configurations.len() >= 20, "only {} configurations were found", configurations.len());
    for (path, text) in configurations {
        let clients = fs::read_to_string(path.with_file_name("clients.toml")).unwrap_or_default();
        let inputs = Inputs {
            files: &|file| test_file_for(file, &clients, ""),
            folders: &|_| Ok(Vec::new()),
            variables: &|_| Some(b"1".to_vec()),
            ..Inputs::NONE
        };
        assert_eq!(warnings(&text, inputs, &path.display().to_string()), Vec::<String>::new());
    }
}

/// The warnings of a valid configuration.
fn warnings(text: &str, inputs: Inputs, name: &str) -> Vec<String> {
    let config = read_with_inputs(text, inputs);
    let config = config.unwrap_or_else(|problems| panic!("{}", render(&problems, name)));
    let messages = lint::messages(&config).into_iter().filter(|message| message.kind == Kind::Warning);
    messages.map(|message| format!("{name}: {}", message.text)).collect()
}

#[test]
fn every_snippet_of_the_documentation_is_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut count, mut found) = (0, Vec::new());
    for name in documents(root) {
        let text = fs::read_to_string(&name).unwrap();
        let name = name.display();
        let blocks = toml_blocks(&text);
        let clients: String =
            blocks.iter().map(|(_, block)| block.as_str()).filter(|block| block.starts_with("[clients.")).collect();
        for (line, block) in blocks {
            let whole = completed(&block);
            let inputs = Inputs {
                files: &|file| test_file_for(file, &clients, &block),
                folders: &|_| Ok(Vec::new()),
                variables: &|_| Some(b"1".to_vec()),
                ..Inputs::NONE
            };
            if let Err(problems) = read_with_inputs(&whole, inputs) {
                panic!("{name}, line {line}:\n{}", render(&problems, "snippet.toml"));
            }
            // A whole configuration is copied, and passes `transom check --strict`.
            if ["[[routes]]", "[upstreams."].iter().all(|table| block.contains(table)) {
                let warnings = warnings(&whole, inputs, &format!("{name}, line {line}"));
                // The rules that complete a block are on no route.
                found.extend(
                    warnings
                        .into_iter()
                        .filter(|warning| ![": by-claim: ", ": requests: "].iter().any(|rule| warning.contains(rule))),
                );
            }
            count += 1;
        }
    }
    assert!(count >= 40, "only {count} snippets were found");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The positions and the values of all strings.
fn strings(text: &str) -> Vec<(Range<usize>, String)> {
    let (document, _) = DeTable::parse_recoverable(text);
    let mut found = Vec::new();
    let mut values: Vec<&Spanned<DeValue>> = document.get_ref().values().collect();
    while let Some(value) = values.pop() {
        match value.get_ref() {
            DeValue::String(text) => found.push((value.span(), text.to_string())),
            DeValue::Array(items) => values.extend(items.iter()),
            DeValue::Table(table) => values.extend(table.values()),
            _ => {}
        }
    }
    found
}

/// What `transom check` says about a text: its problems, or the messages about a valid configuration.
fn messages(text: &str, inputs: Inputs) -> String {
    match read_with_inputs(text, inputs) {
        Ok(config) => lint::messages(&config).iter().map(|message| format!("{message}\n")).collect(),
        Err(problems) => render(&problems, "gateway.toml"),
    }
}

/// All strings of each file are moved to environment variables, and then their last words alone. No word of a value is in a
/// message then, except words that stand elsewhere in the file, or in the documentation of settings.
#[test]
fn no_part_of_a_referenced_value_is_in_a_message() {
    let is_inside = |c: char| c.is_alphanumeric() || "_-".contains(c);
    let words = |text: &str| -> BTreeSet<String> {
        let is_name = |word: &&str| word.len() >= 4 && word.contains(char::is_alphabetic);
        text.to_lowercase().split(|c| !is_inside(c)).filter(is_name).map(str::to_owned).collect()
    };
    let reference = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/configuration.md"));
    let documented = words(&reference.unwrap());
    let (mut moved, mut leaks) = (0, String::new());
    for file in files("good", "toml").into_iter().chain(files("bad", "toml")) {
        let original = fs::read_to_string(&file).unwrap();
        for is_whole in [true, false] {
            let (mut text, mut values) = (original.clone(), Vec::new());
            // From the end, so that positions stay valid.
            let mut strings = strings(&text);
            strings.sort_by_key(|(span, _)| std::cmp::Reverse(span.start));
            for (span, value) in strings.into_iter().filter(|(_, value)| !value.contains("${")) {
                let (literal, value) =
                    value.split_at(if is_whole { 0 } else { value.trim_end_matches(is_inside).len() });
                let literal =
                    literal.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").replace('\t', "\\t");
                text.replace_range(span, &format!("\"{literal}${{env:V{}}}\"", values.len()));
                values.push(value.to_owned());
            }
            let inputs = Inputs {
                files: &|other| fs::read(file.with_file_name(other)),
                folders: &|_| Ok(Vec::new()),
                variables: &|name| {
                    Some(values.get(name.strip_prefix('V')?.parse::<usize>().ok()?)?.as_bytes().to_vec())
                },
                ..Inputs::NONE
            };
            let found = messages(&text, inputs);
            let public: BTreeSet<String> = documented.union(&words(&text)).cloned().collect();
            for word in words(&values.join(" ")).intersection(&words(&found)).filter(|word| !public.contains(*word)) {
                leaks += &format!("{}: `{word}` in\n{text}\n{found}\n", file.display());
            }
            moved += values.len();
        }
    }
    assert!(moved >= 2500, "only {moved} strings were moved");
    assert!(leaks.is_empty(), "{leaks}");
}

/// Names in capitals that a fix leaves to the operator.
const PLACEHOLDERS: [&str; 6] = ["FILE", "NAME", "VALUE", "HOST", "PLAN", "VARIABLE"];

/// The text with each of the values that a fix offers, one at a time, and where the value stands in it.
fn with_fixes(text: &str, problem: &Problem) -> Vec<(String, Range<usize>)> {
    let is_value = |value: &str| DeTable::parse(&format!("x = {value}")).is_ok();
    let offers =
        |before: &str| ["write ", "did you mean ", ", or ", "quotes: "].iter().any(|end| before.ends_with(end));
    let parts: Vec<&str> = problem.fix.split('`').collect();
    let written = &text[problem.span.clone()];
    let before = text[..problem.span.start].trim_end();
    let key = before.strip_suffix('=').and_then(|before| before.trim_end().rsplit([' ', '\n', '{', ',']).next());
    let replaced = |value: &str| {
        let (start, end) = (problem.span.start, problem.span.end);
        (format!("{}{value}{}", &text[..start], &text[end..]), start..start + value.len())
    };
    let mut texts = Vec::new();
    for pair in parts.windows(2).step_by(2) {
        let [before, offered] = pair else { continue };
        if !offers(before) || PLACEHOLDERS.iter().any(|name| offered.contains(name)) {
            continue;
        }
        match offered.split_once(" = ") {
            Some((offered_key, value)) if key == Some(offered_key) && is_value(value) => texts.push(replaced(value)),
            // Messages about syntax do not know the types of settings. A reference has any type.
            _ if is_value(offered) && (is_value(written) || key.is_some() && offered.contains("${")) => {
                texts.push(replaced(offered));
            }
            _ => {}
        }
    }
    texts
}

/// Problems with a value that is right in itself: it needs another setting or a file, or another setting has it.
const OTHER_PROBLEMS: [&str; 6] = [
    "has no `on_missing_key`",
    "there is no `[",
    "use https only with",
    "is already in use",
    "cannot read",
    "is not set",
];

/// Applies each value that the fix of a problem offers: then nothing is wrong with it.
#[test]
fn every_value_that_a_fix_offers_is_accepted() {
    let (mut applied, mut failures) = (0, String::new());
    for file in files("bad", "toml") {
        let (text, read) = read_file(&file);
        let problems = read.unwrap_err();
        for problem in problems.iter().filter(|problem| problem.file.is_none()) {
            for (fixed, range) in with_fixes(&text, problem) {
                applied += 1;
                let read = read_with_files(&fixed, &|other| fs::read(file.with_file_name(other)));
                let is_other = |left: &Problem| OTHER_PROBLEMS.iter().any(|part| left.message.contains(part));
                let mut left = read.err().unwrap_or_default().into_iter();
                if let Some(left) = left.find(|left| range.contains(&left.span.start) && !is_other(left)) {
                    let offered = &fixed[range];
                    let Problem { line, message, fix, .. } = problem;
                    failures += &format!("{}:{line}: {message}\n  fix: {fix}\n", file.display());
                    failures += &format!("  with `{offered}`: {}\n  fix: {}\n", left.message, left.fix);
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(applied >= 150, "only {applied} fixes were applied");
}

#[test]
fn every_expected_message_has_its_configuration() {
    for file in files("bad", "txt") {
        assert!(file.with_extension("toml").exists(), "{}", file.display());
    }
}

#[test]
fn defaults_are_filled_in() {
    let config = good("minimal.toml");
    assert_eq!(config.listen.http, [ListenAddress::Tcp("127.0.0.1:8080".parse().unwrap()).into()]);
    assert_eq!((config.listen.admin, config.general.workers, config.access_log), (None, None, None));
    assert_eq!(config.tracing, None);
    assert_eq!(config.counters.capacity, 1_000_000);
    assert_eq!(config.timeouts.connect.as_secs(), 5);
    assert_eq!(config.path_reading, PathReading::verbatim(EncodedSlash::Refuse));
    assert_eq!(config.general.forward_path, ForwardPath::Original);
    let upstream = &config.upstreams[UpstreamId::at(0)];
    assert_eq!(upstream.target, Target::Echo);
    assert_eq!(config.timeouts.tunnel.as_secs(), 3600);
    let transport = &upstream.transport;
    assert_eq!(
        (transport.protocol, &transport.host, &transport.tls),
        (UpstreamProtocol::Auto, &HostField::Keep, &None)
    );
    assert_eq!(transport.resolve.as_secs(), 30);
    let route = &config.routes[RouteId::at(0)];
    assert_eq!((route.name.as_str(), route.rules.len()), ("/", 0));
    assert!(route.websocket);
    assert!(route.hosts.is_empty() && route.methods.is_empty() && route.headers.is_empty());
}

#[test]
fn everything_is_read_as_written() {
    let config = good("everything.toml");
    let (upstreams, rules) = (config.upstreams.as_slice(), config.rules.as_slice());
    let routes = config.routes.as_slice();
    assert_eq!((config.listen.http.len(), config.general.workers), (2, Some(2)));
    assert_eq!(config.admin.hosts, ["transom.internal", "*.monitoring.svc"]);
    assert_eq!(config.admin.token.unwrap().0, "3a7bd3e2360a3d29eea436fcfb7e44c7");
    assert_eq!(
        config.access_log,
        Some(AccessLog { target: LogTarget::File("/var/log/transom/access.log".into()), format: LogFormat::Combined })
    );
    let short = good("access-log-short.toml");
    assert_eq!(short.access_log, Some(AccessLog { target: LogTarget::Stdout, format: LogFormat::Json }));
    let tracing = config.tracing.as_ref().unwrap();
    assert_eq!((tracing.sample, tracing.receiver.service_name.as_str()), (1.0, "edge"));
    assert_eq!(tracing.receiver.endpoint, "https://collector.internal:4317");
    assert!(tracing.receiver.authorities.is_some());
    let notify = config.notify.as_ref().unwrap();
    assert_eq!((notify.at.as_slice(), notify.rules.as_ref().map(Vec::len)), ([80, 100].as_slice(), Some(1)));
    let receiver = notify.receiver.as_ref().unwrap();
    assert_eq!(receiver.server.url, "https://hooks.internal:8443");
    assert_eq!(receiver.target, "/quota?gateway=1");
    assert!(receiver.tls.is_some() && receiver.secret.is_some());
    let reading = PathReading {
        encoded_slash: EncodedSlash::Keep,
        path_parameters: PathParameters::Strip,
        trailing_slash: TrailingSlash::Ignore,
    };
    assert_eq!((config.path_reading, config.general.forward_path), (reading, ForwardPath::Normalized));
    assert_eq!((config.timeouts.drain.as_millis(), config.timeouts.connect.as_millis()), (0, 250));
    assert_eq!((config.general.pid_file, config.timeouts.upgrade.as_secs()), (Some("run/pid".into()), 120));
    let Target::Servers(servers) = &upstreams[1].target else { panic!() };
    let servers: Vec<_> = servers.iter().map(|server| (server.host.as_str(), server.port)).collect();
    assert_eq!(servers, [("127.0.0.1", 9001), ("::1", 9002), ("api.internal", 80)]);
    let transport = &upstreams[1].transport;
    assert_eq!(
        (transport.protocol, &transport.host),
        (UpstreamProtocol::Http1, &HostField::Fixed("api.example.com:8443".into()))
    );
    assert_eq!((transport.resolve.as_secs(), config.timeouts.tunnel.as_secs()), (60, 7200));
    let Target::Servers(servers) = &upstreams[2].target else { panic!() };
    let servers: Vec<_> = servers.iter().map(|server| (server.scheme, server.host.as_str(), server.port)).collect();
    assert_eq!(servers, [(Scheme::Https, "grpc.internal", 443), (Scheme::Unix, "/run/grpc.sock", 0)]);
    let transport = &upstreams[2].transport;
    assert_eq!((transport.protocol, &transport.host), (UpstreamProtocol::Http2, &HostField::Server));
    assert!(transport.tls.as_ref().is_some_and(|tls| tls.server_name.is_some()));
    assert!(!routes[0].websocket && routes[1].websocket);

    let names: Vec<_> = config.rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names, ["per-client", "per-key", "per-user", "all"], "in the order of the file");
    assert_eq!(
        config.rules.map(|rule| rule.rate_limit_style),
        [RateLimitStyle::Both, RateLimitStyle::Off, RateLimitStyle::Both, RateLimitStyle::Both]
    );
    assert_eq!(rules[0].key, [IP.of_prefixes(24, 56)]);
    assert_eq!(rules[1].key, [HEADER.of_name("x-api-key"), HOST.part()]);
    let fallback = OnMissing::Fallback(vec![IP.of_prefixes(32, 64), METHOD.part()]);
    assert_eq!((&rules[1].on_missing, &rules[2].on_missing), (&fallback, &OnMissing::Never));
    assert_eq!((&rules[3].cost, rules[3].on_limit), (&Cost::Fixed(u32::MAX), OnLimit::Shadow));
    let layers: Vec<_> = rules[0].layers.iter().map(|layer| rules[0].layer_name(&rules[0].layers, layer)).collect();
    assert_eq!(layers, ["per-client-hour", "per-client-minute"]);

    let route = &routes[0];
    assert_eq!(route.hosts, ["api.example.com", "*.example.org"]);
    assert_eq!(route.headers, [("x-version".to_owned(), Some("2".to_owned())), ("x-beta".to_owned(), None)]);
    assert_eq!(
        route.path.segments,
        [Segment::Literal("users".into()), Segment::Param("id".into()), Segment::Rest("rest".into())]
    );
    assert_eq!((route.upstream, route.rules.as_slice()), (Some(UpstreamId::at(1)), [0, 2].map(RuleId::at).as_slice()));
}

#[test]
fn shared_counters_are_read_as_written() {
    let config = good("shared.toml");
    let shared = config.counters.shared.as_ref().unwrap();
    let tcp = |host: &str, port| Node::Tcp { host: host.to_owned(), port };
    assert_eq!(shared.nodes, Nodes::Single(tcp("cache.internal", 7000)));
    assert_eq!((shared.username.as_deref(), shared.database), (Some("transom"), 3));
    assert_eq!(shared.password.as_ref().map(|hidden| hidden.0.as_str()), Some("hunter2-hunter2"));
    assert_eq!((shared.prefix.as_str(), shared.timeout.as_millis()), ("edge:eu-1", 20));
    assert_eq!((&*shared.digest_key(), shared.tls.is_some()), (&b"6f1b2c0d9a8e7f60514233241506f7e8"[..], true));
    let debug = format!("{config:?}");
    assert!(!debug.contains("hunter2") && !debug.contains("6f1b2c0d") && !debug.contains("54, 102, 49"));
    let rules: Vec<_> = config.rules.iter().map(|rule| (rule.sharing, rule.on_outage)).collect();
    assert_eq!(
        rules,
        [(Sharing::Exact, OnOutage::Refuse), (Sharing::Lease, OnOutage::Allow), (Sharing::Local, OnOutage::Refuse)]
    );

    let config = good("shared-cluster.toml");
    let shared = config.counters.shared.unwrap();
    assert_eq!(
        shared.nodes,
        Nodes::Cluster(vec![tcp("10.0.0.1", 7000), tcp("fd00::2", 7001), tcp("three.internal", 6379)])
    );
    let defaults = (shared.prefix.as_str(), shared.timeout.as_millis(), shared.database, shared.tls.is_some());
    assert_eq!(defaults, ("transom", 50, 0, false));
    let rule = &config.rules[RuleId::at(0)];
    assert_eq!((rule.sharing, rule.on_outage), (Sharing::Lease, OnOutage::Local));

    let shared = good("shared-sentinel.toml").counters.shared.unwrap();
    assert_eq!(shared.nodes, Nodes::Sentinel { nodes: vec![tcp("sentinel", 6379)], master: "main-1".to_owned() });
}

#[test]
fn a_reload_applies_mode_and_on_outage_of_shared_counters_only() {
    let counters = |settings: &str| {
        let upstream = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n";
        read(&format!("[counters.shared]\nredis = \"redis://a\"\n{settings}\n{upstream}")).unwrap().counters
    };
    let before = counters("");
    assert!(before.changed_setting(&counters("mode = \"exact\"\non_outage = \"refuse\"")).is_none());
    assert!(before.changed_setting(&counters("prefix = \"other\"")) == Some("counters.shared"));
}

#[test]
fn a_password_is_read_from_the_environment() {
    let text = "[counters.shared]\nredis = \"redis://a\"\npassword_env = \"PASSWORD\"\n\
                [upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n";
    let read = |value: &[u8]| {
        let variables = |name: &str| (name == "PASSWORD").then(|| value.to_vec());
        read_with_inputs(text, Inputs { variables: &variables, ..Inputs::NONE })
    };
    let password = read(b"hunter2\n").unwrap().counters.shared.unwrap().password.unwrap();
    assert_eq!(password.0, "hunter2");
    for value in [&b"\xff\xfe"[..], b"", b"\n"] {
        assert_eq!(read(value).unwrap_err().len(), 1);
    }
}

#[test]
fn every_setting_of_rules_is_read_as_written() {
    let config = good("rule-settings.toml");
    let rule = |name: &str| config.rules.iter().find(|rule| rule.name == name).unwrap();
    let windows =
        |name: &str| identity::layers(rule(name)).into_iter().filter_map(|layer| layer.windows).collect::<Vec<_>>();
    assert_eq!(
        windows("starts"),
        [
            "2000ms from the first request",
            "86400000ms from 61200000ms",
            "86400000ms from 63000250ms",
            "86400000ms at random",
            "86400000ms"
        ]
    );
    assert_eq!(windows("timezones"), ["day Europe/Paris", "week Europe/Paris", "604800000ms", "month Europe/Paris"]);
    assert_eq!(
        windows("utc"),
        ["86400000ms", "604800000ms from 345600000ms", "month"],
        "as without a time zone, except weeks"
    );
    let list = |name: &str| match &rule(name).layers[0].windows {
        Windows::Calendar(calendar) => calendar.ends.clone(),
        other => panic!("{other:?}"),
    };
    assert!(std::sync::Arc::ptr_eq(&list("timezones"), &list("same-timezone")) && list("timezones").len() > 51_000);

    let capacities = &rule("capacities").layers;
    assert_eq!(
        (capacities[0].capacity(), capacities[0].reserve, capacities[1].capacity(), capacities[1].reserve),
        (150, 0, 1000, 200)
    );
    let header = |name: &str| name.to_owned();
    assert_eq!(rule("capacities").cost, Cost::Request { source: header("x-cost"), default: 2, max: 150 });
    let count_when = CountWhen { status: vec![401..=401, 500..=599], grpc_status: vec![16, 7] };
    assert_eq!(rule("failed-logins").count_when, Some(count_when));
    assert_eq!(rule("response-cost").cost, Cost::Response { source: Some(header("x-cost")), reserve: 10, max: 1000 });
    let usage = rule("usage");
    // The reserve is lowered to the capacity.
    assert_eq!(usage.cost, Cost::Response { source: None, reserve: 100, max: u32::MAX });
    assert_eq!(usage.refund_on, [429..=429, 500..=599]);
    let UsageCost { source, weights, on_missing, .. } = usage.usage.as_ref().unwrap();
    assert_eq!((source, *on_missing), (&UsageSource::Known, OnMissingUsage::Estimate));
    let mut used = Usage::default();
    (used[usage::Kind::Input], used[usage::Kind::Reasoning]) = (1.into(), 2.into());
    let models = [RequestedModel::Named("gpt-5-mini"), RequestedModel::Unknown, RequestedModel::Ambiguous];
    assert_eq!(models.map(|model| weights.cost(&used, model)), [22, 7, 22]);
    let bytes = rule("bytes");
    let cost = ByteCost { counted: CountedBytes::Both, unit: 2048, on_exceeded: OnExceeded::Cut };
    assert_eq!((bytes.bytes, &bytes.cost), (Some(cost), &Cost::Response { source: None, reserve: 3, max: u32::MAX }));
    let tokens = |layers: &[Limit]| layers.iter().map(|limit| (limit.tokens, limit.capacity)).collect::<Vec<_>>();
    assert_eq!(tokens(&bytes.layers), [(5 << 20, None), (488, Some(976)), (100, None)]);
    assert_eq!(tokens(&bytes.plans[0].layers), [(1 << 31, None)]);
    assert_eq!(
        (rule("sharded").layers[0].shards, &rule("sharded").cost, config.routes[RouteId::at(0)].cost),
        (10, &Cost::Fixed(3), Some(5))
    );
    assert_eq!(rule("delayed").on_limit, OnLimit::Delay { max_delay_ms: 2000, max_waiting: 50 });
    assert!(rule("delayed").count_refused && !rule("response-cost").count_refused);
    let refusal = |name: &str| &rule(name).refusal;
    assert_eq!((refusal("response-cost").status, refusal("delayed").status), (Some(503), None));
    assert_eq!(refusal("delayed").body.as_ref().unwrap().content_type, "text/plain; charset=utf-8");
    assert_eq!(refusal("sharded"), &RefusalResponse::default());
}

#[test]
fn default_route_names_are_as_short_as_they_can_be_and_unique() {
    let names: Vec<String> = good("route-names.toml").routes.into_iter().map(|route| route.name).collect();
    assert_eq!(
        names,
        [
            "/",
            "api.example.com/v1/{id}",
            "/v1/{id}",
            "GET /v2",
            "POST /v2",
            "GET /v3 x-version=1",
            "GET /v3 x-version=*",
            "login",
            "/v3"
        ]
    );
}

#[test]
fn the_quick_start_configuration_is_read() {
    let config = good("quick-start.toml");
    assert_eq!(config.rules[RuleId::at(0)].layers.iter().map(|limit| limit.tokens).collect::<Vec<_>>(), [2000, 33]);
}

#[test]
fn plans_overrides_and_exemptions_are_read_as_written() {
    let config = good("plans.toml");
    let rule = &config.rules[RuleId::at(0)];
    let plans: Vec<_> = rule.plans.iter().map(|plan| (plan.name.as_str(), plan.layers.len())).collect();
    assert_eq!(plans, [("gold", 2), ("silver", 1)]);
    let clear = |text: &str| KeyValue::Clear(text.to_owned());
    let secret = KeyValue::Digest(Digest::of(b"s3cret"));
    let keys: Vec<_> = rule.overrides.iter().map(|other| (other.key.as_slice(), other.layers[0].tokens)).collect();
    assert_eq!(keys, [(&[clear("alice")][..], 5000), (&[secret][..], 1)]);
    let networks: Vec<_> = rule.exemptions.networks.iter().map(ToString::to_string).collect();
    assert_eq!(networks, ["10.0.0.0/8", "2001:db8::/32", "192.0.2.1/32"]);
    assert_eq!(rule.exemptions.keys, [[clear("internal-monitor")], [clear("other:monitor")]]);
    // The override holds for the whole network that is counted as one address.
    assert_eq!(config.rules[RuleId::at(1)].overrides[0].key, [clear("192.0.2.0"), clear("GET")]);

    let clients = config.clients.unwrap();
    assert_eq!(clients.api_key, [HEADER.of_name("x-api-key")]);
    let names: Vec<_> = clients.list.iter().map(|client| (client.name.as_str(), client.plan.as_str())).collect();
    assert_eq!(names, [("acme", "gold"), ("beta", "silver"), ("gamma.example", "gold")]);
    let acme = &clients.list[0];
    assert_eq!(
        (acme.api_keys.as_slice(), acme.subjects.as_slice()),
        (&[Digest::of(b"abc")][..], &["user-17".into()][..])
    );
    assert_eq!(acme.networks[0].to_string(), "203.0.113.0/24");
}

#[test]
fn the_treatment_of_unknown_keys_is_read_as_written() {
    let config = good("known-keys.toml");
    assert_eq!(
        config.rules.map(|rule| rule.on_unknown_key),
        [OnUnknownKey::Refuse, OnUnknownKey::Missing, OnUnknownKey::Count]
    );
    assert!(config.metrics.clients);
    let config = good("clients-by-name.toml");
    assert_eq!(config.rules.map(|rule| rule.on_unknown_key), [OnUnknownKey::Refuse, OnUnknownKey::Missing]);
    let config = good("plans.toml");
    assert_eq!(config.rules.map(|rule| rule.on_unknown_key), [OnUnknownKey::Count; 3]);
    assert!(!config.metrics.clients);
}

#[test]
fn a_plan_or_override_takes_over_what_it_lacks_from_its_rule() {
    let config = good("concurrent.toml");
    let limits = |rule: usize| -> Vec<(Option<u32>, usize)> {
        let rule = &config.rules[RuleId::at(rule)];
        rule.concurrent_variants().zip(rule.variants().map(<[_]>::len)).collect()
    };
    assert_eq!(limits(0), [(Some(10), 0), (Some(10), 1)]);
    let all = Some(u32::MAX);
    assert_eq!(limits(1), [(all, 2), (Some(2), 2), (Some(1), 1), (all, 1)]);
    assert_eq!(config.rules[RuleId::at(1)].concurrent_name().as_deref(), Some("beside-concurrent"));
}

#[test]
fn messages_do_not_show_keys_in_clear_text() {
    for (name, key) in [("invalid-entries", "hunter2"), ("syntax-errors", "hunter2")] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/bad");
        let (_, read) = read_file(&folder.join(format!("clients-file-{name}.toml")));
        let of_clients = fs::read_to_string(folder.join(format!("clients/{name}.toml"))).unwrap();
        assert!(of_clients.contains(key));
        let found = render(&read.unwrap_err(), "gateway.toml");
        assert!(!found.contains(key), "{found}");
    }
}

#[test]
fn a_truncated_clients_file_never_panics() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config");
    for (gateway, clients) in
        [("good/plans", "good/clients/plans"), ("bad/clients-file-syntax-errors", "bad/clients/invalid-entries")]
    {
        let text = fs::read_to_string(folder.join(format!("{gateway}.toml"))).unwrap();
        let of_clients = fs::read(folder.join(format!("{clients}.toml"))).unwrap();
        for end in 0..of_clients.len() {
            if let Err(problems) = read_with_files(&text, &|_| Ok(of_clients[..end].to_vec())) {
                assert!(render(&problems, "gateway.toml").contains("clients/"), "{problems:?}");
            }
        }
    }
}

fn assert_positions_are_inside(text: &str, problems: &[Problem]) {
    for problem in problems {
        let line = text.split('\n').nth(problem.line - 1).unwrap_or_else(|| panic!("{problem:?} in {text:?}"));
        assert!(problem.column >= 1 && problem.column <= line.chars().count() + 1, "{problem:?} in {text:?}");
        assert!(text.get(problem.span.clone()).is_some(), "{problem:?} in {text:?}");
        assert!(!problem.message.is_empty() && !problem.fix.is_empty(), "{problem:?}");
    }
}

/// Reads a text and renders its problems: neither may panic, and all positions are inside the text.
fn assert_no_panic(text: &str) {
    if let Err(problems) = read(text) {
        assert!(!problems.is_empty());
        assert_positions_are_inside(text, &problems);
        assert!(render(&problems, "gateway.toml").contains("fix: "));
    }
}

fn texts() -> Vec<String> {
    let all = files("good", "toml").into_iter().chain(files("bad", "toml"));
    all.map(|file| fs::read_to_string(file).unwrap()).collect()
}

/// Lines that no file before has are truncated before and after each punctuation character of TOML, and after the character that
/// follows; files also after the other lines.
#[test]
fn a_truncated_file_never_panics() {
    let texts = texts();
    let mut seen = HashSet::new();
    let mut truncated = vec![""];
    for text in &texts {
        let mut start = 0;
        for line in text.split_inclusive('\n') {
            let first = if seen.insert(line) { 1 } else { line.len() };
            let is_at_punctuation = |end: usize| {
                end < 2
                    || line
                        .as_bytes()
                        .get(end - 2..=end)
                        .is_none_or(|around| around.iter().any(|b| b"\"'[]{}=,#\\\n".contains(b)))
            };
            let ends = (first..=line.len()).filter(|end| line.is_char_boundary(*end) && is_at_punctuation(*end));
            truncated.extend(ends.map(|end| &text[..start + end]));
            start += line.len();
        }
    }
    assert!(truncated.len() > 20_000, "only {} files", truncated.len());
    let threads = thread::available_parallelism().unwrap().get();
    thread::scope(|scope| {
        for part in truncated.chunks(truncated.len().div_ceil(threads)) {
            scope.spawn(move || part.iter().for_each(|text| assert_no_panic(text)));
        }
    });
}

#[test]
fn a_file_without_one_of_its_lines_never_panics() {
    for text in texts() {
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        for left_out in 0..lines.len() {
            assert_no_panic(&[&lines[..left_out], &lines[left_out + 1..]].concat().concat());
        }
    }
}

/// Text that may get into a file by mistake.
const TYPOS: [&str; 28] = [
    "\"",
    "'",
    "[",
    "]",
    "[[",
    "]]",
    "{",
    "}",
    "=",
    ",",
    ".",
    "\n",
    "\r",
    "\t",
    "#",
    "\\",
    "\"\"\"",
    "'''",
    " ",
    "é",
    "\u{feff}",
    "0",
    "-1",
    "99999999999999999999",
    "1e400",
    "true",
    "\0",
    "{*rest}",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        assert_no_panic(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn no_sequence_of_toml_fragments_panics(parts in proptest::collection::vec(proptest::sample::select(toml_fragments()), 0..40)) {
        assert_no_panic(&parts.concat());
    }

    #[test]
    fn no_mutated_file_panics(
        text in proptest::sample::select(texts()),
        typos in proptest::collection::vec((any::<prop::sample::Index>(), 0..TYPOS.len(), 0..4_usize), 1..6),
    ) {
        let mut chars: Vec<String> = text.chars().map(String::from).collect();
        for (at, typo, cut) in typos {
            let at = at.index(chars.len() + 1);
            let end = chars.len().min(at + cut);
            chars.splice(at..end, [TYPOS[typo].to_owned()]);
        }
        assert_no_panic(&chars.concat());
    }
}

fn toml_fragments() -> Vec<&'static str> {
    let words = [
        "[",
        "]",
        "listen",
        "rules",
        "upstreams",
        "routes",
        ".a",
        "[rules.a]\n",
        "[[routes]]\n",
        "[upstreams.u]\n",
        "key = ",
        "windows = ",
        "path = ",
        "\"ip\"",
        "\"/{a}\"",
        "\"1/second\"",
        "servers",
        "http://",
        "\"http://h\"",
        "host = ",
        "methods = ",
        "headers",
        "on_missing_key = ",
        "cost = ",
        "4294967296",
        "0x1F",
        "1979-05-27",
    ];
    words.into_iter().chain(TYPOS).collect()
}

/// The route that answers ACME challenges is not one of the file.
#[test]
fn only_routes_of_the_file_are_counted() {
    let config = good("acme.toml");
    assert_eq!((config.routes.len(), config.configured_routes()), (2, 1));
}
