//! `GET /`: the dashboard, one page without outside resources. Its script reads `/v1/events` and calls the admin API.
//!
//! The policy in the response lets the browser run only the script and the style of the page, by their digests, and connect
//! only to this address. Names of keys come from clients: the script writes them as text, which `require-trusted-types-for`
//! enforces.

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

use transom_rules::responses::{self, LocalResponse};

const STYLE: &str = include_str!("dashboard/style.css");
const SCRIPT: &str = include_str!("dashboard/script.js");

static PAGE: LazyLock<String> = LazyLock::new(|| {
    include_str!("dashboard/page.html")
        .replace("<style></style>", &format!("<style>{STYLE}</style>"))
        .replace("<script></script>", &format!("<script>{SCRIPT}</script>"))
});

static POLICY: LazyLock<String> = LazyLock::new(|| {
    let digest = |content: &str| STANDARD.encode(Sha256::digest(content));
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        digest(SCRIPT),
        digest(STYLE)
    )
});

pub fn response() -> LocalResponse {
    responses::page_response(PAGE.as_str(), &POLICY)
}
