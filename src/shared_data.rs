//! Data that gateways share through the store, such as clients: a thread of the server follows it (`transom_store::map_follower`), and
//! keeps a copy in a file, from which a gateway starts while the store is away.
//!
//! The copy is text, a line each. It begins with a header (JSON object), which says how far the copy goes; then come the entries
//! (JSON arrays of name, version, text), names that were removed lately (with `null` for the text), and a last line with the number
//! of both. While it is written, changes go on: entries may be newer than the header says, and a gateway that starts from the copy
//! reads such changes again.

use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, BufWriter, Lines, Write};
use std::ops::Bound;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

use crate::atomic_file;
use transom_config::redis::StoreConfig;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::redis::SharedDataMetrics;
use transom_store::map_follower::{Entry, MapCopy, MapFollower, MapObserver, SharedMap, Update};
use transom_store::shared_map::Position;

/// Version of the format of the copy.
const FORMAT: u32 = 1;
/// The time between two copies: at least this, and so that no more than a twentieth of the time goes into writing.
const COPY_PERIOD_MIN: Duration = Duration::from_secs(5);
const COPY_PERIOD_FACTOR: u32 = 20;
/// How long the last copy waits for another process that is writing one.
const LAST_COPY_PATIENCE: Duration = Duration::from_secs(10);
/// Entries that are read at once from the data while changes wait.
const LOCKED_ENTRIES: usize = 1000;
const MICROSECONDS: u64 = 1_000_000;

/// The first line of a copy.
#[derive(Serialize, Deserialize)]
struct Header {
    transom_shared_data: u32,
    data: String,
    epoch: String,
    version: u64,
    /// Unix milliseconds.
    written_ms: u64,
}

/// The last line of a copy.
#[derive(Serialize, Deserialize)]
struct Footer {
    entries: usize,
}

/// Follows data of the store.
pub struct SharedData<F> {
    follower: MapFollower,
    observer: Observer<F>,
}

/// What other threads have of the data.
#[derive(Clone)]
pub struct SharedDataHandle {
    pub map: SharedMap,
    is_known: watch::Receiver<bool>,
}

impl SharedDataHandle {
    /// Whether there was a copy, or the store was read.
    pub fn is_known(&self) -> bool {
        *self.is_known.borrow()
    }
}

impl<F: FnMut(Update<'_>)> SharedData<F> {
    /// Reads the copy, if there is one that can be used. `name`: of the data, for the store and for messages. `update`: called for the copy, if there is one, and for
    /// each change. It must not use the map.
    pub fn open(
        settings: &StoreConfig,
        (name, file): (&'static str, &Path),
        clock: Clock,
        metrics: SharedDataMetrics,
        mut update: F,
    ) -> (SharedData<F>, SharedDataHandle) {
        let copy = load(file, name).and_then(|copy| {
            copy.is_some().then(|| restrict_access(file)).transpose()?;
            Ok(copy)
        });
        let copy = copy.unwrap_or_else(|error| {
            let file = file.display();
            tracing::error!("the copy `{file}` of the shared {name} cannot be used, the store is needed: {error}");
            None
        });
        let is_copied = copy.is_some();
        let (copy, written_ms) = copy.unwrap_or_default();
        if is_copied {
            tracing::info!(
                entries = copy.entries.len(),
                age_s = clock.wall_ms().saturating_sub(written_ms) / 1000,
                "the shared {name} of the copy `{}` are in effect until the store is read",
                file.display()
            );
            metrics.copied(written_ms / 1000);
            metrics.changed(copy.entries.len(), copy.position.version / MICROSECONDS);
            update(Update::All(&copy.entries));
        }
        let (follower, map) = MapFollower::new(settings, name, copy, clock.clone());
        let (known, is_known) = watch::channel(is_copied);
        let handle = SharedDataHandle { map: map.clone(), is_known };
        let (file, is_due, is_failing) = (file.to_owned(), false, false);
        let copies = Copies { name, file, map, clock, metrics, is_due, writing: None, next: None, is_failing };
        (SharedData { follower, observer: Observer { update, known, copies } }, handle)
    }

    /// Follows the data until the sender of `stop` is dropped, and writes the last copy.
    pub async fn run(mut self, stop: oneshot::Receiver<()>) {
        self.follower.run(&mut self.observer, stop).await;
        self.observer.copies.finish();
    }
}

/// Passes changes on, and has copies written.
struct Observer<F> {
    update: F,
    known: watch::Sender<bool>,
    copies: Copies,
}

impl<F: FnMut(Update<'_>)> MapObserver for Observer<F> {
    fn updated(&mut self, update: Update<'_>, copy: &MapCopy) {
        (self.update)(update);
        self.copies.metrics.changed(copy.entries.len(), copy.position.version / MICROSECONDS);
        self.copies.is_due = true;
    }

    fn polled(&mut self, is_synchronized: bool) {
        let Copies { clock, metrics, .. } = &self.copies;
        if is_synchronized {
            metrics.synchronized(clock.wall_ms() / 1000);
            self.known.send_if_modified(|known| !std::mem::replace(known, true));
        }
        self.copies.continue_writing();
    }
}

/// The copies on disk. Threads of their own write them, so that changes do not wait.
struct Copies {
    name: &'static str,
    file: PathBuf,
    map: SharedMap,
    clock: Clock,
    metrics: SharedDataMetrics,
    /// Whether there are changes since the last copy began.
    is_due: bool,
    /// The copy that is being written: whether that succeeds, and when it began.
    writing: Option<(Receiver<io::Result<bool>>, Instant)>,
    /// The earliest time of the next copy.
    next: Option<Instant>,
    is_failing: bool,
}

impl Copies {
    /// Completes a copy that is written, and begins the next when that is due.
    fn continue_writing(&mut self) {
        let now = self.clock.instant();
        let written = match &self.writing {
            Some((written, began)) => match written.try_recv() {
                Err(TryRecvError::Empty) => return,
                written => Some((written.unwrap_or_else(|_gone| Err(panicked())), now.duration_since(*began))),
            },
            None => None,
        };
        if let Some((written, took)) = written {
            self.writing = None;
            self.next = Some(now + COPY_PERIOD_MIN.max(took * COPY_PERIOD_FACTOR));
            self.complete(written);
        }
        if self.is_due && self.next.is_none_or(|next| now >= next) {
            self.begin(Duration::ZERO);
        }
    }

    fn begin(&mut self, patience: Duration) {
        let (name, file, map, clock) = (self.name, self.file.clone(), self.map.clone(), self.clock.clone());
        let (sender, written) = mpsc::sync_channel(1);
        let write = move || _ = sender.send(write(&map, name, &file, clock.wall_ms(), patience));
        match thread::Builder::new().name(format!("{name}-copy")).spawn(write) {
            Ok(_thread) => {
                self.is_due = false;
                self.writing = Some((written, self.clock.instant()));
            }
            Err(error) => self.complete(Err(error)),
        }
    }

    /// Notes how a copy ended. One that failed is due again.
    fn complete(&mut self, written: io::Result<bool>) {
        match written {
            Ok(true) => {
                self.metrics.copied(self.clock.wall_ms() / 1000);
                self.is_failing = false;
            }
            Ok(false) => self.is_due = true,
            Err(error) => {
                self.is_due = true;
                self.metrics.copy_failed();
                // Logged for the first failure in a row.
                if !std::mem::replace(&mut self.is_failing, true) {
                    let file = self.file.display();
                    tracing::error!("the copy `{file}` of the shared {} cannot be written: {error}", self.name);
                }
            }
        }
    }

    /// Waits for the copy that is being written, and writes the last changes.
    fn finish(mut self) {
        for _ in 0..2 {
            if let Some((written, _)) = self.writing.take() {
                let written = written.recv().unwrap_or_else(|_gone| Err(panicked()));
                self.complete(written);
            }
            if self.is_due {
                self.begin(LAST_COPY_PATIENCE);
            }
        }
        if let Some((written, _)) = self.writing.take() {
            self.complete(written.recv().unwrap_or_else(|_gone| Err(panicked())));
        }
    }
}

fn panicked() -> io::Error {
    io::Error::other("the thread panicked")
}

/// Writes a copy. `false`: another process keeps writing one.
fn write(map: &SharedMap, name: &str, file: &Path, written_ms: u64, patience: Duration) -> io::Result<bool> {
    if let Some(error) = header(file, name).err().filter(|error| error.kind() == io::ErrorKind::InvalidData) {
        return Err(error);
    }
    let Some(draft) = atomic_file::lock_draft(file, patience)? else { return Ok(false) };
    let mut target = BufWriter::new(&draft);
    let Position { epoch, version } = map.lock().position.clone();
    let header = Header { transom_shared_data: FORMAT, data: name.to_owned(), epoch, version, written_ms };
    write_line(&mut target, &header)?;
    let (mut after, mut count) = (None::<Arc<str>>, 0);
    loop {
        let entries: Vec<(Arc<str>, Entry)> = {
            let copy = map.lock();
            let after = after.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
            let entries = copy.entries.range::<str, _>((after, Bound::Unbounded)).take(LOCKED_ENTRIES);
            entries.map(|(name, entry)| (Arc::clone(name), entry.clone())).collect()
        };
        let Some((last, _)) = entries.last() else { break };
        after = Some(Arc::clone(last));
        count += entries.len();
        for (name, Entry { version, text }) in &entries {
            write_line(&mut target, &(&**name, version, &**text))?;
        }
    }
    let removed = map.lock().removed.clone();
    for (name, version) in &removed {
        write_line(&mut target, &(&**name, version, ()))?;
    }
    write_line(&mut target, &Footer { entries: count + removed.len() })?;
    target.into_inner().map_err(io::IntoInnerError::into_error)?;
    atomic_file::publish_draft(&draft, file)?;
    Ok(true)
}

fn write_line(target: &mut impl Write, line: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *target, line)?;
    target.write_all(b"\n")
}

/// Lets only the owner read a copy: it has subjects, and digests of keys.
fn restrict_access(file: &Path) -> io::Result<()> {
    let mode = fs::metadata(file)?.permissions().mode();
    if mode & 0o077 != 0 {
        fs::set_permissions(file, Permissions::from_mode(0o600))?;
        tracing::warn!("others could read `{}`, mode {:o}: it has mode 600 now", file.display(), mode & 0o7777);
    }
    Ok(())
}

/// The header of a copy, and the lines after it; `None` if there is no file, or an empty one. An error of the kind `InvalidData` if
/// the file is no copy of such data.
fn header(file: &Path, name: &str) -> io::Result<Option<(Header, Lines<BufReader<File>>)>> {
    let mut lines = match File::open(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => BufReader::new(opened?).lines(),
    };
    let Some(line) = lines.next().transpose()? else { return Ok(None) };
    let header = serde_json::from_str::<Header>(&line).ok();
    let header = header.filter(|header| header.data == name && header.transom_shared_data == FORMAT);
    let other = || format!("it is not a copy of shared {name}: name another file in `file`, or remove this one");
    Ok(Some((header.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, other()))?, lines)))
}

/// Reads a copy, and when it was written. A damaged one is set aside, and a warning logged.
///
/// # Errors
///
/// The file cannot be read, or is not the copy of such a map.
pub fn load(file: &Path, name: &str) -> io::Result<Option<(MapCopy, u64)>> {
    let Some((header, lines)) = header(file, name)? else { return Ok(None) };
    match read_entries(&header, lines) {
        Ok(copy) => Ok(Some((copy, header.written_ms))),
        Err(error) => {
            let old = file.with_added_extension("old");
            fs::rename(file, &old)?;
            let (file, old) = (file.display(), old.display());
            tracing::warn!(
                "the copy `{file}` of the shared {name} is damaged ({error}): it is now `{old}`, and not used"
            );
            Ok(None)
        }
    }
}

fn read_entries(header: &Header, mut lines: impl Iterator<Item = io::Result<String>>) -> io::Result<MapCopy> {
    let position = Position { epoch: header.epoch.clone(), version: header.version };
    let mut copy = MapCopy { position, ..MapCopy::default() };
    let mut count = 0;
    for line in &mut lines {
        let line = line?;
        if let Ok((name, version, text)) = serde_json::from_str::<(String, u64, Option<String>)>(&line) {
            match text {
                Some(text) => drop(copy.entries.insert(name.into(), Entry { version, text: text.into() })),
                None => {
                    // Removed after the entry was written.
                    if copy.entries.get(&*name).is_some_and(|entry| entry.version < version) {
                        copy.entries.remove(&*name);
                    }
                    copy.removed.insert(name.into(), version);
                }
            }
            count += 1;
        } else {
            let Footer { entries } = serde_json::from_str(&line)?;
            return match entries == count && lines.next().is_none() {
                true => Ok(copy),
                false => Err(io::Error::other("the number of entries is another")),
            };
        }
    }
    Err(io::Error::other("the end is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy() -> MapCopy {
        let entry = |version, text: &str| Entry { version, text: text.into() };
        let entries = [("acme", entry(7, "{\"plan\":\"pro\"}")), ("b\n\"c", entry(9, "two\nlines"))];
        let position = Position { epoch: "e".into(), version: 9 };
        let removed = [("gone".into(), 8)].into();
        MapCopy { position, entries: entries.map(|(name, entry)| (name.into(), entry)).into(), removed }
    }

    /// A map that no store has.
    fn map(copy: MapCopy) -> SharedMap {
        MapFollower::new(&StoreConfig::placeholder(), "clients", copy, Clock::system()).1
    }

    fn in_scratch(test: impl FnOnce(&Path)) {
        let folder = std::env::temp_dir().join(format!("transom-copy-{:x}", fastrand::u64(..)));
        fs::create_dir(&folder).unwrap();
        test(&folder.join("clients.copy"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_copy_is_read_as_it_was_written() {
        in_scratch(|file| {
            assert!(load(file, "clients").unwrap().is_none());
            fs::write(file.with_added_extension("new"), "left by a process that was killed").unwrap();
            assert!(write(&map(copy()), "clients", file, 5, Duration::ZERO).unwrap());
            assert_eq!(
                fs::read_to_string(file).unwrap(),
                "{\"transom_shared_data\":1,\"data\":\"clients\",\"epoch\":\"e\",\"version\":9,\"written_ms\":5}\n\
                 [\"acme\",7,\"{\\\"plan\\\":\\\"pro\\\"}\"]\n[\"b\\n\\\"c\",9,\"two\\nlines\"]\n[\"gone\",8,null]\n{\"entries\":3}\n"
            );
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
            let (read, written_ms) = load(file, "clients").unwrap().unwrap();
            assert_eq!(written_ms, 5);
            assert_eq!((read.position, read.entries, read.removed), (copy().position, copy().entries, copy().removed));
            let many = (0..2 * LOCKED_ENTRIES + 1).map(|n| (format!("c{n:05}").into(), copy().entries["acme"].clone()));
            let many = MapCopy { entries: many.collect(), ..copy() };
            assert!(write(&map(many.clone()), "clients", file, 6, Duration::ZERO).unwrap());
            assert_eq!(load(file, "clients").unwrap().unwrap().0.entries, many.entries);
        });
    }

    /// Changes go on while a copy is written, so it may have an entry and the later removal of it.
    #[test]
    fn a_name_that_was_removed_while_the_copy_was_written_has_no_entry() {
        in_scratch(|file| {
            assert!(write(&map(copy()), "clients", file, 5, Duration::ZERO).unwrap());
            let whole = fs::read_to_string(file).unwrap();
            for (version, is_known) in [(8, false), (7, true), (6, true)] {
                let lines = format!("[\"acme\",{version},null]\n{{\"entries\":4}}");
                fs::write(file, whole.replace("{\"entries\":3}", &lines)).unwrap();
                let read = load(file, "clients").unwrap().unwrap().0;
                assert_eq!((read.entries.contains_key("acme"), read.entries.contains_key("gone")), (is_known, false));
                assert_eq!(read.removed.get("acme"), Some(&version));
            }
        });
    }

    #[test]
    fn a_damaged_copy_is_set_aside_and_another_file_is_kept() {
        in_scratch(|file| {
            assert!(write(&map(copy()), "clients", file, 5, Duration::ZERO).unwrap());
            let whole = fs::read_to_string(file).unwrap();
            for damaged in [&whole[..whole.len() - 15], &whole.replacen("[\"acme\",7,", "[", 1), &format!("{whole}x")] {
                fs::write(file, damaged).unwrap();
                assert!(load(file, "clients").unwrap().is_none(), "{damaged}");
                assert_eq!(fs::read_to_string(file.with_added_extension("old")).unwrap(), damaged);
            }
            for other in ["[clients.acme]\nplan = \"pro\"\n", "\n", &whole.replacen("\"clients\"", "\"deny\"", 1)] {
                fs::write(file, other).unwrap();
                for error in [
                    load(file, "clients").unwrap_err(),
                    write(&map(copy()), "clients", file, 5, Duration::ZERO).unwrap_err(),
                ] {
                    assert!(error.to_string().starts_with("it is not a copy of shared clients"), "{error}");
                }
                assert_eq!(fs::read_to_string(file).unwrap(), other);
            }
            fs::write(file, "").unwrap();
            assert!(load(file, "clients").unwrap().is_none());
            assert!(write(&map(copy()), "clients", file, 5, Duration::ZERO).unwrap());
        });
    }
}
