//! The name of a full block's content: a chain of hashes whose root contains the tenant and the policy.
//!
//! Keyed and wide, because a collision would show one tenant another's context.

use crate::{Hex, PolicyDigest, TenantId, Token};
use core::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 16]);

/// A client's value that separates its cached blocks from those of the rest of its tenant. All zeros without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSalt(pub [u8; 16]);

impl CacheSalt {
    /// Returns the salt of a text: no block under it can be found without the text.
    pub fn of(text: &str) -> CacheSalt {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 cache salt");
        hasher.update(text.as_bytes());
        CacheSalt(BlockHash::first_half(&hasher.finalize()).0)
    }
}

/// The owner whose requests share cached blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheOwner {
    pub tenant: TenantId,
    pub own_salt: CacheSalt,
}

impl From<TenantId> for CacheOwner {
    fn from(tenant: TenantId) -> CacheOwner {
        CacheOwner { tenant, own_salt: CacheSalt::default() }
    }
}

impl BlockHash {
    /// Derives the salt of every block's name from the cluster's secret.
    pub fn salt(secret: &[u8]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 block hash salt");
        hasher.update(secret);
        BlockHash::first_half(&hasher.finalize()).0
    }

    /// Returns the beginning of every chain of one owner and policy. `salt` is the cluster's secret, so that no
    /// outsider can aim at a hash.
    pub fn root(policy: &PolicyDigest, owner: impl Into<CacheOwner>, salt: &[u8; 16]) -> BlockHash {
        let CacheOwner { tenant, own_salt } = owner.into();
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 block hash root");
        hasher.update(&policy.0);
        hasher.update(&tenant.0.to_le_bytes());
        // Stands for "no adapter": block names stay the same when adapters are added.
        hasher.update(&u64::MAX.to_le_bytes());
        hasher.update(salt);
        // Without a salt a tenant's names stay the same as before salts existed.
        if own_salt != CacheSalt::default() {
            hasher.update(&own_salt.0);
        }
        BlockHash::first_half(&hasher.finalize())
    }

    /// The hash of the block that follows this one. Only a full block has a name: any other number of tokens is a
    /// collision in the making, and panics. The parent is the key, so that 64 bytes of tokens are one compression.
    pub fn child(&self, tokens: impl IntoIterator<Item = Token>) -> BlockHash {
        let mut bytes = [0; 4 * crate::BLOCK_TOKENS as usize];
        let mut tokens = tokens.into_iter();
        let mut n_tokens = 0;
        for (at, token) in bytes.chunks_exact_mut(4).zip(&mut tokens) {
            at.copy_from_slice(&token.to_le_bytes());
            n_tokens += 1;
        }
        assert!(n_tokens == crate::BLOCK_TOKENS && tokens.next().is_none(), "only a full block has a name");
        let mut key = [0; blake3::KEY_LEN];
        key[..16].copy_from_slice(&self.0);
        BlockHash::first_half(&blake3::keyed_hash(&key, &bytes))
    }

    /// The first 64 bits: enough to guess which replica has a block, and never enough to share one.
    pub fn short(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    fn first_half(hash: &blake3::Hash) -> BlockHash {
        let mut half = [0; 16];
        half.copy_from_slice(&hash.as_bytes()[..16]);
        BlockHash(half)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Hex(&self.0[..6]), f)
    }
}
