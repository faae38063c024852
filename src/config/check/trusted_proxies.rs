//! Whom to believe about whom they were asked by: the networks of proxies in front of the gateway.

use super::overrides::read_network;
use crate::config::diagnostics::{Report, quoted};
use crate::config::listen::{ForwardedField, TrustedProxies};
use crate::config::toml_reader::{Item, Table};

const EXAMPLE: &str = "[\"10.0.0.0/8\", \"fd00::/8\"]";

/// What `[listen]` says about proxies.
pub struct ProxySettings<'d> {
    trusted: Option<Item<'d>>,
    forwarded: Option<Item<'d>>,
}

impl<'d> ProxySettings<'d> {
    pub fn take_from(table: &mut Table<'d>) -> ProxySettings<'d> {
        ProxySettings { trusted: table.get("trusted_proxies"), forwarded: table.get("forwarded") }
    }

    pub fn read(self, report: &mut Report) -> Option<TrustedProxies> {
        let fields = [("x-forwarded-for", ForwardedField::XForwardedFor), ("forwarded", ForwardedField::Forwarded)];
        let by = self.forwarded.as_ref().and_then(|item| item.choice(&fields, report));
        let Some(item) = self.trusted else {
            if let Some(item) = self.forwarded {
                let message = "`forwarded` has no effect: nobody is believed who sends it";
                report.missing(item.key_span, message, "add `trusted_proxies`, or remove `forwarded`");
            }
            return None;
        };
        let words = item.strings(EXAMPLE, report)?;
        if words.is_empty() {
            report.problem(item.span, "`trusted_proxies` is an empty list", "leave it out: nobody is believed then");
            return None;
        }
        let mut networks = Vec::new();
        for word in words {
            let Some(network) = read_network(&word, report) else { continue };
            if networks.contains(&network) {
                report.problem(word.span, format!("{} is there twice", quoted(word.text)), "remove it");
            } else if network.prefix == 0 {
                let message = format!("{} is everybody: each client could say that it is another", quoted(word.text));
                report.problem(word.span, message, "write the networks that your proxies are in");
            }
            networks.push(network);
        }
        Some(TrustedProxies { networks, field: by.unwrap_or(ForwardedField::XForwardedFor) })
    }
}
