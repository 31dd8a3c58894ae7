//! The guesses of the layer that predicts one token further are those that torch computes, however a prompt is cut.

use super::*;
use crate::assignment::Assignment;
use crate::load::weight_cache::WeightCache;
use crate::runner::guesses::{GuessConfig, MtpConfig};
use crate::runner::model_part::{Kept, load_part};
use backend::cpu::{Cpu, CpuConfig, Isa};
use checkpoint::Checkpoint;
use collective::CancelFlag;
use serde_json::Value;
use std::path::{Path, PathBuf};
use types::{Activations, BlockId, KvDtype, Layout, Rank, Request, RequestId, Sampling, Slice, Want};

fn folder(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../tests/reference", name].iter().collect()
}

fn runner(model_path: &Path) -> ModelRunner<Cpu> {
    let spec = Checkpoint::open(model_path).unwrap().spec().clone();
    let layout = Layout::solo(spec.n_layers);
    let part = layout.part(Rank(0));
    let mtp = Some(MtpConfig { kv_bytes: 1 << 20, cost: None, learns_cost: false });
    let assignment = Assignment {
        activations: Activations::F32,
        kv_dtype: KvDtype::F32,
        n_blocks: vec![64; spec.cache_groups().groups().len()],
        kv_bytes: 64 << 20,
        guesses: GuessConfig { n_max: 4, mtp, ..GuessConfig::default() },
        ..Assignment::solo(model_path.to_owned(), spec.n_layers)
    };
    let config = CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false };
    let open = || Ok(Cpu::new(config).unwrap());
    let weight_cache = WeightCache::default();
    let kept = Kept { weight_cache: &weight_cache, scrubber: None, packed_cache: None, kv_tiers: None };
    let (loaded, _) = load_part(open, kept, &assignment, &part, &CancelFlag::default()).unwrap();
    ModelRunner::new(loaded, Ranks::solo(spec.n_layers), MaskConfig::default())
}

fn tokens(value: &Value) -> Vec<Token> {
    value.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as Token).collect()
}

/// Runs a prompt in chunks. Returns the drawn token and the guesses behind it.
fn guesses(runner: &mut ModelRunner<Cpu>, prompt: &[Token], chunk: usize) -> (Token, Vec<Token>) {
    let (id, n) = (RequestId(7), prompt.len() as u32);
    let mut done = StepDone::default();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let request = Request { id, prompt: prompt.to_vec(), sampling, ..Request::default() };
    let mut starts = vec![request];
    let mut n_blocks = 0;
    for start in (0..n).step_by(chunk) {
        let end = n.min(start + chunk as u32);
        let slices = vec![Slice::new(id, start..end, if end == n { Want::Last } else { Want::Nothing })];
        let n_needed = types::cache::blocks_for(end);
        let blocks = (n_blocks..n_needed).map(BlockId).collect();
        n_blocks = n_needed;
        let step = Step { starts: std::mem::take(&mut starts), slices, blocks, ..Step::default() };
        runner.run(&step, &mut done).unwrap();
    }
    let guessed = runner.mtp.as_ref().unwrap().guesses().next().unwrap().1.to_vec();
    assert_eq!(usize::from(done.slices[0].n_guess), guessed.len());
    let drawn = done.slices[0].tokens[0].token;
    runner.run(&Step { ends: vec![id], ..Step::default() }, &mut StepDone::default()).unwrap();
    (drawn, guessed)
}

#[test]
fn guesses_are_the_proposals_of_torch() {
    // The blocks of a model with one cache group are simple to give.
    let folder = folder("glm4-moe-mtp");
    let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let mut runner = runner(&folder);
    for case in expected["cases"].as_array().unwrap() {
        let proposed = (case["drawn"].as_u64().unwrap() as Token, tokens(&case["proposals"]));
        for chunk in [512, 7, 1] {
            let got = guesses(&mut runner, &tokens(&case["prompt"]), chunk);
            assert_eq!(got, proposed, "{} in chunks of {chunk}", case["name"]);
        }
    }
}
