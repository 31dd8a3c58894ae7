//! Tests the contents of freed pages.

use super::*;
use crate::assignment::Assignment;
use crate::load::weight_cache::WeightCache;
use crate::runner::model_part::{Kept, load_part};
use backend::KvPages;
use backend::cpu::{Cpu, CpuConfig, Isa};
use checkpoint::Checkpoint;
use collective::CancelFlag;
use std::path::PathBuf;
use types::{Activations, BlockId, Layout, Rank, Request, RequestId, Slice, Want};

const N_BLOCKS: u32 = 8;

fn runner(zero_kv: bool) -> ModelRunner<Cpu> {
    let model_path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../tests/reference/llama-f16-sharded"].iter().collect();
    let layout = Layout::solo(Checkpoint::open(&model_path).unwrap().spec().n_layers);
    let (n_layers, part) = (layout.n_layers(), layout.part(Rank(0)));
    let assignment = Assignment {
        n_blocks: vec![N_BLOCKS],
        kv_bytes: 64 << 20,
        context: 100,
        batch_tokens_max: 100,
        zero_kv,
        ..Assignment::solo(model_path, n_layers)
    };
    let config = CpuConfig { threads: 1, activations: Activations::Int8, isa: Isa::detect(), spin: true };
    let open = || Ok(Cpu::new(config).unwrap());
    let weight_cache = WeightCache::default();
    let kept = Kept { weight_cache: &weight_cache, scrubber: None, packed_cache: None, kv_tiers: None };
    let (loaded, _) = load_part(open, kept, &assignment, &part, &CancelFlag::default()).unwrap();
    ModelRunner::new(ModelPart { kv_commit: None, ..loaded }, Ranks::solo(n_layers), MaskConfig::default())
}

/// Returns the contents of each block, over all layers.
fn pages(runner: &ModelRunner<Cpu>) -> Vec<Vec<u8>> {
    let (held, kv) = (runner.lent.get(), &runner.kv.groups()[0]);
    let block =
        |block| (0..held.spec.n_layers as usize).flat_map(move |layer| held.device.read_block(kv, layer, block));
    (0..N_BLOCKS).map(|i| block(BlockId(i)).collect()).collect()
}

/// Returns the blocks that are not zero.
fn written(runner: &ModelRunner<Cpu>) -> Vec<usize> {
    let pages = pages(runner);
    (0..pages.len()).filter(|block| pages[*block].iter().any(|byte| *byte != 0)).collect()
}

fn request(id: u64, n_prompt: u32) -> Request {
    Request { id: RequestId(id), prompt: (0..n_prompt).map(|i| i * 7 + id as u32).collect(), ..Request::default() }
}

fn run(runner: &mut ModelRunner<Cpu>, starts: &[Request], slices: &[(u64, u32)], blocks: &[u32], ends: &[u64]) {
    let slice = |&(id, end)| Slice::new(RequestId(id), 0..end, Want::Nothing);
    let step = Step {
        starts: starts.to_vec(),
        slices: slices.iter().map(slice).collect(),
        blocks: blocks.iter().copied().map(BlockId).collect(),
        ends: ends.iter().copied().map(RequestId).collect(),
        ..Step::default()
    };
    runner.run(&step, &mut StepDone::default()).unwrap();
}

fn two_at_work(zero_kv: bool) -> ModelRunner<Cpu> {
    let mut runner = runner(zero_kv);
    run(&mut runner, &[request(1, 41), request(2, 21)], &[(1, 40), (2, 20)], &[5, 2, 7, 0, 1], &[]);
    assert_eq!(written(&runner), [0, 1, 2, 5, 7]);
    runner
}

#[test]
fn ended_sequence_leaves_zeros_and_spares_neighbours() {
    let mut runner = two_at_work(true);
    let before = pages(&runner);
    // A step that computes nothing.
    run(&mut runner, &[], &[], &[], &[1]);
    assert_eq!(written(&runner), [0, 1]);
    assert!(pages(&runner)[..2] == before[..2]);
    run(&mut runner, &[], &[], &[], &[2]);
    assert!(written(&runner).is_empty());
}

#[test]
fn preempted_sequence_leaves_zeros_in_its_blocks() {
    let mut runner = two_at_work(true);
    // One of the first sequence's blocks goes to the third sequence, in the step that reports the preemption.
    run(&mut runner, &[request(3, 6)], &[(3, 5)], &[2], &[1]);
    assert_eq!(written(&runner), [0, 1, 2]);
    let mut fresh = self::runner(true);
    run(&mut fresh, &[request(3, 6)], &[(3, 5)], &[2], &[]);
    assert!(pages(&runner)[2] == pages(&fresh)[2], "the state of the earlier sequence is cleared");
    // The second sequence restarts in the step that would have ended it, in other blocks and from its first position.
    run(&mut runner, &[request(2, 21)], &[(2, 10)], &[6], &[]);
    assert_eq!(written(&runner), [2, 6]);
}

#[test]
fn a_rank_that_leaves_its_place_leaves_zeros() {
    let mut runner = two_at_work(true);
    runner.forget_all();
    assert!(written(&runner).is_empty() && runner.sequences.is_empty());
}

#[test]
fn nothing_is_cleared_without_zero_kv() {
    let mut runner = two_at_work(false);
    let before = pages(&runner);
    run(&mut runner, &[], &[], &[], &[1, 2]);
    runner.forget_all();
    assert!(pages(&runner) == before);
}
