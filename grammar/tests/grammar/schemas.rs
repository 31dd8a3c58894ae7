//! What schemas accept, what is refused of them, and by which path.

use crate::common::{check, compiled};
use grammar::{GrammarRefused, GrammarSpec};
use serde_json::{Value, json};

fn schema(schema: Value) -> GrammarSpec {
    GrammarSpec::JsonSchema(schema)
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
fn items_that_differ_are_counted_by_what_was_written() {
    let list = |more: Value| {
        let mut value = json!({"type": "array", "uniqueItems": true});
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema(value)
    };
    let letters = list(json!({"items": {"enum": ["a", "b", 1, 1.0]}}));
    check(
        &letters,
        &["[]", "[\"b\"]", "[1,\"b\",\"a\"]"],
        &["[\"a\",\"a\"]", "[1,\"b\",1]", "[2]", "[1,\"a\",\"b\",1]"],
    );
    let some = list(json!({"items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 2}));
    check(&some, &["[\"a\",\"b\"]", "[\"c\",\"a\"]"], &["[]", "[\"a\"]", "[\"a\",\"b\",\"c\"]", "[\"b\",\"b\"]"]);
    let kinds = list(json!({"items": {"type": ["boolean", "null"]}}));
    check(&kinds, &["[true,null,false]"], &["[null,null]", "[1]"]);
    let tuple = list(json!({"prefixItems": [{"enum": [1, 2]}], "items": {"enum": [2, 3]}}));
    check(&tuple, &["[1]", "[1,2]", "[2,3]", "[1,3,2]"], &["[3]", "[2,2]", "[1,1]", "[2,3,2]"]);
    // More must differ than there are.
    let refused = compiled(&list(json!({"items": {"enum": [1, 2]}, "minItems": 3})));
    assert!(matches!(refused, Err(GrammarRefused::Unsatisfiable { .. })), "{refused:?}");
    for open in [json!({}), json!({"items": {"type": "string"}}), json!({"items": {"enum": [[1], [2]]}})] {
        assert!(matches!(compiled(&list(open)), Err(GrammarRefused::Unsupported { .. })));
    }
    let many: Vec<u32> = (0..40).collect();
    assert!(matches!(compiled(&list(json!({"items": {"enum": many}}))), Err(GrammarRefused::TooLarge { .. })));
}

#[test]
fn addresses_are_those_of_their_standards() {
    let format = |name: &str| schema(json!({"type": "string", "format": name}));
    let cases: [(&str, &[&str], &[&str]); 7] = [
        (
            "uri",
            &["http://a.b/c?d=e#f", "urn:x:y", "mailto:a@b.c", "https://u:p@[2001:db8::1]:80/%20/", "a:", "tel:+1-2"],
            &["//a/b", "/a", "a", "http://a b", "http://a/%2", "1a:b", "http://[::1", "http://é", "a:\\\\b"],
        ),
        ("uri-reference", &["/a/b?c#d", "//h/p", "", "a/b:c", "#x", "http://a", "?q"], &["a b", "%zz", "\\\\x", "é"]),
        ("iri", &["http://é.b/ü?ß#→", "urn:x"], &["é", "http://a b", "http://é/%2"]),
        ("iri-reference", &["/é", "", "ü#é"], &["a b", "%é"]),
        ("uri-template", &["/a/{b}{?c,d*}", "", "{+x:3}", "é"], &["{", "{a", "a}", "{a:0}", "{!a}", "a b"]),
        ("json-pointer", &["", "/a/~0b/~1", "//", "/é"], &["a", "/~", "/~2", "#/a"]),
        ("relative-json-pointer", &["0", "1/a", "12#"], &["", "/a", "01", "1a", "-1"]),
    ];
    for (name, yes, no) in cases {
        let quoted = |texts: &[&str]| texts.iter().map(|text| format!("\"{text}\"")).collect::<Vec<_>>();
        let (yes, no) = (quoted(yes), quoted(no));
        let (yes, no): (Vec<_>, Vec<_>) =
            (yes.iter().map(|text| &**text).collect(), no.iter().map(|text| &**text).collect());
        check(&format(name), &yes, &no);
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
        (nested(json!({"format": "regex"})), "/properties/a/items"),
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
