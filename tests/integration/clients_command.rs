//! `transom clients`: edits of a clients file, output, and what stays unchanged.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};

use transom_limiter::secret_digest::Digest;

use crate::support::process::{BINARY, Process};
use crate::support::ratelimit_parser::items;
use crate::support::{TempDir, eventually, one_rule};

const RULE: &str = "key = \"header:x-api-key\"\non_missing_key = \"skip\"\nwindows = [\"10/366d\"]\n\
                    plans.gold.windows = [\"100/366d\"]\nplans.silver.windows = [\"50/366d\"]\n";

fn gateway() -> String {
    let section = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\nsubject = \"header:x-user\"\n";
    format!("{section}{}", one_rule(RULE))
}

/// A directory with `gateway.toml` and optionally a clients file.
struct Directory(TempDir);

/// The result of a command: exit code, standard output, standard error.
type CommandResult = (i32, String, String);

impl Directory {
    fn new(clients: Option<&str>) -> Directory {
        let directory = Directory(TempDir::new());
        directory.0.write("gateway.toml", gateway());
        clients.iter().for_each(|clients| drop(directory.0.write("clients.toml", clients)));
        directory
    }

    /// Runs `transom clients …` with this standard input.
    fn run(&self, arguments: &[&str], input: &str) -> CommandResult {
        let mut command = Command::new(BINARY);
        command.arg("clients").args(arguments).arg("--config").arg(self.0.path().join("gateway.toml"));
        let pipe = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipe.spawn().unwrap();
        // A command that needs no input may have ended already.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let contents = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), contents(output.stdout), contents(output.stderr))
    }

    /// Runs a command that must succeed; returns its output.
    #[track_caller]
    fn run_ok(&self, arguments: &[&str], input: &str) -> String {
        let (code, out, err) = self.run(arguments, input);
        assert_eq!(code, 0, "{err}");
        assert!(self.file_names().iter().all(|name| !name.ends_with(".new")), "{:?}", self.file_names());
        out
    }

    /// Runs a command that must be refused and change nothing; returns its message.
    #[track_caller]
    fn run_refused(&self, arguments: &[&str], input: &str) -> String {
        let before = (self.contents(), self.file_names());
        let (code, out, err) = self.run(arguments, input);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert_eq!((self.contents(), self.file_names()), before);
        assert!(err.contains("fix: ") || err.contains("Usage"), "{err}");
        err
    }

    fn contents(&self) -> Option<String> {
        fs::read_to_string(self.0.path().join("clients.toml")).ok()
    }

    fn file_names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut file_names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        file_names.sort();
        file_names
    }

    fn mode(&self) -> u32 {
        fs::metadata(self.0.path().join("clients.toml")).unwrap().permissions().mode() & 0o7777
    }
}

#[test]
fn a_generated_key_is_shown_once_and_stored_as_a_digest() {
    let directory = Directory::new(None);
    let printed = directory.run_ok(&["add", "acme", "--plan", "gold", "--generate-key"], "");
    let key = printed.trim_end();
    assert!(key.len() >= 32 && key.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{printed:?}");
    let contents = directory.contents().unwrap();
    assert!(contents.contains(&Digest::of(key.as_bytes()).to_string()) && !contents.contains(key), "{contents}");
    assert_eq!(directory.mode(), 0o600);
    let other = directory.run_ok(&["add", "acme", "--generate-key"], "");
    assert_ne!(other, printed);
    let list = directory.run_ok(&["list"], "");
    assert!(!list.contains(key) && !list.contains(&Digest::of(key.as_bytes()).to_string()), "{list}");
}

#[test]
fn a_key_is_read_from_a_file_or_standard_input() {
    let directory = Directory::new(None);
    let keys = ["from-standard-input", "also-from-standard-input", "from-an-argument", "by-its-digest"];
    let digests = keys.map(|key| Digest::of(key.as_bytes()).to_string());
    directory.run_ok(&["add", "a", "--plan", "gold"], "from-standard-input\nnot this\n");
    directory.run_ok(&["add", "b", "--plan", "gold", "--key", "-"], "also-from-standard-input\r\n");
    directory.run_ok(&["add", "c", "--plan", "gold", "--key", "from-an-argument"], "");
    directory.run_ok(&["add", "d", "--plan", "gold", "--key", &digests[3]], "");
    let contents = directory.contents().unwrap();
    assert!(
        digests.iter().all(|digest| contents.contains(digest)) && !keys.iter().any(|key| contents.contains(key)),
        "{contents}"
    );
    let (_, _, err) = directory.run(&["add", "e", "--plan", "gold"], "short\n");
    assert!(err.contains("guessed") && !err.contains("short\n"), "{err}");
}

#[test]
fn comments_and_order_of_the_file_are_kept() {
    let before = "# Ours.\n\n# since May\n[clients.acme]\nplan   = \"gold\"   # paid\nsubjects = [ \"user-1\" ]\n\n\
                  [clients.beta]\nplan = 'silver'\nnetworks = \"10.0.0.0/8\"\n";
    let directory = Directory::new(Some(before));
    fs::set_permissions(directory.0.path().join("clients.toml"), fs::Permissions::from_mode(0o640)).unwrap();
    directory.run_ok(&["add", "gamma", "--plan", "gold", "--network", "192.0.2.0/24", "--network", "::1"], "");
    let gamma = "\n[clients.gamma]\nplan = \"gold\"\nnetworks = [\"192.0.2.0/24\", \"::1\"]\n";
    assert_eq!(directory.contents().unwrap(), format!("{before}{gamma}"));
    directory.run_ok(&["add", "acme", "--plan", "silver", "--subject", "user-2"], "");
    let changed = before.replace("\"gold\"   #", "\"silver\"   #").replace("\"user-1\" ]", "\"user-1\", \"user-2\" ]");
    let contents = directory.contents().unwrap();
    assert_eq!(contents.replace(' ', ""), format!("{changed}{gamma}").replace(' ', ""));
    assert!(contents.contains("plan   = \"silver\"   # paid"), "{contents}");
    directory.run_ok(&["remove", "beta"], "");
    directory.run_ok(&["remove", "gamma"], "");
    directory.run_ok(&["remove", "acme", "--subject", "user-1"], "");
    let expected = "# Ours.\n\n# since May\n[clients.acme]\nplan   = \"silver\"   # paid\nsubjects = [ \"user-2\" ]\n";
    assert_eq!(directory.contents().unwrap(), expected);
    assert_eq!(directory.mode(), 0o640);
}

#[test]
fn the_list_is_printed_as_json() {
    let directory = Directory::new(Some(""));
    directory.run_ok(&["add", "acme", "--plan", "gold"], "abc");
    directory.run_ok(&["add", "beta", "--plan", "silver", "--network", "10.0.0.0/8", "--subject", "user-17"], "");
    let list: serde_json::Value = serde_json::from_str(&directory.run_ok(&["list", "--json"], "")).unwrap();
    let digest = Digest::of(b"abc").to_string();
    let expected = serde_json::json!({"clients": [
        {"name": "acme", "plan": "gold", "keys": [digest], "subjects": [], "networks": []},
        {"name": "beta", "plan": "silver", "keys": [], "subjects": ["user-17"], "networks": ["10.0.0.0/8"]},
    ]});
    assert_eq!(list, expected);
}

#[test]
fn the_list_is_a_table_without_secrets() {
    let directory = Directory::new(Some(""));
    assert_eq!(directory.run_ok(&["list"], ""), "NAME  PLAN  KEYS  SUBJECTS  NETWORKS\n");
    directory.run_ok(&["add", "acme", "--plan", "gold"], "abc");
    directory.run_ok(&["add", "beta", "--plan", "silver", "--network", "10.0.0.0/8", "--subject", "user-17"], "");
    let expected = "\
        NAME  PLAN    KEYS              SUBJECTS  NETWORKS\n\
        acme  gold    sha256:ba7816bf…  -         -\n\
        beta  silver  -                 user-17   10.0.0.0/8\n";
    assert_eq!(directory.run_ok(&["list"], ""), expected);
}

#[test]
fn one_of_several_keys_is_removed() {
    let directory = Directory::new(None);
    for key in ["the-first-of-the-keys", "the-second-of-the-keys", "the-third-of-the-keys"] {
        directory.run_ok(&["add", "acme", "--plan", "gold", "--key", "-"], key);
    }
    let brief = Digest::of(b"the-second-of-the-keys").brief();
    directory.run_ok(&["remove", "acme", "--key", &brief], "");
    directory.run_ok(&["remove", "acme", "--key", "-"], "the-first-of-the-keys\n");
    assert_eq!(directory.contents().unwrap().matches("sha256:").count(), 1);
    assert!(directory.contents().unwrap().contains(&Digest::of(b"the-third-of-the-keys").to_string()));
    // Without the last key nothing would identify the client.
    directory.run_refused(&["remove", "acme", "--key", "the-third-of-the-keys"], "");
    directory.run_refused(&["remove", "acme", "--key", "sha256:0"], "");
}

#[test]
fn invalid_commands_are_refused_and_change_nothing() {
    let directory = Directory::new(Some("[clients.acme]\nplan = \"gold\"\nnetworks = [\"10.0.0.0/8\"]\n"));
    let message = directory.run_refused(&["add", "beta", "--plan", "golf", "--generate-key"], "");
    assert!(message.contains("`golf`") && message.contains("did you mean `gold`"), "{message}");
    directory.run_refused(&["add", "beta", "--generate-key"], "");
    directory.run_refused(&["add", "beta", "--plan", "gold"], "");
    directory.run_refused(&["add", "beta", "--plan", "gold", "--key", " blank"], "");
    directory.run_refused(&["add", "beta", "--plan", "gold", "--key", "sha256:abc"], "");
    directory.run_refused(&["add", "beta", "--plan", "gold", "--key", "k", "--generate-key"], "");
    directory.run_refused(&["add", "be ta", "--plan", "gold", "--network", "::1"], "");
    let message = directory.run_refused(&["add", "beta", "--plan", "gold", "--network", "10.0.0.1/8"], "");
    assert!(message.contains("write `10.0.0.0/8`"), "{message}");
    let message = directory.run_refused(&["add", "beta", "--plan", "gold", "--network", "10.0.0.0/8"], "");
    assert!(message.contains("belongs to `acme` and to `beta`"), "{message}");
    let message = directory.run_refused(&["remove", "acne"], "");
    assert!(message.contains("did you mean `acme`"), "{message}");
    directory.run_refused(&["remove", "acme", "--network", "10.0.0.0/9"], "");
    directory.run_refused(&["rename", "acme"], "");
}

#[test]
fn a_client_that_an_allow_list_names_already_can_be_added() {
    let directory = Directory::new(None);
    let route = "upstream = \"u\"\nallow = [\"client:acme\"]\n";
    let toml = gateway().replacen("upstream = \"u\"\n", route, 1);
    assert!(toml.contains(route), "{toml}");
    directory.0.write("gateway.toml", toml);
    let message = directory.run_refused(&["add", "beta", "--plan", "gold", "--network", "::1"], "");
    assert!(message.contains("no client `acme`"), "{message}");
    directory.run_ok(&["add", "acme", "--plan", "gold", "--network", "::1"], "");
    directory.run_ok(&["add", "beta", "--plan", "gold", "--network", "::2"], "");
}

#[test]
fn a_malformed_file_is_not_changed() {
    for contents in
        ["[clients.acme\nplan = \"gold\"\n", "[clients.acme]\nplan = \"gold\"\napi_keys = [\"hunter2hunter2\"]\n"]
    {
        let directory = Directory::new(Some(contents));
        for run in [&["add", "beta", "--plan", "gold", "--network", "::1"][..], &["remove", "acme"], &["list"]] {
            let message = directory.run_refused(run, "");
            assert!(message.contains("clients.toml:") && !message.contains("hunter2"), "{message}");
        }
    }
    let directory = Directory::new(None);
    let message = directory.run_refused(&["list"], "");
    assert!(message.contains("transom clients add"), "{message}");
    directory.0.write("gateway.toml", one_rule(RULE));
    let message = directory.run_refused(&["add", "acme", "--plan", "gold", "--network", "::1"], "");
    assert!(message.contains("write `[clients]`"), "{message}");
}

#[test]
fn edits_are_serialized_and_symbolic_links_are_kept() {
    let directory = Directory::new(None);
    directory.0.write("elsewhere.toml", "");
    symlink("elsewhere.toml", directory.0.path().join("clients.toml")).unwrap();
    directory.0.write("elsewhere.toml.new", "");
    let run = ["add", "acme", "--plan", "gold", "--network", "::1"];
    let (code, _, err) = directory.run(&run, "");
    assert!(code == 1 && err.contains("elsewhere.toml.new") && err.contains("fix: "), "{code} {err}");
    fs::remove_file(directory.0.path().join("elsewhere.toml.new")).unwrap();
    directory.run_ok(&run, "");
    assert!(fs::symlink_metadata(directory.0.path().join("clients.toml")).unwrap().is_symlink());
    assert!(fs::read_to_string(directory.0.path().join("elsewhere.toml")).unwrap().contains("::1"));
}

#[test]
fn a_running_gateway_learns_of_an_added_client() {
    let process = Process::spawn_with(&gateway(), "");
    let config = process.config_path();
    let run = ["clients", "add", "acme", "--plan", "gold", "--generate-key", "--config"];
    let output = Command::new(BINARY).args(run).arg(config).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success());
    let key = String::from_utf8(output.stdout).unwrap();
    process.wait_for_reloads("applied", 1);
    eventually("the key is known", || {
        let response = process.client().get_with("/a", &[("X-API-Key", key.trim_end())]).expect(200);
        items(&response, "ratelimit-policy")[0].get("q") == 100
    });
}
