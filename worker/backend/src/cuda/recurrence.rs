//! Recurrent layers have no kernel on CUDA yet: a model with them is refused before anything of it is read.

use super::{Buffer, Cuda, Kv, Vector};
use crate::{ConvolutionCall, Recurrence, RecurrenceCall, RecurrentWeights};
use types::Unsupported;

pub(super) const NO_RECURRENCE: Unsupported = Unsupported("recurrent layers on CUDA");

impl Recurrence for Cuda {
    fn recur(
        &self,
        _x: &Buffer,
        _weights: &RecurrentWeights<Vector>,
        _call: &RecurrenceCall<'_>,
        _kv: &mut Kv,
        _out: &mut Buffer,
    ) {
        unreachable!("{NO_RECURRENCE}: `Memory::recurrence` and `Memory::kv` reject them");
    }

    fn convolve(&self, _x: &Buffer, _weight: &Vector, _call: &ConvolutionCall<'_>, _kv: &mut Kv, _out: &mut Buffer) {
        unreachable!("{NO_RECURRENCE}: `Memory::convolution` and `Memory::kv` reject them");
    }
}
