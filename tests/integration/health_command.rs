//! `transom health`: the exit code of a probe.

use crate::support::process::{Process, run};
use crate::support::{TempDir, eventually, one_rule};

fn config(settings: &str) -> String {
    format!("{settings}\n{}", one_rule("key = \"ip\"\nwindows = [\"1000/hour\"]"))
}

fn health(arguments: &[&str]) -> (Option<i32>, String) {
    let (code, stdout, stderr) = run(&[&["health"], arguments].concat());
    (code, stdout + &stderr)
}

#[test]
fn a_probe_follows_the_gateway_from_start_to_end() {
    let mut process = Process::spawn(&config("drain = { delay = \"1m\" }"));
    let admin = process.admin.to_string();
    let expect = |code: i32, text: &str| {
        assert_eq!(health(&["--admin", &admin]), (Some(code), text.replace("ADDRESS", &admin)));
    };
    expect(0, "the gateway at http://ADDRESS is ready\n");
    process.signal("TERM");
    eventually("/readyz is 503", || process.admin_get("/readyz").status == 503);
    expect(1, "transom: the gateway at http://ADDRESS is not ready: 503 Service Unavailable\n");
    process.signal("TERM");
    process.wait();
    expect(1, "transom: no gateway listens at http://ADDRESS\n");
}

#[test]
fn the_configuration_needs_no_option() {
    let process = Process::spawn(&config(""));
    let scratch = TempDir::new();
    let file = scratch.write("named.toml", config(&format!("[listen]\nadmin = \"{}\"\n", process.admin)));
    let file = file.to_str().unwrap();
    let ready = format!("the gateway at http://{} is ready\n", process.admin);
    assert_eq!(health(&[file]), (Some(0), ready.clone()));
    assert_eq!(health(&["--config", file]), (Some(0), ready));
    let (code, _) = health(&[file, "--config", file]);
    assert_eq!(code, Some(2));
}

/// A mistake on the command line names the command that is probably meant.
#[test]
fn options_and_commands_of_other_programs_are_answered_with_those_here() {
    for (arguments, hint) in [
        (&["-t"][..], "`transom check FILE` checks a configuration file"),
        (&["-c", "a.toml", "-t"], "`transom check FILE` checks a configuration file"),
        (&["test"], "`transom check FILE` checks a configuration file"),
        (&["configtest"], "`transom check FILE` checks a configuration file"),
        (&["start"], "`transom run FILE` serves a configuration file"),
        (&["-s", "reload"], "the gateway reloads a changed file by itself"),
        (&["stop"], "the signal SIGTERM stops the gateway"),
        (&["api.toml"], "`transom run api.toml` serves this configuration file, `transom check api.toml` checks it"),
        (&["simulat"], "a similar subcommand exists: 'simulate'"),
    ] {
        let (code, stdout, stderr) = run(arguments);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(stderr.contains(hint), "{arguments:?}: {stderr}");
    }
}

#[test]
fn the_configuration_names_the_address() {
    let process = Process::spawn(&config(""));
    let scratch = TempDir::new();
    let file = |name: &str, listen: &str| {
        scratch.write(name, config(&format!("[listen]\n{listen}\n"))).to_str().unwrap().to_owned()
    };
    // Probes run on the gateway's machine: an address for all interfaces is asked at the loopback address.
    let all_interfaces = format!("admin = \"0.0.0.0:{}\"", process.admin.port());
    let ready = (Some(0), format!("the gateway at http://{} is ready\n", process.admin));
    assert_eq!(health(&["--config", &file("all.toml", &all_interfaces)]), ready);

    let none = file("none.toml", "http = \"127.0.0.1:8080\"");
    let (code, text) = health(&["--config", &none]);
    assert_eq!(code, Some(1));
    assert!(text.contains("sets no admin address") && text.contains("--admin HOST:PORT"), "{text}");

    // Docker reserves 2, the code of other commands for an invalid configuration.
    let invalid = file("invalid.toml", "admin = \"here\"");
    assert_eq!(health(&["--config", &invalid]).0, Some(1));
    assert_eq!(health(&["--config", &invalid, "--admin", &process.admin.to_string()]), ready);
}
