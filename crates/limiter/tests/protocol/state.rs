//! The complete state of two gateways and a store, small enough to be compared, with the bookkeeping that properties
//! need.
//!
//! Only the store changes its state here, as its two scripts do.

/// A counter of one client, and one of all clients.
pub const NARROW: usize = 0;
pub const WIDE: usize = 1;
pub const COUNTERS: [usize; 2] = [NARROW, WIDE];
pub const GATEWAYS: usize = 2;

/// One value per counter.
pub type Each<T> = [T; 2];
/// One number per window and counter.
pub type Windows = [Each<u8>; 2];
/// The number of a window: 0 or 1.
pub type Window = u8;

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct State {
    pub store: Store,
    pub gateways: [Gateway; GATEWAYS],
    /// The calls in flight between gateways and store.
    pub calls: Vec<Call>,
    pub ghost: Ghost,
    pub budget: Budget,
    /// A property that a step violated.
    pub broken: Option<&'static str>,
}

/// How many events of each kind may still happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Budget {
    pub requests: u8,
    /// Background fetches: before tokens are missing, or to check whether a full counter has tokens again.
    pub background: u8,
    /// Calls or replies that are lost.
    pub losses: u8,
    /// Requests whose wait times out, or whose client leaves.
    pub impatient: u8,
    pub refunds: u8,
    pub kills: u8,
    pub failovers: u8,
    /// Servers that restart without their data.
    pub restarts: u8,
    pub resets: u8,
    pub windows: u8,
}

impl Budget {
    /// Whether a server may lose counted usage.
    pub fn forgets(&self) -> bool {
        self.failovers > 0 || self.restarts > 0
    }
}

/// Ghost state: bookkeeping for the properties, which neither gateways nor store can read.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ghost {
    pub admitted: Windows,
    /// Tokens that the store counts, and that no gateway will ever spend.
    pub lost: Windows,
    /// Tokens that the store has granted and no longer counts.
    pub forgotten: Windows,
    /// How many calls that charge were executed more than once.
    pub counted_twice: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Store {
    pub is_sliding: bool,
    pub window: Window,
    pub used: Windows,
    /// The usage before the last write, which is the state of a replica.
    pub before: Windows,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Gateway {
    pub window: Window,
    pub lease: Each<(Window, u8)>,
    pub known_usage: Each<Option<(Window, u8)>>,
    /// Whether a former server reported the known usage.
    pub stale: Each<bool>,
    pub requests: Vec<Request>,
    /// The charges of the last admitted request; `true`: from a lease.
    pub last_charges: Each<Option<(Window, bool)>>,
    /// Tokens refunded or reset in the store after it reported the known usage.
    pub refunded_since: Each<u8>,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Request {
    pub id: u8,
    /// The counters that the request charges.
    pub counters: Each<bool>,
    pub stage: Stage,
    /// Fetched tokens that the table could not store.
    pub in_hand: Each<Option<Window>>,
    /// Tokens taken from leases before the store decides about the other counters.
    pub charged: Each<Option<Window>>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Stage {
    Ready,
    /// Waits until a fetch for this counter is complete.
    WaitsForTokens(usize),
    WaitsForStore,
}

/// A call of the store.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Call {
    /// The gateway that sent the call; `None` if it was killed.
    pub by: Option<usize>,
    pub kind: CallKind,
    pub stage: CallStage,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CallKind {
    /// Fetches tokens for leases. `later`: the counters of the next call.
    Fetch { args: AcquireArgs, later: Each<bool>, need: u8 },
    /// The store decides a request. `done`: the windows in which earlier calls charged.
    Charge { request: Option<u8>, args: AcquireArgs, later: Each<bool>, done: Each<Option<Window>> },
    /// Refunds tokens of one counter, and then continues a request.
    Refund { counter: usize, window: Window, tokens: u8, after: Option<(u8, AfterRefund)> },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AcquireArgs {
    pub counters: Each<bool>,
    pub window: Window,
    pub need: u8,
    pub want: u8,
    pub used_min: Each<u8>,
    /// The usage that the gateway knew when it sent the call, less the tokens refunded since.
    pub known: Each<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AfterRefund {
    /// In the window of the request.
    Refuse(Window),
    Retry,
    Unavailable,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CallStage {
    Sent,
    Executed {
        reply: Reply,
        /// Tokens refunded after the execution.
        refunded_since: Each<u8>,
        /// Whether a failover followed the execution.
        stale: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reply {
    /// The tokens granted, and the usage afterwards.
    Granted(Each<u8>, Each<u8>),
    Refused(Each<u8>),
    OtherWindow(Window),
    Refunded,
}

impl Store {
    /// What acquire.lua does for plain and sliding windows: it grants all counters or none, in the window of the later
    /// clock. Beyond the need it grants at most the `part`-th part of the remaining tokens. `args` then name that window.
    pub fn acquire(&mut self, args: &mut AcquireArgs, limits: Each<u8>, part: u8, same_slot: bool) -> Reply {
        let open = self.window.max(args.window);
        if self.is_sliding {
            args.window = open;
        } else if args.window < open {
            return Reply::OtherWindow(open);
        }
        let known = COUNTERS.map(|counter| self.counted(&self.used, open, counter));
        let used_of_requested =
            |used: Each<u8>| COUNTERS.map(|counter| if args.counters[counter] { used[counter] } else { 0 });
        let requested = || COUNTERS.into_iter().filter(|counter| args.counters[*counter]);
        let raised = |counter: usize| known[counter].max(args.used_min[counter]);
        if requested().any(|counter| raised(counter) + args.need > limits[counter]) {
            return Reply::Refused(used_of_requested(known));
        }
        let (mut granted, mut used, before) = ([0; 2], known, self.used);
        for counter in requested() {
            let spare = limits[counter] - raised(counter) - args.need;
            granted[counter] = args.need + (args.want - args.need).min(spare / part);
            if granted[counter] > 0 {
                used[counter] = raised(counter) + granted[counter];
                self.used[usize::from(open)][counter] += used[counter] - known[counter];
            }
        }
        if before != self.used {
            self.replicate(before, args.counters, same_slot);
        }
        Reply::Granted(granted, used_of_requested(used))
    }

    /// What refund.lua does for plain windows. Returns the refunded tokens, at most the usage.
    pub fn refund(&mut self, window: Window, counter: usize, tokens: u8, same_slot: bool) -> u8 {
        let window = usize::from(window);
        let refunded = tokens.min(self.used[window][counter]);
        if refunded > 0 {
            let before = self.used;
            self.used[window][counter] -= refunded;
            self.replicate(before, [counter == NARROW, counter == WIDE], same_slot);
        }
        refunded
    }

    /// A replica misses only the last write.
    fn replicate(&mut self, before: Windows, written: Each<bool>, same_slot: bool) {
        for counter in COUNTERS.into_iter().filter(|counter| same_slot || written[*counter]) {
            self.before[0][counter] = before[0][counter];
            self.before[1][counter] = before[1][counter];
        }
    }

    /// Keys expire with their windows, unless they slide.
    pub fn end_window(&mut self) {
        self.window = 1;
        if !self.is_sliding {
            self.used[0] = [0; 2];
            self.before[0] = [0; 2];
        }
    }

    /// Whether tokens of a window count.
    pub fn counts(&self, window: Window) -> bool {
        self.is_sliding || window >= self.window
    }

    /// The tokens of one counter that limit a window: those of the window, or of both if windows slide.
    pub fn counted(&self, of: &Windows, window: Window, counter: usize) -> u8 {
        if self.is_sliding { of[0][counter] + of[1][counter] } else { of[usize::from(window)][counter] }
    }
}

impl State {
    /// As [`State::outstanding`], of all windows that limit a window.
    pub fn counted_outstanding(&self, window: Window, counter: usize) -> u8 {
        let all = [0, 1].map(|window| COUNTERS.map(|counter| self.outstanding(window, counter)));
        self.store.counted(&all, window, counter)
    }

    /// Tokens of a window that may still be spent or refunded: in leases, held by undecided requests, and in calls.
    pub fn outstanding(&self, window: Window, counter: usize) -> u8 {
        let is_here = |of: &Option<Window>| u8::from(*of == Some(window));
        let at_gateways = self.gateways.iter().map(|gateway| {
            let (of, lease) = gateway.lease[counter];
            let in_requests =
                |request: &Request| is_here(&request.in_hand[counter]) + is_here(&request.charged[counter]);
            (if of == window { lease } else { 0 }) + gateway.requests.iter().map(in_requests).sum::<u8>()
        });
        at_gateways.sum::<u8>() + self.calls.iter().map(|call| call.carries(window, counter)).sum::<u8>()
    }
}

impl Gateway {
    pub fn free_id(&self) -> u8 {
        (0..).find(|id| self.requests.iter().all(|request| request.id != *id)).unwrap_or(u8::MAX)
    }
}

impl Call {
    fn carries(&self, window: Window, counter: usize) -> u8 {
        let granted = match (&self.kind, &self.stage) {
            (CallKind::Fetch { args, .. } | CallKind::Charge { args, .. }, CallStage::Executed { reply, .. }) => {
                match reply {
                    Reply::Granted(granted, _) if args.window == window && args.counters[counter] => granted[counter],
                    _ => 0,
                }
            }
            (CallKind::Refund { counter: of, window: from, tokens, .. }, CallStage::Sent)
                if (*of, *from) == (counter, window) =>
            {
                *tokens
            }
            _ => 0,
        };
        let done = match &self.kind {
            CallKind::Charge { done, .. } => u8::from(done[counter] == Some(window)),
            _ => 0,
        };
        granted + done
    }

    /// Whether the call, or a later one of the same fetch, fetches tokens of a counter.
    pub fn fetches_for(&self, gateway: usize, counter: usize) -> bool {
        match &self.kind {
            CallKind::Fetch { args, later, .. } => {
                self.by == Some(gateway) && (args.counters[counter] || later[counter])
            }
            _ => false,
        }
    }
}
