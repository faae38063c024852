//! A store in memory: what `acquire.lua` and `refund.lua` do, as text in and numbers out.
//!
//! tests/integration/simulated_store.rs compares it with a redis-server. Values of other types are not simulated.

use std::collections::BTreeMap;
use std::fmt;

/// A gateway that is ahead by this much gets the time only, milliseconds.
const LEAD_MAX_MS: i64 = 1000;
const TOKENS_MAX: i64 = (1 << 53) - 1;
/// The largest expiry that the script writes.
const EXPIRY_MAX_MS: i64 = 4_398_046_511_103;

/// The counters of a store.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Store {
    counters: BTreeMap<String, Entry>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Entry {
    value: Value,
    expires_ms: i64,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Value {
    /// Of a plain window.
    Used(i64),
    /// Of accumulating windows, by number, and of windows that a first request opens, by their start.
    Account { mark: i64, used: i64 },
    /// Of a sliding window: tokens by segment.
    Segments(BTreeMap<i64, i64>),
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counters.iter().try_for_each(|(key, entry)| write!(f, "{key} = {:?} ", entry.value))
    }
}

/// The kind of a counter, and the numbers of a request to it.
pub struct CounterArguments {
    kind: char,
    pub ceiling: i64,
    pub need: i64,
    end_ms: i64,
    pub want: i64,
    pub least: i64,
    /// Of a sliding window: the tokens that a refused request needs when it is repeated, if the refusal takes what is left.
    need_once_refused: i64,
    limit: i64,
    /// The end of the window after which tokens are reserved.
    reserved_after_ms: i64,
    number: i64,
    next_end_ms: i64,
}

impl CounterArguments {
    /// Removes the arguments of one counter.
    pub fn take(arguments: &mut std::slice::Iter<'_, String>) -> CounterArguments {
        let kind = arguments.next().and_then(|kind| kind.chars().next()).expect("a kind");
        let mut next = || number(arguments.next().expect("a number"));
        let [ceiling, need, end_ms] = [next(), next(), next()];
        let [want, least] = if kind == 'e' { [need, 0] } else { [next(), next()] };
        let need_once_refused = if kind == 's' { next() } else { 0 };
        let [limit, reserved_after_ms] = if matches!(kind, 'f' | 'g') { [next(), next()] } else { [0; 2] };
        let [number, next_end_ms] = if kind == 'g' { [next(), next()] } else { [0, 2 * end_ms] };
        CounterArguments {
            kind,
            ceiling,
            need,
            end_ms,
            want,
            least,
            need_once_refused,
            limit,
            reserved_after_ms,
            number,
            next_end_ms,
        }
    }

    fn is_plain(&self) -> bool {
        matches!(self.kind, 'e' | 'p')
    }
}

/// What a run of the script has read of a counter, and changed.
#[derive(Default)]
struct Read {
    used: i64,
    /// The number of the window or segment, or the start of the window.
    mark: i64,
    end_ms: i64,
    segments: BTreeMap<i64, i64>,
}

/// The decision about one counter of a call.
struct Grant {
    key: String,
    arguments: CounterArguments,
    grant: i64,
    /// The four numbers of the reply.
    reply: [i64; 4],
}

impl Grant {
    /// Takes the tokens; returns when the counter expires.
    fn take(&mut self, read: &mut Read) -> i64 {
        let CounterArguments { kind, end_ms, next_end_ms, limit, least, .. } = self.arguments;
        let used = read.used.max(least) + self.grant;
        (self.reply[0], self.reply[1]) = (self.grant, used);
        if kind == 's' {
            if self.arguments.need_once_refused > 0 {
                self.reply[3] = returned_after(read, 1);
            }
            *read.segments.entry(read.mark).or_default() += used - read.used;
        }
        read.used = used;
        let length = next_end_ms - end_ms;
        match kind {
            'e' | 'p' => end_ms,
            's' => (((read.mark + 9) * end_ms + 7) / 8).min(EXPIRY_MAX_MS),
            kind => {
                let length = if kind == 'g' { 2 * length } else { length };
                let windows = (used + limit - 1) / limit - 1;
                (read.end_ms + windows * length).min(EXPIRY_MAX_MS)
            }
        }
    }
}

fn number(text: &String) -> i64 {
    text.parse().unwrap_or_else(|_| panic!("`{text}` is a number"))
}

impl Store {
    /// Runs `acquire.lua`.
    pub fn acquire(&mut self, keys: &[String], arguments: &[String], time_ms: u64) -> Vec<i64> {
        let time_ms = time_ms as i64;
        self.remove_expired(time_ms);
        let (mut reads, mut changed) = (BTreeMap::<String, Read>::new(), BTreeMap::new());
        let mut reply = vec![time_ms];
        let (mut keys, mut arguments) = (keys.iter(), arguments.iter());
        while let Some(gateway_ms) = arguments.next().map(number) {
            let count = arguments.next().map(number).expect("a number of counters");
            let is_far_ahead = gateway_ms - time_ms >= LEAD_MAX_MS;
            let now_ms = if is_far_ahead { time_ms } else { time_ms.max(gateway_ms) };
            let (mut status, mut grants) = (1, Vec::new());
            for _ in 0..count {
                let (key, arguments) = (keys.next().expect("a key"), CounterArguments::take(&mut arguments));
                let used = self.read(&mut reads, key, &arguments, now_ms, is_far_ahead);
                if used.is_none() {
                    status = -1;
                }
                let used = used.unwrap_or(0).min(TOKENS_MAX);
                let CounterArguments { ceiling, need, want, least, reserved_after_ms, .. } = arguments;
                let window_end_ms = reads.get(key).map_or(0, |read| read.end_ms);
                let is_later = reserved_after_ms > 0 && window_end_ms > reserved_after_ms;
                let spare = if is_later { -1 } else { ceiling - used.max(least) - need };
                let more = if want > need { (want - need).min(spare.div_euclid(8)) } else { 0 };
                if spare < 0 {
                    status = status.min(0);
                }
                let mark = reads.get(key).map_or(0, |read| read.mark);
                let excess = match arguments.need_once_refused {
                    0 => -spare,
                    again => again + (-spare).min((-spare - need).max(0)),
                };
                let returned = if arguments.kind == 's' { returned_after(&reads[key], excess.max(1)) } else { 0 };
                let reply = [0, used, mark, returned];
                grants.push(Grant { key: key.clone(), arguments, grant: need + more, reply });
            }
            reply.push(status);
            for mut grant in grants {
                if status == 1 && grant.grant > 0 {
                    let read = reads.get_mut(&grant.key).expect("is read");
                    let expires_ms = grant.take(read);
                    changed.insert(grant.key, (grant.arguments.kind, expires_ms));
                }
                reply.extend(grant.reply);
            }
        }
        for (key, (kind, expires_ms)) in changed {
            let read = reads.remove(&key).expect("is read");
            self.write(key, kind, read, expires_ms);
        }
        reply
    }

    /// The usage of a counter; `None` if neither of the two windows is open.
    fn read(
        &self,
        reads: &mut BTreeMap<String, Read>,
        key: &str,
        arguments: &CounterArguments,
        now_ms: i64,
        is_far_ahead: bool,
    ) -> Option<i64> {
        let value = self.counters.get(key).map(|entry| &entry.value);
        if arguments.is_plain() {
            let read = reads.entry(key.to_owned()).or_insert_with(|| {
                let used = if let Some(Value::Used(used)) = value { (*used).max(0) } else { 0 };
                Read { used, ..Read::default() }
            });
            return (!is_far_ahead && now_ms < arguments.end_ms).then_some(read.used);
        }
        if arguments.kind == 's' {
            let read = reads.entry(key.to_owned()).or_insert_with(|| {
                let segments =
                    if let Some(Value::Segments(segments)) = value { segments.clone() } else { BTreeMap::new() };
                Read { segments, ..Read::default() }
            });
            let newest = (now_ms + 2000) * 8 / arguments.end_ms + 8;
            let in_use = read.segments.keys().copied().filter(|segment| *segment <= newest);
            read.mark = in_use.fold(now_ms * 8 / arguments.end_ms, i64::max);
            read.used = read.segments.range(read.mark - 8..=read.mark).map(|(_, tokens)| tokens.max(&0)).sum();
            return Some(read.used);
        }
        let (mut mark, mut used, exists) = match (reads.get(key), value) {
            (Some(read), _) => (read.mark, read.used, true),
            (None, Some(Value::Account { mark, used })) => (*mark, *used, true),
            (None, _) => (0, 0, false),
        };
        let length = arguments.next_end_ms - arguments.end_ms;
        let end_ms = match arguments.kind {
            'g' => {
                let (mut open, mut end_ms) = (arguments.number, arguments.end_ms);
                let is_of_shorter_windows = exists && (mark - open) * length > 2 * length + 2000;
                let exists = exists && !is_of_shorter_windows;
                if now_ms >= end_ms || (exists && mark == open + 1) {
                    (open, end_ms) = (open + 1, end_ms + length);
                    if now_ms >= end_ms {
                        return None;
                    }
                }
                used = if exists { used - arguments.limit * (open - mark) } else { 0 };
                mark = open;
                end_ms
            }
            _ => {
                if !exists || mark > now_ms + 2000 {
                    mark = now_ms;
                }
                let elapsed = ((now_ms - mark) / length).max(0);
                used -= arguments.limit * elapsed;
                mark = match arguments.reserved_after_ms {
                    _ if used > 0 => mark + elapsed * length,
                    reserved_after_ms if reserved_after_ms > now_ms => reserved_after_ms - length,
                    _ => now_ms,
                };
                mark + length
            }
        };
        let used = used.max(0);
        reads.insert(key.to_owned(), Read { used, mark, end_ms, segments: BTreeMap::new() });
        Some(used)
    }

    /// Writes a counter as it is at the end of a run.
    fn write(&mut self, key: String, kind: char, read: Read, expires_ms: i64) {
        let value = match kind {
            'e' | 'p' => Value::Used(read.used),
            's' => {
                let is_kept = |segment: i64| segment >= read.mark - 8;
                Value::Segments(read.segments.into_iter().filter(|(segment, _)| is_kept(*segment)).collect())
            }
            _ => Value::Account { mark: read.mark, used: read.used },
        };
        self.counters.insert(key, Entry { value, expires_ms });
    }

    /// Runs `refund.lua`; returns the tokens refunded, and those that stay counted, by key: of an accumulating window that has ended,
    /// the store does not know whether other requests have used its tokens.
    pub fn refund(&mut self, keys: &[String], arguments: &[String], time_ms: u64) -> (i64, Vec<(String, u64)>) {
        self.remove_expired(time_ms as i64);
        let (mut refunded, mut kept) = (0, Vec::new());
        for (key, fields) in keys.iter().zip(arguments.chunks_exact(5)) {
            let [kind, mark, limit, tokens, only] = fields else { unreachable!("five arguments") };
            let (mark, limit, tokens) = (number(mark), number(limit), number(tokens));
            if only == "all" {
                self.counters.remove(key);
                continue;
            }
            let is_allowed = |used: i64| only.is_empty() || used <= number(only);
            let amount = match self.counters.get_mut(key).map(|entry| &mut entry.value) {
                Some(Value::Used(used)) if is_allowed(*used) => subtract(used, tokens),
                Some(Value::Segments(segments)) => segments.get_mut(&mark).map_or(0, |used| subtract(used, tokens)),
                Some(Value::Account { mark: current, used }) => {
                    let windows = *current - mark;
                    let amount = match windows {
                        0 if is_allowed(*used) => tokens,
                        1.. if only.is_empty() && kind == "g" => {
                            kept.push((key.clone(), tokens.min(limit * windows) as u64));
                            tokens - limit * windows
                        }
                        _ => 0,
                    };
                    subtract(used, amount)
                }
                _ => 0,
            };
            refunded += amount;
        }
        (refunded, kept)
    }

    /// The tokens that a counter holds, of all segments; 0 without one.
    pub fn used(&self, key: &str) -> u64 {
        let used = match self.counters.get(key).map(|entry| &entry.value) {
            Some(Value::Used(used) | Value::Account { used, .. }) => *used,
            Some(Value::Segments(segments)) => segments.values().sum(),
            None => 0,
        };
        used as u64
    }

    /// The tokens of a counter that this store has and `other` lacks, in the latest window here.
    pub fn tokens_beyond(&self, other: &Store, key: &str) -> u64 {
        let value = |store: &Store| store.counters.get(key).map(|entry| entry.value.clone());
        match (value(self), value(other)) {
            (Some(Value::Segments(segments)), Some(Value::Segments(others))) => {
                let more = |(segment, tokens): (i64, i64)| (tokens - others.get(&segment).unwrap_or(&0)).max(0) as u64;
                segments.into_iter().map(more).sum()
            }
            (Some(Value::Account { mark, .. }), Some(Value::Account { mark: other, .. })) if mark != other => {
                self.used(key)
            }
            _ => self.used(key).saturating_sub(other.used(key)),
        }
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.counters.keys().map(String::as_str)
    }

    fn remove_expired(&mut self, time_ms: i64) {
        self.counters.retain(|_, entry| time_ms <= entry.expires_ms);
    }
}

/// Subtracts at most what there is; returns how much.
fn subtract(used: &mut i64, tokens: i64) -> i64 {
    let amount = tokens.min(*used).max(0);
    *used -= amount;
    amount
}

/// The segment of a sliding counter after which `excess` tokens have come back.
fn returned_after(read: &Read, mut excess: i64) -> i64 {
    for segment in read.mark - 8..read.mark {
        excess -= read.segments.get(&segment).copied().unwrap_or(0);
        if excess <= 0 {
            return segment;
        }
    }
    read.mark
}
