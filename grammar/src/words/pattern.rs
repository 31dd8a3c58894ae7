//! Regular expressions in ECMA-262 syntax with the `u` flag: text to a tree. Refuses expressions that are no regular
//! language.

use super::CharSet;

/// A regular expression's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RegexNode {
    Chars(CharSet),
    Sequence(Vec<RegexNode>),
    Either(Vec<RegexNode>),
    Repeat { of: Box<RegexNode>, min: u32, max: Option<u32> },
    Start,
    End,
}

struct RegexReader<'a> {
    chars: Vec<char>,
    at: usize,
    depth: usize,
    depth_max: usize,
    repeat_max: u32,
    text: &'a str,
}

impl RegexNode {
    /// Parses an expression. The error names the position and the problem.
    pub(crate) fn read(text: &str, depth_max: usize, repeat_max: usize) -> Result<RegexNode, String> {
        let repeat_max = u32::try_from(repeat_max).unwrap_or(u32::MAX);
        let mut reader = RegexReader { chars: text.chars().collect(), at: 0, depth: 0, depth_max, repeat_max, text };
        let pattern = reader.alternatives()?;
        if reader.at < reader.chars.len() { Err(reader.wrong("an unmatched )")) } else { Ok(pattern) }
    }
}

impl RegexReader<'_> {
    fn wrong(&self, what: &str) -> String {
        let short: String = self.text.chars().take(80).collect();
        format!("{what} at character {} of the pattern {short:?}", self.at + 1)
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn eat(&mut self, text: &str) -> bool {
        let is_here = self.chars[self.at..].iter().copied().take(text.len()).eq(text.chars());
        self.at += if is_here { text.len() } else { 0 };
        is_here
    }

    fn alternatives(&mut self) -> Result<RegexNode, String> {
        if self.depth == self.depth_max {
            return Err(self.wrong("groups nested too deeply"));
        }
        self.depth += 1;
        let mut options = vec![self.sequence()?];
        while self.eat("|") {
            options.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(if options.len() == 1 { options.remove(0) } else { RegexNode::Either(options) })
    }

    fn sequence(&mut self) -> Result<RegexNode, String> {
        let mut parts = Vec::new();
        while let Some(c) = self.peek().filter(|c| !matches!(c, '|' | ')')) {
            let part = self.atom(c)?;
            parts.push(self.repeated(part)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { RegexNode::Sequence(parts) })
    }

    fn atom(&mut self, c: char) -> Result<RegexNode, String> {
        self.at += 1;
        match c {
            '^' => Ok(RegexNode::Start),
            '$' => Ok(RegexNode::End),
            '.' => Ok(RegexNode::Chars(line_ends().negated())),
            '(' => self.group(),
            '[' => self.class().map(RegexNode::Chars),
            '\\' => self.escape().map(RegexNode::Chars),
            '*' | '+' | '?' => Err(self.wrong("nothing to repeat")),
            c => Ok(RegexNode::Chars(CharSet::single(c))),
        }
    }

    fn group(&mut self) -> Result<RegexNode, String> {
        if self.eat("?") {
            if self.eat("<") && !matches!(self.peek(), Some('=' | '!')) {
                while self.peek().is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
                    self.at += 1;
                }
                if !self.eat(">") {
                    return Err(self.wrong("a group's name without an end"));
                }
            } else if !self.eat(":") {
                return Err(self.wrong("a look-around, which is not supported,"));
            }
        }
        let inner = self.alternatives()?;
        if self.eat(")") { Ok(inner) } else { Err(self.wrong("a group without an end")) }
    }

    fn repeated(&mut self, part: RegexNode) -> Result<RegexNode, String> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.counted(part),
            _ => return Ok(part),
        };
        self.at += 1;
        self.finish_repetition(part, min, max)
    }

    fn finish_repetition(&mut self, part: RegexNode, min: u32, max: Option<u32>) -> Result<RegexNode, String> {
        // A lazy repetition matches the same texts.
        self.eat("?");
        if matches!(part, RegexNode::Start | RegexNode::End) {
            return Err(self.wrong("an anchor that is repeated"));
        }
        if min > self.repeat_max || max.is_some_and(|max| max > self.repeat_max || max < min) {
            return Err(self.wrong("a repetition that exceeds the limits"));
        }
        if matches!(self.peek(), Some('*' | '+' | '?' | '{')) {
            return Err(self.wrong("a repetition of a repetition"));
        }
        Ok(RegexNode::Repeat { of: Box::new(part), min, max })
    }

    fn counted(&mut self, part: RegexNode) -> Result<RegexNode, String> {
        self.at += 1;
        let min = self.number()?;
        let max = match self.eat(",") {
            false => Some(min),
            true if self.peek() == Some('}') => None,
            true => Some(self.number()?),
        };
        if !self.eat("}") {
            return Err(self.wrong("a repetition without an end"));
        }
        self.finish_repetition(part, min, max)
    }

    fn number(&mut self) -> Result<u32, String> {
        let digits: String = self.chars[self.at..].iter().take_while(|c| c.is_ascii_digit()).collect();
        self.at += digits.len();
        digits.parse().map_err(|_| self.wrong("an invalid repetition count"))
    }

    fn class(&mut self) -> Result<CharSet, String> {
        let is_negated = self.eat("^");
        let mut set = CharSet::default();
        while !self.eat("]") {
            let from = self.member()?;
            let is_range = self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|c| *c != ']');
            set = set.union(&if is_range {
                self.at += 1;
                let to = self.member()?;
                match (from.ranges(), to.ranges()) {
                    ([(from, last)], [(to, other)]) if from == last && to == other && from <= to => {
                        CharSet::of([(*from, *to)])
                    }
                    _ => return Err(self.wrong("an empty range of characters")),
                }
            } else {
                from
            });
        }
        Ok(if is_negated { set.negated() } else { set })
    }

    fn member(&mut self) -> Result<CharSet, String> {
        let c = self.peek().ok_or_else(|| self.wrong("a class without an end"))?;
        self.at += 1;
        match c {
            '\\' if self.eat("b") => Ok(CharSet::single('\u{8}')),
            '\\' => self.escape(),
            c => Ok(CharSet::single(c)),
        }
    }

    fn escape(&mut self) -> Result<CharSet, String> {
        let c = self.peek().ok_or_else(|| self.wrong("a \\ at the end"))?;
        self.at += 1;
        let digits = || CharSet::of([(0x30, 0x39)]);
        let word = || CharSet::of([(0x30, 0x39), (0x41, 0x5a), (0x5f, 0x5f), (0x61, 0x7a)]);
        Ok(match c {
            'd' => digits(),
            'D' => digits().negated(),
            'w' => word(),
            'W' => word().negated(),
            's' => spaces(),
            'S' => spaces().negated(),
            'n' => CharSet::single('\n'),
            'r' => CharSet::single('\r'),
            't' => CharSet::single('\t'),
            'v' => CharSet::single('\u{b}'),
            'f' => CharSet::single('\u{c}'),
            '0' if !self.peek().is_some_and(|c| c.is_ascii_digit()) => CharSet::single('\0'),
            'c' => self.control()?,
            'x' => CharSet::single(self.hex(2)?),
            'u' => self.unicode()?,
            'p' => self.property()?,
            'P' => self.property()?.negated(),
            'b' | 'B' => return Err(self.wrong("a word boundary, which is not supported,")),
            '1'..='9' | 'k' => return Err(self.wrong("a back-reference, which is not supported,")),
            c if c.is_alphanumeric() => return Err(self.wrong("an unknown escape")),
            c => CharSet::single(c),
        })
    }

    fn control(&mut self) -> Result<CharSet, String> {
        let letter =
            self.peek().filter(char::is_ascii_alphabetic).ok_or_else(|| self.wrong("an invalid control letter"))?;
        self.at += 1;
        Ok(CharSet::of([(letter as u32 % 32, letter as u32 % 32)]))
    }

    fn hex(&mut self, n: usize) -> Result<char, String> {
        let code = self.code(n)?;
        char::from_u32(code).ok_or_else(|| self.wrong("an invalid code point"))
    }

    fn code(&mut self, n: usize) -> Result<u32, String> {
        let digits: String = self.chars[self.at..].iter().take(n).collect();
        let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == n && !digits.starts_with('+'));
        self.at += digits.chars().count();
        code.ok_or_else(|| self.wrong("invalid hexadecimal digits"))
    }

    fn unicode(&mut self) -> Result<CharSet, String> {
        if self.eat("{") {
            let n = self.chars[self.at..].iter().take_while(|c| c.is_ascii_hexdigit()).count();
            let c = self.hex(n.clamp(1, 8))?;
            return if self.eat("}") { Ok(CharSet::single(c)) } else { Err(self.wrong("an escape without an end")) };
        }
        let high = self.code(4)?;
        if (0xd800..0xdc00).contains(&high) && self.eat("\\u") {
            let low = self.code(4)?;
            let code = 0x10000 + ((high - 0xd800) << 10) + low.wrapping_sub(0xdc00);
            let c = char::from_u32(code).filter(|_| (0xdc00..0xe000).contains(&low));
            return c.map(CharSet::single).ok_or_else(|| self.wrong("an invalid code point"));
        }
        char::from_u32(high).map(CharSet::single).ok_or_else(|| self.wrong("an invalid code point"))
    }

    /// `\p{L}`, by the tables of the crate with which the engine reads expressions.
    fn property(&mut self) -> Result<CharSet, String> {
        let name: String = self.chars[self.at..].iter().take_while(|c| **c != '}').collect();
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '=');
        let inner = name.strip_prefix('{').filter(|inner| !inner.is_empty() && inner.chars().all(is_name));
        let inner = inner.ok_or_else(|| self.wrong("an invalid character property"))?;
        let hir = regex_syntax::parse(&format!("\\p{{{inner}}}")).map_err(|_| self.wrong("an unknown property"))?;
        self.at += name.chars().count() + 1;
        match hir.into_kind() {
            regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(class)) => {
                Ok(CharSet::of(class.iter().map(|range| (range.start() as u32, range.end() as u32))))
            }
            _ => Err(self.wrong("an unknown property")),
        }
    }
}

fn line_ends() -> CharSet {
    CharSet::of([(0x0a, 0x0a), (0x0d, 0x0d), (0x2028, 0x2029)])
}

fn spaces() -> CharSet {
    let ascii = [(0x09, 0x0d), (0x20, 0x20), (0xa0, 0xa0), (0x1680, 0x1680), (0x2000, 0x200a), (0x2028, 0x2029)];
    CharSet::of(ascii.into_iter().chain([(0x202f, 0x202f), (0x205f, 0x205f), (0x3000, 0x3000), (0xfeff, 0xfeff)]))
}
