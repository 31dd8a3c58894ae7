//! Follows one answer through its grammar: which tokens may come next, step by step. Knows nothing of sampling.

use crate::engine::{self, catch_panics, on_a_deep_stack};
use crate::thinking::{self, ThinkingProgress};
use crate::{GrammarLimits, TokenMask, Vocabulary, specials};
use llguidance::api::{GrammarInit, StopReason, TopLevelGrammar};
use llguidance::{Logger, Matcher as Parser};
use thiserror::Error;
use toktrie::InferenceCapabilities;
use types::{Grammar, Token};

/// Approximate bytes of the engine's tables for each byte of a grammar's text.
const TABLE_BYTES: usize = 16;

/// The position of an answer in its grammar. Two matchers with the same vocabulary, grammar and tokens have the same
/// masks.
pub struct Matcher {
    /// None where any text may come.
    parser: Option<Parser>,
    /// The thought before the answer, if its length has a limit.
    thinking: Option<ThinkingProgress>,
    vocabulary: Vocabulary,
    is_ended: bool,
    /// The memory that it held when it was made.
    n_bytes: usize,
}

/// The matcher cannot go on. It is useless from here on, unless only the token was wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MatcherError {
    #[error("the grammar does not compile for this vocabulary: {0}")]
    Grammar(String),
    #[error("the grammar does not allow token {0}")]
    Token(Token),
    #[error("a mask of the grammar exceeds the work limit: {0}")]
    TooComplex(String),
    #[error("the vocabulary has no token that the grammar allows")]
    NoToken,
    #[error("the grammar engine failed: {0}")]
    Engine(String),
}

impl Matcher {
    pub fn new(vocabulary: &Vocabulary, grammar: &Grammar, limits: &GrammarLimits) -> Result<Matcher, MatcherError> {
        let no_description = || MatcherError::Grammar("its description is malformed".to_owned());
        let (budget, rules) = thinking::split(grammar.as_str()).ok_or_else(no_description)?;
        let no_close = || MatcherError::Grammar("no token spells the end of a thought".to_owned());
        let thinking =
            budget.map(|budget| ThinkingProgress::new(budget, vocabulary).ok_or_else(no_close)).transpose()?;
        let (parser, of_lexer) = match thinking.is_some() && rules.is_empty() {
            true => (None, 0),
            false => {
                let lark = specials::resolve(rules, Some(vocabulary)).ok_or_else(no_description)?;
                let (parser, n_bytes) = parser(vocabulary, lark, limits)?;
                (Some(parser), n_bytes)
            }
        };
        let n_bytes = of_lexer + TABLE_BYTES * grammar.n_bytes();
        let vocabulary = vocabulary.clone();
        Ok(Matcher { parser, thinking, vocabulary, is_ended: false, n_bytes })
    }

    /// Returns an independent matcher at the same position. None where the engine fails to copy.
    pub fn copy(&self) -> Option<Matcher> {
        self.copy_by(Parser::deep_clone)
    }

    fn copy_by(&self, copy: fn(&Parser) -> Parser) -> Option<Matcher> {
        let parser = catch_panics(|| self.parser.as_ref().map(copy)).ok()?;
        let (thinking, vocabulary) = (self.thinking.clone(), self.vocabulary.clone());
        let Matcher { is_ended, n_bytes, .. } = *self;
        Some(Matcher { parser, thinking, vocabulary, is_ended, n_bytes })
    }

    /// Returns a matcher that reads on from here and leaves this one as it is. It shares the engine's tables, so it
    /// costs little. It replaces taking tokens back: behind the engine's `rollback` a later mask may forbid what the
    /// grammar allows. None where the engine fails to copy.
    pub fn branch(&self) -> Option<Matcher> {
        self.copy_by(Parser::clone)
    }

    /// The approximate memory that it holds at the start of its answer.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Takes the next token of the answer. A token that is not allowed changes nothing.
    pub fn accept(&mut self, token: Token) -> Result<(), MatcherError> {
        if self.is_ended {
            return Err(MatcherError::Token(token));
        }
        if self.parser.is_some() && self.consume_token(token)? {
            return Ok(());
        }
        if let Some(thinking) = &mut self.thinking {
            thinking.accept(token, &self.vocabulary);
        }
        Ok(())
    }

    /// Gives the parser a token. Returns whether it is the end.
    fn consume_token(&mut self, token: Token) -> Result<bool, MatcherError> {
        let is_end = self.vocabulary.end_tokens().contains(&token);
        if is_end && self.is_complete()? {
            self.is_ended = true;
            return Ok(true);
        }
        if self.with_parser(0, |parser| parser.try_consume_tokens(&[token]))? == 0 {
            return Err(MatcherError::Token(token));
        }
        Ok(false)
    }

    /// Writes which tokens may come next: at least one until an end was taken. Ends are among them exactly where the
    /// answer is complete.
    pub fn fill_mask(&mut self, mask: &mut TokenMask) -> Result<(), MatcherError> {
        let n_vocab = self.vocabulary.n_vocab();
        if self.is_ended {
            mask.clear(n_vocab);
            return Ok(());
        }
        match &self.parser {
            None => mask.allow_all(n_vocab),
            Some(_) => {
                let allowed = self.with_parser(None, |parser| parser.compute_mask_or_eos().map(Some))?;
                mask.set(allowed.as_ref().map_or(&[], |allowed| allowed.as_slice()), n_vocab);
            }
        }
        // A grammar that does not describe thoughts, and so none of their ends, takes precedence.
        if let Some(forced) =
            self.thinking.as_ref().and_then(ThinkingProgress::forced_token).filter(|forced| mask.allows(*forced))
        {
            mask.allow_only(forced);
        }
        Ok(())
    }

    /// Whether the answer may end here.
    pub fn is_complete(&mut self) -> Result<bool, MatcherError> {
        let cannot_go_on = |parser: &Parser| parser.stop_reason() == StopReason::NoExtension;
        if self.is_ended || self.parser.as_ref().is_some_and(cannot_go_on) {
            return Ok(true);
        }
        self.with_parser(true, |parser| parser.is_accepting())
    }

    /// Whether an end was taken.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Returns the one token that may come next, if there is exactly one. This computes a mask.
    pub fn forced_token(&mut self) -> Result<Option<Token>, MatcherError> {
        let mut mask = TokenMask::default();
        self.fill_mask(&mut mask)?;
        Ok(mask.only())
    }

    /// Returns the longest of a mask's tokens, if each of the others is a prefix of it: the text can continue in one
    /// way only, though several tokenizations exist.
    pub fn single_continuation(&self, mask: &TokenMask) -> Option<Token> {
        self.vocabulary.single_continuation(mask)
    }

    pub fn end_tokens(&self) -> &[Token] {
        self.vocabulary.end_tokens()
    }

    pub fn n_vocab(&self) -> usize {
        self.vocabulary.n_vocab()
    }

    /// Returns the parser's answer, or the answer that holds for any text if there is no parser.
    fn with_parser<T, E: ToString>(
        &mut self,
        default: T,
        query: impl FnOnce(&mut Parser) -> Result<T, E>,
    ) -> Result<T, MatcherError> {
        let Some(parser) = &mut self.parser else { return Ok(default) };
        let answer = catch_panics(|| query(parser).map_err(|e| e.to_string()));
        answer.and_then(|answer| answer).map_err(|why| self.stuck(&why))
    }

    fn stuck(&self, why: &str) -> MatcherError {
        let reason = self.parser.as_ref().map_or(StopReason::NotStopped, Parser::stop_reason);
        match reason {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                MatcherError::TooComplex(engine::first_line(why))
            }
            StopReason::NoExtensionBias => MatcherError::NoToken,
            _ if why.starts_with("NoExtensionBias") => MatcherError::NoToken,
            _ if why.contains("too many") || why.contains("limit") => MatcherError::TooComplex(engine::first_line(why)),
            _ => MatcherError::Engine(engine::first_line(why)),
        }
    }
}

/// Returns a parser at its start, and how many bytes its lexer holds.
fn parser(vocabulary: &Vocabulary, lark: String, limits: &GrammarLimits) -> Result<(Parser, usize), MatcherError> {
    let limits = engine::parser_limits(limits);
    let made = on_a_deep_stack(|| {
        let init = GrammarInit::Serialized(TopLevelGrammar::from_lark(lark));
        let (logger, abilities) = (Logger::new(0, 0), InferenceCapabilities::default());
        let parser = vocabulary.factory().create_parser_from_init_ext(init, logger, abilities, limits);
        let parser = parser.map_err(|e| e.to_string())?;
        let n_bytes = parser.parser.lexer_stats().num_bytes;
        Ok::<_, String>((Parser::new(Ok(parser)), n_bytes))
    });
    made.and_then(|made| made).map_err(|why| MatcherError::Grammar(engine::first_line(&why)))
}
