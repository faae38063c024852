//! The commands and replies of the two scripts: `acquire.lua` takes tokens of counters, all or none, and `refund.lua`
//! refunds tokens. Each script runs atomically. This file does no I/O.
//!
//! The server's clock decides which window is open. A request therefore names the window that is open by the gateway's
//! time and the end of the next one; the key of the next window is sent only after the server reports that the first
//! has ended. So a call names one key per plain counter: while a slot moves between nodes, a cluster rejects calls with
//! several keys (TRYAGAIN).
//!
//! A request to a counter is passed as its kind and some numbers. The fields are those of [`CounterRequest`]; a window that a first
//! request opens, and a sliding one, has its period in place of its end.
//!
//! | kind | window | numbers |
//! | --- | --- | --- |
//! | `e` | plain, for exactly the tokens needed | ceiling, need, end |
//! | `p` | plain | as `e`; want, least usage |
//! | `s` | sliding | as `p`; `need_once_refused` |
//! | `f` | that a first request opens | as `p`; limit, `reserved_after_ms` |
//! | `g` | accumulating | as `f`; number of the window, end of the next one |
//!
//! | counter | key | value |
//! | --- | --- | --- |
//! | plain window | `BASE:NUMBER`, or as the rule's `key_format` says | tokens taken, an integer |
//! | accumulating windows (rollover, reservations) | `BASE:account` | `window`: its number at the last write; `used`: tokens used or owed then |
//! | windows that a first request opens | `BASE:first-request` | `start` of the window, milliseconds, and `used` |
//! | sliding window | `BASE:sliding` | tokens taken in each segment, an eighth of the period, by its number |
//!
//! **Other writers.** Tokens that another service adds to a plain counter count as taken. A value above the limit
//! refuses, up to 2^63. A value below 0 counts as 0, and the next acquire corrects it, so that no more than the limit
//! is granted. A key without expiry, or with another one, gets the expiry of its window at the next acquire. A value
//! that is not an integer, or a key of another type, is an error of that counter only.
//!
//! **Refunds.** A plain window takes back all tokens, as long as it exists. A counter of accumulating windows takes back the
//! tokens on which no later request can depend: all of them in the window of the charge, reduced by `limit` for each window that
//! has begun since, because those would have expired. A window that a first request opened takes back nothing once another is
//! open. A segment of a sliding window takes back all its tokens.
//!
//! **Reservations.** A request that waits for a later window has its place in the order of charges. A refund of a charge before it
//! would give the same place to another request, and the later window would admit both. So a refund with `used_max` returns tokens
//! only in the window of the charge, and only if usage is at most `used_max`. This is the limit, because usage exceeds it while a request
//! waits; or the usage right after the charge, if that is more, because the charge is then still the last one.

use std::fmt::Write;
use std::rc::Rc;
use std::sync::LazyLock;

use redis::{Cmd, Value};

use transom_limiter::rule::WINDOW_MARK;
use transom_limiter::store_key::StoreWindow;
use transom_limiter::table::Counter;
use transom_limiter::window_kind::WindowKind;

/// While the gateway's time is ahead of the server's by less than this, it is used, milliseconds. `acquire.lua` has the
/// same bound.
pub const LEAD_MAX_MS: u64 = 1000;
/// The largest integer that Lua counts exactly.
pub const TOKENS_MAX: u64 = (1 << 53) - 1;
/// The short form of a request to a plain window for exactly the tokens needed: the usual case.
const EXACT: &str = "e";

/// A script: its text, and its SHA-1 digest for `EVALSHA`.
#[derive(Clone)]
pub struct Script {
    text: &'static str,
    sha: String,
}

#[derive(Clone)]
pub struct Scripts {
    pub acquire: Script,
    pub refund: Script,
}

impl Default for Scripts {
    fn default() -> Scripts {
        static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
            acquire: Script::new(include_str!("acquire.lua")),
            refund: Script::new(include_str!("refund.lua")),
        });
        SCRIPTS.clone()
    }
}

impl Script {
    pub fn new(text: &'static str) -> Script {
        Script { text, sha: redis::Script::new(text).get_hash().to_owned() }
    }

    /// The beginning of a command: the script and its keys.
    pub fn command(&self, script_ref: ScriptRef, keys: &[String]) -> Cmd {
        let mut cmd = start_command(self, script_ref, keys.len(), 0, keys.iter().map(String::len).sum());
        keys.iter().for_each(|key| _ = cmd.arg(key));
        cmd
    }
}

/// How a command refers to a script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScriptRef {
    /// By its digest, which the server has to know.
    Sha,
    /// In full; the server knows the digest from then on.
    Text,
}

/// A request to one counter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CounterRequest {
    /// The beginning of the counter's keys.
    pub key_base: Rc<str>,
    pub window: StoreWindow,
    /// Tokens granted per window; at least 1.
    pub limit: u32,
    /// The most that may be used or owed afterwards; capped at [`TOKENS_MAX`].
    pub ceiling: u64,
    /// Tokens needed; with fewer, the whole call is refused.
    pub need: u64,
    /// Tokens wanted: beyond `need`, at most an eighth of what remains is granted. A value below `need` counts as
    /// `need`. With `need` and `want` 0 the counter is only read.
    pub want: u64,
    /// A lower bound of the usage.
    pub used_min: u64,
    /// Of a sliding window whose rule counts refusals: the tokens that a refused request needs when it is repeated; otherwise 0. The
    /// reply to a refused call then says when these fit after the refusal has taken what is left, up to `need`.
    pub need_once_refused: u64,
    /// Of tokens reserved in a later window: the end of the window after which `ceiling` and `used_min` reserve them; otherwise 0. The
    /// call is refused if a later window is open. If none is open that a first request opens, one is opened that ends then.
    pub reserved_after_ms: u64,
    /// [`Refund::used_max`] of the tokens granted.
    pub refund_used_max: Option<u64>,
    /// [`Refund::counter`] of the tokens granted.
    pub counter: Option<Counter>,
    /// The gateway's time when the request was made. The time may have been set back to the server's since; `window` is
    /// then a later window.
    pub computed_ms: u64,
    /// The number of connections that had been opened when the request was made. A server behind a later connection may have lost
    /// usage that the request relies on. 0: it relies on none.
    pub generation: u64,
}

/// The reply about one counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterReply {
    pub granted: u64,
    /// Tokens used or owed now.
    pub used: u64,
    /// End of the window that is open by the server's time; for sliding windows, the time at which the last of the used
    /// tokens comes back.
    pub end_ms: u64,
    /// The time at which tokens come back: if the call was refused, as many as it needs, or needs once refused.
    pub available_ms: u64,
    /// The window's number; for windows that a first request opens, their start in milliseconds; for sliding windows, the
    /// number of the segment.
    pub number: u64,
    /// Number of the call, in the order in which calls were sent.
    pub call: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AcquireReply {
    Granted {
        time_ms: u64,
        counters: Vec<CounterReply>,
    },
    /// At least one counter had fewer tokens than needed; nothing was acquired.
    Refused {
        time_ms: u64,
        counters: Vec<CounterReply>,
    },
    /// Neither window is open by the server's time; nothing was acquired.
    OtherWindow {
        time_ms: u64,
    },
}

/// Tokens to refund.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refund<K = Rc<str>> {
    pub key_base: K,
    pub kind: WindowKind,
    /// [`CounterReply::number`].
    pub number: u64,
    pub limit: u32,
    pub tokens: u64,
    /// If set, tokens are refunded only in the window of the charge, and only if usage is at most this: otherwise requests may wait
    /// behind the refunded one.
    pub used_max: Option<u64>,
    /// The layer's ordinary counter, which has the known usage. `None`: there is none.
    pub counter: Option<Counter>,
    /// If set, the counter is deleted, and `tokens` is ignored.
    pub deletes: bool,
}

impl Refund {
    /// The same refund of `tokens` at most.
    pub fn at_most(&self, tokens: u64) -> Refund {
        Refund { tokens: self.tokens.min(tokens), ..self.clone() }
    }
}

/// Where tokens came from and can be refunded to.
#[derive(Clone, Debug)]
pub struct RefundTarget {
    pub key_base: Rc<str>,
    pub kind: WindowKind,
    pub number: u64,
    pub limit: u32,
    /// [`Refund::used_max`].
    pub used_max: Option<u64>,
    /// [`Refund::counter`].
    pub counter: Option<Counter>,
    /// The end of a lease on the tokens.
    pub end_ms: u64,
}

impl<K> Refund<K> {
    /// The same refund with another form of the key.
    pub fn with_key<L>(self, convert: impl FnOnce(&K) -> L) -> Refund<L> {
        let Refund { key_base, kind, number, limit, tokens, used_max, counter, deletes } = self;
        Refund { key_base: convert(&key_base), kind, number, limit, tokens, used_max, counter, deletes }
    }
}

impl RefundTarget {
    /// A refund of `tokens`.
    pub fn refund(&self, tokens: u64) -> Refund {
        let RefundTarget { kind, number, limit, used_max, counter, .. } = *self;
        Refund { key_base: Rc::clone(&self.key_base), kind, number, limit, tokens, used_max, counter, deletes: false }
    }
}

impl CounterRequest {
    pub fn refund_target(&self, reply: CounterReply) -> RefundTarget {
        let CounterReply { number, end_ms, .. } = reply;
        let end_ms = self.window.lease_end_ms(number, end_ms);
        let (kind, limit, used_max, counter) = (self.window.kind, self.limit, self.refund_used_max, self.counter);
        RefundTarget { key_base: Rc::clone(&self.key_base), kind, number, limit, used_max, counter, end_ms }
    }
}

/// The refunds of everything that was granted.
pub fn refunds_of(requests: &[CounterRequest], replies: &[CounterReply]) -> Vec<Refund> {
    let refund = |(request, reply): (&CounterRequest, &CounterReply)| {
        let refund = request.refund_target(*reply).refund(reply.granted);
        // No request waits behind the last charge.
        Refund { used_max: refund.used_max.map(|most| most.max(reply.used)), ..refund }
    };
    requests.iter().zip(replies).map(refund).collect()
}

/// The effective time: the server's, or the gateway's if that is ahead by less than `LEAD_MAX_MS`.
pub fn effective_ms(time_ms: u64, gateway_ms: u64) -> u64 {
    if gateway_ms.saturating_sub(time_ms) < LEAD_MAX_MS { time_ms.max(gateway_ms) } else { time_ms }
}

/// One call: acquires all or nothing.
#[derive(Clone, Debug)]
pub struct AcquireCall {
    /// Distinct counters.
    pub requests: Vec<CounterRequest>,
    /// The gateway's time.
    pub gateway_ms: u64,
    /// The time that selects the window of each request.
    pub window_ms: u64,
}

/// The reply to a call, or the key that holds another type of value.
pub type AcquireResult = Result<AcquireReply, String>;

/// The command that decides calls in order.
pub fn acquire_command<'a>(
    script: &Script,
    script_ref: ScriptRef,
    calls: impl Iterator<Item = &'a AcquireCall> + Clone,
) -> Cmd {
    let requests = calls.clone().flat_map(|call| call.requests.iter().map(|request| (request, call.window_ms)));
    let (count, base_bytes) =
        requests.clone().fold((0, 0), |(n, bytes), (request, _)| (n + 1, bytes + request.key_base.len()));
    let mut cmd = start_command(script, script_ref, count, 10 * count + 2, base_bytes);
    let mut key = String::new();
    for (request, at_ms) in requests {
        write_key(&mut key, &request.key_base, request.window.kind, request.window.keyed_at(at_ms).number);
        cmd.arg(&key);
    }
    for call in calls {
        cmd.arg(call.gateway_ms).arg(call.requests.len());
        for request in &call.requests {
            write_request_arguments(&mut cmd, request, call.window_ms);
        }
    }
    cmd
}

fn write_request_arguments(cmd: &mut Cmd, request: &CounterRequest, at_ms: u64) {
    let (ceiling, need) = (request.ceiling.min(TOKENS_MAX), request.need.min(TOKENS_MAX));
    let (want, used_min) = (request.want.clamp(need, TOKENS_MAX), request.used_min.min(TOKENS_MAX));
    let StoreWindow { kind, number, end_ms, next_end_ms } = request.window.keyed_at(at_ms);
    if kind == WindowKind::Plain && want == need && used_min == 0 {
        cmd.arg(EXACT).arg(ceiling).arg(need).arg(end_ms);
        return;
    }
    cmd.arg(letter(kind)).arg(ceiling).arg(need).arg(end_ms).arg(want).arg(used_min);
    let (limit, reserved_after_ms) = (request.limit.max(1), request.reserved_after_ms);
    match kind {
        WindowKind::Plain | WindowKind::Leased => {}
        WindowKind::Sliding => _ = cmd.arg(request.need_once_refused.min(TOKENS_MAX)),
        WindowKind::Floating => _ = cmd.arg(limit).arg(reserved_after_ms),
        WindowKind::Accumulating => {
            cmd.arg(limit).arg(reserved_after_ms).arg(number).arg(next_end_ms);
        }
    }
}

/// Parses the reply of a server to [`acquire_command`], call by call; `None` if the reply is malformed.
pub fn parse_acquire_reply<'a>(
    reply: &Value,
    calls: impl Iterator<Item = &'a AcquireCall>,
) -> Option<Vec<AcquireResult>> {
    let Value::Array(reply) = reply else { return None };
    let (time_ms, mut rest) = reply.split_first()?;
    let time_ms = parse_number(time_ms)?;
    let mut decisions = Vec::with_capacity(calls.size_hint().0);
    for call in calls {
        let (status, layers) = rest.split_first()?;
        let (layers, others) = layers.split_at_checked(4 * call.requests.len())?;
        decisions.push(parse_decision(status, layers, call, time_ms)?);
        rest = others;
    }
    rest.is_empty().then_some(decisions)
}

fn parse_decision(status: &Value, layers: &[Value], call: &AcquireCall, time_ms: u64) -> Option<AcquireResult> {
    let layers = layers.chunks_exact(4).zip(&call.requests);
    let replies = |(reply, request)| parse_counter(reply, request, call.window_ms);
    match status {
        Value::Int(1) => {
            Some(Ok(AcquireReply::Granted { time_ms, counters: layers.map(replies).collect::<Option<_>>()? }))
        }
        Value::Int(0) => {
            Some(Ok(AcquireReply::Refused { time_ms, counters: layers.map(replies).collect::<Option<_>>()? }))
        }
        Value::Int(-1) => Some(Ok(AcquireReply::OtherWindow { time_ms })),
        Value::Int(-2) => {
            let (_, request) = layers.into_iter().find(|(reply, _)| reply.first() == Some(&Value::Int(-1)))?;
            let mut key = String::new();
            let window = request.window.keyed_at(call.window_ms);
            write_key(&mut key, &request.key_base, window.kind, window.number);
            Some(Err(key))
        }
        _ => None,
    }
}

fn parse_counter(reply: &[Value], request: &CounterRequest, at_ms: u64) -> Option<CounterReply> {
    let [granted, used, window_mark, returned_after] = reply else { return None };
    let window = request.window.keyed_at(at_ms);
    let (number, end_ms) = window.reported(parse_number(window_mark)?);
    let available_ms = match window.kind {
        WindowKind::Sliding => window.segments().expires_ms(parse_number(returned_after)?),
        WindowKind::Plain | WindowKind::Accumulating | WindowKind::Floating | WindowKind::Leased => end_ms,
    };
    Some(CounterReply {
        granted: parse_number(granted)?,
        used: parse_number(used)?,
        end_ms,
        available_ms,
        number,
        call: 0,
    })
}

/// Whether each counter's first or second window is open at `now_ms`.
pub fn are_windows_known(requests: &[CounterRequest], now_ms: u64) -> bool {
    requests.iter().all(|request| request.window.is_known_at(now_ms))
}

/// The command that refunds tokens.
pub fn refund_command(script: &Script, script_ref: ScriptRef, refunds: &[Refund]) -> Cmd {
    let mut cmd = start_command(
        script,
        script_ref,
        refunds.len(),
        5 * refunds.len(),
        refunds.iter().map(|refund| refund.key_base.len()).sum(),
    );
    let mut key = String::new();
    for refund in refunds {
        write_key(&mut key, &refund.key_base, refund.kind, refund.number);
        cmd.arg(&key);
    }
    for refund in refunds {
        cmd.arg(letter(refund.kind)).arg(refund.number).arg(refund.limit).arg(refund.tokens.min(TOKENS_MAX));
        match refund.used_max {
            _ if refund.deletes => cmd.arg("all"),
            Some(used) => cmd.arg(used),
            None => cmd.arg(""),
        };
    }
    cmd
}

/// Parses the reply to [`refund_command`]: the number of tokens refunded.
pub fn parse_refund_reply(reply: &Value) -> Option<u64> {
    parse_number(reply)
}

/// The beginning of a command, up to its keys.
fn start_command(script: &Script, script_ref: ScriptRef, keys: usize, arguments: usize, base_bytes: usize) -> Cmd {
    let (name, script) = match script_ref {
        ScriptRef::Sha => ("EVALSHA", script.sha.as_str()),
        ScriptRef::Text => ("EVAL", script.text),
    };
    // Capacity for the window number after each base, and for numbers as long as a time in milliseconds.
    let bytes = script.len() + base_bytes + 22 * keys + 13 * arguments + 16;
    let mut cmd = Cmd::with_capacity(3 + keys + arguments, bytes);
    cmd.arg(name).arg(script).arg(keys);
    cmd
}

/// The letter of the kind in calls of the scripts.
fn letter(kind: WindowKind) -> &'static str {
    match kind {
        WindowKind::Plain | WindowKind::Leased => "p",
        WindowKind::Accumulating => "g",
        WindowKind::Floating => "f",
        WindowKind::Sliding => "s",
    }
}

fn write_key(key: &mut String, base: &str, kind: WindowKind, number: u64) {
    key.clear();
    // Writing to a string cannot fail.
    let _ = match (base.split_once(WINDOW_MARK), kind) {
        (Some((before, after)), _) => write!(key, "{before}{number}{after}"),
        (None, WindowKind::Plain | WindowKind::Leased) => write!(key, "{base}:{number}"),
        (None, WindowKind::Accumulating) => write!(key, "{base}:account"),
        (None, WindowKind::Floating) => write!(key, "{base}:first-request"),
        (None, WindowKind::Sliding) => write!(key, "{base}:sliding"),
    };
}

fn parse_number(reply: &Value) -> Option<u64> {
    match reply {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: StoreWindow = StoreWindow { kind: WindowKind::Plain, number: 7, end_ms: 1000, next_end_ms: 2000 };
    const GRID: StoreWindow = StoreWindow { kind: WindowKind::Accumulating, ..PLAIN };

    fn acquire_call(at: StoreWindow, need: u64, want: u64) -> AcquireCall {
        let want = CounterRequest {
            key_base: Rc::from("t:{r|a}"),
            window: at,
            limit: 5,
            ceiling: 5,
            need,
            want,
            used_min: 0,
            need_once_refused: 0,
            reserved_after_ms: 0,
            refund_used_max: None,
            counter: None,
            computed_ms: 900,
            generation: 0,
        };
        AcquireCall { requests: vec![want], gateway_ms: 900, window_ms: 900 }
    }

    fn words(calls: &[AcquireCall]) -> Vec<String> {
        let cmd = acquire_command(&Scripts::default().acquire, ScriptRef::Sha, calls.iter());
        let words = cmd.args_iter().skip(2).map(|arg| match arg {
            redis::Arg::Simple(word) => String::from_utf8(word.to_vec()).expect("is text"),
            _ => panic!("is a word"),
        });
        words.collect()
    }

    #[test]
    fn commands_have_the_arguments_that_the_script_reads() {
        let at = PLAIN;
        assert_eq!(words(&[acquire_call(at, 1, 1)]), ["1", "t:{r|a}:7", "900", "1", "e", "5", "1", "1000"]);
        let late = AcquireCall { window_ms: 1000, ..acquire_call(at, 1, 4) };
        assert_eq!(words(&[late]), ["1", "t:{r|a}:8", "900", "1", "p", "5", "1", "2000", "4", "0"]);
        let grid = acquire_call(GRID, 1, 1);
        let mut floating = acquire_call(StoreWindow::floating(60), 2, 1);
        floating.requests[0].reserved_after_ms = 950;
        let mut sliding = acquire_call(StoreWindow { kind: WindowKind::Sliding, ..StoreWindow::floating(60) }, 2, 1);
        sliding.requests[0].need_once_refused = 3;
        let all = words(&[grid, floating, sliding]);
        assert_eq!(all[..4], ["3", "t:{r|a}:account", "t:{r|a}:first-request", "t:{r|a}:sliding"]);
        assert_eq!(all[4..16], ["900", "1", "g", "5", "1", "1000", "1", "0", "5", "0", "7", "2000"]);
        assert_eq!(all[16..26], ["900", "1", "f", "5", "2", "60", "2", "0", "5", "950"]);
        assert_eq!(all[26..], ["900", "1", "s", "5", "2", "60", "2", "0", "3"]);
    }

    #[test]
    fn numbers_beyond_the_range_of_lua_are_capped() {
        let at = PLAIN;
        let mut call = acquire_call(at, u64::MAX, u64::MAX);
        call.requests[0].ceiling = u64::MAX;
        let most = "9007199254740991";
        assert_eq!(words(&[call])[4..7], ["e", most, most]);
    }

    #[test]
    fn replies_are_parsed_call_by_call() {
        let ints = |ints: &[i64]| Value::Array(ints.iter().map(|int| Value::Int(*int)).collect());
        let plain = acquire_call(PLAIN, 1, 1);
        let grid = acquire_call(GRID, 1, 1);
        let floating = acquire_call(StoreWindow::floating(60), 1, 1);
        let calls = [plain, grid, floating];
        let reply = ints(&[950, 1, 1, 3, 0, 0, 0, 0, 5, 8, 0, -1, 0, 0, 0, 0]);
        let replies = |granted, used, end_ms, number| {
            vec![CounterReply { granted, used, end_ms, available_ms: end_ms, number, call: 0 }]
        };
        let expected = [
            Ok(AcquireReply::Granted { time_ms: 950, counters: replies(1, 3, 1000, 7) }),
            Ok(AcquireReply::Refused { time_ms: 950, counters: replies(0, 5, 2000, 8) }),
            Ok(AcquireReply::OtherWindow { time_ms: 950 }),
        ];
        assert_eq!(parse_acquire_reply(&reply, calls.iter()).as_deref(), Some(&expected[..]));
        let floats = parse_acquire_reply(&ints(&[950, 1, 1, 1, 940, 0]), calls[2..].iter());
        assert_eq!(floats, Some(vec![Ok(AcquireReply::Granted { time_ms: 950, counters: replies(1, 1, 1000, 940) })]));
        let period_ms = 800;
        let sliding =
            StoreWindow { kind: WindowKind::Sliding, number: 0, end_ms: period_ms, next_end_ms: 2 * period_ms };
        let slid = parse_acquire_reply(&ints(&[950, 1, 2, 5, 9, 4]), [acquire_call(sliding, 2, 2)].iter());
        // The ninth segment ends at 1000, and its tokens come back one period later.
        let reply = CounterReply { granted: 2, used: 5, end_ms: 1800, available_ms: 1300, number: 9, call: 0 };
        assert_eq!(slid, Some(vec![Ok(AcquireReply::Granted { time_ms: 950, counters: vec![reply] })]));
        assert_eq!(acquire_call(sliding, 2, 2).requests[0].refund_target(reply).end_ms, 1000);
        let bad = parse_acquire_reply(&ints(&[950, -2, -1, 0, 0, 0]), calls[..1].iter());
        assert_eq!(bad, Some(vec![Err("t:{r|a}:7".to_owned())]));
        for malformed in
            [&[][..], &[950], &[950, 1, 1, 3, 0], &[950, 1, 1, 3, 0, 0, 9], &[950, 5, 1, 3, 0, 0], &[-1, 1, 1, 3, 0, 0]]
        {
            assert_eq!(parse_acquire_reply(&ints(malformed), calls[..1].iter()), None, "{malformed:?}");
        }
        assert_eq!(parse_acquire_reply(&Value::Nil, calls.iter()), None);
    }

    #[test]
    fn kinds_have_letters_and_ends_of_keys() {
        use WindowKind::{Accumulating, Floating, Leased, Plain, Sliding};
        let found = [Plain, Leased, Accumulating, Floating, Sliding].map(|kind| {
            let mut key = String::new();
            write_key(&mut key, letter(kind), kind, 7);
            key
        });
        assert_eq!(found, ["p:7", "p:7", "g:account", "f:first-request", "s:sliding"]);
    }

    #[test]
    fn a_gateway_time_slightly_ahead_is_used() {
        assert_eq!([(500, 400), (500, 900), (500, 1500)].map(|(a, b)| effective_ms(a, b)), [500, 900, 500]);
    }
}
