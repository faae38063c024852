//! Scenarios: limits, locations of counters, modes of rules, the number of allowed events, and deliberate mistakes.

use transom_limiter::rule::Sharing;

use crate::state::{Budget, Each};

const KINDS: [Each<bool>; 3] = [[true, true], [true, false], [false, true]];

#[derive(Clone, Copy, Debug)]
pub struct Scene {
    pub limits: Each<u8>,
    pub sharing: Each<Sharing>,
    /// Whether both counters lie in one slot, so that one call decides on both.
    pub together: bool,
    pub budget: Budget,
    /// Which counters a request may be counted in.
    pub kinds: &'static [Each<bool>],
    pub mistake: Option<Mistake>,
}

/// What the gateway does not do; each has to be found out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    DepositsTwice,
    /// What is given back stays in the purse.
    GivesWhatItKeeps,
    /// A call is sent again whose fate is unknown.
    FetchesAgain,
    GivesAgain,
    /// Who gets no answer is let through as if he had been counted.
    TakesSilenceForYes,
    /// What a window left is spent in the next.
    CarriesOver,
    /// What was charged for a request that another counter refuses is left there.
    LeavesDoomedCharges,
    /// What was charged for somebody who went away is left there.
    LeavesCharges,
    /// The store is not told what is known of it, after another has taken its place.
    ForgetsWithTheStore,
    /// Tokens of a window that is over go back to the next.
    GivesToTheNextWindow,
    /// Whether a window that was used up has room again is never asked.
    NeverAsksAgain,
}

impl Scene {
    /// Two leased counters in one slot; nothing goes wrong.
    pub fn leased() -> Scene {
        let budget = Budget { requests: 2, ..Budget::default() };
        Scene { limits: [1, 2], sharing: [Sharing::Lease; 2], together: true, budget, kinds: &KINDS, mistake: None }
    }

    pub fn exact() -> Scene {
        let budget = Budget { requests: 3, ..Budget::default() };
        Scene { limits: [2, 1], sharing: [Sharing::Exact; 2], budget, ..Scene::leased() }
    }

    /// The narrow one leased, the wide one exact.
    pub fn mixed() -> Scene {
        Scene { sharing: [Sharing::Lease, Sharing::Exact], ..Scene::exact() }.with(|budget| budget.requests = 2)
    }

    pub fn apart(self) -> Scene {
        Scene { together: false, ..self }
    }

    pub fn with(self, change: impl FnOnce(&mut Budget)) -> Scene {
        let mut budget = self.budget;
        change(&mut budget);
        Scene { budget, ..self }
    }

    pub fn by_mistake(self, mistake: Mistake) -> Scene {
        Scene { mistake: Some(mistake), ..self }
    }

    /// One token of each.
    pub fn tight(self) -> Scene {
        Scene { limits: [1, 1], ..self }
    }

    /// Fewer kinds of requests, where there is much else to be tried.
    pub fn plainer(self) -> Scene {
        Scene { kinds: &KINDS[..1], ..self }
    }

    pub fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }
}
