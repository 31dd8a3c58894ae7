//! A hash of token ids, and bytes as people compare them. Knows no text and no request.

use crate::Token;
use core::fmt;

/// A hash of a prompt's or an answer's token ids, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokensHash(pub [u8; 32]);

impl TokensHash {
    pub fn of(tokens: &[Token]) -> TokensHash {
        let mut hasher = TokensHasher::default();
        // A long prompt is hashed before its first token: many at a time take far less than one by one.
        for tokens in tokens.chunks(TOKENS_AT_ONCE) {
            let mut bytes = [0; 4 * TOKENS_AT_ONCE];
            bytes.chunks_exact_mut(4).zip(tokens).for_each(|(at, token)| at.copy_from_slice(&token.to_le_bytes()));
            hasher.0.update(&bytes[..4 * tokens.len()]);
        }
        hasher.hash()
    }
}

const TOKENS_AT_ONCE: usize = 1024;

/// The hash of an answer that is not over. A token costs four bytes of hashing and no memory.
#[derive(Clone, Debug)]
pub struct TokensHasher(blake3::Hasher);

impl Default for TokensHasher {
    fn default() -> TokensHasher {
        TokensHasher(blake3::Hasher::new_derive_key("lockstep 2026 token ids"))
    }
}

impl TokensHasher {
    pub fn push(&mut self, token: Token) {
        self.0.update(&token.to_le_bytes());
    }

    /// The hash of the tokens so far.
    pub fn hash(&self) -> TokensHash {
        TokensHash(*self.0.finalize().as_bytes())
    }
}

/// Bytes as hexadecimal digits.
pub struct Hex<'a>(pub &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_hash_is_of_every_token_in_its_order_and_of_nothing_else() {
        let tokens: alloc::vec::Vec<Token> = (0..100).collect();
        let many: alloc::vec::Vec<Token> = (0..3000).collect();
        let mut one_by_one = TokensHasher::default();
        many.iter().for_each(|token| one_by_one.push(*token));
        assert_eq!(one_by_one.hash(), TokensHash::of(&many));
        let mut running = TokensHasher::default();
        for (n, token) in tokens.iter().enumerate() {
            assert_eq!(running.hash(), TokensHash::of(&tokens[..n]));
            running.push(*token);
        }
        for at in 0..tokens.len() {
            let mut flipped = tokens.clone();
            flipped[at] ^= 1;
            assert_ne!(TokensHash::of(&flipped), running.hash(), "token {at}");
        }
        assert_ne!(TokensHash::of(&[1, 2]), TokensHash::of(&[2, 1]));
    }

    /// Certificates are kept: changing these bytes makes every kept one differ.
    #[test]
    fn hashes_are_what_they_were() {
        let TokensHash(bytes) = TokensHash::of(&[1, 2, 0xffff_fffe]);
        assert_eq!(Hex(&bytes).to_string(), "04d66aa7ca18cee1abae39eab8a1559e2c826eddc3b6d3837bd22914ca9eeb39");
    }
}
