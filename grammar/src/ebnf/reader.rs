//! Text to rules, with the line and the column of what is wrong.

use super::{EbnfExpr, EbnfNotation, EbnfRules};
use crate::words::CharSet;
use crate::{GrammarLimits, GrammarRefused};

struct EbnfReader<'t, 'l> {
    text: &'t str,
    at: usize,
    form: EbnfNotation,
    depth: usize,
    limits: &'l GrammarLimits,
    /// Rules that are used, and where.
    used: Vec<(String, usize)>,
}

pub(super) fn read(text: &str, form: EbnfNotation, limits: &GrammarLimits) -> Result<EbnfRules, GrammarRefused> {
    let mut reader = EbnfReader { text, at: 0, form, depth: 0, limits, used: Vec::new() };
    let mut grammar = EbnfRules::new();
    reader.blanks();
    while reader.at < text.len() {
        let from = reader.at;
        let name = reader.name().ok_or_else(|| reader.wrong("the name of a rule is expected"))?;
        reader.blanks();
        if !reader.eat("::=") {
            return Err(reader.wrong("::= is expected"));
        }
        let expr = reader.alternatives()?;
        if grammar.insert(name.clone(), expr).is_some() {
            return Err(reader.wrong_at(from, &format!("the rule {name} is defined twice")));
        }
    }
    if !grammar.contains_key("root") {
        return Err(reader.wrong_at(0, "the rule root is missing"));
    }
    match reader.used.iter().find(|(name, _)| !grammar.contains_key(name)) {
        Some((name, at)) => Err(reader.wrong_at(*at, &format!("the rule {name} is not defined"))),
        None => Ok(grammar),
    }
}

impl EbnfReader<'_, '_> {
    fn wrong(&self, why: &str) -> GrammarRefused {
        self.wrong_at(self.at, why)
    }

    fn line_and_column(&self, at: usize) -> String {
        let before = &self.text[..at.min(self.text.len())];
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count());
        format!("line {}, column {}", before.matches('\n').count() + 1, column + 1)
    }

    fn wrong_at(&self, at: usize, why: &str) -> GrammarRefused {
        GrammarRefused::invalid(self.line_and_column(at), why)
    }

    fn unsupported(&self, what: &str) -> GrammarRefused {
        GrammarRefused::unsupported(self.line_and_column(self.at), what)
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn eat(&mut self, text: &str) -> bool {
        let is_here = self.rest().starts_with(text);
        self.at += if is_here { text.len() } else { 0 };
        is_here
    }

    /// Blanks, new lines and comments.
    fn blanks(&mut self) {
        while let Some(c) = self.peek() {
            match c {
                '#' => self.at += self.rest().find('\n').unwrap_or(self.rest().len()),
                c if c.is_whitespace() => self.at += c.len_utf8(),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let n = self.rest().find(|c| !is_name(c)).unwrap_or(self.rest().len());
        let name = self.rest()[..n].to_owned();
        let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        self.at += if starts { n } else { 0 };
        starts.then_some(name)
    }

    /// Whether the next rule begins here: a name and `::=`.
    fn is_rule(&mut self) -> bool {
        let from = self.at;
        let is_rule = self.name().is_some() && {
            self.blanks();
            self.rest().starts_with("::=")
        };
        self.at = from;
        is_rule
    }

    fn alternatives(&mut self) -> Result<EbnfExpr, GrammarRefused> {
        if self.depth == self.limits.depth_max {
            return Err(GrammarRefused::too_large("the depth of groups", self.limits.depth_max));
        }
        self.depth += 1;
        let mut options = vec![self.sequence()?];
        while self.eat("|") {
            options.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(if options.len() == 1 { options.remove(0) } else { EbnfExpr::Either(options) })
    }

    fn sequence(&mut self) -> Result<EbnfExpr, GrammarRefused> {
        let mut parts = Vec::new();
        loop {
            self.blanks();
            match self.peek() {
                None | Some('|' | ')') => break,
                _ if self.is_rule() => break,
                Some(c) => {
                    let part = self.atom(c)?;
                    let part = self.repeated(part)?;
                    parts.push(part);
                }
            }
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { EbnfExpr::Sequence(parts) })
    }

    fn atom(&mut self, c: char) -> Result<EbnfExpr, GrammarRefused> {
        match c {
            '"' => self.literal(),
            '[' => self.class(),
            '(' => {
                let from = self.at;
                self.at += 1;
                if matches!(self.peek(), Some('=' | '!')) {
                    return Err(self.unsupported("a look-ahead"));
                }
                let inner = self.alternatives()?;
                if self.eat(")") { Ok(inner) } else { Err(self.wrong_at(from, "this group has no end")) }
            }
            '.' if self.form == EbnfNotation::Gbnf => {
                self.at += 1;
                Ok(EbnfExpr::Chars(CharSet::all()))
            }
            '<' | '!' => Err(self.unsupported("a token by its name")),
            '/' => Err(self.unsupported("a regular expression between slashes")),
            _ => {
                let from = self.at;
                let name = self.name().ok_or_else(|| self.wrong(&format!("{c:?} has no meaning here")))?;
                if self.rest().starts_with('(') {
                    return Err(self.unsupported(&format!("the macro {name}")));
                }
                self.used.push((name.clone(), from));
                Ok(EbnfExpr::Rule(name))
            }
        }
    }

    fn repeated(&mut self, of: EbnfExpr) -> Result<EbnfExpr, GrammarRefused> {
        let mut of = of;
        loop {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.counts()?,
                _ => return Ok(of),
            };
            self.at += 1;
            if min.max(max.unwrap_or(0)) > self.limits.repeat_max {
                return Err(GrammarRefused::too_large(
                    format!("a repetition at {}", self.line_and_column(self.at)),
                    self.limits.repeat_max,
                ));
            }
            of = EbnfExpr::Repeat { of: Box::new(of), min, max };
        }
    }

    /// `{n}`, `{n,}`, `{n,m}`, up to the brace that closes it.
    fn counts(&mut self) -> Result<(usize, Option<usize>), GrammarRefused> {
        let inner = self.rest()[1..].split('}').next().unwrap_or_default();
        let n = inner.len();
        let (min, max) = inner
            .split_once(',')
            .map_or((inner, Some(inner)), |(min, max)| (min, Some(max).filter(|max| !max.trim().is_empty())));
        let number = |text: &str| text.trim().parse::<usize>().ok();
        let (min, max) = (number(if min.trim().is_empty() { "0" } else { min }), max.map(number));
        match (min, max) {
            (Some(min), None) => {
                self.at += n + 1;
                Ok((min, None))
            }
            (Some(min), Some(Some(max))) if min <= max => {
                self.at += n + 1;
                Ok((min, Some(max)))
            }
            _ => Err(self.wrong("a repetition is {n}, {n,} or {n,m}")),
        }
    }

    fn literal(&mut self) -> Result<EbnfExpr, GrammarRefused> {
        let from = self.at;
        self.at += 1;
        let mut parts = Vec::new();
        loop {
            match self.next() {
                Some('"') => break,
                Some('\\') => parts.push(EbnfExpr::Chars(CharSet::single(self.escape()?))),
                Some('\n') | None => return Err(self.wrong_at(from, "this text has no end")),
                Some(c) => parts.push(EbnfExpr::Chars(CharSet::single(c))),
            }
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { EbnfExpr::Sequence(parts) })
    }

    fn class(&mut self) -> Result<EbnfExpr, GrammarRefused> {
        let from = self.at;
        self.at += 1;
        let is_negated = self.eat("^");
        let mut ranges = Vec::new();
        while !self.eat("]") {
            let first = self.member(from)?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let last = if is_range {
                self.at += 1;
                self.member(from)?
            } else {
                first
            };
            if first > last {
                return Err(self.wrong_at(from, "an empty range of characters"));
            }
            ranges.push((first as u32, last as u32));
        }
        let chars = CharSet::of(ranges);
        Ok(EbnfExpr::Chars(if is_negated { chars.negated() } else { chars }))
    }

    fn member(&mut self, from: usize) -> Result<char, GrammarRefused> {
        match self.next() {
            Some('\\') => self.escape(),
            Some('\n') | None => Err(self.wrong_at(from, "this class has no end")),
            Some(c) => Ok(c),
        }
    }

    fn escape(&mut self) -> Result<char, GrammarRefused> {
        let from = self.at - 1;
        let wrong = |reader: &Self| reader.wrong_at(from, "an unknown escape");
        let c = self.next().ok_or_else(|| wrong(self))?;
        let n_digits = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'b' => return Ok('\u{8}'),
            'f' => return Ok('\u{c}'),
            '0' => return Ok('\0'),
            c if c.is_ascii_punctuation() || c == ' ' => return Ok(c),
            _ => return Err(wrong(self)),
        };
        let digits = self.rest().get(..n_digits).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()).and_then(char::from_u32);
        self.at += n_digits;
        code.ok_or_else(|| self.wrong_at(from, "an escape of an invalid character"))
    }
}
