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
        Scripts { take: Script::new(include_str!("acquire.lua")), give: Script::new(include_str!("refund.lua")) }
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

    /// Whether a plain window begins later than that; windows of a calendar differ in length by an eighth at most.
    pub fn is_ahead_of(self, now_ms: u64) -> bool {
        let At::Plain { end_ms, next_end_ms, .. } = self else { return false };
        let length_ms = next_end_ms.saturating_sub(end_ms);
        end_ms.saturating_sub(length_ms + length_ms / 8 + LEAD_MAX_MS) > now_ms
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
pub struct CounterRequest {
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
    /// The gateway's time when this was worked out. It may have been set back since, to the server's: by that time `at` is
    /// a window to come.
    pub asked_ms: u64,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterReply {
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
        took: Vec<CounterReply>,
    },
    /// At least one counter had not what was needed; nothing was taken.
    Refused {
        time_ms: u64,
        took: Vec<CounterReply>,
    },
    /// By the server's time neither of the windows is open; nothing was taken.
    OtherWindow {
        time_ms: u64,
    },
}

/// Tokens to be given back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refund {
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

/// Where tokens came from, and can be returned to.
#[derive(Clone, Debug)]
pub struct RefundTarget {
    pub base: Rc<str>,
    pub kind: Kind,
    pub number: u64,
    pub limit: u32,
    pub end_ms: u64,
}

impl RefundTarget {
    /// What gives tokens back.
    pub fn gift(&self, tokens: u64) -> Refund {
        let RefundTarget { kind, number, limit, .. } = *self;
        Refund { base: Rc::clone(&self.base), kind, number, limit, tokens, only_if_used: None, forgets: false }
    }
}

impl CounterRequest {
    pub fn origin(&self, took: CounterReply) -> RefundTarget {
        let CounterReply { number, end_ms, .. } = took;
        RefundTarget { base: Rc::clone(&self.base), kind: self.at.kind(), number, limit: self.limit, end_ms }
    }
}

/// What gives back all that was granted.
pub fn gifts(wants: &[CounterRequest], took: &[CounterReply]) -> Vec<Refund> {
    wants.iter().zip(took).map(|(want, took)| want.origin(*took).gift(took.granted)).collect()
}

/// The time that counts: the server's, but for a gateway that is a little ahead and has told so already.
pub fn effective_ms(time_ms: u64, floor_ms: u64) -> u64 {
    if floor_ms.saturating_sub(time_ms) < LEAD_MAX_MS { time_ms.max(floor_ms) } else { time_ms }
}

/// One call: all or nothing of what is wanted.
#[derive(Clone, Debug)]
pub struct AcquireCall {
    /// Of different counters.
    pub wants: Vec<CounterRequest>,
    /// The gateway's time.
    pub floor_ms: u64,
    /// Windows are those that are open at this time.
    pub at_ms: u64,
}

/// The answer to a call, or the key under which something else than a counter lies.
pub type Decision = Result<Answer, String>;

/// Asks for tokens, in calls that are decided one after the other.
pub fn take<'a>(script: &Script, by: By, asks: impl Iterator<Item = &'a AcquireCall> + Clone) -> Cmd {
    let wants = asks.clone().flat_map(|ask| ask.wants.iter().map(|want| (want, ask.at_ms)));
    let (count, bases) = wants.clone().fold((0, 0), |(n, bytes), (want, _)| (n + 1, bytes + want.base.len()));
    let mut cmd = begun(script, by, count, 9 * count + 2, bases);
    let mut key = String::new();
    for (want, at_ms) in wants {
        let (number, _) = want.at.window(at_ms).unwrap_or_default();
        put_key(&mut key, &want.base, want.at.kind(), number);
        cmd.arg(&key);
    }
    for ask in asks {
        cmd.arg(ask.floor_ms).arg(ask.wants.len());
        for want in &ask.wants {
            put_want(&mut cmd, want, ask.at_ms);
        }
    }
    cmd
}

fn put_want(cmd: &mut Cmd, want: &CounterRequest, at_ms: u64) {
    let (ceiling, need) = (want.ceiling.min(TOKENS_MAX), want.need.min(TOKENS_MAX));
    let (most, least) = (want.want.clamp(need, TOKENS_MAX), want.least.min(TOKENS_MAX));
    let (_, end_ms) = want.at.window(at_ms).unwrap_or_default();
    match want.at {
        At::Plain { .. } if most == need && least == 0 => cmd.arg(EXACTLY).arg(ceiling).arg(need).arg(end_ms),
        At::Plain { .. } => put(cmd, Kind::Plain, [ceiling, need, end_ms, most, least]),
        At::Grid { number, end_ms, next_end_ms } => put(cmd, Kind::Grid, [ceiling, need, end_ms, most, least])
            .arg(want.limit.max(1))
            .arg(number)
            .arg(next_end_ms),
        At::Floating { period_ms } => {
            put(cmd, Kind::Floating, [ceiling, need, period_ms.max(1), most, least]).arg(want.limit.max(1))
        }
    };
}

fn put(cmd: &mut Cmd, kind: Kind, numbers: [u64; 5]) -> &mut Cmd {
    cmd.arg(kind.letter());
    numbers.into_iter().fold(cmd, |cmd, number| cmd.arg(number))
}

/// What a server said to [`take`], call by call; `None` if that is no answer to it.
pub fn taken<'a>(said: &Value, asks: impl Iterator<Item = &'a AcquireCall>) -> Option<Vec<Decision>> {
    let Value::Array(said) = said else { return None };
    let (time_ms, mut rest) = said.split_first()?;
    let time_ms = number(time_ms)?;
    let mut decisions = Vec::with_capacity(asks.size_hint().0);
    for ask in asks {
        let (status, layers) = rest.split_first()?;
        let (layers, others) = layers.split_at_checked(3 * ask.wants.len())?;
        decisions.push(decision(status, layers, ask, time_ms)?);
        rest = others;
    }
    rest.is_empty().then_some(decisions)
}

fn decision(status: &Value, layers: &[Value], ask: &AcquireCall, time_ms: u64) -> Option<Decision> {
    let layers = layers.chunks_exact(3).zip(&ask.wants);
    let took = |(said, want)| took(said, want, ask.at_ms);
    match status {
        Value::Int(1) => Some(Ok(Answer::Granted { time_ms, took: layers.map(took).collect::<Option<_>>()? })),
        Value::Int(0) => Some(Ok(Answer::Refused { time_ms, took: layers.map(took).collect::<Option<_>>()? })),
        Value::Int(-1) => Some(Ok(Answer::OtherWindow { time_ms })),
        Value::Int(-2) => {
            let (_, want) = layers.into_iter().find(|(said, _)| said.first() == Some(&Value::Int(-1)))?;
            let mut key = String::new();
            put_key(&mut key, &want.base, want.at.kind(), want.at.window(ask.at_ms)?.0);
            Some(Err(key))
        }
        _ => None,
    }
}

fn took(said: &[Value], want: &CounterRequest, at_ms: u64) -> Option<CounterReply> {
    let [granted, used, mark] = said else { return None };
    let (which, end_ms) = match want.at {
        At::Plain { .. } => want.at.window(at_ms)?,
        At::Grid { number: first, end_ms, next_end_ms } => {
            let which = number(mark)?;
            (which, if which == first { end_ms } else { next_end_ms })
        }
        At::Floating { period_ms } => {
            let start_ms = number(mark)?;
            (start_ms, start_ms + period_ms)
        }
    };
    Some(CounterReply { granted: number(granted)?, used: number(used)?, end_ms, number: which })
}

/// Whether the other window of each counter that has two is open at a time.
pub fn is_known_at(wants: &[CounterRequest], now_ms: u64) -> bool {
    wants.iter().all(|want| want.at.window(now_ms).is_some())
}

/// Gives tokens back.
pub fn give(script: &Script, by: By, gifts: &[Refund]) -> Cmd {
    let mut cmd = begun(script, by, gifts.len(), 5 * gifts.len(), gifts.iter().map(|gift| gift.base.len()).sum());
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
fn begun(script: &Script, by: By, keys: usize, numbers: usize, bases: usize) -> Cmd {
    let (name, script) = match by {
        By::Sha => ("EVALSHA", script.sha.as_str()),
        By::Text => ("EVAL", script.text),
    };
    // Room for the number behind each base, and for numbers as long as a time in milliseconds.
    let bytes = script.len() + bases + 22 * keys + 13 * numbers + 16;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(at: At, need: u64, want: u64) -> AcquireCall {
        let want =
            CounterRequest { base: Rc::from("t:{r|a}"), at, limit: 5, ceiling: 5, need, want, least: 0, asked_ms: 900 };
        AcquireCall { wants: vec![want], floor_ms: 900, at_ms: 900 }
    }

    fn words(asks: &[AcquireCall]) -> Vec<String> {
        let cmd = take(&Scripts::default().take, By::Sha, asks.iter());
        let words = cmd.args_iter().skip(2).map(|arg| match arg {
            redis::Arg::Simple(word) => String::from_utf8(word.to_vec()).expect("is text"),
            _ => panic!("is a word"),
        });
        words.collect()
    }

    #[test]
    fn calls_are_written_as_the_script_reads_them() {
        let at = At::Plain { number: 7, end_ms: 1000, next_end_ms: 2000 };
        assert_eq!(words(&[asked(at, 1, 1)]), ["1", "t:{r|a}:7", "900", "1", "e", "5", "1", "1000"]);
        let late = AcquireCall { at_ms: 1000, ..asked(at, 1, 4) };
        assert_eq!(words(&[late]), ["1", "t:{r|a}:8", "900", "1", "p", "5", "1", "2000", "4", "0"]);
        let grid = asked(At::Grid { number: 7, end_ms: 1000, next_end_ms: 2000 }, 1, 1);
        let floating = asked(At::Floating { period_ms: 60 }, 2, 1);
        let both = words(&[grid, floating]);
        assert_eq!(both[..3], ["2", "t:{r|a}:account", "t:{r|a}:first-request"]);
        assert_eq!(both[3..14], ["900", "1", "g", "5", "1", "1000", "1", "0", "5", "7", "2000"]);
        assert_eq!(both[14..], ["900", "1", "f", "5", "2", "60", "2", "0", "5"]);
    }

    #[test]
    fn numbers_that_no_script_can_count_to_are_cut_off() {
        let at = At::Plain { number: 7, end_ms: 1000, next_end_ms: 2000 };
        let mut ask = asked(at, u64::MAX, u64::MAX);
        ask.wants[0].ceiling = u64::MAX;
        let most = "9007199254740991";
        assert_eq!(words(&[ask])[4..7], ["e", most, most]);
    }

    #[test]
    fn answers_are_read_call_by_call() {
        let ints = |ints: &[i64]| Value::Array(ints.iter().map(|int| Value::Int(*int)).collect());
        let plain = asked(At::Plain { number: 7, end_ms: 1000, next_end_ms: 2000 }, 1, 1);
        let grid = asked(At::Grid { number: 7, end_ms: 1000, next_end_ms: 2000 }, 1, 1);
        let floating = asked(At::Floating { period_ms: 60 }, 1, 1);
        let asks = [plain, grid, floating];
        let said = ints(&[950, 1, 1, 3, 0, 0, 0, 5, 8, -1, 0, 0, 0]);
        let took = |granted, used, end_ms, number| vec![CounterReply { granted, used, end_ms, number }];
        let expected = [
            Ok(Answer::Granted { time_ms: 950, took: took(1, 3, 1000, 7) }),
            Ok(Answer::Refused { time_ms: 950, took: took(0, 5, 2000, 8) }),
            Ok(Answer::OtherWindow { time_ms: 950 }),
        ];
        assert_eq!(taken(&said, asks.iter()).as_deref(), Some(&expected[..]));
        let floats = taken(&ints(&[950, 1, 1, 1, 940]), asks[2..].iter());
        assert_eq!(floats, Some(vec![Ok(Answer::Granted { time_ms: 950, took: took(1, 1, 1000, 940) })]));
        let bad = taken(&ints(&[950, -2, -1, 0, 0]), asks[..1].iter());
        assert_eq!(bad, Some(vec![Err("t:{r|a}:7".to_owned())]));
        for strange in [&[][..], &[950], &[950, 1, 1, 3], &[950, 1, 1, 3, 0, 9], &[950, 5, 1, 3, 0], &[-1, 1, 1, 3, 0]]
        {
            assert_eq!(taken(&ints(strange), asks[..1].iter()), None, "{strange:?}");
        }
        assert_eq!(taken(&Value::Nil, asks.iter()), None);
    }

    #[test]
    fn windows_that_have_not_begun_are_told_apart_from_those_that_have() {
        let day_ms = 86_400_000;
        // A month of 28 days before one of 31, of which the second is open.
        let at = At::Plain { number: 1, end_ms: 100 * day_ms, next_end_ms: 131 * day_ms };
        let ahead = [70, 73].map(|day| at.is_ahead_of(day * day_ms));
        assert_eq!((ahead, at.is_ahead_of(40 * day_ms)), ([false, false], true));
        assert!(!At::Floating { period_ms: 60 }.is_ahead_of(0));
    }

    #[test]
    fn a_little_ahead_is_followed() {
        assert_eq!([(500, 400), (500, 900), (500, 1500)].map(|(a, b)| effective_ms(a, b)), [500, 900, 500]);
    }
}
