//! Recognizes lists of items of Structured Fields (RFC 9651, section 4.2). Nothing is built: it only checks the syntax.

/// Whether a field value is a list of items with parameters, and of no inner list. An empty list is none.
pub fn is_item_list(value: &[u8]) -> bool {
    let mut rest = Rest(value.trim_ascii());
    loop {
        if rest.item().is_none() {
            return false;
        }
        rest.skip(b" \t");
        if rest.0.is_empty() {
            return true;
        }
        if rest.take(b',').is_none() {
            return false;
        }
        rest.skip(b" \t");
    }
}

/// The unread rest of a field value. Each method takes what it names from the start; `None`: it is not there.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        self.0 = self.0.strip_prefix(&[byte])?;
        Some(())
    }

    fn take_while(&mut self, is_wanted: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.0.iter().position(|byte| !is_wanted(*byte)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }

    fn skip(&mut self, blanks: &[u8]) {
        self.take_while(|byte| blanks.contains(&byte));
    }

    fn item(&mut self) -> Option<()> {
        self.bare_item()?;
        while self.take(b';').is_some() {
            self.skip(b" ");
            self.key()?;
            if self.take(b'=').is_some() {
                self.bare_item()?;
            }
        }
        Some(())
    }

    fn key(&mut self) -> Option<()> {
        let first = self.next()?;
        self.take_while(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte));
        (first.is_ascii_lowercase() || first == b'*').then_some(())
    }

    fn bare_item(&mut self) -> Option<()> {
        match *self.0.first()? {
            b'-' | b'0'..=b'9' => self.number(),
            b'"' => self.string(),
            b'*' | b'a'..=b'z' | b'A'..=b'Z' => {
                self.take_while(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte));
                Some(())
            }
            b':' => {
                self.next();
                self.take_while(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte));
                self.take(b':')
            }
            b'?' => {
                self.next();
                self.next().filter(|byte| matches!(byte, b'0' | b'1')).map(drop)
            }
            b'@' => {
                self.next();
                self.number()
            }
            b'%' => self.display_string(),
            _ => None,
        }
    }

    /// An integer or a decimal.
    fn number(&mut self) -> Option<()> {
        let _ = self.take(b'-');
        let integer = self.take_while(|byte| byte.is_ascii_digit()).len();
        if self.take(b'.').is_none() {
            return (1..=15).contains(&integer).then_some(());
        }
        let fraction = self.take_while(|byte| byte.is_ascii_digit()).len();
        ((1..=12).contains(&integer) && (1..=3).contains(&fraction)).then_some(())
    }

    fn string(&mut self) -> Option<()> {
        self.take(b'"')?;
        loop {
            match self.next()? {
                b'"' => return Some(()),
                b'\\' => drop(self.next().filter(|byte| matches!(byte, b'"' | b'\\'))?),
                b' '..=b'~' => {}
                _ => return None,
            }
        }
    }

    fn display_string(&mut self) -> Option<()> {
        self.take(b'%')?;
        self.take(b'"')?;
        loop {
            match self.next()? {
                b'"' => return Some(()),
                b'%' => {
                    for _ in 0..2 {
                        self.next().filter(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))?;
                    }
                }
                b' '..=b'~' => {}
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_item_list;

    #[test]
    fn lists_of_items_are_told_from_other_fields() {
        for list in [
            "\"per-client\";r=50;t=30",
            "\"a\";q=100;w=60 ,\t\"b\"; q=1;qu=\"requests\"",
            "100;w=60",
            " 10, 20;w=1 ",
            "\"a\\\"b\\\\\"",
            "token;a;b=?1;c=:aGk=:;d=@1700000000;e=-1.5;f=%\"f%c3%bc\";*g=a/b:c",
        ] {
            assert!(is_item_list(list.as_bytes()), "{list}");
        }
        for other in [
            "",
            " ",
            "limit=100, remaining=3, reset=5",
            "limit=100",
            "100, 100;window=60;",
            "\"a\",",
            ",\"a\"",
            "\"a\" \"b\"",
            "\"a\" ;q=1",
            "(\"a\" \"b\");r=1",
            "\"a",
            "\"a\\b\"",
            "\"\u{e9}\"",
            "\"a\";R=1",
            "\"a\";r=",
            "1234567890123456",
            "1.2345",
            "-",
            "1.",
            "?2",
            ":a",
            "%\"%C3\"",
            "50;w=60, limit=1",
        ] {
            assert!(!is_item_list(other.as_bytes()), "{other}");
        }
    }
}
