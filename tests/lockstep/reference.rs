//! Compares the default model with the results of transformers in f32 from its dequantized weights: tokenizer, chat
//! template and greedy tokens, through coordinator and worker. `worker/model/tests` compares the tiny checkpoints'
//! logits.

use crate::common;
use crate::common::{Answer, Replica, Setup, smollm2};
use checkpoint::{Checkpoint, Conversation};
use serde::Deserialize;
use serde_json::json;
use types::{Finish, Request, Sampling, Token, Tokens};

/// Logits this close to each other may change places.
const NEAR: f32 = 1e-2;
const CASES: usize = 20;
const STEPS: usize = 64;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

/// `tests/reference/README.md` describes each field.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: Tokens,
    greedy: Tokens,
    top: Vec<[(Token, f32); 2]>,
    text: Option<String>,
    #[serde(default)]
    messages: Vec<ReferenceMessage>,
    rendered: Option<String>,
}

#[derive(Deserialize)]
struct ReferenceMessage {
    role: String,
    content: String,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(common::reference_folder("smollm2.json")).unwrap();
    let reference: Reference = serde_json::from_str(&text).unwrap();
    assert_eq!(reference.cases.len(), CASES);
    reference.cases
}

#[test]
fn prompts_are_those_of_transformers() {
    let checkpoint = Checkpoint::open(&smollm2()).unwrap();
    let (tokenizer, template) = (checkpoint.tokenizer().unwrap(), checkpoint.chat_template().unwrap().unwrap());
    let (mut n_texts, mut n_chats) = (0, 0);
    for case in cases() {
        let text = case.text.unwrap_or_else(|| {
            let message = |original: &ReferenceMessage| json!({ "role": original.role, "content": original.content });
            let chat = Conversation::new(case.messages.iter().map(message).collect());
            let rendered = template.render(&chat, 0).unwrap();
            assert_eq!(Some(&rendered), case.rendered.as_ref(), "case {}", case.name);
            n_chats += 1;
            rendered
        });
        n_texts += 1;
        assert_eq!(tokenizer.encode(&text, false).unwrap(), case.prompt, "case {}", case.name);
    }
    println!("{n_texts} prompts have the reference's tokens, {n_chats} of them through the chat template");
    assert!(n_chats > 0 && n_chats < n_texts);
}

/// The result of the comparison so far.
#[derive(Default)]
struct Tally {
    n_equal: usize,
    n_excused: usize,
    /// The worst difference between our gap of the two best logits and the reference's, where both have the same two.
    worst: f32,
}

#[tokio::test]
async fn greedy_tokens_are_those_of_transformers() {
    let cases = cases();
    let setup =
        Setup { n_blocks: 400, batch_tokens_max: 512, chunk_tokens_max: 512, ..Setup::new(smollm2(), "f32", "f32") };
    let mut replica = Replica::start(&setup).await;
    // The present step of each case. All run together; after an excused step a case continues from the reference's
    // token.
    let mut open: Vec<(&Case, usize)> = cases.iter().map(|case| (case, 0)).collect();
    let (mut tally, mut rounds) = (Tally::default(), 0);
    while !open.is_empty() {
        rounds += 1;
        let requests: Vec<_> = open.iter().map(|(case, n)| request(case, *n)).collect();
        let answers = replica.run(&requests).await;
        open = open.iter().zip(&answers).filter_map(|((case, n), answer)| tally.follow(case, *n, answer)).collect();
    }
    let seen = replica.seen();
    replica.stop().await;
    println!(
        "{} of {} greedy tokens equal, {} near-ties excused, {rounds} rounds; top-2 gaps off by {:e}; {} at once",
        tally.n_equal,
        CASES * STEPS,
        tally.n_excused,
        tally.worst,
        seen.drawing_max,
    );
    assert_eq!(tally.n_equal + tally.n_excused, CASES * STEPS);
    assert_eq!(seen.drawing_max, CASES, "all ran together");
}

/// A request for the case from step `n` on, with the reference's tokens before it.
fn request(case: &Case, n: usize) -> Request {
    let sampling = Sampling { tokens_max: STEPS as u32, logprobs: Some(2), ..Sampling::default() };
    Request { prompt: case.prompt.clone(), output: case.greedy[..n].to_vec(), sampling, ..Request::default() }
}

impl Tally {
    /// The step at which the case continues, if it has not ended.
    fn follow<'a>(&mut self, case: &'a Case, n: usize, answer: &Answer) -> Option<(&'a Case, usize)> {
        assert_eq!((answer.finish, n + answer.drawn.len()), (Some(Finish::Length), STEPS), "case {}", case.name);
        for (step, drawn) in (n..).zip(&answer.drawn) {
            let [first, second]: [(Token, u32); 2] = drawn.top[..].try_into().unwrap();
            let gap = f32::from_bits(first.1) - f32::from_bits(second.1);
            assert_eq!(drawn.token, first.0, "greedy is the most likely");
            if drawn.token != case.greedy[step] {
                excuse(case, step, [first.0, second.0], gap);
                self.n_excused += 1;
                return (step + 1 < STEPS).then_some((case, step + 1));
            }
            self.n_equal += 1;
            let [best, next] = case.top[step];
            if (first.0, second.0) == (best.0, next.0) {
                self.worst = self.worst.max((gap - (best.1 - next.1)).abs());
            }
        }
        None
    }
}

/// Panics unless the same two tokens are in reversed order, and close to each other on both sides.
fn excuse(case: &Case, step: usize, ours: [Token; 2], gap: f32) {
    let [(best, best_logit), (next, next_logit)] = case.top[step];
    let [first, second] = ours;
    let what = format!(
        "case {} step {step}: ours {first} before {second} by {gap:e}, \
         the reference's {best} ({best_logit}) before {next} ({next_logit})",
        case.name,
    );
    assert!(ours == [next, best] && gap <= NEAR && best_logit - next_logit <= NEAR, "no near-tie: {what}");
    println!("excused: {what}");
}
