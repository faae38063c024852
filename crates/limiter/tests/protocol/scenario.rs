//! Scenarios: limits, locations of counters, modes of rules, the number of allowed events, and deliberate mistakes.

use transom_limiter::rule::Sharing;

use crate::state::{Budget, Each};

const KINDS: [Each<bool>; 3] = [[true, true], [true, false], [false, true]];

#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub limits: Each<u8>,
    pub sharing: Each<Sharing>,
    /// Whether the windows slide: the two windows are then segments, and all tokens of both count until the end.
    pub is_sliding: bool,
    /// Whether both counters are in one hash slot, so that one call decides on both.
    pub same_slot: bool,
    pub budget: Budget,
    /// The sets of counters that a request may charge.
    pub request_kinds: &'static [Each<bool>],
    pub mistake: Option<Mistake>,
}

/// Mistakes that the gateway does not make. The exploration must find each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    DepositTwice,
    /// Returned tokens stay in the lease.
    ReturnWithoutWithdrawing,
    /// A call with an unknown result is sent again.
    ResendCall,
    ResendRefund,
    /// A request without a reply is admitted as if it had been charged.
    AdmitWithoutReply,
    /// Tokens left in one window are spent in the next.
    CarryTokensOver,
    /// The charges of a request that another counter refuses are not refunded.
    KeepChargesOfRefused,
    /// The charges of a request whose client left are not refunded.
    KeepChargesOfCancelled,
    /// After a failover, the gateway does not report the known usage to the new server.
    ForgetKnownUsage,
    /// Tokens of a window that has ended are returned to the next window.
    RefundToNextWindow,
    /// A gateway never fetches again for a counter that was full.
    NeverRecheck,
}

impl Scenario {
    /// Two leased counters in one slot, without failures.
    pub fn leased() -> Scenario {
        let budget = Budget { requests: 2, ..Budget::default() };
        Scenario {
            limits: [1, 2],
            sharing: [Sharing::Lease; 2],
            is_sliding: false,
            same_slot: true,
            budget,
            request_kinds: &KINDS,
            mistake: None,
        }
    }

    pub fn exact() -> Scenario {
        let budget = Budget { requests: 3, ..Budget::default() };
        Scenario { limits: [2, 1], sharing: [Sharing::Exact; 2], budget, ..Scenario::leased() }
    }

    /// The narrow counter is leased, the wide one exact.
    pub fn mixed() -> Scenario {
        Scenario { sharing: [Sharing::Lease, Sharing::Exact], ..Scenario::exact() }
            .with_budget(|budget| budget.requests = 2)
    }

    pub fn sliding(self) -> Scenario {
        Scenario { is_sliding: true, ..self }
    }

    pub fn in_separate_slots(self) -> Scenario {
        Scenario { same_slot: false, ..self }
    }

    pub fn with_budget(self, change: impl FnOnce(&mut Budget)) -> Scenario {
        let mut budget = self.budget;
        change(&mut budget);
        Scenario { budget, ..self }
    }

    pub fn with_mistake(self, mistake: Mistake) -> Scenario {
        Scenario { mistake: Some(mistake), ..self }
    }

    /// A limit of one token for each counter.
    pub fn one_token_each(self) -> Scenario {
        Scenario { limits: [1, 1], ..self }
    }

    /// All requests charge both counters, to keep the number of states small.
    pub fn one_request_kind(self) -> Scenario {
        Scenario { request_kinds: &KINDS[..1], ..self }
    }

    pub fn has_mistake(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }
}
