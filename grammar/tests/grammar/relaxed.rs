//! Schemas that need not hold in full: what is enforced of them, and that nothing valid is lost.

use crate::common::{check, compiled};
use grammar::{GrammarRefused, GrammarSpec};
use serde_json::{Value, json};

fn relaxed(schema: Value) -> GrammarSpec {
    let format = json!({"type": "json_schema", "json_schema": schema, "strict": false});
    GrammarSpec::StructuralTag(json!({"format": format}))
}

#[test]
fn annotations_are_ignored() {
    let schema = json!({
        "type": "object",
        "discriminator": {"propertyName": "a"},
        "properties": {
            "a": {"type": "string", "nullable": true, "enum": ["x", "y"]},
            "b": {"oneOf": [{"type": "integer", "units": "cm"}, {"type": "number", "minimum": 3}]},
        },
        "required": ["a"],
        "additionalProperties": false,
    });
    assert!(matches!(compiled(&GrammarSpec::JsonSchema(schema.clone())), Err(GrammarRefused::Unsupported { .. })));
    // Without unknown keywords the schema holds in full: 4 is an integer and at least 3, so both of `oneOf`.
    check(
        &relaxed(schema),
        &[r#"{"a":"x"}"#, r#"{"a":"y","b":1}"#],
        &[r#"{"a":"z"}"#, r#"{"a":"x","b":4}"#, "{}", "1"],
    );
}

#[test]
fn what_cannot_be_enforced_is_left_to_the_model() {
    let object = |part: Value| {
        let properties = json!({"a": part});
        json!({"type": "object", "properties": properties, "required": ["a"], "additionalProperties": false})
    };
    let cases: [(Value, &[&str], &[&str]); 9] = [
        (json!({"type": "integer", "multipleOf": 7}), &["7", "8"], &["\"x\"", "7.5"]),
        (json!({"type": "string", "format": "password"}), &["\"x\""], &["1"]),
        (json!({"type": "string", "pattern": "^(?=.*x)y", "maxLength": 3}), &["\"yx\"", "\"z\""], &["\"zzzz\"", "1"]),
        (json!({"type": "string", "maxLength": 1_000_000, "minLength": 1}), &["\"x\""], &["\"\""]),
        (json!({"oneOf": [{"type": "integer", "multipleOf": 7}, {"const": 14}]}), &["14", "7", "3"], &["\"x\""]),
        (json!({"type": "string", "not": {"pattern": "(?!a)b"}}), &["\"b\"", "\"x\""], &["1"]),
        (json!({"type": "array", "items": {"format": "regex", "minLength": 1}}), &["[]", "[\"x\"]"], &["[\"\"]", "1"]),
        (
            json!({"type": "object", "patternProperties": {"^(?!x)": {"type": "null"}}, "additionalProperties": false}),
            &["{}", "{\"y\":null}"],
            &["1"],
        ),
        (
            json!({"allOf": [{"type": "string", "format": "color"}], "if": {"minLength": 3}, "then": {"const": "abc"}}),
            &["\"abc\"", "\"a\""],
            &[],
        ),
    ];
    for (part, yes, no) in cases {
        assert!(compiled(&GrammarSpec::JsonSchema(object(part.clone()))).is_err(), "{part}");
        let whole = |values: &[&str]| values.iter().map(|value| format!("{{\"a\":{value}}}")).collect::<Vec<_>>();
        let (yes, no) = (whole(yes), [whole(no), vec!["{}".to_owned(), "{\"b\":1}".to_owned()]].concat());
        let [yes, no] = [&yes, &no].map(|all| all.iter().map(String::as_str).collect::<Vec<_>>());
        check(&relaxed(object(part)), &yes, &no);
    }
}

/// Each costs a round, and there are more than rounds: all of it still has its form, and is compiled in little time.
#[test]
fn many_that_cannot_be_enforced_cost_little() {
    let part = |i: usize| (format!("p{i}"), json!({"type": "integer", "multipleOf": 7919, "title": "x".repeat(100)}));
    let properties: serde_json::Map<String, Value> = (0..200).map(part).collect();
    let format = json!({"type": "json_schema", "strict": false,
        "json_schema": {"type": "object", "properties": properties, "additionalProperties": false}});
    let tag = |i: usize| json!({"type": "tag", "begin": format!("<f{i}>"), "content": format, "end": "</f>"});
    let tags: Vec<Value> = (0..100).map(tag).collect();
    let all = json!({"format": {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": true}});
    let began = std::time::Instant::now();
    check(&GrammarSpec::StructuralTag(all), &["<f7>{\"p1\": 3}</f>"], &["<f7>[]</f>", "<g>{}</f>"]);
    assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn a_schema_that_is_not_valid_is_refused_where_it_is_wrong() {
    for (schema, at) in [
        (json!({"type": "object", "properties": {"a": {"type": "text"}}}), "/format/json_schema/properties/a/type"),
        (json!({"type": "object", "required": true, "nullable": 1}), "/format/json_schema/required"),
    ] {
        let refused = compiled(&relaxed(schema)).unwrap_err();
        assert!(matches!(&refused, GrammarRefused::Invalid { at: where_, .. } if where_ == at), "{refused}");
    }
}

#[test]
fn a_format_that_is_exact_may_stand_in_one_of_several() {
    let id = "\"123e4567-e89b-12d3-a456-426614174000\"";
    let schema = json!({"oneOf": [{"type": "string", "format": "uuid"}, {"type": "string", "format": "date"}]});
    check(&GrammarSpec::JsonSchema(schema), &[id, "\"2026-02-28\""], &["\"x\"", "\"2026-02-30\"", "1"]);
    let schema = json!({"oneOf": [{"type": "string", "format": "uuid"}, {"type": "string", "maxLength": 4}]});
    check(&GrammarSpec::JsonSchema(schema), &[id, "\"none\""], &["\"absent\"", "1"]);
    let schema = json!({"type": "string", "not": {"format": "ipv4"}});
    check(&GrammarSpec::JsonSchema(schema), &["\"1.2.3\"", "\"1.2.3.256\""], &["\"1.2.3.4\""]);
}
