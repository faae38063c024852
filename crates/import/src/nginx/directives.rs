//! Directives that need no translation, and the reasons for others that have none.

use super::syntax::Directive;

/// Directives of which nothing is left to translate: the gateway does so anyway, or has nothing to adjust.
const NO_NEED: &[&str] = &[
    "events",
    "worker_connections",
    "multi_accept",
    "use",
    "worker_rlimit_nofile",
    "worker_cpu_affinity",
    "daemon",
    "master_process",
    "pid",
    "sendfile",
    "tcp_nopush",
    "tcp_nodelay",
    "aio",
    "directio",
    "types_hash_max_size",
    "types_hash_bucket_size",
    "server_names_hash_bucket_size",
    "server_names_hash_max_size",
    "variables_hash_max_size",
    "variables_hash_bucket_size",
    "map_hash_bucket_size",
    "map_hash_max_size",
    "server_tokens",
    "keepalive_timeout",
    "keepalive_requests",
    "reset_timedout_connection",
    "http2",
    "http2_max_concurrent_streams",
    "proxy_http_version",
    "proxy_buffering",
    "proxy_request_buffering",
    "proxy_buffers",
    "proxy_buffer_size",
    "proxy_busy_buffers_size",
    "proxy_socket_keepalive",
    "proxy_ssl_server_name",
    "client_body_buffer_size",
    "client_header_buffer_size",
    "large_client_header_buffers",
    "client_body_temp_path",
    "proxy_temp_path",
    "fastcgi_temp_path",
    "uwsgi_temp_path",
    "scgi_temp_path",
    "proxy_max_temp_file_size",
    "default_type",
    "types",
    "keepalive",
    "zone",
    "resolver",
    "resolver_timeout",
    "port_in_redirect",
    "absolute_redirect",
    "open_file_cache",
    "open_file_cache_valid",
    "open_file_cache_min_uses",
    "open_file_cache_errors",
    "limit_req_log_level",
    "limit_conn_log_level",
    "log_not_found",
    "send_timeout",
    "lingering_close",
    "ssl_session_cache",
    "ssl_session_timeout",
    "ssl_session_tickets",
    "ssl_prefer_server_ciphers",
    "ssl_buffer_size",
    "ssl_dhparam",
    "log_format",
    "index",
    "charset",
    "thread_pool",
    "timer_resolution",
    "worker_priority",
    "worker_shutdown_timeout",
    "satisfy",
];

/// Why a directive has no translation, by the beginning of its name.
const REASONS: &[(&str, &str)] = &[
    ("gzip", "the gateway does not compress responses"),
    ("brotli", "the gateway does not compress responses"),
    ("access_log", "the gateway writes a log of its own, see [access_log]"),
    ("error_log", "messages go to standard error"),
    ("worker_processes", "the gateway has a worker for each core; `workers` sets their number"),
    ("user", "the service manager chooses the user"),
    ("load_module", "the gateway has no modules"),
    ("ssl_ciphers", "the gateway has its own list of ciphers"),
    ("ssl_ecdh_curve", "the gateway has its own list of curves"),
    ("ssl_conf_command", "the gateway has its own list of ciphers"),
    ("ssl_stapling", "the gateway staples no OCSP responses"),
    ("ssl_trusted_certificate", "the gateway staples no OCSP responses"),
    ("proxy_cache", "the gateway has no cache"),
    ("fastcgi", "the gateway speaks HTTP to servers"),
    ("uwsgi", "the gateway speaks HTTP to servers"),
    ("scgi", "the gateway speaks HTTP to servers"),
    ("error_page", "responses of the upstream pass unchanged; `body` of a rule sets that of a refusal"),
    ("proxy_intercept_errors", "responses of the upstream pass unchanged"),
    ("limit_rate", "responses are sent as fast as clients read them"),
    ("stream", "the gateway forwards HTTP only"),
    ("mail", "the gateway forwards HTTP only"),
    ("sub_filter", "the gateway does not change bodies"),
    ("mirror", "the gateway does not mirror requests"),
    ("split_clients", "the gateway has no variables"),
    ("set", "the gateway has no variables"),
    ("map", "no limit that is translated uses it"),
    ("geo", "no limit that is translated uses it"),
    ("limit_req_zone", "no location that is translated uses it"),
    ("limit_conn_zone", "no location that is translated uses it"),
    ("upstream", "no location that is translated uses it"),
    ("include", "the file was not found"),
    ("root", "the gateway serves no files"),
    ("alias", "the gateway serves no files"),
    ("try_files", "the gateway serves no files"),
    ("autoindex", "the gateway serves no files"),
    ("expires", "the gateway serves no files"),
    ("etag", "the gateway serves no files"),
    ("proxy_next_upstream", "the gateway has its own conditions, see `retries` of the upstream"),
    ("proxy_cookie", "`rewrite_location` of a route changes domains and paths of cookies"),
    ("proxy_redirect", "`rewrite_location` of a route changes `Location`"),
    ("underscores_in_headers", "fields whose names contain `_` are removed"),
    ("ignore_invalid_headers", "requests with invalid fields are refused"),
    ("merge_slashes", "repeated slashes become one"),
    ("proxy_pass_request_headers", "the fields of requests are forwarded"),
    ("rewrite_by_lua", "the gateway runs no code"),
    (
        "rewrite",
        "a route replaces a prefix of the path, or all of it by one text; it redirects a path, or what is below one",
    ),
    ("if", "the gateway has no conditions but those of routes"),
    ("slow_start", "see `slow_start` of the upstream"),
];

/// Directives that require credentials.
pub const AUTHENTICATION: [&str; 12] = [
    "auth_basic",
    "auth_request",
    "auth_jwt",
    "auth_digest",
    "auth_gss",
    "auth_ldap",
    "auth_oidc",
    "auth_pam",
    "secure_link",
    "access_by_lua",
    "access_by_lua_block",
    "access_by_lua_file",
];

/// Other directives whose absence admits what nginx refuses.
const ACCESS: &[&str] = &[
    "auth_basic_user_file",
    "secure_link_md5",
    "limit_req",
    "limit_conn",
    "valid_referers",
    "ssl_verify_client",
    "ssl_client_certificate",
    "ssl_crl",
    "if",
    "allow",
    "deny",
    "modsecurity",
    "modsecurity_rules_file",
    "rewrite_by_lua",
    "rewrite_by_lua_block",
    "rewrite_by_lua_file",
    "include",
];

/// Why a directive has no translation.
pub fn reason(name: &str) -> &'static str {
    let known = REASONS.iter().find(|(beginning, _)| match *beginning {
        "set" | "if" | "map" | "geo" | "user" | "root" | "stream" | "mail" | "upstream" | "include" => {
            name == *beginning
        }
        beginning => name.starts_with(beginning),
    });
    known.map_or("it has no equivalent", |(_, reason)| reason)
}

/// Whether nothing is left to translate.
pub fn needs_nothing(directive: &Directive) -> bool {
    let argument = directive.argument();
    match directive.name.as_str() {
        // Types of files, which the gateway does not serve.
        "include" => argument.ends_with("mime.types"),
        "worker_processes" => argument == "auto",
        "access_log"
        | "gzip"
        | "auth_basic"
        | "auth_request"
        | "auth_jwt"
        | "auth_digest"
        | "auth_gss"
        | "auth_ldap"
        | "auth_oidc"
        | "auth_pam"
        | "ssl_verify_client"
        | "proxy_redirect"
        | "proxy_cookie_domain"
        | "proxy_cookie_path"
        | "underscores_in_headers" => argument == "off",
        "merge_slashes" | "ignore_invalid_headers" | "proxy_pass_request_headers" => argument == "on",
        name => NO_NEED.contains(&name),
    }
}

/// Whether a directive restricts access or counts requests.
pub fn limits_access(name: &str) -> bool {
    ACCESS.contains(&name) || AUTHENTICATION.contains(&name)
}
