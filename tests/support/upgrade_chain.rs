//! A gateway whose processes replace each other by upgrades. The first is started through a symbolic link, so that a test can
//! replace the program for the next one.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{BINARY, Process, run, signal};
use super::{TempDir, eventually};

pub struct UpgradeChain {
    pub first: Process,
}

impl UpgradeChain {
    /// Starts the first process, which writes a `pid_file`.
    pub fn start(toml: &str) -> UpgradeChain {
        let scratch = TempDir::new();
        symlink(BINARY, scratch.path().join("transom")).unwrap();
        UpgradeChain::start_in(scratch, toml, &[])
    }

    /// Starts the program `transom` in a directory.
    pub fn start_in(scratch: TempDir, toml: &str, environment: &[(&str, &Path)]) -> UpgradeChain {
        let mut command = Command::new(scratch.path().join("transom"));
        command.envs(environment.iter().copied());
        let first = Process::spawn_command(command, &with_pid_file(toml), scratch);
        let chain = UpgradeChain { first };
        eventually("the PID file names the serving process", || chain.serving_pid() == Some(chain.first.pid()));
        chain
    }

    pub fn program(&self) -> PathBuf {
        self.first.scratch.path().join("transom")
    }

    /// Replaces the program by a shell script.
    pub fn replace_program(&self, script: &str) {
        let file = self.first.scratch.write("replacement", format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(file, self.program()).unwrap();
    }

    /// Restores the program.
    pub fn restore_program(&self) {
        let link = self.first.scratch.path().join("link");
        symlink(BINARY, &link).unwrap();
        fs::rename(link, self.program()).unwrap();
    }

    pub fn write_config(&self, toml: &str) {
        self.first.write_config(&with_pid_file(toml));
    }

    /// The process that serves, according to the PID file.
    pub fn serving_pid(&self) -> Option<u32> {
        fs::read_to_string(self.first.scratch.path().join("pid")).ok()?.trim().parse().ok()
    }

    pub fn signal(&self, name: &str) {
        signal(self.serving_pid().unwrap(), name);
    }

    /// Signals the serving process to upgrade, and waits until the new process serves. Returns its ID.
    pub fn upgrade(&self) -> u32 {
        let old = self.serving_pid().unwrap();
        signal(old, "USR2");
        let mut new = old;
        eventually("another process serves", || {
            new = self.serving_pid().unwrap();
            new != old
        });
        new
    }

    /// `transom upgrade`.
    pub fn run_upgrade_command(&self) -> (Option<i32>, String, String) {
        run(&["upgrade", "--config", &self.first.config_path().display().to_string()])
    }

    /// Waits until the log contains a text.
    pub fn wait_for_log(&self, text: &str) {
        eventually(&format!("`{text}` in the log"), || self.first.stderr().contains(text));
    }
}

fn with_pid_file(toml: &str) -> String {
    format!("pid_file = \"pid\"\n{}", super::gateway::with_listen(toml))
}

/// Whether a process exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}
