//! The layer that predicts one token further, against the proposals that torch computes by the published formulas.

use crate::reference::{cases, tokens};
use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::{Batch, BlockTables, Device, Memory, PassSlice};
use checkpoint::Checkpoint;
use collective::{CancelFlag, Ranks};
use model::{KvCache, Model, MtpHead, PassLimits};
use serde_json::Value;
use std::ops::Range;
use std::path::PathBuf;
use types::cache::blocks_for;
use types::{Activations, BlockId, KvDtype, Layout, Rank, RankPart, Token, Want};

const CONTEXT: u32 = 400;
const NAMES: [&str; 3] = ["qwen3.5-mtp", "qwen3.5-moe-mtp", "glm4-moe-mtp"];

fn folder(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../tests/reference", name].iter().collect()
}

/// A model and its layer, each with the blocks of one sequence.
struct MtpRig {
    device: Cpu,
    ranks: Ranks<Cpu>,
    model: Model<Cpu>,
    kv: KvCache<Cpu>,
    n_groups: usize,
    head: MtpHead<Cpu>,
    head_kv: KvCache<Cpu>,
    n_vocab: usize,
}

impl MtpRig {
    /// The layer shares the model's tables if `shares` is true.
    fn new(name: &str, activations: Activations, shares: bool) -> MtpRig {
        let device = Cpu::new(CpuConfig { threads: 1, activations, isa: Isa::detect(), spin: false }).unwrap();
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        let spec = checkpoint.spec();
        let limits = PassLimits { rows_max: 512, outputs_max: 512, context: CONTEXT };
        let ranks = Ranks::solo(spec.n_layers);
        let model = Model::load(&checkpoint, &device, ranks.part(), limits).unwrap();
        let n_groups = spec.cache_groups().groups().len();
        let kv = cache(&device, spec, ranks.part());
        let of_model = shares.then_some(&model);
        let head = MtpHead::load(&checkpoint, &device, limits, of_model, &CancelFlag::default()).unwrap();
        let head_kv = cache(&device, head.spec(), &Layout::solo(1).part(Rank(0)));
        MtpRig { ranks, model, kv, n_groups, head, head_kv, n_vocab: spec.vocab as usize, device }
    }

    /// Computes a prompt, and the layer's rows of it in chunks: the proposals behind the drawn token, and their logits.
    fn propose(&mut self, prompt: &[Token], drawn: Token, n: usize, chunk: usize) -> (Vec<Token>, Vec<Vec<f32>>) {
        let batch = batch(prompt, 0..prompt.len() as u32, self.n_groups, true);
        self.model.forward(&self.device, &mut self.ranks, &batch.pass(), &mut self.kv).unwrap();
        let ahead = [&prompt[1..], &[drawn]].concat();
        for start in (0..ahead.len()).step_by(chunk) {
            let end = ahead.len().min(start + chunk);
            let rows: Vec<u32> = (start as u32..end as u32).collect();
            self.head.set_hidden(&self.device, self.model.hidden().unwrap(), &rows);
            let last = self.run_head(&ahead[start..end], start as u32, end == ahead.len());
            if let Some(last) = last {
                return self.continue_from(last, rows.len() as u32 - 1, end as u32, n);
            }
        }
        unreachable!("the last chunk has logits")
    }

    /// Proposes one token after another from the layer's own hidden states.
    fn continue_from(&mut self, last: Vec<f32>, row: u32, position: u32, n: usize) -> (Vec<Token>, Vec<Vec<f32>>) {
        let (mut proposals, mut logits) = (vec![best(&last)], vec![last]);
        let mut row = row;
        for position in position..position + n as u32 - 1 {
            self.head.set_own_hidden(&self.device, &[row]);
            logits.extend(self.run_head(&[proposals[proposals.len() - 1]], position, true));
            proposals.push(best(&logits[logits.len() - 1]));
            row = 0;
        }
        (proposals, logits)
    }

    fn run_head(&mut self, tokens: &[Token], start: u32, has_output: bool) -> Option<Vec<f32>> {
        let batch = batch(tokens, start..start + tokens.len() as u32, 1, has_output);
        let logits = self.head.forward(&self.device, &batch.pass(), &mut self.head_kv).unwrap()?;
        let mut row = vec![0.0; self.n_vocab];
        self.device.read(logits, 0..1, &mut row);
        self.device.take_failure().unwrap();
        Some(row)
    }
}

fn cache(device: &Cpu, spec: &checkpoint::ModelSpec, part: &RankPart) -> KvCache<Cpu> {
    let n_blocks = vec![blocks_for(CONTEXT); spec.cache_groups().groups().len()];
    KvCache::new(device, &model::kv_specs(spec, part, device.class(), KvDtype::F32, &n_blocks)).unwrap()
}

fn batch(tokens: &[Token], positions: Range<u32>, n_groups: usize, has_output: bool) -> Batch {
    let n = tokens.len() as u32;
    let blocks: Vec<BlockId> = (0..blocks_for(positions.end)).map(BlockId).collect();
    let bounds = vec![0, blocks.len() as u32];
    Batch {
        tokens: tokens.to_vec(),
        slices: vec![PassSlice::new(0..n, positions.start, Want::Nothing)],
        positions: positions.collect(),
        tables: vec![BlockTables { blocks, bounds }; n_groups],
        outputs: if has_output { vec![n - 1] } else { Vec::new() },
        ..Batch::default()
    }
}

fn best(row: &[f32]) -> Token {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter().position(|logit| *logit == largest).unwrap() as Token
}

#[test]
fn proposals_and_their_logits_are_those_of_torch() {
    for (name, shares) in NAMES.into_iter().flat_map(|name| [(name, true), (name, false)]) {
        let mut rig = MtpRig::new(name, Activations::F32, shares);
        let mut furthest = 0.0f64;
        for case in cases(name) {
            let (prompt, drawn) = (tokens(&case["prompt"]), case["drawn"].as_u64().unwrap() as Token);
            let expected = tokens(&case["proposals"]);
            let (proposals, logits) = rig.propose(&prompt, drawn, expected.len(), 512);
            assert_eq!(proposals, expected, "{name}, {}", case["name"]);
            for (row, expected) in logits.iter().zip(case["logits"].as_array().unwrap()) {
                furthest = furthest.max(distance(row, expected.as_array().unwrap()));
            }
        }
        println!("{name}: at most {furthest:.1e} of the largest logit");
        assert!(furthest <= 1e-4, "{name}: {furthest}");
    }
}

/// The largest difference, relative to the largest logit.
fn distance(row: &[f32], expected: &[Value]) -> f64 {
    assert_eq!(row.len(), expected.len());
    let expected = || expected.iter().map(|x| x.as_f64().unwrap());
    let largest = expected().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    row.iter().zip(expected()).map(|(x, y)| (f64::from(*x) - y).abs()).fold(0.0, f64::max) / largest
}

#[test]
fn chunks_of_the_prompt_give_the_same_bits() {
    for name in NAMES {
        let mut rig = MtpRig::new(name, Activations::Int8, true);
        let case = &cases(name)[1];
        let (prompt, drawn) = (tokens(&case["prompt"]), case["drawn"].as_u64().unwrap() as Token);
        let (proposals, logits) = rig.propose(&prompt, drawn, 4, 512);
        for chunk in [1, 7, 16] {
            let again = rig.propose(&prompt, drawn, 4, chunk);
            assert_eq!(again.0, proposals, "{name} in chunks of {chunk}");
            assert!(crate::whole::bits(&again.1) == crate::whole::bits(&logits), "{name} in chunks of {chunk}");
        }
    }
}

/// A checkpoint has the same fingerprint with and without the layer, because no token depends on it.
#[test]
fn the_layer_is_no_part_of_the_models_identity() {
    for name in NAMES {
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        assert!(checkpoint.mtp().is_some(), "{name}");
        let is_of_layer = |name: &String| name.starts_with("mtp.") || name.starts_with("model.layers.2.");
        let unread = checkpoint.unread_tensors();
        assert!(!unread.is_empty() && unread.iter().all(is_of_layer), "{name}: {unread:?}");
    }
    assert!(Checkpoint::open(&folder("qwen3.5")).unwrap().mtp().is_none());
}
