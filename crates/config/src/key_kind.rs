//! The kinds of key parts, such as `header:NAME`: a table with one entry for each.
//!
//! An entry has all that is known of a kind beside the code that reads it from a request, which is
//! `transom_rules::key_source`. The configuration, its lints and its reference, the decision API, the names of shared
//! counters and `simulate` read the entries.

use super::diagnostics::{Parsed, quoted};
use super::path::is_param_name;
use super::values::{FIELD_NAME_FIX, parse_field_name};
use transom_limiter::key::{KeyPart, PartArgument, PartKind, Prefixes};
use transom_usage::json_pointer::JsonPointer;

/// The kinds of parts in hashes of keys. The numbers must not change, because stored counters depend on them.
pub mod number {
    use transom_limiter::key::PartKind;

    pub const IPV4: u8 = 1;
    /// Of the same kind as [`IPV4`].
    pub const IPV6: u8 = 2;
    pub const HEADER: u8 = 3;
    pub const PARAM: u8 = 4;
    pub const HOST: u8 = 5;
    pub const METHOD: u8 = 6;
    pub const PATH: u8 = 7;
    pub const ROUTE: u8 = 8;
    pub const GLOBAL: u8 = PartKind::GLOBAL.number;
    pub const COOKIE: u8 = 10;
    pub const QUERY: u8 = 11;
    pub const JWT: u8 = 12;
    pub const CLIENT_CERT: u8 = 13;
    pub const BASIC_USER: u8 = 14;
    pub const ENTRY: u8 = 15;
    pub const CLIENT: u8 = 16;
    pub const BEARER: u8 = 17;
    pub const JSON: u8 = 18;
    /// Of the same kind as [`IPV4`]: the callers of Unix sockets.
    pub const UNIX: u8 = 19;
    pub const CLIENT_CERT_SAN: u8 = 20;
    pub const CLIENT_CERT_CN: u8 = 21;
}

/// Header fields whose values are secret.
const SECRET_FIELDS: [&str; 4] = ["authorization", "proxy-authorization", "cookie", "x-api-key"];
/// Words that mark the name of a header field or query parameter as secret.
const SECRET_WORDS: [&str; 8] = ["api-key", "api_key", "apikey", "password", "secret", "session", "signature", "token"];

/// A kind of key parts.
pub struct KeyKind {
    /// What the limiter knows of it. The names in identities must not change.
    pub part: PartKind,
    /// How it is written in the configuration, and what that counts by, for the reference. Empty: it is not written there.
    pub forms: &'static [(&'static str, &'static str)],
    /// What follows the name of the kind.
    pub argument: Argument,
    pub presence: Presence,
    /// Whether the store holds only a digest of values, by the name of the part.
    pub is_secret: fn(&str) -> bool,
    pub variety: Variety,
    pub identifies: Identifies,
    /// Why an upstream cannot choose servers by it. Only parts that exist on every route can be hashed.
    pub not_hashed: Option<&'static str>,
    /// What to write in a deny entry instead.
    pub not_denied: Option<&'static str>,
    /// How values are written in overrides, exemptions and queries of the decision API.
    pub value: ValueForm,
    pub example_value: &'static str,
    pub logged: Logged,
}

/// What follows the name of a kind in the configuration.
pub enum Argument {
    /// Nothing.
    None,
    /// `-prefix:BITS` or `-prefix6:BITS`, or nothing.
    Prefixes,
    /// `:NAME`.
    Name(NameForm),
    /// The part is not written as text.
    Unwritten,
}

/// How the name of a part is written.
pub struct NameForm {
    /// What has the name.
    pub what: &'static str,
    /// An example of a part.
    pub example: &'static str,
    /// Returns the name in the form in which requests are compared.
    pub parse: fn(&NamedPart) -> Parsed<String>,
}

/// A part with a name, as written.
pub struct NamedPart<'a> {
    /// All of it.
    pub text: &'a str,
    pub kind: &'static str,
    pub name: &'a str,
    pub form: &'static NameForm,
}

/// Which requests have the part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    All,
    /// All requests of the routes whose path has the parameter.
    OnRoutes,
    /// Those whose client has a certificate.
    WithCertificate,
    /// Those whose client has a certificate with such a name.
    InCertificate,
    /// Those whose client sends it.
    Optional,
}

/// How many values a client can choose from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variety {
    /// Not many: a rule by the part limits each client.
    Few,
    /// Many, where routes or the operator allow it.
    Many,
    /// Any value, without notice: to a rule by the part, a new value is a new client.
    Any,
}

/// What the part can be in `[clients]`.
#[derive(Clone, Copy)]
pub enum Identifies {
    Nothing,
    Subject(Credentials),
    ApiKeyOrSubject(Credentials),
}

/// The wording and the challenges of 401 responses about a part that identifies clients.
#[derive(Clone, Copy)]
pub struct Credentials {
    /// What the part is as a subject.
    pub subject: &'static str,
    /// Where requests have it, by the name of the part.
    pub place: fn(&str) -> String,
    /// `WWW-Authenticate` for requests without the part; `None`: no response can ask for it.
    pub challenge_if_missing: Option<&'static str>,
    /// `WWW-Authenticate` for requests whose part belongs to no client.
    pub challenge_if_unknown: &'static str,
}

/// The challenge for a bearer token that is not accepted (RFC 6750, section 3).
pub const INVALID_TOKEN: &str = "Bearer error=\"invalid_token\"";

/// An API key or a user name. No scheme is registered for API keys. With `Basic`, a browser would ask for a password.
const fn key_in(place: fn(&str) -> String) -> Credentials {
    Credentials { subject: "user name", place, challenge_if_missing: Some("Key"), challenge_if_unknown: "Key" }
}

/// What follows `Bearer`.
const fn bearer(subject: &'static str) -> Credentials {
    Credentials {
        subject,
        place: |_| String::from("the field authorization, after `Bearer`"),
        challenge_if_missing: Some("Bearer realm=\"gateway\""),
        challenge_if_unknown: INVALID_TOKEN,
    }
}

/// How a value is written.
pub enum ValueForm {
    /// An address, which stands for its network.
    Address,
    /// The SHA-256 of a certificate.
    Fingerprint,
    /// As in requests. The function returns how to correct a value that no request has.
    Text(fn(&str) -> Option<&'static str>),
}

/// What an access log has of the part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logged {
    /// Every line has it.
    Always,
    /// Some formats have it. Requests without one have an empty value.
    Host,
    /// The field of its name.
    Field,
    /// The field `Authorization`.
    Authorization,
    /// The field `Cookie`.
    Cookie,
    Query,
    /// What identifies clients, or the name of the client.
    Client,
    Never,
}

/// All kinds, in the order of the reference.
pub static KINDS: [&KeyKind; 19] = [
    &IP,
    &CLIENT,
    &HEADER,
    &COOKIE,
    &QUERY,
    &BEARER,
    &PARAM,
    &JWT,
    &JSON,
    &BASIC_USER,
    &CLIENT_CERT,
    &CLIENT_CERT_SAN,
    &CLIENT_CERT_CN,
    &HOST,
    &METHOD,
    &PATH,
    &ROUTE,
    &GLOBAL,
    &ENTRY,
];

/// The client's address, grouped by prefix.
pub static IP: KeyKind = KeyKind {
    part: PartKind { name: "ip", identity: "Ip", number: number::IPV4 },
    forms: &[
        ("ip", "address of the client, see [Trusted proxies](#trusted-proxies)"),
        (
            "ip-prefix:BITS",
            "network of the client: as `\"ip\"`, with `ipv4_prefix` stated in the key, such as \
             `[\"ip-prefix:24\", \"ip-prefix6:56\"]`",
        ),
        ("ip-prefix6:BITS", "the same with `ipv6_prefix`"),
    ],
    argument: Argument::Prefixes,
    presence: Presence::All,
    is_secret: |_| false,
    variety: Variety::Few,
    identifies: Identifies::Nothing,
    not_hashed: None,
    not_denied: Some("write `network = \"203.0.113.7\"` instead of `key`"),
    value: ValueForm::Address,
    example_value: "192.0.2.7",
    logged: Logged::Always,
};

/// The client of the request, by its name in the clients file.
pub static CLIENT: KeyKind = KeyKind {
    part: PartKind { name: "client", identity: "Client", number: number::CLIENT },
    forms: &[("client", "the [client](#clients): all of its API keys, subjects and networks share one counter")],
    argument: Argument::None,
    presence: Presence::Optional,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Nothing,
    not_hashed: Some("`client` cannot be hashed: clients are looked up only for rules that count by them"),
    not_denied: Some("write `client = \"NAME\"` instead of `key`"),
    value: ValueForm::Text(reject_empty),
    example_value: "acme",
    logged: Logged::Client,
};

/// A request field, by its lower-case name.
pub static HEADER: KeyKind = KeyKind {
    part: PartKind { name: "header", identity: "Header", number: number::HEADER },
    forms: &[("header:NAME", "a field of the request")],
    argument: Argument::Name(NameForm { what: "header field", example: "header:x-api-key", parse: parse_field }),
    presence: Presence::Optional,
    is_secret: |name| SECRET_FIELDS.contains(&name) || is_secret_name(name),
    variety: Variety::Any,
    identifies: Identifies::ApiKeyOrSubject(key_in(|name| format!("the field {name}"))),
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(|text| match () {
        () if text.is_empty() || text.trim() != text => Some("write the value of the field, without spaces around it"),
        () if text.contains(|c: char| c.is_control() && c != '\t') => Some("remove control characters"),
        () => None,
    }),
    example_value: "VALUE",
    logged: Logged::Field,
};

/// A cookie, by its name.
pub static COOKIE: KeyKind = KeyKind {
    part: PartKind { name: "cookie", identity: "Cookie", number: number::COOKIE },
    forms: &[("cookie:NAME", "a cookie")],
    argument: Argument::Name(NameForm { what: "cookie", example: "cookie:session", parse: parse_cookie }),
    presence: Presence::Optional,
    is_secret: |_| true,
    variety: Variety::Any,
    identifies: Identifies::ApiKeyOrSubject(key_in(|name| format!("the cookie {name}"))),
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(reject_empty),
    example_value: "VALUE",
    logged: Logged::Cookie,
};

/// A parameter of the query, by its name when decoded.
pub static QUERY: KeyKind = KeyKind {
    part: PartKind { name: "query", identity: "Query", number: number::QUERY },
    forms: &[("query:NAME", "a parameter of the query")],
    argument: Argument::Name(NameForm { what: "parameter of the query", example: "query:api_key", parse: parse_query }),
    presence: Presence::Optional,
    is_secret: is_secret_name,
    variety: Variety::Any,
    identifies: Identifies::ApiKeyOrSubject(key_in(|name| format!("the parameter {name} of the query"))),
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(reject_empty),
    example_value: "VALUE",
    logged: Logged::Query,
};

/// The token of `Authorization: Bearer`, whatever it is.
pub static BEARER: KeyKind = KeyKind {
    part: PartKind { name: "bearer", identity: "Bearer", number: number::BEARER },
    forms: &[("bearer", "the token of `Authorization: Bearer`, without the scheme, which may be in any case")],
    argument: Argument::None,
    presence: Presence::Optional,
    is_secret: |_| true,
    variety: Variety::Any,
    identifies: Identifies::ApiKeyOrSubject(bearer("user name")),
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(reject_empty),
    example_value: "VALUE",
    logged: Logged::Authorization,
};

/// A parameter of the route's path.
pub static PARAM: KeyKind = KeyKind {
    part: PartKind { name: "param", identity: "Param", number: number::PARAM },
    forms: &[("param:NAME", "a parameter of the route's path")],
    argument: Argument::Name(NameForm { what: "parameter", example: "param:id", parse: parse_param }),
    presence: Presence::OnRoutes,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Nothing,
    not_hashed: Some("`param` cannot be hashed: it belongs to one route, and an upstream can have several"),
    not_denied: None,
    value: ValueForm::Text(accept_any),
    example_value: "VALUE",
    logged: Logged::Always,
};

/// A claim of the request's bearer token.
pub static JWT: KeyKind = KeyKind {
    part: PartKind { name: "jwt", identity: "Jwt", number: number::JWT },
    forms: &[("jwt:CLAIM", "a claim of a verified token, see [`[jwt]`](#jwt)")],
    argument: Argument::Name(NameForm { what: "claim", example: "jwt:sub", parse: parse_claim }),
    presence: Presence::Optional,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::ApiKeyOrSubject(bearer("token")),
    not_hashed: Some("a claim cannot be hashed: tokens are verified only for rules that count by a claim"),
    not_denied: None,
    value: ValueForm::Text(reject_empty),
    example_value: "VALUE",
    logged: Logged::Authorization,
};

/// A value in the JSON body, by its pointer.
pub static JSON: KeyKind = KeyKind {
    part: PartKind { name: "json", identity: "Json", number: number::JSON },
    forms: &[(
        "json:POINTER",
        "a [value of the JSON body](#values-of-the-body) by its JSON Pointer, such as `\"json:/model\"`: a text, number or Boolean",
    )],
    argument: Argument::Name(NameForm { what: "JSON Pointer", example: "json:/model", parse: parse_json_pointer }),
    presence: Presence::Optional,
    is_secret: is_secret_name,
    variety: Variety::Any,
    identifies: Identifies::Nothing,
    not_hashed: Some("`json` cannot be hashed: bodies are read only for rules"),
    not_denied: Some("use another part: requests are denied before their body is read"),
    value: ValueForm::Text(reject_empty),
    example_value: "VALUE",
    logged: Logged::Never,
};

/// The user name of Basic authentication. The password is not verified.
pub static BASIC_USER: KeyKind = KeyKind {
    part: PartKind { name: "basic-user", identity: "BasicUser", number: number::BASIC_USER },
    forms: &[(
        "basic-user",
        "user name of Basic authentication (RFC 7617). The gateway does not verify the password: any client can send any \
         name. Credentials that are not Base64 get 400; those without a user name count as missing",
    )],
    argument: Argument::None,
    presence: Presence::Optional,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Subject(Credentials {
        subject: "user name",
        place: |_| String::from("the field authorization, after `Basic`"),
        challenge_if_missing: Some("Basic realm=\"gateway\""),
        challenge_if_unknown: "Basic realm=\"gateway\"",
    }),
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(reject_empty),
    example_value: "VALUE",
    logged: Logged::Authorization,
};

/// The SHA-256 of the client's verified certificate.
pub static CLIENT_CERT: KeyKind = CLIENT_CERT_KIND;

const CLIENT_CERT_KIND: KeyKind = KeyKind {
    part: PartKind { name: "client-cert", identity: "ClientCert", number: number::CLIENT_CERT },
    forms: &[("client-cert", "SHA-256 of the verified client certificate")],
    argument: Argument::None,
    presence: Presence::WithCertificate,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Subject(Credentials {
        subject: "certificate",
        place: |_| String::from("the TLS connection"),
        challenge_if_missing: None,
        challenge_if_unknown: "Key",
    }),
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Fingerprint,
    example_value: "9f86d081…",
    logged: Logged::Never,
};

/// A name of the client's verified certificate, which a renewed certificate has too.
const fn certificate_name(part: PartKind, forms: &'static [(&'static str, &'static str)]) -> KeyKind {
    KeyKind {
        part,
        forms,
        presence: Presence::InCertificate,
        value: ValueForm::Text(reject_empty),
        example_value: "VALUE",
        ..CLIENT_CERT_KIND
    }
}

pub static CLIENT_CERT_SAN: KeyKind = certificate_name(
    PartKind { name: "client-cert:san", identity: "ClientCertSan", number: number::CLIENT_CERT_SAN },
    &[(
        "client-cert:san",
        "first DNS name, URI, e-mail address or IP address in the subjectAltName of the verified client certificate; a renewed \
         certificate is the same client",
    )],
);

pub static CLIENT_CERT_CN: KeyKind = certificate_name(
    PartKind { name: "client-cert:cn", identity: "ClientCertCn", number: number::CLIENT_CERT_CN },
    &[("client-cert:cn", "common name of the verified client certificate; a renewed certificate is the same client")],
);

/// The host of the request.
pub static HOST: KeyKind = KeyKind {
    part: PartKind { name: "host", identity: "Host", number: number::HOST },
    forms: &[("host", "host of the request")],
    argument: Argument::None,
    presence: Presence::All,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Nothing,
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(|text| {
        let is_wrong = text.is_empty() || text.contains(|c: char| c.is_uppercase() || "/: ".contains(c));
        is_wrong.then_some("write the host name alone, in lower case")
    }),
    example_value: "api.example.com",
    logged: Logged::Host,
};

/// The method of the request.
pub static METHOD: KeyKind = KeyKind {
    part: PartKind { name: "method", identity: "Method", number: number::METHOD },
    forms: &[("method", "method of the request")],
    argument: Argument::None,
    presence: Presence::All,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Nothing,
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(|text| {
        let is_wrong = text.is_empty() || text.contains(|c: char| c.is_lowercase() || c == ' ');
        is_wrong.then_some("write a method in upper case, such as `GET`")
    }),
    example_value: "GET",
    logged: Logged::Always,
};

/// The normalized path.
pub static PATH: KeyKind = KeyKind {
    part: PartKind { name: "path", identity: "Path", number: number::PATH },
    forms: &[("path", "path of the request, normalized")],
    argument: Argument::None,
    presence: Presence::All,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Nothing,
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(|text| {
        (!text.starts_with('/')).then_some("write the path as it is matched, such as `/login`")
    }),
    example_value: "/login",
    logged: Logged::Always,
};

/// The name of the route.
pub static ROUTE: KeyKind = KeyKind {
    part: PartKind { name: "route", identity: "Route", number: number::ROUTE },
    forms: &[("route", "name of the route")],
    argument: Argument::None,
    presence: Presence::All,
    is_secret: |_| false,
    variety: Variety::Few,
    identifies: Identifies::Nothing,
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(accept_any),
    example_value: "VALUE",
    logged: Logged::Always,
};

/// One counter for all requests: the kind of [`KeyPart::GLOBAL`].
pub static GLOBAL: KeyKind = KeyKind {
    part: PartKind::GLOBAL,
    forms: &[("global", "alone: one counter for all requests")],
    argument: Argument::None,
    presence: Presence::All,
    is_secret: |_| false,
    variety: Variety::Many,
    identifies: Identifies::Nothing,
    not_hashed: Some("`global` cannot be hashed: one server would receive all requests"),
    not_denied: Some("name a part that some requests have"),
    value: ValueForm::Text(accept_any),
    example_value: "VALUE",
    logged: Logged::Always,
};

/// An entry of a descriptor, by its key. HTTP requests have none.
pub static ENTRY: KeyKind = KeyKind {
    part: PartKind { name: "entry", identity: "Entry", number: number::ENTRY },
    forms: &[],
    argument: Argument::Unwritten,
    presence: Presence::All,
    is_secret: is_secret_name,
    variety: Variety::Many,
    identifies: Identifies::Nothing,
    not_hashed: None,
    not_denied: None,
    value: ValueForm::Text(accept_any),
    example_value: "VALUE",
    logged: Logged::Always,
};

impl KeyKind {
    /// The kind of a part.
    pub fn of(part: &KeyPart) -> &'static KeyKind {
        // The search always succeeds: parts are made of the kinds in the table.
        KINDS.into_iter().find(|kind| kind.has(part)).unwrap_or(&ENTRY)
    }

    /// The kind of this name, if it can be written.
    pub fn named(name: &str) -> Option<&'static KeyKind> {
        KINDS.into_iter().find(|kind| kind.part.name == name && !kind.forms.is_empty())
    }

    /// Whether a part is of this kind.
    pub fn has(&self, part: &KeyPart) -> bool {
        part.kind.number == self.part.number
    }

    /// The part of a kind without argument.
    pub const fn part(&'static self) -> KeyPart {
        KeyPart { kind: &self.part, argument: PartArgument::None }
    }

    /// The part of this name, which is not checked.
    pub fn of_name(&'static self, name: &str) -> KeyPart {
        KeyPart { kind: &self.part, argument: PartArgument::Name(name.to_owned()) }
    }

    /// The part with these prefixes.
    pub const fn of_prefixes(&'static self, v4: u8, v6: u8) -> KeyPart {
        KeyPart { kind: &self.part, argument: PartArgument::Prefixes(Prefixes { v4, v6 }) }
    }

    /// Whether only requests of clients with a certificate have the part.
    pub fn needs_certificate(&self) -> bool {
        matches!(self.presence, Presence::WithCertificate | Presence::InCertificate)
    }

    /// How the part is written without prefixes; `None` if it is not written.
    pub fn form(&self) -> Option<&'static str> {
        self.forms.first().map(|(form, _)| *form)
    }
}

/// How all kinds are written.
pub fn forms() -> impl Iterator<Item = &'static str> {
    KINDS.into_iter().flat_map(|kind| kind.forms).map(|(form, _)| *form)
}

/// Whether the store holds only a digest of this key part, judged by its name. Claims of tokens and fingerprints of
/// certificates are not secret.
pub fn is_secret_part(part: &KeyPart) -> bool {
    (KeyKind::of(part).is_secret)(part.name().unwrap_or_default())
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

fn accept_any(_: &str) -> Option<&'static str> {
    None
}

fn reject_empty(text: &str) -> Option<&'static str> {
    text.is_empty().then_some("write a value; an empty value counts as missing")
}

impl NamedPart<'_> {
    fn no_part(&self, fix: String) -> (String, String) {
        (format!("{} is not a key part", quoted(self.text)), fix)
    }

    fn no_name(&self, fix: &str) -> (String, String) {
        (format!("{} names no {}", quoted(self.text), self.form.what), fix.to_owned())
    }

    fn write_for_example(&self) -> String {
        format!("write, for example, `\"{}\"`", self.form.example)
    }

    /// The name, unless a request can hardly have it.
    fn plausible_name(&self) -> Parsed<&str> {
        let name = self.name;
        match () {
            // White space around the name is invisible, and hardly intended.
            () if name.is_empty() || name.contains(char::is_control) => Err(self.no_name(&self.write_for_example())),
            () if name.contains('*') || name.starts_with(['~', '^']) => {
                let fix = format!("write the whole name, such as `\"{}\"`: a key has no patterns", self.form.example);
                Err(self.no_name(&fix))
            }
            () if name != name.trim() => Err(self.no_part(format!("write `\"{}:{}\"`", self.kind, name.trim()))),
            () => Ok(name),
        }
    }
}

fn parse_field(part: &NamedPart) -> Parsed<String> {
    match (parse_field_name(part.name), parse_field_name(part.name.trim())) {
        (Some(name), _) => Ok(name),
        (None, Some(name)) => Err(part.no_part(format!("write `\"header:{name}\"`"))),
        (None, None) if part.name.is_empty() => Err(part.no_name(&part.write_for_example())),
        (None, None) => Err(part.no_name(FIELD_NAME_FIX)),
    }
}

fn parse_cookie(part: &NamedPart) -> Parsed<String> {
    let name = part.plausible_name()?;
    if !name.bytes().all(is_token_byte) {
        let fix = "write the name of the cookie, the part before `=`: letters, digits, `_`, `-` and similar characters";
        return Err(part.no_name(fix));
    }
    Ok(name.to_owned())
}

fn parse_query(part: &NamedPart) -> Parsed<String> {
    let name = part.plausible_name()?;
    if name.contains(['%', '&', '=']) {
        return Err(part.no_name("write the decoded name alone, such as `\"query:filter[user]\"`"));
    }
    Ok(name.to_owned())
}

fn parse_param(part: &NamedPart) -> Parsed<String> {
    if is_param_name(part.name) {
        return Ok(part.name.to_owned());
    }
    let bare = part.name.trim_matches(['{', '}', '*', ' ']).replace('-', "_");
    let bare = if is_param_name(&bare) { bare } else { String::from("id") };
    Err((format!("{} names no parameter of a path", quoted(part.text)), format!("write `\"param:{bare}\"`")))
}

fn parse_json_pointer(part: &NamedPart) -> Parsed<String> {
    match JsonPointer::parse(part.name) {
        Ok(pointer) if !part.name.is_empty() => Ok(pointer.to_string()),
        Ok(_) => Err(part.no_name("write a JSON Pointer, such as `\"json:/model\"`")),
        Err(error) => Err((
            format!("{} names no value of a JSON body: {error}", quoted(part.text)),
            String::from("write a JSON Pointer, such as `\"json:/model\"`"),
        )),
    }
}

fn parse_claim(part: &NamedPart) -> Parsed<String> {
    part.plausible_name().map(str::to_owned)
}

/// Whether a byte can be in a token (RFC 9110, section 5.6.2), the form of cookie names in RFC 6265.
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::key::parse_part;
    use super::*;

    /// What stored counters depend on: later versions must keep it.
    #[test]
    fn the_kinds_have_the_names_and_numbers_of_the_version_before() {
        let found = KINDS.map(|kind| (kind.part.name, kind.part.identity, kind.part.number));
        let expected = [
            ("ip", "Ip", 1),
            ("header", "Header", 3),
            ("cookie", "Cookie", 10),
            ("query", "Query", 11),
            ("param", "Param", 4),
            ("jwt", "Jwt", 12),
            ("basic-user", "BasicUser", 14),
            ("client-cert", "ClientCert", 13),
            ("client-cert:san", "ClientCertSan", 20),
            ("client-cert:cn", "ClientCertCn", 21),
            ("host", "Host", 5),
            ("method", "Method", 6),
            ("path", "Path", 7),
            ("route", "Route", 8),
            ("global", "Global", 9),
            ("entry", "Entry", 15),
            ("client", "Client", 16),
            ("bearer", "Bearer", 17),
            ("json", "Json", 18),
        ];
        for part in expected {
            assert!(found.contains(&part), "{part:?}");
        }
    }

    /// So docs/explanation/persistence.md documents them.
    #[test]
    fn identities_are_the_names_in_camel_case() {
        for KeyKind { part, .. } in KINDS {
            let capitalized = |word: &str| word[..1].to_uppercase() + &word[1..];
            assert_eq!(part.name.split(['-', ':']).map(capitalized).collect::<String>(), part.identity);
        }
    }

    #[test]
    fn no_two_kinds_are_confused() {
        let of = |get: fn(&PartKind) -> String| KINDS.iter().map(|kind| get(&kind.part)).collect::<HashSet<_>>().len();
        assert_eq!(of(|part| part.name.to_owned()), KINDS.len());
        assert_eq!(of(|part| part.identity.to_owned()), KINDS.len());
        assert_eq!(of(|part| part.number.to_string()), KINDS.len());
        assert!(KINDS.iter().all(|kind| kind.part.number != number::IPV6));
    }

    #[test]
    fn a_kind_is_written_as_its_forms_say() {
        for kind in KINDS {
            for (form, documentation) in kind.forms {
                assert!(!documentation.is_empty(), "{form}");
                let placeholders = [("NAME", "name"), ("CLAIM", "name"), ("POINTER", "/name")];
                let fill = |text: String, (placeholder, name): &(&str, &str)| text.replace(placeholder, name);
                let text = placeholders.iter().fold(form.replace("BITS", "24"), fill);
                let part = parse_part(&text).unwrap();
                assert!(std::ptr::eq(KeyKind::of(&part), kind), "{form}");
                let has_name = placeholders.iter().any(|(placeholder, _)| form.ends_with(placeholder));
                assert_eq!(part.name().is_some(), has_name, "{form}");
            }
        }
        assert!(parse_part("entry").is_err() && parse_part("entry:name").is_err());
    }

    #[test]
    fn values_of_examples_are_accepted() {
        for kind in KINDS {
            if let ValueForm::Text(find_fix) = kind.value {
                assert_eq!(find_fix(kind.example_value), None, "{}", kind.part.name);
            }
        }
    }
}
