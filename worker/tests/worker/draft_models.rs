//! A model with recurrent layers as its own draft model: every draft holds, at every temperature, and no bit changes.

use crate::common::{Alone, Plan, Player, assignment, requests};
use checkpoint::Checkpoint;
use types::Request;
use worker::{Assignment, DraftModelConfig, GuessConfig, GuessSource, ModelLoader};

/// One of each kind of recurrence: Mamba-2 in turn with attention and beside it, gated delta nets, and convolutions.
const MODELS: [&str; 8] =
    ["bamba", "falcon-h1", "granite4", "nemotron-h", "qwen3-next", "qwen3.5", "olmo-hybrid", "lfm2"];
const DRAFTS: u16 = 4;

/// Requests of the model's vocabulary, long enough to pass several blocks.
fn requests_of(assignment: &Assignment) -> Vec<Request> {
    let n_vocab = Checkpoint::open(&assignment.model_path).unwrap().spec().vocab;
    let mut requests = requests(9);
    for request in &mut requests {
        request.prompt.iter_mut().for_each(|token| *token %= n_vocab);
        request.sampling.tokens_max = 40;
    }
    requests
}

fn with_itself(assignment: &Assignment) -> Assignment {
    let path = assignment.model_path.clone();
    let draft_model = Some(DraftModelConfig { path, kv_bytes: 16 << 20, cost: None, learns_cost: false });
    let guesses = GuessConfig { source: GuessSource::Off, n_max: DRAFTS, draft_model, mtp: None };
    Assignment { guesses, ..assignment.clone() }
}

#[test]
fn a_recurrent_model_that_is_its_own_draft_accepts_every_draft() {
    for name in MODELS {
        let assignment = assignment(name);
        let requests = requests_of(&assignment);
        let (mut runner, _) = ModelLoader::new(1).build(&assignment).unwrap();
        let plain = Player::new(&mut Alone::new(&mut runner), &assignment).play(&requests, Plan::ALONE);
        let together = Plan { chunk: 30, together: 5, ..Plan::ALONE };
        let preempted = Plan { preempt_every: Some(5), ..together };
        for plan in [Plan::ALONE, together, preempted] {
            let assignment = with_itself(&assignment);
            let (mut runner, _) = ModelLoader::new(1).build(&assignment).unwrap();
            let mut alone = Alone::new(&mut runner);
            let played = Player::new(&mut alone, &assignment).with_drafts(DRAFTS).play(&requests, plan);
            assert!(played.outputs == plain.outputs, "{name}");
            assert_eq!(played.n_rejected, 0, "{name}");
            let n_outputs: usize = played.outputs.iter().map(Vec::len).sum();
            assert!(played.n_accepted * 10 > n_outputs * 6, "{name}: {} of {n_outputs}", played.n_accepted);
            assert_eq!(played.n_preempted > 0, plan.preempt_every.is_some());
        }
    }
}
