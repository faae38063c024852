//! The reference limiter: one map from keys to remaining tokens, one thread, no eviction.
//!
//! It counts remaining tokens, where the table counts used ones. It knows nothing of words, slots, overflow or shards.

use std::collections::HashMap;

use transom_limiter::limit::Limit;
use transom_limiter::window::Windows;

/// The state of one key in one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Account {
    /// Tokens left; negative if later windows owe tokens.
    pub left: i128,
    /// The end of the window to which `left` refers, Unix milliseconds.
    pub end_ms: u64,
}

/// The request to one layer.
#[derive(Clone, Debug)]
pub struct LayerRequest {
    /// Identifies the account.
    pub key: String,
    /// The position of the rule.
    pub rule: usize,
    pub limit: Limit,
    /// The offset of the key's random windows, in units of 2^-64 of the period.
    pub offset: u64,
    pub cost: u32,
    /// Whether the cost is known after the response only.
    pub is_settled_later: bool,
    /// The longest delay that the rule allows.
    pub max_delay_ms: Option<u64>,
    /// Whether the rule counts refused requests.
    pub count_refused: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    Admitted,
    DelayedUntil(u64),
    Refused,
}

#[derive(Default)]
pub struct Oracle {
    pub accounts: HashMap<String, Account>,
}

impl LayerRequest {
    fn cost(&self) -> i128 {
        self.cost.into()
    }

    /// The tokens that have to be left. A request that takes nothing needs none, unless its cost may follow.
    pub fn least_left(&self) -> i128 {
        match (self.cost, self.is_settled_later) {
            (0, false) => i128::MIN,
            (0, true) => 1,
            (cost, _) => cost.into(),
        }
    }

    fn capacity(&self) -> i128 {
        self.limit.capacity().into()
    }

    /// The end of the window that contains a time.
    pub fn end_ms(&self, now_ms: u64) -> u64 {
        match &self.limit.windows {
            Windows::Even { period_ms, offset_ms } => grid_end_ms(now_ms, *period_ms, *offset_ms),
            Windows::Random { period_ms } => {
                let start = (u128::from(self.offset) * u128::from(*period_ms)) >> 64;
                grid_end_ms(now_ms, *period_ms, start as u64)
            }
            Windows::FirstRequest { period_ms } => now_ms + period_ms,
            Windows::Sliding { .. } => unreachable!("sliding windows have a reference of their own"),
            Windows::Calendar(calendar) => {
                *calendar.ends.iter().find(|end| **end > now_ms).expect("the calendar reaches far enough")
            }
        }
    }

    /// The end of the window after the one that ends at `end_ms`.
    fn next_ms(&self, end_ms: u64) -> u64 {
        match &self.limit.windows {
            Windows::Calendar(_) => self.end_ms(end_ms),
            windows => end_ms + windows.period_ms().expect("all windows except calendars have one length"),
        }
    }
}

/// The first time after `now_ms` that is a whole number of periods from `start_ms`.
fn grid_end_ms(now_ms: u64, period_ms: u64, start_ms: u64) -> u64 {
    let (now, period, start) = (i128::from(now_ms), i128::from(period_ms), i128::from(start_ms));
    (start + ((now - start).div_euclid(period) + 1) * period) as u64
}

impl Oracle {
    /// The account at `now_ms`, after every window that has ended granted its tokens.
    pub fn account(&self, layer_request: &LayerRequest, now_ms: u64) -> Account {
        let fresh = Account { left: layer_request.capacity(), end_ms: layer_request.end_ms(now_ms) };
        let Some(mut account) = self.accounts.get(&layer_request.key).copied() else { return fresh };
        while account.end_ms <= now_ms && account.left < layer_request.capacity() {
            account.left = layer_request.capacity().min(account.left + i128::from(layer_request.limit.tokens));
            account.end_ms = layer_request.next_ms(account.end_ms);
        }
        // A key with no usage equals a new key.
        if account.left == layer_request.capacity() { fresh } else { account }
    }

    fn charge(&mut self, layer_request: &LayerRequest, tokens: i128, now_ms: u64) {
        let account = self.account(layer_request, now_ms);
        if tokens > 0 {
            self.accounts.insert(layer_request.key.clone(), Account { left: account.left - tokens, ..account });
        }
    }

    /// Charges a request in all layers or in none, in the current window or in later ones.
    pub fn decide(&mut self, layer_requests: &[LayerRequest], reserves: bool, may_wait: bool, now_ms: u64) -> Expected {
        let is_full = |oracle: &Oracle, layer_request: &LayerRequest| {
            oracle.account(layer_request, now_ms).left < layer_request.least_left()
        };
        if !layer_requests.iter().any(|layer_request| is_full(self, layer_request)) {
            layer_requests.iter().for_each(|layer_request| self.charge(layer_request, layer_request.cost(), now_ms));
            return Expected::Admitted;
        }
        if may_wait && let Some((until_ms, reservations)) = self.reservations(layer_requests, reserves, now_ms) {
            for (layer_request, account) in
                layer_requests.iter().zip(reservations).filter(|(layer_request, _)| layer_request.cost > 0)
            {
                self.accounts.insert(layer_request.key.clone(), account);
            }
            return Expected::DelayedUntil(until_ms);
        }
        for layer_request in layer_requests.iter().filter(|layer_request| layer_request.count_refused) {
            let left = self.account(layer_request, now_ms).left.max(0);
            let unopened =
                matches!(layer_request.limit.windows, Windows::FirstRequest { .. }) && left == layer_request.capacity();
            if !unopened {
                self.charge(layer_request, left.min(layer_request.cost()), now_ms);
            }
        }
        Expected::Refused
    }

    /// The time at which a layer has enough tokens if there are no other requests; `None` if never.
    pub fn opens_ms(&self, layer_request: &LayerRequest, now_ms: u64) -> Option<u64> {
        let mut account = self.account(layer_request, now_ms);
        let mut opens_ms = now_ms;
        while account.left < layer_request.least_left() {
            if layer_request.least_left() > layer_request.capacity() {
                return None;
            }
            opens_ms = account.end_ms;
            account.left += i128::from(layer_request.limit.tokens);
            account.end_ms = layer_request.next_ms(account.end_ms);
        }
        Some(opens_ms)
    }

    /// The time at which a delayed request is admitted, and the accounts after its charges.
    fn reservations(
        &self,
        layer_requests: &[LayerRequest],
        reserves: bool,
        now_ms: u64,
    ) -> Option<(u64, Vec<Account>)> {
        // Each full rule has its own admission time. The request is admitted at the latest of them.
        let mut admission_times: HashMap<usize, u64> = HashMap::new();
        for layer_request in layer_requests
            .iter()
            .filter(|layer_request| self.account(layer_request, now_ms).left < layer_request.least_left())
        {
            let opens_ms = self.opens_ms(layer_request, now_ms)?;
            let may_wait = layer_request.max_delay_ms.is_some_and(|most| opens_ms - now_ms <= most);
            let may_reserve = layer_request.max_delay_ms.is_none() && reserves && layer_request.limit.reserve > 0;
            if !may_wait && !may_reserve {
                return None;
            }
            let admit_at_ms = admission_times.entry(layer_request.rule).or_insert(now_ms);
            *admit_at_ms = (*admit_at_ms).max(opens_ms);
        }
        let reservation = |layer_request: &LayerRequest| match admission_times.get(&layer_request.rule) {
            Some(admit_at_ms) => self.reservation(layer_request, now_ms, *admit_at_ms),
            // A rule with enough tokens is charged now.
            None => {
                let account = self.account(layer_request, now_ms);
                Some(Account { left: account.left - layer_request.cost(), ..account })
            }
        };
        let reservations: Option<Vec<Account>> = layer_requests.iter().map(reservation).collect();
        Some((admission_times.values().copied().max().unwrap_or(now_ms), reservations?))
    }

    fn reservation(&self, layer_request: &LayerRequest, now_ms: u64, until_ms: u64) -> Option<Account> {
        let account = self.account(layer_request, now_ms);
        let (mut granted, mut end_ms) = (0, account.end_ms);
        while end_ms <= until_ms {
            granted += i128::from(layer_request.limit.tokens);
            end_ms = layer_request.next_ms(end_ms);
        }
        if account.left < layer_request.least_left() && layer_request.limit.reserve > 0 {
            // The current window and later ones share an account, which may be negative down to the reserve.
            let left = account.left - layer_request.cost();
            return (layer_request.cost == 0 || left >= -i128::from(layer_request.limit.reserve))
                .then_some(Account { left, ..account });
        }
        // The tokens of the window in which the request is admitted, less the cost; from now on, those granted until
        // then are owed.
        let then = layer_request.capacity().min(account.left + granted) - layer_request.cost();
        (then + layer_request.cost() >= layer_request.least_left())
            .then_some(Account { left: then - granted, ..account })
    }
}
