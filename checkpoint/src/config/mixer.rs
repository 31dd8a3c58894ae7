//! The operations that mix a layer's positions, their shapes, and the checks that a file's values must pass.

use super::parts::is_positive;
use crate::error::ParseError;
use types::{DeviceClass, KvLayout, Leaves};

/// The operation that mixes a layer's positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MixerSpec {
    /// Its shape is that of the model's attention.
    Attention,
    Recurrence(RecurrenceSpec),
    Convolution(ConvolutionSpec),
    /// Attention and a recurrence see the same rows, and their outputs are added.
    Both(RecurrenceSpec),
    /// None: the layer is an MLP.
    None,
}

/// A recurrence: heads whose state is `[key_dim, value_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrenceSpec {
    /// Value heads; each has a state.
    pub n_heads: u32,
    /// Several value heads read one key head; in Mamba-2, one group.
    pub n_key_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    /// How many positions the convolution sees, its own last.
    pub taps: u32,
    pub rule: RecurrenceRule,
    pub storage: RecurrenceStorage,
}

/// What differs between files of one recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrenceStorage {
    /// The value heads that read one key head are neighbours, and rates are logarithms.
    Folder,
    /// The same order, and rates are the negative numbers themselves.
    Gguf,
    /// The value heads that read one key head are as many heads apart as there are key heads. Rates as before.
    GgufTiled,
}

/// How a position enters the state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecurrenceRule {
    /// The gated delta rule. A step is a sigmoid times `step_max`; each head's output is normed, with an epsilon of its
    /// own or the model's.
    Delta { step_max: f32, eps: Option<f32> },
    /// Mamba-2.
    StateSpace(StateSpaceRule),
}

/// A short convolution: runs of channels that no rank divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolutionSpec {
    pub n: u32,
    pub width: u32,
    /// How many positions the convolution sees, its own last.
    pub taps: u32,
}

impl ConvolutionSpec {
    /// Returns the layout of the state that a layer keeps of earlier positions.
    pub fn layout(&self) -> KvLayout {
        KvLayout::convolution(self.n, self.width, self.taps)
    }

    fn check(&self) -> Result<(), ParseError> {
        match (1..=TAPS_MAX).contains(&self.taps) && self.n > 0 && (1..=DIM_MAX).contains(&self.width) {
            true => Ok(()),
            false => ParseError::malformed(format!(
                "cannot use convolutions of {} channels with {} taps",
                self.width, self.taps
            )),
        }
    }
}

/// The heads of layers with a state, which ranks divide like those of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateHeads {
    pub n: u32,
    /// The columns of each head before the output projection.
    pub dim: u32,
}

impl StateHeads {
    /// The leaves of the output projection's sum.
    pub fn leaves(&self, class: DeviceClass) -> Leaves {
        Leaves::o_proj(class, self.n, self.dim)
    }
}

const DIM_MAX: u32 = 4096;
const TAPS_MAX: u32 = 16;

impl MixerSpec {
    /// Whether queries read keys and values of earlier positions.
    pub fn has_attention(&self) -> bool {
        matches!(self, MixerSpec::Attention | MixerSpec::Both(_))
    }

    /// The shape of its recurrence.
    pub fn recurrence(&self) -> Option<&RecurrenceSpec> {
        match self {
            MixerSpec::Recurrence(of) | MixerSpec::Both(of) => Some(of),
            _ => None,
        }
    }

    /// The layout of its state.
    pub(super) fn state_layout(&self) -> Option<KvLayout> {
        match self {
            MixerSpec::Recurrence(of) | MixerSpec::Both(of) => Some(of.layout()),
            MixerSpec::Convolution(of) => Some(of.layout()),
            MixerSpec::Attention | MixerSpec::None => None,
        }
    }

    /// The heads of a mixer with a state.
    pub(super) fn state_heads(&self) -> Option<StateHeads> {
        match self {
            MixerSpec::Recurrence(of) | MixerSpec::Both(of) => Some(StateHeads { n: of.n_heads, dim: of.value_dim }),
            MixerSpec::Convolution(of) => Some(StateHeads { n: of.n, dim: of.width }),
            MixerSpec::Attention | MixerSpec::None => None,
        }
    }

    /// How many positions its convolution sees, its own last.
    pub(crate) fn taps(&self) -> u32 {
        match self {
            MixerSpec::Recurrence(of) | MixerSpec::Both(of) => of.taps,
            MixerSpec::Convolution(of) => of.taps,
            MixerSpec::Attention | MixerSpec::None => 0,
        }
    }

    pub(super) fn check(&self) -> Result<(), ParseError> {
        match self {
            MixerSpec::Recurrence(of) | MixerSpec::Both(of) => of.check(),
            MixerSpec::Convolution(of) => of.check(),
            MixerSpec::Attention | MixerSpec::None => Ok(()),
        }
    }
}

/// How Mamba-2 uses its projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpaceRule {
    /// Steps are clamped to these bounds.
    pub step_min: f32,
    pub step_max: f32,
    /// Outputs are normed over the heads of a key head together.
    pub has_norm: bool,
    pub factors: ProjectionFactors,
}

impl StateSpaceRule {
    /// Most models: outputs are normed, and nothing is multiplied.
    pub const fn normed([step_min, step_max]: [f32; 2]) -> StateSpaceRule {
        StateSpaceRule { step_min, step_max, has_norm: true, factors: ProjectionFactors::ONE }
    }
}

/// What the projections of Mamba-2 are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectionFactors {
    pub z: f32,
    pub v: f32,
    pub k: f32,
    pub q: f32,
    pub a: f32,
}

impl ProjectionFactors {
    pub const ONE: ProjectionFactors = ProjectionFactors { z: 1.0, v: 1.0, k: 1.0, q: 1.0, a: 1.0 };

    fn are_positive(&self) -> bool {
        let ProjectionFactors { z, v, k, q, a } = self;
        [z, v, k, q, a].into_iter().all(is_positive)
    }
}

impl RecurrenceRule {
    /// The delta rule of models that state no other bounds.
    pub const DELTA: RecurrenceRule = RecurrenceRule::Delta { step_max: 1.0, eps: None };

    /// Whether outputs are normed.
    pub fn has_norm(&self) -> bool {
        match self {
            RecurrenceRule::Delta { .. } => true,
            RecurrenceRule::StateSpace(rule) => rule.has_norm,
        }
    }

    /// What projections are multiplied by.
    pub fn factors(&self) -> ProjectionFactors {
        match self {
            RecurrenceRule::Delta { .. } => ProjectionFactors::ONE,
            RecurrenceRule::StateSpace(rule) => rule.factors,
        }
    }

    /// Whether each head has a projected number for its step.
    pub fn has_steps(&self) -> bool {
        matches!(self, RecurrenceRule::Delta { .. })
    }
}

impl RecurrenceSpec {
    /// Returns the layout of the state that a layer keeps of earlier positions.
    pub fn layout(&self) -> KvLayout {
        KvLayout::recurrence(self.n_heads, self.key_dim, self.value_dim, self.taps)
    }

    /// Returns the channels of its convolution: Q, K and V.
    pub fn n_channels(&self) -> u32 {
        2 * self.n_key_heads * self.key_dim + self.n_heads * self.value_dim
    }

    /// Returns the columns of its projections: the channels, the output's gate, and one or two numbers for each head.
    pub fn n_cols(&self) -> u32 {
        let n_gates = if self.rule.has_steps() { 2 } else { 1 };
        self.n_channels() + self.n_heads * (self.value_dim + n_gates)
    }

    fn check(&self) -> Result<(), ParseError> {
        let RecurrenceSpec { n_heads, n_key_heads, key_dim, value_dim, taps, rule, .. } = *self;
        let dims = [n_heads, n_key_heads, key_dim, value_dim];
        if dims.iter().any(|dim| !(1..=DIM_MAX).contains(dim)) || !(1..=TAPS_MAX).contains(&taps) {
            return ParseError::malformed(format!("cannot use recurrent layers of {dims:?} with {taps} taps"));
        }
        if !n_heads.is_multiple_of(n_key_heads) {
            return ParseError::malformed(format!("{n_heads} recurrent heads cannot share {n_key_heads} keys evenly"));
        }
        match rule {
            RecurrenceRule::StateSpace(StateSpaceRule { factors, .. }) if !factors.are_positive() => {
                ParseError::malformed(format!("the multipliers are invalid: {factors:?}"))
            }
            RecurrenceRule::StateSpace(StateSpaceRule { step_min, step_max, .. })
                if !(step_min >= 0.0
                    && (step_max == f32::INFINITY || is_positive(&step_max))
                    && step_min < step_max) =>
            {
                ParseError::malformed(format!("the limits are invalid: steps between {step_min} and {step_max}"))
            }
            RecurrenceRule::Delta { step_max, eps }
                if !is_positive(&step_max) || !eps.as_ref().is_none_or(is_positive) =>
            {
                ParseError::malformed(format!("the delta rule is invalid: steps up to {step_max}, {eps:?}"))
            }
            _ => Ok(()),
        }
    }
}
