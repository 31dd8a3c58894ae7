//! The form of a decoder: its norms, its activation, its positions. Knows no weights.

use super::mixer::MixerSpec;

/// How a family's decoder differs from others.
#[derive(Clone, Copy, Debug)]
pub struct DecoderForm {
    pub activation: Activation,
    /// The norms of a layer, by their names.
    pub norms: BlockNorms<&'static str>,
    /// Those of recurrent layers, if they differ.
    pub recurrent_norms: Option<BlockNorms<&'static str>>,
    pub norm_kind: NormKind,
    /// Learned positions are added to the embedding.
    pub learns_positions: bool,
    /// The embedding is normed before the first layer.
    pub norms_embedding: bool,
    /// The stream is normed behind the last layer.
    pub norms_output: bool,
    /// The stream is multiplied by a stored number behind each layer.
    pub scales_layers: bool,
}

impl DecoderForm {
    /// The norms of a layer with this mixer.
    pub fn norms_of(&self, mixer: &MixerSpec) -> BlockNorms<&'static str> {
        match mixer {
            MixerSpec::Recurrence(_) => self.recurrent_norms.unwrap_or(self.norms),
            _ => self.norms,
        }
    }

    /// Whether every sublayer's output goes straight to the stream.
    pub fn has_all_norms_before(&self) -> bool {
        [Some(self.norms), self.recurrent_norms].iter().flatten().all(BlockNorms::are_all_before)
    }
}

/// The activation between an MLP's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// silu(gate) * up
    Silu,
    /// gelu(gate) * up
    Gelu,
    /// gelu(gate) * up, with the error function
    GeluErf,
    /// gelu(up), without a gate
    PlainGelu,
    /// The same with the error function
    PlainGeluErf,
    /// The square of what is positive in up, without a gate
    SquaredRelu,
}

impl Activation {
    pub fn has_gate(self) -> bool {
        matches!(self, Activation::Silu | Activation::Gelu | Activation::GeluErf)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    Rms,
    /// With a bias where the checkpoint has one.
    Layer,
}

/// Where a block's norms are: their names, or they themselves.
#[derive(Clone, Copy, Debug)]
pub enum BlockNorms<N> {
    /// The MLP sees the stream with what attention has added.
    InTurn { attention: Norms<N>, mlp: Norms<N> },
    /// Both see the stream as it was before the block. Without a norm of its own the MLP's input is attention's.
    SideBySide { attention: N, mlp: Option<N> },
    /// There is only one: a block is attention, what stands for it, or an MLP.
    Alone(Norms<N>),
}

/// The norms of one sublayer. A norm behind it applies to its output, before that is added to the stream.
#[derive(Clone, Copy, Debug)]
pub enum Norms<N> {
    Before(N),
    Behind(N),
    Around {
        before: N,
        behind: N,
    },
    /// The norm of the stream, after the output has been added, takes the stream's place.
    OfSum(N),
    None,
}

impl<N> Norms<N> {
    fn is_before(&self) -> bool {
        matches!(self, Norms::Before(_))
    }

    pub fn map<T, E>(&self, of: impl Fn(&N) -> Result<T, E>) -> Result<Norms<T>, E> {
        Ok(match self {
            Norms::Before(norm) => Norms::Before(of(norm)?),
            Norms::Behind(norm) => Norms::Behind(of(norm)?),
            Norms::Around { before, behind } => Norms::Around { before: of(before)?, behind: of(behind)? },
            Norms::OfSum(norm) => Norms::OfSum(of(norm)?),
            Norms::None => Norms::None,
        })
    }
}

impl<N> BlockNorms<N> {
    pub fn map<T, E>(&self, of: impl Fn(&N) -> Result<T, E>) -> Result<BlockNorms<T>, E> {
        Ok(match self {
            BlockNorms::InTurn { attention, mlp } => {
                BlockNorms::InTurn { attention: attention.map(&of)?, mlp: mlp.map(&of)? }
            }
            BlockNorms::SideBySide { attention, mlp } => {
                BlockNorms::SideBySide { attention: of(attention)?, mlp: mlp.as_ref().map(of).transpose()? }
            }
            BlockNorms::Alone(norms) => BlockNorms::Alone(norms.map(&of)?),
        })
    }

    /// Whether a sublayer's output goes straight to the stream, everywhere.
    pub fn are_all_before(&self) -> bool {
        match self {
            BlockNorms::InTurn { attention, mlp } => [attention, mlp].iter().all(|of| of.is_before()),
            BlockNorms::SideBySide { .. } => false,
            BlockNorms::Alone(norms) => norms.is_before(),
        }
    }

    /// The same norms, but attention reads the stream as it is.
    #[must_use]
    pub fn without_first(self) -> BlockNorms<N> {
        match self {
            BlockNorms::InTurn { mlp, .. } => BlockNorms::InTurn { attention: Norms::None, mlp },
            other => other,
        }
    }
}
