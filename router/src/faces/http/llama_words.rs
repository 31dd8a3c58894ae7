//! Words for drawing tokens that llama.cpp and Ollama share, and that others have not. Knows no page.

use crate::faces::http::fields::Fields;
use crate::refusal::Refusal;
use proto::v1;

/// -1, which says that a seed is to be drawn; llama.cpp has 32 bits for it.
const RANDOM: [u64; 2] = [u64::MAX, u32::MAX as u64];

/// Takes how tokens are drawn, without how many.
pub fn sampling(fields: &mut Fields) -> Result<v1::Sampling, Refusal> {
    let reach = fields.integer("repeat_last_n")?;
    let mut sampling = fields.sampling()?;
    sampling.seed = sampling.seed.filter(|seed| !RANDOM.contains(seed));
    limit_penalties(&mut sampling, reach)?;
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

/// Penalties look back over the whole log: any other reach matters only where something is penalized.
fn limit_penalties(sampling: &mut v1::Sampling, reach: Option<i64>) -> Result<(), Refusal> {
    let repetition = sampling.repetition_penalty.unwrap_or(1.0);
    let is_neutral = repetition == 1.0 && sampling.presence_penalty == 0.0 && sampling.frequency_penalty == 0.0;
    match reach {
        None | Some(-1) => Ok(()),
        Some(0) => {
            (sampling.presence_penalty, sampling.frequency_penalty) = (0.0, 0.0);
            sampling.repetition_penalty = Some(1.0);
            Ok(())
        }
        Some(_) if is_neutral => Ok(()),
        Some(_) => Err(Refusal::invalid("repeat_last_n", "is not supported with penalties, but as 0 or -1")),
    }
}
