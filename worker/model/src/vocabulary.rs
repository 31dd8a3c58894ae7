//! Both ends of the stream, which have a row for each token of the vocabulary: the embedding and the head. Each rank of
//! a stage owns some of the rows.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{Norm, Residual};
use crate::limits::PassLimits;
use crate::weights::{MatrixRows, WeightLoader};
use backend::{Device, ElementOp, Memory};
use checkpoint::ModelSpec;
use std::sync::Arc;
use types::Shares;

/// The beginning of a stage's stream: rows of a table that is spread over the ranks, or the previous stage's output.
pub struct Embedding<M: Memory> {
    table: Option<EmbeddingTable<M>>,
}

/// A table with a row for each token, spread over the ranks of a stage.
pub struct EmbeddingTable<M: Memory> {
    rows: Arc<M::Matrix>, // [owned rows of the vocabulary, cols]
    first: u32,
    shares: Shares,
    n_vocab: u32,
    /// Rows are multiplied by it.
    factor: Option<f32>,
}

impl<M: Memory> EmbeddingTable<M> {
    /// `{name}.weight` is [n_vocab, cols].
    pub fn load(
        at: &WeightLoader<'_, M>,
        name: &str,
        n_vocab: usize,
        cols: usize,
        factor: Option<f32>,
    ) -> Result<EmbeddingTable<M>> {
        let rows = vocabulary(at, name, n_vocab, cols)?.into();
        let (n_vocab, shares) = (n_vocab as u32, at.part().shares.clone());
        Ok(EmbeddingTable { rows, first: at.part().owned(n_vocab).start, shares, n_vocab, factor })
    }

    /// A table of which this rank has all rows.
    pub fn whole(rows: Arc<M::Matrix>, n_vocab: usize, factor: Option<f32>) -> EmbeddingTable<M> {
        EmbeddingTable { rows, first: 0, shares: Shares::even(1), n_vocab: n_vocab as u32, factor }
    }

    /// All rows, if this rank has them.
    pub fn all_rows(&self) -> Option<Arc<M::Matrix>> {
        (self.shares.n_ranks() == 1).then(|| self.rows.clone())
    }
}

impl<D: Device> EmbeddingTable<D> {
    /// The pass's tokens -> out: [n_rows, cols], the same on all ranks
    pub fn look_up(&self, ctx: &mut Ctx<'_, D>, out: &mut D::Buffer) -> Result<()> {
        let Ctx { device, pass, ranks, .. } = ctx;
        device.embed_pass(&self.rows, self.first, pass, out);
        if let Some(factor) = self.factor {
            device.map(out, ElementOp::Scale(factor), pass.n_rows());
        }
        let owner = |row: usize| self.shares.owner(pass.rows.tokens[row], self.n_vocab).into();
        Ok(ranks.share_rows(device, out, owner, pass.n_rows())?)
    }
}

impl<M: Memory> Embedding<M> {
    pub fn load(model: &WeightLoader<'_, M>, spec: &ModelSpec) -> Result<Embedding<M>> {
        let (n_vocab, hidden, factor) = (spec.vocab as usize, spec.hidden as usize, spec.factors.embedding);
        let load = || EmbeddingTable::load(model, "embed_tokens", n_vocab, hidden, factor);
        Ok(Embedding { table: model.part().is_first().then(load).transpose()? })
    }

    /// The table, if this rank has all of its rows.
    pub fn whole_table(&self) -> Option<Arc<M::Matrix>> {
        self.table.as_ref().and_then(EmbeddingTable::all_rows)
    }
}

impl<D: Device> Embedding<D> {
    /// The pass's tokens -> the stream [n_rows, hidden]
    pub fn forward(&self, ctx: &mut Ctx<'_, D>, residual: &mut Residual<D>) -> Result<()> {
        match &self.table {
            Some(table) => table.look_up(ctx, residual.begin()),
            None => Ok(ctx.ranks.recv_rows(ctx.device, residual.begin(), ctx.pass.n_rows())?),
        }
    }
}

/// The end of a stage's stream: logits, of which each rank computes its rows of the vocabulary, or the next stage.
pub struct LmHead<M: Memory> {
    last: Option<OutputScratch<M>>,
    /// Logits become `cap * tanh(logit / cap)`.
    cap: Option<f32>,
    factor: Option<f32>,
    /// Each pass leaves the hidden states of its rows.
    keeps_hidden: bool,
}

struct OutputScratch<M: Memory> {
    /// None of an encoder, whose passes have no outputs.
    rows: Option<Arc<M::Matrix>>, // [owned rows of the vocabulary, hidden]
    n_vocab: u32,
    x: M::Buffer,           // [rows_max, hidden]
    output_rows: M::Buffer, // [outputs_max, hidden]
    mine: M::Buffer,        // [outputs_max, owned rows of the vocabulary]
    /// Only where a rank does not own the whole vocabulary.
    whole: Option<M::Buffer>, // [outputs_max, n_vocab]
    is_sampler: bool,
}

impl<M: Memory> LmHead<M> {
    pub fn load(
        at: &WeightLoader<'_, M>,
        name: &str,
        n_vocab: usize,
        hidden: usize,
        limits: PassLimits,
    ) -> Result<LmHead<M>> {
        match at.part().is_last() {
            true => LmHead::of(vocabulary(at, name, n_vocab, hidden)?.into(), at, n_vocab, hidden, limits),
            false => Ok(LmHead { last: None, cap: None, factor: None, keeps_hidden: false }),
        }
    }

    /// The head is the embedding, `name`. A stage other than the first loads it once more.
    pub fn tied(
        embedding: &Embedding<M>,
        at: &WeightLoader<'_, M>,
        name: &str,
        n_vocab: usize,
        hidden: usize,
        limits: PassLimits,
    ) -> Result<LmHead<M>> {
        match &embedding.table {
            Some(table) if at.part().is_last() => LmHead::of(table.rows.clone(), at, n_vocab, hidden, limits),
            _ => LmHead::load(at, name, n_vocab, hidden, limits),
        }
    }

    /// A head of these rows, on the last stage.
    pub fn of(
        rows: Arc<M::Matrix>,
        at: &WeightLoader<'_, M>,
        n_vocab: usize,
        hidden: usize,
        limits: PassLimits,
    ) -> Result<LmHead<M>> {
        LmHead::new(Some(rows), at, n_vocab, hidden, limits)
    }

    /// The end of an encoder, on the last stage: its hidden states.
    fn of_encoder(at: &WeightLoader<'_, M>, hidden: usize, limits: PassLimits) -> Result<LmHead<M>> {
        match at.part().is_last() {
            true => LmHead::new(None, at, 0, hidden, PassLimits { outputs_max: 0, ..limits }),
            false => Ok(LmHead { last: None, cap: None, factor: None, keeps_hidden: false }),
        }
    }

    fn new(
        rows: Option<Arc<M::Matrix>>,
        at: &WeightLoader<'_, M>,
        n_vocab: usize,
        hidden: usize,
        limits: PassLimits,
    ) -> Result<LmHead<M>> {
        let (device, part) = (at.device(), at.part());
        let PassLimits { rows_max, outputs_max, .. } = limits;
        let is_spread = part.shares.n_ranks() > 1;
        // Only the sampler has the gathered logits.
        let whole_rows = if part.is_sampler() { outputs_max } else { 0 };
        Ok(LmHead {
            last: Some(OutputScratch {
                rows,
                n_vocab: n_vocab as u32,
                x: device.buffer(rows_max, hidden)?,
                output_rows: device.buffer(outputs_max, hidden)?,
                mine: device.buffer(outputs_max, part.owned(n_vocab as u32).len())?,
                whole: if is_spread { Some(device.buffer(whole_rows, n_vocab)?) } else { None },
                is_sampler: part.is_sampler(),
            }),
            cap: None,
            factor: None,
            keeps_hidden: false,
        })
    }

    /// A model's embedding and its head, which may be the embedding again.
    pub fn with_embedding(
        all: &WeightLoader<'_, M>,
        spec: &ModelSpec,
        limits: PassLimits,
    ) -> Result<(Embedding<M>, LmHead<M>)> {
        let (model, n_vocab, hidden) = (all.at_path("model"), spec.vocab as usize, spec.hidden as usize);
        let embedding = Embedding::load(&model, spec)?;
        let head = match spec.tied_embeddings {
            _ if spec.encoder.is_some() => LmHead::of_encoder(all, hidden, limits)?,
            true => LmHead::tied(&embedding, &model, "embed_tokens", n_vocab, hidden, limits)?,
            false => LmHead::load(all, "lm_head", n_vocab, hidden, limits)?,
        };
        Ok((embedding, head))
    }

    pub fn capped(self, cap: Option<f32>) -> LmHead<M> {
        LmHead { cap, ..self }
    }

    /// Multiplies logits by `factor`.
    pub fn scaled_by(self, factor: Option<f32>) -> LmHead<M> {
        LmHead { factor, ..self }
    }
}

impl<M: Memory> LmHead<M> {
    /// Returns the last pass's rows after the final norm: [n_rows, hidden]. Only on the last stage, and only if the
    /// pass requested outputs or hidden states, or if all are kept.
    pub fn hidden(&self) -> Option<&M::Buffer> {
        self.last.as_ref().map(|last| &last.x)
    }

    /// Whether each pass from now on leaves its hidden states, also one without outputs.
    pub fn keep_hidden(&mut self, keeps_hidden: bool) {
        self.keeps_hidden = keeps_hidden;
    }

    /// The table, if this rank has all of its rows.
    pub fn whole_table(&self) -> Option<Arc<M::Matrix>> {
        self.last.as_ref().filter(|last| last.whole.is_none()).and_then(|last| last.rows.clone())
    }
}

impl<D: Device> LmHead<D> {
    /// The stream -> the logits of the pass's outputs [n_outputs, n_vocab], on the rank that samples, if the
    /// pass has any.
    pub fn forward(
        &mut self,
        ctx: &mut Ctx<'_, D>,
        norm: Option<&Norm<D>>,
        residual: &mut Residual<D>,
    ) -> Result<Option<&D::Buffer>> {
        let Ctx { device, pass, ranks, .. } = ctx;
        let (n_rows, n_outputs) = (pass.n_rows(), pass.rows.outputs.len());
        let Some(last) = &mut self.last else {
            ranks.send_rows(device, residual.sum_with_due(device, n_rows), n_rows)?;
            return Ok(None);
        };
        if n_outputs == 0 && !pass.wants_hidden() && !self.keeps_hidden {
            return Ok(None);
        }
        match norm {
            Some(norm) => norm.forward(device, residual, n_rows, &mut last.x), // [n_rows, hidden]
            None => {
                let sum = residual.sum_with_due(device, n_rows);
                device.copy_columns(sum, 0..n_rows, 0..device.cols(sum), &mut last.x, 0, 0);
            }
        }
        let Some(rows) = last.rows.as_ref().filter(|_| n_outputs > 0) else { return Ok(None) };
        device.gather(&last.x, pass.rows.outputs, &mut last.output_rows); // [n_outputs, hidden]
        device.linear(&last.output_rows, rows, n_outputs, &mut last.mine); // [n_outputs, owned rows]
        if let Some(cap) = self.cap {
            device.map(&mut last.mine, ElementOp::SoftCap(cap), n_outputs);
        }
        if let Some(factor) = self.factor {
            device.map(&mut last.mine, ElementOp::Scale(factor), n_outputs);
        }
        let Some(whole) = &mut last.whole else { return Ok(Some(&last.mine)) };
        ranks.gather_columns(device, &last.mine, whole, last.n_vocab, n_outputs)?; // [n_outputs, n_vocab]
        Ok(last.is_sampler.then_some(&*whole))
    }
}

/// This rank's rows of a table of the vocabulary. [owned, hidden]
pub fn vocabulary<M: Memory>(at: &WeightLoader<'_, M>, name: &str, n_vocab: usize, hidden: usize) -> Result<M::Matrix> {
    let owned = at.part().owned(n_vocab as u32);
    at.rows(hidden, &[MatrixRows { name, n: n_vocab, owned: owned.start as usize..owned.end as usize }])
}
