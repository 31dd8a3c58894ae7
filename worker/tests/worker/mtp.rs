//! Guesses by the model's own layer that predicts one token further: they change no token, on any grid and after any
//! preemption.

use crate::common::grid::Threads;
use crate::common::{Alone, Plan, Player, assignment, requests};
use types::{Grid, Layout, Request};
use worker::{Assignment, CancelFlag, GuessConfig, GuessSource, Load, LoadError, ModelLoader, MtpConfig};

const CONFIG: MtpConfig = MtpConfig { kv_bytes: 1 << 20, cost: None, learns_cost: false };

fn loader() -> ModelLoader {
    ModelLoader { spin: false, ..ModelLoader::new(1) }
}

fn guessing(name: &str, mtp: MtpConfig) -> Assignment {
    let guesses = GuessConfig { source: GuessSource::Off, n_max: 4, draft_model: None, mtp: Some(mtp) };
    Assignment { guesses, ..assignment(name) }
}

fn requests_within(n_vocab: u32) -> Vec<Request> {
    let mut requests = requests(10);
    requests.iter_mut().flat_map(|request| &mut request.prompt).for_each(|token| *token %= n_vocab);
    requests
}

#[test]
fn guesses_of_the_layer_give_the_tokens_of_none_on_every_grid() {
    let requests = requests_within(264);
    for name in ["qwen3.5-mtp", "qwen3.5-moe-mtp", "glm4-moe-mtp"] {
        let (mut runner, _) = loader().build(&assignment(name)).unwrap();
        let plain = assignment(name);
        let expected = Player::new(&mut Alone::new(&mut runner), &plain).play(&requests, Plan::ALONE);
        // With the smallest cache only some sequences have room.
        let none = MtpConfig { kv_bytes: 0, ..CONFIG };
        for (tp, pp, chunk, config) in [(1, 1, 60, CONFIG), (1, 1, 7, none), (2, 1, 7, CONFIG), (2, 2, 60, CONFIG)] {
            let assignment = guessing(name, config);
            let layout = Layout::even(Grid { tp, pp }, 2).unwrap();
            let mut grid = Threads::start(&loader(), &assignment, &layout);
            let turns = pp.into();
            let plan = Plan { chunk, together: 5, preempt_every: Some(4), turns, in_flight: usize::from(pp) + 1 };
            let played = Player::new(&mut grid, &assignment).with_drafts(4).play(&requests, plan);
            grid.end();
            let what = format!("{name}: tp {tp}, pp {pp}, chunks of {chunk}, {config:?}");
            assert!(played.outputs == expected.outputs, "{what}");
            let n_drafts = played.n_accepted + played.n_rejected;
            assert!(n_drafts > if config == CONFIG { 60 } else { 0 }, "{what}: {n_drafts} drafts");
        }
    }
}

#[test]
fn a_model_without_the_layer_is_refused() {
    let refused = |assignment| loader().load(&assignment, &CancelFlag::default()).err().unwrap();
    let error = refused(guessing("qwen3.5", CONFIG));
    assert!(matches!(error, LoadError::Model { .. }), "{error}");
}
