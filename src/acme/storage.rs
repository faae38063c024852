//! Where account, certificate and key of an order are kept: a directory, or the store that gateways share.
//!
//! In the store, a gateway claims an order before it begins it, so that one of them orders the certificate. It publishes the
//! challenges there, because the authority may ask any of the gateways.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::atomic_file;
use transom_config::acme::Acme;
use transom_rules::acme_challenges::{Challenge, PendingChallenges};
use transom_store::map_follower::{ChangeError, MapCopy, MapObserver, SharedMap, Update};
use transom_store::shared_map::{Changed, Precondition};

/// The name of the data in the store.
pub const MAP: &str = "acme";
/// What the names of challenges in the store begin with.
const CHALLENGE: &str = "challenge/";
/// The time in which other gateways read a challenge that was published.
const PUBLISH_DELAY: Duration = Duration::from_secs(1);
/// How long a write waits for another process that writes the same file.
const SAVE_PATIENCE: Duration = Duration::from_secs(1);

/// The storage of one order.
pub struct Storage {
    place: Place,
    /// The directory of the copy of the certificate.
    copy: Option<PathBuf>,
    changed: Arc<Notify>,
}

enum Place {
    Directory { path: PathBuf, order: String },
    Shared(SharedOrder),
}

/// An order in the store.
struct SharedOrder {
    map: SharedMap,
    order: String,
    /// Of this process.
    claimant: String,
}

/// The claim of a gateway to order a certificate.
#[derive(Serialize, Deserialize)]
struct Claim {
    claimant: String,
    /// Unix seconds.
    until_s: i64,
}

/// A challenge in the store; its token is in the name of its entry.
#[derive(Serialize, Deserialize)]
struct StoredChallenge {
    domain: String,
    key_authorization: String,
}

/// Passes the challenges of the store on to this gateway, and wakes the thread of the order.
pub struct ChallengeObserver {
    pub challenges: Arc<PendingChallenges>,
    pub changed: Arc<Notify>,
    /// Of the challenges of the store.
    pub tokens: BTreeSet<String>,
}

impl Storage {
    pub fn directory(path: PathBuf, acme: &Acme) -> Storage {
        Storage { place: Place::Directory { path, order: order_name(acme) }, copy: None, changed: Arc::default() }
    }

    /// `changed`: notified when the map changes.
    pub fn shared(map: SharedMap, acme: &Acme, changed: Arc<Notify>) -> Storage {
        let claimant = format!("{:016x}", fastrand::u64(..));
        let place = Place::Shared(SharedOrder { map, order: order_name(acme), claimant });
        Storage { place, copy: acme.copy.clone(), changed }
    }

    /// Notified when others may have changed what is stored.
    pub fn changed(&self) -> Arc<Notify> {
        Arc::clone(&self.changed)
    }

    /// The certificate of the order, with its key.
    pub async fn load_certificate(&self) -> Result<Option<String>, String> {
        self.load(&self.certificate_name()).await
    }

    /// The certificate of the copy, if there is one.
    pub fn load_copy(&self) -> Result<Option<String>, String> {
        self.copy.as_ref().map_or(Ok(None), |directory| load_file(directory, &self.certificate_name()))
    }

    /// Copies the certificate in use, if there is a directory for it.
    pub fn save_copy(&self, text: &str) -> Result<(), String> {
        match &self.copy {
            Some(directory) if self.load_copy()?.as_deref() != Some(text) => {
                save_file(directory, &self.certificate_name(), text)
            }
            _ => Ok(()),
        }
    }

    pub async fn save_certificate(&self, text: String) -> Result<(), String> {
        self.save(&self.certificate_name(), text).await
    }

    pub async fn load_account(&self, acme: &Acme) -> Result<Option<String>, String> {
        self.load(&account_name(acme)).await
    }

    pub async fn save_account(&self, acme: &Acme, text: String) -> Result<(), String> {
        self.save(&account_name(acme), text).await
    }

    fn certificate_name(&self) -> String {
        match &self.place {
            Place::Directory { order, .. } | Place::Shared(SharedOrder { order, .. }) => format!("{order}.pem"),
        }
    }

    async fn load(&self, name: &str) -> Result<Option<String>, String> {
        match &self.place {
            Place::Directory { path, .. } => load_file(path, name),
            Place::Shared(SharedOrder { map, .. }) => {
                let known = map.get(name);
                if known.is_none() {
                    // At the start, the map is not read yet.
                    map.synchronize().await?;
                }
                Ok(known.or_else(|| map.get(name)).map(|entry| entry.text.to_string()))
            }
        }
    }

    async fn save(&self, name: &str, text: String) -> Result<(), String> {
        match &self.place {
            Place::Directory { path, .. } => save_file(path, name, &text),
            Place::Shared(shared) => shared.change(name, Some(text), Precondition::None).await.map(drop),
        }
    }

    /// Claims the order for as long as it may take, and removes challenges that an order for the same names has left behind. Where
    /// another gateway has claimed it: until when, Unix seconds.
    pub async fn begin_order(&self, domains: &[String], now_s: i64, limit: Duration) -> Result<Option<i64>, String> {
        let Place::Shared(shared) = &self.place else { return Ok(None) };
        let name = shared.claim_name();
        let (current, claim) = (shared.map.get(&name), shared.claim());
        if let Some(claim) = claim.filter(|claim| claim.until_s > now_s && claim.claimant != shared.claimant) {
            return Ok(Some(claim.until_s));
        }
        let precondition = current.map_or(Precondition::Absent, |entry| Precondition::Version(entry.version));
        let until_s = now_s.saturating_add(limit.as_secs().cast_signed());
        let claim = Claim { claimant: shared.claimant.clone(), until_s };
        let text = serde_json::to_string(&claim).map_err(|error| error.to_string())?;
        let changed = shared.change(&name, Some(text), precondition).await?;
        if !matches!(changed, Changed::Changed { .. }) {
            return Ok(Some(until_s));
        }
        for token in shared.tokens_for(domains) {
            self.withdraw(&token).await;
        }
        Ok(None)
    }

    /// Keeps the order claimed after a failure, so that another gateway does not try before this one does again.
    pub async fn pause_orders(&self, until_s: i64) {
        let Place::Shared(shared) = &self.place else { return };
        let claim = Claim { claimant: shared.claimant.clone(), until_s };
        if let Ok(text) = serde_json::to_string(&claim) {
            // Without the store, no gateway orders.
            let _ = shared.change(&shared.claim_name(), Some(text), Precondition::Exists).await;
        }
    }

    /// Gives the claim up, if it is that of this gateway.
    pub async fn end_order(&self) {
        if let Place::Shared(shared) = &self.place
            && shared.claim().is_some_and(|claim| claim.claimant == shared.claimant)
        {
            // Without the store, the claim ends by itself.
            let _ = shared.change(&shared.claim_name(), None, Precondition::Exists).await;
        }
    }

    /// Has the other gateways answer a challenge. Returns once they know it.
    pub async fn publish(&self, challenge: &Challenge) -> Result<(), String> {
        let Place::Shared(shared) = &self.place else { return Ok(()) };
        let Challenge { domain, token, key_authorization } = challenge.clone();
        let text = serde_json::to_string(&StoredChallenge { domain, key_authorization });
        let text = text.map_err(|error| error.to_string())?;
        shared.change(&format!("{CHALLENGE}{token}"), Some(text), Precondition::None).await?;
        sleep(PUBLISH_DELAY).await;
        Ok(())
    }

    pub async fn withdraw(&self, token: &str) {
        if let Place::Shared(shared) = &self.place {
            // What stays is of no use once the authority has validated it.
            let _ = shared.change(&format!("{CHALLENGE}{token}"), None, Precondition::Exists).await;
        }
    }
}

impl SharedOrder {
    /// The claim of the order.
    fn claim(&self) -> Option<Claim> {
        serde_json::from_str(&self.map.get(&self.claim_name())?.text).ok()
    }

    fn claim_name(&self) -> String {
        format!("order/{}", self.order)
    }

    /// The tokens of the challenges for these names.
    fn tokens_for(&self, domains: &[String]) -> Vec<String> {
        let copy = self.map.lock();
        let challenges = copy.entries.iter().filter_map(|(name, entry)| {
            let challenge: StoredChallenge = serde_json::from_str(&entry.text).ok()?;
            Some((name.strip_prefix(CHALLENGE)?, challenge.domain))
        });
        challenges.filter(|(_, domain)| domains.contains(domain)).map(|(token, _)| token.to_owned()).collect()
    }

    async fn change(&self, name: &str, text: Option<String>, precondition: Precondition) -> Result<Changed, String> {
        match self.map.change(name, text, precondition).await {
            Ok(Changed::Away) => Err(String::from("the store has lost its data, which a gateway refills")),
            Ok(changed) => Ok(changed),
            Err(ChangeError::NotMade(why) | ChangeError::Unconfirmed(why)) => Err(why),
        }
    }
}

impl ChallengeObserver {
    fn set(&mut self, name: &str, text: Option<&str>) {
        let Some(token) = name.strip_prefix(CHALLENGE) else { return };
        match text.and_then(|text| serde_json::from_str::<StoredChallenge>(text).ok()) {
            Some(StoredChallenge { domain, key_authorization }) => {
                self.tokens.insert(token.to_owned());
                self.challenges.add(Challenge { domain, token: token.to_owned(), key_authorization });
            }
            None => {
                self.tokens.remove(token);
                self.challenges.remove(token);
            }
        }
    }
}

impl MapObserver for ChallengeObserver {
    fn updated(&mut self, update: Update<'_>, _copy: &MapCopy) {
        match update {
            Update::All(entries) => {
                std::mem::take(&mut self.tokens).iter().for_each(|token| self.challenges.remove(token));
                entries.iter().for_each(|(name, entry)| self.set(name, Some(&entry.text)));
            }
            Update::Changes(changes) => {
                changes.iter().for_each(|change| self.set(&change.name, change.text.as_deref()));
            }
        }
        self.changed.notify_one();
    }

    fn polled(&mut self, _is_synchronized: bool) {}
}

fn load_file(directory: &Path, name: &str) -> Result<Option<String>, String> {
    match fs::read_to_string(directory.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(|error| format!("{}: {error}", directory.join(name).display())),
    }
}

fn save_file(directory: &Path, name: &str, text: &str) -> Result<(), String> {
    let file = directory.join(name);
    let save = || {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let busy = || io::Error::other("another process writes it");
        let mut draft = atomic_file::lock_draft(&file, SAVE_PATIENCE)?.ok_or_else(busy)?;
        draft.write_all(text.as_bytes())?;
        atomic_file::publish_draft(&draft, &file)
    };
    save().map_err(|error| format!("{}: {error}", file.display()))
}

/// The name of the account of a directory.
fn account_name(acme: &Acme) -> String {
    let directory = acme.directory.split_once("://").map_or(acme.directory.as_str(), |(_scheme, rest)| rest);
    let in_name = |c: char| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '_' };
    format!("account-{}.json", directory.chars().map(in_name).collect::<String>())
}

/// The name of an order: its first name, and a digest of all names if there are more.
fn order_name(acme: &Acme) -> String {
    let mut domains: Vec<&str> = acme.domains.iter().map(String::as_str).collect();
    let first = domains.first().copied().unwrap_or_default().to_owned();
    if domains.len() == 1 {
        return first;
    }
    domains.sort_unstable();
    let digest = Sha256::digest(domains.join(",").as_bytes());
    format!("{first}-{:02x}{:02x}{:02x}{:02x}", digest[0], digest[1], digest[2], digest[3])
}
