//! Draws a token from a row of logits. Knows rows and their sampling parameters; nothing of sequences.
//!
//! The order is vLLM's for all steps that vLLM has; the other steps are placed as in llama.cpp:
//! ```text
//! logits -> logprobs are of these
//!        -> the grammar's mask; a token that it leaves alone is taken without a draw
//!        -> allowed tokens -> bad words -> stop tokens before tokens_min -> bias                       (edits.rs)
//!        -> repetition, frequency, presence penalty -> DRY
//!        -> greedy: the largest, of equals the lower id
//!        -> temperature -> top_n_sigma -> min_p -> top_k -> typical_p -> top_p -> XTC                (filters.rs)
//!        -> the survivor with the largest (logit - largest) / temperature + noise(seed, choice, position, token)
//! ```
//! Where a filter cuts among equals, the lower id stays. Each filter sees the probabilities left by the previous ones;
//! only top_p, typical_p and XTC need sums of them. No result depends on the order of work, so any thread may draw rows
//! and candidates may be visited in any order. Only the log is kept from one token to the next.

mod edits;
mod filters;
mod noise;
#[cfg(test)]
mod tests;

use super::memory::SharedPtr;
use super::{Buffer, Cpu, Isa, math, rows};
use crate::{Draw, DrawError, DrawMask, Sample};
use filters::{LogitKey, ScaledLogits, select_largest};
use noise::Noise;
use std::sync::{Mutex, PoisonError};
use types::{Sampling, Token, TokenLogprob, TokenOut};

impl Sample for Cpu {
    fn draw(&self, logits: &Buffer, draws: &[Draw<'_>], out: &mut Vec<Result<TokenOut, DrawError>>) {
        self.draw_rows(logits.rows(draws.len(), logits.cols()), logits.cols(), draws, out);
    }
}

impl Cpu {
    /// rows: [draws.len(), n_vocab]
    pub(crate) fn draw_rows(
        &self,
        logits: &[f32],
        n_vocab: usize,
        draws: &[Draw<'_>],
        out: &mut Vec<Result<TokenOut, DrawError>>,
    ) {
        out.clear();
        out.resize_with(draws.len(), || Err(DrawError::NotNumbers));
        self.samplers.prepare(self.config().threads, n_vocab);
        let drawn = SharedPtr::new(out.as_mut_ptr());
        self.team.run(draws.len(), &|rows| {
            let mut scratch = self.samplers.take(self.config().isa);
            for row in rows {
                // SAFETY: `out` is as long as `draws`, and one thread has this row.
                let to = unsafe { drawn.part(row, 1) };
                to[0] = draw_row(&logits[row * n_vocab..][..n_vocab], &draws[row], &mut scratch);
            }
            self.samplers.put(scratch);
        });
    }
}

/// Scratch memory for every thread that may draw at the same time, allocated beforehand.
#[derive(Default)]
pub(super) struct Samplers(Mutex<Vec<SampleScratch>>);

impl Samplers {
    fn prepare(&self, n_threads: usize, n_vocab: usize) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < n_threads || free.iter().any(|scratch| scratch.keys.capacity() < n_vocab) {
            free.clear();
            free.resize_with(n_threads, || SampleScratch::new(n_vocab));
        }
    }

    fn take(&self, isa: Isa) -> SampleScratch {
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        SampleScratch { isa, ..free.unwrap_or_else(|| SampleScratch::new(0)) }
    }

    fn put(&self, scratch: SampleScratch) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

/// One thread's buffers for draws, reused.
struct SampleScratch {
    isa: Isa,
    keys: Vec<LogitKey>,
    edited: Vec<f32>,
    /// One mark per token of the vocabulary, zero between draws.
    marks: Vec<u32>,
}

impl SampleScratch {
    fn new(n_vocab: usize) -> SampleScratch {
        SampleScratch {
            isa: Isa::Plain,
            keys: Vec::with_capacity(n_vocab),
            edited: Vec::with_capacity(n_vocab),
            marks: Vec::with_capacity(n_vocab),
        }
    }
}

/// The parameters of a draw whose logits are not edited, for a device's sampler.
pub(crate) struct UneditedDraw {
    /// The key of the noise.
    pub key: u64,
    /// The factor for logits, before noise is added.
    pub scale: f64,
    /// The factor for logits in sums of probabilities.
    pub scale_f32: f32,
    /// min_p's threshold: scaled logits below it are not drawn.
    pub least: f64,
    /// Keeps all if it is one.
    pub top_p: f64,
    /// Keeps all if it is zero.
    pub top_k: u32,
}

/// None where logits are edited, more tokens than the drawn one are returned, or other filters are set.
pub(crate) fn unedited(draw: &Draw<'_>) -> Option<UneditedDraw> {
    let sampling = draw.sampling;
    // All fields are listed, so that a new one is considered: the device's sampler only applies the values set below.
    // `is_greedy` and `scale` read the temperature, `is_plain` the edits, and the others change no draw.
    let Sampling {
        temperature: _,
        top_k,
        top_p,
        min_p,
        typical_p,
        top_n_sigma,
        xtc,
        penalties: _,
        dry: _,
        bias: _,
        allowed: _,
        bad_words: _,
        seed,
        choice,
        tokens_max: _,
        tokens_min: _,
        stop: _,
        logprobs,
        logprob_token_ids: requested_tokens,
    } = sampling;
    let Draw { sampling: _, prompt: _, output: _, score, mask: _ } = draw;
    let is_drawn_only = score.is_none() && requested_tokens.is_empty() && logprobs.is_none_or(|n_top| n_top == 0);
    if !edits::is_plain(draw) || !is_drawn_only {
        return None;
    }
    let key = Noise::new(*seed, *choice, draw.position()).key();
    let (least, all) = (f64::NEG_INFINITY, 1.0);
    if sampling.is_greedy() {
        return Some(UneditedDraw { key, scale: 1.0, scale_f32: 1.0, least, top_p: all, top_k: 0 });
    }
    let is_known = *typical_p >= 1.0 && *top_n_sigma <= 0.0 && xtc.probability == 0.0;
    let (scale, scale_f32) = (filters::inverse_temperature(sampling), filters::inverse_temperature_f32(sampling));
    let (least, top_p) = (filters::min_p_logit(*min_p), f64::from(*top_p).min(all));
    is_known.then_some(UneditedDraw { key, scale, scale_f32, least, top_p, top_k: *top_k })
}

fn draw_row(row: &[f32], draw: &Draw<'_>, scratch: &mut SampleScratch) -> Result<TokenOut, DrawError> {
    if draw.mask == DrawMask::Late {
        return Err(DrawError::Late);
    }
    let isa = scratch.isa;
    let largest = largest_of(isa, row).ok_or(DrawError::NotNumbers)?;
    if let Some(score) = draw.score {
        return Ok(token_out(
            row,
            largest,
            score.token,
            LogprobRequest { logprobs: Some(score.n_top), token_ids: &[] },
            isa,
            &mut scratch.keys,
        ));
    }
    let token = match draw.mask.only() {
        Some(only) => forced(row, only, draw)?,
        None if edits::is_plain(draw) => drawn(row, largest, draw, isa, &mut scratch.keys),
        None => drawn_edited(row, draw, scratch)?,
    };
    let Sampling { logprobs, logprob_token_ids: requested, .. } = draw.sampling;
    Ok(token_out(
        row,
        largest,
        token,
        LogprobRequest { logprobs: *logprobs, token_ids: requested },
        isa,
        &mut scratch.keys,
    ))
}

/// Takes the only token of a mask: no edit or filter can choose another one.
fn forced(row: &[f32], only: Token, draw: &Draw<'_>) -> Result<Token, DrawError> {
    let is_there = row.get(only as usize).is_some_and(|logit| logit.is_finite());
    if is_there && !edits::is_banned(draw, only) { Ok(only) } else { Err(DrawError::NothingLeft) }
}

fn drawn_edited(row: &[f32], draw: &Draw<'_>, scratch: &mut SampleScratch) -> Result<Token, DrawError> {
    let SampleScratch { isa, keys, edited, marks } = scratch;
    edits::edit(row, draw, edited, marks);
    match largest_of(*isa, edited) {
        Some(largest) => Ok(drawn(edited, largest, draw, *isa, keys)),
        None if edited.iter().all(|logit| *logit == f32::NEG_INFINITY) => Err(DrawError::NothingLeft),
        None => Err(DrawError::NotNumbers),
    }
}

/// The largest logit of a row without NaN or +infinity; -infinity is allowed, as a mask.
fn largest_of(isa: Isa, row: &[f32]) -> Option<f32> {
    let holds_nan = row.iter().fold(false, |holds, logit| holds | logit.is_nan());
    let largest = rows::largest(isa, row);
    (!holds_nan && largest.is_finite()).then_some(largest)
}

fn drawn(row: &[f32], largest: f32, draw: &Draw<'_>, isa: Isa, keys: &mut Vec<LogitKey>) -> Token {
    let first = row.iter().position(|logit| *logit == largest).map_or(0, |token| token as Token);
    let sampling = draw.sampling;
    if sampling.is_greedy() {
        return first;
    }
    let noise = Noise::new(sampling.seed, sampling.choice, draw.position());
    let heated = ScaledLogits::new(row, largest, sampling, isa);
    if heated.is_unordered() {
        // The most likely token first: it sets the score that the others must beat.
        let mut best = BestToken::new(first, &heated, &noise);
        (0..row.len() as Token)
            .filter(|token| heated.keeps(*token))
            .for_each(|token| best.offer(token, &heated, &noise));
        return best.token;
    }
    heated.select(&noise, keys);
    let mut best = BestToken::new(keys.first().map_or(first, |key| key.token()), &heated, &noise);
    keys.iter().for_each(|key| best.offer(key.token(), &heated, &noise));
    best.token
}

struct BestToken {
    token: Token,
    score: f64,
}

impl BestToken {
    fn new(token: Token, heated: &ScaledLogits<'_>, noise: &Noise) -> BestToken {
        BestToken { token, score: heated.scaled(token) + noise.gumbel(token) }
    }

    fn offer(&mut self, token: Token, heated: &ScaledLogits<'_>, noise: &Noise) {
        let scaled = heated.scaled(token);
        // The bound first: almost no token then needs the exact noise.
        if scaled + Noise::MAX < self.score {
            return;
        }
        let bits = noise.bits(token);
        if scaled + Noise::gumbel_bound(bits) < self.score {
            return;
        }
        let score = scaled + Noise::gumbel_of(bits);
        if score > self.score || (score == self.score && token < self.token) {
            *self = BestToken { token, score };
        }
    }
}

/// The logprobs that are returned beside a token: its own and those of these tokens, or of this many most likely ones.
struct LogprobRequest<'a> {
    logprobs: Option<u8>,
    token_ids: &'a [Token],
}

/// Returns the token with the requested logprobs.
fn token_out(
    row: &[f32],
    largest: f32,
    token: Token,
    request: LogprobRequest<'_>,
    isa: Isa,
    keys: &mut Vec<LogitKey>,
) -> TokenOut {
    let mut out = TokenOut { token, logprob: None, top: Vec::new() };
    if let Some(n_top) = request.logprobs {
        let log_sum = largest + math::ln(rows::sum_exp(isa, row, largest, 1.0));
        let logprob = |token: Token| row.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logit - log_sum);
        out.logprob = Some(logprob(token));
        let with_logprob = |token: Token| TokenLogprob { token, logprob: logprob(token) };
        if !request.token_ids.is_empty() {
            let others = request.token_ids.iter().filter(|other| **other != token);
            out.top.extend([token].iter().chain(others).map(|token| with_logprob(*token)));
        } else if n_top > 0 {
            select_largest(row, usize::from(n_top), keys);
            out.top.extend(keys.iter().map(|key| with_logprob(key.token())));
        }
    }
    out
}
