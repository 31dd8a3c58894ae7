//! The stored bytes of each part of a model, by how ranks may divide it: the basis of a shard table. Knows no ranks.

use crate::names::RequiredTensor;
use crate::{Checkpoint, ModelSpec, names};
use std::ops::{Add, Sub};
use types::Dtype;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSizes {
    pub embedding: u64,
    /// One entry per layer, in order.
    pub layers: Vec<LayerSizes>,
    pub norm: u64,
    /// The table of the layers' own inputs, which is beside the embedding.
    pub layer_inputs: u64,
    /// Zero if the head is the embedding.
    pub head: u64,
}

/// A layer's bytes, or those of several layers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Divided by query heads: `q_proj` and `o_proj`; elsewhere what is divided by heads with a state.
    pub heads: u64,
    /// Divided by KV heads: `k_proj` and `v_proj`.
    pub kv_heads: u64,
    /// Divided by the MLP's columns; includes shared experts.
    pub mlp: u64,
    /// Divided by experts: all of them together.
    pub experts: u64,
    /// Held by every rank of a stage: norms, a router, and whatever has no known cut.
    pub replicated: u64,
}

impl ModelSizes {
    pub(crate) fn of(checkpoint: &Checkpoint) -> ModelSizes {
        ModelSizes::measured(checkpoint.spec(), |expected| stored_bytes(checkpoint, &expected.name, expected.shape))
    }

    /// The sizes of the layer that predicts one token further, with an embedding and a head as large as the model's.
    /// Its outer product counts as a norm. None if the file does not have the layer.
    pub(crate) fn of_mtp(checkpoint: &Checkpoint) -> Option<ModelSizes> {
        let layer = &checkpoint.mtp()?.layer;
        let mut sizes = ModelSizes::measured(layer, |expected| {
            let name = expected.name.replacen("model.layers.", "mtp.layers.", 1);
            stored_bytes(checkpoint, &name, expected.shape)
        });
        let hidden = layer.hidden as usize;
        sizes.norm += stored_bytes(checkpoint, names::MTP_PRODUCT, [hidden, 2 * hidden]);
        Some(sizes)
    }

    /// The sizes of a model of this shape, with the bytes of each tensor from `bytes_of`.
    pub fn measured(spec: &ModelSpec, bytes_of: impl Fn(&RequiredTensor) -> u64) -> ModelSizes {
        let no_layers = vec![LayerSizes::default(); spec.n_layers as usize];
        let mut sizes = ModelSizes { layers: no_layers, ..ModelSizes::default() };
        for expected in names::required_tensors(spec) {
            let bytes = bytes_of(&expected);
            match (expected.layer, expected.name.as_str()) {
                // Wider heads are fewer, so a boundary between ranks cuts more of them.
                (Some(layer), name) if is_of_kv(name) && spec.layers[layer as usize].kv_heads.is_some() => {
                    sizes.layers[layer as usize].replicated += bytes;
                }
                (Some(layer), name) => *sizes.layers[layer as usize].field_of(name) += bytes,
                (None, names::EMBEDDING | names::POSITIONS) => sizes.embedding += bytes,
                (None, names::HEAD) => sizes.head += bytes,
                (None, names::LAYER_INPUTS) => sizes.layer_inputs += bytes,
                (None, _) => sizes.norm += bytes,
            }
        }
        sizes
    }

    pub fn total(&self) -> u64 {
        self.embedding
            + self.layers.iter().map(LayerSizes::total).sum::<u64>()
            + self.norm
            + self.head
            + self.layer_inputs
    }
}

fn stored_bytes(checkpoint: &Checkpoint, name: &str, shape: [usize; 2]) -> u64 {
    let dtype = checkpoint.find(name).map(|tensor| tensor.dtype);
    let n = (shape[0] * shape[1]) as u64;
    let bytes = dtype.and_then(|dtype| dtype.bytes_of(n)).unwrap_or(0);
    // Devices keep an f32 for every 32 numbers, however few scales the file has.
    if dtype == Some(Dtype::F8E4M3) { bytes + n / 8 } else { bytes }
}

/// What query heads divide, heads with a state, or runs of a short convolution's channels.
const BY_HEADS: [&str; 9] =
    [".q_proj.", ".g_proj.", ".o_proj.", ".z_proj.", ".b_proj.", ".a_proj.", ".c_proj.", ".x_proj.", ".out_proj."];

fn is_of_kv(name: &str) -> bool {
    [".k_proj.", ".v_proj."].iter().any(|part| name.contains(part))
}

impl LayerSizes {
    /// The field that counts the tensor with this Hugging Face name.
    fn field_of(&mut self, name: &str) -> &mut u64 {
        let is_of = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        if is_of(&[".experts."]) {
            &mut self.experts
        } else if is_of(&["linear_attn.q_proj.", "linear_attn.k_proj."]) {
            // Several value heads read one of these, as several query heads read one of K.
            &mut self.kv_heads
        } else if is_of(&["linear_attn.v_proj."]) || is_of(&BY_HEADS) {
            &mut self.heads
        } else if is_of_kv(name) {
            &mut self.kv_heads
        } else if is_of(&[".gate_proj.", ".up_proj.", ".down_proj."]) {
            &mut self.mlp
        } else {
            &mut self.replicated
        }
    }

    pub fn total(&self) -> u64 {
        self.heads + self.kv_heads + self.mlp + self.experts + self.replicated
    }

    fn zip_with(self, other: LayerSizes, with: impl Fn(u64, u64) -> u64) -> LayerSizes {
        LayerSizes {
            heads: with(self.heads, other.heads),
            kv_heads: with(self.kv_heads, other.kv_heads),
            mlp: with(self.mlp, other.mlp),
            experts: with(self.experts, other.experts),
            replicated: with(self.replicated, other.replicated),
        }
    }
}

impl Add for LayerSizes {
    type Output = LayerSizes;

    fn add(self, other: LayerSizes) -> LayerSizes {
        self.zip_with(other, |a, b| a + b)
    }
}

impl Sub for LayerSizes {
    type Output = LayerSizes;

    fn sub(self, other: LayerSizes) -> LayerSizes {
        self.zip_with(other, |a, b| a - b)
    }
}
