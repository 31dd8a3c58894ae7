//! Structural tags: free text and constrained parts by turns, with special tokens where a vocabulary has them.

use crate::common::{END, TOOL, check, compiled, matcher, vocabulary};
use grammar::{GrammarRefused, GrammarSpec, TokenMask};
use serde_json::{Value, json};
use types::Token;

fn format(format: Value) -> GrammarSpec {
    GrammarSpec::StructuralTag(json!({"type": "structural_tag", "format": format}))
}

fn call(name: &str, key: &str) -> Value {
    let schema = json!({"type": "object", "properties": {key: {"type": "integer"}}, "required": [key],
        "additionalProperties": false});
    json!({"type": "tag", "begin": format!("<function={name}>"), "end": "</function>",
        "content": {"type": "json_schema", "json_schema": schema}})
}

#[test]
fn tags_follow_their_triggers_in_free_text() {
    let triggered =
        json!({"type": "triggered_tags", "triggers": ["<function="], "tags": [call("f", "a"), call("fg", "b")]});
    let yes = [
        "",
        "hello",
        "a < b <func",
        "<function=f>{\"a\":1}</function>",
        "so: <function=fg>{\"b\":2}</function> and <function=f>{\"a\": 3}</function>.",
    ];
    let no = ["<function=", "<function=g>", "<function=f>{}</function>", "<function=f>{\"a\":1}"];
    check(&format(triggered.clone()), &yes, &no);
    let older = json!({"type": "structural_tag", "triggers": ["<function="], "structures": [
        {"begin": "<function=f>", "schema": {"type": "integer"}, "end": "</function>"}]});
    check(&GrammarSpec::StructuralTag(older), &["x", "<function=f>12</function>y"], &["<function=f>x</function>"]);
    let mut first = triggered.clone();
    first["at_least_one"] = json!(true);
    check(&format(first.clone()), &["<function=f>{\"a\":1}</function> x"], &["", "x"]);
    first["stop_after_first"] = json!(true);
    check(&format(first), &["<function=f>{\"a\":1}</function>"], &["<function=f>{\"a\":1}</function> x"]);
}

#[test]
fn each_kind_of_part_takes_its_texts() {
    let text = |value: &str| json!({"type": "const_string", "value": value});
    let think = json!({"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"});
    let sequence = json!({"type": "sequence", "elements": [think, text("!")]});
    check(&format(sequence), &["<think></think>!", "<think>a</thin <b</think>!"], &["<think>", "!", "<think></think>"]);
    let either = json!({"type": "or", "elements": [text("yes"), {"type": "regex", "pattern": "n+o"}]});
    check(&format(either), &["yes", "nno"], &["", "ye", "yesno"]);
    let many = json!({"type": "repeat", "min": 1, "max": 2, "content": text("ab")});
    check(&format(many), &["ab", "abab"], &["", "ababab"]);
    let tag =
        |begin: &str| json!({"type": "tag", "begin": begin, "content": {"type": "regex", "pattern": ".*"}, "end": ";"});
    let separated = json!({"type": "tags_with_separator", "tags": [tag("a"), tag("b")], "separator": ","});
    check(&format(separated), &["", "a;", "axy;,b;"], &["a", "a;b;", "a;,"]);
    let ebnf = json!({"type": "tag", "begin": "<", "end": ">",
        "content": {"type": "grammar", "grammar": "root ::= \"(\" root \")\" | \"x\""}});
    check(&format(ebnf), &["<x>", "<((x))>"], &["<(x>"]);
    let bounded = json!({"type": "any_text", "excludes": ["<a>", "b"]});
    check(&format(bounded), &["", "<a", "xyz"], &["<a>", "xb"]);
}

#[test]
fn parameters_are_written_as_qwens_coder_models_do() {
    let schema = json!({"type": "object", "required": ["path"],
        "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}});
    let yes = ["<parameter=path>a\n<b></parameter>", "<parameter=path></parameter>\n<parameter=n>\n12\n</parameter>\n"];
    let no = ["", "<parameter=n>1</parameter>", "<parameter=path>x</parameter><parameter=n>x</parameter>"];
    check(&format(json!({"type": "qwen_xml_parameter", "json_schema": schema})), &yes, &no);
    check(&format(json!({"type": "json_schema", "style": "qwen_xml", "json_schema": schema})), &yes, &no);
}

#[test]
fn a_special_token_is_as_good_as_its_text() {
    let tag = json!({"type": "tag", "begin": "<tool_call>\n", "end": "\n</tool_call>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}}});
    let spec = format(json!({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}));
    check(&spec, &["x", "<tool_call>\n12\n</tool_call>", "a<tool_call>\n1\n</tool_call>b"], &["<tool_call>"]);
    let vocabulary = vocabulary();
    let mut matcher = matcher(&vocabulary, &spec);
    let mut mask = TokenMask::default();
    let byte = |byte: u8| Token::from(byte);
    for token in [byte(b'a'), TOOL, byte(b'\n'), byte(b'1'), byte(b'\n'), TOOL + 1, byte(b'b')] {
        matcher.fill_mask(&mut mask).unwrap();
        assert!(mask.allows(token), "{token}");
        matcher.accept(token).unwrap();
    }
    matcher.fill_mask(&mut mask).unwrap();
    assert!(mask.allows(END) && mask.allows(TOOL) && !mask.allows(TOOL + 1));
}

#[test]
fn what_is_wrong_in_a_tag_is_named() {
    let cases = [
        (json!({}), "/format"),
        (json!({"type": "novel"}), "/format/type"),
        (json!({"type": "const_string"}), "/format"),
        (json!({"type": "any_text", "max_tokens": 3}), "/format/max_tokens"),
        (json!({"type": "json_schema", "json_schema": {"not": {"uniqueItems": true}}}), "/format/json_schema/not"),
        (json!({"type": "triggered_tags", "triggers": ["<a"], "tags": [call("f", "a")]}), "/format/tags/0/begin"),
        (json!({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}), "/format/elements/0"),
        (json!({"type": "const_string", "value": "x", "volume": 3}), "/format/volume"),
    ];
    for (value, path) in cases {
        let refused = compiled(&format(value.clone())).unwrap_err();
        let (GrammarRefused::Unsupported { at, .. } | GrammarRefused::Invalid { at, .. }) = &refused else {
            panic!("{refused}")
        };
        assert!(at.starts_with(path), "{value}: {refused}");
    }
}
