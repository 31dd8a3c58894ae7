//! Tensors and kernels: what a device can do, said in a few fused operations, and the devices that do it.
//!
//! Knows nothing of models, requests or ranks. `unsafe` lives here, beside the reason that makes it sound.
#![allow(unsafe_code, reason = "kernels and their memory; each block says why it holds")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod cpu;
pub mod cuda;
mod error;
pub mod library;
pub mod pass;
pub mod stored;

pub use error::Error;
pub use pass::{Batch, BlockTables, Pass, PassSlice, Rows, Tables};
pub use stored::Stored;

use std::ops::Range;
use types::{
    Activations, BlockId, DeviceClass, DeviceKind, KvDtype, KvLayout, Leaves, Mode, Sampling, Token, TokenOut,
};

pub type Result<T> = std::result::Result<T, Error>;

/// All that a model needs of a device. Operations may only be begun when they return: whoever reads waits for them.
pub trait Device: Linear + Attention + Pointwise + Experts + Sample + Send + Sync {
    /// What failed since this was asked last, of what was begun. A pass is good if this says so behind it.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// How many rows a pass is to have: its own, or some more, where passes of fewer shapes begin faster.
    fn rows_for(&self, pass: &Pass<'_>) -> usize {
        pass.n_rows()
    }

    /// Does `work`, which begins operations of this device for the pass that was begun, and does nothing else: the same
    /// operations for passes of the same shape. A device may keep a record of it, and begin that the next time. Says
    /// what it did.
    fn repeat<E>(&self, mut work: impl FnMut() -> std::result::Result<(), E>) -> std::result::Result<Repeat, E> {
        work().map(|()| Repeat::Done)
    }

    /// Records are forgotten: what they do is not to be done again, as others have to do with it who will be gone.
    fn forget(&self) {}

    /// What became of all that was to be repeated.
    fn repeats(&self) -> Repeats {
        Repeats::default()
    }
}

/// What became of work that may be begun from a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// It was done.
    Done,
    /// What is recorded of it was begun.
    Begun,
    /// It was recorded, or that was tried, and nothing of it has begun. Who asks again has it done or begun, and first
    /// waits for ranks that share sums with this one: making a record ready takes memory of the device, for which a
    /// driver may wait until the device has nothing to do, and their kernels would wait for this rank's meanwhile.
    Recorded,
}

/// Since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeats {
    /// Records made.
    pub recorded: u64,
    /// Passes begun from a record.
    pub replayed: u64,
    /// Passes without one: the first of their shape, or of a shape that has none.
    pub plain: u64,
    /// Records that could not be made, or for which there was no room.
    pub refused: u64,
    /// How long the device was busy with passes that drew, and had nothing to do between two of them.
    pub busy_micros: u64,
    pub idle_micros: u64,
}

/// The largest batch that a device is to make room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    pub rows_max: usize,
    /// Positions of one sequence.
    pub context: u32,
    /// Cache groups, each with tables of its own.
    pub n_groups: usize,
}

/// The memory of a device, and how things get there. Everything is made at load; a step allocates nothing.
pub trait Memory {
    /// Activations in f32: `[rows_max, cols]`.
    type Buffer: Send;
    /// A weight matrix, packed for this device: `[n_out, k]`.
    type Matrix: Send + Sync;
    /// A weight vector in f32: norms, biases.
    type Vector: Send + Sync;
    /// The paged K and V of a cache group's layers.
    type Kv: Send;
    /// Cosines and sines per position.
    type Rope: Send + Sync;
    /// Which experts the rows of a pass have met, and room to compute with them.
    type Routes: Send;

    /// How sums are cut here.
    fn class(&self) -> DeviceClass;
    /// Devices that say the same agree in every bit: the class and, of a GPU, its architecture.
    fn told(&self) -> DeviceKind {
        self.class().into()
    }
    /// Where there is a choice.
    fn mode(&self) -> Mode {
        Mode::Lockstep
    }

    fn buffer(&self, rows_max: usize, cols: usize) -> Result<Self::Buffer>;
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
    /// Calls `work` with ranges that together are `0..n_items`, each item once, on the threads that pack weights;
    /// returns when all are done. `work` must not ask this device for anything.
    fn share(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync));
    /// Matrices that meet the same input are stacked by rows, so that it is quantized once. Their types may differ.
    fn matrix(&self, parts: &[Stored<'_>]) -> Result<Self::Matrix>;
    /// A row-parallel matrix: `stored` holds the columns `leaves.elements(&owned)` of the whole, and the product is
    /// kept as the sums of the largest aligned runs of leaves in `owned`.
    fn matrix_leaves(&self, stored: Stored<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<Self::Matrix>;
    fn kv(&self, spec: KvSpec) -> Result<Self::Kv>;
    /// Zeros in these blocks, in every layer: whoever stores there later finds nothing of who had them before.
    fn clear(&self, kv: &mut Self::Kv, blocks: &[BlockId]);
    /// A block of one layer as it lies there, for tests.
    fn read_block(&self, kv: &Self::Kv, layer: usize, block: BlockId) -> Vec<u8>;
    /// `cos` and `sin`: `[context, head_dim / 2]`, made once by portable arithmetic.
    fn rope(&self, cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Self::Rope>;
    /// Makes room for what `begin` takes.
    fn batches(&self, _limits: BatchLimits) -> Result<()> {
        Ok(())
    }

    /// Every pass begins with this: what the device wants to have of it before it computes.
    fn begin(&self, _pass: &Pass<'_>) {}

    /// For passes of so many rows through experts of `[inner, hidden]`.
    fn routes(&self, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Self::Routes>;

    /// What the packed weights of a matrix occupy.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;
    /// Reads rows back, for collectives and tests.
    fn read(&self, buffer: &Self::Buffer, rows: Range<usize>, out: &mut [f32]);
    /// Writes rows, for stage hand-off and tests.
    fn write(&self, buffer: &mut Self::Buffer, row: usize, values: &[f32]);
    /// What `buffer` was made with.
    fn cols(&self, buffer: &Self::Buffer) -> usize;
    /// Reads columns of one row from `col` on.
    fn read_part(&self, buffer: &Self::Buffer, row: usize, col: usize, out: &mut [f32]);
    /// Writes columns of one row from `col` on.
    fn write_part(&self, buffer: &mut Self::Buffer, row: usize, col: usize, values: &[f32]);
}

/// The pages of a cache group's layers on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSpec {
    pub n_layers: usize,
    pub n_blocks: usize,
    /// Of this rank.
    pub layout: KvLayout,
    pub dtype: KvDtype,
}

impl KvSpec {
    /// Bytes of one block over all layers: what the size of the pool is counted in.
    pub fn block_bytes(&self) -> u64 {
        self.layout.page_bytes(self.dtype).saturating_mul(self.n_layers as u64)
    }

    /// Of a layer's pages, and of all of them, where each takes so many bytes; None where no memory is so large.
    pub(crate) fn sizes(&self, page_bytes: u64) -> Option<(usize, usize)> {
        let of_layer = usize::try_from(page_bytes).ok()?.checked_mul(self.n_blocks)?;
        Some((of_layer, of_layer.checked_mul(self.n_layers)?))
    }

    /// How many heads, and how wide K and V are, which attention here wants alike.
    pub(crate) fn heads(&self) -> Result<(usize, usize)> {
        let KvLayout::Heads { n, k, v, .. } = self.layout;
        match k == v {
            true => Ok((n as usize, k as usize)),
            false => Err(Error::Shape(format!("heads with {k} numbers of K and {v} of V"))),
        }
    }
}

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// i and i + d/2: Hugging Face's layout.
    Halves,
    /// 2i and 2i + 1: the layout of a GGUF whose converter permuted Q and K.
    Pairs,
}

/// A rank may own no rows, no heads or no leaves of a matrix: every operation here and below takes matrices and buffers
/// without rows or columns, and does nothing with them.
pub trait Linear: Memory {
    /// `out = x · wᵀ` for the first `n_rows` rows. x: [n_rows, k], out: [n_rows, n_out].
    fn linear(&self, x: &Self::Buffer, w: &Self::Matrix, n_rows: usize, out: &mut Self::Buffer);
    /// The row-parallel product: one plane for each aligned run that this rank owns.
    /// x: [n_rows, k of the owned leaves], out: [n_runs * n_rows, n_out], plane after plane.
    fn linear_runs(&self, x: &Self::Buffer, w: &Self::Matrix, n_rows: usize, out: &mut Self::Buffer);
}

/// The shape of one layer's attention on this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    /// Query heads per KV head in the whole model.
    pub per_kv: usize,
    /// How far this rank's first query head stands within its KV head's group: 0 unless a boundary cuts the group.
    pub first: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// A row sees so many positions, its own the last; None: all up to its own.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
}

impl Heads {
    /// All heads of a layer on one rank.
    pub fn whole(n_heads: usize, n_kv_heads: usize, head_dim: usize, scale: f32) -> Heads {
        let per_kv = n_heads / n_kv_heads;
        Heads { n_heads, n_kv_heads, per_kv, first: 0, head_dim, scale, window: None, cap: None }
    }

    /// Which of this rank's KV heads its query head `head` reads.
    pub fn kv_of(&self, head: usize) -> usize {
        (self.first + head) / self.per_kv
    }

    /// The columns of a fused QKV row: all heads of Q, then K, then V.
    pub fn qkv_cols(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }
}

/// What one layer's attention is computed for.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall<'a> {
    pub pass: &'a Pass<'a>,
    pub heads: &'a Heads,
    /// Whose tables are followed: the cache group's, and where the layer's pages are among those of the group.
    pub group: usize,
    pub layer: usize,
}

pub trait Attention: Memory {
    /// Turns Q and K of `qkv` by their positions, if the layer has a rope, then writes K and V to their blocks in the
    /// KV dtype.
    /// qkv: [n_rows, qkv_cols]
    fn rope_store(
        &self,
        qkv: &mut Self::Buffer,
        rope: Option<&Self::Rope>,
        call: &AttentionCall<'_>,
        kv: &mut Self::Kv,
    );
    /// Causal attention of each row over the positions of its sequence up to its own, as far back as its window, K and
    /// V read from their blocks. Query head h reads KV head `call.heads.kv_of(h)`. qkv: [n_rows, qkv_cols] (Q is read), out:
    /// [n_rows, n_heads * head_dim]
    fn attend(&self, qkv: &Self::Buffer, kv: &Self::Kv, call: &AttentionCall<'_>, out: &mut Self::Buffer);
}

pub trait Pointwise: Memory {
    /// out[i] = row `tokens[i] - first` of the table, in f32. A token that is not in `first..` and so many rows as the
    /// table has is somebody else's, and its row of `out` stays as it is. table: [rows of the vocabulary, hidden]
    fn embed(&self, table: &Self::Matrix, first: u32, tokens: &[u32], out: &mut Self::Buffer);
    /// `embed` for the tokens of the pass that was begun.
    fn embed_pass(&self, table: &Self::Matrix, first: u32, pass: &Pass<'_>, out: &mut Self::Buffer) {
        self.embed(table, first, pass.rows.tokens, out);
    }
    /// out = x / rms(x) * weight. x, out: [n_rows, hidden]
    fn rms_norm(&self, x: &Self::Buffer, weight: &Self::Vector, eps: f32, n_rows: usize, out: &mut Self::Buffer);
    /// residual += x, then out = norm(residual). All: [n_rows, hidden]
    fn add_rms_norm(
        &self,
        x: &Self::Buffer,
        residual: &mut Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        n_rows: usize,
        out: &mut Self::Buffer,
    );
    /// residual += x: the very sum that `add_rms_norm` makes. Both: [n_rows, cols]
    fn add(&self, x: &Self::Buffer, residual: &mut Self::Buffer, n_rows: usize);
    /// Each row of x += bias. x: [n_rows, cols], bias: [cols]
    fn add_bias(&self, x: &mut Self::Buffer, bias: &Self::Vector, n_rows: usize);
    /// out = silu(gate) * up. gate_up: [n_rows, 2 * inner] (gate, then up), out: [n_rows, inner]
    fn silu_mul(&self, gate_up: &Self::Buffer, n_rows: usize, out: &mut Self::Buffer);
    /// out[i] = x[rows[i]]: the rows whose logits are wanted.
    fn gather(&self, x: &Self::Buffer, rows: &[u32], out: &mut Self::Buffer);
    /// Norms each head of Q and each of K. qkv: [n_rows, qkv_cols], q and k: [head_dim]
    fn norm_heads(
        &self,
        qkv: &mut Self::Buffer,
        heads: &Heads,
        q: &Self::Vector,
        k: &Self::Vector,
        eps: f32,
        n_rows: usize,
    );
    /// out = (x - mean) / deviation * weight + bias. x, out: [n_rows, hidden]
    fn layer_norm(
        &self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        bias: &Self::Vector,
        eps: f32,
        n_rows: usize,
        out: &mut Self::Buffer,
    );
    /// out = gelu(gate) * up, by its tangent form. gate_up: [n_rows, 2 * inner] (gate, then up), out: [n_rows, inner]
    fn gelu_mul(&self, gate_up: &Self::Buffer, n_rows: usize, out: &mut Self::Buffer);
    /// x = gelu(x), by its tangent form.
    fn gelu(&self, x: &mut Self::Buffer, n_rows: usize);
    /// x *= factor
    fn scale(&self, x: &mut Self::Buffer, factor: f32, n_rows: usize);
    /// x = cap * tanh(x / cap)
    fn soft_cap(&self, x: &mut Self::Buffer, cap: f32, n_rows: usize);
}

/// How a router's scores become a choice of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    pub n_experts: usize,
    /// How many a row meets.
    pub n_used: usize,
    /// What the chosen count is divided by its sum.
    pub normalized: bool,
}

/// The gated MLP of one expert.
pub struct Expert<M: Memory + ?Sized> {
    pub gate_up: M::Matrix, // [2 * inner, hidden]
    pub down: M::Matrix,    // [hidden, inner]
}

pub trait Experts: Memory {
    /// Softmax over each row's scores, then the best of them, the lower id where two are equal.
    /// scores: [n_rows, n_experts]
    fn route(&self, scores: &Self::Buffer, n_rows: usize, routes: &mut Self::Routes);
    /// Each row's sum over its experts, every one's product times what it counts, by the tree whose leaves are the
    /// experts: one plane for each aligned run that this rank owns. `experts` are those of the runs, in order.
    /// x: [n_rows, hidden], out: [n_runs * n_rows, hidden]
    fn experts(
        &self,
        x: &Self::Buffer,
        experts: &[Expert<Self>],
        runs: &[Range<u32>],
        n_rows: usize,
        routes: &mut Self::Routes,
        out: &mut Self::Buffer,
    );
}

/// One row's draw: all that it may depend on besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub sampling: &'a Sampling,
    /// The log before the token that is drawn.
    pub prompt: &'a [Token],
    pub output: &'a [Token],
    /// Nothing is drawn: the row's token is known, and its logprob is asked for.
    pub score: Option<Score>,
}

#[derive(Clone, Copy, Debug)]
pub struct Score {
    pub token: Token,
    /// How many of the most likely are told beside it.
    pub n_top: u8,
}

impl Draw<'_> {
    /// Of the token that is drawn, in the whole log: part of the noise, so that a replay draws the same.
    pub fn position(&self) -> u32 {
        (self.prompt.len() + self.output.len()) as u32
    }

    /// Tokens generated so far: stop tokens are not drawn before `tokens_min`.
    pub fn n_output(&self) -> u32 {
        self.output.len() as u32
    }
}

pub trait Sample: Memory {
    /// Draws one token from each row of logits into `out` (cleared, and its memory reused). A row that holds no number
    /// draws nothing: `None`. logits: [draws.len(), n_vocab]
    fn draw(&self, logits: &Self::Buffer, draws: &[Draw<'_>], out: &mut Vec<Option<TokenOut>>);

    /// Whether the device comes to such a draw's answer without the host, whatever the logits are.
    fn draws_alone(&self, _draw: &Draw<'_>, _n_vocab: usize) -> bool {
        false
    }

    /// Begins to draw, where all draws are such. Before the answers are asked for one more pass may be begun, whose
    /// rows may have these tokens (`Rows::drawn`), and its draws.
    fn begin_draws(&self, _logits: &Self::Buffer, _draws: &[Draw<'_>]) -> Option<Drawing> {
        None
    }

    /// Whether the answers are there.
    fn are_drawn(&self, _drawing: &Drawing) -> bool {
        true
    }

    /// Waits for the answers, and gives what `draw` would have given.
    fn drawn(&self, _drawing: &Drawing, draws: &[Draw<'_>], out: &mut Vec<Option<TokenOut>>) {
        out.clear();
        out.resize_with(draws.len(), || None);
    }
}

/// Draws that were begun, and have their answers in one of two places.
#[derive(Debug)]
pub struct Drawing(pub(crate) usize);
