//! The requests of tests: prompts, parameters and seeds of all kinds, the same in every run. A vocabulary is only its
//! size here.

use super::Answer;
use checkpoint::Checkpoint;
use grammar::{GrammarLimits, GrammarSpec};
use serde_json::json;
use std::cmp::Reverse;
use std::path::Path;
use types::{Dry, Penalties, Request, Sampling, Token, Tokens, Xtc};

pub const REQUESTS: usize = 64;

/// Describes the first difference between two answers.
pub fn difference(got: &Answer, expected: &Answer) -> String {
    match got.drawn.iter().zip(&expected.drawn).position(|(got, expected)| got != expected) {
        Some(i) => format!("token {i} is {:?}, and alone {:?}", got.drawn[i], expected.drawn[i]),
        None => {
            let (n, finish) = (got.drawn.len(), got.finish);
            format!("{n} tokens and {finish:?}, and alone {} and {:?}", expected.drawn.len(), expected.finish)
        }
    }
}

/// Requests with lengths on both sides of the edge of a block and of an attention tile.
pub fn tiny_requests(model: &Path) -> Vec<Request> {
    const LENGTHS: [usize; 16] = [1, 300, 16, 129, 40, 257, 3, 90, 255, 17, 64, 256, 33, 200, 32, 18];
    let checkpoint = Checkpoint::open(model).unwrap();
    let spec = checkpoint.spec();
    let stops: Tokens = (0..5).map(|i| (i * 37 + 11) % spec.vocab).collect();
    // Every fourth request outgrows the blocks of its admission, so that a small pool runs out.
    let tokens_max = |i: usize| 8 + (i as u32 * 13) % 33 + if i % 4 == 1 { 64 } else { 0 };
    let mut requests = mixed(spec.vocab, &LENGTHS, tokens_max, &stops);
    let longest = 700.min(spec.context as usize - 48);
    requests[REQUESTS - 1].prompt = tokens(99, spec.vocab, longest);
    // For the few models with such a short context.
    requests.iter_mut().for_each(|it| it.prompt.truncate((spec.context - it.sampling.tokens_max) as usize));
    if checkpoint.token_table().is_ok() {
        give_grammars(&mut requests);
    }
    requests
}

/// Returns a third of `tiny_requests`. Those that grow most are first, so that they outgrow a small pool together.
pub fn few_requests(model: &Path) -> Vec<Request> {
    let mut picked: Vec<Request> = tiny_requests(model).into_iter().step_by(3).collect();
    picked.sort_by_key(|request| Reverse(request.sampling.tokens_max));
    picked
}

/// Short requests, since the model is real; and two long ones at the end.
pub fn smollm2_requests() -> Vec<Request> {
    const LENGTHS: [usize; 16] = [1, 33, 16, 5, 17, 40, 3, 24, 8, 18, 2, 31, 12, 32, 6, 20];
    const VOCAB: u32 = 49152;
    let tokens_max = |i: usize| 4 + (i as u32 * 5) % 9 + if i % 4 == 1 { 24 } else { 0 };
    // The comma, the full stop, the newline and the end of a message.
    let mut requests = mixed(VOCAB, &LENGTHS, tokens_max, &[28, 30, 198, 2]);
    requests[REQUESTS - 2].prompt = tokens(98, VOCAB, 270);
    requests[REQUESTS - 1].prompt = tokens(99, VOCAB, 600);
    give_grammars(&mut requests);
    requests
}

/// Half of the prompts have a common beginning; the last quarter repeats prompts with other seeds.
fn mixed(vocab: u32, lengths: &[usize], tokens_max: impl Fn(usize) -> u32, stops: &[Token]) -> Vec<Request> {
    let request = |i: usize| {
        let of = if i < REQUESTS * 3 / 4 { i } else { i - REQUESTS / 2 };
        let seed = if of % 4 < 2 { 0 } else { of as u64 };
        let length = lengths[(of + of / lengths.len()) % lengths.len()];
        let sampling = Sampling { tokens_max: tokens_max(i), ..sampling(i, stops) };
        Request { prompt: tokens(seed, vocab, length), sampling, ..Request::default() }
    };
    (0..REQUESTS).map(request).collect()
}

/// Gives about every third request one of four grammars, also some that outgrow their blocks. Models without a
/// vocabulary get none.
fn give_grammars(requests: &mut [Request]) {
    let (number, word) = (json!({"type": "integer"}), json!({"type": "string", "maxLength": 9}));
    let specs = [
        GrammarSpec::JsonObject,
        GrammarSpec::JsonSchema(json!({"type": "array", "items": {"anyOf": [number, word]}, "minItems": 30})),
        GrammarSpec::Regex("([a-z]{2,5} ){4,}[0-9]+".into()),
        GrammarSpec::JsonSchema(json!({
            "type": "object",
            "properties": {"name": word, "ages": {"type": "array", "items": number}},
            "required": ["name", "ages"],
            "additionalProperties": false,
        })),
    ];
    let grammars = specs.map(|spec| grammar::compile(&spec, &GrammarLimits::default()).unwrap());
    let picked = requests.iter_mut().enumerate().filter(|(i, _)| i % 4 == 2 || i % 8 == 5);
    for ((_, request), grammar) in picked.zip(grammars.iter().cycle()) {
        request.grammar = Some(grammar.clone());
    }
}

fn sampling(i: usize, stops: &[Token]) -> Sampling {
    let any = Sampling { seed: i as u64 * 7919, choice: (i % 3) as u32, logprobs: Some(3), ..Sampling::default() };
    let window = [0, 12][i % 2];
    let penalties = Penalties { presence: 0.3, frequency: 0.2, repetition: 1.2, window };
    // The tokens that `stops` names exist in every vocabulary here.
    let dry = Dry { multiplier: 0.8, breakers: vec![stops[..1].to_vec()], ..Dry::default() };
    let any = match i % 7 {
        3 => Sampling { penalties, ..any },
        4 => Sampling { dry, bias: vec![(stops[0], -3.0), (stops[1], 2.5)], ..any },
        5 => Sampling { bad_words: vec![vec![stops[2]], stops[..2].to_vec()], penalties, ..any },
        6 => Sampling { typical_p: 0.9, xtc: Xtc { probability: 0.5, threshold: 0.05 }, top_n_sigma: 4.0, ..any },
        _ => any,
    };
    let drawn = match i % 6 {
        0 => any,
        1 => Sampling { temperature: 0.7, ..any },
        2 => Sampling { temperature: 1.0, top_k: 40, ..any },
        3 => Sampling { temperature: 1.1, top_p: 0.9, ..any },
        4 => Sampling { temperature: 0.9, min_p: 0.05, ..any },
        _ => Sampling { temperature: 1.3, top_k: 50, top_p: 0.95, min_p: 0.02, ..any },
    };
    let stop = if i % 5 < 2 { stops.to_vec() } else { Tokens::new() };
    let logprobs = match i % 16 {
        15 => None,
        7 => Some(0),
        _ => Some(3),
    };
    let logprob_token_ids = if i % 16 == 11 { stops.to_vec() } else { Tokens::new() };
    Sampling { stop, tokens_min: (i % 4) as u32, logprobs, logprob_token_ids, ..drawn }
}

/// Arbitrary tokens, the same for a seed; a shorter prompt is the beginning of a longer one.
fn tokens(seed: u64, vocab: u32, n: usize) -> Tokens {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6c6f_636b;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % vocab
    };
    (0..n).map(|_| next()).collect()
}
