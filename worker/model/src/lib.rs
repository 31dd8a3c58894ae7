//! Models: layers, and one file per architecture family. Knows shapes, weights' names and the order of operations;
//! nothing of kernels, requests or how many ranks there are.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod layers;
mod llama;
mod rope;
mod weights;

pub use llama::Llama;

use backend::{Activations, Batch, Device, KvDtype, KvSpec};
use checkpoint::{Checkpoint, Family, ModelSpec};
use collective::Collective;
use types::{CacheGroup, DeviceClass, Numerics, PolicyDigest};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("tensor {tensor} is {shape:?}, {expected:?} was expected")]
    Shape { tensor: String, shape: [usize; 2], expected: [usize; 2] },
    #[error(transparent)]
    Unsupported(#[from] types::Unsupported),
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Backend(#[from] backend::Error),
    #[error(transparent)]
    Collective(#[from] collective::Error),
}

/// The largest step: what the scratch memory is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rows of one pass.
    pub rows_max: usize,
    /// Rows of one pass whose logits are wanted.
    pub outputs_max: usize,
    /// Positions of one sequence.
    pub context: u32,
}

/// A model of any family, loaded for a device.
pub enum Model<D: Device> {
    Llama(Llama<D>),
}

/// The paged KV of a model's layers, one entry per cache group.
pub struct KvCache<D: Device> {
    groups: Vec<D::Kv>,
}

impl<D: Device> Model<D> {
    pub fn load(checkpoint: &Checkpoint, device: &D, collective: &Collective, limits: Limits) -> Result<Model<D>> {
        match checkpoint.spec().family {
            Family::Llama => Llama::load(checkpoint, device, collective, limits).map(Model::Llama),
        }
    }

    /// One pass over the rows of `batch`. The logits of its outputs: `[batch.outputs.len(), n_vocab]`.
    pub fn forward(
        &mut self,
        device: &D,
        collective: &Collective,
        batch: &Batch,
        kv: &mut KvCache<D>,
    ) -> Result<&D::Buffer> {
        match self {
            Model::Llama(llama) => llama.forward(device, collective, batch, &mut kv.groups[0]),
        }
    }

    /// What the packed weights occupy.
    pub fn weight_bytes(&self, device: &D) -> usize {
        match self {
            Model::Llama(llama) => llama.weight_bytes(device),
        }
    }
}

impl<D: Device> KvCache<D> {
    pub fn new(device: &D, specs: &[KvSpec]) -> Result<KvCache<D>> {
        let groups = specs.iter().map(|spec| device.kv(*spec)).collect::<backend::Result<_>>()?;
        Ok(KvCache { groups })
    }
}

/// The cache groups of a model, as the scheduler sees them.
pub fn cache_groups(spec: &ModelSpec) -> Vec<CacheGroup> {
    match spec.family {
        Family::Llama => vec![CacheGroup::FULL],
    }
}

/// The KV of each cache group, for a pool of `n_blocks`.
pub fn kv_specs(spec: &ModelSpec, dtype: KvDtype, n_blocks: usize) -> Vec<KvSpec> {
    let full = KvSpec {
        n_layers: spec.n_layers as usize,
        n_blocks,
        n_kv_heads: spec.n_kv_heads as usize,
        head_dim: spec.head_dim as usize,
        dtype,
    };
    match spec.family {
        Family::Llama => vec![full],
    }
}

/// Everything that can change a bit of what this model answers.
pub fn policy(checkpoint: &Checkpoint, activations: Activations, kv_dtype: KvDtype) -> PolicyDigest {
    let numerics = Numerics {
        device_class: DeviceClass::Cpu,
        activations: match activations {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
        },
        kv_dtype: match kv_dtype {
            KvDtype::F16 => "f16",
            KvDtype::F32 => "f32",
        },
        weights: checkpoint.digest(),
        quantization: "none",
        adapter: None,
    };
    numerics.digest()
}
