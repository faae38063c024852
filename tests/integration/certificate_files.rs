//! Certificate files: the running binary notices replaced files, and warns before certificates expire.

use std::fs;

use crate::support::process::{Process, run};
use crate::support::test_ca::{Issued, TestCa};
use crate::support::tls::TlsClient;
use crate::support::{TempDir, eventually, eventually_eq, one_rule};

fn toml() -> String {
    // Paths are relative to the directory of the configuration.
    format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[listen.https]\naddress = \"127.0.0.1:0\"\n\
         certificate = \"server.pem\"\nprivate_key = \"server.key\"\n{}",
        one_rule("key = \"ip\"\nwindows = [\"1000000/366d\"]")
    )
}

fn write_certificate(scratch: &TempDir, issued: &Issued) {
    scratch.write("server.pem", &issued.pem);
    scratch.write("server.key", &issued.key_pem);
}

fn spawn(issued: &Issued) -> Process {
    let scratch = TempDir::new();
    write_certificate(&scratch, issued);
    Process::spawn_command(std::process::Command::new(crate::support::process::BINARY), &toml(), scratch)
}

#[test]
fn a_certificate_is_replaced_without_dropping_a_connection() {
    let authority = TestCa::new();
    let (old, new) = (authority.issue(&["a.test"]), authority.issue(&["a.test"]));
    let process = spawn(&old);
    let served_certificate = || {
        // A client without a session, because resumption shows no certificate.
        let client = TlsClient::trusting(&authority).connect(process.https.unwrap(), "a.test");
        client.stream.conn.peer_certificates().unwrap()[0].clone()
    };
    let mut open = TlsClient::trusting(&authority).connect(process.https.unwrap(), "a.test");
    open.get("/a").expect(200);
    assert!(served_certificate() == old.der);

    // An invalid certificate, then a key of another certificate: both are refused, and the old certificate stays.
    process.replace_file("server.pem", "no certificate\n");
    process.wait_for_reloads("refused", 1);
    eventually("the log has it", || process.stderr().contains("there is no certificate in `server.pem`"));
    process.replace_file("server.pem", &old.pem);
    process.wait_for_reloads("applied", 1);
    process.replace_file("server.key", &new.key_pem);
    process.wait_for_reloads("refused", 2);
    eventually("the log has it", || process.stderr().contains("belongs to another certificate"));
    open.get("/a").expect(200);
    assert!(served_certificate() == old.der);

    process.replace_file("server.pem", &new.pem);
    eventually("the new certificate is shown", || served_certificate() == new.der);
    open.get("/a").expect(200);
    process.signal("HUP");
    process.wait_for_applied_reloads(3);
    assert!(served_certificate() == new.der);
    open.get("/a").expect(200);
}

#[test]
fn an_expired_certificate_is_warned_of_and_served() {
    let authority = TestCa::new();
    let key = rcgen::KeyPair::generate().unwrap();
    let old = authority.issue_with(&["a.test"], key, |params| params.not_after = rcgen::date_time_ymd(2020, 2, 29));
    let process = spawn(&old);
    eventually("the log has it", || process.stderr().contains("`server.pem` expired on 2020-02-29T00:00:00Z"));
    assert_eq!(process.metrics().sum("transom_certificate_expiry_timestamp_seconds", &[]), 1_582_934_400);
    let refused = TlsClient::trusting(&authority).try_connect(process.https.unwrap(), "a.test").err().unwrap();
    assert!(refused.to_string().contains("expired"), "{refused}");
    let (code, out, _) = run(&["check", "--config", &process.config_path().display().to_string()]);
    assert_eq!(code, Some(0));
    assert!(out.contains("warning: the certificate in `server.pem` expired on 2020-02-29T00:00:00Z"), "{out}");
}

#[test]
fn a_revocation_list_is_replaced_while_clients_are_connected() {
    let (servers, clients) = (TestCa::new(), TestCa::new());
    let scratch = TempDir::new();
    write_certificate(&scratch, &servers.issue(&["a.test"]));
    scratch.write("clients.pem", &clients.pem);
    scratch.write("list.pem", clients.revoke(&[], 4000));
    let more = "private_key = \"server.key\"\nclient_ca = \"clients.pem\"\nclient_crl = \"list.pem\"";
    let toml = toml().replace("private_key = \"server.key\"", more);
    let process = Process::spawn_command(std::process::Command::new(crate::support::process::BINARY), &toml, scratch);
    let list_expiry_s = || process.metrics().sum("transom_revocation_list_expiry_timestamp_seconds", &[]);
    assert_eq!(list_expiry_s(), 64_060_588_800);

    let own = clients.issue(&["client"]);
    let tls = TlsClient::with_certificate(&servers, &own);
    let is_accepted = || {
        let Ok(mut client) = tls.try_connect(process.https.unwrap(), "a.test") else { return false };
        // With TLS 1.3, the client learns of the refusal after its handshake.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| client.get("/a").status)).is_ok()
    };
    let mut open = tls.connect(process.https.unwrap(), "a.test");
    open.get("/a").expect(200);
    assert!(is_accepted());

    process.replace_file("list.pem", "no list\n");
    process.wait_for_reloads("refused", 1);
    eventually("the log has it", || process.stderr().contains("there is no revocation list in `list.pem`"));
    assert!(is_accepted());

    // A TLS session from before the revocation is refused as well.
    process.replace_file("list.pem", &clients.revoke(&[&own], 4000));
    process.wait_for_reloads("applied", 1);
    eventually("the certificate is revoked", || (0..4).all(|_| !is_accepted()));
    open.get("/a").expect(200);

    process.replace_file("list.pem", &clients.revoke(&[], 2021));
    eventually("the log has it", || {
        process.stderr().contains("the revocation list in `list.pem` expired on 2021-01-01T00:00:00Z")
    });
    eventually_eq(list_expiry_s, 1_609_459_200);
    assert!(!is_accepted());
}

#[test]
fn contents_of_secret_files_are_never_shown() {
    let scratch = TempDir::new();
    let issued = TestCa::new().issue(&["a.test"]);
    let body = issued.key_pem.lines().nth(1).unwrap().to_owned();
    write_certificate(&scratch, &issued);
    let pasted = toml().replace("\"server.key\"", &format!("\"{}\"", issued.key_pem.replace('\n', "\\n")));
    for text in [pasted, toml().replace("\"server.key\"", &format!("'''\n{}'''", issued.key_pem))] {
        let file = scratch.write("gateway.toml", text).display().to_string();
        let (code, _, err) = run(&["check", "--config", &file]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("takes the name of a file") && !err.contains(&body[..8]), "{err}");
    }
    // A key where the certificate should be.
    fs::copy(scratch.path().join("server.key"), scratch.path().join("server.pem")).unwrap();
    let file = scratch.write("gateway.toml", toml()).display().to_string();
    let (code, _, err) = run(&["check", "--config", &file]);
    assert_eq!(code, Some(2));
    assert!(err.contains("there is no certificate in `server.pem`") && !err.contains(&body[..8]), "{err}");
}
