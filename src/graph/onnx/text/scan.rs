//! Scans characters, names and literals for [`parse`](super::parse).

use super::super::weigh::{HEADER, capacity, most, refusal};
use super::{is_special_float, is_word_byte};
use crate::error::ensure;
use std::mem::size_of;
use std::str::FromStr;

/// The deepest nesting of graphs and types.
pub(super) const MAX_DEPTH: usize = 32;

/// An error at a byte of the text.
pub(super) struct Fault {
    pub(super) at: usize,
    pub(super) what: String,
}

pub(super) type Parse<T> = Result<T, Fault>;

/// A position in the text, always at the start of a character.
///
/// There are no tokens, because the meaning of a character depends on its context.
pub(super) struct Parser<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
    pub(super) depth: usize,
    /// The bytes that the messages may still take.
    pub(super) room: u64,
}

/// The first 40 characters of a word.
pub(super) fn clip(ascii: &str) -> &str {
    &ascii[..ascii.len().min(40)]
}

impl<'a> Parser<'a> {
    pub(super) fn new(text: &'a str) -> Parser<'a> {
        Parser { text, at: 0, depth: 0, room: most(text.len()) }
    }

    /// Takes bytes from the room that there is for messages.
    pub(super) fn spend(&mut self, bytes: u64) -> Parse<()> {
        let fault = || Fault { at: self.at, what: refusal(self.text.len()) };
        self.room = self.room.checked_sub(bytes).ok_or_else(fault)?;
        Ok(())
    }

    /// Takes room for one more value in a vector.
    pub(super) fn spend_for<T>(&mut self, vector: &[T]) -> Parse<()> {
        let (had, size) = (vector.len() as u64, size_of::<T>() as u64);
        self.spend(capacity(had + 1, size) - capacity(had, size))
    }

    /// Takes room for a struct that moves from one place to another.
    pub(super) fn spend_twice<T>(&mut self) -> Parse<()> {
        self.spend(2 * (HEADER + size_of::<T>() as u64))
    }

    fn owned(&mut self, text: &str) -> Parse<String> {
        self.spend(HEADER + text.len() as u64)?;
        Ok(text.to_owned())
    }

    /// The next byte after space and comments.
    pub(super) fn peek(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        loop {
            match bytes.get(self.at)? {
                b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c => self.at += 1,
                b'#' => self.at = self.text[self.at..].find('\n').map_or(self.text.len(), |n| self.at + n),
                &byte => return Some(byte),
            }
        }
    }

    /// The position of the next byte after space and comments.
    pub(super) fn start(&mut self) -> usize {
        self.peek();
        self.at
    }

    pub(super) fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, byte: u8, expected: &str) -> Parse<()> {
        if self.eat(byte) { Ok(()) } else { Err(self.expected(expected)) }
    }

    pub(super) fn expected(&mut self, expected: &str) -> Fault {
        let found = match self.peek() {
            None => "the end of the text".to_owned(),
            Some(b'"') => "a string".to_owned(),
            Some(byte) if is_word_byte(byte) => format!("'{}'", clip(self.word_bytes())),
            Some(_) => format!("'{}'", self.text[self.at..].chars().next().unwrap_or_default()),
        };
        Fault { at: self.at, what: format!("expected {expected}, found {found}") }
    }

    /// The letters, digits and underscores from here on; there may be none.
    pub(super) fn word_bytes(&self) -> &'a str {
        let rest = &self.text[self.at..];
        &rest[..rest.bytes().take_while(|&b| is_word_byte(b)).count()]
    }

    pub(super) fn peek_word(&mut self) -> Option<&'a str> {
        let first = self.peek()?;
        (is_word_byte(first) && !first.is_ascii_digit()).then(|| self.word_bytes())
    }

    /// An identifier.
    pub(super) fn word(&mut self) -> Option<&'a str> {
        let word = self.peek_word()?;
        self.at += word.len();
        Some(word)
    }

    /// An identifier or a string.
    pub(super) fn name(&mut self, expected: &str) -> Parse<String> {
        match self.peek() {
            Some(b'"') => self.string(expected),
            _ => match self.word() {
                Some(word) => self.owned(word),
                None => Err(self.expected(expected)),
            },
        }
    }

    /// The names of a node's inputs or outputs. A name before a comma may be left out; a trailing comma adds none.
    pub(super) fn names(&mut self) -> Parse<Vec<String>> {
        let mut names = Vec::new();
        loop {
            self.spend_for(&names)?;
            match self.peek() {
                Some(b'"') => names.push(self.string("a name")?),
                Some(b',') => names.push(String::new()),
                _ => match self.word() {
                    Some(word) => names.push(self.owned(word)?),
                    None => return Ok(names),
                },
            }
            if !self.eat(b',') {
                return Ok(names);
            }
        }
    }

    /// Names with dots between them. Those after a dot may start with a digit, as in the domain `pkg.torch.2.1`.
    pub(super) fn dotted(&mut self, expected: &str) -> Parse<Vec<String>> {
        let mut parts = vec![self.name(expected)?];
        while self.eat(b'.') {
            self.spend_for(&parts)?;
            if self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
                let word = self.word_bytes();
                self.at += word.len();
                parts.push(self.owned(word)?);
            } else {
                parts.push(self.name(expected)?);
            }
        }
        Ok(parts)
    }

    pub(super) fn string(&mut self, expected: &str) -> Parse<String> {
        let open = self.start();
        self.expect(b'"', expected)?;
        let mut string = String::new();
        let mut rest = &self.text[self.at..];
        while let Some(end) = rest.find(['"', '\\']) {
            string.push_str(&rest[..end]);
            let mut after = rest[end..].chars();
            if after.next() == Some('"') {
                self.at = self.text.len() - after.as_str().len();
                self.spend(HEADER + string.capacity() as u64)?;
                return Ok(string);
            }
            string.extend(after.next());
            rest = after.as_str();
        }
        Err(Fault { at: open, what: "expected '\"' at the end of this string, found the end of the text".into() })
    }

    /// The text of a number: an optional `-`, then digits with an optional fraction and exponent, or inf, infinity or nan.
    pub(super) fn number(&mut self, expected: &str) -> Parse<&'a str> {
        let start = self.start();
        let rest = &self.text[start..];
        let bytes = rest.as_bytes();
        let digits = |from: usize| from + bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
        let unsigned = usize::from(bytes.first() == Some(&b'-'));
        let mut end = digits(unsigned);
        if end > unsigned {
            if bytes.get(end) == Some(&b'.') {
                end = digits(end + 1);
            }
            if let Some(b'e' | b'E') = bytes.get(end) {
                end = digits(end + 1 + usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-'))));
            }
        } else {
            end += bytes[end..].iter().take_while(|&&b| is_word_byte(b)).count();
            ensure(is_special_float(&rest[unsigned..end]), || self.expected(expected))?;
        }
        self.at += end;
        Ok(&rest[..end])
    }

    pub(super) fn int<T: FromStr>(&mut self, expected: &str) -> Parse<T> {
        let at = self.start();
        let text = self.number(expected)?;
        text.parse().map_err(|_| Fault { at, what: format!("expected {expected}, found '{}'", clip(text)) })
    }

    pub(super) fn real<T: FromStr + Into<f64> + Copy>(&mut self, expected: &str) -> Parse<T> {
        let at = self.start();
        let text = self.number(expected)?;
        let is_digit = |byte: u8| byte.is_ascii_digit();
        match text.parse::<T>() {
            // Digits that round to infinity are an error; the word `inf` is not.
            Ok(value) if value.into().is_finite() || !text.bytes().any(is_digit) => Ok(value),
            _ => Err(Fault { at, what: format!("expected {expected}, found '{}'", clip(text)) }),
        }
    }

    /// Items with commas between them, up to `close`.
    pub(super) fn items<T>(
        &mut self,
        close: u8,
        what: &str,
        mut item: impl FnMut(&mut Self) -> Parse<T>,
    ) -> Parse<Vec<T>> {
        let mut items = Vec::new();
        if self.eat(close) {
            return Ok(items);
        }
        loop {
            self.spend_for(&items)?;
            items.push(item(self)?);
            if self.eat(close) {
                return Ok(items);
            }
            ensure(self.eat(b','), || self.expected(&format!("',' or '{}' after {what}", close as char)))?;
        }
    }

    /// Runs `inner` one level deeper. Refuses a text that nests too deep before the stack overflows.
    pub(super) fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parse<T>) -> Parse<T> {
        if self.depth == MAX_DEPTH {
            let what = format!("expected at most {MAX_DEPTH} levels of graphs and types, found one more");
            return Err(Fault { at: self.start(), what });
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }
}
