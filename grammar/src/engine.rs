//! Wraps the grammar engine: its limits, its panics and its stack. Knows nothing of the grammars that it compiles.

use crate::{GrammarLimits, GrammarRefused};
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use std::panic::{AssertUnwindSafe, catch_unwind};
use types::Grammar;

/// Part of digests: everything that may change a mask besides the grammar and the vocabulary.
pub const ENGINE: &str = "llguidance 1.9.1, lockstep 1";

/// The masks of a grammar depend on this digest and the answer's tokens only. It covers the description, the vocabulary
/// with this hash, and the engine.
pub fn digest(grammar: &Grammar, vocabulary: &[u8; 32]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 grammar digest");
    for part in [ENGINE.as_bytes(), vocabulary, grammar.as_str().as_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    *hasher.finalize().as_bytes()
}

/// Recursion in the engine is as deep as `GrammarLimits::depth_max` allows; this holds it with room to spare.
const STACK_BYTES: usize = 64 << 20;

pub(crate) fn parser_limits(limits: &GrammarLimits) -> ParserLimits {
    ParserLimits {
        max_items_in_row: 20_000,
        initial_lexer_fuel: limits.compile_fuel,
        step_lexer_fuel: limits.mask_fuel,
        step_max_items: limits.mask_items_max,
        max_lexer_states: limits.lexer_states_max,
        max_grammar_size: limits.symbols_max,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// Compiles the description without a vocabulary and drops the result, only to check that it compiles.
pub(crate) fn check(lark: &str, limits: &GrammarLimits) -> Result<(), GrammarRefused> {
    let limits = parser_limits(limits);
    let done = on_a_deep_stack(|| {
        let init = GrammarInit::Serialized(TopLevelGrammar::from_lark(lark.to_owned()));
        let mut logger = llguidance::Logger::new(0, 0);
        init.to_cgrammar(None, &mut logger, limits, Vec::new()).map(|_| ()).map_err(|e| e.to_string())
    });
    done.and_then(|done| done).map_err(|why| GrammarRefused::invalid("grammar", first_line(&why)))
}

/// Runs the engine and turns its panics into errors. Each call passes all input anew, so that a panic leaves no broken
/// state behind.
pub(crate) fn catch_panics<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_panic| "the grammar engine panicked".to_owned())
}

/// Does the same on a stack of known size. The thread ends before this returns.
pub(crate) fn on_a_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, || catch_panics(work));
        let thread = thread.map_err(|e| format!("no thread to compile on: {e}"))?;
        thread.join().unwrap_or_else(|_panic| Err("the grammar engine panicked".to_owned()))
    })
}

/// Returns the first line of an engine message, as listings and backtraces follow it.
pub(crate) fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(300).collect()
}
