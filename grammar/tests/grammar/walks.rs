//! Random walks: with any tokens from the masks, the text satisfies its schema, and no mask is empty before the end.

use crate::common::{END, compiled, vocabulary};
use grammar::{GrammarLimits, GrammarSpec, Matcher, TokenMask};
use serde_json::{Value, json};
use types::Token;

/// A random number generator (splitmix64): the same walks every time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

const NAMES: &[&str] = &["a", "ab", "name", "\"q\"", "é"];
type Judge = fn(&str) -> bool;

const PATTERNS: &[(&str, Judge)] = &[
    ("^a", |text| text.starts_with('a')),
    ("b", |text| text.contains('b')),
    ("^[0-9]{2,4}$", |text| (2..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit())),
    ("e$", |text| text.ends_with('e')),
];

fn schema(random: &mut Random, depth: usize) -> Value {
    let inner = |random: &mut Random| schema(random, depth - 1);
    let n_kinds = if depth == 0 { 7 } else { 17 };
    match random.below(n_kinds) {
        0 => json!({"type": random.of(&["null", "boolean", "string", "integer", "number"])}),
        1 => json!({"type": "integer", "minimum": random.below(40) as i64 - 20, "maximum": random.below(300)}),
        2 => {
            json!({"type": "number", "exclusiveMinimum": random.of(&[-1.5, 0.0, 0.25]),
            "maximum": random.of(&[0.5, 17.0])})
        }
        3 => json!({"type": "string", "minLength": random.below(3), "maxLength": 3 + random.below(4)}),
        4 => json!({"type": "string", "pattern": random.of(PATTERNS).0}),
        5 => json!({"enum": [1, "a", "ab", null, [1, {"a": "b"}], 2.5]}),
        6 => json!({"type": "integer", "multipleOf": random.of(&[2, 3, 10])}),
        7 => {
            json!({"type": "array", "items": inner(random), "minItems": random.below(3),
            "maxItems": 2 + random.below(3)})
        }
        8 => json!({"type": "array", "prefixItems": [inner(random), inner(random)], "items": inner(random)}),
        9 => {
            json!({"type": "array", "items": {"type": ["integer", "null"]}, "contains": inner(random),
            "maxContains": 2})
        }
        10 => json!({"anyOf": [inner(random), inner(random)]}),
        11 => json!({"oneOf": [inner(random), inner(random)]}),
        12 => json!({"allOf": [inner(random), {"not": inner(random)}]}),
        13 => json!({"if": inner(random), "then": inner(random), "else": inner(random)}),
        _ => object(random, depth),
    }
}

fn object(random: &mut Random, depth: usize) -> Value {
    let mut properties = serde_json::Map::new();
    for name in NAMES {
        if random.below(2) == 0 {
            properties.insert((*name).to_owned(), schema(random, depth - 1));
        }
    }
    let required: Vec<&str> = NAMES.iter().copied().filter(|_| random.below(4) == 0).collect();
    let mut object = json!({"type": "object", "properties": properties, "required": required});
    match random.below(5) {
        0 => object["additionalProperties"] = json!(false),
        1 => object["additionalProperties"] = schema(random, depth - 1),
        2 => object["patternProperties"] = json!({random.of(PATTERNS).0: schema(random, depth - 1)}),
        3 => object["maxProperties"] = json!(3),
        _ => object["propertyNames"] = json!({"maxLength": 3}),
    }
    object
}

/// Whether the value satisfies the schema: an independent check of the keywords that are used here.
fn holds(schema: &Value, value: &Value) -> bool {
    let Some(words) = schema.as_object() else { return schema == &json!(true) };
    words.iter().all(|(word, constraint)| holds_word(words, word, constraint, value))
}

fn holds_word(words: &serde_json::Map<String, Value>, word: &str, constraint: &Value, value: &Value) -> bool {
    let number = |is: fn(f64, f64) -> bool| value.as_f64().is_none_or(|value| is(value, constraint.as_f64().unwrap()));
    let count =
        |n: Option<usize>, is: fn(usize, usize) -> bool| n.is_none_or(|n| is(n, constraint.as_u64().unwrap() as usize));
    let (text, list, object) = (value.as_str(), value.as_array(), value.as_object());
    let length = text.map(|text| text.chars().count());
    let all = || constraint.as_array().unwrap().iter();
    match word {
        "type" => constraint
            .as_array()
            .map_or_else(|| has_type(constraint, value), |kinds| kinds.iter().any(|kind| has_type(kind, value))),
        "enum" => all().any(|other| other == value || other.as_f64().is_some_and(|n| value.as_f64() == Some(n))),
        "minimum" => number(|value, bound| value >= bound),
        "maximum" => number(|value, bound| value <= bound),
        "exclusiveMinimum" => number(|value, bound| value > bound),
        // Above this a float has no exact remainder.
        "multipleOf" => number(|value, of| value.abs() > 1e15 || value % of == 0.0),
        "minLength" => count(length, |n, min| n >= min),
        "maxLength" => count(length, |n, max| n <= max),
        "pattern" => text.is_none_or(|text| matches(constraint.as_str().unwrap(), text)),
        "minItems" => count(list.map(Vec::len), |n, min| n >= min),
        "maxItems" => count(list.map(Vec::len), |n, max| n <= max),
        "prefixItems" => list.is_none_or(|list| list.iter().zip(all()).all(|(value, schema)| holds(schema, value))),
        "items" => {
            let n = words.get("prefixItems").map_or(0, |first| first.as_array().unwrap().len());
            list.is_none_or(|list| list.iter().skip(n).all(|value| holds(constraint, value)))
        }
        "contains" => {
            list.is_none_or(|list| (1..=2).contains(&list.iter().filter(|value| holds(constraint, value)).count()))
        }
        "anyOf" => all().any(|schema| holds(schema, value)),
        "oneOf" => all().filter(|schema| holds(schema, value)).count() == 1,
        "allOf" => all().all(|schema| holds(schema, value)),
        "not" => !holds(constraint, value),
        "if" => holds(&words[if holds(constraint, value) { "then" } else { "else" }], value),
        "properties" | "patternProperties" | "additionalProperties" | "propertyNames" => object.is_none_or(|object| {
            object.iter().all(|(name, value)| holds_property(words, word, constraint, (name, value)))
        }),
        "required" => object.is_none_or(|object| all().all(|name| object.contains_key(name.as_str().unwrap()))),
        "maxProperties" => count(object.map(serde_json::Map::len), |n, max| n <= max),
        _ => true,
    }
}

fn holds_property(
    words: &serde_json::Map<String, Value>,
    word: &str,
    constraint: &Value,
    own: (&String, &Value),
) -> bool {
    let (name, value) = own;
    match word {
        "properties" => constraint.get(name).is_none_or(|schema| holds(schema, value)),
        "patternProperties" => {
            constraint.as_object().unwrap().iter().all(|(p, schema)| !matches(p, name) || holds(schema, value))
        }
        "propertyNames" => holds(constraint, &json!(name)),
        _ => words["properties"].get(name).is_some() || holds(constraint, value),
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    PATTERNS.iter().find(|(known, _)| *known == pattern).unwrap().1(text)
}

fn has_type(kind: &Value, value: &Value) -> bool {
    match kind.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        _ => value.as_f64().is_some_and(|number| number.fract() == 0.0),
    }
}

/// Returns a text along the masks. Closes all that is open once the text is long; None if that did not end it.
fn walk(matcher: &mut Matcher, random: &mut Random) -> Option<Vec<u8>> {
    const LONG: usize = 40;
    const TOKENS_MAX: usize = 600;
    let (mut mask, mut text) = (TokenMask::default(), Vec::new());
    for n in 0..TOKENS_MAX {
        matcher.fill_mask(&mut mask).unwrap();
        assert!(mask.n_allowed() > 0, "an empty mask after {:?}", String::from_utf8_lossy(&text));
        if mask.allows(END) && (n > LONG || random.below(4) == 0 || mask.only().is_some()) {
            matcher.accept(END).unwrap();
            return Some(text);
        }
        let closing = b"\"}]n0a5:,".iter().map(|byte| Token::from(*byte)).find(|token| mask.allows(*token));
        let tokens: Vec<Token> = mask.tokens().filter(|token| *token != END).collect();
        let token = closing.filter(|_| n > LONG && random.below(5) > 0).unwrap_or_else(|| random.of(&tokens));
        matcher.accept(token).unwrap();
        match token {
            0..256 => text.push(token as u8),
            word => text.extend_from_slice(crate::common::WORDS[word as usize - 256].as_bytes()),
        }
    }
    None
}

/// Reads other tokens on a branch, and makes the masks behind them.
fn look_aside(matcher: &Matcher, tokens: &[Token], random: &mut Random) {
    let (mut branch, mut mask, mut tokens) = (matcher.branch().unwrap(), TokenMask::default(), tokens.to_vec());
    for _ in 0..random.below(6) {
        branch.accept(random.of(&tokens)).unwrap();
        if branch.is_ended() {
            return;
        }
        branch.fill_mask(&mut mask).unwrap();
        tokens = mask.tokens().collect();
    }
}

/// Compares a matcher that computes every mask with two that have branches: one that computes masks only now and then,
/// and one that computes each of them again behind a branch.
#[test]
fn a_mask_is_a_function_of_the_tokens_so_far() {
    let (vocabulary, limits, mut random) = (vocabulary(), GrammarLimits::default(), Random(2));
    let mut n_compared = 0;
    while n_compared < 400 {
        let Ok(grammar) = compiled(&GrammarSpec::JsonSchema(schema(&mut random, 2))) else { continue };
        let new = || Matcher::new(&vocabulary, &grammar, &limits).unwrap();
        let (mut always, mut seldom, mut branched) = (new(), new(), new());
        let (mut mask, mut other) = (TokenMask::default(), TokenMask::default());
        for n in 0..30 {
            always.fill_mask(&mut mask).unwrap();
            let tokens: Vec<Token> = mask.tokens().collect();
            look_aside(&seldom, &tokens, &mut random);
            if n % 7 == 6 {
                seldom.fill_mask(&mut other).unwrap();
                assert_eq!(mask, other);
                n_compared += 1;
            }
            look_aside(&branched, &tokens, &mut random);
            branched.fill_mask(&mut other).unwrap();
            assert_eq!(mask, other);
            let token = random.of(&tokens);
            for matcher in [&mut always, &mut seldom, &mut branched] {
                matcher.accept(token).unwrap();
            }
            if always.is_ended() {
                break;
            }
        }
    }
}

#[test]
fn random_walks_satisfy_their_schemas() {
    let vocabulary = vocabulary();
    let mut random = Random(1);
    let (mut n_schemas, mut n_walks, mut n_unended) = (0, 0, 0);
    while n_schemas < 150 {
        let schema = schema(&mut random, 2);
        let Ok(grammar) = compiled(&GrammarSpec::JsonSchema(schema.clone())) else { continue };
        n_schemas += 1;
        for _ in 0..6 {
            let mut matcher = Matcher::new(&vocabulary, &grammar, &GrammarLimits::default()).unwrap();
            let Some(text) = walk(&mut matcher, &mut random) else {
                n_unended += 1;
                continue;
            };
            n_walks += 1;
            let value: Value = serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{schema}: {text:?}: {e}"));
            assert!(holds(&schema, &value), "{schema}: {value}");
        }
    }
    println!("{n_schemas} schemas, {n_walks} texts, {n_unended} walks that were cut");
    assert!(n_walks > 10 * n_unended, "{n_walks} walks ended, {n_unended} did not");
}
