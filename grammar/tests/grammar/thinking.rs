//! Budgets for thoughts: the closing text is forced where one is used up, and nowhere else.

use crate::common::{END, N_VOCAB, TOOL, compiled, vocabulary};
use grammar::{GrammarLimits, GrammarSpec, Matcher, ThinkingBudget, TokenMask, Vocabulary};
use serde_json::json;
use types::{Grammar, Token};

fn budget(tokens_max: u32, is_open: bool) -> ThinkingBudget {
    let (opens, closes) = (vec!["<think>".to_owned()], vec!["</think>".to_owned(), "<|end|>".to_owned()]);
    ThinkingBudget { tokens_max, is_open, repeats: false, opens, closes }
}

fn matcher(vocabulary: &Vocabulary, grammar: &Grammar) -> Matcher {
    Matcher::new(vocabulary, grammar, &GrammarLimits::default()).unwrap()
}

fn bytes(text: &str) -> Vec<Token> {
    text.bytes().map(Token::from).collect()
}

/// Returns what is allowed before each token of an answer, and what is drawn: the token of `preferred` where it is
/// allowed, otherwise the lowest id.
fn drawn(matcher: &mut Matcher, preferred: &[Token]) -> Vec<(Token, usize)> {
    let mut mask = TokenMask::default();
    let draw = |preferred_token: &Token| {
        matcher.fill_mask(&mut mask).unwrap();
        let token = if mask.allows(*preferred_token) { *preferred_token } else { mask.tokens().next().unwrap() };
        matcher.accept(token).unwrap();
        (token, mask.n_allowed())
    };
    preferred.iter().map(draw).collect()
}

fn text(drawn: &[(Token, usize)]) -> String {
    drawn.iter().map(|(token, _)| u8::try_from(*token).map_or('?', char::from)).collect()
}

#[test]
fn a_thought_is_ended_where_its_budget_is_used_up() {
    let vocabulary = vocabulary();
    let check = |budget: ThinkingBudget, preferred: &str, expected: &str, n_forced: usize| {
        let drawn = drawn(&mut matcher(&vocabulary, &budget.to_grammar(None)), &bytes(preferred));
        assert_eq!(text(&drawn), expected, "{budget:?}");
        let n_one = drawn.iter().filter(|(_, n_allowed)| *n_allowed == 1).count();
        let n_open = drawn.iter().filter(|(_, n_allowed)| *n_allowed == N_VOCAB).count();
        assert_eq!((n_one, n_open), (n_forced, drawn.len() - n_forced), "{budget:?}");
    };
    let many = "aaaaaaaaaaaaaaaa";
    check(budget(5, true), many, "aaaaa</think>aaa", 8);
    check(budget(0, true), many, "</think>aaaaaaaa", 8);
    check(budget(100, true), many, many, 0);
    // Has no thought, or ends it in time, or ends it in the other way.
    check(budget(2, false), many, many, 0);
    check(budget(2, false), "x<think>aaaaaaaa", "x<think>aaaaaaaa", 0);
    check(budget(9, true), "a</think>aaaaaaa", "a</think>aaaaaaa", 0);
    check(budget(9, true), "a<|end|>aaaaaaaaaaa", "a<|end|>aaaaaaaaaaa", 0);
    // Opens a thought behind whitespace; only what follows is counted.
    check(budget(3, false), " \n<think>aaaaaaaaaaaaa", " \n<think>aaa</think>aa", 8);
    // A second one is text.
    check(budget(2, false), "<think>aa........<think>aaaaaa", "<think>aa</think><think>aaaaaa", 8);
    // A possible beginning of the end is not taken for the end.
    check(budget(4, true), "a</taaaaaaaaaaaa", "a</t</think>aaaa", 8);
    // A character is not cut.
    let snow: Vec<Token> = bytes("a☃☃aaaaaaaaaa");
    let drawn = drawn(&mut matcher(&vocabulary, &budget(2, true).to_grammar(None)), &snow);
    let output: Vec<u8> = drawn.iter().map(|(token, _)| *token as u8).collect();
    assert_eq!(String::from_utf8(output).unwrap(), "a☃</think>aaaaa");
}

#[test]
fn a_closing_text_that_is_a_special_token_is_forced_as_one() {
    let vocabulary = vocabulary();
    let budget = ThinkingBudget {
        opens: vec!["<tool_call>".to_owned()],
        closes: vec!["</tool_call>".to_owned()],
        ..budget(3, false)
    };
    let a = Token::from(b'a');
    let preferred = [TOOL, a, a, a, a, a, TOOL, a, a, a, a, a];
    let mut once = matcher(&vocabulary, &budget.to_grammar(None));
    let tokens: Vec<Token> = drawn(&mut once, &preferred).into_iter().map(|(token, _)| token).collect();
    assert_eq!(tokens, [TOOL, a, a, a, TOOL + 1, a, TOOL, a, a, a, a, a]);
    // Repeated thoughts share one budget.
    let mut again = matcher(&vocabulary, &ThinkingBudget { repeats: true, ..budget }.to_grammar(None));
    let tokens: Vec<Token> = drawn(&mut again, &preferred).into_iter().map(|(token, _)| token).collect();
    assert_eq!(tokens, [TOOL, a, a, a, TOOL + 1, a, TOOL, TOOL + 1, a, a, a, a]);
    // An end ends nothing here: the answer goes on if ends are ignored.
    assert_eq!(drawn(&mut again, &[END, a]), [(END, N_VOCAB), (a, N_VOCAB)]);
}

#[test]
fn a_grammar_behind_a_thought_goes_on_where_its_end_was_forced() {
    let vocabulary = vocabulary();
    let thought = json!({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"});
    let choice = json!({"type": "const_string", "value": "yes"});
    let tag = json!({"type": "structural_tag", "format": {"type": "sequence", "elements": [thought, choice]}});
    let grammar = compiled(&GrammarSpec::StructuralTag(tag)).unwrap();
    let mut limited = matcher(&vocabulary, &budget(4, true).to_grammar(Some(&grammar)));
    let output = drawn(&mut limited, &bytes("aaaaaaaaaaaaaaa"));
    assert_eq!(text(&output), "aaaa</think>yes");
    limited.accept(END).unwrap();
    assert!(limited.is_ended());
    // A grammar without a thought takes precedence.
    let yes = compiled(&GrammarSpec::Choice(vec!["yes".into()])).unwrap();
    let mut blind = matcher(&vocabulary, &budget(0, true).to_grammar(Some(&yes)));
    assert_eq!(text(&drawn(&mut blind, &bytes("aaa"))), "yes");
}

#[test]
fn a_budget_is_a_function_of_the_tokens_alone() {
    let vocabulary = vocabulary();
    let grammar = budget(6, false).to_grammar(None);
    let preferred = bytes("<think>ab☃defghijklmnopqrstuvwxyz");
    let mut whole = matcher(&vocabulary, &grammar);
    let expected = drawn(&mut whole, &preferred);
    let tokens: Vec<Token> = expected.iter().map(|(token, _)| *token).collect();
    for n in 0..tokens.len() {
        // A replayed log, a copy, and a branch.
        let mut replayed = matcher(&vocabulary, &grammar);
        tokens[..n].iter().for_each(|token| replayed.accept(*token).unwrap());
        let mut copy = replayed.copy().unwrap();
        let mut branch = replayed.branch().unwrap();
        for matcher in [&mut branch, &mut replayed, &mut copy] {
            assert_eq!(drawn(matcher, &preferred[n..]), expected[n..], "from token {n}");
        }
    }
}

#[test]
fn malformed_thinking_description_is_refused() {
    let vocabulary = vocabulary();
    for head in ["{}", "[", "{\"tokens_max\": 1, \"is_open\": true, \"repeats\": false, \"opens\": [], \"closes\": []}"]
    {
        let grammar = Grammar::new(format!("// thinking {head}\n"));
        assert!(Matcher::new(&vocabulary, &grammar, &GrammarLimits::default()).is_err(), "{head}");
    }
    assert!(Matcher::new(&vocabulary, &Grammar::new("// thinking {}"), &GrammarLimits::default()).is_err());
}
