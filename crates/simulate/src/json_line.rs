//! Reads lines of JSON.

use super::field_names::KeyTree;
use super::json_scanner::{Malformed, Scanner, Value};
use super::log_line::{HeaderSpan, LineFields, LogLine, NoRequest};

pub fn read(line: &[u8], keys: &KeyTree, headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
    let mut fields = LineFields::new(headers);
    let mut scanner = Scanner::new(line);
    read_object(&mut fields, keys, line, &mut scanner, headers)?;
    if !scanner.is_at_end() {
        return Err(Malformed.into());
    }
    fields.finish(line, headers)
}

fn read_object<'a>(
    fields: &mut LineFields,
    keys: &KeyTree,
    line: &'a [u8],
    scanner: &mut Scanner<'a>,
    headers: &mut Vec<HeaderSpan>,
) -> Result<(), Malformed> {
    scanner.object(&mut |scanner, key| {
        let Some(node) = keys.get(key, line) else { return scanner.skip() };
        match scanner.value()? {
            Value::Object if node.members.is_empty() => {
                let object = scanner.nested()?;
                if let Some((field, _)) = node.field {
                    fields.set_object(field, object);
                }
            }
            Value::Object => read_object(fields, &node.members, line, scanner, headers)?,
            Value::Array => match node.field {
                Some(field) => fields.set_array(field, line, scanner, headers)?,
                None => scanner.skip_nested()?,
            },
            Value::Text(text) | Value::Number(text) => {
                if let Some(field) = node.field {
                    fields.set(field, text, line, headers);
                }
            }
            Value::Null => {
                if let Some((field, _)) = node.field {
                    fields.set_null(field);
                }
            }
            Value::Bool(_) => {}
        }
        Ok(())
    })
}
