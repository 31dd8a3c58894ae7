//! Models: layers, and the decoder made of them, in the form that a model's family has. Knows shapes, weights' names
//! and the order of operations; nothing of families, kernels, requests or the number of ranks.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod attention;
mod convolution;
mod ctx;
mod decoder;
mod distances;
mod error;
mod kv;
mod layer_inputs;
mod layers;
mod limits;
mod mixer;
mod mlp;
mod mlp_pair;
mod mtp;
mod packed;
mod pooling;
mod recurrence;
mod rope;
mod spread;
mod vocabulary;
mod weights;

pub use error::{Error, Result};
pub use kv::KvCache;
pub use limits::PassLimits;
pub use mtp::MtpHead;
pub use packed::{PackedImage, PackedKey, PackedMatrices};
pub use weights::{LoadSource, PackedWeight};

use backend::{AttentionHeads, BatchLimits, Device, KvSpec, Memory, Pass};
use checkpoint::{Checkpoint, LayerSpec, MixerSpec, ModelSpec, StateHeads};
use collective::{CancelFlag, Ranks};
use decoder::Decoder;
use layers::OwnedHeads;
use std::ops::Range;
use types::{
    Activations, BLOCK_TOKENS, CacheGroup, DeviceClass, KvDtype, KvLayout, Leaves, Numerics, PieceRun, PolicyDigest,
    RankPart,
};
use weights::{LoadTotals, WeightLoader};

/// One rank's part of a model, on a device.
pub struct Model<M: Memory> {
    decoder: Decoder<M>,
    weight_bytes: usize,
    read_bytes: u64,
    runs: Vec<PieceRun>,
    packed: Vec<PackedWeight>,
}

impl<M: Device> Model<M> {
    /// Reads only the weights that `part` holds.
    pub fn load(checkpoint: &Checkpoint, device: &M, part: &RankPart, limits: PassLimits) -> Result<Model<M>> {
        let source = LoadSource { cancel: &CancelFlag::default(), packed: None };
        Model::load_from(checkpoint, device, part, limits, source)
    }

    /// Like `load`, but stops before the next tensor when it is cancelled, and takes matrices that are packed already.
    pub fn load_from(
        checkpoint: &Checkpoint,
        device: &M,
        part: &RankPart,
        limits: PassLimits,
        source: LoadSource<'_>,
    ) -> Result<Model<M>> {
        let spec = checkpoint.spec();
        let n_groups = spec.cache_groups().groups().len().max(usize::from(spec.encoder.is_some()));
        match spec.state_mixer() {
            Some(MixerSpec::Recurrence(of) | MixerSpec::Both(of)) => {
                device.check_recurrence(&recurrence::whole_heads(&of))?;
            }
            Some(MixerSpec::Convolution(of)) => {
                device.check_convolution(&convolution::owned_channels(device.class(), part, &of).0)?;
            }
            _ => {}
        }
        let (joined, own) = (spec.joined_layers(), &part.layers);
        let has_all = own.start <= joined.start && joined.end <= own.end;
        if !has_all && own.start < joined.end && joined.start < own.end {
            return Err(Error::Parted { first: joined.start, end: joined.end });
        }
        let norms_values = spec.attention.norms_values;
        attention::shapes(spec).iter().try_for_each(|heads| device.check_attention(heads, norms_values))?;
        device.reserve_batches(BatchLimits { rows_max: limits.rows_max, context: limits.context, n_groups })?;
        let intake = LoadTotals::default();
        let all = WeightLoader::new(checkpoint, device, part, &intake, source);
        let decoder = Decoder::load(&all, spec, &spec.form(), limits)?;
        checkpoint.check_unchanged()?;
        let (runs, packed) = (intake.runs.into_inner(), intake.packed.into_inner());
        let (weight_bytes, read_bytes) = (intake.n_bytes.get(), intake.n_read.get());
        Ok(Model { decoder, weight_bytes, read_bytes, runs, packed })
    }

    /// Bytes that the packed weights occupy.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Bytes that were read from the checkpoint: without those of matrices that were packed already.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    /// The weights as stored in this process's memory: matrices, vectors, tables of positions.
    pub fn packed(&self) -> &[PackedWeight] {
        &self.packed
    }

    /// Hashes of the bytes that were read.
    pub fn piece_runs(&self) -> &[PieceRun] {
        &self.runs
    }
}

impl<D: Device> Model<D> {
    /// What a pooled vector becomes, on the rank that samples: an embedding, or a classifier's scores.
    pub fn finish_pooled(&mut self, device: &D, pooled: &mut Vec<f32>) {
        self.decoder.finish_pooled(device, pooled);
    }

    /// Runs the pass, which all ranks run together. Returns the logits of its outputs, `[n_outputs, n_vocab]`, on the
    /// rank that samples; None elsewhere, and where there are no outputs.
    pub fn forward(
        &mut self,
        device: &D,
        ranks: &mut Ranks<D>,
        pass: &Pass<'_>,
        kv: &mut KvCache<D>,
    ) -> Result<Option<&D::Buffer>> {
        device.begin_pass(pass);
        self.decoder.forward(device, ranks, pass, kv)
    }
}

impl<M: Memory> Model<M> {
    /// The hidden states of the last pass, after the final norm: `[n_rows, hidden]`. On the last stage only.
    pub fn hidden(&self) -> Option<&M::Buffer> {
        self.decoder.hidden()
    }

    /// Whether each pass from now on leaves its hidden states, also one without outputs. Changes no bit of its logits.
    pub fn keep_hidden(&mut self, keeps_hidden: bool) {
        self.decoder.keep_hidden(keeps_hidden);
    }
}

/// The KV cache that a rank keeps of each cache group, for pools of `n_blocks`. A rank without heads keeps none, and
/// neither does a stage without layers of the group.
pub fn kv_specs(
    spec: &ModelSpec,
    part: &RankPart,
    class: DeviceClass,
    dtype: KvDtype,
    n_blocks: &[u32],
) -> Vec<KvSpec> {
    let groups = spec.cache_groups();
    let heads = kv_heads(spec, part, class);
    let layouts = groups.groups().iter().zip(&heads).map(|(group, heads)| group.rank_layout(heads.len() as u32));
    let of_group = |((n_layers, layout), n_blocks): ((usize, KvLayout), &u32)| KvSpec {
        n_layers,
        n_blocks: *n_blocks as usize,
        layout,
        dtype,
    };
    groups.n_layers(&part.layers).zip(layouts).zip(n_blocks).map(of_group).collect()
}

/// The memory for K and V of an encoder's pass, which every layer writes again. A pass has at most so many rows, of at
/// most so many texts. None for other models.
pub fn encoder_kv(spec: &ModelSpec, part: &RankPart, class: DeviceClass, limits: [usize; 2]) -> Option<KvSpec> {
    spec.encoder?;
    let [rows_max, texts_max] = limits;
    let whole = *attention::shapes(spec).first()?;
    let n = OwnedHeads::of(class, part, whole).heads.n_kv_heads as u32;
    // The last block of each text may be nearly empty.
    let n_blocks = (rows_max / BLOCK_TOKENS as usize + texts_max).min(rows_max.max(1));
    Some(KvSpec { n_layers: 1, n_blocks, layout: KvLayout::heads(n, whole.head_dim as u32), dtype: KvDtype::F32 })
}

/// The heads of each cache group that a rank keeps, as the model numbers them.
pub fn kv_heads(spec: &ModelSpec, part: &RankPart, class: DeviceClass) -> Vec<Range<u32>> {
    // Layers of one group have KV heads of one shape, by which their query heads divide them.
    let of_attention = |group: &CacheGroup| {
        let is_its = |heads: &AttentionHeads| {
            let own = KvLayout::heads(heads.n_kv_heads as u32, heads.head_dim as u32);
            group.layout.window().map_or(own, |window| own.with_window(window)) == group.layout
        };
        let whole = attention::shapes(spec).into_iter().find(is_its);
        whole.map_or(0..0, |whole| OwnedHeads::of(class, part, whole).kv_heads())
    };
    let of_states = |of: StateHeads| part.owned_heads(&of.leaves(class), of.dim);
    let states = spec.state_heads().map_or(0..0, of_states);
    let of_group = |group: &CacheGroup| if group.layout.is_state() { states.clone() } else { of_attention(group) };
    spec.cache_groups().groups().iter().map(of_group).collect()
}

/// The numbers of leaves in the model's sums over ranks.
pub fn leaf_counts(spec: &ModelSpec, class: DeviceClass) -> Vec<u32> {
    let of_layer = |layer: &LayerSpec| {
        let heads = Leaves::o_proj(class, spec.n_heads, spec.kv_heads_of(layer).dim);
        [heads, Leaves::down_proj(class, spec.inner_of(layer))]
    };
    let shared = spec.experts.map(|of| Leaves::down_proj(class, of.shared)).filter(|leaves| leaves.k() > 0);
    let of_layers = spec.layers.iter().flat_map(of_layer).map(|leaves| leaves.len() as u32);
    let counts = of_layers.chain(spec.experts.as_ref().map(|e| e.n));
    let states = spec.state_heads().map(|of| of.leaves(class).len() as u32);
    let counts = counts.chain(states).chain(shared.map(|leaves| leaves.len() as u32));
    let mut counts: Vec<u32> = counts.filter(|n| *n > 0).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Returns the policy: everything that can change a bit of the model's answers, apart from which bytes were read.
pub fn policy(
    checkpoint: &Checkpoint,
    device: &impl Memory,
    activations: Activations,
    kv_dtype: KvDtype,
) -> checkpoint::Result<PolicyDigest> {
    let (weights, mode) = (checkpoint.fingerprint()?, device.numerics_mode());
    Ok(Numerics::plain(&device.device_kind(), mode, activations, kv_dtype, weights).digest())
}
