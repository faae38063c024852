//! The start of the binary: its output, and its errors.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::{fs, io, thread};

use crate::support::process::{BINARY, Process, ProcessGroup, run};
use crate::support::{TempDir, eventually, one_rule};

const GOOD: &str = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";

#[test]
fn a_bad_file_is_refused_with_position_and_fix() {
    let scratch = TempDir::new();
    let bad = GOOD.replace("upstream = \"u\"", "upstream = \"v\"\nrulez = []");
    let file = scratch.write("bad.toml", bad).display().to_string();
    for arguments in [&["check", "--config", &file][..], &["--config", &file], &["run", "--config", &file]] {
        let (code, out, err) = run(arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}: {err}");
        // Both problems at once, in the order of the file.
        let (first, second) = (err.find(&format!("{file}:5:12: ")), err.find(&format!("{file}:6:1: ")));
        assert!(first.is_some() && first < second, "{err}");
        assert!(err.matches("fix: ").count() == 2, "{err}");
    }
}

/// The worker threads of a process.
fn worker_threads(process: &Process) -> usize {
    let threads = fs::read_dir(format!("/proc/{}/task", process.pid())).unwrap();
    let name = |thread: io::Result<fs::DirEntry>| fs::read_to_string(thread.unwrap().path().join("comm")).unwrap();
    threads.map(name).filter(|name| name.starts_with("worker-")).count()
}

#[test]
fn there_are_as_many_workers_as_configured_or_as_cores() {
    for workers in [1, 3, 6] {
        assert_eq!(worker_threads(&Process::spawn(&format!("workers = {workers}\n{GOOD}"))), workers);
    }
    let cores = thread::available_parallelism().unwrap().get();
    assert_eq!(worker_threads(&Process::spawn(GOOD)), cores);
    let scratch = TempDir::new();
    let mut on_one_core = Command::new("taskset");
    // Of the cores that this process may use.
    on_one_core.args(["--cpu-list", &first_core(), BINARY]);
    assert_eq!(worker_threads(&Process::spawn_command(on_one_core, GOOD, scratch)), 1);
}

/// The first core that this process may use.
fn first_core() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    list.trim().split([',', '-']).next().unwrap().to_owned()
}

#[test]
fn an_unreadable_file_is_a_bad_configuration() {
    let scratch = TempDir::new();
    let nowhere = scratch.path().join("nowhere.toml").display().to_string();
    let directory = scratch.path().display().to_string();
    let latin = scratch.write("latin.toml", b"[upstreams.u]\nbuiltin = \"\xe9cho\"\n").display().to_string();
    let empty = scratch.write("empty.toml", "").display().to_string();
    for (file, message) in [
        (&nowhere, format!("transom: there is no file `{nowhere}`\n")),
        (&directory, format!("transom: `{directory}` is a directory, not a file\n")),
        (&latin, format!("{latin}:2:12: the file is not UTF-8 text\n")),
        (&empty, format!("{empty}:1:1: ")),
    ] {
        for command in [&["check"][..], &[]] {
            let (code, _, err) = run(&[command, &["--config", file]].concat());
            assert_eq!(code, Some(2), "{err}");
            assert!(err.starts_with(&message), "{err}");
            assert_eq!(err == message, [&nowhere, &directory].contains(&file), "{err}");
        }
    }
    // A relative name is shown with the folder in which the file was looked for.
    for (name, fix) in [("nope.toml", ""), ("gateway.toml", "  fix: name the configuration, such as `--config FILE`\n")]
    {
        let output = Command::new(BINARY).args(["check", name]).current_dir(scratch.path()).output().unwrap();
        let folder = fs::canonicalize(scratch.path()).unwrap();
        let expected = format!("transom: there is no file `{}`\n{fix}", folder.join(name).display());
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
    }
}

#[test]
fn check_accepts_a_good_file_without_starting() {
    let scratch = TempDir::new();
    // The address is in use, which does not matter to `check`.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let text = format!("[listen]\nhttp = \"{}\"\n{GOOD}", taken.local_addr().unwrap());
    let file = scratch.write("good.toml", text).display().to_string();
    let (code, out, err) = run(&["check", "--config", &file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.starts_with(&file) && out.contains("fine"), "{out}");
}

#[test]
fn check_warns_of_a_start_that_would_fail_here() {
    let scratch = TempDir::new();
    let folder = scratch.path().display().to_string();
    let listen = "[listen]\nhttp = \"127.0.0.1:0\"\n";
    for (settings, reason) in [
        (
            format!("{listen}[access_log]\nfile = \"{folder}/no/such/log\"\n"),
            format!("`access_log.file` is `{folder}/no/such/log`, and there is no folder `{folder}/no/such`: make it"),
        ),
        (
            format!("{listen}[access_log]\nfile = \"{folder}\"\n"),
            format!("`access_log.file` is `{folder}`, which is a folder: name a file"),
        ),
        (
            format!("pid_file = \"no/pid\"\n{listen}"),
            format!("`pid_file` is `{folder}/no/pid`, and there is no folder `{folder}/no`: make it"),
        ),
        (
            format!("{listen}[counters]\nfile = \"{folder}/no/counters\"\n"),
            format!("`counters.file` is `{folder}/no/counters`, and there is no folder `{folder}/no`: make it"),
        ),
        (
            format!("{listen}[counters]\nsnapshot = \"{folder}/gateway.toml/counts\"\n"),
            format!(
                "`counters.snapshot` is `{folder}/gateway.toml/counts`, and there is no folder `{folder}/gateway.toml`: make it"
            ),
        ),
        (
            format!("[listen]\nhttp = \"unix:{folder}/gateway.toml\"\n"),
            format!(
                "cannot listen on `unix:{folder}/gateway.toml`: the file there is not a socket: move the file away, or use \
                 another path"
            ),
        ),
        (
            format!("[listen]\nhttp = \"unix:{folder}/no/http.sock\"\n"),
            format!(
                "cannot listen on `unix:{folder}/no/http.sock`: No such file or directory (os error 2): make the folder: "
            ),
        ),
        (
            // An address for documentation (RFC 5737), which no machine uses.
            String::from("[listen]\nhttp = \"192.0.2.1:8080\"\n"),
            String::from("nothing can listen on `192.0.2.1:8080`, an address that this machine may not have: "),
        ),
    ] {
        let file = scratch.write("gateway.toml", format!("{settings}{GOOD}")).display().to_string();
        let (code, out, err) = run(&["check", "--config", &file]);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{settings}");
        assert!(out.contains(&format!("\n  note: the gateway would not start here: {reason}")), "{settings}: {out}");
        let (code, _, err) = run(&["--config", &file]);
        assert_eq!(code, Some(1), "{settings}: {err}");
    }
}

/// Files, addresses and the key set that references name, in all output of `check`, also as JSON.
#[test]
fn check_shows_references_instead_of_their_values() {
    let scratch = TempDir::new();
    let text = "pid_file = \"${file:folder}/pid\"\n[listen]\nhttp = \"192.0.2.${file:host}:8080\"\n\
                [access_log]\nfile = \"${file:folder}/log\"\n[counters]\nfile = \"${file:folder}\"\n\
                [jwt]\njwks_url = \"https://canary.example/${file:host}\"\n\
                [rules.r]\nkey = \"jwt:${file:claim}\"\non_missing_key = \"skip\"\nwindows = [\"5/minute\"]\n\
                [[routes]]\npath = \"/${file:claim}\"\nrules = [\"r\"]\nrespond = { status = 200 }\n";
    scratch.write("folder", "/nonexistent/canary\n");
    scratch.write("host", "217\n");
    scratch.write("claim", "canary-claim\n");
    for (text, code) in [(text.to_owned(), Some(0)), (text.replace("5/minute", "/${file:claim}"), Some(2))] {
        let file = scratch.write("gateway.toml", text.replace("canary.example", "keys.example")).display().to_string();
        for options in [&[][..], &["--json"]] {
            let (found, out, err) = run(&[&["check", "--config", &file], options].concat());
            assert_eq!(found, code, "{out}{err}");
            // The name of the folder may have the digits of a value.
            let shown = (out + &err).replace(scratch.path().to_str().unwrap(), "");
            assert!(shown.contains("${file:"), "{shown}");
            assert!(!shown.contains("canary") && !shown.contains("nonexist") && !shown.contains("217"), "{shown}");
        }
    }
}

#[test]
fn a_warning_is_an_error_only_with_strict() {
    let scratch = TempDir::new();
    let text = format!("[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"0.0.0.0:0\"\n{GOOD}");
    let file = scratch.write("gateway.toml", &text).display().to_string();
    let warning = "\n  warning: `admin` listens on `0.0.0.0:0`: anyone who can connect can read the metrics, and use up and reset every limit; set `token_file` in `[admin]`\n";
    let (code, out, err) = run(&["check", "--config", &file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert_eq!(out, format!("{file}: fine: 1 route, 0 rules, 1 upstream{warning}"));
    let (code, out, err) = run(&["check", "--strict", "--config", &file]);
    assert_eq!((code, err), (Some(2), format!("{file}: 1 warning with `--strict`\n")));
    assert_eq!(out, format!("{file}: 1 route, 0 rules, 1 upstream{warning}"));
    let file = scratch.write("gateway.toml", text.replace("0.0.0.0", "127.0.0.1")).display().to_string();
    let (code, out, err) = run(&["check", "--strict", "--config", &file]);
    assert_eq!((code, out, err), (Some(0), format!("{file}: fine: 1 route, 0 rules, 1 upstream\n"), String::new()));
}

#[test]
fn a_public_admin_address_is_warned_of() {
    let scratch = TempDir::new();
    for (address, warns) in [("0.0.0.0", true), ("127.0.0.1", false)] {
        let text = format!("[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"{address}:0\"\n{GOOD}");
        let file = scratch.write("gateway.toml", text);
        let log = scratch.path().join("log");
        let mut command = Command::new(BINARY);
        command.arg("--config").arg(file).stdout(Stdio::piped()).stderr(fs::File::create(&log).unwrap());
        let mut child = ProcessGroup::spawn(&mut command);
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        lines.next().unwrap().unwrap();
        crate::support::process::signal(child.id(), "TERM");
        assert!(child.wait().unwrap().success());
        let log = fs::read_to_string(log).unwrap();
        assert_eq!(log.contains(&format!("`admin` listens on `{address}:0`: anyone who can connect")), warns, "{log}");
    }
}

#[test]
fn the_shipped_file_is_valid_and_the_default() {
    let output = Command::new(BINARY).arg("check").current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "gateway.toml: fine: 1 route, 1 rule, 1 upstream\n  \
         per-client: 2000/hour + 33/minute: at most 66 requests in 2 seconds around the end of a minute, 2013 in any hour\n  \
         per-client: note: 2000/hour cannot be reached, because 33/minute admits at most 1980 in that time; it takes effect once 33/minute is raised\n"
    );
    let scratch = TempDir::new();
    let output = Command::new(BINARY).current_dir(scratch.path()).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/gateway.toml`\n  fix: name the configuration"));
}

#[test]
fn an_address_in_use_fails_the_start() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let holder = TcpListener::bind(taken).unwrap();
    let scratch = TempDir::new();
    for listen in [
        format!("[listen]\nhttp = \"{taken}\"\nadmin = \"127.0.0.1:0\"\n"),
        format!("[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"{taken}\"\n"),
    ] {
        let file = scratch.write("gateway.toml", format!("{listen}{GOOD}")).display().to_string();
        let (code, _, err) = run(&["--config", &file]);
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains(&taken.to_string()) && err.contains("in use") && err.contains("ss -ltnp"), "{err}");
    }
    drop(holder);
}

#[test]
fn a_second_gateway_does_not_share_the_port_of_the_first() {
    let process = Process::spawn(GOOD);
    let scratch = TempDir::new();
    let text = format!("[listen]\nhttp = \"{}\"\n{GOOD}", process.http);
    let file = scratch.write("gateway.toml", text).display().to_string();
    let (code, _, err) = run(&["--config", &file]);
    assert_eq!(code, Some(1), "{err}");
    process.get("/a").expect(200);
}

#[test]
fn an_access_log_that_cannot_be_opened_fails_the_start() {
    let scratch = TempDir::new();
    let text = format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[access_log]\nfile = \"{}/no/such/dir\"\n{GOOD}",
        scratch.path().display()
    );
    let file = scratch.write("gateway.toml", text).display().to_string();
    let (code, _, err) = run(&["--config", &file]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("access log") && err.contains("No such file"), "{err}");
}

#[test]
fn invalid_usage_is_refused() {
    for arguments in [&["--nonsense"][..], &["serve"], &["check", "--nonsense"], &["--config"], &["check", "a", "b"]] {
        let (code, out, err) = run(arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(err.contains("--help"), "{arguments:?}: {err}");
    }
}

#[test]
fn version_and_help_are_printed() {
    let (code, out, err) = run(&["--version"]);
    assert_eq!((code, out, err), (Some(0), format!("transom {}\n", env!("CARGO_PKG_VERSION")), String::new()));
    let (code, out, _) = run(&["--help"]);
    assert_eq!(code, Some(0));
    for word in ["run", "check", "--config", "--version"] {
        assert!(out.contains(word), "{word} is not in {out}");
    }
}

#[test]
fn completions_and_manual_page_name_every_command() {
    let (_, help, _) = run(&["--help"]);
    let listed = help.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    let commands: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"run") && commands.contains(&"man"), "{help}");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let (code, script, _) = run(&["completions", shell]);
        assert_eq!(code, Some(0));
        assert!(commands.iter().all(|command| script.contains(command)), "{shell}: {script}");
    }
    let (code, page, err) = run(&["man"]);
    assert_eq!((code, err), (Some(0), String::new()));
    for command in commands.iter().filter(|command| **command != "help") {
        assert!(page.contains(&format!(".SH \"TRANSOM {}\"", command.to_uppercase())), "{command}: {page}");
    }
    assert!(page.contains("\\fB\\-\\-connect\\fR"), "{page}");
    let sections: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix(".SH ")).collect();
    let last = ["EXAMPLES", "FILES", "SIGNALS", "ENVIRONMENT", "EXIT STATUS", "SEE ALSO"];
    assert_eq!(sections[sections.len() - last.len()..], last);
    assert_eq!(run(&["completions", "tcsh"]).0, Some(2));
}

#[test]
fn a_misspelled_option_or_command_has_a_suggestion() {
    for (arguments, meant) in [
        (&["check", "--strct"][..], "--strict"),
        (&["chek"], "check"),
        (&["simulate", "--tri", "r=1/minute", "log"], "--try"),
    ] {
        let (code, _, message) = run(arguments);
        assert!(code == Some(2) && message.contains(&format!("'{meant}'")), "{message}");
        assert!(!message.contains('\x1b'), "colors are for terminals: {message:?}");
    }
}

#[test]
fn check_takes_a_file_without_an_option() {
    let scratch = TempDir::new();
    let file = scratch.write("other.toml", GOOD).display().to_string();
    let (code, out, err) = run(&["check", &file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.starts_with(&format!("{file}: fine: ")), "{out}");
    assert_eq!(run(&["check", &file, "--config", &file]).0, Some(2), "one file is checked");
    let missing = scratch.path().join("missing.toml").display().to_string();
    for command in ["check", "run"] {
        let (code, _, err) = run(&[command, &missing]);
        assert!(code == Some(2) && err.contains(&format!("there is no file `{missing}`")), "{err}");
    }
}

#[test]
fn a_pipe_is_read_as_a_configuration() {
    let scratch = TempDir::new();
    let file = scratch.write("gateway.toml", GOOD);
    let script = "exec \"$0\" check -c <(cat \"$1\")";
    let output = Command::new("bash").args(["-c", script, BINARY]).arg(&file).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains(": fine: 1 route"), "{out}{err}");
    let mut child = Command::new(BINARY)
        .args(["check", "/dev/stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), GOOD.as_bytes()).unwrap();
    assert!(child.wait_with_output().unwrap().status.success());
    // A folder is no text.
    let (code, _, err) = run(&["check", scratch.path().to_str().unwrap()]);
    assert!(code == Some(2) && err.contains("is a directory"), "{err}");
}

#[test]
fn every_address_is_printed_and_served() {
    let scratch = TempDir::new();
    let text = format!(
        "listen = {{ http = [\"127.0.0.1:0\", \"127.0.0.1:0\"], admin = \"127.0.0.1:0\", metrics = \"127.0.0.1:0\" }}\n{GOOD}"
    );
    let file = scratch.write("gateway.toml", text);
    let mut child =
        ProcessGroup::spawn(Command::new(BINARY).arg("run").arg("--config").arg(file).stdout(Stdio::piped()));
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let printed: Vec<String> = lines.by_ref().take(4).map(Result::unwrap).collect();
    let address = |n: usize, prefix: &str| printed[n].strip_prefix(prefix).unwrap().parse().unwrap();
    for n in [0, 1] {
        crate::support::client::Client::connect(address(n, "listening on http://")).get("/a").expect(200);
    }
    for (n, prefix) in [(2, "admin on http://"), (3, "metrics on http://")] {
        let at: std::net::SocketAddr = address(n, prefix);
        crate::support::client::Client::connect(at).get_with("/readyz", &[("Host", &at.to_string())]).expect(200);
    }
    crate::support::process::signal(child.id(), "INT");
    assert!(child.wait().unwrap().success());
    assert_eq!(lines.count(), 0);
}

/// The first lines that a gateway prints to a terminal.
fn printed_on_a_terminal(file: &std::path::Path, lines: usize) -> Vec<String> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
    let output = fs::OpenOptions::new().read(true).write(true).open(name).unwrap();
    let mut command = Command::new(BINARY);
    command.arg("--config").arg(file).stdout(output).stderr(Stdio::null());
    let _gateway = ProcessGroup::spawn(&mut command);
    let output = std::io::BufRead::lines(std::io::BufReader::new(fs::File::from(terminal)));
    output.take(lines).map(|line| line.unwrap().trim_end().to_owned()).collect()
}

#[test]
fn a_start_says_what_is_served_and_what_to_try() {
    let scratch = TempDir::new();
    let file = scratch.write(
        "gateway.toml",
        format!("workers = 2\nlisten = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\" }}\n{GOOD}"),
    );
    let facts = |printed: &[String]| {
        let http = printed.iter().find_map(|line| line.strip_prefix("listening on http://")).unwrap();
        let admin = printed.iter().find_map(|line| line.strip_prefix("admin on http://")).unwrap();
        vec![
            concat!("transom ", env!("CARGO_PKG_VERSION")).to_owned(),
            format!("configuration: {}", file.display()),
            "1 route, 0 rules".to_owned(),
            "2 workers".to_owned(),
            format!("listening on http://{http}"),
            format!("admin on http://{admin}"),
            format!("dashboard: http://{admin}/"),
            format!("try: curl -i http://{http}/"),
        ]
    };
    let printed = printed_on_a_terminal(&file, 8);
    assert_eq!(printed, facts(&printed));
    // Without a terminal: the addresses on standard output, and all facts in one line of the log.
    let log = scratch.path().join("log");
    let mut command = Command::new(BINARY);
    command.arg("--config").arg(&file).stdout(Stdio::piped()).stderr(fs::File::create(&log).unwrap());
    let mut child = ProcessGroup::spawn(&mut command);
    let output = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let printed: Vec<String> = output.take(2).map(Result::unwrap).collect();
    let line = facts(&printed).join("; ");
    eventually("the facts are logged", || fs::read_to_string(&log).unwrap().contains(&line));
}

#[test]
fn no_admin_listener_is_opened_by_default() {
    let scratch = TempDir::new();
    let log = scratch.path().join("log");
    let text = format!("[listen]\nhttp = \"127.0.0.1:0\"\n{}", one_rule("key = \"ip\"\nwindows = [\"1/hour\"]"));
    let file = scratch.write("gateway.toml", text);
    let mut command = Command::new(BINARY);
    command.arg("--config").arg(file).stdout(Stdio::piped()).stderr(fs::File::create(log).unwrap());
    let mut child = ProcessGroup::spawn(&mut command);
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let first = lines.next().unwrap().unwrap();
    let address = first.strip_prefix("listening on http://").unwrap().parse().unwrap();
    crate::support::client::Client::connect(address).get("/a").expect(200);
    crate::support::process::signal(child.id(), "TERM");
    assert!(child.wait().unwrap().success());
    assert_eq!(lines.count(), 0);
}

#[test]
fn metrics_are_served_without_an_admin_address() {
    let scratch = TempDir::new();
    let config = |address: &str| format!("[listen]\nhttp = \"127.0.0.1:0\"\nmetrics = \"{address}\"\n{GOOD}");
    let file = scratch.write("gateway.toml", config("127.0.0.1:0"));
    let mut command = Command::new(BINARY);
    let mut child = ProcessGroup::spawn(command.arg("--config").arg(file).stdout(Stdio::piped()));
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let printed: Vec<String> = lines.by_ref().take(2).map(Result::unwrap).collect();
    let address: std::net::SocketAddr = printed[1].strip_prefix("metrics on http://").unwrap().parse().unwrap();
    let mut client = crate::support::client::Client::connect(address);
    let host = address.to_string();
    assert!(client.get_with("/metrics", &[("Host", &host)]).expect(200).text().contains("transom_build_info"));
    client.get_with("/upstreams", &[("Host", &host)]).expect(404);
    // A probe finds it in the configuration.
    let probed = scratch.write("probed.toml", config(&host));
    let ready = (Some(0), format!("the gateway at http://{address} is ready\n"), String::new());
    assert_eq!(run(&["health", "--config", probed.to_str().unwrap()]), ready);
    let taken = run(&["--config", probed.to_str().unwrap()]);
    assert!(taken.0 == Some(1) && taken.2.contains(&host), "{taken:?}");
    crate::support::process::signal(child.id(), "TERM");
    assert!(child.wait().unwrap().success());
}
