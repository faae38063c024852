//! What the JSON of requests and responses consists of, declared beside the handlers. The names that a request may have, and the
//! JSON Schema of the OpenAPI document, come from these declarations.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use transom_http::error::ApiError;

/// Parses the object that a request has as its body. No object may have a name twice: readers differ in which one they take.
/// `what`: the object, for messages.
pub fn parse_object(body: &[u8], what: &str) -> Result<Map<String, Value>, ApiError> {
    let not_an_object = || ApiError::Malformed(format!("{what} is not a JSON object"));
    let mut reader = serde_json::Deserializer::from_slice(body);
    let parsed = Distinct.deserialize(&mut reader).and_then(|()| reader.end());
    match parsed {
        Err(error) if error.is_data() => {
            let message = error.to_string();
            // Without the position, which is of no use in one line.
            let message = message.split_once(" at line").map_or(&*message, |(message, _)| message);
            Err(ApiError::Malformed(message.to_owned()))
        }
        _ => serde_json::from_slice(body).map_err(|_other| not_an_object()),
    }
}

/// Accepts values whose objects have each name once.
struct Distinct;

impl<'de> DeserializeSeed<'de> for Distinct {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Distinct {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<(), A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = object.next_key::<String>()? {
            if let Some(name) = names.replace(name) {
                let name: String = name.chars().take(64).collect();
                return Err(A::Error::custom(format!("`{name}` is given twice")));
            }
            object.next_value_seed(Distinct)?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Distinct)?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// What a value may be.
#[derive(Clone, Copy, Debug)]
pub enum Schema {
    /// Any JSON value.
    Any,
    Boolean,
    /// A whole number that is not negative.
    Integer,
    Number,
    Text,
    /// One of several texts.
    Words(&'static [&'static str]),
    /// A text of RFC 3339.
    Time,
    OrNull(&'static Schema),
    List(&'static Schema),
    /// An object with names that the caller or the configuration chooses.
    Map(&'static Schema),
    AnyOf(&'static [Schema]),
    Object(&'static Object),
}

/// An object with known fields.
#[derive(Debug)]
pub struct Object {
    /// Of the component in the OpenAPI document.
    pub name: &'static str,
    /// Whether other fields are refused. Responses may get further fields in later versions.
    pub is_closed: bool,
    pub fields: &'static [Field],
}

#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub schema: Schema,
    pub is_required: bool,
}

/// A field that the object always has.
pub const fn required(name: &'static str, schema: Schema) -> Field {
    Field { name, schema, is_required: true }
}

/// A field that may be absent.
pub const fn optional(name: &'static str, schema: Schema) -> Field {
    Field { name, schema, is_required: false }
}

impl Object {
    /// Reports a field that a request cannot have.
    pub fn check_names(&self, given: &Map<String, Value>) -> Result<(), ApiError> {
        let is_unknown = |name: &&String| !self.fields.iter().any(|field| field.name == name.as_str());
        let Some(other) = given.keys().find(is_unknown) else { return Ok(()) };
        let known: Vec<&str> = self.fields.iter().map(|field| field.name).collect();
        let other: String = other.chars().take(64).collect();
        Err(ApiError::Malformed(format!("`{other}` is not one of `{}`", known.join("`, `"))))
    }

    /// As JSON Schema. Adds the objects that it contains to `components`.
    fn to_json(&self, components: &mut BTreeMap<&'static str, Value>) -> Value {
        let properties: Map<String, Value> =
            self.fields.iter().map(|field| (field.name.to_owned(), field.schema.to_json(components))).collect();
        let required: Vec<&str> =
            self.fields.iter().filter(|field| field.is_required).map(|field| field.name).collect();
        let mut object = json!({ "type": "object", "properties": properties, "required": required });
        if self.is_closed {
            object["additionalProperties"] = json!(false);
        }
        object
    }
}

impl Schema {
    /// Whether a request may leave the value out.
    pub fn is_optional(self) -> bool {
        matches!(self, Schema::Object(object) if object.fields.iter().all(|field| !field.is_required))
    }

    /// As JSON Schema. Adds the objects that it refers to to `components`.
    pub fn to_json(self, components: &mut BTreeMap<&'static str, Value>) -> Value {
        match self {
            Schema::Any => json!({}),
            Schema::Boolean => json!({ "type": "boolean" }),
            Schema::Integer => json!({ "type": "integer", "minimum": 0 }),
            Schema::Number => json!({ "type": "number" }),
            Schema::Text => json!({ "type": "string" }),
            Schema::Words(words) => json!({ "type": "string", "enum": words }),
            Schema::Time => json!({ "type": "string", "format": "date-time" }),
            Schema::OrNull(schema) => json!({ "anyOf": [schema.to_json(components), { "type": "null" }] }),
            Schema::List(schema) => json!({ "type": "array", "items": schema.to_json(components) }),
            Schema::Map(schema) => json!({ "type": "object", "additionalProperties": schema.to_json(components) }),
            Schema::AnyOf(schemas) => {
                let schemas: Vec<Value> = schemas.iter().map(|schema| schema.to_json(components)).collect();
                json!({ "anyOf": schemas })
            }
            Schema::Object(object) => {
                if !components.contains_key(object.name) {
                    // First, because an object may contain itself.
                    components.insert(object.name, Value::Null);
                    let described = object.to_json(components);
                    components.insert(object.name, described);
                }
                json!({ "$ref": format!("#/components/schemas/{}", object.name) })
            }
        }
    }
}
