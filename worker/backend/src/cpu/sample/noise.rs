//! Stateless randomness: a hash of seed, choice, position and token.

use types::Token;

/// Stateless Gumbel noise for one draw.
pub(super) struct Noise {
    key: u64,
}

impl Noise {
    /// The upper bound of all noise.
    pub(super) const MAX: f64 = 37.0;
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    pub(super) fn new(seed: u64, choice: u32, position: u32) -> Noise {
        let place = u64::from(choice) << 32 | u64::from(position);
        Noise { key: mix(mix(seed.wrapping_add(Noise::STEP)) ^ place) }
    }

    pub(super) fn key(&self) -> u64 {
        self.key
    }

    pub(super) fn bits(&self, token: Token) -> u64 {
        mix(self.key.wrapping_add(Noise::STEP.wrapping_mul(u64::from(token) + 1)))
    }

    /// Uniform in [0, 1), for a decision made once per draw: the hash of a token that does not exist.
    pub(super) fn coin(&self) -> f64 {
        (self.bits(Token::MAX) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    pub(super) fn gumbel(&self, token: Token) -> f64 {
        Noise::gumbel_of(self.bits(token))
    }

    /// `-ln(-ln u)` for u = (2r + 1) / 2^53 of the upper 52 bits r: never 0, never 1.
    pub(super) fn gumbel_of(bits: u64) -> f64 {
        let u = ((bits >> 11) | 1) as f64 * (1.0 / (1u64 << 53) as f64);
        -libm::log(-libm::log(u))
    }

    /// An upper bound of `gumbel_of(bits)`: -ln u >= 1 - u, and 1 - u has as many leading zeros as u has leading ones.
    pub(super) fn gumbel_bound(bits: u64) -> f64 {
        const MORE_THAN_LN_2: f64 = 0.693_148;
        f64::from((bits & !0xfff).leading_ones() + 1) * MORE_THAN_LN_2
    }
}

/// Spreads every bit of x over all bits of the result, and is its own inverse's only argument: a bijection
/// (splitmix64).
pub(super) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
