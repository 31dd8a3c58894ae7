//! A whole tiny model on one device and one rank: the logits of every position, however they are computed. For tests on
//! the CPU, over the fake driver, and on a real device.

use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::cuda::{Cuda, CudaConfig};
use backend::{Batch, Device, PassSlice, PassStats};
use checkpoint::Checkpoint;
use collective::{CancelFlag, Ranks};
use model::{KvCache, LoadSource, Model, PackedMatrices, PassLimits};
use std::ops::Range;
use std::path::{Path, PathBuf};
use types::cache::blocks_for;
use types::{Activations, BlockId, CacheGroup, KvDtype, NumericsMode, Token, Want};

/// Checkpoints that cover every family and format at least once.
pub const NAMES: [&str; 24] = [
    "llama-f32-tied",
    "llama-bf16-odd",
    "mistral",
    "qwen3-yarn",
    "gemma2",
    "gemma3",
    "gpt2",
    "qwen3-moe",
    "gguf-k-llama3",
    "gguf-k-mixtral",
    "gguf-k-phi3",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block",
    "awq",
    "packed-8",
    "olmo2",
    "granite",
    "glm4",
    "glm4-moe",
    "ministral3",
    "cohere2",
    "gpt-neox",
    "gpt-oss",
];
const CONTEXT: u32 = 400;
const SEQUENCES: usize = 5;
/// Limit of the largest difference relative to the largest logit, and of all differences relative to all logits.
/// Weights are random, and some families have more products between two norms than others: their largest difference may
/// be twice as large.
const TOLERANCE: f32 = 2e-2;
/// The same limits for activations of eight bits, three of them fraction. In torch, with the inputs of all products of
/// `fp8-tensor` rounded like that, the two are 0.192 and 0.118.
const EIGHT_BITS: (f32, f32) = (0.25, 0.14);

/// The folder or file of a checkpoint below `models`.
fn model_path(models: &Path, name: &str) -> PathBuf {
    if name.starts_with("gguf-") { models.join(name).join("model.gguf") } else { models.join(name) }
}

pub struct Rig<D: Device> {
    device: D,
    collective: Ranks<D>,
    model: Model<D>,
    kv: KvCache<D>,
    groups: Vec<CacheGroup>,
    pub n_vocab: usize,
    /// Which range of blocks each sequence uses.
    places: [usize; SEQUENCES],
}

fn host() -> CpuConfig {
    CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false }
}

pub fn on_cpu(models: &Path, name: &str) -> Rig<Cpu> {
    Rig::new(models, name, Cpu::new(host()).unwrap(), KvDtype::F32)
}

pub fn on_cuda(models: &Path, name: &str, mode: NumericsMode, cache: Option<&Path>) -> Rig<Cuda> {
    on_cuda_with(models, name, mode, cache, true)
}

fn on_cuda_with(models: &Path, name: &str, mode: NumericsMode, cache: Option<&Path>, graphs: bool) -> Rig<Cuda> {
    let config = CudaConfig { ordinal: 0, cache: cache.map(Path::to_owned), mode, host: host(), graphs };
    Rig::new(models, name, Cuda::open(&config).unwrap(), KvDtype::Bf16)
}

impl<D: Device> Rig<D> {
    pub fn new(models: &Path, name: &str, device: D, kv_dtype: KvDtype) -> Rig<D> {
        Rig::with_packed(models, name, device, kv_dtype, None)
    }

    /// A model whose matrices may be packed already.
    pub fn with_packed(
        models: &Path,
        name: &str,
        device: D,
        kv_dtype: KvDtype,
        packed: Option<&PackedMatrices>,
    ) -> Rig<D> {
        let checkpoint = Checkpoint::open(&model_path(models, name)).unwrap();
        let spec = checkpoint.spec();
        let limits = PassLimits { rows_max: 512, outputs_max: 512, context: CONTEXT.min(spec.context) };
        let collective = Ranks::solo(spec.n_layers);
        let part = collective.part();
        let source = LoadSource { cancel: &CancelFlag::default(), packed };
        let model = Model::load_from(&checkpoint, &device, part, limits, source).unwrap();
        let groups = spec.cache_groups().groups().to_vec();
        let n_blocks = vec![SEQUENCES as u32 * blocks_for(CONTEXT); groups.len()];
        let specs = model::kv_specs(spec, part, device.class(), kv_dtype, &n_blocks);
        let kv = KvCache::new(&device, &specs).unwrap();
        let places = std::array::from_fn(|sequence| sequence);
        Rig { collective, model, kv, groups, n_vocab: spec.vocab as usize, places, device }
    }

    /// One pass over ranges of the sequences' logs: the logits of every row.
    pub fn pass(&mut self, logs: &[Vec<Token>], slices: &[(usize, Range<u32>)]) -> Vec<Vec<f32>> {
        let mut batch = Batch { tables: vec![Default::default(); self.groups.len()], ..Batch::default() };
        batch.clear();
        for (sequence, range) in slices {
            let first = batch.n_rows() as u32;
            batch.tokens.extend(&logs[*sequence][range.start as usize..range.end as usize]);
            batch.positions.extend(range.clone());
            batch.slices.push(PassSlice::new(first..first + range.len() as u32, range.start, Want::Nothing));
            // Scattered and in descending order: nothing may depend on a block's position.
            let block =
                |i: u32| BlockId((blocks_for(CONTEXT) - 1 - i) * SEQUENCES as u32 + self.places[*sequence] as u32);
            for (table, group) in batch.tables.iter_mut().zip(&self.groups) {
                let n_passed = group.n_passed(range.start);
                let entry = |i| if i < n_passed { BlockId::NONE } else { block(i) };
                table.blocks.extend((0..blocks_for(range.end)).map(entry));
                table.bounds.push(table.blocks.len() as u32);
            }
        }
        let n_rows = batch.n_rows();
        batch.outputs.extend(0..n_rows as u32);
        batch.pad(self.device.padded_rows(&batch.pass()));
        let logits =
            self.model.forward(&self.device, &mut self.collective, &batch.pass(), &mut self.kv).unwrap().unwrap();
        let mut rows = vec![0.0; n_rows * self.n_vocab];
        self.device.read(logits, 0..n_rows, &mut rows);
        self.device.take_failure().unwrap();
        rows.chunks_exact(self.n_vocab).map(<[f32]>::to_vec).collect()
    }

    /// The logits of every position of one log, computed in chunks.
    pub fn in_chunks(&mut self, log: &[Token], chunk: u32) -> Vec<Vec<f32>> {
        let (logs, n) = ([log.to_vec()], log.len() as u32);
        let starts = (0..n).step_by(chunk as usize);
        starts.flat_map(|start| self.pass(&logs, &[(0, start..n.min(start + chunk))])).collect()
    }
}

pub fn log(n: u32, seed: u32, n_vocab: usize) -> Vec<Token> {
    (0..n).map(|i| (i * i * 7 + i * 13 + seed * 31) % n_vocab as u32).collect()
}

pub fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect()
}

/// How far a model on CUDA is from the CPU, by rows of logits.
pub struct Distance {
    /// The largest difference of any row, relative to the largest logit.
    pub farthest: f32,
    /// The median over all rows: the norm of a row's differences, relative to that of its logits.
    pub typical: f32,
    /// Rows with a difference beyond the limit.
    pub n_far: usize,
    pub n_rows: usize,
    pub limits: (f32, f32),
}

impl Distance {
    /// One row in six may be far: tensor cores round sums in their own way, which can turn a near tie between experts.
    /// A wrong kernel moves every row.
    pub fn is_good(&self) -> bool {
        // A NaN is not below a limit.
        6 * self.n_far <= self.n_rows && self.typical <= self.limits.1
    }
}

pub fn distance(models: &Path, name: &str, mode: NumericsMode, n_tokens: u32, cache: Option<&Path>) -> Distance {
    let (mut cpu, mut cuda) = (on_cpu(models, name), on_cuda(models, name, mode, cache));
    let log = log(n_tokens, 1, cpu.n_vocab);
    let (expected, got) = (cpu.in_chunks(&log, 512), cuda.in_chunks(&log, 512));
    let farthest = if name.starts_with("llama") { TOLERANCE } else { 2.0 * TOLERANCE };
    // With one scale per row of weights, passes of many rows are rounded to eight bits: `fp8-block` only in
    // `down_proj`.
    let is_rounded = mode == NumericsMode::Fast && name.starts_with("fp8");
    let limits = if is_rounded { EIGHT_BITS } else { (farthest, TOLERANCE) };
    distance_of(&expected, &got, limits)
}

pub fn distance_of(expected: &[Vec<f32>], got: &[Vec<f32>], limits: (f32, f32)) -> Distance {
    let largest = |numbers: &[f32]| numbers.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let norm = |numbers: &[f32]| numbers.iter().map(|x| x * x).sum::<f32>().sqrt();
    let largest_logit = expected.iter().map(|row| largest(row)).fold(0.0, f32::max);
    let rows = expected.iter().zip(got).map(|(expected, got)| {
        let apart: Vec<f32> = expected.iter().zip(got).map(|(a, b)| a - b).collect();
        // `largest` passes over a NaN, the norm does not.
        let is_number = apart.iter().all(|x| !x.is_nan());
        let far = if is_number { largest(&apart) / largest_logit } else { f32::NAN };
        (far, norm(&apart) / norm(expected))
    });
    let (far, mut typical): (Vec<f32>, Vec<f32>) = rows.unzip();
    typical.sort_by(f32::total_cmp);
    Distance {
        farthest: far.iter().copied().max_by(f32::total_cmp).unwrap_or(f32::NAN),
        typical: typical.get(typical.len() / 2).copied().unwrap_or(f32::NAN),
        n_far: far.iter().filter(|far| far.is_nan() || **far > limits.0).count(),
        n_rows: far.len(),
        limits,
    }
}

/// The passes that a model is given: sequences of different lengths join and continue one by one, in batches of every
/// size; one is recomputed in other blocks while others continue; some pass the end of a tile. Returns each pass's
/// logits, and the counts of recorded and replayed passes.
fn course(rig: &mut Rig<Cuda>) -> (Vec<Vec<Vec<u32>>>, PassStats) {
    const FIRST: [u32; SEQUENCES] = [251, 17, 3, 40, 16];
    let logs: Vec<Vec<Token>> = (0..).zip(FIRST).map(|(seed, n)| log(n + 40, seed, rig.n_vocab)).collect();
    let (mut ends, mut logits) = (FIRST, Vec::new());
    let mut pass = |rig: &mut Rig<Cuda>, slices: &[(usize, Range<u32>)]| logits.push(bits(&rig.pass(&logs, slices)));
    let mut on = |rig: &mut Rig<Cuda>, which: &[usize], more: Option<(usize, Range<u32>)>| {
        let one = |sequence: &usize| (*sequence, ends[*sequence]..ends[*sequence] + 1);
        let slices: Vec<_> = which.iter().map(one).chain(more).collect();
        pass(rig, &slices);
        which.iter().for_each(|sequence| ends[*sequence] += 1);
    };
    for (sequence, n) in FIRST.iter().enumerate() {
        // Other sequences continue while one joins.
        on(rig, &(0..sequence).collect::<Vec<_>>(), Some((sequence, 0..*n)));
    }
    for n in [1, 2, 3, 4, 5, 5, 4, 3, 2, 1] {
        on(rig, &(0..n).collect::<Vec<_>>(), None);
    }
    // One sequence loses its blocks, and gets others' when it returns.
    rig.places.swap(1, 3);
    for (sequence, company) in [(1, &[0, 2][..]), (3, &[4, 2, 0])] {
        let n = FIRST[sequence] + [0, 12, 0, 10, 0][sequence];
        on(rig, company, Some((sequence, 0..n)));
    }
    // Also in another order.
    for company in [&[4, 2, 0][..], &[0, 4], &[2], &[0, 2, 4]] {
        on(rig, company, None);
    }
    (logits, rig.device.pass_counts())
}

/// Whether replaying passes as graphs changes no bit of a model's logits, and the counts of replays.
pub fn graphs_keep_bits(models: &Path, name: &str, mode: NumericsMode, cache: Option<&Path>) -> (bool, PassStats) {
    let (plain, none) = course(&mut on_cuda_with(models, name, mode, cache, false));
    let (repeated, repeats) = course(&mut on_cuda_with(models, name, mode, cache, true));
    let are_as_many = repeats.replayed + repeats.plain == none.plain && none.recorded + none.replayed == 0;
    (plain == repeated && are_as_many, repeats)
}

/// Whether chunks of any length and other sequences in the batch change no bit of a model's logits.
pub fn keeps_its_bits(models: &Path, name: &str, cache: Option<&Path>) -> bool {
    let mut rig = on_cuda(models, name, NumericsMode::Lockstep, cache);
    let logs: Vec<Vec<Token>> = (0..3).map(|seed| log([37, 21, 70][seed as usize], seed, rig.n_vocab)).collect();
    let alone: Vec<_> = logs.iter().map(|log| bits(&rig.in_chunks(log, 512))).collect();
    let in_chunks = [1, 5, 16].into_iter().all(|chunk| bits(&rig.in_chunks(&logs[0], chunk)) == alone[0]);
    let whole: Vec<_> = logs.iter().enumerate().map(|(i, log)| (i, 0..log.len() as u32)).collect();
    in_chunks && bits(&rig.pass(&logs, &whole)) == alone.concat()
}
