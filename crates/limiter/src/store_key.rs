//! The form of counters in a store: their names, their windows, and how the scripts tell the kinds apart.
//!
//! A name is `PREFIX:{RULE|KEY}:WINDOW`. In KEY only letters, digits and `.~-` appear literally; all other bytes are
//! written as `%` and two hex digits. So the separators `|`, and the braces that keep the counters of a key in one slot
//! of a cluster, never come from a client. A rule with a [`KeyFormat`](crate::rule::KeyFormat) has other names. This module does
//! not access the store.

use crate::handles::{IdVec, PlanPosition};
use crate::limit::Limit;
use crate::rule::{Rule, WINDOW_MARK};
use crate::window::{Segments, Windows};
use crate::window_kind::WindowKind;
use std::rc::Rc;

/// The key of a request under each rule of a charge plan; `None` for rules that are not shared, or do not apply.
pub type StoreKeys = IdVec<PlanPosition, Option<Rc<str>>>;

/// The window of a shared counter that is open by the gateway's time, and the next one. The store's clock decides which
/// of the two counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreWindow {
    /// How the windows of the counter depend on each other.
    pub kind: WindowKind,
    /// The number of the window, see [`Windows::number_at`]; the next window has the next number. 0 where requests open
    /// windows, and for sliding windows, whose segments the store finds.
    pub number: u64,
    /// The end of the window, Unix milliseconds; where requests open windows: after the start of the first one. Of sliding
    /// windows: the period.
    pub end_ms: u64,
    /// The end of the next window, likewise.
    pub next_end_ms: u64,
}

impl StoreWindow {
    /// The window of a layer at a time; `offset` is the offset of the key, as in [`Windows::window_at`].
    pub fn at(kind: WindowKind, windows: &Windows, now_ms: u64, offset: u64) -> StoreWindow {
        if kind == WindowKind::Sliding {
            return StoreWindow { kind, ..StoreWindow::floating(windows.typical_ms()) };
        }
        let Some(number) = windows.number_at(now_ms, offset) else {
            return StoreWindow::floating(windows.typical_ms());
        };
        let end_ms = windows.window_at(now_ms, offset).end_ms;
        StoreWindow { kind, number, end_ms, next_end_ms: windows.window_at(end_ms, offset).end_ms }
    }

    /// A window of this length that a request opens.
    pub fn floating(period_ms: u64) -> StoreWindow {
        let end_ms = period_ms.max(1);
        StoreWindow { kind: WindowKind::Floating, number: 0, end_ms, next_end_ms: 2 * end_ms }
    }

    /// The length of the next window.
    pub fn length_ms(self) -> u64 {
        self.next_end_ms.saturating_sub(self.end_ms)
    }

    /// Whether the window or the next one is open at `now_ms`.
    pub fn is_known_at(self, now_ms: u64) -> bool {
        matches!(self.kind, WindowKind::Floating | WindowKind::Sliding) || now_ms < self.next_end_ms
    }

    /// Whether a plain window begins after `now_ms`. The lengths of calendar windows differ by an eighth at most.
    pub fn begins_after(self, now_ms: u64) -> bool {
        let longest_ms = self.length_ms() + self.length_ms() / 8;
        self.kind == WindowKind::Plain && self.end_ms.saturating_sub(longest_ms) > now_ms
    }

    /// The window whose key a request at `now_ms` names: a plain counter has a key for each window, others have one.
    pub fn keyed_at(self, now_ms: u64) -> StoreWindow {
        match self.kind {
            WindowKind::Plain if now_ms >= self.end_ms => StoreWindow {
                number: self.number + 1,
                end_ms: self.next_end_ms,
                next_end_ms: self.next_end_ms + self.length_ms(),
                ..self
            },
            _ => self,
        }
    }

    /// The number of the window to which a reply refers, and the time until which the reported usage may count. `mark` is
    /// the number that the store reports, or the start of the window where requests open windows; 0 for plain counters.
    pub fn reported(self, mark: u64) -> (u64, u64) {
        match self.kind {
            WindowKind::Plain | WindowKind::Leased => (self.number, self.end_ms),
            WindowKind::Sliding => (mark, self.segments().expires_ms(mark)),
            WindowKind::Accumulating if mark == self.number => (mark, self.end_ms),
            WindowKind::Accumulating => (mark, self.next_end_ms),
            WindowKind::Floating => (mark, mark.saturating_add(self.length_ms())),
        }
    }

    /// The segments of a sliding window.
    pub fn segments(self) -> Segments {
        Segments { period_ms: self.length_ms() }
    }

    /// By how many tokens a refund may lower the usage of this window or the next one, as the store computes it. The store has counted
    /// `tokens` in the window or segment `number`. `limit`: tokens granted per window.
    pub fn refundable(self, number: u64, limit: u32, tokens: u64, now_ms: u64) -> u64 {
        let not_refundable = match self.kind {
            WindowKind::Plain | WindowKind::Leased if number >= self.number => 0,
            WindowKind::Sliding if self.segments().expires_ms(number) > now_ms => 0,
            WindowKind::Floating if number.saturating_add(self.length_ms()) > now_ms => 0,
            WindowKind::Accumulating => self.number.saturating_sub(number).saturating_mul(limit.into()),
            WindowKind::Plain | WindowKind::Leased | WindowKind::Sliding | WindowKind::Floating => tokens,
        };
        tokens.saturating_sub(not_refundable)
    }

    /// The end of leases on tokens of a window, as [`StoreWindow::reported`] returns it. Tokens of a sliding window are spent
    /// in the segment in which the store counts them.
    pub fn lease_end_ms(self, number: u64, end_ms: u64) -> u64 {
        match self.kind {
            WindowKind::Sliding => self.segments().end_ms(number),
            WindowKind::Plain | WindowKind::Accumulating | WindowKind::Floating | WindowKind::Leased => end_ms,
        }
    }

    /// The number of the window, or of the segment, of which a lease ends at `lease_end_ms`. These windows are those at a time
    /// before that end.
    pub fn number_of_lease(self, lease_end_ms: u64) -> u64 {
        match self.kind {
            WindowKind::Sliding => self.segments().number_at(lease_end_ms.saturating_sub(1)),
            WindowKind::Floating => lease_end_ms.saturating_sub(self.length_ms()),
            WindowKind::Plain | WindowKind::Accumulating | WindowKind::Leased => self.number,
        }
    }
}

/// The parts of counter names that distinguish the windows of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WindowSegments(Vec<(Windows, String)>);

impl WindowSegments {
    /// The segments of all windows of a rule: default, plans and overrides. If all windows are equal, the segments are
    /// empty; otherwise a segment is the period as first configured. Windows that only single clients have come and go: their
    /// segments are `:~` and the windows, and do not depend on other windows.
    pub fn of(rule: &Rule) -> WindowSegments {
        let mut all: Vec<&Limit> = Vec::new();
        for limit in rule.fixed_variants().flatten() {
            if all.iter().all(|other| other.windows != limit.windows) {
                all.push(limit);
            }
        }
        let segment = |limit: &&Limit| {
            let mut segment = String::new();
            if all.len() > 1 {
                segment.push(':');
                percent_encode(limit.period_text.as_bytes(), &mut segment);
                if all.iter().filter(|other| other.period_text == limit.period_text).count() > 1 {
                    push_start(&limit.windows, &mut segment);
                }
            }
            (limit.windows.clone(), segment)
        };
        let mut segments: Vec<(Windows, String)> = all.iter().map(segment).collect();
        for Limit { windows, .. } in rule.client_limits.iter().flat_map(|limits| &limits.plan.layers) {
            if segments.iter().all(|(known, _)| known != windows) {
                let mut segment = String::from(":~");
                percent_encode(windows.text().as_bytes(), &mut segment);
                segments.push((windows.clone(), segment));
            }
        }
        WindowSegments(segments)
    }

    /// The segment of these windows: `:PERIOD`, or empty.
    pub fn segment(&self, windows: &Windows) -> &str {
        self.0.iter().find(|(known, _)| known == windows).map_or("", |(_, segment)| segment)
    }
}

/// Appends the start of windows, to distinguish windows of one period.
fn push_start(windows: &Windows, out: &mut String) {
    match windows {
        Windows::Even { offset_ms: 0, .. } => {}
        Windows::Even { offset_ms, .. } => {
            out.push_str(".from-");
            out.push_str(&offset_ms.to_string());
            out.push_str("ms");
        }
        Windows::Random { .. } => out.push_str(".random"),
        Windows::FirstRequest { .. } => out.push_str(".first-request"),
        Windows::Sliding { .. } => out.push_str(".sliding"),
        Windows::Calendar(calendar) => {
            if let Some((_, zone)) = calendar.name.split_once(' ') {
                out.push('.');
                percent_encode(zone.as_bytes(), out);
            }
        }
    }
}

/// The first part of the names of a key's counters: `key` is `RULE|PART|PART`, percent-encoded, or a name by a
/// [`KeyFormat`](crate::rule::KeyFormat). Shards after the first are keys of their own, which may be in other slots of a cluster.
pub fn counter_name(prefix: &str, key: &str, shard: u32, segment: &str) -> String {
    match shard {
        _ if key.contains(WINDOW_MARK) => key.to_owned(),
        0 => format!("{prefix}:{{{key}}}{segment}"),
        shard => format!("{prefix}:{{{key}|#{shard}}}{segment}"),
    }
}

/// Appends bytes, in which all except letters, digits and `.~-` are percent-encoded.
pub fn percent_encode(bytes: &[u8], out: &mut String) {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".~-".contains(&byte);
    encode_unless(is_plain, bytes, out);
}

/// Appends the key in a name by a [`KeyFormat`](crate::rule::KeyFormat): only bytes outside of visible ASCII, `%` and braces are
/// percent-encoded.
pub fn encode_formatted_key(bytes: &[u8], out: &mut String) {
    encode_unless(|byte| byte.is_ascii_graphic() && !b"%{}".contains(&byte), bytes, out);
}

fn encode_unless(is_plain: impl Fn(u8) -> bool, bytes: &[u8], out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for &byte in bytes {
        if is_plain(byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push(char::from(DIGITS[usize::from(byte >> 4)]));
            out.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::key::{KeyPart, OnMissing};
    use crate::rule::{ClientWindows, KeyFormat, Plan};
    use crate::window::{Calendar, END_MAX_MS};

    const MINUTE_MS: u64 = 60_000;
    const DAY_MS: u64 = 1440 * MINUTE_MS;

    fn rule(layers: Vec<Limit>) -> Rule {
        Rule::new("r", vec![KeyPart::GLOBAL], OnMissing::Never, layers)
    }

    fn limit(text: &str) -> Limit {
        Limit::parse(text).unwrap()
    }

    fn plain(windows: &Windows, now_ms: u64, offset: u64) -> StoreWindow {
        StoreWindow::at(WindowKind::Plain, windows, now_ms, offset)
    }

    #[test]
    fn tokens_of_ended_windows_are_not_refunded() {
        let minute = limit("5/minute").windows;
        // By number of the window, or of the segment, or the start of the window.
        let refundable = |kind, number| {
            let window = StoreWindow::at(kind, &minute, 7 * MINUTE_MS, 0);
            window.refundable(number, 5, 12, 7 * MINUTE_MS)
        };
        let all = |kind, numbers: [u64; 4]| numbers.map(|number| refundable(kind, number));
        assert_eq!(all(WindowKind::Plain, [5, 6, 7, 8]), [0, 0, 12, 12]);
        assert_eq!(all(WindowKind::Accumulating, [4, 5, 6, 7]), [0, 2, 7, 12]);
        assert_eq!(all(WindowKind::Sliding, [46, 47, 48, 56]), [0, 0, 12, 12]);
        let floating = StoreWindow::floating(MINUTE_MS);
        let starts = [6 * MINUTE_MS, 6 * MINUTE_MS + 1];
        assert_eq!(starts.map(|start_ms| floating.refundable(start_ms, 5, 12, 7 * MINUTE_MS)), [0, 12]);
    }

    #[test]
    fn windows_of_single_clients_do_not_rename_others() {
        let mut rule = Rule::new("r", Vec::new(), OnMissing::Skip, vec![limit("100/hour")]);
        let plan = Plan { name: String::new(), layers: vec![limit("9/60m"), limit("5/minute")], concurrent: None };
        rule.client_limits = vec![ClientWindows { plan, during_ms: None }];
        let segments = WindowSegments::of(&rule);
        assert_eq!(segments.segment(&limit("1/hour").windows), "");
        assert_eq!(segments.segment(&limit("1/minute").windows), ":~60000ms");
    }

    #[test]
    fn a_plain_counter_has_a_key_for_each_window() {
        let first = plain(&limit("5/minute").windows, 3 * MINUTE_MS, 0);
        let next = first.keyed_at(4 * MINUTE_MS);
        assert_eq!(
            (first.keyed_at(4 * MINUTE_MS - 1), next),
            (first, plain(&limit("5/minute").windows, 4 * MINUTE_MS, 0))
        );
        assert_eq!((next.reported(0), first.is_known_at(5 * MINUTE_MS - 1)), ((4, 5 * MINUTE_MS), true));
        assert!(!first.is_known_at(5 * MINUTE_MS));
        let account = StoreWindow { kind: WindowKind::Accumulating, ..first };
        assert_eq!(account.keyed_at(4 * MINUTE_MS), account);
        assert_eq!([account.reported(3), account.reported(4)], [(3, 4 * MINUTE_MS), (4, 5 * MINUTE_MS)]);
    }

    #[test]
    fn a_sliding_window_is_as_long_as_its_period() {
        let sliding = StoreWindow::at(WindowKind::Sliding, &Windows::Sliding { period_ms: 800 }, 50, 0);
        assert_eq!((sliding.kind, sliding.length_ms()), (WindowKind::Sliding, 800));
    }

    #[test]
    fn a_window_that_has_not_begun_is_detected() {
        // A month of 28 days before one of 31; the second is open.
        let (kind, end_ms, next_end_ms) = (WindowKind::Plain, 100 * DAY_MS, 131 * DAY_MS);
        let window = StoreWindow { kind, number: 1, end_ms, next_end_ms };
        let ahead = [70, 73].map(|day| window.begins_after(day * DAY_MS));
        assert_eq!((ahead, window.begins_after(40 * DAY_MS)), ([false, false], true));
        let start_ms = end_ms - 31 * DAY_MS * 9 / 8;
        assert_eq!([start_ms - 1, start_ms].map(|now_ms| window.begins_after(now_ms)), [true, false]);
        assert!(!StoreWindow::floating(60).begins_after(0));
    }

    #[test]
    fn the_number_of_a_window_follows_from_time_and_period() {
        let minutes = limit("5/60s").windows;
        let now_ms = 1_700_000_100_000;
        let end_ms = 1_700_000_160_000 - 1_700_000_160_000 % MINUTE_MS;
        let expected =
            StoreWindow { kind: WindowKind::Plain, number: 28_333_335, end_ms, next_end_ms: end_ms + MINUTE_MS };
        assert_eq!(plain(&minutes, now_ms, 7), expected);
        assert_eq!(counter_name("transom", "api|alice", 0, ""), "transom:{api|alice}");

        let late = Windows::Even { period_ms: MINUTE_MS, offset_ms: 30_000 };
        assert_eq!(
            plain(&late, 30_000, 0),
            StoreWindow { kind: WindowKind::Plain, number: 0, end_ms: 90_000, next_end_ms: 150_000 }
        );
        assert_eq!(plain(&late, 89_999, 0).number, 0);
        assert_eq!(plain(&late, 90_000, 0).number, 1);
        assert_eq!(
            plain(&late, 29_999, 0),
            StoreWindow { kind: WindowKind::Plain, number: 0, end_ms: 30_000, next_end_ms: 90_000 }
        );
        let further = Windows::Even { period_ms: MINUTE_MS, offset_ms: 30_000 + 5 * MINUTE_MS };
        assert_eq!(plain(&further, 90_000, 0), plain(&late, 90_000, 0));

        let random = Windows::Random { period_ms: MINUTE_MS };
        assert_eq!(plain(&random, 90_000, 1 << 63), plain(&late, 90_000, 0));
        let floating =
            StoreWindow::at(WindowKind::Floating, &Windows::FirstRequest { period_ms: MINUTE_MS }, 90_000, 0);
        assert_eq!((floating, floating.length_ms()), (StoreWindow::floating(MINUTE_MS), MINUTE_MS));
    }

    #[test]
    fn the_end_of_a_lease_tells_its_window() {
        let even = Windows::Even { period_ms: 800, offset_ms: 300 };
        let kinds = [
            (WindowKind::Plain, even.clone()),
            (WindowKind::Accumulating, even),
            (WindowKind::Floating, Windows::FirstRequest { period_ms: 800 }),
            (WindowKind::Sliding, Windows::Sliding { period_ms: 800 }),
        ];
        for (kind, windows) in kinds {
            let at = StoreWindow::at(kind, &windows, 5_000, 0);
            let mark = match kind {
                WindowKind::Floating => 4_321,
                WindowKind::Sliding => at.segments().number_at(5_000),
                WindowKind::Plain | WindowKind::Accumulating | WindowKind::Leased => at.number,
            };
            let (number, end_ms) = at.reported(mark);
            let lease_end_ms = at.lease_end_ms(number, end_ms);
            let later = StoreWindow::at(kind, &windows, lease_end_ms - 1, 0);
            assert_eq!(later.number_of_lease(lease_end_ms), number, "{kind:?}");
        }
    }

    #[test]
    fn months_are_counted_from_1970() {
        let months = limit("5/month").windows;
        assert_eq!(
            plain(&months, 0, 0),
            StoreWindow { kind: WindowKind::Plain, number: 0, end_ms: 31 * DAY_MS, next_end_ms: 59 * DAY_MS }
        );
        assert_eq!(plain(&months, 31 * DAY_MS, 0).number, 1);
        // 2023-11-14.
        assert_eq!(plain(&months, 1_700_000_000_000, 0).number, (2023 - 1970) * 12 + 10);
    }

    #[test]
    fn the_last_window_has_no_next() {
        let days = limit("5/day").windows;
        let last = plain(&days, END_MAX_MS - 1, 0);
        assert_eq!((last.end_ms, last.next_end_ms), (END_MAX_MS, END_MAX_MS));
    }

    #[test]
    fn only_a_rule_with_several_windows_names_their_periods() {
        let one = WindowSegments::of(&rule(vec![limit("5/minute")]));
        assert_eq!(one.segment(&limit("5/minute").windows), "");
        let mut planned = rule(vec![limit("5/60s")]);
        planned.plans.push(Plan { name: "gold".to_owned(), layers: vec![limit("50/minute")], concurrent: None });
        assert_eq!(WindowSegments::of(&planned).segment(&limit("1/1m").windows), "");
        planned.plans.push(Plan {
            name: "silver".to_owned(),
            layers: vec![limit("50/hour"), limit("9/1m")],
            concurrent: None,
        });
        let several = WindowSegments::of(&planned);
        assert_eq!(several.segment(&limit("1/1m").windows), ":60s");
        assert_eq!(several.segment(&limit("1/60m").windows), ":hour");
    }

    #[test]
    fn windows_of_one_period_are_distinguished_by_their_start() {
        let zoned = |name: &str| Windows::Calendar(Calendar { name: name.to_owned(), ends: Arc::default() });
        let all = [
            (Windows::Even { period_ms: DAY_MS, offset_ms: 0 }, ":day"),
            (Windows::Even { period_ms: DAY_MS, offset_ms: 3_600_000 }, ":day.from-3600000ms"),
            (Windows::Random { period_ms: DAY_MS }, ":day.random"),
            (Windows::FirstRequest { period_ms: DAY_MS }, ":day.first-request"),
            (zoned("day Europe/Paris"), ":day.Europe%2FParis"),
            (zoned("day Etc/GMT+5"), ":day.Etc%2FGMT%2B5"),
        ];
        let layers = all.iter().map(|(windows, _)| Limit { windows: windows.clone(), ..limit("5/day") });
        let random = Limit { windows: Windows::Random { period_ms: MINUTE_MS }, ..limit("5/minute") };
        let segments = WindowSegments::of(&rule(layers.chain([limit("5/month"), random.clone()]).collect()));
        for (windows, expected) in &all {
            assert_eq!(segments.segment(windows), *expected);
        }
        assert_eq!(segments.segment(&limit("5/month").windows), ":month");
        assert_eq!(segments.segment(&random.windows), ":minute");
    }

    #[test]
    fn separators_in_a_key_are_percent_encoded() {
        let mut out = String::new();
        percent_encode(b"a.Z~9-_|{}%:\n\0\xff#\xc3\xa9", &mut out);
        assert_eq!(out, "a.Z~9-%5F%7C%7B%7D%25%3A%0A%00%FF%23%C3%A9");
        assert_eq!(counter_name("p", "r|", 3, ":day"), "p:{r||#3}:day");
    }

    #[test]
    fn a_formatted_name_is_complete_but_for_its_window() {
        let format = KeyFormat { before_key: "a:".to_owned(), after_key: format!(":{WINDOW_MARK}:z") };
        let name = format.name("b_1");
        assert_eq!((counter_name("p", &name, 0, ""), format.head()), (format!("a:b_1:{WINDOW_MARK}:z"), "a:"));
        let mut out = String::new();
        encode_formatted_key(b"a:b_1@x|\xff %{}\0", &mut out);
        assert_eq!(out, "a:b_1@x|%FF%20%25%7B%7D%00");
    }
}
