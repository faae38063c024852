//! `transom top`: the busiest keys of each rule of the running gateway, live in a terminal.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde_json::Value;
use tokio::runtime::{Builder, LocalOptions};

use super::Exit;
use super::admin_client::{self, AdminAddress};
use crate::clock::Clock;
use crate::simulation::report_text::{grouped, percent};
use transom_limiter::store_key::percent_encode;
use transom_limiter::window::duration_ms;

/// Columns and rows of a terminal that does not tell its size.
const TERMINAL_SIZE: (usize, usize) = (80, 24);

/// Options of `transom top`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    address: AdminAddress,
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
    let address = match options.address.find(path) {
        Ok(address) => address,
        Err(message) => {
            print_err!("{message}");
            return Exit::BadConfig;
        }
    };
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    let shown = runtime.map_err(|error| error.to_string()).and_then(|runtime| {
        runtime.block_on(async {
            if options.once || options.json || !io::stdout().is_terminal() {
                show_once(&address, options).await
            } else {
                show_live(&address, options).await
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

async fn show_once(address: &str, options: &Options) -> Result<(), String> {
    let lists = fetch(address, options).await?;
    match options.json {
        true => print_out!("{lists:#}"),
        false => print_out!("{}", Table { lists: &lists, rates: None }.to_string().trim_end()),
    }
    Ok(())
}

/// Shows the lists until the process is interrupted, also while the gateway is restarted.
async fn show_live(address: &str, options: &Options) -> Result<(), String> {
    let clock = Clock::system();
    let mut previous: Option<Counts> = None;
    loop {
        let screen = match fetch(address, options).await {
            Ok(lists) => {
                let counts = Counts::new(&lists, clock.instant());
                let rates = previous.as_ref().map(|previous| counts.rates_since(previous));
                let text = Table { lists: &lists, rates: rates.as_ref() }.to_string();
                previous = Some(counts);
                text
            }
            Err(message) => message,
        };
        draw(&screen).map_err(|error| error.to_string())?;
        tokio::time::sleep(options.interval).await;
    }
}

/// The response of `/v1/top`.
async fn fetch(address: &str, options: &Options) -> Result<Value, String> {
    let failed = |reason: String| format!("the gateway at http://{address} cannot list its keys: {reason}");
    let mut target = format!("/v1/top?by={}&limit={}", options.by, options.limit);
    if let Some(rule) = &options.rule {
        target.push_str("&rule=");
        percent_encode(rule.as_bytes(), &mut target);
    }
    let request = Request::get(target).body(Full::new(Bytes::new())).map_err(|error| failed(error.to_string()))?;
    let body = admin_client::send(address, request).await.map_err(failed)?;
    let body = body.ok_or_else(|| format!("no gateway listens at http://{address}"))?;
    serde_json::from_str(&body).map_err(|error| failed(error.to_string()))
}

/// Replaces what the terminal shows by the text, cut to the size of the terminal.
fn draw(text: &str) -> io::Result<()> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
    let (columns, rows) = size.map_or(TERMINAL_SIZE, |size| (size.ws_col.into(), size.ws_row.into()));
    // Home, then each line cleared to its end, then everything below.
    let mut screen = String::from("\x1b[H");
    for line in text.lines().take(rows - 1) {
        screen.extend(line.chars().take(columns));
        screen.push_str("\x1b[K\n");
    }
    screen.push_str("\x1b[J");
    let mut stdout = io::stdout().lock();
    stdout.write_all(screen.as_bytes())?;
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
