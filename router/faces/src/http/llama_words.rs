//! Sampling parameters that only llama.cpp and Ollama have. Has no knowledge of pages.

use crate::http::fields::Fields;
use proto::v1;
use router::refusal::Refusal;

/// -1, which requests a random seed; llama.cpp has 32 bits for it.
const RANDOM: [u64; 2] = [u64::MAX, u32::MAX as u64];

/// Takes all sampling parameters but the number of tokens.
pub fn sampling(fields: &mut Fields) -> Result<v1::Sampling, Refusal> {
    let mut sampling = fields.sampling()?;
    sampling.seed = sampling.seed.filter(|seed| !RANDOM.contains(seed));
    Ok(sampling)
}

/// Reads the most tokens of an answer. Without a limit, or with -1 or -2, the rest of the context is the limit.
pub fn n_predict(n: Option<i64>, name: &'static str) -> Result<Option<u32>, Refusal> {
    match n {
        None | Some(-2 | -1) => Ok(None),
        Some(n) => {
            let n_max = u32::try_from(n).ok().filter(|n| *n > 0);
            n_max.map(Some).ok_or_else(|| Refusal::invalid(name, format!("must be -2, -1 or at least 1, got {n}")))
        }
    }
}
