//! What becomes of the plugins of Kong.

use crate::source::Effect;

/// Plugins that respond by themselves, or that make another request than that of the client. A route without them responds with 503.
pub const RESPONDING: &[&str] =
    &["aws-lambda", "azure-functions", "confluent", "degraphql", "kafka-upstream", "mocking", "redirect"];

/// Plugins by name: in what a route without them differs, and why. A route with a plugin that is `Stricter` is closed.
const PLUGINS: &[(Effect, &str, &[&str])] = &[
    // These are translated.
    (
        Effect::Differs,
        "",
        &[
            "key-auth",
            "key-auth-enc",
            "rate-limiting",
            "rate-limiting-advanced",
            "acl",
            "ip-restriction",
            "request-size-limiting",
            "request-transformer",
            "response-transformer",
            "request-termination",
            "correlation-id",
        ],
    ),
    (
        Effect::Stricter,
        "the route is closed: to admit tokens, write their keys to [jwt], and a rule with a key such as `jwt:sub`, see \
         docs/guides/tokens.md",
        &["jwt", "jwt-signer", "openid-connect"],
    ),
    (
        Effect::Stricter,
        "the gateway checks no such credentials: the route is closed",
        &[
            "ace",
            "ai-mcp-oauth2",
            "application-registration",
            "basic-auth",
            "header-cert-auth",
            "hmac-auth",
            "jwe-decrypt",
            "konnect-application-auth",
            "ldap-auth",
            "ldap-auth-advanced",
            "mtls-auth",
            "oauth2",
            "oauth2-introspection",
            "opa",
            "saml",
            "session",
            "standard-webhooks",
            "vault-auth",
        ],
    ),
    (
        Effect::NotEnforced,
        "for limits of tokens, write a rule with `cost = { usage = \"auto\" }`, see docs/guides/llm-tokens.md",
        &["ai-rate-limiting-advanced"],
    ),
    (
        Effect::NotEnforced,
        "for a limit of the whole service, write a rule with `key = \"global\"`",
        &["service-protection"],
    ),
    (
        Effect::NotEnforced,
        "for limits of what responses state, write a rule whose `cost` is a field of the response",
        &["response-ratelimiting"],
    ),
    (
        Effect::NotEnforced,
        "the gateway has no such plugin",
        &[
            "ai-aws-guardrails",
            "ai-azure-content-safety",
            "ai-custom-guardrail",
            "ai-gcp-model-armor",
            "ai-lakera-guard",
            "ai-prompt-guard",
            "ai-sanitizer",
            "ai-semantic-prompt-guard",
            "ai-semantic-response-guard",
            "bot-detection",
            "graphql-rate-limiting-advanced",
            "injection-protection",
            "json-threat-protection",
            "oas-validation",
            "request-validator",
            "websocket-size-limit",
            "websocket-validator",
            "xml-threat-protection",
        ],
    ),
    (
        Effect::LeftOut,
        "metrics are at the `admin` address, see [metrics]",
        &["datadog", "prometheus", "statsd", "statsd-advanced"],
    ),
    (
        Effect::LeftOut,
        "the gateway writes a log of its own, see [access_log]",
        &["file-log", "http-log", "kafka-log", "loggly", "syslog", "tcp-log", "udp-log"],
    ),
    (Effect::LeftOut, "spans are exported as [tracing] says", &["opentelemetry", "zipkin"]),
    (Effect::LeftOut, "write the fields and a route for preflight requests, see docs/guides/cors.md", &["cors"]),
    (Effect::LeftOut, "`acme` of [listen.https] orders certificates", &["acme"]),
    (
        Effect::LeftOut,
        "the gateway has no cache",
        &["ai-semantic-cache", "graphql-proxy-cache-advanced", "proxy-cache", "proxy-cache-advanced"],
    ),
    (
        Effect::LeftOut,
        "requests do not reach the service as they are, and the gateway has no such plugin: the route responds with 503",
        RESPONDING,
    ),
    (
        Effect::LeftOut,
        "the gateway has no such plugin",
        &[
            "ai-prompt-compressor",
            "ai-prompt-decorator",
            "ai-prompt-template",
            "ai-proxy",
            "ai-proxy-advanced",
            "ai-rag-injector",
            "ai-request-transformer",
            "ai-response-transformer",
            "app-dynamics",
            "canary",
            "exit-transformer",
            "forward-proxy",
            "grpc-gateway",
            "grpc-web",
            "jq",
            "request-transformer-advanced",
            "response-transformer-advanced",
            "route-by-header",
            "route-transformer-advanced",
            "tls-handshake-modifier",
            "tls-metadata-headers",
            "upstream-oauth",
            "upstream-timeout",
        ],
    ),
];

/// In what a route without a plugin differs, and why. Code of the user, and plugins that are not known, may refuse requests.
pub fn treatment(name: &str) -> (Effect, &'static str) {
    let known = PLUGINS.iter().find(|(.., names)| names.contains(&name));
    known.map_or(
        (
            Effect::Stricter,
            "it may refuse requests, and the gateway does not have it: the route is closed; if it refuses none, import the \
             file without it",
        ),
        |(effect, why, _)| (*effect, why),
    )
}
