//! Words for drawing tokens that llama.cpp and Ollama share, and that others have not. Knows no page.

use crate::faces::http::fields::Fields;
use crate::refusal::Refusal;
use proto::v1;

/// -1, which says that a seed is to be drawn; llama.cpp has 32 bits for it.
const RANDOM: [u64; 2] = [u64::MAX, u32::MAX as u64];

/// Takes how tokens are drawn, without how many.
pub fn sampling(fields: &mut Fields) -> Result<v1::Sampling, Refusal> {
    let mut sampling = fields.sampling()?;
    sampling.seed = sampling.seed.filter(|seed| !RANDOM.contains(seed));
    Ok(sampling)
}

/// How many tokens are said at most. Without a limit, or with -1 or -2, as many as the context has room for.
pub fn n_predict(n: Option<i64>, name: &'static str) -> Result<Option<u32>, Refusal> {
    match n {
        None | Some(-2 | -1) => Ok(None),
        Some(n) => {
            let n_max = u32::try_from(n).ok().filter(|n| *n > 0);
            n_max.map(Some).ok_or_else(|| Refusal::invalid(name, format!("must be -2, -1 or at least 1, and is {n}")))
        }
    }
}
