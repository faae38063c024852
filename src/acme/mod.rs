//! Certificates that an authority issues over ACME (RFC 8555): a thread for each order obtains the certificate, and renews it. Handshakes
//! read the certificate in use, and the pending challenges; no request waits for the thread.
//!
//! A certificate is renewed after two thirds of its lifetime, or when the authority says so (ARI, RFC 9773). While orders fail, the
//! certificate stays in use, and the pauses between orders grow.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, CertificateIdentifier, ChallengeType, ExternalAccountKey,
    Identifier, NewAccount, NewOrder, Order, OrderStatus, RetryPolicy,
};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use live_certificate::LiveCertificate;
use storage::Storage;
use transom_config::acme::Acme;
use transom_config::certificate::Certificate;
use transom_rules::acme_challenges::{Challenge, PendingChallenges};
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::AcmeMetrics;

mod http_client;
pub mod live_certificate;
pub mod storage;

/// Limit for one order.
const ORDER_TIMEOUT: Duration = Duration::from_secs(300);
/// How long other gateways leave an order to the one that has claimed it: longer than it can take.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(600);
/// Limit to give up the claim at the end.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit for the authority to validate the challenges, or to issue the certificate.
const POLL_TIMEOUT: Duration = Duration::from_secs(90);
/// The longest pause between two looks at the clock and the storage: steps of the clock, and a renewal by another process.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// How often an order of another gateway is looked at.
const ORDERED_ELSEWHERE_PAUSE: Duration = Duration::from_secs(2);
/// Time from the first failure to the next order. It grows fourfold with each failure: Let's Encrypt permits five failures an hour.
const RETRY_AFTER: Duration = Duration::from_secs(30);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(6 * 60 * 60);
/// How long a renewal time that the authority has stated is used, where it does not say.
const SUGGESTION_PERIOD: Duration = Duration::from_secs(6 * 60 * 60);
/// The bounds of what it says.
const SUGGESTION_PERIODS: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(24 * 60 * 60)];

/// The beginning of the line before a stored certificate.
const DIRECTORY_LINE: &str = "# issued by ";

/// Orders one certificate.
pub struct CertificateOrder {
    pub acme: Acme,
    pub live: Arc<LiveCertificate>,
    pub challenges: Arc<PendingChallenges>,
    /// Whether challenges over HTTP can arrive: there is a listener without TLS.
    pub has_http: bool,
    pub metrics: AcmeMetrics,
    pub clock: Clock,
}

/// What the thread knows.
struct Orderer {
    order: CertificateOrder,
    storage: Storage,
    in_use: Option<IssuedCertificate>,
    suggestion: Option<Suggestion>,
    /// Orders that failed since the last success.
    failures: u32,
    /// Unix seconds before which no order is tried again.
    retry_at_s: i64,
    /// The end of the last claim of another gateway, Unix seconds.
    claimed_until_s: i64,
    /// Whether the certificate in use could not be stored.
    is_unsaved: bool,
    /// The account, if it could not be stored.
    unsaved_account: RefCell<Option<String>>,
    /// Why the storage cannot be used, as was logged.
    storage_error: Option<String>,
}

/// A certificate with its key, also as PEM behind a line with the directory of the authority.
struct IssuedCertificate {
    text: String,
    certificate: Certificate,
}

/// The time of the renewal that the authority suggests.
struct Suggestion {
    renew_at_s: i64,
    /// When to ask again, Unix seconds.
    valid_until_s: i64,
}

impl CertificateOrder {
    /// Obtains and renews the certificate until the sender of `stop` is dropped. `loaded` is dropped once the storage was read.
    pub async fn run(self, storage: Storage, loaded: std::sync::mpsc::SyncSender<()>, stop: oneshot::Receiver<()>) {
        let mut loaded = Some(loaded);
        let changed = storage.changed();
        let mut orderer = Orderer {
            order: self,
            storage,
            in_use: None,
            suggestion: None,
            failures: 0,
            retry_at_s: 0,
            claimed_until_s: 0,
            is_unsaved: false,
            unsaved_account: RefCell::default(),
            storage_error: None,
        };
        let renew = async {
            orderer.load_copy();
            loop {
                orderer.load().await;
                loaded.take();
                let pause = orderer.renew_if_due().await;
                tokio::select! {
                    () = sleep(pause) => {}
                    () = changed.notified() => {}
                }
            }
        };
        tokio::select! {
            () = renew => {}
            _ = stop => {}
        }
        // With other settings, an order may succeed at once.
        let _ = timeout(STOP_TIMEOUT, orderer.storage.end_order()).await;
    }
}

impl Orderer {
    fn now_s(&self) -> i64 {
        i64::try_from(self.order.clock.wall_ms() / 1000).unwrap_or(i64::MAX)
    }

    /// The names, for messages.
    fn names(&self) -> String {
        self.order.acme.domains.join(", ")
    }

    /// Uses the certificate of the storage.
    async fn load(&mut self) {
        let loaded = self.storage.load_certificate().await;
        self.log_storage(loaded.as_ref().err());
        if let Ok(Some(text)) = loaded {
            self.use_stored(text);
        }
    }

    /// Uses the copy of the certificate until the store was read.
    fn load_copy(&mut self) {
        match self.storage.load_copy() {
            Ok(Some(text)) => self.use_stored(text),
            Ok(None) => {}
            Err(error) => {
                tracing::error!(domains = self.names(), "the copy of the certificate cannot be read: {error}")
            }
        }
    }

    /// Uses a certificate of the storage or of the copy, if it is another one.
    fn use_stored(&mut self, text: String) {
        if self.in_use.as_ref().is_some_and(|in_use| in_use.text == text) {
            return;
        }
        match Certificate::parse(&self.names(), text.as_bytes()) {
            // The one in use could not be stored.
            Ok(stored)
                if self.in_use.as_ref().is_some_and(|used| used.certificate.not_before_s > stored.not_before_s) => {}
            Ok(certificate) => self.use_certificate(IssuedCertificate { text, certificate }),
            Err(why) => tracing::error!(domains = self.names(), "the stored certificate cannot be used: {why}"),
        }
    }

    /// Logs when the storage begins or ceases to fail.
    fn log_storage(&mut self, error: Option<&String>) {
        if self.storage_error.as_ref() == error {
            return;
        }
        let domains = self.names();
        match error {
            Some(error) => tracing::error!(domains, "the storage of the certificate cannot be used: {error}"),
            None => tracing::info!(domains, "the storage of the certificate can be used again"),
        }
        self.storage_error = error.cloned();
    }

    fn use_certificate(&mut self, issued: IssuedCertificate) {
        self.order.live.replace(&issued.certificate);
        if let Err(error) = self.storage.save_copy(&issued.text) {
            tracing::error!(domains = self.names(), "the certificate cannot be copied: {error}");
        }
        self.suggestion = None;
        self.in_use = Some(issued);
    }

    /// Orders a certificate, if there is none or it is due for renewal. Returns the time to the next look.
    async fn renew_if_due(&mut self) -> Duration {
        self.in_use.iter().for_each(|in_use| self.order.metrics.in_use(in_use.certificate.not_after_s));
        if self.is_unsaved {
            self.save().await;
        }
        self.ask_for_suggestion().await;
        if let Some(wait) = self.time_to_order() {
            return wait.min(PAUSE_MAX);
        }
        match self.storage.begin_order(&self.order.acme.domains, self.now_s(), CLAIM_TIMEOUT).await {
            Ok(None) => {}
            Ok(Some(until_s)) => {
                if std::mem::replace(&mut self.claimed_until_s, until_s) != until_s {
                    let seconds = until_s - self.now_s();
                    tracing::info!(domains = self.names(), "another gateway may order the certificate for {seconds} s");
                }
                return ORDERED_ELSEWHERE_PAUSE;
            }
            Err(error) => {
                self.log_storage(Some(&error));
                return ORDERED_ELSEWHERE_PAUSE;
            }
        }
        // Another gateway may have ordered it meanwhile.
        self.load().await;
        if let Some(wait) = self.time_to_order() {
            self.storage.end_order().await;
            return wait.min(PAUSE_MAX);
        }
        let mut tokens = Vec::new();
        let ordered = timeout(ORDER_TIMEOUT, self.order_certificate(&mut tokens)).await;
        let ordered = ordered.unwrap_or_else(|_elapsed| Err(String::from("the authority did not issue it in time")));
        for token in tokens {
            self.order.challenges.remove(&token);
            self.storage.withdraw(&token).await;
        }
        match ordered {
            Ok(issued) => self.order_succeeded(issued).await,
            Err(why) => self.order_failed(&why).await,
        }
    }

    async fn order_succeeded(&mut self, issued: IssuedCertificate) -> Duration {
        let (domains, directory) = (self.names(), &self.order.acme.directory);
        tracing::info!(domains, directory, renewed = self.in_use.is_some(), "a certificate was issued");
        // The next order waits, even if the dates or the authority say that it is due at once.
        let lifetime_s = issued.certificate.not_after_s - issued.certificate.not_before_s;
        (self.failures, self.retry_at_s) = (0, self.now_s().saturating_add((lifetime_s / 100).max(1)));
        self.use_certificate(issued);
        self.save().await;
        self.storage.end_order().await;
        self.order.metrics.issued();
        Duration::ZERO
    }

    async fn order_failed(&mut self, why: &str) -> Duration {
        let pause = retry_after(self.failures).mul_f64(0.75 + fastrand::f64() * 0.25);
        self.failures = self.failures.saturating_add(1);
        self.retry_at_s = self.now_s().saturating_add(pause.as_secs().cast_signed());
        self.storage.pause_orders(self.retry_at_s).await;
        self.order.metrics.failed();
        let effect = match &self.in_use {
            Some(_) => "the old one stays in use",
            None => "handshakes for its names fail",
        };
        let (domains, retry_s) = (self.names(), pause.as_secs());
        tracing::warn!(domains, retry_s, "no certificate was issued: {why}; {effect}");
        pause.min(PAUSE_MAX)
    }

    /// How long the next order waits; `None`: it is due.
    fn time_to_order(&self) -> Option<Duration> {
        let renewal = |in_use: &IssuedCertificate| match in_use.is_of(&self.order.acme.directory) {
            true => renewal_time(&in_use.certificate, self.suggestion.as_ref()),
            false => 0,
        };
        let wait_s = self.in_use.as_ref().map_or(0, renewal).max(self.retry_at_s) - self.now_s();
        (wait_s > 0).then(|| Duration::from_secs(wait_s.unsigned_abs()))
    }

    /// Stores the certificate in use. A failure is repeated later.
    async fn save(&mut self) {
        let Some(in_use) = &self.in_use else { return };
        let saved = self.storage.save_certificate(in_use.text.clone()).await;
        self.is_unsaved = saved.is_err();
        self.log_storage(saved.as_ref().err());
    }

    /// Asks the authority when it suggests to renew the certificate, if it is time to ask.
    async fn ask_for_suggestion(&mut self) {
        let Some(IssuedCertificate { certificate, .. }) = &self.in_use else { return };
        let now_s = self.now_s();
        if self.suggestion.as_ref().is_some_and(|known| now_s < known.valid_until_s) {
            return;
        }
        let asked = match identifier(certificate) {
            Some(id) => timeout(POLL_TIMEOUT, self.suggested_time(&id)).await.ok().flatten(),
            None => None,
        };
        let (renew_at_s, valid_for) = asked.unwrap_or((renewal_time(certificate, None), SUGGESTION_PERIOD));
        let [least, most] = SUGGESTION_PERIODS;
        let valid_for_s = valid_for.clamp(least, most).as_secs().cast_signed();
        self.suggestion = Some(Suggestion { renew_at_s, valid_until_s: now_s.saturating_add(valid_for_s) });
    }

    /// A random time of the suggested window, so that not all certificates are renewed at once, in Unix seconds, and how long to
    /// use it. `None`: the authority has no suggestions, or cannot be reached.
    async fn suggested_time(&self, id: &CertificateIdentifier<'_>) -> Option<(i64, Duration)> {
        let account = self.account().await.ok()?;
        let (info, valid_for) = account.renewal_info(id).await.ok()?;
        let (start_s, end_s) =
            (info.suggested_window.start.unix_timestamp(), info.suggested_window.end.unix_timestamp());
        Some((start_s + fastrand::i64(0..=(end_s - start_s).max(0)), valid_for))
    }

    /// The account at the authority; a new one if there is none yet.
    async fn account(&self) -> Result<Account, String> {
        let acme = &self.order.acme;
        let builder = || Account::builder_with_http(Box::new(http_client::HttpsClient::new(acme)));
        let unsaved = self.unsaved_account.borrow().clone();
        if let Some(text) = unsaved.clone()
            && self.storage.save_account(acme, text).await.is_ok()
        {
            self.unsaved_account.replace(None);
        }
        if let Some(text) = unsaved.or(self.storage.load_account(acme).await?) {
            let credentials: AccountCredentials =
                serde_json::from_str(&text).map_err(|error| format!("the stored account cannot be read: {error}"))?;
            return builder().from_credentials(credentials).await.map_err(shown);
        }
        let contact = acme.email.as_ref().map(|email| format!("mailto:{email}"));
        let contact: Vec<&str> = contact.iter().map(String::as_str).collect();
        let account = NewAccount { contact: &contact, terms_of_service_agreed: true, only_return_existing: false };
        let bound = acme.external_account.as_ref();
        let bound = bound.map(|bound| ExternalAccountKey::new(bound.key_id.clone(), &bound.hmac_key.0));
        let created = builder().create(&account, acme.directory.clone(), bound.as_ref()).await;
        let (account, credentials) = created.map_err(shown)?;
        let text = serde_json::to_string(&credentials).map_err(|error| error.to_string())?;
        // The next attempt uses the same account, and does not register another one.
        self.unsaved_account.replace(Some(text.clone()));
        self.storage.save_account(acme, text).await?;
        self.unsaved_account.replace(None);
        Ok(account)
    }

    /// Orders the certificate. An error says why there is none. `tokens`: of the challenges that were published.
    async fn order_certificate(&self, tokens: &mut Vec<String>) -> Result<IssuedCertificate, String> {
        let acme = &self.order.acme;
        let account = self.account().await?;
        let mut order = self.begin_order(&account).await.map_err(shown)?;
        self.answer_challenges(&mut order, tokens).await?;
        let polling = RetryPolicy::new().timeout(POLL_TIMEOUT);
        match order.poll_ready(&polling).await {
            Ok(OrderStatus::Ready | OrderStatus::Valid) => {}
            Ok(_) | Err(instant_acme::Error::Api(_)) => return Err(rejection(&mut order).await),
            Err(error) => return Err(shown(error)),
        }
        let key = order.finalize().await.map_err(shown)?;
        let chain = order.poll_certificate(&polling).await.map_err(shown)?;
        let text = format!("{DIRECTORY_LINE}{}\n{}\n{key}", acme.directory, chain.trim_end());
        let certificate = Certificate::parse(&self.names(), text.as_bytes())?;
        if certificate.not_after_s <= self.now_s() {
            return Err(String::from("the certificate that was issued has expired already: check the clock"));
        }
        match acme.domains.iter().find(|domain| !certificate.dns_names.contains(domain)) {
            Some(missing) => Err(format!("the certificate that was issued lacks the name `{missing}`")),
            None => Ok(IssuedCertificate { text, certificate }),
        }
    }

    /// The order, which names the certificate that it renews (RFC 9773, section 5). An authority that does not accept that, for example
    /// because another order has renewed it, gets an order without.
    async fn begin_order(&self, account: &Account) -> Result<Order, instant_acme::Error> {
        let acme = &self.order.acme;
        let identifiers: Vec<Identifier> = acme.domains.iter().cloned().map(Identifier::Dns).collect();
        let new_order = || match &acme.profile {
            Some(profile) => NewOrder::new(&identifiers).profile(profile),
            None => NewOrder::new(&identifiers),
        };
        let renewed = self.in_use.as_ref().filter(|in_use| in_use.is_of(&acme.directory));
        if let Some(id) = renewed.and_then(|in_use| identifier(&in_use.certificate)) {
            match account.new_order(&new_order().replaces(id)).await {
                // The authority has no renewal information.
                Err(instant_acme::Error::Unsupported(_)) => {}
                Err(error) if !is_rate_limit(&error) => {
                    tracing::info!(domains = self.names(), "orders without the certificate that it renews: {error}");
                }
                other => return other,
            }
        }
        account.new_order(&new_order()).await
    }

    /// Publishes the answers to the challenges of an order, and has the authority validate them. Each further attempt uses the other
    /// type of challenge, where both can be answered.
    async fn answer_challenges(&self, order: &mut Order, tokens: &mut Vec<String>) -> Result<(), String> {
        let is_http = self.order.has_http && self.failures.is_multiple_of(2);
        let types = match is_http {
            true => [ChallengeType::Http01, ChallengeType::TlsAlpn01],
            false => [ChallengeType::TlsAlpn01, ChallengeType::Http01],
        };
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization = authorization.map_err(shown)?;
            let domain = authorization.identifier().to_string();
            match authorization.status {
                AuthorizationStatus::Valid => continue,
                AuthorizationStatus::Pending => {}
                status => return Err(format!("the authorization of `{domain}` is {status:?}")),
            }
            let offered =
                |wanted: &&ChallengeType| authorization.challenges.iter().any(|known| known.r#type == **wanted);
            let usable = types.iter().filter(|wanted| self.order.has_http || **wanted != ChallengeType::Http01);
            let Some(wanted) = usable.clone().find(offered).cloned() else {
                return Err(format!("the authority offers no challenge over HTTP or TLS for `{domain}`"));
            };
            let Some(mut challenge) = authorization.challenge(wanted) else { continue };
            let answer = Challenge {
                domain,
                token: challenge.token.clone(),
                key_authorization: challenge.key_authorization().as_str().to_owned(),
            };
            tokens.push(answer.token.clone());
            self.storage.publish(&answer).await?;
            self.order.challenges.add(answer);
            challenge.set_ready().await.map_err(shown)?;
        }
        Ok(())
    }
}

impl IssuedCertificate {
    /// Whether it comes from the authority of this directory, as far as is known.
    fn is_of(&self, directory: &str) -> bool {
        let issuer = self.text.lines().next().and_then(|line| line.strip_prefix(DIRECTORY_LINE));
        issuer.is_none_or(|issuer| issuer == directory)
    }
}

/// When a certificate is renewed, Unix seconds.
fn renewal_time(certificate: &Certificate, suggestion: Option<&Suggestion>) -> i64 {
    let Certificate { not_before_s, not_after_s, .. } = *certificate;
    let lifetime_s = not_after_s - not_before_s;
    let own = not_before_s + lifetime_s / 3 * 2;
    suggestion.map_or(own, |suggestion| suggestion.renew_at_s.min(not_after_s - lifetime_s / 10))
}

/// The identifier of a certificate in requests about its renewal (RFC 9773, section 4.1).
fn identifier(certificate: &Certificate) -> Option<CertificateIdentifier<'static>> {
    let identifier = CertificateIdentifier::try_from(certificate.key.cert.first()?).ok()?;
    Some(identifier.into_owned())
}

/// The pause after a number of failures in a row.
fn retry_after(failures: u32) -> Duration {
    RETRY_AFTER.saturating_mul(4_u32.saturating_pow(failures)).min(RETRY_AFTER_MAX)
}

/// Why the authority did not validate an order: what it says of the first challenge that failed.
async fn rejection(order: &mut Order) -> String {
    let mut authorizations = order.authorizations();
    while let Some(Ok(mut authorization)) = authorizations.next().await {
        let domain = authorization.identifier().to_string();
        if authorization.refresh().await.is_err() {
            continue;
        }
        let mut errors = authorization.challenges.iter().filter_map(|challenge| challenge.error.as_ref());
        if let Some(error) = errors.next() {
            return format!("the authority could not validate `{domain}`: {error}");
        }
    }
    String::from("the authority has rejected the order")
}

fn is_rate_limit(error: &instant_acme::Error) -> bool {
    matches!(error, instant_acme::Error::Api(problem)
        if problem.r#type.as_deref() == Some("urn:ietf:params:acme:error:rateLimited"))
}

fn shown(error: instant_acme::Error) -> String {
    error.to_string()
}
