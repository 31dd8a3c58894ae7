//! How large a pass may be. Knows no layer.

/// The largest step: what the scratch memory is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassLimits {
    /// Rows of one pass.
    pub rows_max: usize,
    /// Rows of one pass whose logits are wanted.
    pub outputs_max: usize,
    /// Positions of one sequence.
    pub context: u32,
}
