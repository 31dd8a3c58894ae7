//! Hostile input is refused, or takes bounded time and memory: no panic, no hang, no stack overflow.

use crate::common::{N_VOCAB, compiled, vocabulary};
use grammar::{BadVocabulary, GrammarLimits, GrammarSpec, Matcher, MatcherError, TokenMask, Vocabulary};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use types::Grammar;

/// Far above what any case needs, far below a hang.
const TIME_MAX: Duration = Duration::from_secs(20);

const ODD_NAME: &str = "\u{0}\u{7f}\u{85}\u{2028}\u{fffd}/*";

fn nested(n: usize, open: &str, inner: &str, close: &str) -> String {
    open.repeat(n) + inner + &close.repeat(n)
}

fn deep(n: usize) -> Value {
    let outside = |inner| Value::Object([("items".to_owned(), inner)].into_iter().collect());
    (0..n).fold(json!({"type": "null"}), |inner, _| outside(inner))
}

fn doubling(n: usize, word: &str) -> Value {
    let mut defs = serde_json::Map::new();
    for i in 0..n {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        defs.insert(format!("d{i}"), json!({word: [next, next, {"minimum": i}]}));
    }
    defs.insert(format!("d{n}"), json!({"type": "integer"}));
    json!({"$ref": "#/$defs/d0", "$defs": defs})
}

fn wide(n: usize, required: bool) -> Value {
    let properties: serde_json::Map<String, Value> =
        (0..n).map(|i| (format!("property \"{i}\"\n"), json!({"type": "integer", "minimum": i}))).collect();
    let names: Vec<&String> = properties.keys().filter(|_| required).collect();
    json!({"type": "object", "required": names, "properties": properties, "additionalProperties": false})
}

fn numbers(from: usize) -> Vec<Value> {
    (0..15_000).map(|i| json!(2 * i + from)).collect()
}

fn cases() -> Vec<(&'static str, GrammarSpec)> {
    let tags: Vec<Value> = (0..2000)
        .map(|i| json!({"type": "tag", "begin": format!("<f={i}>"), "content": {"type": "any_text"}, "end": "</f>"}))
        .collect();
    let triggered = json!({"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": tags}});
    let schema = GrammarSpec::JsonSchema;
    vec![
        ("deep schema", schema(deep(120))),
        ("deeper schema", schema(deep(5000))),
        ("doubled anyOf", schema(doubling(30, "anyOf"))),
        ("doubled oneOf", schema(doubling(30, "oneOf"))),
        ("doubled allOf", schema(doubling(30, "allOf"))),
        ("2000 properties", schema(wide(2000, false))),
        ("10000 required", schema(wide(10_000, true))),
        ("10000 properties", schema(wide(10_000, false))),
        ("wide anyOf", schema(json!({"allOf": [wide(2000, true), {"anyOf": vec![json!({"minimum": 1}); 9000]}]}))),
        ("long enum", schema(json!({"enum": (0..50_000).collect::<Vec<_>>()}))),
        (
            "two enums",
            schema(json!({"enum": numbers(0), "allOf": [{"enum": numbers(1)}, {"not": {"enum": numbers(2)}}]})),
        ),
        ("long text", schema(json!({"const": "x".repeat(10_000_000)}))),
        ("ref to itself", schema(json!({"$ref": "#"}))),
        (
            "ref in a circle",
            schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})),
        ),
        ("endless value", schema(json!({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}))),
        ("not of itself", schema(json!({"not": {"$ref": "#"}}))),
        ("large counts", schema(json!({"type": "array", "minItems": 9_000_000_000u64}))),
        (
            "many counts",
            schema(json!({"type": "array", "minItems": 9000, "contains": {"minimum": 3}, "minContains": 8000})),
        ),
        ("regex bomb", schema(json!({"type": "string", "pattern": "^((a{1,900}){1,900}){1,900}$"}))),
        ("regex blow-up", schema(json!({"type": "string", "pattern": "(a|b)*a(a|b){25}$", "minLength": 40}))),
        (
            "two patterns",
            schema(
                json!({"type": "string", "pattern": "^(a|b)*a(a|b){18}$", "not": {"pattern": "^(b|a)*b(a|b){17}$"}}),
            ),
        ),
        ("deep groups", GrammarSpec::Regex(nested(10_000, "(", "a", ")"))),
        ("deep lark", GrammarSpec::Lark(format!("start: {}", nested(10_000, "(", "\"a\"", ")")))),
        ("wrong lark", GrammarSpec::Lark("start: /(/ b %ignore".to_owned())),
        ("no lark", GrammarSpec::Lark(String::new())),
        ("deep ebnf", GrammarSpec::Ebnf(format!("root ::= {}", nested(10_000, "(", "\"a\"", ")")))),
        (
            "long chain",
            GrammarSpec::Ebnf(
                (0..3000).map(|i| format!("r{i} ::= r{} \"a\" root?\n", i + 1)).collect::<String>()
                    + "r3000 ::= \"b\"\nroot ::= r0",
            ),
        ),
        (
            "doubled rules",
            GrammarSpec::Ebnf(
                (0..60).map(|i| format!("r{i} ::= r{0} r{0}\n", i + 1)).collect::<String>()
                    + "r60 ::= \"b\"\nroot ::= r0",
            ),
        ),
        ("left recursion", GrammarSpec::Ebnf("root ::= root root | \"a\" | \"\"".to_owned())),
        ("2000 tags", GrammarSpec::StructuralTag(triggered)),
        ("empty tag", GrammarSpec::StructuralTag(json!(null))),
        ("unicode in names", schema(json!({"type": "object", "properties": {ODD_NAME: {}}, "required": [ODD_NAME]}))),
    ]
}

#[test]
fn nothing_hostile_hangs_or_panics() {
    let vocabulary = vocabulary();
    for (name, spec) in cases() {
        let from = Instant::now();
        let compiled = compiled(&spec);
        let n_bytes = compiled.as_ref().map_or(0, Grammar::n_bytes);
        if let Ok(grammar) = &compiled {
            // Takes the first tokens, so that masks are made too.
            let mut mask = TokenMask::default();
            if let Ok(mut matcher) = Matcher::new(&vocabulary, grammar, &GrammarLimits::default()) {
                for _ in 0..50 {
                    let masked = matcher.fill_mask(&mut mask);
                    assert!(masked.is_err() || matcher.is_ended() || mask.n_allowed() > 0, "{name}");
                    let Some(token) = masked.ok().and_then(|()| mask.tokens().next()) else { break };
                    matcher.accept(token).unwrap();
                }
            }
        }
        let what = compiled.map_or_else(|refused| refused.to_string(), |_| format!("{n_bytes} bytes"));
        println!("{name}: {:?}: {}", from.elapsed(), what.chars().take(150).collect::<String>());
        if name.starts_with("10000") {
            assert!(what.contains("the work for the schema"), "{name}: {what}");
        }
        assert!(from.elapsed() < TIME_MAX, "{name} took {:?}", from.elapsed());
    }
}

#[test]
fn what_is_no_description_is_refused_by_the_matcher() {
    let vocabulary = vocabulary();
    for text in ["", "x", "// special \n\nstart: \"a\"", "\nstart: <|nobody|>", "\nstart: special_0", "\nstart: /(/"] {
        let made = Matcher::new(&vocabulary, &Grammar::new(text), &GrammarLimits::default()).map(|_| ());
        assert!(matches!(made, Err(MatcherError::Grammar(_))), "{text:?}: {made:?}");
    }
}

#[test]
fn a_vocabulary_that_cannot_be_masked_is_refused() {
    let word = [(b"a".as_slice(), false)];
    let new = |n_vocab, ends: &[u32]| Vocabulary::new(word.into_iter(), n_vocab, ends).map(|_| ()).unwrap_err();
    assert_eq!(new(0, &[0]), BadVocabulary::Size(0));
    assert_eq!(new(2, &[]), BadVocabulary::NoEnd);
    assert_eq!(new(2, &[2]), BadVocabulary::EndOutside(2));
    let many = [(b"a".as_slice(), false); 3];
    assert_eq!(Vocabulary::new(many.into_iter(), 2, &[0]).map(|_| ()).unwrap_err(), BadVocabulary::TooMany(3, 2));
    let long = [(&[b'x'; 5000][..], false), (b"a", false), (&[0xff, b'a'], false)];
    let vocabulary = Vocabulary::new(long.into_iter(), N_VOCAB, &[3]).unwrap();
    let other = Vocabulary::new(long.into_iter(), N_VOCAB, &[4]).unwrap();
    assert_ne!(vocabulary.hash(), other.hash());
    let grammar = compiled(&GrammarSpec::Regex("[^]*".to_owned())).unwrap();
    let mut matcher = Matcher::new(&vocabulary, &grammar, &GrammarLimits::default()).unwrap();
    let mut mask = TokenMask::default();
    matcher.fill_mask(&mut mask).unwrap();
    assert_eq!(mask.tokens().collect::<Vec<_>>(), [1, 3]);
}
