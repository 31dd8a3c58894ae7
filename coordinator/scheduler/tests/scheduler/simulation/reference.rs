//! The output of a request that runs alone: tokens one after another, no blocks, no batches, no faults.

use super::rng::mix;
use types::{Finish, Request, TenantId, Token};

/// Small, so that stops are drawn often.
const VOCABULARY: u64 = 24;

/// A hash that names a log up to some position: its owner, its tokens and their order.
pub fn root(tenant: TenantId) -> u64 {
    mix(tenant.0 ^ 0x7e4a)
}

pub fn extend(prefix: u64, token: Token) -> u64 {
    mix(prefix ^ mix(u64::from(token) + 1))
}

/// The draw at a position: a function of the request and its log; None if it fails.
pub fn draw(request: &Request, position: u32, prefix: u64) -> Option<Token> {
    let bits = mix(request.sampling.seed ^ mix(u64::from(position)) ^ prefix);
    let poisoned = request.sampling.choice == POISONED && bits.is_multiple_of(7);
    (!poisoned).then_some(((bits >> 8) % VOCABULARY) as Token)
}

/// The choice that stands for "its logits are sometimes not numbers".
pub const POISONED: u32 = 13;

/// The choice that stands for "it breaks the ranks that compute it".
pub const DEADLY: u32 = 14;

/// Whether the ranks break on a slice of the request that ends there: always at the same position of its log.
pub fn is_deadly(request: &Request, end: u32) -> bool {
    request.sampling.choice == DEADLY && u64::from(end) > request.sampling.seed % 50
}

pub struct Expected {
    pub tokens: Vec<Token>,
    pub finish: Finish,
}

pub fn length_max(request: &Request, context_max: u32) -> u32 {
    (request.prompt.len() as u32 + request.sampling.tokens_max).min(context_max)
}

pub fn run_alone(request: &Request, context_max: u32) -> Expected {
    let mut prefix = request.prompt.iter().fold(root(request.tenant), |prefix, &token| extend(prefix, token));
    let mut tokens = Vec::new();
    let n_prompt = request.prompt.len() as u32;
    for position in n_prompt..length_max(request, context_max) {
        let Some(token) = draw(request, position, prefix) else { return Expected { tokens, finish: Finish::Failed } };
        prefix = extend(prefix, token);
        tokens.push(token);
        if request.sampling.is_stop(token) && tokens.len() as u32 > request.sampling.tokens_min {
            return Expected { tokens, finish: Finish::Stop };
        }
    }
    Expected { tokens, finish: Finish::Length }
}
