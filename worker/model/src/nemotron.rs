//! Nemotron-H: each layer is one sublayer behind one norm, which is a recurrence, attention without positions, an MLP
//! or a mixture of experts. MLPs have no gate: what is positive is squared.

use crate::decoder::{BlockNorms, DecoderVariant, Norms};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const FORM: DecoderVariant = DecoderVariant {
    activation: Activation::SquaredRelu,
    norms: BlockNorms::Alone(Norms::Before("norm")),
    norm_kind: NormKind::Rms,
    learns_positions: false,
};
