//! `transom clients`: edits of a clients file, output, and what stays unchanged.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};

use transom_limiter::secret_digest::Digest;

use crate::support::process::{BINARY, Process};
use crate::support::ratelimit_parser::items;
use crate::support::{Scratch, eventually, one_rule};

const RULE: &str = "key = \"header:x-api-key\"\non_missing_key = \"skip\"\nwindows = [\"10/366d\"]\n\
                    plans.gold.windows = [\"100/366d\"]\nplans.silver.windows = [\"50/366d\"]\n";

fn gateway() -> String {
    let section = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\nsubject = \"header:x-user\"\n";
    format!("{section}{}", one_rule(RULE))
}

/// A directory with a gateway.toml, and maybe a clients file.
struct Desk(Scratch);

/// The result of a command: exit code, standard output, standard error.
type Told = (i32, String, String);

impl Desk {
    fn new(clients: Option<&str>) -> Desk {
        let desk = Desk(Scratch::new());
        desk.0.write("gateway.toml", gateway());
        clients.iter().for_each(|clients| drop(desk.0.write("clients.toml", clients)));
        desk
    }

    /// Runs `transom clients …` with something on its standard input.
    fn order(&self, arguments: &[&str], input: &str) -> Told {
        let mut command = Command::new(BINARY);
        command.arg("clients").args(arguments).arg("--config").arg(self.0.path().join("gateway.toml"));
        let pipe = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipe.spawn().unwrap();
        // A command that needs no input may have ended already.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    /// Runs a command that must succeed; returns its output.
    #[track_caller]
    fn done(&self, arguments: &[&str], input: &str) -> String {
        let (code, out, err) = self.order(arguments, input);
        assert_eq!(code, 0, "{err}");
        assert!(self.names().iter().all(|name| !name.ends_with(".new")), "{:?}", self.names());
        out
    }

    /// Runs a command that must be refused and change nothing; returns its message.
    #[track_caller]
    fn refused(&self, arguments: &[&str], input: &str) -> String {
        let before = (self.text(), self.names());
        let (code, out, err) = self.order(arguments, input);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert_eq!((self.text(), self.names()), before);
        assert!(err.contains("fix: ") || err.contains("Usage"), "{err}");
        err
    }

    fn text(&self) -> Option<String> {
        fs::read_to_string(self.0.path().join("clients.toml")).ok()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn mode(&self) -> u32 {
        fs::metadata(self.0.path().join("clients.toml")).unwrap().permissions().mode() & 0o7777
    }
}

#[test]
fn a_generated_key_is_shown_once_and_stored_as_a_digest() {
    let desk = Desk::new(None);
    let printed = desk.done(&["add", "acme", "--plan", "gold", "--generate-key"], "");
    let key = printed.trim_end();
    assert!(key.len() >= 32 && key.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{printed:?}");
    let text = desk.text().unwrap();
    assert!(text.contains(&Digest::of(key.as_bytes()).to_string()) && !text.contains(key), "{text}");
    assert_eq!(desk.mode(), 0o600);
    let other = desk.done(&["add", "acme", "--generate-key"], "");
    assert_ne!(other, printed);
    let list = desk.done(&["list"], "");
    assert!(!list.contains(key) && !list.contains(&Digest::of(key.as_bytes()).to_string()), "{list}");
}

#[test]
fn a_key_is_read_from_a_file_or_standard_input() {
    let desk = Desk::new(None);
    let keys = ["from-standard-input", "also-from-standard-input", "from-an-argument", "by-its-digest"];
    let digests = keys.map(|key| Digest::of(key.as_bytes()).to_string());
    desk.done(&["add", "a", "--plan", "gold"], "from-standard-input\nnot this\n");
    desk.done(&["add", "b", "--plan", "gold", "--key", "-"], "also-from-standard-input\r\n");
    desk.done(&["add", "c", "--plan", "gold", "--key", "from-an-argument"], "");
    desk.done(&["add", "d", "--plan", "gold", "--key", &digests[3]], "");
    let text = desk.text().unwrap();
    assert!(digests.iter().all(|digest| text.contains(digest)) && !keys.iter().any(|key| text.contains(key)), "{text}");
    let (_, _, err) = desk.order(&["add", "e", "--plan", "gold"], "short\n");
    assert!(err.contains("guessed") && !err.contains("short\n"), "{err}");
}

#[test]
fn comments_and_order_of_the_file_are_kept() {
    let before = "# Ours.\n\n# since May\n[clients.acme]\nplan   = \"gold\"   # paid\nsubjects = [ \"user-1\" ]\n\n\
                  [clients.beta]\nplan = 'silver'\nnetworks = \"10.0.0.0/8\"\n";
    let desk = Desk::new(Some(before));
    fs::set_permissions(desk.0.path().join("clients.toml"), fs::Permissions::from_mode(0o640)).unwrap();
    desk.done(&["add", "gamma", "--plan", "gold", "--network", "192.0.2.0/24", "--network", "::1"], "");
    let gamma = "\n[clients.gamma]\nplan = \"gold\"\nnetworks = [\"192.0.2.0/24\", \"::1\"]\n";
    assert_eq!(desk.text().unwrap(), format!("{before}{gamma}"));
    desk.done(&["add", "acme", "--plan", "silver", "--subject", "user-2"], "");
    let changed = before.replace("\"gold\"   #", "\"silver\"   #").replace("\"user-1\" ]", "\"user-1\", \"user-2\" ]");
    let text = desk.text().unwrap();
    assert_eq!(text.replace(' ', ""), format!("{changed}{gamma}").replace(' ', ""));
    assert!(text.contains("plan   = \"silver\"   # paid"), "{text}");
    desk.done(&["remove", "beta"], "");
    desk.done(&["remove", "gamma"], "");
    desk.done(&["remove", "acme", "--subject", "user-1"], "");
    let expected = "# Ours.\n\n# since May\n[clients.acme]\nplan   = \"silver\"   # paid\nsubjects = [ \"user-2\" ]\n";
    assert_eq!(desk.text().unwrap(), expected);
    assert_eq!(desk.mode(), 0o640);
}

#[test]
fn the_list_is_a_table_without_secrets() {
    let desk = Desk::new(Some(""));
    assert_eq!(desk.done(&["list"], ""), "NAME  PLAN  KEYS  SUBJECTS  NETWORKS\n");
    desk.done(&["add", "acme", "--plan", "gold"], "abc");
    desk.done(&["add", "beta", "--plan", "silver", "--network", "10.0.0.0/8", "--subject", "user-17"], "");
    let expected = "\
        NAME  PLAN    KEYS              SUBJECTS  NETWORKS\n\
        acme  gold    sha256:ba7816bf…  -         -\n\
        beta  silver  -                 user-17   10.0.0.0/8\n";
    assert_eq!(desk.done(&["list"], ""), expected);
}

#[test]
fn one_of_several_keys_is_removed() {
    let desk = Desk::new(None);
    for key in ["the-first-of-the-keys", "the-second-of-the-keys", "the-third-of-the-keys"] {
        desk.done(&["add", "acme", "--plan", "gold", "--key", "-"], key);
    }
    let brief = Digest::of(b"the-second-of-the-keys").brief();
    desk.done(&["remove", "acme", "--key", &brief], "");
    desk.done(&["remove", "acme", "--key", "-"], "the-first-of-the-keys\n");
    assert_eq!(desk.text().unwrap().matches("sha256:").count(), 1);
    assert!(desk.text().unwrap().contains(&Digest::of(b"the-third-of-the-keys").to_string()));
    // Without the last key nothing would identify the client.
    desk.refused(&["remove", "acme", "--key", "the-third-of-the-keys"], "");
    desk.refused(&["remove", "acme", "--key", "sha256:0"], "");
}

#[test]
fn invalid_commands_are_refused_and_change_nothing() {
    let desk = Desk::new(Some("[clients.acme]\nplan = \"gold\"\nnetworks = [\"10.0.0.0/8\"]\n"));
    let said = desk.refused(&["add", "beta", "--plan", "golf", "--generate-key"], "");
    assert!(said.contains("`golf`") && said.contains("did you mean `gold`"), "{said}");
    desk.refused(&["add", "beta", "--generate-key"], "");
    desk.refused(&["add", "beta", "--plan", "gold"], "");
    desk.refused(&["add", "beta", "--plan", "gold", "--key", " blank"], "");
    desk.refused(&["add", "beta", "--plan", "gold", "--key", "sha256:abc"], "");
    desk.refused(&["add", "beta", "--plan", "gold", "--key", "k", "--generate-key"], "");
    desk.refused(&["add", "be ta", "--plan", "gold", "--network", "::1"], "");
    let said = desk.refused(&["add", "beta", "--plan", "gold", "--network", "10.0.0.1/8"], "");
    assert!(said.contains("write `10.0.0.0/8`"), "{said}");
    let said = desk.refused(&["add", "beta", "--plan", "gold", "--network", "10.0.0.0/8"], "");
    assert!(said.contains("one of `acme` already"), "{said}");
    let said = desk.refused(&["remove", "acne"], "");
    assert!(said.contains("did you mean `acme`"), "{said}");
    desk.refused(&["remove", "acme", "--network", "10.0.0.0/9"], "");
    desk.refused(&["rename", "acme"], "");
}

#[test]
fn a_malformed_file_is_not_changed() {
    for text in
        ["[clients.acme\nplan = \"gold\"\n", "[clients.acme]\nplan = \"gold\"\napi_keys = [\"hunter2hunter2\"]\n"]
    {
        let desk = Desk::new(Some(text));
        for order in [&["add", "beta", "--plan", "gold", "--network", "::1"][..], &["remove", "acme"], &["list"]] {
            let said = desk.refused(order, "");
            assert!(said.contains("clients.toml:") && !said.contains("hunter2"), "{said}");
        }
    }
    let desk = Desk::new(None);
    let said = desk.refused(&["list"], "");
    assert!(said.contains("transom clients add"), "{said}");
    desk.0.write("gateway.toml", one_rule(RULE));
    let said = desk.refused(&["add", "acme", "--plan", "gold", "--network", "::1"], "");
    assert!(said.contains("write `[clients]`"), "{said}");
}

#[test]
fn edits_are_serialized_and_symbolic_links_are_kept() {
    let desk = Desk::new(None);
    desk.0.write("elsewhere.toml", "");
    symlink("elsewhere.toml", desk.0.path().join("clients.toml")).unwrap();
    desk.0.write("elsewhere.toml.new", "");
    let order = ["add", "acme", "--plan", "gold", "--network", "::1"];
    let (code, _, err) = desk.order(&order, "");
    assert!(code == 1 && err.contains("elsewhere.toml.new") && err.contains("fix: "), "{code} {err}");
    fs::remove_file(desk.0.path().join("elsewhere.toml.new")).unwrap();
    desk.done(&order, "");
    assert!(fs::symlink_metadata(desk.0.path().join("clients.toml")).unwrap().is_symlink());
    assert!(fs::read_to_string(desk.0.path().join("elsewhere.toml")).unwrap().contains("::1"));
}

#[test]
fn a_running_gateway_learns_of_an_added_client() {
    let process = Process::spawn_with(&gateway(), "");
    let config = process.config_path();
    let order = ["clients", "add", "acme", "--plan", "gold", "--generate-key", "--config"];
    let output = Command::new(BINARY).args(order).arg(config).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success());
    let key = String::from_utf8(output.stdout).unwrap();
    process.wait_for_reloads("applied", 1);
    eventually("the key is known", || {
        let response = process.client().get_with("/a", &[("X-API-Key", key.trim_end())]).expect(200);
        items(&response, "ratelimit-policy")[0].get("q") == 100
    });
}
