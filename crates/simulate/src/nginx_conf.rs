//! Finds `log_format` in a configuration of nginx.

use super::json_scanner::Escape;

/// A format of access logs, and how its values are escaped.
#[derive(Debug, PartialEq, Eq)]
pub struct NginxFormat {
    pub text: String,
    pub escape: Escape,
}

/// The `log_format` of a name in the text of a configuration.
///
/// # Errors
///
/// A message for the user.
pub fn log_format(text: &str, name: &str) -> Result<NginxFormat, String> {
    let mut names = Vec::new();
    let mut words = words(text).into_iter();
    while let Some(word) = words.next() {
        if word != Word::Text("log_format".to_owned()) {
            continue;
        }
        let values = words.by_ref().map_while(|word| if let Word::Text(text) = word { Some(text) } else { None });
        let mut values: Vec<String> = values.collect();
        if values.is_empty() {
            continue;
        }
        let found = values.remove(0);
        if found != name {
            names.push(format!("`{found}`"));
            continue;
        }
        let escape = match values.first().and_then(|value| value.strip_prefix("escape=")) {
            Some("none") => Escape::None,
            Some(_) | None => Escape::Backslash,
        };
        values.retain(|value| !value.starts_with("escape="));
        return Ok(NginxFormat { text: values.concat(), escape });
    }
    match names.is_empty() {
        true => Err("it has no `log_format`; included files are not read".to_owned()),
        false => Err(format!("it has no `log_format {name}`, but {}", names.join(", "))),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Word {
    Text(String),
    /// `;`, `{` or `}`.
    End,
}

fn words(text: &str) -> Vec<Word> {
    let mut words = Vec::new();
    let mut signs = text.chars().peekable();
    while let Some(sign) = signs.next() {
        match sign {
            '#' => while signs.next().is_some_and(|sign| sign != '\n') {},
            ';' | '{' | '}' => words.push(Word::End),
            '"' | '\'' => {
                let mut word = String::new();
                while let Some(inner) = signs.next().filter(|inner| *inner != sign) {
                    let sign = if inner == '\\' { unescaped(signs.next(), &mut word) } else { inner };
                    word.push(sign);
                }
                words.push(Word::Text(word));
            }
            sign if sign.is_whitespace() => {}
            sign => {
                let mut word = String::from(sign);
                // `${name}` is one word.
                while let Some(inner) = signs
                    .next_if(|inner| !inner.is_whitespace() && *inner != ';' && (*inner != '{' || word.ends_with('$')))
                {
                    let sign = if inner == '\\' { unescaped(signs.next(), &mut word) } else { inner };
                    word.push(sign);
                }
                words.push(Word::Text(word));
            }
        }
    }
    words
}

/// What a backslash and the sign behind it stand for. nginx keeps backslashes before signs that need none.
fn unescaped(sign: Option<char>, word: &mut String) -> char {
    match sign {
        Some('n') => '\n',
        Some('r') => '\r',
        Some('t') => '\t',
        Some(sign @ ('"' | '\'' | '\\')) => sign,
        Some(sign) => {
            word.push('\\');
            sign
        }
        None => '\\',
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_found() {
        let text = r#"
            # log_format off '$remote_addr';
            http {
                log_format first $remote_addr [${time_local}];
                log_format "second" escape=json '{"a":"$remote_addr",' # joined
                    "\"b\":\"$request\"}\n\d";
                server { access_log /var/log/nginx/a.log first; log_format third escape=none '$status'; }
            }"#;
        let format = |name: &str| log_format(text, name).map(|format| (format.text, format.escape));
        assert_eq!(format("first"), Ok(("$remote_addr[${time_local}]".to_owned(), Escape::Backslash)));
        let second = "{\"a\":\"$remote_addr\",\"b\":\"$request\"}\n\\d";
        assert_eq!(format("second"), Ok((second.to_owned(), Escape::Backslash)));
        assert_eq!(format("third"), Ok(("$status".to_owned(), Escape::None)));
        assert_eq!(format("off").unwrap_err(), "it has no `log_format off`, but `first`, `second`, `third`");
        assert!(log_format("include a.conf;", "a").unwrap_err().contains("included files are not read"));
    }
}
