//! How large a pass may be. Knows no layer.

/// The largest step, for which scratch memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassLimits {
    /// Rows of one pass.
    pub rows_max: usize,
    /// The most rows of one pass whose logits are requested.
    pub outputs_max: usize,
    /// Positions of one sequence.
    pub context: u32,
}
