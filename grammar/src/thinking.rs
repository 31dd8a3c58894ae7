//! A token budget for the thought before an answer: when it is used up, the tokens that end the thought are forced.
//! Knows the bytes of tokens, but nothing of templates or of the text behind the thought.
//!
//! ```text
//! before ── an opening text ──▶ inside ── a closing text ──▶ behind
//! ```
//!
//! It depends on the tokens of the answer alone, so a replay forces the same tokens.

use crate::Vocabulary;
use serde_json::{Value, json};
use types::{Grammar, Token};

/// The markers of a thought, and its length limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// The most tokens between the texts that open and close thoughts.
    pub tokens_max: u32,
    /// The answer begins within a thought.
    pub is_open: bool,
    /// An answer may contain several thoughts; otherwise only its beginning can be a thought.
    pub repeats: bool,
    /// Texts that begin a thought.
    pub opens: Vec<String>,
    /// Texts that end a thought. The first one is forced.
    pub closes: Vec<String>,
}

const MARK: &str = "// thinking ";

impl ThinkingBudget {
    /// Returns the description of answers whose thoughts stay within this budget, followed by `behind`, or by any text.
    /// A grammar covers the thought too: `behind` allows the forced tokens.
    pub fn to_grammar(&self, behind: Option<&Grammar>) -> Grammar {
        let ThinkingBudget { tokens_max, is_open, repeats, opens, closes } = self;
        let head = json!({
            "tokens_max": tokens_max, "is_open": is_open, "repeats": repeats, "opens": opens, "closes": closes,
        });
        Grammar::new(format!("{MARK}{head}\n{}", behind.map_or("", Grammar::as_str)))
    }

    /// Returns the budget in a description. None where thoughts may have any length.
    pub fn of(grammar: &Grammar) -> Option<ThinkingBudget> {
        split(grammar.as_str())?.0
    }

    fn read(head: &str) -> Option<ThinkingBudget> {
        let head: Value = serde_json::from_str(head).ok()?;
        let texts = |name: &str| {
            let texts = head[name].as_array()?.iter().map(|text| text.as_str().map(str::to_owned));
            texts.collect::<Option<Vec<_>>>()
        };
        let budget = ThinkingBudget {
            tokens_max: head["tokens_max"].as_u64()?.try_into().ok()?,
            is_open: head["is_open"].as_bool()?,
            repeats: head["repeats"].as_bool()?,
            opens: texts("opens")?,
            closes: texts("closes")?,
        };
        let has_empty = budget.opens.iter().chain(&budget.closes).any(String::is_empty);
        (!has_empty && !budget.closes.is_empty()).then_some(budget)
    }
}

/// Splits a description into its budget and the rest, which is empty where any text may follow. None if the budget
/// cannot be read.
pub(crate) fn split(description: &str) -> Option<(Option<ThinkingBudget>, &str)> {
    let Some(marked) = description.strip_prefix(MARK) else { return Some((None, description)) };
    let (head, rest) = marked.split_once('\n')?;
    Some((Some(ThinkingBudget::read(head)?), rest))
}

/// The progress of one answer in its thought.
#[derive(Clone, Debug)]
pub(crate) struct ThinkingProgress {
    budget: ThinkingBudget,
    /// The tokens that spell the closing text.
    closing: Vec<Token>,
    now: ThinkingState,
}

#[derive(Clone, Debug, Default)]
struct ThinkingState {
    at: ThinkingPhase,
    /// The end of the text, which may be the start of a marker or a part of a character.
    tail: Vec<u8>,
    n_thought: u32,
    /// How many tokens of the closing text were forced.
    n_closing: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ThinkingPhase {
    #[default]
    Before,
    Inside,
    Behind,
}

impl ThinkingProgress {
    /// None where the vocabulary cannot spell the closing text.
    pub fn new(budget: ThinkingBudget, vocabulary: &Vocabulary) -> Option<ThinkingProgress> {
        let closing = vocabulary.spell(budget.closes.first()?)?;
        let now = ThinkingState::start(&budget);
        Some(ThinkingProgress { budget, closing, now })
    }

    /// Returns the one token that may come next, once the budget is used up.
    pub fn forced_token(&self) -> Option<Token> {
        let is_used = self.now.at == ThinkingPhase::Inside && self.now.n_thought >= self.budget.tokens_max;
        let is_forced = is_used && (self.now.n_closing > 0 || !ends_within_a_character(&self.now.tail));
        is_forced.then(|| self.closing.get(self.now.n_closing).copied()).flatten()
    }

    pub fn accept(&mut self, token: Token, vocabulary: &Vocabulary) {
        let forced = self.forced_token();
        self.now.n_closing = if forced == Some(token) { self.now.n_closing + 1 } else { 0 };
        self.now.n_thought += u32::from(self.now.at == ThinkingPhase::Inside);
        let is_marker = |text: &[u8]| {
            let texts = self.budget.opens.iter().chain(&self.budget.closes);
            texts.into_iter().any(|marker| contains(marker.as_bytes(), text))
        };
        let bytes = match vocabulary.bytes(token) {
            (bytes, false) => bytes,
            // Only special tokens that mark thoughts appear in the answer's text.
            (bytes, true) if is_marker(bytes) => bytes,
            (_, true) => &[],
        };
        self.now.tail.extend_from_slice(bytes);
        while self.now.advance(&self.budget) {}
    }
}

impl ThinkingState {
    fn start(budget: &ThinkingBudget) -> ThinkingState {
        ThinkingState {
            at: if budget.is_open { ThinkingPhase::Inside } else { ThinkingPhase::Before },
            ..ThinkingState::default()
        }
    }

    /// Reads a marker. Returns whether another may follow.
    fn advance(&mut self, budget: &ThinkingBudget) -> bool {
        match self.at {
            ThinkingPhase::Behind => self.tail.clear(),
            ThinkingPhase::Before if !budget.repeats => return self.read_opening(budget),
            ThinkingPhase::Before => {
                if self.take_marker(&budget.opens) {
                    self.at = ThinkingPhase::Inside;
                    return true;
                }
            }
            ThinkingPhase::Inside => {
                if self.take_marker(&budget.closes) {
                    self.at = if budget.repeats { ThinkingPhase::Before } else { ThinkingPhase::Behind };
                    self.n_closing = 0;
                    return true;
                }
            }
        }
        false
    }

    /// Whether the answer begins with an opening text, after whitespace.
    fn read_opening(&mut self, budget: &ThinkingBudget) -> bool {
        let n_blank = self.tail.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.tail.drain(..n_blank);
        let opened = budget.opens.iter().find(|open| self.tail.starts_with(open.as_bytes()));
        if let Some(open) = opened {
            self.tail.drain(..open.len());
            self.at = ThinkingPhase::Inside;
            return true;
        }
        if !budget.opens.iter().any(|open| open.as_bytes().starts_with(&self.tail)) {
            self.at = ThinkingPhase::Behind;
        }
        false
    }

    /// Whether one of the markers is in the tail. If so, the tail then begins behind the first one. Otherwise it keeps
    /// only what may be the start of a marker.
    fn take_marker(&mut self, markers: &[String]) -> bool {
        let found = |marker: &String| Some(position(&self.tail, marker.as_bytes())? + marker.len());
        if let Some(end) = markers.iter().filter_map(found).min() {
            self.tail.drain(..end);
            return true;
        }
        // A character has four bytes at most.
        let n_kept = markers.iter().map(String::len).max().unwrap_or(0).max(4) - 1;
        self.tail.drain(..self.tail.len().saturating_sub(n_kept));
        false
    }
}

fn position(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    !part.is_empty() && position(text, part).is_some()
}

/// Whether the last character lacks bytes.
fn ends_within_a_character(text: &[u8]) -> bool {
    let last = &text[text.len().saturating_sub(3)..];
    let Some(start) = last.iter().rposition(|byte| *byte >= 0xc0) else { return false };
    std::str::from_utf8(&last[start..]).is_err_and(|error| error.error_len().is_none())
}
