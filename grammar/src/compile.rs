//! Compiles a constraint to a checked description. Pure: no vocabulary, no clock, and nothing is fetched.

use crate::ebnf::EbnfNotation;
use crate::relax::RelaxedTag;
use crate::rules::{GrammarRules, RuleIdx};
use crate::specials::SpecialTexts;
use crate::words::{RegexNode, TextSet, whole_match};
use crate::{GrammarLimits, GrammarRefused, GrammarSpec, ebnf, engine, schema, specials, tags};
use serde_json::json;
use types::Grammar;

/// The number of rounds that each remove something from schemas that need not hold in full. Then only their types stay.
const ROUNDS_MAX: usize = 64;

/// Returns the checked description of a constraint: it compiles within the limits, and everything in it is enforced.
pub fn compile(spec: &GrammarSpec, limits: &GrammarLimits) -> Result<Grammar, GrammarRefused> {
    let relaxed = match spec {
        GrammarSpec::StructuralTag(tag) => RelaxedTag::of(tag, limits),
        _ => None,
    };
    relaxed.map_or_else(|| compile_whole(spec, limits), |relaxed| compile_relaxed(relaxed, limits))
}

fn compile_relaxed(mut relaxed: RelaxedTag, limits: &GrammarLimits) -> Result<Grammar, GrammarRefused> {
    for _ in 0..ROUNDS_MAX {
        match compile_whole(&GrammarSpec::StructuralTag(relaxed.tag.clone()), limits) {
            Err(refused) if relaxed.remove_refused(&refused) => {}
            compiled => return compiled,
        }
    }
    relaxed.reduce_to_types();
    compile_whole(&GrammarSpec::StructuralTag(relaxed.tag), limits)
}

fn compile_whole(spec: &GrammarSpec, limits: &GrammarLimits) -> Result<Grammar, GrammarRefused> {
    let mut specials = SpecialTexts::default();
    let rules = lark_rules(spec, &mut specials, limits)?;
    let text = specials.describe(&rules);
    limits.check_bytes(text.len())?;
    let lark = specials::resolve(&text, None).ok_or_else(|| GrammarRefused::invalid("grammar", "it has no rules"))?;
    engine::check(&lark, limits)?;
    Ok(Grammar::new(text))
}

fn lark_rules(
    spec: &GrammarSpec,
    specials: &mut SpecialTexts,
    limits: &GrammarLimits,
) -> Result<String, GrammarRefused> {
    let mut rules = GrammarRules::default();
    let start = match spec {
        GrammarSpec::JsonObject => schema::write(&json!({"type": "object"}), &mut rules, limits)?,
        GrammarSpec::JsonSchema(schema) => schema::write(schema, &mut rules, limits)?,
        GrammarSpec::StructuralTag(value) => tags::write(value, &mut rules, specials, limits)?,
        GrammarSpec::Ebnf(text) => ebnf::write(text, EbnfNotation::Ebnf, &mut rules, limits)?,
        GrammarSpec::Gbnf(text) => ebnf::write(text, EbnfNotation::Gbnf, &mut rules, limits)?,
        GrammarSpec::Regex(regex) => {
            let pattern = RegexNode::read(regex, limits.depth_max, limits.repeat_max);
            let words = pattern
                .and_then(|pattern| whole_match(&pattern))
                .map_err(|why| GrammarRefused::invalid("regex", why))?;
            one_of(&mut rules, words)
        }
        GrammarSpec::Choice(texts) => {
            let texts = texts.iter().map(|text| TextSet::Text(text.clone())).collect::<Vec<_>>();
            if texts.is_empty() {
                return Err(GrammarRefused::unsatisfiable("choice", "it is empty"));
            }
            one_of(&mut rules, TextSet::Any(texts))
        }
        GrammarSpec::Lark(text) => return user_lark(text, limits),
    };
    let mut text = format!("start: r{start}\n");
    let unsatisfiable = || GrammarRefused::unsatisfiable("", "its parts exclude every text");
    rules.write(start, "r", &mut text).ok_or_else(unsatisfiable)?;
    Ok(text)
}

fn one_of(rules: &mut GrammarRules, words: TextSet) -> RuleIdx {
    let words = rules.words(&words);
    rules.add(vec![vec![words]])
}

/// Returns Lark text unchanged if it cannot be deeper than the engine's stack. Constructs beside rules are limited to
/// those that this crate also enforces: the engine's own JSON schemas ignore some keywords.
fn user_lark(text: &str, limits: &GrammarLimits) -> Result<String, GrammarRefused> {
    let mut depth = 0usize;
    for (i, line) in text.lines().enumerate() {
        for word in ["%json", "%lark", "%llguidance"] {
            if line.split("//").next().is_some_and(|code| code.contains(word)) {
                return Err(GrammarRefused::unsupported(format!("line {}", i + 1), word));
            }
        }
        for c in line.chars() {
            depth = if "([{~".contains(c) { depth + 1 } else { depth.saturating_sub(usize::from(")]}".contains(c))) };
            if depth > limits.depth_max * 4 {
                return Err(GrammarRefused::too_large("the depth of groups", limits.depth_max * 4));
            }
        }
    }
    Ok(text.to_owned())
}
