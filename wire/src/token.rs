//! The join token: a secret that only the machines of a cluster know, and the proof of knowing it. Knows nothing of
//! connections.

use std::fmt;

/// A peer that has seen one greeting could guess a shorter token.
pub const TOKEN_CHARS_MIN: usize = 32;
pub const TOKEN_CHARS_MAX: usize = 4096;

/// The length of the random number that each side makes up for one greeting.
pub(crate) const NONCE_BYTES: usize = 32;
const TOKEN_PURPOSE: &str = "lockstep 2026 join token greeting";
const LINK_PURPOSE: &str = "lockstep 2026 join token links between ranks";

/// A secret that only the machines of a cluster know.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken(String);

impl JoinToken {
    pub fn new(text: &str) -> Result<JoinToken, BadToken> {
        let text = text.trim();
        if !(TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(BadToken);
        }
        Ok(JoinToken(text.into()))
    }

    pub fn random() -> Result<JoinToken, NoRandomness> {
        let secret: [u8; 32] = random()?;
        Ok(JoinToken(types::Hex(&secret).to_string()))
    }

    /// The token's text, for the file or pipe that hands it on.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns the key of the links between a cluster's ranks, which is used with their epoch's secret.
    pub fn link_key(&self) -> [u8; 32] {
        blake3::derive_key(LINK_PURPOSE, self.0.as_bytes())
    }

    pub(crate) fn proof(&self, side: &str, dialler: &[u8; NONCE_BYTES], listener: &[u8; NONCE_BYTES]) -> blake3::Hash {
        let key = blake3::derive_key(TOKEN_PURPOSE, self.0.as_bytes());
        let mut hasher = blake3::Hasher::new_keyed(&key);
        hasher.update(side.as_bytes()).update(dialler).update(listener).finalize()
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinToken(..)")
    }
}

#[derive(Debug, thiserror::Error)]
#[error("a join token is {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} printable characters: `lockstep token` makes one")]
pub struct BadToken;

#[derive(Debug, thiserror::Error)]
#[error("this system provides no random bytes")]
pub struct NoRandomness;

/// Returns bytes that cannot be guessed.
pub fn random<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    let filled = rustls::crypto::ring::default_provider().secure_random.fill(&mut bytes);
    filled.map(|()| bytes).map_err(|_| NoRandomness)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_long_and_printable() {
        for text in ["", "short", &"x".repeat(31), &"x".repeat(5000), &format!("{} {}", "x".repeat(20), "y".repeat(20))]
        {
            assert!(JoinToken::new(text).is_err(), "{text}");
        }
        let made = JoinToken::random().unwrap();
        assert_eq!(JoinToken::new(&format!(" {}\n", made.expose())).unwrap(), made);
        let other = JoinToken::random().unwrap();
        assert_ne!(other, made);
        assert_ne!(other.link_key(), made.link_key());
    }
}
