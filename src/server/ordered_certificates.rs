//! The threads that order certificates over ACME, one for each `acme` of a listener.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::error::StartError;
use crate::acme::CertificateOrder;
use crate::acme::live_certificate::LiveCertificate;
use crate::acme::storage::{ChallengeObserver, MAP, Storage};
use transom_config::Config;
use transom_config::acme::{Acme, AcmeStorage};
use transom_config::listen::Listen;
use transom_config::redis::StoreConfig;
use transom_rules::acme_challenges::PendingChallenges;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::events::AcmeMetrics;
use transom_store::map_follower::{MapCopy, MapFollower};

/// How long a start waits for the stored certificates.
const LOAD_TIMEOUT: Duration = Duration::from_secs(2);

/// The orders of a configuration.
#[derive(Default)]
pub struct OrderedCertificates {
    /// What handshakes use, one per entry of [`Listen::tls_listeners`]; `None` without an order.
    pub live: Vec<Option<Arc<LiveCertificate>>>,
    pub challenges: Arc<PendingChallenges>,
    threads: Vec<OrderThread>,
}

/// What an order depends on: a thread continues while it stays.
#[derive(Clone, PartialEq)]
struct OrderSettings {
    acme: Acme,
    /// Of an order with `storage = "shared"`.
    store: Option<StoreConfig>,
    /// Whether there is a listener without TLS.
    has_http: bool,
}

/// A thread that orders. It ends when this is dropped.
struct OrderThread {
    settings: OrderSettings,
    live: Arc<LiveCertificate>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl OrderedCertificates {
    /// What handshakes use under the first configuration, whose orders do not run yet.
    pub fn of(listen: &Listen) -> (OrderedCertificates, Vec<Option<Arc<LiveCertificate>>>) {
        let ordered = OrderedCertificates::default();
        let live = ordered.live(listen);
        (ordered, live)
    }

    /// What handshakes use under a configuration: the certificates of the same orders, and of former orders for a name meanwhile.
    pub fn live(&self, listen: &Listen) -> Vec<Option<Arc<LiveCertificate>>> {
        let live = |acme: &Acme| {
            let same = self.threads.iter().find(|former| former.settings.acme == *acme);
            same.map_or_else(|| self.new_live(acme), |same| Arc::clone(&same.live))
        };
        listen.tls_listeners().map(|https| https.acme.as_ref().map(live)).collect()
    }

    fn new_live(&self, acme: &Acme) -> Arc<LiveCertificate> {
        let has_name = |former: &&OrderThread| former.live.domains.contains(&acme.domains[0]);
        let current = self.threads.iter().find(has_name).and_then(|former| former.live.current());
        LiveCertificate::new(&acme.domains, &self.challenges, current)
    }

    /// Starts the orders of a configuration, keeps those that run with the same settings, and ends the others.
    pub fn use_orders(
        &mut self,
        config: &Config,
        live: Vec<Option<Arc<LiveCertificate>>>,
        registry: &Arc<Registry>,
        clock: &Clock,
    ) -> Result<(), StartError> {
        let mut former = std::mem::take(&mut self.threads);
        for (https, live) in config.listen.tls_listeners().zip(&live) {
            let (Some(acme), Some(live)) = (&https.acme, live) else { continue };
            let store = config.counters.shared.clone().filter(|_| acme.storage == AcmeStorage::Shared);
            let settings = OrderSettings { acme: acme.clone(), store, has_http: !config.listen.http.is_empty() };
            match former.iter().position(|running| running.settings == settings) {
                Some(same) => self.threads.push(former.swap_remove(same)),
                None => self.threads.push(self.start(settings, live, registry, clock)?),
            }
        }
        self.live = live;
        former.into_iter().for_each(OrderThread::finish);
        Ok(())
    }

    /// Waits until the thread has read the stored certificate, for a moment.
    fn start(
        &self,
        settings: OrderSettings,
        live: &Arc<LiveCertificate>,
        registry: &Arc<Registry>,
        clock: &Clock,
    ) -> Result<OrderThread, StartError> {
        let OrderSettings { acme, store, has_http } = settings.clone();
        let order = CertificateOrder {
            metrics: AcmeMetrics::new(registry, &acme.domains[0]),
            live: Arc::clone(live),
            challenges: Arc::clone(&self.challenges),
            has_http,
            clock: clock.clone(),
            acme,
        };
        let (stop, stopped) = oneshot::channel();
        let (loaded, is_loaded) = mpsc::sync_channel(1);
        let run = move || async move {
            match (&order.acme.storage, store) {
                (AcmeStorage::Shared, Some(store)) => {
                    let (follower, map) = MapFollower::new(&store, MAP, MapCopy::default(), order.clock.clone());
                    let changed = Arc::<Notify>::default();
                    let storage = Storage::shared(map, &order.acme, Arc::clone(&changed));
                    let mut observer = ChallengeObserver {
                        challenges: Arc::clone(&order.challenges),
                        changed,
                        tokens: BTreeSet::new(),
                    };
                    let (_stop_following, following) = oneshot::channel();
                    tokio::select! {
                        () = follower.run(&mut observer, following) => {}
                        () = order.run(storage, loaded, stopped) => {}
                    }
                }
                (AcmeStorage::Directory(path), _) => {
                    let storage = Storage::directory(path.clone(), &order.acme);
                    order.run(storage, loaded, stopped).await;
                }
                // The configuration check rejects it.
                (AcmeStorage::Shared, None) => {}
            }
        };
        let thread = super::spawn(String::from("acme"), run)?;
        // An error means that the thread needs longer, or has ended.
        let _ = is_loaded.recv_timeout(LOAD_TIMEOUT);
        Ok(OrderThread { settings, live: Arc::clone(live), stop, thread })
    }

    /// Ends all orders.
    pub fn finish(self) {
        self.threads.into_iter().for_each(OrderThread::finish);
    }
}

impl OrderThread {
    fn finish(self) {
        drop(self.stop);
        super::join(self.thread);
    }
}
