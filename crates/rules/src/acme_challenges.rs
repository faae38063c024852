//! The challenges of an ACME authority that wait to be answered (RFC 8555, section 8): the thread that orders a certificate
//! writes them; the route of HTTP-01 challenges and TLS handshakes read them.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A challenge for one name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Challenge {
    /// In lower case.
    pub domain: String,
    pub token: String,
    /// The token with the thumbprint of the account's key (section 8.1).
    pub key_authorization: String,
}

/// The challenges that wait, of all orders.
#[derive(Default, Debug)]
pub struct PendingChallenges(Mutex<Vec<Challenge>>);

impl PendingChallenges {
    pub fn add(&self, challenge: Challenge) {
        let mut pending = self.lock();
        pending.retain(|other| other.token != challenge.token);
        pending.push(challenge);
    }

    pub fn remove(&self, token: &str) {
        self.lock().retain(|challenge| challenge.token != token);
    }

    /// The key authorization for a token (section 8.3).
    pub fn of_token(&self, token: &str) -> Option<String> {
        let pending = self.lock();
        pending.iter().find(|challenge| challenge.token == token).map(|challenge| challenge.key_authorization.clone())
    }

    /// The key authorization of the latest challenge for a name (RFC 8737, section 3).
    pub fn of_domain(&self, domain: &str) -> Option<String> {
        let pending = self.lock();
        let challenge = pending.iter().rev().find(|challenge| challenge.domain.eq_ignore_ascii_case(domain));
        challenge.map(|challenge| challenge.key_authorization.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Challenge>> {
        // A panic leaves complete challenges.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
