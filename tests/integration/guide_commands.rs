//! Runs the commands of task guides as they are written, in a folder with the files of the guide, and starts every configuration of
//! `examples`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use transom_limiter::secret_digest::Digest;

use crate::support::client::Client;
use crate::support::external_servers::faketime;
use crate::support::process::{BINARY, Process, ProcessGroup, run, signal};
use crate::support::ratelimit_parser::items;
use crate::support::redis::free_port;
use crate::support::upgrade_chain::UpgradeChain;
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually, guide_blocks, one_rule};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The commands in the indented code of a guide that begin with `transom` or `openssl`. A backslash continues a line.
fn commands(page: &str) -> Vec<String> {
    let text = fs::read_to_string(format!("{ROOT}/docs/guides/{page}.md")).unwrap().replace("\\\n", "");
    let code = text.lines().filter(|line| line.starts_with("    ")).map(str::trim_start);
    code.filter(|line| line.starts_with("transom ") || line.starts_with("openssl ")).map(str::to_owned).collect()
}

/// What a command prints to standard output, run in a folder.
fn output(command: &str, folder: &Path) -> String {
    let programs = Path::new(BINARY).parent().unwrap().display();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
    let output = Command::new("bash").args(["-ec", command]).env("PATH", path).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_guide_to_plans_adds_and_replaces_a_key() {
    let [add, add_another, list, remove, show] = <[String; 5]>::try_from(commands("plans")).unwrap();
    let rule = guide_blocks("plans", "toml").remove(0);
    let upstream = "[upstreams.u]\nbuiltin = \"echo\"\n";
    let route = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"per-client\"]\n";
    // One worker: several learn of a changed clients file one after the other.
    let process = Process::spawn_with(&format!("workers = 1\n{rule}\n{upstream}{route}"), "");
    let folder = process.scratch.path();
    let get = |key: &str| process.client().get_with("/a", &[("X-API-Key", key)]);
    let key = output(&format!("{add}; cat acme.key"), folder).trim().to_owned();
    eventually("the gateway knows the client", || get(&key).status == 200);
    // The hour and the minute of the plan.
    let policy = get(&key).expect(200);
    let limits: Vec<u64> = items(&policy, "ratelimit-policy").iter().map(|item| item.get("q")).collect();
    assert_eq!(limits, [100_000, 2000]);
    let another = output(&add_another, folder).trim().to_owned();
    eventually("the gateway knows the other key", || get(&another).status == 200);
    let left = |key: &str| items(&get(key).expect(200), "ratelimit")[0].get("r");
    assert_eq!(left(&key), left(&another) + 1, "both keys share one counter");
    // The beginning of a digest, of the length that the guide shows.
    let shown = remove.split(' ').next_back().unwrap();
    let digest = Digest::of(key.as_bytes()).to_string();
    let digest = &digest[..shown.len()];
    let listed = output(&list, folder);
    assert!(listed.contains("acme  gold  ") && listed.contains(digest), "{listed}");
    output(&remove.replace(shown, digest), folder);
    eventually("the former key is unknown", || get(&key).status == 401);
    get(&another).expect(200);
    let shown = output(&show, folder);
    assert!(shown.contains("plan:     gold") && !shown.contains(digest), "{shown}");
}

#[test]
fn the_guide_to_blocks_denies_for_a_while() {
    let text = fs::read_to_string(format!("{ROOT}/docs/guides/block-clients.md")).unwrap();
    let code = text.lines().filter(|line| line.starts_with("    ")).map(str::trim_start);
    let steps: Vec<&str> = code.filter(|line| line.starts_with("transom ") || line.starts_with("curl ")).collect();
    let [deny, denied, explain, list, remove, device, key, internal, post, delete] =
        <[&str; 10]>::try_from(steps).unwrap();
    let toml = guide_blocks("block-clients", "toml").remove(0);
    let (scratch, log) = (TempDir::new(), "file = \"access.log\"");
    let log_file = scratch.path().join("access.log");
    scratch.write("access.toml", "");
    scratch.write("leaked.key", "key-of-acme\n");
    let toml = toml.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0");
    let toml = toml.replace(log, &format!("file = {log_file:?}"));
    let process = Process::spawn_command(Command::new(BINARY), &toml, scratch);
    let (folder, http, admin) = (process.scratch.path(), process.http.to_string(), process.admin.to_string());
    let run = |step: &str| output(&step.replace("127.0.0.1:8080", &http).replace("127.0.0.1:9900", &admin), folder);

    let id = run(deny);
    assert!(text.contains(&format!("`{}`", id.trim())) && remove.ends_with(id.trim()), "{id}");
    eventually("the network is denied", || run(denied).contains("403"));
    assert_eq!(run(denied).trim(), guide_blocks("block-clients", "json").remove(0).trim());
    // The configuration has no port by which the command would find the gateway.
    let explained = run(explain);
    assert!(explained.contains(&format!("deny entry {} denies `203.0.113.0/24`", id.trim())), "{explained}");
    let logged =
        format!("\"denied_by\":{{\"id\":\"{}\",\"entry\":\"203.0.113.0/24\",\"reason\":\"scraper\"}}", id.trim());
    assert!(text.contains(&logged), "{logged}");
    eventually("the request is logged", || fs::read_to_string(&log_file).unwrap().contains(&logged));
    assert!(run(list).contains("203.0.113.0/24"));
    run(remove);
    eventually("the network is let in", || !run(denied).contains("access is denied"));

    for (step, field, value) in [(device, "x-device", "a1b2c3"), (key, "x-api-key", "key-of-acme")] {
        // Of the two, the second reads the value.
        run(&format!("{step} < leaked.key"));
        eventually("the value is denied", || process.client().get_with("/v1/x", &[(field, value)]).status == 403);
    }
    assert!(run(internal).contains("access is denied"));
    run(&internal.replace("198.51.100.7", "192.0.2.7"));
    let added = run(post);
    assert!(delete.ends_with(added.split('"').find(|word| word.len() == 12).unwrap()), "{added}");
    let from = [("X-Forwarded-For", "198.51.100.7")];
    eventually("the network is denied", || process.client().get_with("/v1/x", &from).status == 403);
    run(delete);
    // The rule may be at its limit by now.
    eventually("the network is let in", || process.client().get_with("/v1/x", &from).status != 403);
}

/// The indented code of a guide: the lines of each block.
fn indented_blocks(page: &str) -> Vec<Vec<String>> {
    let text = fs::read_to_string(format!("{ROOT}/docs/guides/{page}.md")).unwrap();
    let text: String = text.split("```").step_by(2).collect();
    let lines: Vec<Option<String>> =
        text.lines().map(|line| line.strip_prefix("       ").map(|line| line.trim_start().to_owned())).collect();
    lines
        .split(Option::is_none)
        .map(|block| block.iter().flatten().cloned().collect())
        .filter(|block: &Vec<_>| !block.is_empty())
        .collect()
}

#[test]
fn the_guide_to_selling_an_api_is_a_story_that_works() {
    let [http, admin] = [(); 2].map(|()| free_port());
    let local = |text: &str| {
        text.replace("127.0.0.1:8080", &format!("127.0.0.1:{http}"))
            .replace("127.0.0.1:9900", &format!("127.0.0.1:{admin}"))
    };
    let toml = local(&guide_blocks("sell-an-api", "toml").remove(0));
    let scratch = TempDir::new();
    scratch.write("gateway.toml", &toml);
    // Later blocks use the variables of earlier ones.
    let mut variables = String::new();
    let mut blocks = indented_blocks("sell-an-api").into_iter().map(|lines| {
        let commands: Vec<String> =
            lines.iter().map(|line| local(line)).filter(|line| !line.starts_with("transom run")).collect();
        let script = format!("{variables}{}", commands.join("\n"));
        let is_variable = |line: &&String| {
            line.split_once('=').is_some_and(|(name, _)| name.bytes().all(|byte| byte.is_ascii_lowercase()))
        };
        commands.iter().filter(is_variable).for_each(|line| variables += &format!("{line}\n"));
        script
    });
    let mut next = |folder: &Path| output(&format!("export no_proxy='*'\n{}", blocks.next().unwrap()), folder);
    let checked = next(scratch.path());
    assert!(checked.contains("gateway.toml: fine: "), "{checked}");
    let mut command = Command::new(BINARY);
    // A minute has just begun, so that its window does not end during the story.
    let second = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() % 60;
    command
        .env("LD_PRELOAD", faketime())
        .env("FAKETIME", format!("-{second}s"))
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    command.current_dir(scratch.path());
    let process = Process::spawn_command(command, &toml, scratch);
    let folder = process.scratch.path();

    next(folder);
    let key = |file: &str| output(&format!("jq -r .key {file}.json"), folder).trim().to_owned();
    let get = |key: &str| process.client().get_with("/reports", &[("X-API-Key", key)]);
    let first = next(folder).to_ascii_lowercase();
    assert!(first.starts_with("http/1.1 200") && first.contains("\"per-client-minute\";r=9;"), "{first}");
    (0..9).for_each(|_| _ = get(&key("acme")).expect(200));
    get(&key("acme")).expect(429);
    // The same limits for the others, who have used nothing.
    get(&key("initech")).expect(200);

    next(folder);
    let changed = get(&key("acme")).expect(200);
    let item = items(&changed, "ratelimit").into_iter().find(|item| item.name == "per-client-minute").unwrap();
    assert_eq!(item.get("r"), 39, "50 a minute, of which 10 were used before");

    next(folder);
    let item =
        items(&get(&key("initech")).expect(200), "ratelimit").into_iter().find(|item| item.name == "per-client-day");
    assert_eq!(item.unwrap().get("r"), 1498, "1500 today, of which 2 are used");

    get(&key("globex")).expect(200);
    next(folder);
    get(&key("globex")).expect(401);
    get(&key("globex-new")).expect(200);

    let denied = next(folder);
    assert!(denied.contains("203.0.113.0/24") && denied.contains("scraper"), "{denied}");

    next(folder);
    let log = || fs::read_to_string(folder.join("access.log")).unwrap();
    let is_refused = |line: &str| line.contains("refused_by") && line.contains("initech");
    eventually("the refusal is in the access log", || log().lines().any(is_refused));
    let support = next(folder);
    for expected in ["\t/reports\tper-client-minute\n", "plan:     free", "decision: refused with 429"] {
        assert!(support.contains(expected), "{expected:?}: {support}");
    }
    let audit = next(folder);
    assert_eq!(audit.lines().count(), 11, "{audit}");
    assert!(audit.lines().last().is_some_and(|line| line.contains("\"on-call\",\"deny\"")), "{audit}");
    assert_eq!(blocks.next(), None, "a block that was not run");
}

#[test]
fn the_guide_to_limits_plays_logs() {
    let [logs, candidates, higher, nginx, json] = <[String; 5]>::try_from(commands("choose-limits")).unwrap();
    let scratch = TempDir::new();
    for name in ["gateway.toml", "access.log"] {
        fs::copy(format!("{ROOT}/examples/choose-limits/{name}"), scratch.path().join(name)).unwrap();
    }
    // The output that the guide shows, with lines left out at the end.
    let shown = guide_blocks("choose-limits", "text").remove(0);
    let printed = output("transom simulate access.log", scratch.path());
    let printed: Vec<&str> = printed.lines().map(str::trim).collect();
    let shown: Vec<&str> = shown.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(printed.windows(shown.len()).any(|lines| lines == shown), "{printed:#?}");
    // The log of the day before, compressed.
    let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
    let before = fs::read_to_string(scratch.path().join("access.log")).unwrap().replace("09/Oct", "08/Oct");
    compressed.write_all(before.as_bytes()).unwrap();
    scratch.write("access.log.1.gz", compressed.finish().unwrap());
    let printed = output(&logs.replace("/var/log/nginx/", ""), scratch.path());
    assert!(printed.contains("  requests            282\n"), "{printed}");
    let printed = output(&candidates, scratch.path());
    assert!(printed.contains("per-client: limits") && printed.contains("160/minute, 2000/hour"), "{printed}");
    assert!(output(&higher, scratch.path()).contains("per-client=100/minute"));
    let log_format = "log_format main '$remote_addr - $remote_user [$time_local] \"$request\" $status $body_bytes_sent '\n\
                      '\"$http_referer\" \"$http_user_agent\"';\n";
    scratch.write("nginx.conf", log_format);
    let printed = output(&nginx.replace("/etc/nginx/", "").replace("/var/log/nginx/", ""), scratch.path());
    assert!(printed.contains("  requests            141\n"), "{printed}");
    // One balancer, and two clients that it names.
    let line = |client: &str| {
        format!(
            "{{\"time\": \"2026-10-09T14:00:00Z\", \"remote_addr\": \"10.0.0.1\", \"x_forwarded_for\": \"{client}\", \
             \"host\": \"a\", \"request\": \"GET / HTTP/1.1\", \"status\": 200}}\n"
        )
    };
    scratch.write("access.log", line("192.0.2.7") + &line("192.0.2.8"));
    let printed = output(&json, scratch.path());
    assert!(printed.contains("  keys                2\n"), "{printed}");
}

#[test]
fn the_guide_to_a_gateway_before_an_api_serves_https() {
    let [certificate, check, start] = <[String; 3]>::try_from(commands("reverse-proxy")).unwrap();
    assert_eq!(start, "transom run --config gateway.toml");
    let (scratch, upstream) = (TempDir::new(), Upstream::always(200));
    let mut toml = guide_blocks("reverse-proxy", "toml").remove(0);
    let server = format!("http://{}", upstream.address);
    for (text, other) in [
        ("0.0.0.0:80\"", "127.0.0.1:0\""),
        ("0.0.0.0:443", "127.0.0.1:0"),
        ("127.0.0.1:9900", "127.0.0.1:0"),
        ("https://one.internal", &server),
        ("\"https://two.internal\"", ""),
    ] {
        assert!(toml.contains(text), "{text}");
        toml = toml.replace(text, other);
    }
    scratch.write("gateway.toml", &toml);
    output(&certificate, scratch.path());
    output(&check, scratch.path());
    let process = Process::spawn_command(Command::new(BINARY), &toml, scratch);
    let moved = process.get("/a?b=c").expect(308);
    assert_eq!(moved.field("location"), Some("https://gateway.test/a?b=c"));
    let port = process.https.unwrap().port();
    let curl = format!("curl -s --noproxy '*' --cacert fullchain.pem --connect-to localhost:{port}:127.0.0.1:{port}");
    let get = format!("{curl} -o /dev/null -w '%{{http_code}} %{{http_version}}' https://localhost:{port}/a");
    assert_eq!(output(&get, process.scratch.path()), "200 2");
}

#[test]
fn the_guide_to_kubernetes_checks_the_configuration() {
    let scratch = TempDir::new();
    let folder = scratch.path().join("deploy/kubernetes");
    fs::create_dir_all(&folder).unwrap();
    fs::copy(format!("{ROOT}/deploy/kubernetes/configuration.yaml"), folder.join("configuration.yaml")).unwrap();
    let check = guide_blocks("kubernetes", "sh").remove(0);
    let printed = output(&check, scratch.path());
    assert!(printed.starts_with("kubernetes.toml: fine: "), "{printed}");
}

#[test]
fn the_guide_to_upgrades_replaces_the_process() {
    let [check, upgrade] = <[String; 2]>::try_from(commands("upgrade")).unwrap();
    let chain = UpgradeChain::start(&one_rule("key = \"ip\"\nwindows = [\"9/hour\"]"));
    let (folder, old) = (chain.first.scratch.path(), chain.serving_pid().unwrap());
    output(&check.replace("/etc/transom/", ""), folder);
    let printed = output(&format!("{} 2>&1", upgrade.replace("/etc/transom/", "")), folder);
    let new = chain.serving_pid().unwrap();
    assert!(new != old && printed.contains(&format!("process {new} took over from {old}")), "{printed}");
}

/// Replaces what an example cannot have in a test: addresses, folders of the system, servers of other machines.
fn made_local(toml: &str, folder: &Path) -> String {
    let line = |line: &str| {
        let setting = line.split('=').next().unwrap().trim();
        let is_address = ["http", "admin", "address", "forward_auth", "ratelimit_service"].contains(&setting);
        if is_address { format!("{setting} = \"127.0.0.1:0\"\n") } else { format!("{line}\n") }
    };
    let mut text: String = toml.lines().map(line).collect();
    for system in ["/etc/transom", "/run/transom", "/var/lib/transom"] {
        text = text.replace(system, folder.to_str().unwrap());
    }
    for (server, local) in [("10.0.0.5", "127.0.0.1"), ("one.internal", "127.0.0.1"), ("two.internal", "127.0.0.2")] {
        text = text.replace(server, local);
    }
    text
}

#[test]
fn every_example_starts_and_ends() {
    let folders = fs::read_dir(format!("{ROOT}/examples")).unwrap().map(|entry| entry.unwrap().path());
    let mut examples: Vec<_> = folders.filter(|path| path.is_dir()).collect();
    examples.sort();
    for example in &examples {
        let scratch = TempDir::new();
        for entry in fs::read_dir(example).unwrap() {
            let file = entry.unwrap();
            fs::copy(file.path(), scratch.path().join(file.file_name())).unwrap();
        }
        for (name, key) in [
            ("fullchain.pem", "tls-without-names.pem"),
            ("privkey.pem", "tls-other.key"),
            ("other.pem", "tls.pem"),
            ("other.key", "tls.key"),
        ] {
            fs::copy(format!("{ROOT}/tests/config/keys/{key}"), scratch.path().join(name)).unwrap();
        }
        let toml = fs::read_to_string(example.join("gateway.toml")).unwrap();
        let config = scratch.write("gateway.toml", made_local(&toml, scratch.path()));
        let config = config.to_str().unwrap();
        let (code, _, messages) = run(&["check", "--config", config]);
        assert_eq!(code, Some(0), "{}: {messages}", example.display());
        let mut command = Command::new(BINARY);
        command.args(["run", "--config", config]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = ProcessGroup::spawn(&mut command);
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let admin = lines.find_map(|line| line.strip_prefix("admin on http://").map(str::to_owned));
        let admin = admin.unwrap_or_else(|| panic!("{} does not start", example.display()));
        Client::connect(admin.parse().unwrap()).get_with("/readyz", &[("Host", &admin)]).expect(200);
        signal(process.id(), "TERM");
        lines.for_each(drop);
        assert!(process.wait().unwrap().success(), "{}", example.display());
    }
    assert!(examples.len() >= 15, "only {} examples", examples.len());
}
