//! The reference limiter: one map from keys to remaining tokens, one thread, no eviction.
//!
//! It counts remaining tokens, where the table counts used ones, and knows nothing of words, slots, overflow or shards.

use std::collections::HashMap;

use transom_limiter::limit::Limit;
use transom_limiter::window::Windows;

/// What is known of one key in one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Account {
    /// Tokens left; below 0 if windows to come owe some.
    pub left: i128,
    /// End of the window for which that is said, Unix milliseconds.
    pub end_ms: u64,
}

/// A layer that a request is charged in.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The account.
    pub key: String,
    /// Position of the rule.
    pub rule: usize,
    pub limit: Limit,
    /// Where the key's windows start if they start at random, in units of 2^-64 of the period.
    pub offset: u64,
    pub cost: u32,
    /// How long its rule lets a request wait.
    pub max_delay_ms: Option<u64>,
    /// Whether its rule counts refused requests.
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

impl Wish {
    fn cost(&self) -> i128 {
        self.cost.into()
    }

    fn capacity(&self) -> i128 {
        self.limit.capacity.into()
    }

    /// End of the window that a moment falls into.
    pub fn end_ms(&self, now_ms: u64) -> u64 {
        match &self.limit.windows {
            Windows::Even { period_ms, offset_ms } => grid_end_ms(now_ms, *period_ms, *offset_ms),
            Windows::Random { period_ms } => {
                let start = (u128::from(self.offset) * u128::from(*period_ms)) >> 64;
                grid_end_ms(now_ms, *period_ms, start as u64)
            }
            Windows::FirstRequest { period_ms } => now_ms + period_ms,
            Windows::Calendar(calendar) => *calendar.ends.iter().find(|end| **end > now_ms).expect("it reaches far"),
        }
    }

    /// End of the window after the one that ends then.
    fn next_ms(&self, end_ms: u64) -> u64 {
        match &self.limit.windows {
            Windows::Calendar(_) => self.end_ms(end_ms),
            windows => end_ms + windows.period_ms().expect("all but calendars are even"),
        }
    }
}

/// The first moment after `now_ms` that is a whole number of periods from `start_ms`.
fn grid_end_ms(now_ms: u64, period_ms: u64, start_ms: u64) -> u64 {
    let (now, period, start) = (i128::from(now_ms), i128::from(period_ms), i128::from(start_ms));
    (start + ((now - start).div_euclid(period) + 1) * period) as u64
}

impl Oracle {
    /// What is left for a request at `now_ms`: every window that has passed granted its tokens.
    pub fn account(&self, wish: &Wish, now_ms: u64) -> Account {
        let fresh = Account { left: wish.capacity(), end_ms: wish.end_ms(now_ms) };
        let Some(mut account) = self.accounts.get(&wish.key).copied() else { return fresh };
        while account.end_ms <= now_ms && account.left < wish.capacity() {
            account.left = wish.capacity().min(account.left + i128::from(wish.limit.tokens));
            account.end_ms = wish.next_ms(account.end_ms);
        }
        // A key that has used nothing is the same as one never seen.
        if account.left == wish.capacity() { fresh } else { account }
    }

    fn take(&mut self, wish: &Wish, tokens: i128, now_ms: u64) {
        let account = self.account(wish, now_ms);
        if tokens > 0 {
            self.accounts.insert(wish.key.clone(), Account { left: account.left - tokens, ..account });
        }
    }

    /// Charges a request in all of its layers, now or in windows to come, or in none.
    pub fn decide(&mut self, wishes: &[Wish], reserves: bool, may_wait: bool, now_ms: u64) -> Expected {
        let lacks = |oracle: &Oracle, wish: &Wish| oracle.account(wish, now_ms).left < wish.cost();
        if !wishes.iter().any(|wish| lacks(self, wish)) {
            wishes.iter().for_each(|wish| self.take(wish, wish.cost(), now_ms));
            return Expected::Admitted;
        }
        if may_wait && let Some((until_ms, places)) = self.places(wishes, reserves, now_ms) {
            for (wish, account) in wishes.iter().zip(places).filter(|(wish, _)| wish.cost > 0) {
                self.accounts.insert(wish.key.clone(), account);
            }
            return Expected::DelayedUntil(until_ms);
        }
        for wish in wishes.iter().filter(|wish| wish.count_refused) {
            let left = self.account(wish, now_ms).left.max(0);
            let unopened = matches!(wish.limit.windows, Windows::FirstRequest { .. }) && left == wish.capacity();
            if !unopened {
                self.take(wish, left.min(wish.cost()), now_ms);
            }
        }
        Expected::Refused
    }

    /// When a layer has room for a request, if nobody else asks; `None` if it never has.
    pub fn opens_ms(&self, wish: &Wish, now_ms: u64) -> Option<u64> {
        let mut account = self.account(wish, now_ms);
        let mut opens_ms = now_ms;
        while account.left < wish.cost() {
            if wish.cost() > wish.capacity() {
                return None;
            }
            opens_ms = account.end_ms;
            account.left += i128::from(wish.limit.tokens);
            account.end_ms = wish.next_ms(account.end_ms);
        }
        Some(opens_ms)
    }

    /// When a request may pass that has to wait, and what its accounts then stand at.
    fn places(&self, wishes: &[Wish], reserves: bool, now_ms: u64) -> Option<(u64, Vec<Account>)> {
        // Each rule that is full has a turn of its own; the request passes when the last of them has come.
        let mut turns: HashMap<usize, u64> = HashMap::new();
        for wish in wishes.iter().filter(|wish| self.account(wish, now_ms).left < wish.cost()) {
            let opens_ms = self.opens_ms(wish, now_ms)?;
            let may_wait = wish.max_delay_ms.is_some_and(|most| opens_ms - now_ms <= most);
            let may_reserve = wish.max_delay_ms.is_none() && reserves && wish.limit.reserve > 0;
            if !may_wait && !may_reserve {
                return None;
            }
            let turn_ms = turns.entry(wish.rule).or_insert(now_ms);
            *turn_ms = (*turn_ms).max(opens_ms);
        }
        let place = |wish: &Wish| match turns.get(&wish.rule) {
            Some(turn_ms) => self.place(wish, now_ms, *turn_ms),
            // A rule that has room is charged now.
            None => {
                let account = self.account(wish, now_ms);
                Some(Account { left: account.left - wish.cost(), ..account })
            }
        };
        let places: Option<Vec<Account>> = wishes.iter().map(place).collect();
        Some((turns.values().copied().max().unwrap_or(now_ms), places?))
    }

    fn place(&self, wish: &Wish, now_ms: u64, until_ms: u64) -> Option<Account> {
        let account = self.account(wish, now_ms);
        let (mut granted, mut end_ms) = (0, account.end_ms);
        while end_ms <= until_ms {
            granted += i128::from(wish.limit.tokens);
            end_ms = wish.next_ms(end_ms);
        }
        if account.left < wish.cost() && wish.limit.reserve > 0 {
            // One account with the windows to come: it may go below 0 so far.
            let left = account.left - wish.cost();
            return (wish.cost == 0 || left >= -i128::from(wish.limit.reserve)).then_some(Account { left, ..account });
        }
        // What the window it waits for will hold, less the cost; seen from now, less what is granted until then.
        let then = wish.capacity().min(account.left + granted) - wish.cost();
        (then >= 0).then_some(Account { left: then - granted, ..account })
    }
}
