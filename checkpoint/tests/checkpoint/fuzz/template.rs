//! Chat templates of models with pieces removed, doubled, swapped and inserted: each renders, or fails with a reason.

use super::reference;
use crate::harness::{Random, Rounds, scramble};
use checkpoint::{ChatTemplate, Conversation};
use serde_json::{Value, json};

/// Pieces of templates, valid and not. Not `'x' * n`: it is known to make 100 MB.
const PIECES: &[&str] = &[
    "{{ messages }}",
    "{{ messages | tojson(indent=4) }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if true %}",
    "{% else %}",
    "{% endif %}",
    "{% set ns = namespace(x=1) %}",
    "{% set ns.x = ns.x * 999999999 %}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(99999999) %}{% endfor %}",
    "{{ range(9999999999) | list }}",
    "{{ 'x' | indent(9999999999) }}",
    "{{ 'x'.ljust(9999999999) }}",
    "{{ 'x'.split('') }}",
    "{{ 'x'.replace('', 'y') }}",
    "{{ 'é'[0:1] }}{{ 'é'[-5:99:0] }}",
    "{{ messages[99999999999999999999] }}",
    "{{ messages[::-1] }}",
    "{{ 1 // 0 }}{{ 1 % 0 }}",
    "{{ 9223372036854775807 + 1 }}",
    "{{ (2 ** 99999999) }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y %% %') }}",
    "{{ bos_token + undefined_thing }}",
    "{{ messages | batch(0) }}{{ messages | slice(0) }}",
    "{{ '%s' | format(1, 2) }}",
    "{{ messages | map(attribute='role') | join(',') | upper }}",
    "{{ messages | groupby('role') }}",
    "{{ messages | sort(attribute='content') }}",
    "{% include 'chat' %}",
    "{% extends 'chat' %}",
    "{% block a %}{% endblock %}",
    "{% filter upper %}x{% endfilter %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{#",
    "{%- raw %}",
    "}}",
    "((((((((((((((((",
    "{{ [[[[[[[[[[[[[[[[",
    "\u{0}",
];

fn mutated(source: &str, random: &mut Random) -> String {
    let mut pieces = tokens(source);
    for _ in 0..=random.below(4) {
        let (at, other) = (random.below(pieces.len()), random.below(pieces.len()));
        match random.below(7) {
            0 => drop(pieces.remove(at)),
            1 => pieces.swap(at, other),
            2 => pieces.insert(at, pieces[other].clone()),
            3 if !pieces[at].is_empty() => pieces[at] = scramble(&pieces[at], random),
            4 => pieces[at] = pieces[at].repeat(1 + random.below(50)),
            _ => pieces.insert(at, random.one_of(PIECES).to_owned()),
        }
        if pieces.is_empty() {
            pieces.push(String::new());
        }
    }
    pieces.concat()
}

/// Splits a template into text and tags.
fn tokens(source: &str) -> Vec<String> {
    let mut pieces = vec![String::new()];
    let mut letters = source.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == '{' && matches!(letters.peek(), Some('%' | '{' | '#')) {
            pieces.push(String::new());
        }
        if let Some(last) = pieces.last_mut() {
            last.push(letter);
        }
        if letter == '}' && letters.peek() != Some(&'}') {
            pieces.push(String::new());
        }
    }
    pieces
}

fn with_tools() -> Vec<Value> {
    let call =
        json!({ "id": "a23456789", "type": "function", "function": { "name": "f", "arguments": { "é": [1.5] } } });
    vec![
        json!({ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }),
        json!({ "role": "assistant", "content": null, "tool_calls": [call] }),
        json!({ "role": "tool", "content": "2", "tool_call_id": "a23456789", "name": "f" }),
    ]
}

#[test]
fn template() {
    let files = std::fs::read_dir(reference("templates")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|kind| kind == "jinja")).collect();
    files.sort();
    let sources: Vec<String> = files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    assert!(sources.len() >= 10);
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let chats = [
        vec![message("user", "Hi {{ 1 }} {% x %}")],
        vec![
            message("system", "Be."),
            message("user", "é\"\n"),
            message("assistant", "<think>a</think>b"),
            message("user", ""),
        ],
        vec![message("", "\u{0}")],
        with_tools(),
    ];
    let tools = json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }]);
    let chats = chats.map(|messages| Conversation { tools: Some(tools.clone()), ..Conversation::new(messages) });
    let mut rounds = Rounds::of("template", 1500);
    let mut n_rendered = 0;
    while let Some(mut random) = rounds.next() {
        let source = mutated(&sources[random.below(sources.len())], &mut random);
        let template = match ChatTemplate::new(&source, Some("<s>".into()), None) {
            Ok(template) => template,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                continue;
            }
        };
        let rendered = chats.iter().filter(|chat| template.render(chat, 0).is_ok());
        n_rendered += u64::from(rendered.count() > 0);
    }
    assert!(
        !rounds.are_many() || (rounds.n() / 20..rounds.n() * 9 / 10).contains(&n_rendered),
        "{n_rendered} rendered"
    );
}
