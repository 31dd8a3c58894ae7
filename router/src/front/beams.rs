//! Beam search over one prompt: which partial answers continue, which whole answers are the best, and when no better
//! one can come. Knows tokens and their logprobs, and neither requests nor replicas.
//!
//! The beams are the same as transformers': a sequence is worth the sum of its logprobs, divided by its length to the
//! power of `length_penalty` once it is whole.

use proto::cluster::{TokenLogprob, TokenOut};
use std::sync::Arc;
use types::Tokens;

/// The rules of a search.
#[derive(Clone, Debug)]
pub struct BeamRules {
    /// How many partial answers continue.
    pub width: usize,
    pub length_penalty: f32,
    pub patience: EarlyStopping,
    pub tokens_max: u32,
    /// Tokens that complete an answer.
    pub stop: Tokens,
    /// How many likely tokens are reported beside each.
    pub n_logprobs: usize,
}

/// When a search is over, besides at its longest answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyStopping {
    /// As soon as `width` answers are whole.
    UntilFull,
    /// When the best partial answer is, at its present length, worse than all answers that are kept.
    WhileBetter,
    /// The same, with the length at which a partial answer would be worth most.
    WhilePossible,
}

/// A partial answer, or a whole one.
#[derive(Clone, Debug, Default)]
pub struct Beam {
    pub tokens: Tokens,
    /// Its tokens with their logprobs. Beams that began alike share them.
    pub outputs: Vec<Arc<TokenOut>>,
    /// The sum of its logprobs; for a whole answer, divided by its length.
    pub score: f32,
    pub ends_at_stop: bool,
}

/// The state of a search.
pub struct Beams {
    rules: BeamRules,
    running: Vec<Beam>,
    /// The best first.
    whole: Vec<Beam>,
    can_improve: bool,
}

/// A token after a partial answer.
struct BeamCandidate<'a> {
    beam: usize,
    next: &'a TokenLogprob,
    score: f32,
}

impl BeamRules {
    /// How many of the most likely tokens after each partial answer matter: as many continue as there are beams,
    /// besides those that end an answer.
    pub fn n_top(&self) -> usize {
        self.width + self.stop.len()
    }

    /// Returns the divisor for the score of an answer of this length. Computed with twice the digits, so that every
    /// machine rounds to the same.
    fn length_divisor(&self, n_tokens: usize) -> f32 {
        (n_tokens as f64).powf(self.length_penalty.into()) as f32
    }
}

impl Beams {
    /// Begins with an empty answer.
    pub fn new(rules: BeamRules) -> Beams {
        Beams { rules, running: vec![Beam::default()], whole: Vec::new(), can_improve: true }
    }

    /// The partial answers that need a next token. None is left when the search is over.
    pub fn running(&self) -> &[Beam] {
        let is_full = self.rules.patience == EarlyStopping::UntilFull && self.whole.len() == self.rules.width;
        if is_full || !self.can_improve { &[] } else { &self.running }
    }

    /// Advances by one token. `tops` has an entry for each running beam: a token, and the likely tokens at its place,
    /// most likely first.
    pub fn advance(&mut self, tops: &[TokenOut]) {
        let candidates = self.candidates(tops);
        let n_tokens = self.running.first().map_or(0, |beam| beam.tokens.len()) + 1;
        let is_longest = n_tokens >= self.rules.tokens_max as usize;
        let by_length = self.rules.length_divisor(n_tokens);
        let (mut running, mut whole) = (Vec::new(), Vec::new());
        for (i, candidate) in candidates.iter().enumerate() {
            let is_stop = self.rules.stop.contains(&candidate.next.token);
            if is_stop || is_longest {
                // Candidates after the best ones only ensure that enough beams continue. They are no answers.
                if i < self.rules.width {
                    let score = candidate.score / by_length;
                    whole.push(Beam { score, ends_at_stop: is_stop, ..self.extend_beam(candidate, tops) });
                }
            } else if running.len() < self.rules.width {
                running.push(self.extend_beam(candidate, tops));
            }
        }
        self.running = running;
        self.keep(whole);
        self.can_improve &= self.may_improve(n_tokens);
    }

    /// Returns the best `n` whole answers, the best first.
    pub fn best(mut self, n: usize) -> Vec<Beam> {
        self.whole.truncate(n);
        self.whole
    }

    /// Returns all continuations that may matter, the best first; of equals the one of the better beam.
    fn candidates<'a>(&self, tops: &'a [TokenOut]) -> Vec<BeamCandidate<'a>> {
        let of = |(beam, (before, after)): (usize, (&Beam, &'a TokenOut))| {
            let before = before.score;
            after.top.iter().map(move |next| BeamCandidate { beam, next, score: before + next.logprob })
        };
        let mut all: Vec<BeamCandidate<'_>> = self.running.iter().zip(tops).enumerate().flat_map(of).collect();
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all
    }

    fn extend_beam(&self, candidate: &BeamCandidate<'_>, tops: &[TokenOut]) -> Beam {
        let before = &self.running[candidate.beam];
        let TokenLogprob { token, logprob } = *candidate.next;
        let top = tops[candidate.beam].top.iter().take(self.rules.n_logprobs).copied().collect();
        let own = Arc::new(TokenOut { token, logprob: Some(logprob), top });
        let tokens = before.tokens.iter().copied().chain([token]).collect();
        let outputs = before.outputs.iter().cloned().chain([own]).collect();
        Beam { tokens, outputs, score: candidate.score, ends_at_stop: false }
    }

    /// Keeps only the best whole answers; of equals the earlier.
    fn keep(&mut self, whole: Vec<Beam>) {
        self.whole.extend(whole);
        self.whole.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.whole.truncate(self.rules.width);
    }

    fn may_improve(&self, n_tokens: usize) -> bool {
        let BeamRules { width, length_penalty, patience, tokens_max, .. } = self.rules;
        let (Some(best), Some(worst)) = (self.running.first(), self.whole.last()) else { return true };
        let length = match patience == EarlyStopping::WhilePossible && length_penalty > 0.0 {
            true => tokens_max as usize,
            false => n_tokens,
        };
        self.whole.len() < width || best.score / self.rules.length_divisor(length) > worst.score
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::Token;

    const N_VOCAB: u32 = 4;
    const STOP: Token = 3;
    const LONGEST: usize = 4;

    fn rules(width: usize, length_penalty: f32, patience: EarlyStopping) -> BeamRules {
        let tokens_max = LONGEST as u32;
        BeamRules { width, length_penalty, patience, tokens_max, stop: vec![STOP], n_logprobs: 1 }
    }

    /// Returns the logprobs after a partial answer, most likely first: some function of it.
    fn next(beginning: &[Token]) -> Vec<TokenLogprob> {
        let seed = beginning.iter().fold(17_u32, |sum, token| sum.wrapping_mul(31).wrapping_add(*token + 7));
        let weights: Vec<f64> = (0..N_VOCAB).map(|token| f64::from((seed ^ (token * 97)) % 19 + 1)).collect();
        let sum: f64 = weights.iter().sum();
        let logprob = |(token, weight): (u32, &f64)| TokenLogprob { token, logprob: (weight / sum).ln() as f32 };
        let mut all: Vec<TokenLogprob> = (0..).zip(&weights).map(logprob).collect();
        all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        all
    }

    fn run_search(rules: BeamRules) -> Vec<Beam> {
        let (n_top, width) = (rules.n_top(), rules.width);
        let mut beams = Beams::new(rules);
        while !beams.running().is_empty() {
            let top = |beam: &Beam| next(&beam.tokens).into_iter().take(n_top).collect();
            let tops: Vec<TokenOut> =
                beams.running().iter().map(|beam| TokenOut { top: top(beam), ..TokenOut::default() }).collect();
            beams.advance(&tops);
        }
        beams.best(width)
    }

    /// Returns all answers with their worth, the best first.
    fn all(beginning: &[Token], sum: f32, length_penalty: f32) -> Vec<(Tokens, f32)> {
        let mut answers = Vec::new();
        for TokenLogprob { token, logprob } in next(beginning) {
            let (longer, sum) = ([beginning, &[token]].concat(), sum + logprob);
            if token == STOP || longer.len() == LONGEST {
                let worth = sum / (longer.len() as f64).powf(length_penalty.into()) as f32;
                answers.push((longer, worth));
            } else {
                answers.extend(all(&longer, sum, length_penalty));
            }
        }
        answers.sort_by(|a, b| b.1.total_cmp(&a.1));
        answers
    }

    #[test]
    fn a_beam_as_wide_as_everything_finds_the_best_of_everything() {
        for length_penalty in [-1.0, 0.0, 0.5, 1.0, 2.0] {
            let found = run_search(rules(81, length_penalty, EarlyStopping::WhilePossible));
            let answers = all(&[], 0.0, length_penalty);
            let worth = |beam: &Beam| answers.iter().find(|(tokens, _)| *tokens == beam.tokens).map(|answer| answer.1);
            assert!(found.iter().all(|beam| worth(beam) == Some(beam.score)), "{length_penalty}");
            let best: Vec<f32> = answers.iter().take(81).map(|answer| answer.1).collect();
            assert_eq!(found.iter().map(|beam| beam.score).collect::<Vec<_>>(), best, "{length_penalty}");
        }
    }

    #[test]
    fn one_beam_is_greedy() {
        let found = run_search(rules(1, 1.0, EarlyStopping::UntilFull));
        let mut greedy = Tokens::new();
        while greedy.len() < LONGEST && greedy.last() != Some(&STOP) {
            greedy.push(next(&greedy)[0].token);
        }
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].tokens, greedy);
    }

    #[test]
    fn a_beam_keeps_the_logprobs_that_led_to_it() {
        for beam in run_search(rules(3, 0.0, EarlyStopping::WhileBetter)) {
            let sum: f32 = beam.outputs.iter().filter_map(|token| token.logprob).fold(0.0, |sum, one| sum + one);
            assert_eq!((sum, beam.outputs.len()), (beam.score, beam.tokens.len()));
            assert!(beam.outputs.iter().zip(&beam.tokens).all(|(output, token)| output.token == *token));
            assert!(beam.outputs.iter().all(|output| output.top.len() == 1));
            assert_eq!(beam.ends_at_stop, beam.tokens.last() == Some(&STOP));
        }
    }
}
