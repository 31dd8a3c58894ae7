//! How long a step may take while sequences decode. Each of them gets its next token only when the step ends, so the
//! chunks of prompts get no more than the time that is left.

/// The most time of a step with sequences that decode: the larger of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPace {
    /// From one token of a sequence to its next. With several stages this is the time of as many steps.
    pub micros: u64,
    /// A multiple of the cost of a step in which all sequences decode.
    pub decode_costs: u64,
}

impl StepPace {
    /// So that a stream has 25 tokens a second, and prompts have half of the time or more.
    pub const DEFAULT: StepPace = StepPace { micros: 40_000, decode_costs: 2 };

    /// The same time for all models and machines.
    pub fn fixed(micros: u64) -> StepPace {
        StepPace { micros, decode_costs: 0 }
    }

    /// Returns the nanoseconds of a step, of which `steps_per_turn` give each sequence a token.
    pub(crate) fn nanos(self, decode_nanos: u64, steps_per_turn: u32) -> u64 {
        let of_step = self.micros.saturating_mul(1000) / u64::from(steps_per_turn.max(1));
        of_step.max(decode_nanos.saturating_mul(self.decode_costs))
    }
}
