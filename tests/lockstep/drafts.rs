//! Guessed tokens change none: requests of all kinds with drafts that hold and drafts that do not, of fixed and of
//! adaptive number, on grids, in chunks, preempted and after losses, have the bits that each has alone and without.

use crate::common::requests::{REQUESTS, difference, tiny_requests};
use crate::common::watched::Seen;
use crate::common::{Answer, Replica, Setup, reference_folder};
use coordinator::{Drafting, Speculation};
use std::sync::Arc;
use types::{NgramLimits, Request, Tokens};
use worker::Recalled;

const MODEL: &str = "llama-f16-sharded";
/// Of a hundred guesses.
const WRONG: u64 = 25;

struct Bench {
    base: Setup,
    requests: Vec<Request>,
    expected: Vec<Answer>,
    recalled: Arc<Recalled>,
}

impl Bench {
    async fn new() -> Bench {
        let model = reference_folder(MODEL);
        let (requests, base) = (tiny_requests(&model), Setup::new(model, "int8", "f16").on(1, 1));
        let mut replica = Replica::start(&base).await;
        let expected = replica.run_alone(&requests).await;
        let seen = replica.seen();
        replica.stop().await;
        assert_eq!((requests.len(), seen.drafts_accepted, seen.drafts_rejected), (REQUESTS, 0, 0), "no drafts are off");
        let log = |(request, answer): (&Request, &Answer)| -> Tokens {
            request.prompt.iter().copied().chain(answer.tokens()).collect()
        };
        let logs = requests.iter().zip(&expected).map(log).collect();
        Bench { base, requests, expected, recalled: Arc::new(Recalled { logs, wrong: WRONG }) }
    }

    async fn same(&self, way: &str, drafting: Drafting, setup: Setup, breaks: &[u32]) -> Seen {
        let speculation = Speculation { drafting, ..Speculation::default() };
        let setup = Setup { speculation, recalled: Some(self.recalled.clone()), ..setup };
        let mut replica = Replica::start(&setup).await;
        breaks.iter().for_each(|n| replica.break_at(*n));
        let answers = replica.run(&self.requests).await;
        let seen = replica.seen();
        replica.stop().await;
        println!("{way}, {drafting:?}: {seen:?}");
        self.check_equal(&format!("{way}, {drafting:?}"), &answers);
        assert!(seen.drafts_accepted > 20 && seen.drafts_rejected > 20, "{way}, {drafting:?}: {seen:?}");
        seen
    }

    fn check_equal(&self, way: &str, answers: &[Answer]) {
        for (i, (got, expected)) in answers.iter().zip(&self.expected).enumerate() {
            assert!(got == expected, "{way}: request {i} ({:?}): {}", self.requests[i], difference(got, expected));
        }
    }

    async fn every_way(&self, drafting: Drafting) {
        let base = &self.base;
        self.same("tp 1", drafting, base.clone(), &[]).await;
        self.same("tp 2", drafting, base.on(2, 1), &[]).await;
        self.same("pp 2", drafting, base.on(1, 2), &[]).await;
        self.same("tp 2, pp 2", drafting, base.on(2, 2), &[]).await;
        let chunked = Setup { chunk_tokens_max: 7, prefix_cache: true, ..base.clone() };
        self.same("chunks of 7", drafting, chunked, &[]).await;
        let crowded = Setup { n_blocks: 50, prefix_cache: true, ..base.clone() };
        let seen = self.same("preempted", drafting, crowded, &[]).await;
        assert!(seen.restarts > 0, "{seen:?}");
        let cleared = Setup { n_blocks: 50, zero_kv: true, ..base.clone() };
        self.same("cleared", drafting, cleared, &[]).await;
        let seen = self.same("lost ranks", drafting, base.on(1, 2), &[9, 25]).await;
        assert!(seen.loads > 2, "{seen:?}");
    }
}

#[tokio::test]
async fn fixed_and_adaptive_drafts_have_the_bits_of_none() {
    let bench = Bench::new().await;
    for drafting in [
        Drafting::Fixed(1),
        Drafting::Fixed(4),
        Drafting::Fixed(8),
        // Cheap rows, so that some are given among many.
        Drafting::Adaptive { max: 8, row_permille: 2 },
    ] {
        bench.every_way(drafting).await;
    }
}

/// What is guessed from the log itself, with the fewest tokens that can be the same, so that much is guessed.
#[tokio::test]
async fn what_a_log_repeats_is_guessed_and_has_the_same_bits() {
    let bench = Bench::new().await;
    let ngrams = NgramLimits { least: 1, most: 4 };
    for (tp, pp) in [(1, 1), (2, 1), (1, 2)] {
        let speculation = Speculation { drafting: Drafting::Fixed(4), ngrams };
        let setup = Setup { speculation, ..bench.base.on(tp, pp) };
        let mut replica = Replica::start(&setup).await;
        let answers = replica.run(&bench.requests).await;
        let seen = replica.seen();
        replica.stop().await;
        println!("tp {tp}, pp {pp}: {seen:?}");
        bench.check_equal(&format!("tp {tp}, pp {pp}"), &answers);
        assert!(seen.drafts_accepted > 0 && seen.drafts_rejected > 20, "{seen:?}");
    }
}
