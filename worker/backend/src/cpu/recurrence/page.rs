//! The parts of a head's page. `KvLayout::recurrence` counts them.

use crate::cpu::lanes::LANES;
use crate::{ConvolvedChannels, Error, RecurrentHeads, Result};
use types::BLOCK_TOKENS;

pub const POSITIONS: usize = BLOCK_TOKENS as usize;
/// The widest key or value.
pub const DIM_MAX: usize = 256;

/// Refuses shapes that no kernel here is for.
pub fn check_heads(heads: &RecurrentHeads) -> Result<()> {
    let fits = |dim: usize| (1..=DIM_MAX).contains(&dim) && dim.is_multiple_of(LANES);
    match fits(heads.key_dim) && fits(heads.value_dim) && (1..=POSITIONS).contains(&heads.taps) {
        true => Ok(()),
        false => Err(Error::Shape(format!(
            "a recurrent head of {} by {} with {} taps (multiples of {LANES} up to {DIM_MAX}, taps up to {POSITIONS})",
            heads.key_dim, heads.value_dim, heads.taps
        ))),
    }
}

/// Refuses convolutions that reach over a whole block.
pub fn check_channels(channels: &ConvolvedChannels) -> Result<()> {
    match (1..=POSITIONS).contains(&channels.taps) && channels.width > 0 {
        true => Ok(()),
        false => Err(Error::Shape(format!("a convolution of {} taps (up to {POSITIONS})", channels.taps))),
    }
}

/// The widths of a head.
#[derive(Clone, Copy)]
pub struct HeadWidths {
    pub key: usize,
    pub value: usize,
    pub taps: usize,
}

pub struct StatePage<'a> {
    pub shape: HeadWidths,
    /// At the block's start. [key, value]
    pub state: &'a mut [f32],
    /// What the convolution sees: of the positions before the block, and of the block's. [taps - 1 + 16, channels]
    pub inputs: &'a mut [f32],
    /// [16, key]
    pub keys: &'a mut [f32],
    /// What each row adds to the state under its key. [16, value]
    pub values: &'a mut [f32],
    /// The logarithm of the decay from the block's start to each row.
    pub decays: &'a mut [f32; POSITIONS],
}

impl HeadWidths {
    pub fn of(heads: &RecurrentHeads) -> HeadWidths {
        HeadWidths { key: heads.key_dim, value: heads.value_dim, taps: heads.taps }
    }

    /// Channels of Q, K and V.
    pub fn channels(&self) -> usize {
        2 * self.key + self.value
    }

    /// Inputs of the positions before a block.
    pub fn n_before(&self) -> usize {
        (self.taps - 1) * self.channels()
    }

    fn parts(&self) -> [usize; 4] {
        let inputs = self.n_before() + POSITIONS * self.channels();
        [self.key * self.value, inputs, POSITIONS * self.key, POSITIONS * self.value]
    }

    pub fn n_numbers(&self) -> usize {
        self.parts().iter().sum::<usize>() + POSITIONS
    }
}

impl<'a> StatePage<'a> {
    #[inline(always)]
    pub fn of(shape: HeadWidths, numbers: &'a mut [f32]) -> StatePage<'a> {
        let [state, inputs, keys, values] = shape.parts();
        let (state, rest) = numbers.split_at_mut(state);
        let (inputs, rest) = rest.split_at_mut(inputs);
        let (keys, rest) = rest.split_at_mut(keys);
        let (values, rest) = rest.split_at_mut(values);
        let decays = rest.first_chunk_mut().expect("a page has a decay for each position");
        StatePage { shape, state, inputs, keys, values, decays }
    }

    /// The page of a sequence's first block: nothing is before it.
    pub fn begin_sequence(&mut self) {
        self.state.fill(0.0);
        self.inputs[..self.shape.n_before()].fill(0.0);
    }
}
