//! Recurrent layers have no kernel on CUDA yet: a model with them is refused before anything of it is read.

use super::{Buffer, Cuda, Kv, Vector};
use crate::{ConvolutionCall, ConvolvedChannels, Recurrence, RecurrenceCall, RecurrentHeads, RecurrentWeights, Result};
use types::Unsupported;

pub(super) const NO_RECURRENCE: Unsupported = Unsupported("recurrent layers on CUDA");

impl Recurrence for Cuda {
    fn check_recurrence(&self, _heads: &RecurrentHeads) -> Result<()> {
        Err(NO_RECURRENCE.into())
    }

    fn check_convolution(&self, _channels: &ConvolvedChannels) -> Result<()> {
        Err(NO_RECURRENCE.into())
    }

    fn recur(
        &self,
        _x: &Buffer,
        _weights: &RecurrentWeights<Vector>,
        _call: &RecurrenceCall<'_>,
        _kv: &mut Kv,
        _out: &mut Buffer,
    ) {
        unreachable!("{NO_RECURRENCE}: `check_recurrence` and `Kv::new` reject them");
    }

    fn convolve(&self, _x: &Buffer, _weight: &Vector, _call: &ConvolutionCall<'_>, _kv: &mut Kv, _out: &mut Buffer) {
        unreachable!("{NO_RECURRENCE}: `check_convolution` and `Kv::new` reject them");
    }
}
