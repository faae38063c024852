//! A gateway whose processes replace each other. The first is started through a symbolic link, so that another program can
//! replace it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{BINARY, Process, run, signal};
use super::{Scratch, eventually};

pub struct Dynasty {
    pub first: Process,
}

impl Dynasty {
    /// Starts the first process, which writes a `pid_file`.
    pub fn found(toml: &str) -> Dynasty {
        let scratch = Scratch::new();
        symlink(BINARY, scratch.path().join("transom")).unwrap();
        Dynasty::found_in(scratch, toml, &[])
    }

    /// Starts the program `transom` of a folder.
    pub fn found_in(scratch: Scratch, toml: &str, environment: &[(&str, &Path)]) -> Dynasty {
        let mut command = Command::new(scratch.path().join("transom"));
        command.envs(environment.iter().copied());
        let first = Process::spawn_by(command, &with_pid_file(toml), scratch);
        let dynasty = Dynasty { first };
        eventually("it says which process serves", || dynasty.pid() == Some(dynasty.first.id()));
        dynasty
    }

    pub fn program(&self) -> PathBuf {
        self.first.scratch.path().join("transom")
    }

    /// Puts a shell script in the place of the program.
    pub fn usurp(&self, script: &str) {
        let file = self.first.scratch.write("usurper", format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(file, self.program()).unwrap();
    }

    /// Puts the program back in its place.
    pub fn restore(&self) {
        let link = self.first.scratch.path().join("link");
        symlink(BINARY, &link).unwrap();
        fs::rename(link, self.program()).unwrap();
    }

    pub fn rewrite(&self, toml: &str) {
        self.first.rewrite(&with_pid_file(toml));
    }

    /// The process that serves.
    pub fn pid(&self) -> Option<u32> {
        fs::read_to_string(self.first.scratch.path().join("pid")).ok()?.trim().parse().ok()
    }

    pub fn signal(&self, name: &str) {
        signal(self.pid().unwrap(), name);
    }

    /// Signals the serving process to hand over, and waits until it has.
    pub fn succeed(&self) -> u32 {
        let old = self.pid().unwrap();
        signal(old, "USR2");
        let mut new = old;
        eventually("another process serves", || {
            new = self.pid().unwrap();
            new != old
        });
        new
    }

    /// `transom upgrade`.
    pub fn command(&self) -> (Option<i32>, String, String) {
        run(&["upgrade", "--config", &self.first.config().display().to_string()])
    }

    /// Waits until the log has something.
    pub fn logged(&self, text: &str) {
        eventually(&format!("`{text}` in the log"), || self.first.stderr().contains(text));
    }
}

fn with_pid_file(toml: &str) -> String {
    format!("pid_file = \"pid\"\n{}", super::gateway::with_listen(toml))
}

/// Whether a process is there, and not only waited for.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}
