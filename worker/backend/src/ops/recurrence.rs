//! Recurrent layers: heads whose state is carried from block to block, and the rows of a block from which outputs are
//! computed. The gated delta rule and Mamba-2 are one operation with two rules.

use super::Memory;
use crate::{Pass, Result};
use types::KvLayout;

/// The shape of one recurrent layer on this rank. A key head (of Mamba-2: a group) is read by several value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentHeads {
    /// Value heads, each with a state of `[key_dim, value_dim]`.
    pub n_heads: usize,
    pub n_key_heads: usize,
    /// Neighbouring value heads that read one key head: all of its own, or one if those of a key head are spread.
    pub per_key: usize,
    /// The first value head's number, counted from the first that reads the rank's first key head.
    pub first: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// How many positions the convolution sees, its own the last.
    pub taps: usize,
    /// A row has a `b` for each value head: the delta rule's step.
    pub has_steps: bool,
}

impl RecurrentHeads {
    /// The rank's key head that its value head `head` reads.
    pub fn key_head_of(&self, head: usize) -> usize {
        (self.first + head) / self.per_key % self.n_key_heads
    }

    /// The columns of a projected row that the convolution sees: all heads of Q, then K, then V.
    pub fn n_channels(&self) -> usize {
        2 * self.n_key_heads * self.key_dim + self.n_heads * self.value_dim
    }

    /// The columns of a projected row: the channels, the output's gate `z` of each head, `b` where there are steps, and
    /// `a`, of which decays are made.
    pub fn n_cols(&self) -> usize {
        let n_gates = 1 + usize::from(self.has_steps);
        self.n_channels() + self.n_heads * (self.value_dim + n_gates)
    }

    /// What a page keeps.
    pub fn layout(&self) -> KvLayout {
        KvLayout::recurrence(self.n_heads as u32, self.key_dim as u32, self.value_dim as u32, self.taps as u32)
    }
}

/// The numbers that a recurrent layer has besides its matrices.
#[derive(Clone, Debug)]
pub struct RecurrentWeights<V> {
    /// [taps, n_channels], the tap of the row's own position the last
    pub conv: V,
    /// [n_channels]
    pub conv_bias: Option<V>,
    /// What a softplus is multiplied by to become the logarithm of a decay: -e^A_log. [n_heads]
    pub rate: V,
    /// Added to `a` before the softplus. [n_heads]
    pub rate_bias: V,
    pub rule: StateRule<V>,
}

/// How a row enters the state, and what comes out.
#[derive(Clone, Debug)]
pub enum StateRule<V> {
    /// The gated delta rule: Q and K are scaled to length one, a row's value is what the state does not yet answer to
    /// its key, times step_max * sigmoid(b). The output is normed over each head, times silu(z). norm: [value_dim]
    Delta { norm: V, eps: f32, step_max: f32 },
    /// Mamba-2: a row's value is its own times the softplus, which is kept within bounds. The output, with `skip` times
    /// the value, is multiplied by silu(z). `z` and `a` are multiplied before use. skip: [n_heads]
    StateSpace { skip: V, step_min: f32, step_max: f32, z_factor: f32, a_factor: f32 },
}

impl<V> StateRule<V> {
    /// What `a` is multiplied by before its bias is added.
    pub fn a_factor(&self) -> f32 {
        match self {
            StateRule::Delta { .. } => 1.0,
            StateRule::StateSpace { a_factor, .. } => *a_factor,
        }
    }
}

/// The arguments of one recurrent layer.
#[derive(Clone, Copy, Debug)]
pub struct RecurrenceCall<'a> {
    pub pass: &'a Pass<'a>,
    pub heads: &'a RecurrentHeads,
    /// The cache group whose tables are used.
    pub group: usize,
    pub layer: usize,
}

/// The channels of a short convolution on this rank, in runs that ranks do not divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolvedChannels {
    pub n: usize,
    pub width: usize,
    /// How many positions the convolution sees, its own the last.
    pub taps: usize,
}

impl ConvolvedChannels {
    pub fn n_channels(&self) -> usize {
        self.n * self.width
    }

    /// What a page keeps.
    pub fn layout(&self) -> KvLayout {
        KvLayout::convolution(self.n as u32, self.width as u32, self.taps as u32)
    }
}

/// The arguments of one short convolution.
#[derive(Clone, Copy, Debug)]
pub struct ConvolutionCall<'a> {
    pub pass: &'a Pass<'a>,
    pub channels: &'a ConvolvedChannels,
    /// The cache group whose tables are used.
    pub group: usize,
    pub layer: usize,
}

pub trait Recurrence: Memory {
    /// Refuses recurrent layers of a shape that this device has no kernel for, before anything is read.
    fn check_recurrence(&self, heads: &RecurrentHeads) -> Result<()>;
    /// The same for short convolutions.
    fn check_convolution(&self, channels: &ConvolvedChannels) -> Result<()>;
    /// Each row's output from the state at its block's start and the block's rows up to its own, which are written to
    /// the block's page, as is the state by the block's first row. In the middle of a slice a table may have
    /// `BlockId::NONE`: then what the page would have is carried along and not kept. The page of the position before
    /// the slice is there, and so is that of its last.
    /// x: [n_rows, n_cols], out: [n_rows, n_heads * value_dim]
    fn recur(
        &self,
        x: &Self::Buffer,
        weights: &RecurrentWeights<Self::Vector>,
        call: &RecurrenceCall<'_>,
        kv: &mut Self::Kv,
        out: &mut Self::Buffer,
    );
    /// out = c * convolution(b * x) of each channel, over pages as in `recur`.
    /// x: [n_rows, 3 * n_channels] (b, c, x), weight: [taps, n_channels], out: [n_rows, n_channels]
    fn convolve(
        &self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        call: &ConvolutionCall<'_>,
        kv: &mut Self::Kv,
        out: &mut Self::Buffer,
    );
}
