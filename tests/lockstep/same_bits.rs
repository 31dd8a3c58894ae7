//! The guarantee: the same request gives the same token ids and logprobs, to the bit, in any batch, chunks, cache,
//! instructions and number of threads. Each way is compared with every request alone and uncached, and the worker's
//! steps are counted to prove that it happened.

use crate::common::requests::{REQUESTS, difference, smollm2_requests, tiny_requests};
use crate::common::watched::Seen;
use crate::common::{Answer, Replica, Setup, reference_folder, reference_model, smollm2};
use coordinator::{DraftPolicy, Speculation, StepPace};
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;
use types::{BLOCK_TOKENS, Finish, Goal, Request, Tokens};
use worker::{Isa, MaskConfig, RecalledLogs};

/// Too few for 64 requests at once, and enough for the longest.
const RECURRENT_BLOCKS: u32 = 50;

#[tokio::test]
async fn llama_f32_tied() {
    tiny_every_way("llama-f32-tied", "f32").await;
}

#[tokio::test]
async fn llama_f32_rope3() {
    tiny_every_way("llama-f32-rope3", "f32").await;
}

#[tokio::test]
async fn llama_f16_sharded() {
    tiny_every_way("llama-f16-sharded", "f32").await;
}

/// Its weights meet activations in bf16.
#[tokio::test]
async fn llama_bf16_odd() {
    tiny_every_way("llama-bf16-odd", "int8").await;
}

/// Two cache groups, one of which frees the blocks behind its window.
#[tokio::test]
async fn gemma3() {
    tiny_every_way("gemma3", "f32").await;
}

/// Layers that read the keys of others, and have inputs of their own.
#[tokio::test]
async fn gemma4() {
    tiny_every_way("gemma4", "int8").await;
}

/// Experts beside MLPs, with norms between and behind them.
#[tokio::test]
async fn gemma4_moe() {
    tiny_every_way("gemma4-moe", "int8").await;
}

#[tokio::test]
async fn kv_of_eight_bits() {
    int8_every_way("llama-f32-rope3", "int8").await;
}

/// Blocks behind a window go to others, scales and all.
#[tokio::test]
async fn kv_of_eight_bits_behind_windows() {
    int8_every_way("gemma3", "f32").await;
}

/// Gated delta rules beside attention.
#[tokio::test]
async fn qwen3_next() {
    recurrent_every_way("qwen3-next", "f32").await;
}

/// Mamba-2 beside attention, in layers of other sizes.
#[tokio::test]
async fn granite4() {
    recurrent_every_way("granite4", "int8").await;
}

/// A GGUF whose value heads of one key head are spread: each rank reads all key heads.
#[tokio::test]
async fn gguf_of_qwen35() {
    recurrent_every_way("gguf-qwen3.5", "int8").await;
}

/// Short convolutions beside attention.
#[tokio::test]
async fn lfm2() {
    recurrent_every_way("lfm2", "int8").await;
}

/// Layers of one sublayer: Mamba-2 or attention, and experts without a gate that keep nothing of earlier positions.
#[tokio::test]
async fn nemotron_h_moe() {
    recurrent_every_way("nemotron-h-moe", "int8").await;
}

/// Steps up to two, and norms in other places before a recurrence than behind attention.
#[tokio::test]
async fn olmo_hybrid() {
    recurrent_every_way("olmo-hybrid", "int8").await;
}

/// Layers that keep keys and values and also a state.
#[tokio::test]
async fn falcon_h1() {
    recurrent_every_way("falcon-h1", "int8").await;
}

#[tokio::test]
async fn smollm2_int8_on_f16() {
    let bench = Bench::new("smollm2 int8 f16", smollm2_setup("int8", "f16"), smollm2_requests()).await;
    // All except the two long requests, and a few for slow ways.
    let (all, short) = (bench.first(REQUESTS), bench.first(REQUESTS - 2));
    bench.company(&all).await;
    bench.chunks(&[7, 512], &all).await;
    bench.chunks(&[1], &short).await;
    bench.steps_by_time(&short).await;
    bench.prefix_cache(&short).await;
    bench.preemption(14, &short).await;
    bench.threads(&[1, 4], &short).await;
    let brief: Vec<_> = all.iter().copied().filter(|i| i % 4 != 1).take(8).collect();
    bench.instructions(&brief, &short).await;
}

#[tokio::test]
async fn smollm2_other_policies() {
    for (activations, kv_dtype) in [("int8", "f32"), ("f32", "f32")] {
        let mut few = smollm2_requests();
        few.truncate(8);
        few.iter_mut().for_each(|request| request.sampling.tokens_max = 4);
        let name = format!("smollm2 {activations} {kv_dtype}");
        let bench = Bench::new(&name, smollm2_setup(activations, kv_dtype), few).await;
        bench.chunks(&[7], &bench.first(8)).await;
        bench.instructions(&bench.first(4), &bench.first(8)).await;
    }
}

/// Features that need the rows of the prompt: logprobs of its tokens, and pooled hidden states.
#[tokio::test]
async fn scores_and_pooled_states() {
    let model = reference_folder("llama-f32-rope3");
    let mut requests = tiny_requests(&model);
    requests.truncate(24);
    for (i, request) in requests.iter_mut().enumerate() {
        request.goal = if i % 3 == 0 { Goal::Pool } else { Goal::Score { top_n: (i % 4) as u8 } };
        request.sampling.tokens_max = request.sampling.tokens_max.min(12);
    }
    let base = Setup::new(model, "f32", "f16");
    let mut replica = Replica::start(&base).await;
    let expected = replica.run_alone(&requests).await;
    replica.stop().await;
    for (request, answer) in requests.iter().zip(&expected) {
        match request.goal {
            Goal::Pool => assert!(answer.pooled.len() == 64 && answer.drawn.is_empty() && answer.scored.is_empty()),
            _ => assert_eq!((answer.scored.len() + 1, answer.pooled.len()), (request.prompt.len(), 0)),
        }
        assert!(request.goal == Goal::Pool || !answer.drawn.is_empty(), "it continues after that");
    }
    let small = Setup { n_blocks: 50, prefix_cache: true, ..base.clone() };
    let ways = [
        ("in company", base.clone()),
        ("in chunks", Setup { chunk_tokens_max: 7, ..base.clone() }),
        ("preempted and with a cache", small),
        ("plain", Setup { isa: Isa::Plain, threads: 1, ..base }),
    ];
    for (way, setup) in ways {
        let mut replica = Replica::start(&setup).await;
        // The second round would use the first one's cache.
        for _ in 0..2 {
            let got = replica.run(&requests).await;
            let differing: Vec<usize> = (0..requests.len()).filter(|&i| got[i] != expected[i]).collect();
            assert!(differing.is_empty(), "{way}: requests {differing:?} differ from their answers alone");
        }
        assert_eq!(replica.seen().hits, 0, "{way}: what needs all rows reads no cache");
        replica.stop().await;
    }
}

/// The comparison detects differences: the cache type is part of the policy, not one of the ways above.
#[tokio::test]
async fn another_policy_has_other_bits() {
    let model = reference_folder("llama-f32-tied");
    let mut requests = tiny_requests(&model);
    requests.truncate(16);
    requests.iter_mut().for_each(|request| request.sampling.logprobs = Some(3));
    let mut answers = Vec::new();
    for kv_dtype in ["f16", "f32"] {
        let mut replica = Replica::start(&Setup::new(model.clone(), "f32", kv_dtype)).await;
        answers.push(replica.run(&requests).await);
        replica.stop().await;
    }
    let n_equal = answers[0].iter().zip(&answers[1]).filter(|(one, other)| one == other).count();
    println!("{n_equal} of {} answers are the same with another type of cache", requests.len());
    assert_eq!(n_equal, 0);
}

/// K and V of eight bits: rounded row by row, and read back in any batch, on any grid, after any loss.
async fn int8_every_way(folder: &str, activations: &'static str) {
    let model = reference_folder(folder);
    let requests = tiny_requests(&model);
    let bench = Bench::new(&format!("{folder} int8 KV"), Setup::new(model, activations, "int8"), requests).await;
    let all = bench.first(REQUESTS);
    bench.company(&all).await;
    bench.chunks(&[1, 7, 512], &all).await;
    bench.prefix_cache(&all).await;
    bench.preemption(50, &all).await;
    bench.drafts(&all).await;
    bench.grids(&all).await;
    bench.threads(&[4], &all).await;
    let few = bench.first(REQUESTS / 4);
    bench.instructions(&few, &all).await;
}

async fn tiny_every_way(folder: &str, activations: &'static str) {
    for kv_dtype in ["f16", "f32"] {
        let model = reference_folder(folder);
        let requests = tiny_requests(&model);
        let setup = Setup::new(model, activations, kv_dtype);
        let bench = Bench::new(&format!("{folder} {activations} {kv_dtype}"), setup, requests).await;
        let all = bench.first(REQUESTS);
        bench.company(&all).await;
        bench.late_masks(&all).await;
        bench.chunks(&[1, 7, 512], &all).await;
        bench.steps_by_time(&all).await;
        bench.prefix_cache(&all).await;
        bench.preemption(50, &all).await;
        bench.threads(&[1, 4], &all).await;
        // Plain Rust is slow: with the second cache type it answers every third request.
        let for_plain: Vec<_> = all.iter().copied().step_by(if kv_dtype == "f16" { 1 } else { 3 }).collect();
        bench.instructions(&for_plain, &all).await;
    }
}

/// States are kept at few positions, so a cache may have more of a prompt's blocks than it has states for.
async fn recurrent_every_way(folder: &str, activations: &'static str) {
    let model = reference_model(folder);
    let requests = tiny_requests(&model);
    let bench = Bench::new(&format!("{folder} {activations}"), Setup::new(model, activations, "f16"), requests).await;
    let all = bench.first(REQUESTS);
    bench.company(&all).await;
    bench.chunks(&[1, 7, 64], &all).await;
    bench.steps_by_time(&all).await;
    bench.partly_warm_cache(&all).await;
    bench.preemption(RECURRENT_BLOCKS, &all).await;
    bench.drafts(&all).await;
    bench.grids(&all).await;
    let few = bench.first(REQUESTS / 4);
    bench.instructions(&few, &few).await;
}

/// Requests, and their answers alone.
struct Bench {
    name: String,
    base: Setup,
    requests: Vec<Request>,
    expected: Vec<Answer>,
}

impl Bench {
    async fn new(name: &str, base: Setup, requests: Vec<Request>) -> Bench {
        let mut replica = Replica::start(&base).await;
        let expected = replica.run_alone(&requests).await;
        let seen = replica.seen();
        replica.stop().await;
        let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap();
        assert_eq!((seen.loads, seen.drawing_max, seen.restarts, seen.hits), (1, 1, 0, 0), "each ran alone and cold");
        assert_eq!((seen.slice_tokens_max, seen.chunks), (longest, 0), "each prompt ran whole");
        let n_tokens: usize = expected.iter().map(|answer| answer.drawn.len()).sum();
        let n_stopped = expected.iter().filter(|answer| answer.finish == Some(Finish::Stop)).count();
        println!("{name}: {} requests alone, {n_tokens} tokens, {n_stopped} met a stop token", requests.len());
        assert!(requests.len() < REQUESTS || (1..REQUESTS).contains(&n_stopped), "ends of both kinds");
        Bench { name: name.into(), base, requests, expected }
    }

    /// The indices of the first `n` requests.
    fn first(&self, n: usize) -> Vec<usize> {
        (0..n).collect()
    }

    fn prompt_lengths(&self, picked: &[usize]) -> impl Iterator<Item = usize> {
        picked.iter().map(|&i| self.requests[i].prompt.len())
    }

    /// Checks that the picked requests, sent at once under `setup`, have the bits that they have alone.
    async fn same(&self, way: &str, setup: Setup, picked: &[usize]) -> Seen {
        let mut replica = Replica::start(&setup).await;
        let seen = self.same_on(&mut replica, way, picked).await;
        replica.stop().await;
        assert_eq!(seen.loads, 1, "{} {way}: no worker was lost", self.name);
        seen
    }

    async fn same_on(&self, replica: &mut Replica, way: &str, picked: &[usize]) -> Seen {
        let requests: Vec<_> = picked.iter().map(|&i| self.requests[i].clone()).collect();
        let answers = replica.run(&requests).await;
        let seen = replica.seen();
        println!("{}: {way}: {} requests, {seen:?}", self.name, picked.len());
        for (&i, got) in picked.iter().zip(&answers) {
            let (sampling, expected) = (&self.requests[i].sampling, &self.expected[i]);
            let what = || difference(got, expected);
            assert!(got == expected, "{} {way}: request {i} ({sampling:?}): {}", self.name, what());
        }
        seen
    }

    async fn company(&self, picked: &[usize]) {
        for steps_in_flight_max in [1, 2, 4] {
            let way = format!("all at once, {steps_in_flight_max} in flight");
            let seen = self.same(&way, Setup { steps_in_flight_max, ..self.base.clone() }, picked).await;
            assert!(seen.running_max >= 32, "{way}: {} at once", seen.running_max);
            // With more steps in flight each step holds only some of the requests.
            assert!(steps_in_flight_max > 2 || seen.drawing_max >= 32, "{way}: {} in a step", seen.drawing_max);
        }
    }

    /// Masks that are later than the passes: draws are repeated, with steps in flight behind them.
    async fn late_masks(&self, picked: &[usize]) {
        let (wait_max, delay) = (Duration::ZERO, Duration::from_millis(3));
        let masks = MaskConfig { wait_max, delay, ..MaskConfig::default() };
        for steps_in_flight_max in [1, 3] {
            let way = format!("late masks, {steps_in_flight_max} in flight");
            let seen = self.same(&way, Setup { masks, steps_in_flight_max, ..self.base.clone() }, picked).await;
            assert!(seen.late > 100, "{way}: {} draws were late", seen.late);
        }
    }

    async fn chunks(&self, chunks: &[u32], picked: &[usize]) {
        let longest = self.prompt_lengths(picked).max().unwrap();
        for &chunk_tokens_max in chunks {
            let way = format!("chunks of {chunk_tokens_max}");
            let seen = self.same(&way, Setup { chunk_tokens_max, ..self.base.clone() }, picked).await;
            let chunk = chunk_tokens_max as usize;
            assert_eq!(seen.slice_tokens_max, chunk.min(longest), "{way}");
            assert!(chunk >= longest || seen.chunks > 0, "{way}: a log was cut");
        }
    }

    /// Chunks are cut to the time of a step, so that their lengths differ from run to run.
    async fn steps_by_time(&self, picked: &[usize]) {
        for micros in [1, 3000] {
            let pace = StepPace::fixed(micros);
            let setup = Setup { pace, batch_tokens_max: 128, chunk_tokens_max: 128, ..self.base.clone() };
            let seen = self.same(&format!("steps of {micros} us"), setup, picked).await;
            assert!(seen.chunks > 0, "steps of {micros} us: a log was cut");
        }
    }

    /// In the second round every prompt longer than a block is cached.
    async fn prefix_cache(&self, picked: &[usize]) {
        let n_long = self.prompt_lengths(picked).filter(|&n| n > BLOCK_TOKENS as usize).count();
        let mut replica = Replica::start(&Setup { prefix_cache: true, ..self.base.clone() }).await;
        self.same_on(&mut replica, "cold prefix cache", picked).await;
        let warm = self.same_on(&mut replica, "warm prefix cache", picked).await;
        replica.stop().await;
        assert_eq!(warm.hits as usize, n_long, "every prompt of more than a block");
    }

    /// At first the cache has half of each prompt, then the part of it that the answers have not evicted.
    async fn partly_warm_cache(&self, picked: &[usize]) {
        let half = |&i: &usize| {
            let mut request = self.requests[i].clone();
            request.prompt.truncate(request.prompt.len().div_ceil(2));
            (request.sampling.tokens_max, request.sampling.tokens_min) = (1, 0);
            request
        };
        let halves: Vec<_> = picked.iter().map(half).collect();
        let mut replica = Replica::start(&Setup { prefix_cache: true, ..self.base.clone() }).await;
        replica.run(&halves).await;
        replica.seen();
        let partly = self.same_on(&mut replica, "partly warm prefix cache", picked).await;
        let warm = self.same_on(&mut replica, "warm prefix cache", picked).await;
        replica.stop().await;
        assert!(partly.hits > 0 && partly.hit_tokens < warm.hit_tokens, "{partly:?}, then {warm:?}");
    }

    /// Accepted guesses, and some that are rejected and rewound.
    async fn drafts(&self, picked: &[usize]) {
        let log = |(request, answer): (&Request, &Answer)| -> Tokens {
            request.prompt.iter().copied().chain(answer.tokens()).collect()
        };
        let logs = self.requests.iter().zip(&self.expected).map(log).collect();
        let recalled = Some(Arc::new(RecalledLogs { logs, wrong: 25 }));
        let speculation = Speculation { drafting: DraftPolicy::Fixed(4), ..Speculation::default() };
        let seen = self.same("drafts", Setup { speculation, recalled, ..self.base.clone() }, picked).await;
        assert!(seen.drafts_accepted > 20 && seen.drafts_rejected > 20, "{seen:?}");
    }

    /// Grids that lose their sampler after some steps, in the middle of answers.
    async fn grids(&self, picked: &[usize]) {
        for (tp, pp, losses) in [(2, 1, &[9][..]), (1, 2, &[9, 25]), (2, 2, &[])] {
            let mut replica = Replica::start(&Setup { prefix_cache: true, ..self.base.on(tp, pp) }).await;
            losses.iter().for_each(|step| replica.break_at(*step));
            let seen = self.same_on(&mut replica, &format!("tp {tp}, pp {pp}, losses at {losses:?}"), picked).await;
            replica.stop().await;
            assert_eq!(seen.loads as usize, 1 + losses.len(), "tp {tp}, pp {pp}: {seen:?}");
        }
    }

    /// The requests that grow most are first, so that they outgrow the pool together.
    async fn preemption(&self, n_blocks: u32, picked: &[usize]) {
        let mut picked = picked.to_vec();
        picked.sort_by_key(|&i| Reverse(self.expected[i].drawn.len()));
        for prefix_cache in [false, true] {
            let way = format!("{n_blocks} blocks, prefix cache {prefix_cache}");
            let seen = self.same(&way, Setup { n_blocks, prefix_cache, ..self.base.clone() }, &picked).await;
            assert!(seen.restarts > 0, "{way}: nothing was preempted");
        }
        let setup = Setup { n_blocks, prefix_cache: true, zero_kv: true, ..self.base.clone() };
        let seen = self.same(&format!("{n_blocks} blocks that are cleared"), setup, &picked).await;
        assert!(seen.restarts > 0 && seen.hits == 0, "{n_blocks} blocks that are cleared are shared");
    }

    async fn threads(&self, threads: &[usize], picked: &[usize]) {
        for &threads in threads {
            self.same(&format!("{threads} threads"), Setup { threads, ..self.base.clone() }, picked).await;
        }
    }

    /// Plain Rust is by far the slowest, so it may get fewer requests.
    async fn instructions(&self, for_plain: &[usize], picked: &[usize]) {
        for isa in Isa::ALL {
            let picked = if isa == Isa::Plain { for_plain } else { picked };
            if isa.is_supported() {
                self.same(&format!("{isa:?}"), Setup { isa, ..self.base.clone() }, picked).await;
            } else {
                println!("{}: NOT RUN with {isa:?}: this machine does not have it", self.name);
            }
        }
    }
}

fn smollm2_setup(activations: &'static str, kv_dtype: &'static str) -> Setup {
    Setup { n_blocks: 768, ..Setup::new(smollm2(), activations, kv_dtype) }
}
