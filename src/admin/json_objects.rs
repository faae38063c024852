//! The objects in the JSON of the admin address: [`endpoints`](super::endpoints) names them in its table. Tests compare responses
//! with them.

use super::json_schema::Schema::{Any, AnyOf, Boolean, Integer, List, Map, Number, OrNull, Text, Time, Words};
use super::json_schema::{Field, Object, Schema, optional, required};

macro_rules! object {
    ($(#[$doc:meta])* $ident:ident $(is $closed:ident)? = $name:literal { $($field:expr),* $(,)? }) => {
        $(#[$doc])*
        pub static $ident: Object =
            Object { name: $name, is_closed: object!(@$($closed)?), fields: &[$($field),*] };
    };
    (@closed) => { true };
    (@) => { false };
}

const TEXTS: Schema = List(&Text);
const MAYBE_TEXT: Schema = OrNull(&Text);
const MAYBE_INTEGER: Schema = OrNull(&Integer);
/// The values of the parts of a key, or of its only part.
const KEY: Schema = OrNull(&AnyOf(&[Text, TEXTS]));

object! {
    /// A problem (RFC 9457).
    PROBLEM = "Problem" {
        required("type", Text), required("title", Text), required("status", Integer), required("detail", Text),
    }
}

object! {
    /// A query of one rule.
    RULE_QUERY is closed = "RuleQuery" {
        required("rule", Text), optional("key", KEY), optional("client", MAYBE_TEXT), optional("id", MAYBE_TEXT),
        optional("cost", MAYBE_INTEGER), optional("reserve", OrNull(&Boolean)),
    }
}

object! {
    /// One rule of a query of several.
    QUERIED_RULE is closed = "QueriedRule" {
        required("rule", Text), optional("key", KEY), optional("client", MAYBE_TEXT), optional("cost", MAYBE_INTEGER),
    }
}

object! {
    /// A query of several rules.
    RULES_QUERY is closed = "RulesQuery" {
        required("rules", List(&Schema::Object(&QUERIED_RULE))), optional("reserve", OrNull(&Boolean)),
    }
}

pub static QUERY: Schema = AnyOf(&[Schema::Object(&RULE_QUERY), Schema::Object(&RULES_QUERY)]);

const COUNT: [Field; 4] =
    [required("count", Integer), required("limit", Integer), required("remaining", Integer), required("ttl", Integer)];

object! {
    WINDOW = "Window" { COUNT[0], COUNT[1], COUNT[2], COUNT[3], required("name", Text), optional("rule", Text) }
}

object! {
    /// Requests in flight.
    CONCURRENCY = "Concurrency" { required("name", Text), COUNT[0], COUNT[1], COUNT[2], optional("rule", Text) }
}

const WINDOWS: Schema = List(&Schema::Object(&WINDOW));
const CONCURRENT: Schema = List(&Schema::Object(&CONCURRENCY));

object! {
    DECISION = "Decision" {
        required("allowed", Boolean), COUNT[0], COUNT[1], COUNT[2], COUNT[3],
        required("retry_after", MAYBE_INTEGER), required("retry_after_ms", MAYBE_INTEGER),
        optional("exempt", Boolean), optional("unknown_key", Boolean), optional("denied_by", Text),
        required("windows", WINDOWS), optional("concurrent", CONCURRENT), optional("store", Words(&["unreachable"])),
    }
}

object! {
    QUESTION is closed = "Question" {
        required("url", Text), optional("method", MAYBE_TEXT), optional("client", MAYBE_TEXT), optional("as_client", MAYBE_TEXT),
        optional("body", MAYBE_TEXT), optional("headers", OrNull(&Map(&AnyOf(&[Text, TEXTS])))),
    }
}

object! {
    KEY_PART = "KeyPart" { required("part", Text), required("value", MAYBE_TEXT) }
}

const KEY_PARTS: Schema = List(&Schema::Object(&KEY_PART));

object! {
    EXPLAINED_WINDOW = "ExplainedWindow" {
        COUNT[0], COUNT[1], COUNT[2], COUNT[3], required("name", Text), required("full", Boolean),
    }
}

object! {
    EXPLAINED_OVERRIDE = "ExplainedOverride" { required("number", Integer), required("key", TEXTS) }
}

object! {
    EXPLAINED_RULE = "ExplainedRule" {
        required("rule", Text), required("result", Text), required("reason", Text),
        required("key", KEY_PARTS), required("fallback", Boolean),
        required("windows_of", OrNull(&Words(&["rule", "plan", "client", "override"]))), required("plan", MAYBE_TEXT),
        required("override", OrNull(&Schema::Object(&EXPLAINED_OVERRIDE))), required("cost", MAYBE_INTEGER),
        required("reserved_by", OrNull(&TEXTS)), required("shadow", Boolean), required("shared", Boolean),
        required("store", OrNull(&Words(&["reachable", "unreachable"]))), required("may_include_leased", Boolean),
        required("windows", List(&Schema::Object(&EXPLAINED_WINDOW))),
        required("concurrent", OrNull(&Schema::Object(&CONCURRENCY))),
    }
}

object! {
    EXPLAINED_REQUEST = "ExplainedRequest" {
        required("method", Text), required("scheme", Text), required("host", Text), required("path", Text),
        required("client", Text),
    }
}

object! {
    EXPLAINED_CLIENT = "ExplainedClient" { required("name", Text), required("plan", MAYBE_TEXT) }
}

object! {
    EXPLAINED_HOLD = "ExplainedHold" { required("limit_ms", Integer), required("max_held", Integer), required("held", Integer) }
}

object! {
    EXPLAINED_ROUTE = "ExplainedRoute" {
        required("name", Text), required("path", Text), required("reason", Text), optional("upstream", MAYBE_TEXT),
        optional("hold", Schema::Object(&EXPLAINED_HOLD)),
    }
}

object! {
    EXPLANATION = "Explanation" {
        required("decision", Words(&["admitted", "delayed", "refused", "denied", "error"])),
        required("status", MAYBE_INTEGER), required("denied_by", MAYBE_TEXT),
        required("reason", Text), required("retry_after", MAYBE_INTEGER), required("live", Boolean),
        required("request", Schema::Object(&EXPLAINED_REQUEST)), required("client", OrNull(&Schema::Object(&EXPLAINED_CLIENT))),
        required("route", OrNull(&Schema::Object(&EXPLAINED_ROUTE))),
        required("other_routes", List(&Schema::Object(&EXPLAINED_ROUTE))),
        required("rules", List(&Schema::Object(&EXPLAINED_RULE))),
    }
}

object! {
    TOP_KEY = "TopKey" {
        required("id", Text), required("key", KEY_PARTS), required("fallback", Boolean), required("client", MAYBE_TEXT),
        required("label", Text), required("count", Integer), required("error", Integer),
    }
}

object! {
    TOP_RULE = "TopRule" {
        required("rule", Text), required("shadow", Boolean), required("since", OrNull(&Time)), required("total", Integer),
        required("keys", List(&Schema::Object(&TOP_KEY))),
    }
}

object! {
    TOP_LISTS = "TopLists" { required("by", Text), required("rules", List(&Schema::Object(&TOP_RULE))) }
}

const LIMITS_OF_CLIENT: Schema = Schema::Object(&LIMITS_IN_RULE);
const GRANT_OF_CLIENT: Schema = Schema::Object(&GRANT);
const CLIENT: [Field; 7] = [
    required("name", Text),
    required("plan", Text),
    required("keys", TEXTS),
    required("subjects", TEXTS),
    required("networks", TEXTS),
    optional("limits", Map(&LIMITS_OF_CLIENT)),
    optional("grants", List(&GRANT_OF_CLIENT)),
];

/// Windows as in a rule: texts, or objects.
const WRITTEN_WINDOWS: Schema = List(&AnyOf(&[Text, Map(&Any)]));

object! {
    /// The windows of a client in one rule, and when they end.
    CLIENT_LIMITS is closed = "ClientLimits" {
        required("windows", WRITTEN_WINDOWS), optional("until", OrNull(&Time)),
    }
}

/// A window is named by its period, or as in responses.
const GRANTED: [Field; 3] = [required("rule", Text), required("window", Text), required("tokens", Integer)];

object! {
    LIMITS_IN_RULE = "LimitsInRule" {
        required("windows", WRITTEN_WINDOWS), optional("until", OrNull(&Time)), WITHOUT_EFFECT,
    }
}

object! {
    /// Tokens to add once to the current window.
    NEW_GRANT is closed = "NewGrant" { GRANTED[0], GRANTED[1], GRANTED[2] }
}

object! {
    /// Tokens that were added to the window that ends at `until`.
    GRANT = "Grant" { GRANTED[0], GRANTED[1], GRANTED[2], required("until", Time) }
}

object! {
    LISTED_CLIENT = "ListedClient" { CLIENT[0], CLIENT[1], CLIENT[2], CLIENT[3], CLIENT[4], CLIENT[5], CLIENT[6], WITHOUT_EFFECT }
}

object! {
    /// A page. `next` is null on the last one; `total` is the number of all clients.
    CLIENTS = "Clients" {
        required("clients", List(&Schema::Object(&LISTED_CLIENT))), required("next", MAYBE_TEXT), required("total", Integer),
    }
}

object! {
    /// What `PUT` replaces of a client, and `PATCH` changes.
    CLIENT_SETTINGS is closed = "ClientSettings" {
        required("plan", Text), optional("subjects", TEXTS), optional("networks", TEXTS),
    }
}

object! {
    CLIENT_PATCH is closed = "ClientPatch" {
        optional("plan", Text), optional("subjects", OrNull(&TEXTS)), optional("networks", OrNull(&TEXTS)),
    }
}

object! {
    /// The digest of a key that the client has already.
    GIVEN_KEY is closed = "GivenKey" { optional("id", MAYBE_TEXT) }
}

object! {
    NEW_KEY = "NewKey" { required("id", Text), optional("key", Text) }
}

object! {
    CLIENT_RULE = "ClientRule" {
        required("rule", Text), required("key", TEXTS), required("shadow", Boolean),
        optional("windows", WINDOWS), optional("exempt", Boolean), optional("concurrent", CONCURRENT),
        optional("store", Words(&["unreachable"])),
    }
}

object! {
    CLIENT_REFUSALS = "ClientRefusals" {
        required("rule", Text), required("shadow", Boolean), required("since", OrNull(&Time)), required("count", Integer),
        required("error", Integer),
    }
}

object! {
    CLIENT_WITH_USAGE = "ClientWithUsage" {
        CLIENT[0], CLIENT[1], CLIENT[2], CLIENT[3], CLIENT[4], CLIENT[5], CLIENT[6],
        required("rules", List(&Schema::Object(&CLIENT_RULE))),
        required("refused", OrNull(&List(&Schema::Object(&CLIENT_REFUSALS)))), WITHOUT_EFFECT,
    }
}

/// Why the gateway cannot use something that is in the store.
const WITHOUT_EFFECT: Field = optional("without_effect", Text);

object! {
    DENIED_KEY is closed = "DeniedKey" { required("part", Text), required("value", Text) }
}

object! {
    /// One of `network`, `client` and `key`; at most one of `until` and `for`, a duration.
    NEW_DENY_ENTRY is closed = "NewDenyEntry" {
        optional("network", MAYBE_TEXT), optional("client", MAYBE_TEXT), optional("key", OrNull(&Schema::Object(&DENIED_KEY))),
        optional("routes", OrNull(&AnyOf(&[Text, TEXTS]))), optional("until", OrNull(&Time)), optional("for", MAYBE_TEXT),
        optional("reason", MAYBE_TEXT),
    }
}

object! {
    DENY_ENTRY = "DenyEntry" {
        required("id", Text), optional("network", Text), optional("client", Text),
        optional("key", Schema::Object(&DENIED_KEY)), required("routes", TEXTS), required("until", OrNull(&Time)),
        required("reason", MAYBE_TEXT), required("ended", Boolean), WITHOUT_EFFECT,
    }
}

object! {
    /// A page, as of clients.
    DENY_ENTRIES = "DenyEntries" {
        required("deny", List(&Schema::Object(&DENY_ENTRY))), required("next", MAYBE_TEXT), required("total", Integer),
    }
}

object! {
    SERVER = "Server" {
        required("url", Text), required("weight", Integer), required("backup", Boolean), required("effective_weight", Number),
        required("state", Text), required("failures_in_a_row", Integer),
    }
}

object! {
    UPSTREAM = "Upstream" {
        required("name", Text), required("pending", Any), required("held", Integer), required("servers", List(&Schema::Object(&SERVER))),
    }
}

object! {
    UPSTREAMS = "Upstreams" { required("upstreams", List(&Schema::Object(&UPSTREAM))) }
}
