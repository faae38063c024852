//! Usage that this process counted locally and has reported to the store since, and refunds that wait until a server is reachable.
//! All workers share both: one worker may report, or send, what another one has counted.
//!
//! A charge that is refunded after a report is not in the local counter any more. Local charges of a counter are alike, so its
//! refunds go to the store until as many tokens are refunded as were reported, and to the local counter from then on.
//!
//! A report empties the local counter under the lock of `ReportedUsage`, and notes its tokens there before it releases the lock. A
//! refund takes reported tokens, and refunds the others locally, under the same lock. So it finds its tokens either noted, or
//! still in the local counter.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::fast::FixedState;
use smallvec::SmallVec;

use super::lease_sizing::CounterId;
use super::reconnecting::ServerId;
use super::scripts::{Refund, RefundTarget};

/// Number of locks. Few entries share one, so that a look at all of them takes no time that matters.
const PARTS: usize = 64;
/// Counters of one part with reported usage that are remembered. Refunds of others are lost.
const REPORTED_MAX: usize = 256;
/// Refunds that are kept. Others are lost.
const KEPT_MAX: usize = 65_536;

/// A refund that any worker can send.
pub type SharedRefund = Refund<Box<str>>;

/// Reported usage by counter.
pub struct ReportedUsage {
    parts: [Mutex<Part>; PARTS],
}

#[derive(Default)]
struct Part {
    counters: HashMap<CounterId, CounterReports, FixedState>,
}

#[derive(Default)]
struct CounterReports {
    /// Tokens in reports without a reply.
    in_flight: u64,
    /// As many of them as are refunded when the reply comes.
    early: u64,
    /// Where reported tokens are counted, with the end of their window.
    reported: SmallVec<[(SharedRefund, u64); 1]>,
}

/// The reports of a counter, for a report that begins, or a refund: none of the other takes place meanwhile.
pub struct LockedReports<'a> {
    part: MutexGuard<'a, Part>,
    id: CounterId,
}

impl Default for ReportedUsage {
    fn default() -> ReportedUsage {
        ReportedUsage { parts: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl ReportedUsage {
    /// The local counter is emptied, or local charges are refunded, while the result exists.
    pub fn lock(&self, id: CounterId) -> LockedReports<'_> {
        LockedReports { part: self.lock_part(id), id }
    }

    /// Records a reported part. Returns how many of its tokens are to be refunded now.
    pub fn end(&self, id: CounterId, target: &RefundTarget, tokens: u64, now_ms: u64) -> u64 {
        let mut part = self.lock_part(id);
        let Some(reports) = part.counters.get_mut(&id) else { return 0 };
        reports.in_flight = reports.in_flight.saturating_sub(tokens);
        let early = reports.early.min(tokens);
        reports.early -= early;
        reports.reported.retain(|(refund, end_ms)| refund.tokens > 0 && *end_ms > now_ms);
        match reports.reported.iter_mut().find(|(refund, _)| {
            *refund.key_base == *target.key_base && refund.number == target.number && refund.limit == target.limit
        }) {
            Some((refund, _)) => refund.tokens += tokens - early,
            None => {
                let refund = target.refund(tokens - early).with_key(|key| Box::from(&**key));
                reports.reported.push((refund, target.end_ms));
            }
        }
        early
    }

    /// A part was not reported, or may not have been.
    pub fn fail(&self, id: CounterId, tokens: u64) {
        if let Some(reports) = self.lock_part(id).counters.get_mut(&id) {
            reports.in_flight = reports.in_flight.saturating_sub(tokens);
            reports.early = reports.early.min(reports.in_flight);
        }
    }

    fn lock_part(&self, id: CounterId) -> MutexGuard<'_, Part> {
        self.parts[id.0 as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LockedReports<'_> {
    /// Takes the refunds of up to `tokens` reported tokens of open windows, the latest first. Returns how many tokens the
    /// refunds, and those of reports in flight, amount to.
    pub fn take(&mut self, tokens: u64, now_ms: u64) -> (Vec<SharedRefund>, u64) {
        let (mut refunds, mut missing) = (Vec::new(), tokens);
        let Some(reports) = self.part.counters.get_mut(&self.id) else { return (refunds, 0) };
        for (refund, _) in reports.reported.iter_mut().rev().filter(|(_, end_ms)| *end_ms > now_ms) {
            let part = refund.tokens.min(missing);
            if part > 0 {
                refund.tokens -= part;
                missing -= part;
                refunds.push(Refund { tokens: part, ..refund.clone() });
            }
        }
        let early = missing.min(reports.in_flight - reports.early);
        reports.early += early;
        (refunds, tokens - missing + early)
    }

    /// Notes a report of the tokens by which the counter was reduced.
    pub fn send(&mut self, tokens: u64, now_ms: u64) {
        let counters = &mut self.part.counters;
        if counters.len() >= REPORTED_MAX {
            let is_open = |(refund, end_ms): &(SharedRefund, u64)| refund.tokens > 0 && *end_ms > now_ms;
            counters.retain(|_, reports| reports.in_flight > 0 || reports.reported.iter().any(is_open));
        }
        if counters.len() < REPORTED_MAX || counters.contains_key(&self.id) {
            counters.entry(self.id).or_default().in_flight += tokens;
        }
    }
}

/// Refunds that could not be sent.
#[derive(Default)]
pub struct KeptRefunds(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    refunds: Vec<SharedRefund>,
    /// Servers to which workers are sending some.
    sending: Vec<ServerId>,
    /// Refunds that these workers have taken.
    taken: usize,
}

/// Kept refunds that one worker sends to a server. Those that are left are kept again when it is dropped.
pub struct SendingRefunds<'a> {
    kept: &'a KeptRefunds,
    server: ServerId,
    taken: usize,
    refunds: Vec<SharedRefund>,
}

impl KeptRefunds {
    /// Keeps refunds for later, as far as there is space; returns the others, which are lost.
    #[must_use]
    pub fn keep(&self, mut refunds: Vec<Refund>) -> Vec<Refund> {
        let mut kept = self.lock();
        let space = KEPT_MAX.saturating_sub(kept.refunds.len() + kept.taken);
        let lost = refunds.split_off(space.min(refunds.len()));
        kept.refunds.extend(refunds.into_iter().map(|refund| refund.with_key(|key| Box::from(&**key))));
        lost
    }

    /// Whether none is kept or being sent.
    pub fn is_empty(&self) -> bool {
        let kept = self.lock();
        kept.refunds.is_empty() && kept.taken == 0
    }

    /// The distinct values of `server_of` over all key bases.
    pub fn servers(&self, server_of: impl Fn(&str) -> ServerId) -> HashSet<ServerId> {
        self.lock().refunds.iter().map(|refund| server_of(&refund.key_base)).collect()
    }

    /// Takes the kept refunds of a server. `None` while another worker is sending some of them.
    pub fn take(&self, server: ServerId, server_of: impl Fn(&str) -> ServerId) -> Option<SendingRefunds<'_>> {
        let mut kept = self.lock();
        if kept.sending.contains(&server) {
            return None;
        }
        let refunds: Vec<_> = kept.refunds.extract_if(.., |refund| server_of(&refund.key_base) == server).collect();
        kept.sending.push(server);
        kept.taken += refunds.len();
        Some(SendingRefunds { kept: self, server, taken: refunds.len(), refunds })
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SendingRefunds<'_> {
    /// The key of a refund of the next call.
    pub fn next_key(&self) -> Option<Rc<str>> {
        self.refunds.last().map(|refund| Rc::from(&*refund.key_base))
    }

    /// Removes the refunds of the next call. They are not kept again: whether a call is executed is not always known.
    pub fn next_call(&mut self, max: usize, can_share_a_call: impl Fn(&str, &str) -> bool) -> Vec<Refund> {
        let Some(last) = self.refunds.last() else { return Vec::new() };
        let joins = |refund: &&SharedRefund| can_share_a_call(&last.key_base, &refund.key_base);
        let count = self.refunds.iter().rev().take(max).take_while(joins).count();
        let call = self.refunds.split_off(self.refunds.len() - count);
        call.into_iter().map(|refund| refund.with_key(|key| Rc::from(&**key))).collect()
    }
}

impl Drop for SendingRefunds<'_> {
    fn drop(&mut self) {
        let mut kept = self.kept.lock();
        kept.sending.retain(|server| *server != self.server);
        kept.taken -= self.taken;
        kept.refunds.append(&mut self.refunds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_config::redis::Node;
    use transom_limiter::window_kind::WindowKind;

    const ID: CounterId = (1, 2);

    fn target(number: u64, end_ms: u64) -> RefundTarget {
        RefundTarget {
            key_base: "k".into(),
            kind: WindowKind::Sliding,
            number,
            limit: 9,
            used_max: None,
            counter: None,
            end_ms,
        }
    }

    fn taken(usage: &ReportedUsage, tokens: u64, now_ms: u64) -> (Vec<(u64, u64)>, u64) {
        let (refunds, sum) = usage.lock(ID).take(tokens, now_ms);
        (refunds.iter().map(|refund| (refund.number, refund.tokens)).collect(), sum)
    }

    #[test]
    fn reported_tokens_are_refunded_once() {
        let usage = ReportedUsage::default();
        for (number, tokens) in [(7, 5), (8, 2)] {
            usage.lock(ID).send(tokens, 50);
            assert_eq!(usage.end(ID, &target(number, 100 + number), tokens, 50), 0);
        }
        assert_eq!(taken(&usage, 3, 50), (vec![(8, 2), (7, 1)], 3));
        assert_eq!(taken(&usage, 3, 107), (vec![], 0));
        assert_eq!(taken(&usage, 9, 50), (vec![(7, 4)], 4));
        assert_eq!(taken(&usage, 9, 50), (vec![], 0));
    }

    #[test]
    fn a_refund_during_a_report_waits_for_the_reply() {
        let usage = ReportedUsage::default();
        usage.lock(ID).send(5, 50);
        assert_eq!((taken(&usage, 2, 50), taken(&usage, 9, 50)), ((vec![], 2), (vec![], 3)));
        assert_eq!(usage.end(ID, &target(1, 100), 4, 50), 4);
        usage.fail(ID, 1);
        assert_eq!(taken(&usage, 9, 50), (vec![], 0));
        usage.lock(ID).send(5, 50);
        assert_eq!(usage.end(ID, &target(1, 100), 5, 50), 0);
    }

    #[test]
    fn a_bounded_number_of_counters_is_remembered_until_their_windows_end() {
        let usage = ReportedUsage::default();
        let report = |id: CounterId, now_ms: u64| {
            usage.lock(id).send(1, now_ms);
            usage.end(id, &target(1, 100), 1, now_ms);
            usage.lock(id).take(1, now_ms).1
        };
        for tag in 0..REPORTED_MAX as u64 {
            usage.lock((1, tag)).send(1, 50);
            assert_eq!(usage.end((1, tag), &target(1, 60), 1, 50), 0);
        }
        assert_eq!((report((1, 9999), 59), report((2, 9999), 59)), (0, 1));
        assert_eq!(report((1, 9999), 60), 1);
    }

    #[test]
    fn one_worker_at_a_time_sends_kept_refunds_of_a_server() {
        let (one, other) = (ServerId::ONLY, ServerId::of(&Node::Tcp { host: "other".to_owned(), port: 1 }));
        let server_of = |key: &str| if key == "k" { one } else { other };
        let kept = KeptRefunds::default();
        let elsewhere = RefundTarget { key_base: "elsewhere".into(), ..target(3, 100) };
        let lost = kept.keep(vec![target(1, 100).refund(3), elsewhere.refund(5), target(2, 100).refund(4)]);
        assert!(lost.is_empty());
        assert_eq!(kept.servers(server_of), HashSet::from([one, other]));
        let mut sending = kept.take(one, server_of).expect("no worker is sending");
        assert!(kept.take(one, server_of).is_none());
        assert_eq!(kept.take(other, server_of).map(|sending| sending.refunds.len()), Some(1));
        // What was not sent is kept again.
        let call = sending.next_call(1, |_, _| true);
        assert_eq!(call.iter().map(|refund| refund.tokens).collect::<Vec<_>>(), [4]);
        drop(sending);
        let mut sending = kept.take(one, server_of).expect("no worker is sending");
        assert_eq!(sending.next_call(9, |_, _| true).iter().map(|refund| refund.tokens).collect::<Vec<_>>(), [3]);
        assert_eq!((sending.next_key(), kept.servers(server_of)), (None, HashSet::from([other])));
    }
}
