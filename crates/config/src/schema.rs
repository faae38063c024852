//! The JSON schema of the configuration file (JSON Schema 2020-12), derived from the declarations of the settings.
//!
//! Editors use it for completion and errors. It describes structure: keys, types and bounds. What depends on several
//! settings, or on the text of a value, is checked by `transom check` only.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::access::AccessSettings;
use super::clients::ClientsSettings;
use super::counters::Counters;
use super::jwt::JwtSettings;
use super::key::KeySettings;
use super::limits::{DrainSettings, Http2, Limits, Timeouts};
use super::listen::{Admin, Listen};
use super::notify::NotifySettings;
use super::overrides::ExceptionSettings;
use super::path::PathSettings;
use super::route::{RouteConditions, RouteSettings};
use super::route_actions::ActionSettings;
use super::rule::RuleSettings;
use super::settings::{SIZE_UNITS, Section, Setting, Shape};
use super::span_export::TracingSettings;
use super::upstream::{ServerSettings, UpstreamPolicy};
use super::{AccessLogSettings, General, MetricsSettings};

/// The schema.
pub fn schema() -> Value {
    let mut schema = table(&top_level());
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("Configuration of Transom");
    schema
}

/// All settings of the file.
fn top_level() -> Vec<Setting> {
    let section = |key, description: &str, settings| Setting::section(key, description, Shape::Table(settings));
    let upstream = [ServerSettings::settings(), UpstreamPolicy::settings()].concat();
    let route = [RouteConditions::settings(), RouteSettings::settings(), ActionSettings::settings()].concat();
    let rule = [KeySettings::settings(), RuleSettings::settings(), ExceptionSettings::settings()].concat();
    let access_log = Shape::AnyOf(vec![Shape::Text("`file`"), Shape::Table(AccessLogSettings::settings())]);
    let mut settings = [General::settings(), PathSettings::settings()].concat();
    settings.extend([
        section("listen", "Addresses, limits on connections, and proxies in front of the gateway.", Listen::settings()),
        section("admin", "The admin address.", Admin::settings()),
        section("counters", "The counter table and its persistence.", Counters::settings()),
        section("timeouts", "Timeouts.", Timeouts::settings()),
        section("drain", "How the gateway stops.", DrainSettings::settings()),
        section("limits", "Limits on messages.", Limits::settings()),
        section("http2", "HTTP/2 from clients.", Http2::settings()),
        Setting::section("access_log", "The access log, or its `file` alone.", access_log),
        section("metrics", "Metrics on the admin address.", MetricsSettings::settings()),
        section("tracing", "Export of spans.", TracingSettings::settings()),
        section("notify", "Notifications about keys near their limits.", NotifySettings::settings()),
        section("clients", "Clients, and the parts of a request that identify them.", ClientsSettings::settings()),
        section("access", "Who is denied.", AccessSettings::settings()),
        section("jwt", "Verification of bearer tokens.", JwtSettings::settings()),
        Setting::section("rules", "Rules by name.", Shape::map_of(Shape::Table(rule))),
        Setting::section("upstreams", "Upstreams by name.", Shape::map_of(Shape::Table(upstream))),
        // Required without `listen.ratelimit_service`.
        Setting::section("routes", "Routes.", Shape::List(Box::new(Shape::Table(route)))),
    ]);
    settings
}

/// The keys and words of all settings, and their defaults, each as one text.
pub static VOCABULARY: LazyLock<(String, String)> = LazyLock::new(|| {
    let (mut words, mut defaults) = (String::new(), String::new());
    let mut shapes = vec![Shape::Table(top_level())];
    while let Some(shape) = shapes.pop() {
        match shape {
            Shape::Words(list) => list.into_iter().for_each(|word| words.extend([word, "\n"])),
            Shape::Table(settings) => {
                for Setting { key, default, shape, .. } in settings {
                    words.extend([key, "\n"]);
                    defaults.extend(default.iter().flat_map(|default| [default.as_str(), "\n"]));
                    shapes.push(shape);
                }
            }
            Shape::List(of) | Shape::OneOrList(of) | Shape::Map(of) | Shape::Described(_, of) => shapes.push(*of),
            Shape::AnyOf(several) => shapes.extend(several),
            Shape::Boolean
            | Shape::Integer(_)
            | Shape::Share
            | Shape::Number
            | Shape::Duration(_)
            | Shape::Size(_)
            | Shape::Text(_) => {}
        }
    }
    (words, defaults)
});

impl Shape {
    /// The JSON schema of a value.
    fn schema(&self) -> Value {
        match self {
            Shape::Boolean => or_reference(json!({ "type": "boolean" })),
            Shape::Integer(range) => {
                or_reference(json!({ "type": "integer", "minimum": range.start(), "maximum": range.end() }))
            }
            Shape::Share => or_reference(json!({ "type": "number", "minimum": 0, "maximum": 1 })),
            Shape::Number => json!({ "type": "number", "minimum": 0 }),
            Shape::Duration(_) => or_reference(json!({ "type": "string", "pattern": "^[0-9]+(ms|s|m|h|d|w)$" })),
            Shape::Size(range) => {
                let units = SIZE_UNITS.map(|(unit, _)| unit).join("|");
                let text = json!({ "type": "string", "pattern": format!("^[0-9]+ *({units})$") });
                json!({ "anyOf": [Shape::Integer(range.clone()).schema(), text] })
            }
            Shape::Words(words) => or_reference(json!({ "enum": words })),
            Shape::Text(name) => json!({ "type": "string", "title": name }),
            Shape::List(of) => json!({ "type": "array", "items": of.schema() }),
            Shape::OneOrList(of) => json!({ "anyOf": [of.schema(), Shape::List(of.clone()).schema()] }),
            Shape::Table(settings) => table(settings),
            Shape::Map(of) => json!({ "type": "object", "additionalProperties": of.schema() }),
            Shape::AnyOf(shapes) => json!({ "anyOf": shapes.iter().map(Shape::schema).collect::<Vec<_>>() }),
            Shape::Described(_, of) => of.schema(),
        }
    }
}

/// A value, or a string with a reference to it.
fn or_reference(value: Value) -> Value {
    json!({ "anyOf": [value, { "type": "string", "pattern": r"\$\{(env|file):" }] })
}

/// The schema of a table with these settings and no others.
fn table(settings: &[Setting]) -> Value {
    let property = |setting: &Setting| {
        let mut property = setting.shape.schema();
        property["description"] = json!(setting.description);
        if let Some(default) = &setting.default {
            property["x-default"] = json!(default);
        }
        if setting.needs_restart {
            property["x-needs-restart"] = json!(true);
        }
        (setting.key.to_owned(), property)
    };
    let required: Vec<&str> =
        settings.iter().filter(|setting| setting.is_required).map(|setting| setting.key).collect();
    json!({
        "type": "object", "additionalProperties": false, "required": required,
        "properties": settings.iter().map(property).collect::<Map<_, _>>(),
    })
}
