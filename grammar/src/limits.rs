//! How large a grammar may be and how much work it may cause. Knows nothing of time: each is a count, so that a
//! grammar is refused on every machine or on none.

use crate::refused::GrammarRefused;

/// Everything that bounds a grammar, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrammarLimits {
    /// Bytes of what the client sent, and of the text that is made of it.
    pub bytes_max: usize,
    /// How deeply schemas, brackets and groups may lie in each other.
    pub depth_max: usize,
    /// Schemas, rules and alternatives after references were followed and combinations were written out.
    pub nodes_max: usize,
    /// The largest count of a repetition: `minItems`, `maxLength`, `{n,m}`.
    pub repeat_max: usize,
    /// Work units for the automata of a grammar when it is compiled.
    pub compile_fuel: u64,
    /// Symbols of the compiled grammar.
    pub symbols_max: usize,
    /// States of the lexer over the life of one matcher.
    pub lexer_states_max: usize,
    /// Work units of the lexer for one mask.
    pub mask_fuel: u64,
    /// Parser items for one mask.
    pub mask_items_max: usize,
}

impl GrammarLimits {
    /// Refuses a text of more bytes than a grammar may have.
    pub fn check_bytes(&self, n_bytes: usize) -> Result<(), GrammarRefused> {
        match n_bytes > self.bytes_max {
            true => Err(GrammarRefused::too_large(format!("a grammar of {n_bytes} bytes"), self.bytes_max)),
            false => Ok(()),
        }
    }
}

impl Default for GrammarLimits {
    fn default() -> GrammarLimits {
        GrammarLimits {
            bytes_max: 1 << 20,
            depth_max: 64,
            nodes_max: 20_000,
            repeat_max: 10_000,
            compile_fuel: 2_000_000,
            symbols_max: 500_000,
            lexer_states_max: 250_000,
            mask_fuel: 2_000_000,
            mask_items_max: 200_000,
        }
    }
}
