//! Hashes that are the same at every router, so that routers choose alike without communication. Knows no replicas.

/// FNV-1a. Good enough for short words: an attack on it achieves only an uneven spread of the attacker's own requests.
pub fn fnv<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The hash of a session's key or of a replica's name.
pub fn hashed(word: &str) -> u64 {
    fnv(word.as_bytes())
}

/// Scatters numbers as if by chance: a permutation of all of them.
pub fn scatter(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}
