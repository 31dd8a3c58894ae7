//! One answer and its grammar: which tokens may come next, one after the other. Knows nothing of sampling.

use crate::engine::{self, on_a_deep_stack, sound};
use crate::{GrammarLimits, Mask, Vocabulary, specials};
use llguidance::api::{GrammarInit, StopReason, TopLevelGrammar};
use llguidance::{Logger, Matcher as Parser};
use thiserror::Error;
use toktrie::InferenceCapabilities;
use types::{Grammar, Token};

/// Where an answer stands in its grammar. Two matchers that were given the same vocabulary, grammar and tokens have
/// the same masks.
pub struct Matcher {
    parser: Parser,
    vocabulary: Vocabulary,
    /// Tokens of the answer, the end not among them.
    n_tokens: usize,
    is_ended: bool,
    /// A grammar may name a token that elsewhere ends answers. The engine cannot take such a one back.
    names_end: bool,
}

/// The matcher can go no further. It is of no use any more, unless only the token was wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Stuck {
    #[error("the grammar does not compile for this vocabulary: {0}")]
    Grammar(String),
    #[error("token {0} is not what the grammar allows")]
    Token(Token),
    #[error("the grammar needs more work for a mask than is allowed: {0}")]
    TooComplex(String),
    #[error("the vocabulary has no token that the grammar allows")]
    NoToken,
    #[error("{wanted} tokens cannot be taken back of {held}")]
    Rewind { wanted: usize, held: usize },
    #[error("the grammar engine failed: {0}")]
    Engine(String),
}

impl Matcher {
    pub fn new(vocabulary: &Vocabulary, grammar: &Grammar, limits: &GrammarLimits) -> Result<Matcher, Stuck> {
        let lark = specials::resolve(grammar.as_str(), Some(vocabulary));
        let lark = lark.ok_or_else(|| Stuck::Grammar("it is not a description".to_owned()))?;
        let limits = engine::parser_limits(limits);
        let made = on_a_deep_stack(|| {
            let init = GrammarInit::Serialized(TopLevelGrammar::from_lark(lark));
            let (logger, abilities) = (Logger::new(0, 0), InferenceCapabilities::default());
            let parser = vocabulary.factory().create_parser_from_init_ext(init, logger, abilities, limits);
            parser.map(|parser| Parser::new(Ok(parser))).map_err(|e| e.to_string())
        });
        let parser = made.and_then(|made| made).map_err(|why| Stuck::Grammar(engine::first_line(&why)))?;
        Ok(Matcher { parser, vocabulary: vocabulary.clone(), n_tokens: 0, is_ended: false, names_end: false })
    }

    /// Takes the next token of the answer. A token that is not allowed changes nothing.
    pub fn accept(&mut self, token: Token) -> Result<(), Stuck> {
        if self.is_ended {
            return Err(Stuck::Token(token));
        }
        let is_end = self.vocabulary.ends().contains(&token);
        if is_end && self.is_complete()? {
            self.is_ended = true;
            return Ok(());
        }
        let n_taken = self.asked(|parser| parser.try_consume_tokens(&[token]))?;
        if n_taken == 0 {
            return Err(Stuck::Token(token));
        }
        self.n_tokens += 1;
        self.names_end |= is_end;
        Ok(())
    }

    /// Which tokens may come next: never none, until an end was taken. Ends are among them just where the answer is
    /// complete.
    pub fn mask(&mut self, mask: &mut Mask) -> Result<(), Stuck> {
        let n_vocab = self.vocabulary.n_vocab();
        if self.is_ended {
            mask.clear(n_vocab);
            return Ok(());
        }
        let allowed = self.asked(|parser| parser.compute_mask_or_eos())?;
        mask.set(allowed.as_slice(), n_vocab);
        Ok(())
    }

    /// Whether the answer may end here.
    pub fn is_complete(&mut self) -> Result<bool, Stuck> {
        if self.is_ended || self.parser.stop_reason() == StopReason::NoExtension {
            return Ok(true);
        }
        self.asked(|parser| parser.is_accepting())
    }

    /// Whether an end was taken.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// The one token that may come next, if there is just one. It asks for a mask.
    pub fn forced(&mut self) -> Result<Option<Token>, Stuck> {
        let mut mask = Mask::default();
        self.mask(&mut mask)?;
        Ok(mask.only())
    }

    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Takes back the last `n` tokens; an end counts as one.
    pub fn rewind(&mut self, n: usize) -> Result<(), Stuck> {
        let held = self.n_tokens + usize::from(self.is_ended);
        if n > held || self.names_end && n > 0 {
            return Err(Stuck::Rewind { wanted: n, held });
        }
        let n_text = n - usize::from(self.is_ended && n > 0);
        self.is_ended &= n == 0;
        self.n_tokens -= n_text;
        self.asked(|parser| parser.rollback(n_text))
    }

    fn asked<T, E: ToString>(&mut self, ask: impl FnOnce(&mut Parser) -> Result<T, E>) -> Result<T, Stuck> {
        let parser = &mut self.parser;
        let answer = sound(|| ask(parser).map_err(|e| e.to_string()));
        answer.and_then(|answer| answer).map_err(|why| self.stuck(&why))
    }

    fn stuck(&self, why: &str) -> Stuck {
        match self.parser.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => Stuck::TooComplex(engine::first_line(why)),
            StopReason::NoExtensionBias => Stuck::NoToken,
            _ if why.starts_with("NoExtensionBias") => Stuck::NoToken,
            _ if why.contains("too many") || why.contains("limit") => Stuck::TooComplex(engine::first_line(why)),
            _ => Stuck::Engine(engine::first_line(why)),
        }
    }
}
