//! Edits of logits before the draw: masks, bias and penalties. They depend on the row and the log only.

use crate::{Draw, DrawMask};
use types::{Dry, Penalties, Sampling, Token, Tokens};

/// Longer repetitions are penalized like one of this length. That already leaves nothing of the logit, and the search
/// stays short in a log that repeats one token.
pub(super) const REPETITION_MAX: usize = 64;
/// Larger than any logit, and small enough that sums of it stay finite.
const PENALTY_MAX: f64 = 1e30;

/// Whether this draw edits nothing.
pub(super) fn is_plain(draw: &Draw<'_>) -> bool {
    let Sampling { bias, allowed, bad_words, penalties, dry, .. } = draw.sampling;
    draw.mask == DrawMask::Open
        && bias.is_empty()
        && allowed.is_empty()
        && bad_words.is_empty()
        && *penalties == Penalties::default()
        && dry.multiplier == 0.0
        && !hides_stops(draw)
}

fn hides_stops(draw: &Draw<'_>) -> bool {
    draw.n_output() < draw.sampling.tokens_min && !draw.sampling.stop.is_empty()
}

/// Whether something besides the mask forbids the token.
pub(super) fn is_banned(draw: &Draw<'_>, token: Token) -> bool {
    let Sampling { allowed, bad_words, .. } = draw.sampling;
    let ends_word =
        |word: &Tokens| word.split_last().is_some_and(|(last, before)| draw.output.ends_with(before) && *last == token);
    (!allowed.is_empty() && !allowed.contains(&token))
        || (hides_stops(draw) && draw.sampling.is_stop(token))
        || bad_words.iter().any(ends_word)
}

/// Writes the row to `edited` with this draw's edits. `marks` is zero for every token before and after.
pub(super) fn edit(row: &[f32], draw: &Draw<'_>, edited: &mut Vec<f32>, marks: &mut Vec<u32>) {
    let sampling = draw.sampling;
    allow(row, &sampling.allowed, edited);
    if let DrawMask::Of(words) = draw.mask {
        mask_unset(words, edited);
    }
    sampling.bad_words.iter().for_each(|word| forbid_end(edited, word, draw.output));
    if hides_stops(draw) {
        sampling.stop.iter().for_each(|stop| mask(edited, *stop));
    }
    for (token, bias) in &sampling.bias {
        change(edited, *token, |logit| logit + bias);
    }
    marks.resize(row.len(), 0);
    if sampling.penalties != Penalties::default() {
        penalize(edited, draw, &sampling.penalties, marks);
    }
    if sampling.dry.multiplier > 0.0 {
        penalize_repetitions(edited, draw, &sampling.dry, marks);
    }
}

fn allow(row: &[f32], allowed: &[Token], edited: &mut Vec<f32>) {
    edited.clear();
    if allowed.is_empty() {
        return edited.extend_from_slice(row);
    }
    edited.resize(row.len(), f32::NEG_INFINITY);
    for &token in allowed {
        if let (Some(to), Some(from)) = (edited.get_mut(token as usize), row.get(token as usize)) {
            *to = *from;
        }
    }
}

/// Masks what has no bit.
fn mask_unset(words: &[u32], row: &mut [f32]) {
    let words = words.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in row.chunks_mut(32).zip(words).filter(|(_, word)| *word != u32::MAX) {
        // Most words of a narrow mask.
        if word == 0 {
            logits.fill(f32::NEG_INFINITY);
            continue;
        }
        for (_, logit) in logits.iter_mut().enumerate().filter(|(i, _)| word >> i & 1 == 0) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn change(row: &mut [f32], token: Token, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = row.get_mut(token as usize) {
        *logit = to(*logit);
    }
}

fn mask(row: &mut [f32], token: Token) {
    change(row, token, |_| f32::NEG_INFINITY);
}

/// Masks a word's last token where the output ends with the rest of the word.
fn forbid_end(row: &mut [f32], word: &[Token], output: &[Token]) {
    if let Some((last, before)) = word.split_last()
        && output.ends_with(before)
    {
        mask(row, *last);
    }
}

/// Flags tokens of the prompt; the bits below count a token's occurrences in the output.
const IN_PROMPT: u32 = 1 << 31;

fn penalize(row: &mut [f32], draw: &Draw<'_>, penalties: &Penalties, marks: &mut [u32]) {
    let (prompt, output) = penalty_window(draw, penalties.window);
    // In a window a token of the prompt counts as one of the output does.
    let of_prompt = |mark: u32| if penalties.window > 0 { mark + 1 } else { mark | IN_PROMPT };
    for token in prompt.iter().filter(|token| (**token as usize) < row.len()) {
        marks[*token as usize] = of_prompt(marks[*token as usize]);
    }
    for token in output.iter().filter(|token| (**token as usize) < row.len()) {
        marks[*token as usize] += 1;
    }
    for &token in prompt.iter().chain(output) {
        let Some(mark) = marks.get_mut(token as usize) else { continue };
        // A token's first occurrence clears its mark, so that later ones change nothing.
        let mark = std::mem::take(mark);
        if mark != 0 {
            change(row, token, |logit| penalized(logit, mark & !IN_PROMPT, penalties));
        }
    }
}

/// The tokens of prompt and output that penalties look at: the last `window` of both, or all.
fn penalty_window<'a>(draw: &Draw<'a>, window: u32) -> (&'a [Token], &'a [Token]) {
    if window == 0 {
        return (draw.prompt, draw.output);
    }
    let of_output = draw.output.len().min(window as usize);
    let of_prompt = draw.prompt.len().min(window as usize - of_output);
    (&draw.prompt[draw.prompt.len() - of_prompt..], &draw.output[draw.output.len() - of_output..])
}

fn penalized(logit: f32, n_output: u32, penalties: &Penalties) -> f32 {
    let Penalties { presence, frequency, repetition, window: _ } = *penalties;
    let logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
    let logit = logit - frequency * n_output as f32;
    if n_output > 0 { logit - presence } else { logit }
}

/// The log's parts as one slice, indexed from its end.
struct ReversedLog<'a> {
    prompt: &'a [Token],
    output: &'a [Token],
}

impl ReversedLog<'_> {
    fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// The token that is followed by `i` others.
    fn get(&self, i: usize) -> Token {
        match self.output.len().checked_sub(i + 1) {
            Some(at) => self.output[at],
            None => self.prompt[self.len() - 1 - i],
        }
    }

    /// Whether `run` ends before the last `i` tokens.
    fn run_ends_at(&self, i: usize, run: &[Token]) -> bool {
        i + run.len() <= self.len() && run.iter().rev().enumerate().all(|(j, token)| self.get(i + j) == *token)
    }

    /// The number of tokens after the last breaker.
    fn since_breaker(&self, breakers: &[Tokens], max: usize) -> usize {
        let is_broken = |i: &usize| breakers.iter().any(|run| self.run_ends_at(*i, run));
        (0..max.min(self.len())).find(is_broken).unwrap_or(max.min(self.len()))
    }
}

/// `.. a b c [x] .. a b c [?]`: penalizes x, which followed the same run before, by the run's length.
fn penalize_repetitions(row: &mut [f32], draw: &Draw<'_>, dry: &Dry, marks: &mut [u32]) {
    let log = ReversedLog { prompt: draw.prompt, output: draw.output };
    let length_max = log.since_breaker(&dry.breakers, REPETITION_MAX);
    let length_min = (dry.length_allowed as usize).max(1);
    if length_max < length_min || log.len() < 2 {
        return;
    }
    for i in 1..log.len() {
        let same = (0..length_max.min(log.len() - i)).take_while(|&j| log.get(j) == log.get(i + j)).count();
        if let Some(mark) = marks.get_mut(log.get(i - 1) as usize).filter(|_| same >= length_min) {
            *mark = (*mark).max(same as u32);
        }
    }
    for i in 1..log.len() {
        let token = log.get(i - 1);
        let same = marks.get_mut(token as usize).map_or(0, std::mem::take);
        if same > 0 {
            let over = f64::from(same.saturating_sub(dry.length_allowed));
            let penalty = f64::from(dry.multiplier) * libm::pow(f64::from(dry.base), over);
            change(row, token, |logit| logit - penalty.min(PENALTY_MAX) as f32);
        }
    }
}
