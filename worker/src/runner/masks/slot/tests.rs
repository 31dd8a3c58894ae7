//! Tests a slot step by step, without threads, against matchers that have accepted the same tokens and nothing else.

use super::*;
use grammar::{GrammarLimits, GrammarSpec, ThinkingBudget, TokenMask, compile};
use serde_json::json;
use std::path::Path;

const N_VOCAB: u32 = 288;
const N_GUESS_MAX: usize = 4;

#[test]
fn stuck_matcher_names_its_cause() {
    let cases = [
        (MatcherError::TooComplex("items".into()), Failure::Grammar(GrammarFault::TooComplex)),
        (MatcherError::Token(5), Failure::Grammar(GrammarFault::Broken)),
        (MatcherError::Grammar("no rules".into()), Failure::Grammar(GrammarFault::Broken)),
        (MatcherError::NoToken, Failure::NoToken),
    ];
    for (stuck, expected) in cases {
        assert_eq!(failure(&stuck), expected, "{stuck}");
    }
}

fn vocabulary() -> LazyVocabulary {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/llama-f16-sharded");
    LazyVocabulary::new(&model, N_VOCAB, &[2])
}

/// The vocabulary begins with the printable characters.
fn letters(text: &str) -> Vec<Token> {
    text.bytes().map(|byte| Token::from(byte - b'!')).collect()
}

fn regex(pattern: &str) -> Grammar {
    compile(&GrammarSpec::Regex(pattern.to_owned()), &GrammarLimits::default()).unwrap()
}

/// Returns the mask of a fresh matcher behind these tokens; None if the grammar does not allow them.
fn fresh(vocabulary: &LazyVocabulary, grammar: &Grammar, tokens: &[Token]) -> Option<Vec<u32>> {
    let (mut matcher, mut mask) = (vocabulary.matcher(grammar).unwrap(), TokenMask::default());
    tokens.iter().try_for_each(|token| matcher.accept(*token)).ok()?;
    if matcher.is_ended() {
        return None;
    }
    matcher.fill_mask(&mut mask).unwrap();
    Some(mask.words().to_vec())
}

fn take(slot: &MaskSlot, n_output: usize) -> MaskSeries {
    let mut run = MaskSeries::default();
    assert_eq!(slot.take(n_output as u32, Instant::now(), &mut run), MaskOutcome::Mask);
    run
}

#[test]
fn what_can_only_be_one_text_is_known_as_far_as_its_tokens_are_drawn() {
    let (vocabulary, slot) = (vocabulary(), MaskSlot::new(regex("qzx(d|e)f"), &[], N_GUESS_MAX));
    let way = |output: &str| {
        let mut way = Vec::new();
        slot.add_forced_tokens(&letters(output), &mut way);
        way
    };
    slot.make_masks(&vocabulary);
    let known = ["", "q", "qz", "qzx", "w", "qzxd"].map(way);
    assert_eq!(known, [letters("qzx"), letters("zx"), letters("x"), vec![], vec![], vec![]]);
    slot.push(letters("qzxd").into_iter());
    slot.make_masks(&vocabulary);
    assert_eq!([way("qzxd"), way("qzx")], [letters("f"), vec![]]);
}

#[test]
fn masks_that_were_made_along_the_only_way_are_those_of_its_drafts() {
    let (vocabulary, slot) = (vocabulary(), MaskSlot::new(regex("qzx(d|e)f"), &[], N_GUESS_MAX));
    slot.make_masks(&vocabulary);
    slot.set_drafts(0, &letters("qz"));
    assert_eq!(slot.claim_work(), None, "all masks are ready");
    let run = take(&slot, 0);
    assert!(run.mask_after(2).is_some() && run.mask_after(3).is_none(), "two drafts");
    slot.push(letters("q").into_iter());
    slot.set_drafts(1, &letters("y"));
    assert_eq!(slot.claim_work(), Some(SlotWork::GoesOn));
    slot.make_masks(&vocabulary);
    let run = take(&slot, 1);
    assert!(run.mask_after(0).is_some() && run.mask_after(1).is_none(), "no mask after a forbidden draft");
}

fn grammars() -> Vec<Grammar> {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let closes = vec!["zq".to_owned()];
    let budget = ThinkingBudget { tokens_max: 7, is_open: true, closes, ..ThinkingBudget::default() };
    let schema = compile(&GrammarSpec::JsonSchema(schema), &GrammarLimits::default()).unwrap();
    let behind = regex("[^]*zq(yes|no, never)");
    vec![
        schema,
        regex("([a-d]{1,3}-){20,}x"),
        regex("(ab|ba){15,}c"),
        budget.to_grammar(None),
        budget.to_grammar(Some(&behind)),
    ]
}

/// Draws logs at random, with drafts that hold, are forbidden, or are late. Each mask must equal that of a matcher that
/// has accepted the same tokens and nothing else.
#[test]
fn masks_depend_on_nothing_that_was_looked_at_and_taken_back() {
    let vocabulary = vocabulary();
    for (i, grammar) in grammars().iter().enumerate() {
        let (mut state, mut n_behind) = (i as u64, 0);
        let mut below = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let pick = |words: &[u32], at: usize| {
            let allowed = (0..N_VOCAB).filter(|token| words[*token as usize / 32] >> (token % 32) & 1 == 1);
            let allowed: Vec<Token> = allowed.filter(|token| *token != 2).collect();
            (!allowed.is_empty()).then(|| allowed[at % allowed.len()])
        };
        let (slot, mut log) = (MaskSlot::new(grammar.clone(), &[], N_GUESS_MAX), Vec::new());
        for _ in 0..60 {
            let is_early = below(3) > 0;
            if is_early {
                slot.make_masks(&vocabulary);
            }
            let mut drafts = Vec::new();
            for _ in 0..below(N_GUESS_MAX + 1) {
                let words = fresh(&vocabulary, grammar, &[&log[..], &drafts].concat());
                let right = words.and_then(|words| pick(&words, below(1000)));
                drafts.push(right.filter(|_| below(5) > 0).unwrap_or(below(N_VOCAB as usize) as Token));
            }
            if !drafts.is_empty() {
                slot.set_drafts(log.len() as u32, &drafts);
            }
            while slot.make_masks(&vocabulary) {}
            let run = take(&slot, log.len());
            for n in 0..=drafts.len() {
                let expected = fresh(&vocabulary, grammar, &[&log[..], &drafts[..n]].concat());
                n_behind += usize::from(n > 0 && expected.is_some());
                let ends = drafts[..n].contains(&2);
                assert!(
                    ends || run.mask_after(n) == expected.as_deref(),
                    "grammar {i}: {log:?} and {:?}",
                    &drafts[..n]
                );
            }
            // All drafts that hold, and one drawn token.
            let words = |log: &[Token]| fresh(&vocabulary, grammar, log);
            let n_held = below(drafts.len() + 1);
            let held: Vec<Token> = drafts[..n_held].iter().copied().take_while(|token| *token != 2).collect();
            let held = if words(&[&log[..], &held].concat()).is_some() { held } else { Vec::new() };
            let behind = words(&[&log[..], &held].concat());
            let Some(next) = behind.and_then(|words| pick(&words, below(1000))) else { break };
            let drawn = [held, vec![next]].concat();
            log.extend(&drawn);
            slot.push(drawn.into_iter());
        }
        assert!(n_behind > 5, "grammar {i}: {n_behind} masks behind drafts in {} tokens", log.len());
    }
}
