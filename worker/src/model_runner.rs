//! The runner with a model: a step goes through the sequences, one pass and the draws. Knows nothing of streams, and of
//! the model only that it turns a batch into logits.

use crate::runner::{Assignment, Load, LoadError, Ready, RunError, Runner};
use crate::sequences::{SequenceLimits, Sequences, Violation};
use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::{Activations, Batch, Device, Draw, KvDtype, KvSpec};
use checkpoint::Checkpoint;
use collective::Collective;
use model::{KvCache, Limits, Model};
use std::time::Instant;
use types::{Step, StepDone, TokenOut, Unsupported};

pub struct ModelRunner<D: Device> {
    device: D,
    collective: Collective,
    model: Model<D>,
    kv: KvCache<D>,
    sequences: Sequences,
    // What a step needs, kept for its memory.
    batch: Batch,
    draws: Vec<Draw<'static>>,
    drawn: Vec<Option<TokenOut>>,
}

impl<D: Device> ModelRunner<D> {
    pub fn new(
        device: D,
        collective: Collective,
        model: Model<D>,
        kv: KvCache<D>,
        limits: SequenceLimits,
    ) -> ModelRunner<D> {
        let outputs_max = limits.outputs_max();
        let sequences = Sequences::new(limits);
        let batch = sequences.new_batch();
        let (draws, drawn) = (Vec::with_capacity(outputs_max), Vec::with_capacity(outputs_max));
        ModelRunner { device, collective, model, kv, sequences, batch, draws, drawn }
    }

    fn pass(&mut self, step: &Step) -> model::Result<()> {
        let logits = self.model.forward(&self.device, &self.collective, &self.batch, &mut self.kv)?;
        let mut draws = emptied(std::mem::take(&mut self.draws));
        self.sequences.draws(step, &mut draws);
        self.device.draw(logits, &draws, &mut self.drawn);
        self.draws = emptied(draws);
        Ok(())
    }
}

impl<D: Device> Runner for ModelRunner<D> {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        let begun = Instant::now();
        step.supported()?;
        let protocol = |violation: Violation| RunError::Protocol { step: step.id.0, what: violation.to_string() };
        self.sequences.begin(step, &mut self.batch).map_err(protocol)?;
        self.drawn.clear();
        if self.batch.n_rows() > 0 {
            self.pass(step).map_err(|error| RunError::Pass(error.into()))?;
        }
        self.sequences.finish(step, &mut self.drawn, &mut done.slices);
        done.micros = u32::try_from(begun.elapsed().as_micros()).unwrap_or(u32::MAX);
        Ok(())
    }
}

/// The same memory for draws that borrow from elsewhere: collecting in place keeps the allocation.
fn emptied<'a>(mut draws: Vec<Draw<'_>>) -> Vec<Draw<'a>> {
    draws.clear();
    draws.into_iter().map(|_| unreachable!("it is empty")).collect()
}

/// Loads models for this machine's CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLoader {
    /// Threads that compute, the caller's among them.
    pub threads: usize,
    pub isa: Isa,
}

impl ModelLoader {
    /// With the widest instructions that this machine has.
    pub fn new(threads: usize) -> ModelLoader {
        ModelLoader { threads, isa: Isa::detect() }
    }

    /// What `load` does, with the runner's own type.
    pub fn build(&self, assignment: &Assignment) -> Result<(ModelRunner<Cpu>, Ready), LoadError> {
        let collective = Collective::join(assignment.layout.grid(), assignment.rank).map_err(failed(assignment))?;
        let (activations, kv_dtype) = (activations(&assignment.activations)?, kv_dtype(&assignment.kv_dtype)?);
        let checkpoint = Checkpoint::open(&assignment.model_path).map_err(failed(assignment))?;
        let spec = checkpoint.spec();
        if assignment.context > spec.context {
            return Err(Unsupported("a context longer than the model's").into());
        }
        let block_bytes = kv_bytes(&model::kv_specs(spec, kv_dtype, 1));
        let n_blocks = u32::try_from(assignment.kv_bytes / block_bytes).unwrap_or(u32::MAX);
        if n_blocks == 0 {
            let available = assignment.kv_bytes;
            return Err(LoadError::Memory { what: "one block of the KV cache", needed: block_bytes, available });
        }
        let limits = SequenceLimits {
            n_vocab: spec.vocab,
            context: assignment.context,
            n_blocks,
            groups: model::cache_groups(spec),
            rows_max: assignment.batch_tokens_max as usize,
            running_max: assignment.running_max as usize,
        };
        let cpu = CpuConfig { threads: self.threads, activations, isa: self.isa };
        let device = Cpu::new(cpu).map_err(failed(assignment))?;
        let (rows_max, outputs_max) = (limits.rows_max, limits.outputs_max());
        let limits_of_model = Limits { rows_max, outputs_max, context: assignment.context };
        let model = Model::load(&checkpoint, &device, &collective, limits_of_model).map_err(failed(assignment))?;
        let kv =
            KvCache::new(&device, &model::kv_specs(spec, kv_dtype, n_blocks as usize)).map_err(failed(assignment))?;
        let policy = model::policy(&checkpoint, activations, kv_dtype);
        let ready = Ready { policy, n_blocks, weight_bytes: model.weight_bytes(&device) as u64 };
        Ok((ModelRunner::new(device, collective, model, kv, limits), ready))
    }
}

impl Load for ModelLoader {
    fn load(&mut self, assignment: &Assignment) -> Result<(Box<dyn Runner>, Ready), LoadError> {
        let (runner, ready) = self.build(assignment)?;
        Ok((Box::new(runner), ready))
    }
}

fn activations(name: &str) -> Result<Activations, Unsupported> {
    match name {
        "int8" => Ok(Activations::Int8),
        "f32" => Ok(Activations::F32),
        _ => Err(Unsupported("activations other than int8 and f32")),
    }
}

fn kv_dtype(name: &str) -> Result<KvDtype, Unsupported> {
    match name {
        "f16" => Ok(KvDtype::F16),
        "f32" => Ok(KvDtype::F32),
        _ => Err(Unsupported("a KV cache other than f16 and f32")),
    }
}

fn kv_bytes(specs: &[KvSpec]) -> u64 {
    specs.iter().map(|spec| (spec.n_blocks * spec.block_bytes()) as u64).sum()
}

fn failed<E: std::error::Error + Send + Sync + 'static>(assignment: &Assignment) -> impl FnOnce(E) -> LoadError + '_ {
    |source| LoadError::Model { path: assignment.model_path.clone(), source: source.into() }
}
