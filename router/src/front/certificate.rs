//! Certificates: what an answer came from and a hash of its token ids, so that another run of the request can be
//! compared. Knows no text and no face.
//!
//! A certificate is a function of the answer alone: every token of a choice passes here once, also the tokens that a
//! client had before it resumed.

use proto::v1;
use types::{PolicyDigest, Request, Token, TokensHash, TokensHasher};

/// Grows when the hashes are made in another way.
const VERSION: u32 = 1;

/// The certificate of an unfinished answer.
pub struct CertificateDraft {
    digest: PolicyDigest,
    seed: u64,
    choice: u32,
    prompt: TokensHash,
    answer: TokensHasher,
    n_tokens: u32,
    /// The hash of the request's grammar.
    grammar: Option<GrammarHash>,
}

/// A hash of everything that the masks of a request with a grammar are made from.
pub type GrammarHash = [u8; 32];

impl CertificateDraft {
    /// Begins the certificate of a request's answer, before its first token. `prompt` is the hash of the request's
    /// prompt.
    pub fn new(
        digest: PolicyDigest,
        request: &Request,
        prompt: TokensHash,
        grammar: Option<GrammarHash>,
    ) -> CertificateDraft {
        let (seed, choice) = (request.sampling.seed, request.sampling.choice);
        CertificateDraft { digest, seed, choice, prompt, answer: TokensHasher::default(), n_tokens: 0, grammar }
    }

    pub fn push(&mut self, token: Token) {
        self.answer.push(token);
        self.n_tokens += 1;
    }

    pub fn finished(&self, reason: v1::finished::Reason) -> v1::Certificate {
        v1::Certificate {
            version: VERSION,
            policy_digest: self.digest.0.to_vec(),
            seed: self.seed,
            choice: self.choice,
            prompt_hash: self.prompt.0.to_vec(),
            answer_hash: self.answer.hash().0.to_vec(),
            tokens: self.n_tokens,
            reason: reason.into(),
            grammar_hash: self.grammar.map_or_else(Vec::new, |hash| hash.to_vec()),
        }
    }
}
