//! What is asked of a server: to take tokens of counters, all or none, and to give some back. Two scripts, constant
//! texts, to which counters are keys and numbers; each runs there as one step.
//!
//! Pure: nothing is sent here. Which windows are open is decided by the server's clock, so what is
//! asked names the window that is open by the gateway's time, and the one after it; the name of the second is only
//! sent when the server says that the first is over. So a plain counter is one key, also while its slot moves.
//!
//! | counter | key | value |
//! | --- | --- | --- |
//! | plain window | `BASE:NUMBER` | the tokens handed out, as an integer |
//! | windows of a grid that hang together | `BASE:account` | `window`: its number when it was last written; `used`: tokens used or owed then |
//! | windows that a first request opens | `BASE:first-request` | `start` of the window, milliseconds, and `used` |
//!
//! **Others may write there too.** What another service adds to a plain counter counts as if it had been handed out; a
//! value above the limit refuses, up to 2^63. A value below 0 counts as 0, and is corrected by the next who takes: nobody
//! is ever handed out more than the limit by it. Whoever leaves a key without an end, or with another, finds it
//! ending with its window after the next who takes. What is no whole number, or of another type, is an error of that counter.
//!
//! **What is given back.** Of a plain window all of it, as long as it is there. Of an account what certainly
//! nobody built upon: all in the window it was taken in; `limit` less for each window since, in which it would have
//! been forgiven anyway. Of windows that a first request opens nothing once another is open. Where places
//! were promised in windows to come, `only_if_used` makes sure that nobody came after.

use std::fmt::Write;
use std::rc::Rc;

use redis::{Cmd, Value};

/// How far the gateway's time may be ahead of the server's and still be followed, milliseconds; as in the script.
const LEAD_MAX_MS: u64 = 1000;
/// The largest integer that a script can count to.
pub const TOKENS_MAX: u64 = (1 << 53) - 1;
/// How a plain window is asked for exactly what is needed: the usual case, in as few words as possible.
const EXACTLY: &str = "e";

/// A script, by its text and by the name that servers give it.
pub struct Script {
    text: &'static str,
    sha: String,
}

pub struct Scripts {
    pub take: Script,
    pub give: Script,
}

impl Default for Scripts {
    fn default() -> Scripts {
        Scripts { take: Script::new(include_str!("take.lua")), give: Script::new(include_str!("give.lua")) }
    }
}

impl Script {
    fn new(text: &'static str) -> Script {
        Script { text, sha: redis::Script::new(text).get_hash().to_owned() }
    }
}

/// How a script is named to a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// By its digest, which the server has to know.
    Sha,
    /// In full, so that it is known from then on.
    Text,
}

/// Whose windows a counter has, and which is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    /// Every window stands for itself.
    Plain {
        /// Number of the window that is open by the gateway's time; the next one's is greater by one.
        number: u64,
        end_ms: u64,
        next_end_ms: u64,
    },
    /// Tokens roll over, or are taken from windows to come.
    Grid { number: u64, end_ms: u64, next_end_ms: u64 },
    /// The first request opens a window.
    Floating { period_ms: u64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Plain,
    Grid,
    Floating,
}

impl Kind {
    fn letter(self) -> &'static str {
        match self {
            Kind::Plain => "p",
            Kind::Grid => "g",
            Kind::Floating => "f",
        }
    }
}

impl At {
    pub fn kind(self) -> Kind {
        match self {
            At::Plain { .. } => Kind::Plain,
            At::Grid { .. } => Kind::Grid,
            At::Floating { .. } => Kind::Floating,
        }
    }

    /// Number and end of the window that is open at a time, if it is the first or the second.
    fn window(self, now_ms: u64) -> Option<(u64, u64)> {
        match self {
            At::Plain { number, end_ms, next_end_ms } | At::Grid { number, end_ms, next_end_ms } => {
                if now_ms < end_ms {
                    Some((number, end_ms))
                } else {
                    (now_ms < next_end_ms).then_some((number + 1, next_end_ms))
                }
            }
            At::Floating { .. } => Some((0, 0)),
        }
    }
}

/// What is asked of one counter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Want {
    /// What its keys begin with.
    pub base: Rc<str>,
    pub at: At,
    /// Tokens granted per window; at least 1.
    pub limit: u32,
    /// The most that may be used or owed afterwards; what is more than [`TOKENS_MAX`] counts as that.
    pub ceiling: u64,
    /// Tokens without which all is refused.
    pub need: u64,
    /// Tokens that are taken if there are plenty: of what is left beyond the need, an eighth at most. With
    /// `need` and `want` 0, the counter is only read.
    pub want: u64,
    /// What counts as used at least.
    pub least: u64,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Took {
    pub granted: u64,
    /// What is used or owed now.
    pub used: u64,
    /// End of the window that is open by the server's time.
    pub end_ms: u64,
    /// Its number; of windows that a first request opens, their start in milliseconds.
    pub number: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    Granted {
        time_ms: u64,
        took: Vec<Took>,
    },
    /// At least one counter had not what was needed; nothing was taken.
    Refused {
        time_ms: u64,
        took: Vec<Took>,
    },
    /// By the server's time neither of the windows is open; nothing was taken.
    OtherWindow {
        time_ms: u64,
    },
}

/// Tokens to be given back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gift {
    pub base: Rc<str>,
    pub kind: Kind,
    /// [`Took::number`].
    pub number: u64,
    pub limit: u32,
    pub tokens: u64,
    /// Only if nobody changed the counter since: what was used afterwards, [`Took::used`].
    pub only_if_used: Option<u64>,
    /// The counter is to be forgotten, whatever it says.
    pub forgets: bool,
}

/// The time that counts: the server's, but for a gateway that is a little ahead and has told so already.
pub fn effective_ms(time_ms: u64, floor_ms: u64) -> u64 {
    if floor_ms.saturating_sub(time_ms) < LEAD_MAX_MS { time_ms.max(floor_ms) } else { time_ms }
}

/// Asks for tokens. Windows are those that are open at `at_ms`.
pub fn take(script: &Script, by: By, wants: &[Want], floor_ms: u64, at_ms: u64) -> Cmd {
    let mut cmd =
        begun(script, by, wants.len(), 9 * wants.len() + 1, || wants.iter().map(|want| want.base.len()).sum());
    let mut key = String::new();
    for want in wants {
        let (number, _) = want.at.window(at_ms).unwrap_or_default();
        put_key(&mut key, &want.base, want.at.kind(), number);
        cmd.arg(&key);
    }
    cmd.arg(floor_ms);
    for want in wants {
        let (ceiling, need) = (want.ceiling.min(TOKENS_MAX), want.need.min(TOKENS_MAX));
        let (most, least) = (want.want.clamp(need, TOKENS_MAX), want.least.min(TOKENS_MAX));
        let (_, end_ms) = want.at.window(at_ms).unwrap_or_default();
        match want.at {
            At::Plain { .. } if most == need && least == 0 => cmd.arg(EXACTLY).arg(ceiling).arg(need).arg(end_ms),
            At::Plain { .. } => put(&mut cmd, Kind::Plain, [ceiling, need, end_ms, most, least]),
            At::Grid { number, end_ms, next_end_ms } => {
                put(&mut cmd, Kind::Grid, [ceiling, need, end_ms, most, least]);
                cmd.arg(want.limit.max(1)).arg(number).arg(next_end_ms)
            }
            At::Floating { period_ms } => {
                put(&mut cmd, Kind::Floating, [ceiling, need, period_ms.max(1), most, least]);
                cmd.arg(want.limit.max(1))
            }
        };
    }
    cmd
}

fn put(cmd: &mut Cmd, kind: Kind, numbers: [u64; 5]) -> &mut Cmd {
    cmd.arg(kind.letter());
    numbers.into_iter().fold(cmd, |cmd, number| cmd.arg(number))
}

/// What a server said to [`take`]; `None` if that is no answer to it.
pub fn taken(said: &Value, wants: &[Want], at_ms: u64) -> Option<Answer> {
    let Value::Array(said) = said else { return None };
    let (status, rest) = said.split_first()?;
    let (time_ms, rest) = rest.split_first()?;
    let time_ms = number(time_ms)?;
    if *status == Value::Int(-1) {
        return Some(Answer::OtherWindow { time_ms });
    }
    if rest.len() != 3 * wants.len() {
        return None;
    }
    let one = |(said, want): (&[Value], &Want)| {
        let [granted, used, mark] = said else { return None };
        let (number_, end_ms) = match want.at {
            At::Plain { .. } => want.at.window(at_ms)?,
            At::Grid { number: first, end_ms, next_end_ms } => {
                let number = number(mark)?;
                (number, if number == first { end_ms } else { next_end_ms })
            }
            At::Floating { period_ms } => {
                let start_ms = number(mark)?;
                (start_ms, start_ms + period_ms)
            }
        };
        Some(Took { granted: number(granted)?, used: number(used)?, end_ms, number: number_ })
    };
    let took: Vec<Took> = rest.chunks_exact(3).zip(wants).map(one).collect::<Option<_>>()?;
    match status {
        Value::Int(1) => Some(Answer::Granted { time_ms, took }),
        Value::Int(0) => Some(Answer::Refused { time_ms, took }),
        _ => None,
    }
}

/// Whether the other window of each counter that has two is open at a time.
pub fn is_known_at(wants: &[Want], now_ms: u64) -> bool {
    wants.iter().all(|want| want.at.window(now_ms).is_some())
}

/// Gives tokens back.
pub fn give(script: &Script, by: By, gifts: &[Gift]) -> Cmd {
    let mut cmd = begun(script, by, gifts.len(), 5 * gifts.len(), || gifts.iter().map(|gift| gift.base.len()).sum());
    let mut key = String::new();
    for gift in gifts {
        put_key(&mut key, &gift.base, gift.kind, gift.number);
        cmd.arg(&key);
    }
    for gift in gifts {
        cmd.arg(gift.kind.letter()).arg(gift.number).arg(gift.limit).arg(gift.tokens.min(TOKENS_MAX));
        match gift.only_if_used {
            _ if gift.forgets => cmd.arg("all"),
            Some(used) => cmd.arg(used),
            None => cmd.arg(""),
        };
    }
    cmd
}

/// What a server said to [`give`]: how much was given back.
pub fn given(said: &Value) -> Option<u64> {
    number(said)
}

/// A script's call up to its keys.
fn begun(script: &Script, by: By, keys: usize, numbers: usize, bases: impl FnOnce() -> usize) -> Cmd {
    let (name, script) = match by {
        By::Sha => ("EVALSHA", script.sha.as_str()),
        By::Text => ("EVAL", script.text),
    };
    // Room for the number behind each base, and for numbers as long as a time in milliseconds.
    let bytes = script.len() + bases() + 22 * keys + 13 * numbers + 16;
    let mut cmd = Cmd::with_capacity(3 + keys + numbers, bytes);
    cmd.arg(name).arg(script).arg(keys);
    cmd
}

fn put_key(key: &mut String, base: &str, kind: Kind, number: u64) {
    key.clear();
    key.push_str(base);
    match kind {
        // Writing to a string can not fail.
        Kind::Plain => drop(write!(key, ":{number}")),
        Kind::Grid => key.push_str(":account"),
        Kind::Floating => key.push_str(":first-request"),
    }
}

fn number(said: &Value) -> Option<u64> {
    match said {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
