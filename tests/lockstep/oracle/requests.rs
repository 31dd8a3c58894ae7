//! The requests for every checkpoint: 64 from a seeded generator that no other test uses, so that they never change. A
//! checkpoint is only its vocabulary and its context here.

use types::{Dry, Goal, Penalties, Request, Sampling, Token, Tokens, Xtc};

pub const REQUESTS: usize = 64;
/// Choices of one prompt and seed in turn, as a client's `n` makes them.
const CHOICES: usize = 3;
/// The most tokens generated; half of a very short context.
const ROOM: u32 = 64;
/// Lengths on both sides of the edges of blocks, windows, attention's tiles and the grids' chunks.
const LENGTHS: [usize; 24] =
    [1, 2, 15, 16, 17, 18, 19, 20, 21, 31, 32, 33, 95, 96, 97, 128, 193, 255, 256, 257, 300, 400, 480, 700];

pub fn requests(vocab: u32, context: u32) -> Vec<Request> {
    (0..REQUESTS).map(|i| request(i, vocab, context)).collect()
}

/// The same prompts for an encoder. Every third is a pair of texts.
pub fn texts(vocab: u32, context: u32) -> Vec<Request> {
    let text = |(i, of): (usize, Request)| {
        let second_text = if i.is_multiple_of(3) { of.prompt.len() as u32 / 2 } else { 0 };
        let sampling = Sampling { tokens_max: 1, ..Sampling::default() };
        Request { prompt: of.prompt, second_text, goal: Goal::Pool, sampling, ..Request::default() }
    };
    requests(vocab, context).into_iter().enumerate().map(text).collect()
}

fn request(i: usize, vocab: u32, context: u32) -> Request {
    let room = ROOM.min(context / 2);
    let (group, choice) = if i < LENGTHS.len() { (i, 0) } else { (i - i % CHOICES, i % CHOICES) };
    // The choices of one prompt share the random numbers of the first of them.
    let mut dice = Dice(group as u64);
    let length = LENGTHS.get(group).copied().unwrap_or_else(|| 1 + dice.below(120) as usize);
    let prompt = prompt(&mut dice, vocab, length.min((context - room) as usize));
    let sampling = sampling(&mut dice, vocab, &prompt);
    let tokens_max = sampling.tokens_max.min(room);
    let sampling = Sampling { choice: choice as u32, tokens_max, ..sampling };
    let goal = match i % 16 {
        5 | 12 => Goal::Score { top_n: dice.below(6) as u8 },
        14 => Goal::Pool,
        _ => Goal::Generate,
    };
    Request { prompt, sampling, goal, ..Request::default() }
}

/// A third of the prompts repeat themselves, for penalties on repetition; a third begin alike, for the prefix cache.
fn prompt(dice: &mut Dice, vocab: u32, n: usize) -> Tokens {
    let kind = dice.below(3);
    let mut tokens = if kind == 0 { Dice(u64::MAX) } else { Dice(dice.next()) };
    let period = if kind == 1 { 3 + dice.below(7) as usize } else { n };
    let round: Tokens = (0..period.min(n)).map(|_| tokens.below(vocab)).collect();
    round.iter().copied().cycle().take(n).collect()
}

fn sampling(dice: &mut Dice, vocab: u32, prompt: &[Token]) -> Sampling {
    let sampling = Sampling {
        temperature: dice.of(&[0.0, 0.0, 0.4, 0.8, 1.0, 1.7]),
        seed: dice.next(),
        // Some outgrow the blocks of their admission, so that a small pool runs out.
        tokens_max: 5 + dice.below(14) + dice.of(&[0, 0, 0, ROOM - 20]),
        tokens_min: dice.of(&[0, 0, 3, 6]),
        logprobs: dice.of(&[None, Some(0), Some(1), Some(4), Some(20)]),
        ..Sampling::default()
    };
    let sampling = filtered(dice, sampling);
    edited(dice, vocab, prompt, sampling)
}

/// Several filters at once, so that their order matters.
fn filtered(dice: &mut Dice, it: Sampling) -> Sampling {
    Sampling {
        top_k: dice.of(&[0, 0, 5, 40, 100]),
        top_p: dice.of(&[1.0, 1.0, 0.5, 0.9, 0.98]),
        min_p: dice.of(&[0.0, 0.0, 0.02, 0.2]),
        typical_p: dice.of(&[1.0, 1.0, 1.0, 0.6, 0.95]),
        top_n_sigma: dice.of(&[0.0, 0.0, 0.0, 1.5, 3.0]),
        xtc: dice.of(&[
            Xtc::default(),
            Xtc::default(),
            Xtc::default(),
            Xtc { probability: 0.5, threshold: 0.01 },
            Xtc { probability: 1.0, threshold: 0.05 },
        ]),
        ..it
    }
}

/// Edits of tokens in the prompt, so that they have an effect.
fn edited(dice: &mut Dice, vocab: u32, prompt: &[Token], it: Sampling) -> Sampling {
    let mut some = |n: usize| -> Tokens {
        let prompt_token = |dice: &mut Dice| prompt[dice.below(prompt.len() as u32) as usize];
        (0..n).map(|i| if i % 2 == 0 { prompt_token(dice) } else { dice.below(vocab) }).collect()
    };
    let (stop, biased, words, breaker, allowed) = (some(vocab as usize / 12), some(4), some(3), some(1), some(90));
    let dry = Dry { multiplier: dice.of(&[0.0, 0.8, 3.0]), breakers: vec![breaker], ..Dry::default() };
    let bias = biased.into_iter().zip([4.0, 1.5, -6.0, 0.25]).collect();
    Sampling {
        penalties: Penalties {
            presence: dice.of(&[0.0, 0.0, 0.4, -0.3]),
            frequency: dice.of(&[0.0, 0.0, 0.3, 1.0]),
            repetition: dice.of(&[1.0, 1.0, 1.15, 1.5]),
            window: 0,
        },
        dry: dice.of(&[Dry::default(), Dry::default(), dry]),
        bias: dice.of(&[Vec::new(), Vec::new(), bias]),
        bad_words: dice.of(&[Vec::new(), Vec::new(), vec![words[..1].to_vec(), words[1..].to_vec()]]),
        allowed: dice.of(&[Tokens::new(), Tokens::new(), Tokens::new(), Tokens::new(), allowed]),
        stop: dice.of(&[Tokens::new(), stop]),
        ..it
    }
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u32) -> u32 {
        (((self.next() >> 32) * u64::from(n)) >> 32) as u32
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize].clone()
    }
}
