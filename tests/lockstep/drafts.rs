//! Guessed tokens do not change answers. Requests of all kinds, with accepted and rejected drafts, of fixed and of
//! adaptive number, on grids, in chunks, preempted and after losses, have the same bits as alone and without drafts.
//! The same holds for requests with grammars, whose masks stand behind drafts too, in time and late.

use crate::common::node::{Node, post};
use crate::common::requests::{REQUESTS, difference, tiny_requests};
use crate::common::watched::Seen;
use crate::common::{Answer, Replica, Setup, reference_folder, smollm2};
use crate::processes::DOORS;
use coordinator::{DraftModel, DraftPolicy, MtpDrafts, RowCost, Speculation};
use grammar::{GrammarLimits, GrammarSpec, ThinkingBudget};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use types::{CacheSalt, Goal, Grammar, NgramLimits, Request, Sampling, TenantId, Tokens};
use worker::{MaskConfig, RecalledLogs};

const MODEL: &str = "llama-f16-sharded";
/// Too few for the requests that run at the same time: some are preempted. The longest fits.
const CROWDED_BLOCKS: u32 = 36;
/// So many of a hundred guesses are wrong.
const WRONG: u64 = 25;

/// Masks that are never late, however long they take.
const PATIENT: MaskConfig = MaskConfig {
    threads: 2,
    wait_max: Duration::from_secs(60),
    late_max: Duration::from_secs(60),
    delay: Duration::ZERO,
};
const LATE: MaskConfig = MaskConfig { wait_max: Duration::ZERO, delay: Duration::from_millis(3), ..PATIENT };

/// A call whose text is forced for most of its length.
fn call() -> Grammar {
    let (city, days) = (json!({"type": "string", "maxLength": 6}), json!({"type": "integer"}));
    let call = json!({
        "type": "object",
        "properties": {
            "name": {"const": "get_weather"},
            "arguments": {
                "type": "object",
                "properties": {"city": city, "days": days},
                "required": ["city", "days"],
                "additionalProperties": false,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": false,
    });
    let content = json!({"type": "json_schema", "json_schema": call});
    let tag = json!({"type": "tag", "begin": "<tool_call>\n", "content": content, "end": "\n</tool_call>"});
    let tag = GrammarSpec::StructuralTag(json!({"type": "structural_tag", "format": tag}));
    grammar::compile(&tag, &GrammarLimits::default()).unwrap()
}

/// Calls and budgets for thoughts beside the schemas, regexes and objects of `tiny_requests`.
fn requests(model: &Path) -> Vec<Request> {
    let mut requests = tiny_requests(model);
    let closes = vec!["zq".to_owned()];
    let budget = ThinkingBudget { tokens_max: 5, is_open: true, closes, ..ThinkingBudget::default() };
    for (i, request) in requests.iter_mut().enumerate() {
        match i % 16 {
            3 => request.grammar = Some(budget.to_grammar(None)),
            8 | 11 => request.grammar = Some(call()),
            _ => {}
        }
    }
    requests
}

struct Bench {
    base: Setup,
    requests: Vec<Request>,
    expected: Vec<Answer>,
    recalled: Arc<RecalledLogs>,
}

impl Bench {
    async fn new() -> Bench {
        Bench::of(MODEL).await
    }

    async fn of(name: &str) -> Bench {
        let model = reference_folder(name);
        let (requests, base) = (requests(&model), Setup::new(model, "int8", "f16").on(1, 1));
        let base = Setup { masks: PATIENT, ..base };
        let mut replica = Replica::start(&base).await;
        let expected = replica.run_alone(&requests).await;
        let seen = replica.seen();
        replica.stop().await;
        assert_eq!((requests.len(), seen.drafts_accepted, seen.drafts_rejected), (REQUESTS, 0, 0), "no drafts are off");
        let log = |(request, answer): (&Request, &Answer)| -> Tokens {
            request.prompt.iter().copied().chain(answer.tokens()).collect()
        };
        let logs = requests.iter().zip(&expected).map(log).collect();
        Bench { base, requests, expected, recalled: Arc::new(RecalledLogs { logs, wrong: WRONG }) }
    }

    /// Checks the bits, and that the target accepts drafts and rejects drafts.
    async fn same(&self, way: &str, drafting: DraftPolicy, setup: Setup, breaks: &[u32]) -> Seen {
        let speculation = Speculation { drafting, ..Speculation::default() };
        let has_model = setup.draft_model.is_some() || setup.mtp.is_some();
        let recalled = (!has_model).then(|| self.recalled.clone());
        let setup = Setup { speculation, recalled, ..setup };
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

    /// Checks the bits, and that drafts behind masks are accepted and rejected too.
    async fn same_with_masks(&self, way: &str, drafting: DraftPolicy, setup: Setup, breaks: &[u32]) -> Seen {
        let seen = self.same(way, drafting, setup, breaks).await;
        let (accepted, rejected) = (seen.masked_drafts_accepted, seen.masked_drafts_rejected);
        assert!(accepted > 20 && rejected > 20, "{way}, {drafting:?}: with grammars: {seen:?}");
        seen
    }

    fn check_equal(&self, way: &str, answers: &[Answer]) {
        for (i, (got, expected)) in answers.iter().zip(&self.expected).enumerate() {
            assert!(got == expected, "{way}: request {i} ({:?}): {}", self.requests[i], difference(got, expected));
        }
    }

    /// Returns how many requests were preempted: with many drafts few requests run at the same time.
    async fn every_way(&self, drafting: DraftPolicy) -> u32 {
        let base = &self.base;
        self.same_with_masks("tp 1", drafting, base.clone(), &[]).await;
        self.same_with_masks("tp 2", drafting, base.on(2, 1), &[]).await;
        self.same_with_masks("pp 2", drafting, base.on(1, 2), &[]).await;
        self.same_with_masks("tp 2, pp 2", drafting, base.on(2, 2), &[]).await;
        let chunked = Setup { chunk_tokens_max: 7, prefix_cache: true, ..base.clone() };
        self.same_with_masks("chunks of 7", drafting, chunked, &[]).await;
        let crowded = Setup { n_blocks: CROWDED_BLOCKS, prefix_cache: true, ..base.clone() };
        let preempted = self.same_with_masks("preempted", drafting, crowded, &[]).await;
        let cleared = Setup { n_blocks: CROWDED_BLOCKS, zero_kv: true, ..base.clone() };
        let cleared = self.same_with_masks("cleared", drafting, cleared, &[]).await;
        let seen = self.same_with_masks("lost ranks", drafting, base.on(1, 2), &[9, 25]).await;
        assert!(seen.loads > 2, "{seen:?}");
        preempted.restarts + cleared.restarts
    }

    async fn with_late_masks(&self, drafting: DraftPolicy) {
        let late = Setup { masks: LATE, n_blocks: 50, ..self.base.on(1, 2) };
        // Without any wait for masks there is one behind a draft only by chance.
        let seen = self.same("late masks", drafting, late, &[9]).await;
        assert!(seen.late > 20 && seen.masked_drafts_rejected > 20, "{seen:?}");
    }
}

#[tokio::test]
async fn fixed_and_adaptive_drafts_have_the_bits_of_none() {
    let (bench, mut n_preempted) = (Bench::new().await, 0);
    for drafting in [
        DraftPolicy::Fixed(1),
        DraftPolicy::Fixed(4),
        DraftPolicy::Fixed(8),
        // Cheap rows, so that some are given among many.
        DraftPolicy::Adaptive { max: 8, row: RowCost::Fixed(2) },
    ] {
        n_preempted += bench.every_way(drafting).await;
    }
    assert!(n_preempted > 0);
    bench.with_late_masks(DraftPolicy::Fixed(4)).await;
}

/// A draft model of its own kind: as large as the target, with the same weights, rounded to eight bits.
fn rounded() -> DraftModel {
    draft_model("fp8-block")
}

fn draft_model(name: &str) -> DraftModel {
    DraftModel { path: reference_folder(name), kv_bytes: 16 << 20, pass_permille: 10, is_alone: true }
}

#[tokio::test]
async fn a_draft_model_changes_no_bit() {
    let bench = Bench::new().await;
    let base = Setup { draft_model: Some(rounded()), ..bench.base.clone() };
    let (bench, mut n_preempted) = (Bench { base, ..bench }, 0);
    for drafting in [
        DraftPolicy::Fixed(1),
        DraftPolicy::Fixed(4),
        DraftPolicy::Fixed(8),
        DraftPolicy::Adaptive { max: 8, row: RowCost::Fixed(2) },
    ] {
        n_preempted += bench.every_way(drafting).await;
    }
    assert!(n_preempted > 0);
    // Blocks for a few of the sequences; the others have no guesses. Time decides which of them have a grammar.
    let few = DraftModel { kv_bytes: 64 << 10, ..rounded() };
    let few = Setup { draft_model: Some(few), ..bench.base.clone() };
    bench.same("few blocks", DraftPolicy::Fixed(4), few, &[]).await;
}

/// Layers of random weights guess badly, and a few of their guesses are accepted.
#[tokio::test]
async fn the_models_own_layer_changes_no_bit() {
    for name in ["qwen3.5-mtp", "glm4-moe-mtp"] {
        let bench = Bench::of(name).await;
        let mtp = Some(MtpDrafts { kv_bytes: 1 << 20, pass_permille: 10, is_alone: true });
        let base = Setup { mtp, ..bench.base.clone() };
        let chunked = Setup { chunk_tokens_max: 7, prefix_cache: true, ..base.clone() };
        let crowded = Setup { n_blocks: CROWDED_BLOCKS, prefix_cache: true, ..base.clone() };
        for (way, setup, breaks) in [
            ("tp 1", base.clone(), &[][..]),
            ("tp 2", base.on(2, 1), &[]),
            ("pp 2", base.on(1, 2), &[]),
            ("chunks of 7", chunked, &[]),
            ("preempted", crowded, &[]),
            ("lost ranks", base.on(1, 2), &[9, 25]),
        ] {
            bench.same(&format!("{name}, {way}"), DraftPolicy::Fixed(4), setup, breaks).await;
        }
    }
}

/// Requests without a grammar, one after another, so that counts are the same in every run.
async fn counts_of(model: &str, draft: DraftModel, n_drafts: u16) -> (Seen, Vec<usize>) {
    let model = reference_folder(model);
    let mut requests = tiny_requests(&model);
    requests.retain(|request| request.grammar.is_none() && request.goal == Goal::Generate);
    requests.truncate(24);
    let speculation = Speculation { drafting: DraftPolicy::Fixed(n_drafts), ..Speculation::default() };
    let base = Setup { steps_in_flight_max: 1, ..Setup::new(model, "int8", "f16").on(1, 1) };
    let mut replica = Replica::start(&Setup { speculation, draft_model: Some(draft), ..base }).await;
    let answers = replica.run_alone(&requests).await;
    let seen = replica.seen();
    replica.stop().await;
    assert!(requests.iter().any(|request| request.sampling.temperature > 0.5));
    assert!(requests.iter().any(|request| request.sampling.temperature == 0.0));
    println!("{seen:?}");
    (seen, answers.iter().map(|answer| answer.drawn.len()).collect())
}

/// The draft model draws like its target, with the noise of the same positions, at every temperature and with every
/// filter.
#[tokio::test]
async fn a_target_that_is_its_own_draft_accepts_every_draft() {
    let (seen, lengths) = counts_of(MODEL, draft_model(MODEL), 4).await;
    assert_eq!(seen.drafts_rejected, 0, "{seen:?}");
    let n_more: usize = lengths.iter().map(|n| n - 1).sum();
    // The prompt's step draws one token, and each later step five, except the last.
    let n_needed: usize = lengths.iter().map(|n| 1 + (n - 1).div_ceil(5)).sum();
    assert!(seen.drafts_accepted as usize * 10 > n_more * 7, "four of five: {seen:?}");
    // One more step ends a request, and one may be planned past its stop.
    let n_steps = seen.steps as usize;
    assert!((n_needed..=n_needed + 2 * lengths.len()).contains(&n_steps), "{n_needed} steps are needed: {seen:?}");
}

/// Mamba-2 in turn with attention and beside it, gated delta nets, and convolutions.
#[tokio::test]
async fn a_recurrent_target_that_is_its_own_draft_accepts_every_draft() {
    for name in ["bamba", "falcon-h1", "qwen3.5", "olmo-hybrid", "lfm2"] {
        let (seen, _) = counts_of(name, draft_model(name), 4).await;
        assert!(seen.drafts_rejected == 0 && seen.drafts_accepted > 100, "{name}: {seen:?}");
    }
}

/// A cache that is not rewound, or the noise of another position, changes no token. It only changes how many drafts are
/// accepted.
#[tokio::test]
async fn as_many_drafts_of_another_model_hold_as_always() {
    let (seen, _) = counts_of(MODEL, rounded(), 4).await;
    assert_eq!((seen.drafts_accepted, seen.drafts_rejected), (499, 360), "{seen:?}");
}

/// Guesses from the log itself, with the shortest n-grams, so that there are many; and tokens that a grammar forces.
#[tokio::test]
async fn what_a_log_repeats_is_guessed_and_has_the_same_bits() {
    let bench = Bench::new().await;
    let ngrams = NgramLimits { least: 1, most: 4 };
    for (tp, pp) in [(1, 1), (2, 1), (1, 2)] {
        let speculation = Speculation { drafting: DraftPolicy::Fixed(4), ngrams };
        let setup = Setup { speculation, ..bench.base.on(tp, pp) };
        let mut replica = Replica::start(&setup).await;
        let answers = replica.run(&bench.requests).await;
        let seen = replica.seen();
        replica.stop().await;
        println!("tp {tp}, pp {pp}: {seen:?}");
        bench.check_equal(&format!("tp {tp}, pp {pp}"), &answers);
        assert!(seen.drafts_accepted > 0 && seen.drafts_rejected > 20, "{seen:?}");
        assert!(seen.masked_drafts_accepted > 20, "the target accepts drafts of forced tokens: {seen:?}");
    }
}

/// A client's prediction without one token in the middle gives guesses on both sides of it.
#[tokio::test]
async fn what_a_client_expects_is_guessed_and_has_the_same_bits() {
    let bench = Bench::new().await;
    let expecting = |(request, answer): (&Request, &Answer)| {
        let mut predicted = answer.tokens();
        predicted.remove(predicted.len() / 2);
        Request { predicted, ..request.clone() }
    };
    let expecting: Vec<Request> = bench.requests.iter().zip(&bench.expected).map(expecting).collect();
    // N-grams so long that a log hardly gives guesses from itself.
    let ngrams = NgramLimits { least: 3, most: 4 };
    let base = Setup { speculation: Speculation { drafting: DraftPolicy::Fixed(4), ngrams }, ..bench.base.clone() };
    let run = async |way: &str, setup: &Setup, requests: &[Request], breaks: &[u32]| {
        let mut replica = Replica::start(setup).await;
        breaks.iter().for_each(|n| replica.break_at(*n));
        let answers = replica.run(requests).await;
        let seen = replica.seen();
        replica.stop().await;
        println!("{way}: {seen:?}");
        bench.check_equal(way, &answers);
        seen
    };
    let alone = run("nothing is expected", &base, &bench.requests, &[]).await.drafts_accepted;
    let chunked = Setup { chunk_tokens_max: 7, prefix_cache: true, ..base.clone() };
    let crowded = Setup { n_blocks: CROWDED_BLOCKS, prefix_cache: true, ..base.clone() };
    for (way, setup, breaks) in [
        ("tp 1", &base, &[][..]),
        ("tp 2", &base.on(2, 1), &[]),
        ("pp 2", &base.on(1, 2), &[]),
        ("chunks of 7", &chunked, &[]),
        ("preempted", &crowded, &[]),
        ("lost ranks", &base.on(1, 2), &[9, 25]),
    ] {
        let seen = run(way, setup, &expecting, breaks).await;
        assert!(seen.drafts_accepted > 2 * alone + 100, "{way}: {alone} without: {seen:?}");
        assert!(seen.drafts_rejected > 20, "{way}: {seen:?}");
    }
}

/// A client's second request finds the answer of its first. No request of another client or salt does, and none without
/// a key.
#[tokio::test]
async fn recent_answers_of_a_client_are_guessed_and_of_no_other() {
    let model = reference_folder(MODEL);
    let is_long = |request: &&Request| {
        let Sampling { temperature, tokens_max, .. } = request.sampling;
        request.grammar.is_none() && request.goal == Goal::Generate && temperature > 0.5 && tokens_max > 60
    };
    let request = tiny_requests(&model).iter().find(is_long).unwrap().clone();
    let speculation = Speculation { drafting: DraftPolicy::Fixed(4), ..Speculation::default() };
    let base = Setup { steps_in_flight_max: 1, ..Setup::new(model, "int8", "f16").on(1, 1) };
    let mut replica = Replica::start(&Setup { speculation, ..base }).await;
    let mut answers: Vec<Answer> = Vec::new();
    let mut n_accepted = Vec::new();
    for (tenant, salt) in [(0, 0), (1, 0), (1, 7), (2, 0), (0, 0), (1, 0)] {
        let (tenant, cache_salt) = (TenantId(tenant), CacheSalt([salt; 16]));
        answers.extend(replica.run_alone(&[Request { tenant, cache_salt, ..request.clone() }]).await);
        n_accepted.push(replica.seen().drafts_accepted);
    }
    replica.stop().await;
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    let (repeated, others) = n_accepted.split_last().unwrap();
    assert!(others.iter().all(|n| *n == others[0]), "{n_accepted:?}");
    assert!(*repeated as usize > others[0] as usize + answers[0].drawn.len() / 2, "{n_accepted:?}");
}

/// The field of a client's request: a predicted answer is the same, in fewer steps.
#[test]
fn a_prediction_of_a_client_s_is_guessed() {
    let config = r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 4}"#;
    let model = smollm2();
    let arguments = ["serve", model.to_str().unwrap(), "--speculative-config", config];
    let mut node = Node::start(&[&arguments[..], &DOORS].concat());
    let http = node.http();
    node.until_ready(&http);
    let complete_with = |prediction: &str| -> Value {
        let mut body = json!({"prompt": "one two three", "max_tokens": 24, "temperature": 0.0, "ignore_eos": true});
        body["prediction"] = json!({"type": "content", "content": prediction});
        serde_json::from_str(&post(&http, &body).body_mut().read_to_string().unwrap()).unwrap()
    };
    let accepted = |answer: &Value| answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].as_u64();
    let other = complete_with("nothing of this is said");
    let text = other["choices"][0]["text"].as_str().unwrap().to_owned();
    let predicted = complete_with(&text);
    assert_eq!(predicted["choices"], other["choices"]);
    let (few, many) = (accepted(&other).unwrap_or(0), accepted(&predicted).unwrap_or(0));
    assert!(many > few + 8, "{few} without and {many} with: {predicted}");
}
