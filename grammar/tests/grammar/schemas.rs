//! What schemas accept, what is refused of them, and by which path.

use crate::common::{check, compiled};
use grammar::{GrammarRefused, WantedGrammar};
use serde_json::{Value, json};

fn schema(schema: Value) -> WantedGrammar {
    WantedGrammar::JsonSchema(schema)
}

#[test]
fn keywords_are_enforced_together() {
    let cases: Vec<(Value, &[&str], &[&str])> = vec![
        (
            json!({"type": ["integer", "null"], "minimum": -3, "exclusiveMaximum": 12}),
            &["-3", "11", "null"],
            &["-4", "12", "1.5"],
        ),
        (json!({"type": "number", "multipleOf": 0.5, "minimum": 0}), &["0", "1.5", "2.0"], &["0.25", "-1"]),
        (
            json!({"type": "string", "minLength": 2, "maxLength": 3, "pattern": "^é"}),
            &["\"éa\"", "\"é\\\"b\""],
            &["\"é\"", "\"ab\""],
        ),
        (
            json!({"enum": ["a", 1, null, {"k": [1]}]}),
            &["\"a\"", "1", "null", "{\"k\": [1]}"],
            &["\"b\"", "2", "{\"k\":[]}"],
        ),
        (json!({"not": {"type": "string"}, "type": ["string", "boolean"]}), &["true"], &["\"a\""]),
        (json!({"oneOf": [{"minimum": 2}, {"maximum": 5}], "type": "integer"}), &["1", "6"], &["3"]),
        (
            json!({"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}, "maxContains": 1}),
            &["[1]", "[2, 1,3]"],
            &["[]", "[2]", "[1,1]"],
        ),
        (
            json!({"type": "array", "prefixItems": [{"type": "null"}], "items": false}),
            &["[]", "[null]"],
            &["[1]", "[null,1]"],
        ),
        (
            json!({"type": "object", "properties": {"a": true}, "additionalProperties": false,
                "patternProperties": {"^x": {"type": "null"}}}),
            &["{}", "{\"a\":1,\"x1\":null}"],
            &["{\"x\":1}", "{\"b\":1}"],
        ),
        (
            json!({"type": "object", "if": {"properties": {"k": {"const": "a"}}, "required": ["k"]},
                "then": {"required": ["x"]},
            "properties": {"k": {"enum": ["a", "b"]}, "x": {"type": "null"}}, "additionalProperties": false}),
            &["{\"k\":\"a\",\"x\":null}", "{\"k\":\"b\"}", "{}"],
            &["{\"k\":\"a\"}"],
        ),
        (
            json!({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}),
            &["[]", "[[],[[]]]"],
            &["[1]", "["],
        ),
    ];
    for (value, yes, no) in cases {
        check(&schema(value), yes, no);
    }
}

#[test]
fn a_name_that_is_listed_cannot_be_written_otherwise() {
    let value = json!({"type": "object", "properties": {"a": {"type": "null"}, "q\"\n/é": {"type": "null"}}});
    let no = ["{\"a\":1}", "{\"\\u0061\":1}", "{\"q\\\"\\n/é\":1}", "{\"q\\\"\\n\\/é\":1}"];
    check(&schema(value), &["{\"a\":null,\"q\\\"\\n/é\":null,\"b\":1}"], &no);
}

#[test]
fn blanks_are_bounded() {
    let yes = ["{\"a\": 1, \"b\": [1, 2]}", "{\n  \"a\": [\n    1,\n    2\n  ]\n}", "{\"a\":1,\"b\":2}"];
    let no = ["{  \"a\": 1}", "{\"a\":  1}", "{\"a\" : 1}", " {\"a\":1}", "{\"a\":1} ", "{\n\n\"a\":1}"];
    check(&schema(json!({"type": "object"})), &yes, &no);
}

#[test]
fn what_is_not_enforced_is_refused_by_its_path() {
    let nested = |inner: Value| json!({"properties": {"a": {"items": inner}}});
    let cases = [
        (json!({"nonsense": 1}), "/nonsense"),
        (nested(json!({"minLenght": 1})), "/properties/a/items/minLenght"),
        (nested(json!({"type": "strin"})), "/properties/a/items/type"),
        (nested(json!({"minLength": -1})), "/properties/a/items/minLength"),
        (nested(json!({"type": "array", "uniqueItems": true})), "/properties/a/items"),
        (nested(json!({"pattern": "(?=a)"})), "/properties/a/items"),
        (nested(json!({"format": "iri"})), "/properties/a/items"),
        (json!({"$ref": "https://example.com/schema"}), "/$ref"),
        (json!({"$ref": "#/$defs/none"}), "/$ref"),
        (json!({"$schema": "https://example.com/mine"}), "/$schema"),
        (json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]}), "/"),
        (json!({"a/b": 1}), "/a~1b"),
    ];
    for (value, path) in cases {
        let refused = compiled(&schema(value.clone())).unwrap_err();
        let (GrammarRefused::Unsupported { at, .. } | GrammarRefused::Invalid { at, .. }) = &refused else {
            panic!("{refused}")
        };
        assert!(at.starts_with(path), "{value}: {refused}");
    }
    for value in [
        json!(false),
        json!({"minimum": 2, "maximum": 1, "type": "number"}),
        json!({"allOf": [{"const": 1}, {"const": 2}]}),
    ] {
        let refused = compiled(&schema(value.clone()));
        assert!(matches!(refused, Err(GrammarRefused::Unsatisfiable { .. })), "{value}: {refused:?}");
    }
    let people =
        json!({"title": "t", "description": "d", "examples": [1], "default": 2, "x-mine": 3, "type": "integer"});
    check(&schema(people), &["7"], &["\"a\""]);
}
