//! How long masks take over 150,000 tokens: `make grammar-masks`. The vocabulary is made up, in the proportions of a
//! real one: words with and without a space before them, numbers, blanks, signs, and characters of other scripts.

use grammar::{GrammarLimits, GrammarSpec, Matcher, TokenMask, Vocabulary, compile};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use types::Token;

const N_VOCAB: usize = 150_000;
const END: Token = N_VOCAB as Token - 1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let from = Instant::now();
    let vocabulary = vocabulary()?;
    println!("vocabulary: {:?}", from.elapsed());
    let mut all = Vec::new();
    println!(
        "{:22} {:>9} {:>9} {:>7} {:>9} {:>9} {:>9} {:>9}",
        "", "compile", "matcher", "masks", "mean", "p50", "p99", "max"
    );
    for (name, spec) in grammar_specs() {
        let from = Instant::now();
        let grammar = compile(&spec, &GrammarLimits::default())?;
        let compiled = from.elapsed();
        let from = Instant::now();
        Matcher::new(&vocabulary, &grammar, &GrammarLimits::default())?;
        let made = from.elapsed();
        let mut times = Vec::new();
        for seed in 0..8 {
            let mut matcher = Matcher::new(&vocabulary, &grammar, &GrammarLimits::default())?;
            times.extend(walk(&mut matcher, seed)?);
        }
        let row = row(&mut times);
        println!("{name:22} {:>9} {:>9} {row}", micros(compiled), micros(made));
        all.extend(times);
    }
    println!("{:22} {:>9} {:>9} {}", "all", "", "", row(&mut all));
    Ok(())
}

fn micros(time: Duration) -> String {
    format!("{} us", time.as_micros())
}

fn row(times: &mut [Duration]) -> String {
    times.sort();
    let at = |share: f64| micros(times[((times.len() - 1) as f64 * share) as usize]);
    let mean = micros(times.iter().sum::<Duration>() / times.len() as u32);
    format!("{:>7} {mean:>9} {:>9} {:>9} {:>9}", times.len(), at(0.5), at(0.99), at(1.0))
}

/// Tokens drawn from the masks, and how long each mask took.
fn walk(matcher: &mut Matcher, seed: u64) -> Result<Vec<Duration>, grammar::MatcherError> {
    let (mut state, mut mask, mut times) = (seed + 1, TokenMask::default(), Vec::new());
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    while times.len() < 200 {
        let from = Instant::now();
        matcher.fill_mask(&mut mask)?;
        times.push(from.elapsed());
        // A sign that closes something is drawn more often than by chance: texts have an end.
        let closing = b"\"}],:".iter().map(|byte| Token::from(*byte)).find(|token| mask.allows(*token));
        let token = match closing.filter(|_| below(4) == 0) {
            Some(token) => token,
            None => mask.tokens().nth(below(mask.n_allowed())).unwrap_or(END),
        };
        matcher.accept(token)?;
        if matcher.is_ended() {
            break;
        }
    }
    Ok(times)
}

fn vocabulary() -> Result<Vocabulary, Box<dyn std::error::Error>> {
    let mut words: BTreeSet<Vec<u8>> = BTreeSet::new();
    let signs = [
        "{\"",
        "\":",
        "\": ",
        "\",",
        "\", \"",
        "},",
        "}}",
        "[]",
        "{}",
        "();",
        "=>",
        "<function=",
        "</",
        "\\n",
        "\\\"",
        "---",
    ];
    words.extend(signs.iter().map(|sign| sign.as_bytes().to_vec()));
    words.extend(
        (1..80).flat_map(|n| [vec![b' '; n], vec![b'\n'; n], vec![b'\t'; n], [vec![b'\n'], vec![b' '; n]].concat()]),
    );
    words.extend((0..1000).map(|n| format!("{n}").into_bytes()));
    let others = (0x4e00..0x8000).chain(0x3b1..0x500).chain(0xac00..0xc000).filter_map(char::from_u32);
    words.extend(others.map(|c| c.to_string().into_bytes()));
    let (heads, tails) =
        (["", "s", "t", "pr", "k", "br", "m", "n", "str", "l"], ["", "n", "r", "st", "ng", "l", "te", "s"]);
    let mut state = 7u64;
    while words.len() < N_VOCAB - 300 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut left = state >> 20;
        let mut take = |n: usize| {
            let taken = left as usize % n;
            left /= n as u64;
            taken
        };
        let mut word = [" ", "", "", " "][take(4)].to_owned();
        for _ in 0..=take(3) {
            word += heads[take(10)];
            word += ["a", "e", "i", "o", "u", "ea", "ou"][take(7)];
            word += tails[take(8)];
        }
        words.insert(word.into_bytes());
    }
    let bytes = (0..=255u8).map(|byte| vec![byte]);
    let all: Vec<Vec<u8>> = bytes.chain(words.into_iter().filter(|word| word.len() > 1)).collect();
    Ok(Vocabulary::new(all.iter().take(N_VOCAB - 1).map(|word| (word.as_slice(), false)), N_VOCAB, &[END])?)
}

fn object(properties: Value) -> Value {
    let required: Vec<String> = properties.as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn grammar_specs() -> Vec<(&'static str, GrammarSpec)> {
    let person = object(json!({"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}}}));
    let order = object(json!({"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}$"},
        "at": {"type": "string", "format": "date-time"}, "state": {"enum": ["open", "paid", "sent", "returned"]},
        "lines": {"type": "array", "minItems": 1, "items": object(json!({"sku": {"type": "string", "maxLength": 20},
            "n": {"type": "integer", "exclusiveMinimum": 0}, "price": {"type": "number", "minimum": 0}}))}}));
    let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": object(json!({
            "value": {"type": ["string", "number", "null"]},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}))}});
    let either = json!({"oneOf": [object(json!({"kind": {"const": "a"}, "x": {"type": "number"}})),
        object(json!({"kind": {"const": "b"}, "y": {"type": "array", "items": {"type": "boolean"}}}))]});
    let open = json!({"type": "object", "properties": {"id": {"type": "integer"}},
        "patternProperties": {"^x-": {"type": "string"}}});
    let many: Value = (0..60)
        .map(|i| (format!("field_{i}"), json!({"type": "string", "maxLength": 200})))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let calls = json!({"format": {"type": "triggered_tags", "triggers": ["<function="], "tags": (0..20).map(|i| json!({
        "type": "tag", "begin": format!("<function=tool_{i}>"), "end": "</function>",
        "content": {"type": "json_schema", "json_schema": person}})).collect::<Vec<_>>()}});
    let gbnf = "root ::= item (\",\" item)*\nitem ::= \"(\" root \")\" | string | [0-9]{1,9}\n\
        string ::= \"\\\"\" [^\"\\\\]* \"\\\"\"";
    vec![
        ("any object", GrammarSpec::JsonObject),
        ("person", GrammarSpec::JsonSchema(person.clone())),
        ("order", GrammarSpec::JsonSchema(order)),
        ("tree", GrammarSpec::JsonSchema(tree)),
        ("either", GrammarSpec::JsonSchema(either)),
        ("open names", GrammarSpec::JsonSchema(open)),
        ("60 optional", GrammarSpec::JsonSchema(json!({"type": "object", "properties": many}))),
        ("20 tools", GrammarSpec::StructuralTag(calls)),
        ("regex", GrammarSpec::Regex("(Yes|No), because [a-z ,]{10,80}\\.".to_owned())),
        ("choice", GrammarSpec::Choice((0..50).map(|i| format!("answer number {i}")).collect())),
        ("gbnf", GrammarSpec::Gbnf(gbnf.to_owned())),
    ]
}
