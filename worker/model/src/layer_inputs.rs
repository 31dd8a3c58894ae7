//! Inputs that each layer has of its own for a token: a row of a table, and a projection of the embedding. A layer
//! gates its input by the stream, and adds a projection of it.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{Norm, Residual};
use crate::limits::PassLimits;
use crate::vocabulary::EmbeddingTable;
use crate::weights::{MatrixRows, WeightLoader};
use backend::{AttentionHeads, Device, ElementOp, Gate, HeadNorms, Memory};
use checkpoint::{ModelSpec, NormKind};

/// The inputs of all layers, which are on one stage.
pub struct LayerInputs<M: Memory> {
    table: EmbeddingTable<M>, // embed_tokens_per_layer.weight [n_vocab, n_layers * width]
    projection: M::Matrix,    // per_layer_model_projection.weight [n_layers * width, hidden], on every rank
    norm: M::Vector,          // per_layer_projection_norm.weight [width]
    /// Inputs are normed layer by layer, as heads are.
    layers: AttentionHeads,
    eps: f32,
    /// The projection is multiplied by this before its norm.
    factor: f32,
    projected: M::Buffer, // [rows_max, n_layers * width]
    inputs: M::Buffer,    // the same
    gate: M::Buffer,      // [rows_max, width]
    gate_up: M::Buffer,   // [rows_max, 2 * width]
}

/// A layer's use of its input.
pub struct LayerInput<M: Memory> {
    gate: M::Matrix,       // per_layer_input_gate.weight [width, hidden], on every rank
    projection: M::Matrix, // per_layer_projection.weight [hidden, width], on every rank
    norm: Norm<M>,         // post_per_layer_input_norm [hidden]
}

impl<M: Memory> LayerInputs<M> {
    pub fn load(model: &WeightLoader<'_, M>, spec: &ModelSpec, limits: PassLimits) -> Result<LayerInputs<M>> {
        let device = model.device();
        let (hidden, width, n_vocab) = (spec.hidden as usize, spec.layer_input as usize, spec.vocab as usize);
        let (n_layers, n_all) = (spec.n_layers as usize, spec.n_layers as usize * width);
        let factor = Some((width as f32).sqrt());
        let rows = |cols| device.buffer(limits.rows_max, cols);
        Ok(LayerInputs {
            table: EmbeddingTable::load(model, "embed_tokens_per_layer", n_vocab, n_all, factor)?,
            projection: model.rows(hidden, &[MatrixRows::all("per_layer_model_projection", n_all)])?,
            norm: model.vector_plus("per_layer_projection_norm", width, spec.norm_offset)?,
            layers: AttentionHeads { is_reader: true, ..AttentionHeads::whole(n_layers, 1, width, 1.0) },
            eps: spec.norm_eps,
            factor: 1.0 / (hidden as f32).sqrt(),
            projected: rows(n_all)?,
            inputs: rows(n_all)?,
            gate: rows(width)?,
            gate_up: rows(2 * width)?,
        })
    }
}

impl<D: Device> LayerInputs<D> {
    /// Computes the inputs of all layers for the pass's tokens, whose embedding the stream still is.
    pub fn compute(&mut self, ctx: &mut Ctx<'_, D>, residual: &mut Residual<D>) -> Result<()> {
        let (device, n_rows) = (ctx.device, ctx.n_rows());
        self.table.look_up(ctx, &mut self.inputs)?; // [n_rows, n_layers * width]
        device.linear(residual.sum_with_due(device, n_rows), &self.projection, n_rows, &mut self.projected);
        device.map(&mut self.projected, ElementOp::Scale(self.factor), n_rows);
        let norms = HeadNorms { q: &self.norm, k: &self.norm, v: None, eps: self.eps };
        device.norm_heads(&mut self.projected, &self.layers, &norms, n_rows);
        device.add(&self.projected, &mut self.inputs, n_rows);
        device.map(&mut self.inputs, ElementOp::Scale(std::f32::consts::FRAC_1_SQRT_2), n_rows);
        Ok(())
    }
}

impl<M: Memory> LayerInput<M> {
    pub fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec) -> Result<LayerInput<M>> {
        let (hidden, width) = (spec.hidden as usize, spec.layer_input as usize);
        Ok(LayerInput {
            gate: at.rows(hidden, &[MatrixRows::all("per_layer_input_gate", width)])?,
            projection: at.rows(width, &[MatrixRows::all("per_layer_projection", hidden)])?,
            norm: Norm::load(at, "post_per_layer_input_norm", spec, NormKind::Rms)?,
        })
    }
}

impl<D: Device> LayerInput<D> {
    /// Adds to the stream what comes of the input of layer `i`.
    pub fn forward(
        &self,
        ctx: &Ctx<'_, D>,
        residual: &mut Residual<D>,
        of: &mut LayerInputs<D>,
        i: usize,
        out: &mut D::Buffer,
    ) {
        let (device, n_rows, width) = (ctx.device, ctx.n_rows(), of.layers.head_dim);
        device.linear(residual.sum_with_due(device, n_rows), &self.gate, n_rows, &mut of.gate); // [n_rows, width]
        device.copy_columns(&of.gate, 0..n_rows, 0..width, &mut of.gate_up, 0, 0);
        device.copy_columns(&of.inputs, 0..n_rows, i * width..(i + 1) * width, &mut of.gate_up, 0, width);
        device.apply_gate(&of.gate_up, Gate::Gelu, n_rows, &mut of.gate); // [n_rows, width]
        device.linear(&of.gate, &self.projection, n_rows, out); // [n_rows, hidden]
        self.norm.plain(device, out, n_rows, residual.due());
    }
}
