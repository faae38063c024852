//! The formats of access logs that are known by name, one row each, and how their lines are written.

use super::columns::Dialect;
use super::field_names::{DurationUnit, Field};
use super::json_scanner::Escape;

/// A format that `--format` names.
pub struct Format {
    pub name: &'static str,
    /// The forms of its lines.
    pub shapes: &'static [Shape],
}

/// How the lines of a log are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// An object of JSON on each line, with the names that `field_names` has.
    Json,
    /// As [`super::combined`] reads it.
    Combined,
    /// Texts and variables. Fields that a format has got later follow at the end, and are not read.
    Pattern(&'static str, Escape),
    /// By position in [`DIALECTS`].
    Columns(usize),
}

/// "W3C Logging", Internet Information Services. A blank is written as `+`; `date` and `time` are the end of the request.
const IIS: Dialect = Dialect {
    separator: b' ',
    own_column: None,
    taken: ("time-taken", Field::Duration(DurationUnit::Milliseconds)),
    target_escape: Escape::None,
    escape: Escape::Plus,
    default_columns: "date time s-ip cs-method cs-uri-stem cs-uri-query s-port cs-username c-ip cs(User-Agent) cs(Referer) \
                      sc-status sc-substatus sc-win32-status time-taken",
};

/// "Standard logging reference", Amazon CloudFront Developer Guide. Values are URL-encoded, so that a percent sign of a path
/// is `%25`; `date` and `time` are the end of the response.
const CLOUDFRONT: Dialect = Dialect {
    separator: b'\t',
    own_column: Some("x-edge-location"),
    taken: ("time-taken", Field::Duration(DurationUnit::Seconds)),
    target_escape: Escape::EncodedPercent,
    escape: Escape::Percent,
    default_columns: "date time x-edge-location sc-bytes c-ip cs-method cs(Host) cs-uri-stem sc-status cs(Referer) \
                      cs(User-Agent) cs-uri-query cs(Cookie) x-edge-result-type x-edge-request-id x-host-header \
                      cs-protocol cs-bytes time-taken x-forwarded-for ssl-protocol ssl-cipher x-edge-response-result-type \
                      cs-protocol-version fle-status fle-encrypted-fields c-port time-to-first-byte \
                      x-edge-detailed-result-type sc-content-type sc-content-len sc-range-start sc-range-end",
};

/// All that write `#Fields:`.
pub const DIALECTS: [&Dialect; 2] = [&CLOUDFRONT, &IIS];

/// "Access logs for your Application Load Balancer", and "… for your Classic Load Balancer": Elastic Load Balancing.
const ALB: &str = "$type $end $elb $client_port $target $taking $waiting $sending $status $target_status $received $sent \
                   \"$request\" \"$http_user_agent\" $cipher $protocol $group \"$trace\" \"$domain\" \"$certificate\" \
                   $priority $start \"$actions\"";
const CLASSIC_ELB: &str = "$start $elb $client_port $backend $taking $waiting $sending $status $backend_status $received \
                           $sent \"$request\" \"$http_user_agent\" $cipher $protocol";
/// "Amazon S3 server access log format": Amazon Simple Storage Service User Guide.
const S3: &str = "$owner $bucket [$start] $client $requester $request_id $operation $key \"$request\" $status $error_code \
                  $sent $size $ms $turn_around \"$http_referer\" \"$http_user_agent\"";
/// "HTTP log format" and "CLF": HAProxy Configuration Manual, section 8.2. Of the braces before the request, which have
/// captured fields, the log does not say which fields they are.
const HAPROXY: &str = "$client_port [$start] $haproxy_frontend $backend/$server $tr/$tw/$tc/$rt/$ms $status $sent $cookie1 \
                       $cookie2 $end_state $ac/$fc/$bc/$sc/$rc $sq/$queue_and_captures \"$request\"";
const HAPROXY_CLF: &str = "$client - - [$start] \"$request\" $status $sent \"\" \"\" $port $fraction \"$haproxy_frontend\" \
                           \"$backend\" \"$server\" $tr $tw $tc $rt $ms \"$end_state\" ";
/// "Default format string": Envoy, Access logging; with the fields that Istio adds, "Getting Envoy's Access Logs".
const ENVOY: &str = "[$start] \"$request\" $status $flags $bytes_received $bytes_sent $ms $upstream_ms \"$client_list\" \
                     \"$http_user_agent\" \"$http_x_request_id\" \"$authority\" \"$upstream\"";
const ISTIO: &str = "[$start] \"$request\" $status $flags $details $termination \"$failure\" $bytes_received $bytes_sent \
                     $ms $upstream_ms \"$http_x_forwarded_for\" \"$http_user_agent\" \"$http_x_request_id\" \
                     \"$authority\" \"$upstream\" $cluster $upstream_local $local $client_port $sni $route_name";
/// `nginx_config.http.access_log_format` in the default configuration of Apache APISIX.
const APISIX: &str = "$remote_addr - $user [$time_local] $http_host \"$request\" $status $body_bytes_sent $request_time \
                      \"$http_referer\" \"$http_user_agent\" $upstream_addr $upstream_status $upstream_response_time \
                      \"$upstream_url\"";
/// "Common Log Format": Traefik, Access Logs. The time is that of the start.
const TRAEFIK: &str = "$client_list - $user [$start] \"$request\" $status $sent \"$http_referer\" \"$http_user_agent\" \
                       $count \"$router\" \"$server\" ${ms}ms";
/// "Log format": ingress-nginx; and until 0.25, with the client that it found, or `X-Forwarded-For` with its own peer.
const INGRESS_NGINX: &str = "$remote_addr - $user [$time_local] \"$request\" $status $body_bytes_sent \"$http_referer\" \
                             \"$http_user_agent\" $request_length $request_time [$proxy_upstream_name] \
                             [$proxy_alternative_upstream_name] $rest";
const OLD_INGRESS_NGINX: &str = "$peer - [$client_list] - $user [$time_local] \"$request\" $status $body_bytes_sent \
                                 \"$http_referer\" \"$http_user_agent\" $request_length $request_time \
                                 [$proxy_upstream_name] $rest";

/// In the order of preference, where a line is in several: the last is in what many others are.
pub const FORMATS: [Format; 18] = [
    Format { name: "json", shapes: &[Shape::Json] },
    Format { name: "transom", shapes: &[Shape::Json] },
    Format { name: "caddy", shapes: &[Shape::Json] },
    Format { name: "cloudflare", shapes: &[Shape::Json] },
    Format { name: "traefik", shapes: &[Shape::Json, Shape::Pattern(TRAEFIK, Escape::Backslash)] },
    Format {
        name: "envoy",
        shapes: &[Shape::Json, Shape::Pattern(ENVOY, Escape::None), Shape::Pattern(ISTIO, Escape::None)],
    },
    Format {
        name: "ingress-nginx",
        shapes: &[
            Shape::Pattern(OLD_INGRESS_NGINX, Escape::Backslash),
            Shape::Pattern(INGRESS_NGINX, Escape::Backslash),
        ],
    },
    Format { name: "apisix", shapes: &[Shape::Pattern(APISIX, Escape::Backslash)] },
    Format {
        name: "haproxy",
        shapes: &[Shape::Pattern(HAPROXY, Escape::Hash), Shape::Pattern(HAPROXY_CLF, Escape::Hash)],
    },
    Format { name: "alb", shapes: &[Shape::Pattern(ALB, Escape::Backslash)] },
    Format { name: "elb", shapes: &[Shape::Pattern(CLASSIC_ELB, Escape::Backslash)] },
    Format { name: "s3", shapes: &[Shape::Pattern(S3, Escape::None)] },
    Format { name: "cloudfront", shapes: &[Shape::Columns(0)] },
    Format { name: "iis", shapes: &[Shape::Columns(1)] },
    Format { name: "combined", shapes: &[Shape::Combined] },
    Format { name: "common", shapes: &[Shape::Combined] },
    Format { name: "nginx", shapes: &[Shape::Combined] },
    Format { name: "apache", shapes: &[Shape::Combined] },
];
