//! The layer of a model that predicts one token further (multi-token prediction, MTP), as a source of guesses. It is
//! whole on one rank, on any grid: no token depends on it.
//!
//! At position p it takes the token at p + 1, the model's hidden state at p, and its own keys and values of earlier
//! positions. Its logits are those of the token at p + 2. Its own hidden state stands for the model's at p + 1, where
//! the model has not computed it yet.

use crate::Model;
use crate::ctx::Ctx;
use crate::decoder::{Block, DecoderScratch};
use crate::error::Result;
use crate::kv::KvCache;
use crate::layers::{Norm, Residual};
use crate::limits::PassLimits;
use crate::rope::Ropes;
use crate::vocabulary::{EmbeddingTable, LmHead, vocabulary};
use crate::weights::{LoadSource, LoadTotals, MatrixRows, WeightLoader};
use crate::{attention, error};
use backend::{BatchLimits, Device, Pass};
use checkpoint::{Checkpoint, ModelSpec, MtpSpec};
use collective::{CancelFlag, Ranks};
use std::sync::Arc;
use types::{Layout, Rank, Unsupported};

pub struct MtpHead<D: Device> {
    embed_tokens: EmbeddingTable<D>, // mtp.embed_tokens.weight [n_vocab, hidden], or the model's
    embedding_norm: Norm<D>,         // mtp.pre_fc_norm_embedding [hidden]
    hidden_norm: Norm<D>,            // mtp.pre_fc_norm_hidden [hidden]
    product: D::Matrix,              // mtp.fc.weight [hidden, 2 * hidden]
    block: Block<D>,                 // mtp.layers.0
    norm: Norm<D>,                   // mtp.norm [hidden]
    lm_head: LmHead<D>,              // mtp.lm_head.weight [n_vocab, hidden], or the model's
    ropes: Ropes<D>,
    residual: Residual<D>,
    scratch: MtpScratch<D>,
    ranks: Ranks<D>,
    spec: ModelSpec,
    weight_bytes: usize,
}

struct MtpScratch<D: Device> {
    /// The hidden states of the positions before those of the rows' tokens.
    previous: D::Buffer, // [rows_max, hidden]
    embedded: D::Buffer, // [rows_max, hidden]
    normed: D::Buffer,   // [rows_max, hidden]
    joined: D::Buffer,   // [rows_max, 2 * hidden]
    decoder: DecoderScratch<D>,
}

impl<D: Device> MtpHead<D> {
    /// Loads the layer of a checkpoint that has one. It shares the tables of `model` if this rank has all of their
    /// rows, and loads its own copies otherwise.
    pub fn load(
        checkpoint: &Checkpoint,
        device: &D,
        limits: PassLimits,
        model: Option<&Model<D>>,
        cancel: &CancelFlag,
    ) -> Result<MtpHead<D>> {
        let none = Unsupported("a model without a layer that predicts one token further");
        let of: &MtpSpec = checkpoint.mtp().ok_or(none)?;
        let spec = of.layer.clone();
        attention::shapes(&spec).iter().try_for_each(|heads| device.check_attention(heads, false))?;
        device.reserve_batches(BatchLimits { rows_max: limits.rows_max, context: limits.context, n_groups: 1 })?;
        let part = Layout::solo(1).part(Rank(0));
        let intake = LoadTotals::default();
        let all = WeightLoader::new(checkpoint, device, &part, &intake, LoadSource { cancel, packed: None });
        let (at, form, hidden) = (all.at_path("mtp"), spec.form(), spec.hidden as usize);
        let block = Block::load(&at.at_path("layers.0"), &spec, &form, 0)?;
        let [table, head] = model.map_or([None, None], |model| model.decoder.whole_tables());
        let (embed_tokens, lm_head) = ends(&all, of, [table, head], limits)?;
        let norm = |name| Norm::load(&at, name, &spec, form.norm_kind);
        let rows = |cols| device.buffer(limits.rows_max, cols);
        let n_planes = block.n_planes();
        let head = MtpHead {
            embed_tokens,
            embedding_norm: norm("pre_fc_norm_embedding")?,
            hidden_norm: norm("pre_fc_norm_hidden")?,
            product: at.rows(2 * hidden, &[MatrixRows::all("fc", hidden)])?,
            norm: norm("norm")?,
            lm_head,
            ropes: Ropes::load(&all, &spec, limits.context, None)?,
            residual: Residual::new(device, limits, hidden, n_planes)?,
            scratch: MtpScratch {
                previous: rows(hidden)?,
                embedded: rows(hidden)?,
                normed: rows(hidden)?,
                joined: rows(2 * hidden)?,
                decoder: DecoderScratch::new(&all, &spec, &form, limits, n_planes)?,
            },
            ranks: Ranks::solo(1),
            weight_bytes: intake.n_bytes.get(),
            block,
            spec,
        };
        checkpoint.check_unchanged()?;
        Ok(head)
    }

    /// The spec of a model of this layer alone, for its KV cache.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Bytes of its packed weights, without tables that it shares.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Sets the hidden states that the next pass takes, one per row: these rows of the model's `hidden`.
    pub fn set_hidden(&mut self, device: &D, hidden: &D::Buffer, rows: &[u32]) {
        device.gather(hidden, rows, &mut self.scratch.previous);
    }

    /// Sets them to these rows of the last pass's own hidden states. The last pass must have had outputs.
    pub fn set_own_hidden(&mut self, device: &D, rows: &[u32]) {
        if let Some(own) = self.lm_head.hidden() {
            device.gather(own, rows, &mut self.scratch.previous);
        }
    }

    /// Runs a pass whose tokens are one position ahead of its positions. Returns the logits of its outputs,
    /// `[n_outputs, n_vocab]`; None without outputs.
    pub fn forward(&mut self, device: &D, pass: &Pass<'_>, kv: &mut KvCache<D>) -> Result<Option<&D::Buffer>> {
        device.begin_pass(pass);
        let MtpHead { ropes, residual, ranks, block, scratch, .. } = self;
        let MtpScratch { previous, embedded, normed, joined, decoder } = scratch;
        let ctx = &mut Ctx { device, ranks, pass, kv, ropes };
        let (n_rows, hidden) = (pass.n_rows(), self.spec.hidden as usize);
        self.embed_tokens.look_up(ctx, embedded)?; // [n_rows, hidden]
        self.embedding_norm.plain(device, embedded, n_rows, normed);
        device.copy_columns(normed, 0..n_rows, 0..hidden, joined, 0, 0);
        self.hidden_norm.plain(device, previous, n_rows, normed);
        device.copy_columns(normed, 0..n_rows, 0..hidden, joined, 0, hidden);
        device.linear(joined, &self.product, n_rows, residual.begin()); // [n_rows, hidden]
        block.forward(ctx, residual, decoder)?;
        self.lm_head.forward(ctx, Some(&self.norm), residual) // [n_outputs, n_vocab]
    }
}

/// Both ends: the layer's own where the file has them, and the model's otherwise.
fn ends<D: Device>(
    all: &WeightLoader<'_, D>,
    MtpSpec { layer: spec, has_embedding, has_head }: &MtpSpec,
    [of_model, head_of_model]: [Option<Arc<D::Matrix>>; 2],
    limits: PassLimits,
) -> error::Result<(EmbeddingTable<D>, LmHead<D>)> {
    let (n_vocab, hidden) = (spec.vocab as usize, spec.hidden as usize);
    let (mtp, model) = (all.at_path("mtp"), all.at_path("model"));
    let load = |at: &WeightLoader<'_, D>, name| Ok::<_, error::Error>(Arc::new(vocabulary(at, name, n_vocab, hidden)?));
    let rows = match of_model {
        _ if *has_embedding => load(&mtp, "embed_tokens")?,
        Some(rows) => rows,
        None => load(&model, "embed_tokens")?,
    };
    let head = match head_of_model {
        _ if *has_head => load(&mtp, "lm_head")?,
        Some(head) => head,
        None if !spec.tied_embeddings => load(all, "lm_head")?,
        None if *has_embedding => load(&model, "embed_tokens")?,
        None => rows.clone(),
    };
    let head = LmHead::of(head, all, n_vocab, hidden, limits)?;
    let embedding = EmbeddingTable::whole(rows, n_vocab, spec.factors.embedding);
    Ok((embedding, head.capped(spec.logits_cap).scaled_by(spec.factors.logits)))
}
