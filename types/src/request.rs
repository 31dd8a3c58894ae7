//! A request as the cluster knows it: token ids and what to do with them. No text.

use crate::sampling::TOKEN_BYTES;
use crate::{CacheOwner, CacheSalt, Grammar, Micros, RequestId, Sampling, TenantId, Token, Tokens};

/// All fields of a request in a frame that are not lists.
const SCALARS_BYTES: usize = 1024;

/// Everything that a stream is a function of, beside the model and the numeric policy.
///
/// `prompt ++ output` is the token log, and positions count from its start. A request that is resubmitted after a loss
/// carries its earlier tokens in `output`, and goes on from there. Output tokens never move into the prompt: limits and
/// penalties depend on the boundary. A log that is already complete is not resubmitted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    pub id: RequestId,
    pub tenant: TenantId,
    /// The tenant's share when there is more work than capacity. The stream does not depend on it.
    pub weight: TenantWeight,
    pub prompt: Tokens,
    pub output: Tokens,
    pub sampling: Sampling,
    pub goal: Goal,
    /// The constraint on the output. Tokens that would break it are not drawn.
    pub grammar: Option<Grammar>,
    pub priority: Priority,
    /// Refused or ended with `Finish::Deadline` when it has not finished by then. Never sent to workers.
    pub deadline: Option<Micros>,
    /// The prefix cache may be filled but not read: the request needs what a hit would skip (logits of its prompt).
    pub cache_bypass: bool,
    /// The prefix cache may not be filled either: no other request is to find these blocks.
    pub cache_apart: bool,
    pub cache_salt: CacheSalt,
    pub cache_hint: CacheHint,
    /// Where the second text of a pair begins in the prompt; 0: it is one text. Only encoders distinguish the two.
    pub second_text: u32,
    /// The answer that the client expects. A guess: no token depends on it.
    pub predicted: Tokens,
}

/// The purpose of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Goal {
    #[default]
    Generate,
    /// Logprobs of the prompt's own tokens, with `top_n` likely ones beside each; then generation.
    Score { top_n: u8 },
    /// The prompt's hidden states, pooled.
    Pool,
}

/// What the client expects of its blocks in the prefix cache, once the request has ended. No token depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheHint {
    #[default]
    None,
    /// They will be used again, perhaps not soon.
    Retain,
    /// They will not be used again.
    Demote,
}

/// Lower is sooner. Requests of one priority are served in order of arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(pub i8);

/// A tenant's share beside other tenants, in proportion. Zero counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantWeight(pub u16);

impl Default for TenantWeight {
    fn default() -> Self {
        TenantWeight(1)
    }
}

impl Request {
    pub fn cache_owner(&self) -> CacheOwner {
        CacheOwner { tenant: self.tenant, own_salt: self.cache_salt }
    }

    /// Whether ranks of a protocol before the newest would ignore part of it.
    pub fn needs_newest_features(&self) -> bool {
        let has_lists = !self.sampling.logprob_token_ids.is_empty() || self.sampling.penalties.window > 0;
        self.grammar.is_some() || has_lists || self.second_text > 0
    }

    pub fn n_tokens(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// The most bytes that it takes in a frame.
    pub fn frame_bytes_max(&self) -> usize {
        self.n_tokens() * TOKEN_BYTES + self.sampling.lists_bytes() + self.grammar_bytes() + SCALARS_BYTES
    }

    fn grammar_bytes(&self) -> usize {
        self.grammar.as_ref().map_or(0, Grammar::n_bytes)
    }

    /// The token at a position of the log.
    pub fn token(&self, position: usize) -> Option<Token> {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt.get(position).copied(),
            Some(i) => self.output.get(i).copied(),
        }
    }
}
