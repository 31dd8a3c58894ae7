//! Conversations that branch, return and continue, on models whose cache keeps states at few places. Every answer is
//! the same as without a cache, most reusable positions are reused, and `usage` reports them.

use crate::common::node::{Node, post};
use crate::common::requests::difference;
use crate::common::{Answer, Replica, Setup, reference_model};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use types::{BLOCK_TOKENS, Request, Sampling, Tokens};

/// Trees that grow together, and turns of each.
const N_TREES: usize = 10;
const N_TURNS: usize = 7;
/// The longest that a log may be.
const LOG_MAX: usize = 420;
const VOCAB: u64 = 256;
/// Too few for all of the trees.
const CROWDED_BLOCKS: u32 = 60;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn tokens(&mut self, n: u64) -> Tokens {
        (0..n).map(|_| self.below(VOCAB) as u32).collect()
    }
}

/// The logs of a conversation from which a turn may continue, most often the last one.
struct Tree {
    logs: Vec<Tokens>,
}

impl Tree {
    fn new(random: &mut Random) -> Tree {
        let n = 1 + random.below(150);
        Tree { logs: vec![random.tokens(n)] }
    }

    /// Returns a turn that continues from a log, or from a position within it.
    fn turn(&self, random: &mut Random) -> Request {
        let (n, newest) = (self.logs.len() as u64, self.logs.len() - 1);
        let from = if random.below(2) == 0 { newest } else { random.below(n) as usize };
        let mut prompt = self.logs[from].clone();
        if random.below(4) == 0 {
            prompt.truncate(1 + random.below(prompt.len() as u64) as usize);
        }
        let n_more = random.below(40);
        prompt.extend(random.tokens(n_more));
        prompt.truncate(LOG_MAX);
        let tokens_max = 1 + random.below(24) as u32;
        let sampling = Sampling { seed: random.below(1 << 30), tokens_max, logprobs: Some(2), ..Sampling::default() };
        Request { prompt, sampling, ..Request::default() }
    }

    fn grow(&mut self, request: &Request, answer: &Answer) {
        let log: Tokens = request.prompt.iter().copied().chain(answer.tokens()).collect();
        self.logs.push(log);
    }
}

/// The turns of some trees, in rounds, and their answers without a cache.
async fn cold_rounds(base: &Setup, seed: u64) -> Vec<(Vec<Request>, Vec<Answer>)> {
    let mut random = Random(seed);
    let mut trees: Vec<Tree> = (0..N_TREES).map(|_| Tree::new(&mut random)).collect();
    let (mut replica, mut rounds) = (Replica::start(base).await, Vec::new());
    for _ in 0..N_TURNS {
        let requests: Vec<Request> = trees.iter().map(|tree| tree.turn(&mut random)).collect();
        let answers = replica.run(&requests).await;
        trees.iter_mut().zip(&requests).zip(&answers).for_each(|((tree, request), got)| tree.grow(request, got));
        rounds.push((requests, answers));
    }
    assert_eq!(replica.seen().hits, 0, "nothing was reused");
    replica.stop().await;
    rounds
}

/// Returns how many positions of these prompts were computed before, in whole blocks, and before the last.
fn n_reusable(rounds: &[(Vec<Request>, Vec<Answer>)]) -> usize {
    let mut logs: Vec<Tokens> = Vec::new();
    let mut n = 0;
    for (requests, answers) in rounds {
        for request in requests {
            let common = |log: &Tokens| log.iter().zip(&request.prompt).take_while(|(a, b)| a == b).count();
            let most = logs.iter().map(common).max().unwrap_or(0).min(request.prompt.len() - 1);
            n += most - most % BLOCK_TOKENS as usize;
        }
        let pairs = requests.iter().zip(answers);
        logs.extend(pairs.map(|(sent, got)| sent.prompt.iter().copied().chain(got.tokens()).collect::<Tokens>()));
    }
    n
}

/// Returns how many positions were reused with plenty of memory, and how many could have been.
async fn trees_answer_as_if_cold(model: &str, seed: u64) -> (usize, usize) {
    let base = Setup::new(reference_model(model), "int8", "f16");
    let rounds = cold_rounds(&base, seed).await;
    let reusable = n_reusable(&rounds);
    // Once with plenty of memory; and once with little, so that states and blocks are dropped and requests are
    // preempted.
    let crowded = Setup { n_blocks: CROWDED_BLOCKS, chunk_tokens_max: 48, ..base.on(2, 1) };
    let mut n_reused_of_all = Vec::new();
    for (way, setup) in [("alone", base), ("crowded", crowded)] {
        let mut replica = Replica::start(&Setup { prefix_cache: true, ..setup }).await;
        let mut n_reused = 0;
        for (requests, expected) in &rounds {
            let answers = replica.run(requests).await;
            for (i, (got, expected)) in answers.iter().zip(expected).enumerate() {
                let (n, what) = (requests[i].prompt.len(), || difference(got, expected));
                assert!(got == expected, "{model}, seed {seed}, {way}: a prompt of {n}: {}", what());
            }
            n_reused += replica.seen().hit_tokens as usize;
        }
        println!("{model}, seed {seed}, {way}: {n_reused} of {reusable} positions reused, {} hits", replica.n_cached());
        replica.stop().await;
        assert!(n_reused > 0, "{model}, seed {seed}, {way}: no position was reused");
        n_reused_of_all.push(n_reused);
    }
    (n_reused_of_all[0], reusable)
}

/// `LOCKSTEP_TEST_TREES` sets the number of trees for each model.
#[tokio::test]
async fn trees_of_conversations_answer_as_if_cold() {
    let n_trees = std::env::var("LOCKSTEP_TEST_TREES").map_or(N_TREES, |n| n.parse().unwrap());
    for (i, model) in (0..).zip(["qwen3-next", "granite4", "lfm2", "nemotron-h"]) {
        let (mut n_reused, mut n_reusable) = (0, 0);
        for seed in 0..n_trees.div_ceil(N_TREES) as u64 {
            let (reused, reusable) = trees_answer_as_if_cold(model, 4 * seed + i).await;
            (n_reused, n_reusable) = (n_reused + reused, n_reusable + reusable);
        }
        println!("{model}: {n_reused} of {n_reusable} positions reused");
        // Which states a recurrent model keeps depends on where prompts branch: single trees reuse less.
        assert!(n_reused >= n_reusable * 17 / 20, "{model}: {n_reused} of {n_reusable} positions were reused");
    }
}

/// A conversation over HTTP: its second turn reuses the first, and a worker is killed in the middle of the third.
#[test]
fn a_conversation_goes_on_where_it_was_and_over_a_kill() {
    const MODEL: &str = "tests/reference/qwen3-next";
    const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];
    let request_answer = |http: &str, prompt: &[u64], n: u64| -> Value {
        let body = json!({ "prompt": prompt, "max_tokens": n, "seed": 5, "ignore_eos": true, "logprobs": 2,
            "return_token_ids": true });
        let text = post(http, &body).body_mut().read_to_string().unwrap();
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert!(answer["choices"].is_array(), "{text}");
        answer
    };
    let goes_on = |prompt: &[u64], answer: &Value| -> Vec<u64> {
        let drawn = answer["choices"][0]["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap());
        prompt.iter().copied().chain(drawn).chain(1..9).collect()
    };
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    let mut alone = Node::start(&[&["serve", MODEL, "--prefix-cache", "false"], &DOORS[..]].concat());
    let mut grid = Node::start(&[&["serve", MODEL, "--tp", "2"], &DOORS[..]].concat());
    let (cold, http) = (alone.http(), grid.http());
    alone.until_ready(&cold);
    grid.until_ready(&http);
    let first: Vec<u64> = (0..100).map(|i| i * 7 % 251).collect();
    let expected = request_answer(&cold, &first, 40);
    assert_eq!(request_answer(&http, &first, 40)["choices"], expected["choices"]);
    let second = goes_on(&first, &expected);
    let expected = request_answer(&cold, &second, 40);
    let got = request_answer(&http, &second, 40);
    assert_eq!(got["choices"], expected["choices"]);
    assert!(cached(&got) >= 128 && cached(&expected) == 0, "{got}\n{expected}");
    let third = goes_on(&second, &expected);
    let expected = request_answer(&cold, &third, 280);
    let worker = grid.workers()[1];
    let got = std::thread::scope(|scope| {
        let client = scope.spawn(|| request_answer(&http, &third, 280));
        let page = || ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
        let n_running =
            |page: &str| serde_json::from_str::<Value>(page).unwrap()["replicas"][0]["requests"]["running"].clone();
        while !client.is_finished() && n_running(&page()) == 0 {}
        kill_process(Pid::from_raw(worker.cast_signed()).unwrap(), Signal::KILL).unwrap();
        client.join().unwrap()
    });
    grid.until(&["a worker process ended"]);
    assert_eq!(got["choices"], expected["choices"]);
}
