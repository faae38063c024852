//! `transom top`: the busiest keys of each rule of the running gateway, live in a terminal.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use rustix::process::Signal;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde_json::Value;
use tokio::runtime::{Builder, LocalOptions};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use unicode_width::UnicodeWidthChar as _;

use super::Exit;
use super::admin_client::{AdminAddress, RunningGateway, TokenFile};
use transom_limiter::store_key::percent_encode;
use transom_limiter::window::duration_ms;
use transom_runtime::clock::Clock;
use transom_simulate::report_text::{grouped, percent};

/// Columns and rows of a terminal that does not tell its size.
const TERMINAL_SIZE: (usize, usize) = (80, 24);

/// Options of `transom top`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    address: AdminAddress,
    #[command(flatten)]
    token: TokenFile,
    /// Requests that are counted: refused or admitted ones
    #[arg(long, value_name = "refused|admitted", default_value = "refused", value_parser = ["refused", "admitted"], hide_possible_values = true)]
    by: String,
    /// Only this rule
    #[arg(long, value_name = "RULE")]
    rule: Option<String>,
    /// Keys of each rule
    #[arg(long, value_name = "KEYS", default_value_t = 10)]
    limit: usize,
    /// Time between two updates
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_interval)]
    interval: Duration,
    /// Print once, as when standard output is no terminal
    #[arg(long)]
    once: bool,
    /// Print once, as JSON
    #[arg(long)]
    json: bool,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = duration_ms(text).filter(|ms| (100..=3_600_000).contains(ms));
    interval.map(Duration::from_millis).ok_or_else(|| String::from("write a time from `100ms` to `1h`, such as `2s`"))
}

pub fn top(path: &Path, options: &Options) -> Exit {
    let gateway = match options.address.find(path, &options.token) {
        Ok(gateway) => gateway,
        Err(message) => {
            print_err!("{message}");
            return Exit::BadConfig;
        }
    };
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    let shown = runtime.map_err(|error| error.to_string()).and_then(|runtime| {
        runtime.block_on(async {
            if options.once || options.json || !io::stdout().is_terminal() {
                show_once(&gateway, options).await
            } else {
                show_live(&gateway, options).await
            }
        })
    });
    match shown {
        Ok(()) => Exit::Fine,
        Err(message) => {
            print_err!("transom: {message}");
            Exit::Failed
        }
    }
}

async fn show_once(gateway: &RunningGateway, options: &Options) -> Result<(), String> {
    let lists = fetch(gateway, options).await?;
    match options.json {
        true => print_out!("{lists:#}"),
        false => print_out!("{}", Table { lists: &lists, rates: None }.to_string().trim_end()),
    }
    Ok(())
}

/// Shows the lists until the operator ends the command, also while the gateway is restarted.
async fn show_live(gateway: &RunningGateway, options: &Options) -> Result<(), String> {
    let failed = |error: io::Error| error.to_string();
    let clock = Clock::system();
    // Ctrl-Z has no effect: a stop would leave the terminal as it is now, and in a container nothing would end the stop.
    let suspend = SignalKind::from_raw(Signal::TSTP.as_raw());
    let mut signals = [SignalKind::interrupt(), SignalKind::quit(), SignalKind::terminate(), suspend].map(signal);
    let [Ok(interrupt), Ok(quit), Ok(terminate), Ok(_)] = &mut signals else {
        return Err(String::from("signals cannot be handled"));
    };
    let mut screen = Screen::begin().map_err(failed)?;
    let mut previous: Option<Counts> = None;
    let (mut text, mut wait) = (String::new(), Duration::ZERO);
    loop {
        // Keys and signals are also handled while the gateway does not answer.
        let mut update = pin!(async move {
            tokio::time::sleep(wait).await;
            fetch(gateway, options).await
        });
        let fetched = loop {
            tokio::select! {
                fetched = &mut update => break fetched,
                Some(key) = screen.keys.recv() => {
                    if key == Key::Quit {
                        return Ok(());
                    }
                    screen.scroll(key, &text).map_err(failed)?;
                }
                _ = interrupt.recv() => return Ok(()),
                _ = quit.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
            }
        };
        text = match fetched {
            Ok(lists) => {
                let counts = Counts::new(&lists, clock.instant());
                let rates = previous.as_ref().map(|previous| counts.rates_since(previous));
                let text = Table { lists: &lists, rates: rates.as_ref() }.to_string();
                previous = Some(counts);
                text
            }
            Err(message) => message,
        };
        screen.draw(&text).map_err(failed)?;
        wait = options.interval;
    }
}

/// The response of `/v1/top`.
async fn fetch(gateway: &RunningGateway, options: &Options) -> Result<Value, String> {
    let address = &gateway.address;
    let failed = |reason: String| format!("the gateway at http://{address} cannot list its keys: {reason}");
    let mut target = format!("/v1/top?by={}&limit={}", options.by, options.limit);
    if let Some(rule) = &options.rule {
        target.push_str("&rule=");
        percent_encode(rule.as_bytes(), &mut target);
    }
    let request = Request::get(target).body(Full::new(Bytes::new())).map_err(|error| failed(error.to_string()))?;
    let body = gateway.send(request).await.map_err(failed)?;
    let body = body.ok_or_else(|| format!("no gateway listens at http://{address}"))?;
    serde_json::from_str(&body).map_err(|error| failed(error.to_string()))
}

/// What a key of the keyboard does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Key {
    Quit,
    Down,
    Up,
    PageDown,
    PageUp,
    First,
    Last,
}

/// The keys in what a terminal sent. Other keys do nothing.
fn keys_in(mut bytes: &[u8]) -> Vec<Key> {
    const KEYS: [(&[u8], Key); 20] = [
        (b"\x1b[A", Key::Up),
        (b"\x1b[B", Key::Down),
        (b"\x1b[5~", Key::PageUp),
        (b"\x1b[6~", Key::PageDown),
        (b"\x1b[H", Key::First),
        (b"\x1b[1~", Key::First),
        (b"\x1b[F", Key::Last),
        (b"\x1b[4~", Key::Last),
        (b"\x1bOA", Key::Up),
        (b"\x1bOB", Key::Down),
        (b"q", Key::Quit),
        (b"Q", Key::Quit),
        (b"k", Key::Up),
        (b"j", Key::Down),
        (b"\r", Key::Down),
        (b"\n", Key::Down),
        (b"b", Key::PageUp),
        (b" ", Key::PageDown),
        (b"g", Key::First),
        (b"G", Key::Last),
    ];
    let mut keys = Vec::new();
    while let [_, rest @ ..] = bytes {
        let found = KEYS.iter().find_map(|(sequence, key)| Some((bytes.strip_prefix(*sequence)?, *key)));
        keys.extend(found.map(|(_, key)| key));
        bytes = found.map_or(rest, |(rest, _)| rest);
    }
    keys
}

/// The screen of a terminal and its keyboard. When dropped, the terminal shows and does what it did before.
struct Screen {
    /// The settings of the terminal before; `None`: standard input is no terminal, so there are no keys.
    before: Option<Termios>,
    keys: UnboundedReceiver<Key>,
    /// Keeps the channel open without a keyboard.
    _sender: UnboundedSender<Key>,
    /// The first line of the text that is shown.
    top: usize,
}

impl Screen {
    fn begin() -> io::Result<Screen> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin).ok().filter(|_| stdin.is_terminal());
        let (sender, keys) = unbounded_channel();
        if let Some(before) = &before {
            // Keys arrive at once and are not shown. Ctrl-C still sends its signal.
            let mut settings = before.clone();
            settings.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            tcsetattr(&stdin, OptionalActions::Now, &settings)?;
            let sender = sender.clone();
            // Ends with the process: nothing else interrupts the read.
            std::thread::spawn(move || {
                let mut bytes = [0; 64];
                while let Ok(read @ 1..) = io::stdin().read(&mut bytes) {
                    for key in keys_in(&bytes[..read]) {
                        // The receiver ends with the screen.
                        let _ = sender.send(key);
                    }
                }
            });
        }
        let screen = Screen { before, keys, _sender: sender, top: 0 };
        write_out("\x1b[?1049h\x1b[?25l")?;
        Ok(screen)
    }

    /// Moves to another part of the text.
    fn scroll(&mut self, key: Key, text: &str) -> io::Result<()> {
        let (_, rows) = terminal_size();
        let page = rows.saturating_sub(2).max(1);
        self.top = match key {
            Key::Down => self.top + 1,
            Key::Up => self.top.saturating_sub(1),
            Key::PageDown => self.top + page,
            Key::PageUp => self.top.saturating_sub(page),
            Key::Last => usize::MAX,
            Key::First | Key::Quit => 0,
        };
        self.draw(text)
    }

    /// Replaces what the terminal shows by the part of the text that fits, and a line about the keys.
    fn draw(&mut self, text: &str) -> io::Result<()> {
        write_out(&frame(text, &mut self.top, terminal_size(), self.before.is_some()))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write_out("\x1b[?25h\x1b[?1049l");
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Columns and rows.
fn terminal_size() -> (usize, usize) {
    let size = tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
    size.map_or(TERMINAL_SIZE, |size| (size.ws_col.into(), size.ws_row.into()))
}

/// The lines of a text from `top` on, cut to the size, and what the keys do. Moves `top` so that the screen is full.
fn frame(text: &str, top: &mut usize, (columns, rows): (usize, usize), has_keyboard: bool) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    let shown = rows.saturating_sub(1).max(1);
    *top = (*top).min(lines.len().saturating_sub(shown));
    let last = lines.len().min(*top + shown);
    let mut help = String::from(if has_keyboard { "q ends" } else { "Ctrl-C ends" });
    if lines.len() > shown {
        let scroll = if has_keyboard { ", arrow keys scroll" } else { "" };
        let _ = write!(help, "{scroll}: lines {} to {last} of {}", *top + 1, lines.len());
    }
    // Home, then each line cleared to its end, then everything below. The last row has no line end, which would scroll.
    let mut frame = String::from("\x1b[H");
    for line in &lines[*top..last] {
        frame.push_str(first_columns(line, columns));
        frame.push_str("\x1b[K\r\n");
    }
    frame.push_str("\x1b[J");
    if rows > 1 {
        frame.push_str(&format!("\x1b[{rows};1H"));
        frame.push_str(first_columns(&help, columns.saturating_sub(1)));
        frame.push_str("\x1b[K");
    }
    frame
}

/// The beginning of a line that fits into so many columns. A character can take none of them, or two.
fn first_columns(line: &str, columns: usize) -> &str {
    let mut used = 0;
    let end = line.char_indices().find(|(_, sign)| {
        used += sign.width().unwrap_or(0);
        used > columns
    });
    end.map_or(line, |(end, _)| &line[..end])
}

fn write_out(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// The count of each key at a time, by rule and key.
struct Counts {
    at: Instant,
    counts: HashMap<(String, String), u64>,
}

/// Requests per second, by rule and key.
type Rates = HashMap<(String, String), f64>;

fn rule_and_key(rule: &Value, key: &Value) -> (String, String) {
    (rule["rule"].to_string(), key["key"].to_string())
}

/// The count that is certain.
fn certain(key: &Value) -> u64 {
    number(&key["count"]).saturating_sub(number(&key["error"]))
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

impl Counts {
    fn new(lists: &Value, at: Instant) -> Counts {
        let keys =
            items(&lists["rules"]).iter().flat_map(|rule| items(&rule["keys"]).iter().map(move |key| (rule, key)));
        Counts { at, counts: keys.map(|(rule, key)| (rule_and_key(rule, key), certain(key))).collect() }
    }

    /// Of the keys that are in both; a count that sank has lost a period.
    fn rates_since(&self, previous: &Counts) -> Rates {
        let seconds = self.at.duration_since(previous.at).as_secs_f64();
        let rate = |(key, count): (&(String, String), &u64)| {
            let more = count.checked_sub(*previous.counts.get(key)?)?;
            Some((key.clone(), more as f64 / seconds))
        };
        self.counts.iter().filter_map(rate).collect()
    }
}

/// The lists as text for people.
struct Table<'a> {
    lists: &'a Value,
    /// `None`: the counts are the first.
    rates: Option<&'a Rates>,
}

impl std::fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by = self.lists["by"].as_str().unwrap_or_default();
        for rule in items(&self.lists["rules"]) {
            let (name, since) = (rule["rule"].as_str().unwrap_or_default(), rule["since"].as_str().unwrap_or_default());
            let (total, keys) = (number(&rule["total"]), items(&rule["keys"]));
            let shadow = if rule["shadow"] == true { " (shadow: never enforced)" } else { "" };
            if total == 0 {
                writeln!(f, "rule `{name}`{shadow}: no request {by} since {since}\n")?;
                continue;
            }
            let requests = if total == 1 { "request" } else { "requests" };
            writeln!(f, "rule `{name}`{shadow}: {} {requests} {by} since {since}", grouped(total))?;
            if keys.is_empty() {
                writeln!(f, "  no key stands out\n")?;
                continue;
            }
            writeln!(f, "  {by:>12}  {:>9}  {:>7}  {:>9}  key", "error", "share", "per s")?;
            for key in keys {
                let (count, error) = (number(&key["count"]), number(&key["error"]));
                let rate = self.rates.and_then(|rates| rates.get(&rule_and_key(rule, key)));
                let rate = rate.map_or_else(|| String::from("-"), |rate| format!("{rate:.1}"));
                let share = percent(count.min(total) as f64 / total as f64);
                let mut label = key["label"].as_str().unwrap_or_default().to_owned();
                if key["fallback"] == true {
                    let parts = items(&key["key"]).iter().filter_map(|part| part["part"].as_str());
                    let _ = write!(label, " (by {})", parts.collect::<Vec<_>>().join(", "));
                }
                writeln!(f, "  {:>12}  {:>9}  {share:>7}  {rate:>9}  {label}", grouped(count), grouped(error))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_recognized_in_what_a_terminal_sends() {
        use Key::{Down, First, Last, PageDown, PageUp, Quit, Up};
        assert_eq!(keys_in(b"\x1b[Aj\x1b[6~x\x1b[F"), [Up, Down, PageDown, Last]);
        assert_eq!(keys_in(b"kb gGq"), [Up, PageUp, PageDown, First, Last, Quit]);
        assert_eq!(keys_in(b"\x1b[\xc3\xa9\x1b"), []);
    }

    #[test]
    fn a_frame_never_exceeds_the_screen() {
        let text: String = (1..=30).map(|line| format!("line {line} is wide\n")).collect();
        for (columns, rows) in [(80, 24), (7, 3), (1, 1), (80, 40), (80, 31)] {
            for start in [0, 5, 29, usize::MAX] {
                let mut top = start;
                let frame = frame(&text, &mut top, (columns, rows), true);
                let visible = frame.replace("\x1b[H", "").replace("\x1b[K", "").replace("\x1b[J", "");
                let lines: Vec<&str> = visible.split("\r\n").collect();
                assert!(top <= 30_usize.saturating_sub(rows.saturating_sub(1).max(1)), "{top}");
                assert!(lines[..lines.len() - 1].iter().all(|line| line.chars().count() <= columns), "{visible:?}");
                assert!(lines.len() <= rows.max(2), "{visible:?}");
            }
        }
        let mut top = 2;
        let frame = frame(&text, &mut top, (80, 4), true);
        assert!(frame.contains("line 3") && frame.contains("line 5 ") && !frame.contains("line 6"), "{frame:?}");
        assert!(frame.contains("q ends, arrow keys scroll: lines 3 to 5 of 30"), "{frame:?}");
    }

    #[test]
    fn lines_are_cut_by_the_columns_of_their_characters() {
        // Two columns for each of these, and none for the accent.
        for (line, shown) in [("漢字漢字", "漢字"), ("e\u{301}bcdefg", "e\u{301}bcde"), ("ab漢字", "ab漢")] {
            let frame = frame(line, &mut 0, (5, 3), true);
            assert!(frame.starts_with(&format!("\x1b[H{shown}\x1b[K")), "{frame:?}");
        }
    }
}
