//! Encoders and classifiers: the vector of a text has the bits that it has alone on one rank, in any batch, on any
//! grid, with any instructions, and after a lost rank.

use crate::common::{Answer, Replica, Setup, reference_folder};
use types::{Goal, Request, Sampling, Token};
use worker::Isa;

/// Absolute positions and pairs, a rope with windows, scores by distance, and two with a module or classifier behind.
const MODELS: [&str; 5] = ["bert-rank", "modern-bert-class", "mpnet", "gemma-embedding", "nomic-bert"];
const TEXTS: usize = 40;
const CONTEXT: usize = 320;

/// Texts of one token up to the whole context. Every third is a pair.
fn requests() -> Vec<Request> {
    const LENGTHS: [usize; 10] = [1, 16, 300, 17, 40, 2, CONTEXT, 129, 33, 8];
    let request = |i: usize| {
        let n = LENGTHS[i % LENGTHS.len()].min(CONTEXT) as u32;
        let prompt: Vec<Token> = (0..n).map(|j| 2 + (j * j * 7 + j * 13 + i as u32 * 31) % 260).collect();
        let second_text = if i.is_multiple_of(3) { n / 2 } else { 0 };
        let sampling = Sampling { tokens_max: 1, ..Sampling::default() };
        Request { prompt, sampling, goal: Goal::Pool, second_text, cache_bypass: true, ..Request::default() }
    };
    (0..TEXTS).map(request).collect()
}

fn setup(model: &str) -> Setup {
    Setup { running_max: 32, batch_tokens_max: 512, ..Setup::new(reference_folder(model), "f32", "f16") }
}

async fn alone(setup: &Setup, requests: &[Request]) -> Vec<Answer> {
    let mut replica = Replica::start(setup).await;
    let answers = replica.run_alone(requests).await;
    replica.stop().await;
    answers
}

async fn check(way: &str, setup: &Setup, requests: &[Request], expected: &[Answer]) {
    let mut replica = Replica::start(setup).await;
    for _ in 0..2 {
        let got = replica.run(requests).await;
        let differing: Vec<usize> = (0..requests.len()).filter(|&i| got[i] != expected[i]).collect();
        assert!(differing.is_empty(), "{way}: requests {differing:?} differ from their answers alone");
    }
    assert_eq!((replica.seen().hits, replica.n_cached()), (0, 0), "{way}: nothing is cached");
    replica.stop().await;
}

#[tokio::test]
async fn every_way_gives_the_same_vectors() {
    let requests = requests();
    for model in MODELS {
        let base = setup(model);
        let expected = alone(&base, &requests).await;
        for (request, answer) in requests.iter().zip(&expected) {
            assert!(!answer.pooled.is_empty() && answer.drawn.is_empty(), "{model}: {} tokens", request.prompt.len());
        }
        let is_pair_seen = {
            let single = Request { second_text: 0, ..requests[9].clone() };
            alone(&base, &[single]).await[0] != expected[9]
        };
        assert_eq!(is_pair_seen, matches!(model, "bert-rank" | "nomic-bert"), "{model}: kinds of tokens");
        let ways = [
            ("in company", base.clone()),
            ("in steps of one long text", Setup { batch_tokens_max: 320, running_max: 8, ..base.clone() }),
            ("with memory that is cleared", Setup { zero_kv: true, ..base.clone() }),
            ("plain", Setup { isa: Isa::Plain, threads: 1, ..base.clone() }),
            ("tp 2", base.on(2, 1)),
            ("pp 2", base.on(1, 2)),
            ("tp 2, pp 2", base.on(2, 2)),
        ];
        for (way, setup) in ways {
            check(&format!("{model}, {way}"), &setup, &requests, &expected).await;
        }
    }
}
