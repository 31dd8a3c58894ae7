//! Rules that are known before they are defined, so that definitions may refer to each other. Each set of claims is a
//! rule, made once.

use super::document::SchemaDocument;
use super::facts::SchemaClaim;
use crate::rules::{GrammarRules, RuleIdx};
use std::collections::HashMap;
use std::hash::Hash;

/// One rule for each key, and the keys whose rules are not yet defined.
pub(super) struct RuleQueue<K> {
    known: HashMap<K, RuleIdx>,
    waiting: Vec<(RuleIdx, K)>,
}

impl<K: Clone + Eq + Hash> RuleQueue<K> {
    pub(super) fn new() -> RuleQueue<K> {
        RuleQueue { known: HashMap::new(), waiting: Vec::new() }
    }

    /// The rule of a key. A new one waits for its definition.
    pub(super) fn rule_of(&mut self, key: K, grammar: &mut GrammarRules) -> RuleIdx {
        if let Some(rule) = self.known.get(&key) {
            return *rule;
        }
        let rule = grammar.reserve();
        self.known.insert(key.clone(), rule);
        self.waiting.push((rule, key));
        rule
    }

    /// Takes the next rule to define.
    pub(super) fn pop(&mut self) -> Option<(RuleIdx, K)> {
        self.waiting.pop()
    }
}

/// The rules of one document, by the claims that their values satisfy.
pub(super) struct ClaimRules<'d> {
    pub(super) grammar: &'d mut GrammarRules,
    document: &'d SchemaDocument<'d>,
    queue: RuleQueue<Vec<SchemaClaim>>,
}

impl<'d> ClaimRules<'d> {
    pub(super) fn new(document: &'d SchemaDocument<'d>, grammar: &'d mut GrammarRules) -> ClaimRules<'d> {
        ClaimRules { grammar, document, queue: RuleQueue::new() }
    }

    /// The rule for values of which all claims hold.
    pub(super) fn rule_of(&mut self, claims: Vec<SchemaClaim>) -> RuleIdx {
        self.queue.rule_of(self.document.simplified(claims), self.grammar)
    }

    /// Takes the next rule to define.
    pub(super) fn pop(&mut self) -> Option<(RuleIdx, Vec<SchemaClaim>)> {
        self.queue.pop()
    }
}
