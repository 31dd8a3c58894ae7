//! Compiles each grammar once for all requests with the same one: on the threads for long texts. The latest grammars
//! are kept. Identifies a grammar only by its hash.

use crate::front::certificate::GrammarHash;
use crate::front::structure::FIELD;
use crate::front::text_work::TextWork;
use crate::refusal::Refusal;
use crate::replicas::models::talk::{AnswerParseContext, PARAMETERS};
use crate::replicas::models::text::ModelText;
use dialect::{Tool, ToolChoice};
use grammar::{GrammarLimits, GrammarRefused, GrammarSpec};
use serde_json::json;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use types::Grammar;

/// The cost of a kept grammar beside its text, in bytes.
const ENTRY_BYTES: usize = 256;

/// Compiled grammars by a hash of the request for them. The oldest are removed first.
pub struct Grammars {
    limits: GrammarLimits,
    cache: Mutex<GrammarCache>,
    bytes_max: usize,
}

#[derive(Default)]
struct GrammarCache {
    grammars: HashMap<GrammarKey, Result<Grammar, GrammarRefused>>,
    order: VecDeque<GrammarKey>,
    n_bytes: usize,
}

type GrammarKey = [u8; 32];

impl Grammars {
    pub fn new(limits: GrammarLimits, bytes_max: usize) -> Grammars {
        Grammars { limits, cache: Mutex::default(), bytes_max }
    }

    /// Returns the grammar for an answer to this chat. It is compiled once: off the runtime, because a short text can
    /// mean much work.
    pub(super) async fn grammar(
        self: &Arc<Self>,
        spec: GrammarSpec,
        talk: Option<&AnswerParseContext>,
        texts: &TextWork,
    ) -> Result<Grammar, Refusal> {
        let (key, grammars) = (key(&spec), self.clone());
        let compiled = match self.cached(&key) {
            Some(kept) => kept,
            None => texts.on_thread(move || grammars.compile(key, &spec)).await?,
        };
        match (compiled, talk) {
            (Ok(grammar), _) => Ok(grammar),
            (Err(refused), Some(talk)) if !talk.tools.is_empty() => {
                let (grammars, talk) = (self.clone(), talk.clone());
                Err(texts.on_thread(move || grammars.refusal_with_tools(&talk, &refused)).await?)
            }
            (Err(refused), _) => Err(refusal(&refused)),
        }
    }

    fn cached(&self, key: &GrammarKey) -> Option<Result<Grammar, GrammarRefused>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).grammars.get(key).cloned()
    }

    fn compile(&self, key: GrammarKey, spec: &GrammarSpec) -> Result<Grammar, GrammarRefused> {
        let compiled = grammar::compile(spec, &self.limits);
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).keep(key, &compiled, self.bytes_max);
        compiled
    }

    /// Returns the refusal of a grammar that contains tools' parameters: it names the parameters that are refused by
    /// themselves.
    fn refusal_with_tools(&self, talk: &AnswerParseContext, refused: &GrammarRefused) -> Refusal {
        let of_tool = |(i, tool): (usize, &Tool)| {
            let schema = json!({ "type": "json_schema", "json_schema": tool.parameters, "strict": tool.strict });
            let tag = GrammarSpec::StructuralTag(json!({ "format": schema }));
            let why = grammar::compile(&tag, &self.limits).err()?.to_string();
            let why = why.strip_prefix("/format/json_schema").unwrap_or(&why).to_owned();
            Some(Refusal::Invalid { field: format!("tools[{i}].{PARAMETERS}").into(), message: why })
        };
        let is_forced = matches!(talk.choice, ToolChoice::Required | ToolChoice::Named(_));
        let whole = || if is_forced { Refusal::invalid("tools", refused.to_string()) } else { refusal(refused) };
        let described = talk.tools.iter().enumerate().filter(|(_, tool)| tool.parameters.is_object());
        let mut refused_tools = described.filter_map(of_tool);
        refused_tools.next().unwrap_or_else(whole)
    }
}

impl GrammarCache {
    fn keep(&mut self, key: GrammarKey, compiled: &Result<Grammar, GrammarRefused>, bytes_max: usize) {
        if self.grammars.insert(key, compiled.clone()).is_some() {
            // Two requests that came together have compiled the same grammar.
            return;
        }
        self.order.push_back(key);
        self.n_bytes += n_bytes(compiled);
        while self.n_bytes > bytes_max
            && let Some(first) = self.order.pop_front()
        {
            self.n_bytes -= self.grammars.remove(&first).map_or(0, |gone| n_bytes(&gone));
        }
    }
}

fn n_bytes(compiled: &Result<Grammar, GrammarRefused>) -> usize {
    ENTRY_BYTES + compiled.as_ref().map_or_else(|refused| refused.to_string().len(), Grammar::n_bytes)
}

/// Returns a hash of the requested grammar. Two kinds with the same text differ.
fn key(spec: &GrammarSpec) -> GrammarKey {
    let (kind, texts): (u8, Vec<String>) = match spec {
        GrammarSpec::JsonObject => (0, Vec::new()),
        GrammarSpec::JsonSchema(schema) => (1, vec![schema.to_string()]),
        GrammarSpec::Regex(text) => (2, vec![text.clone()]),
        GrammarSpec::Choice(texts) => (3, texts.clone()),
        GrammarSpec::Lark(text) => (4, vec![text.clone()]),
        GrammarSpec::Ebnf(text) => (5, vec![text.clone()]),
        GrammarSpec::Gbnf(text) => (6, vec![text.clone()]),
        GrammarSpec::StructuralTag(tag) => (7, vec![tag.to_string()]),
    };
    let mut hasher = blake3::Hasher::new();
    hasher.update(&[kind]);
    for text in texts {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Returns a hash of what the answers' masks come from, for certificates and handles.
pub(super) async fn grammar_hash(
    texts: &TextWork,
    of: &Arc<ModelText>,
    grammar: &Grammar,
) -> Result<GrammarHash, Refusal> {
    let tokens = match of.known_tokens_hash() {
        Some(hash) => hash,
        None => {
            let of = of.clone();
            texts.on_thread(move || of.hash_of_tokens()).await?
        }
    };
    Ok(grammar::digest(grammar, &tokens))
}

pub(super) fn refusal(refused: &GrammarRefused) -> Refusal {
    Refusal::invalid(FIELD, refused.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_grammar_is_evicted_and_duplicates_count_once() {
        let mut kept = GrammarCache::default();
        let grammar = |n: usize| Ok(Grammar::new("x".repeat(n)));
        let room = 2 * ENTRY_BYTES + 100;
        kept.keep([1; 32], &grammar(40), room);
        kept.keep([1; 32], &grammar(40), room);
        kept.keep([2; 32], &grammar(60), room);
        assert_eq!((kept.grammars.len(), kept.n_bytes), (2, room));
        kept.keep([3; 32], &grammar(1), room);
        let has = |n: u8| kept.grammars.contains_key(&[n; 32]);
        assert_eq!(([1, 2, 3].map(has), kept.n_bytes), ([false, true, true], room - 39));
        // A grammar that is larger than all room is not kept.
        kept.keep([4; 32], &grammar(room), room);
        assert_eq!((kept.grammars.len(), kept.n_bytes), (0, 0));
    }

    #[test]
    fn different_grammars_have_different_keys() {
        let specs = [
            GrammarSpec::JsonObject,
            GrammarSpec::Regex("a".into()),
            GrammarSpec::Lark("a".into()),
            GrammarSpec::Choice(vec!["ab".into(), "c".into()]),
            GrammarSpec::Choice(vec!["a".into(), "bc".into()]),
        ];
        for (i, one) in specs.iter().enumerate() {
            assert!(specs[i + 1..].iter().all(|other| key(one) != key(other)));
        }
    }
}
