//! The structural tags: a short form of each, and conforming texts, which are read back.

use crate::common::{Random, Reader};
use dialect::{AnswerPiece, AnswerStart, Dialect, Tool, ToolChoice, Tools};
use serde_json::{Map, Value, json};

fn tool(name: &str, parameters: Value, strict: bool) -> Tool {
    Tool { name: name.into(), parameters, strict }
}

fn one_tool(strict: bool) -> Tools {
    let properties = json!({"a": {"type": "integer"}, "s": {"type": "string"}, "e": {"enum": ["x", "y"]}});
    Tools::new(vec![tool("f", json!({"type": "object", "properties": properties, "required": ["a"]}), strict)])
}

fn dialect(calls: &str, thoughts: &str) -> Dialect {
    Dialect::NONE.with_call_form(calls).unwrap().with_thought_form(thoughts).unwrap()
}

/// A short form of a format: `'constant'`, `/pattern/`, `any`, `json`, `(this | that)`, `[begin content end]`, and
/// `{tags}` with their separator.
fn brief(format: &Value) -> String {
    let all =
        |key: &str, between: &str| format[key].as_array().unwrap().iter().map(brief).collect::<Vec<_>>().join(between);
    let word = |key: &str| format!("'{}'", format[key].as_str().unwrap());
    let end = if format["stop_after_first"] == true { "1" } else { "" };
    match format["type"].as_str().unwrap() {
        "const_string" => word("value"),
        "regex" => format!("/{}/", format["pattern"].as_str().unwrap()),
        "any_text" => "any".into(),
        "json_schema" => "json".into(),
        "sequence" => all("elements", " "),
        "or" => format!("({})", all("elements", " | ")),
        "tag" => format!("[{} {} {}]", word("begin"), brief(&format["content"]), word("end")),
        "tags_with_separator" => format!("{{{}}}{}{end}", all("tags", " | "), word("separator")),
        "triggered_tags" => format!("{} => {{{}}}{end}", format["triggers"], all("tags", " | ")),
        other => panic!("{other}"),
    }
}

/// For each form, how it writes calls of the one tool.
const WRITTEN: &[(&str, &str)] = &[
    ("hermes", "{['<tool_call>\n{\"name\": \"f\", \"arguments\": ' json '}\n</tool_call>']}'\n'"),
    ("llama3_json", "{['{\"name\": \"f\", \"parameters\": ' json '}']}'; '"),
    ("generic", "{['{\"name\": \"f\", \"arguments\": ' json '}']}'\n'"),
    ("granite", "'<|tool_call|>[' {['{\"name\": \"f\", \"arguments\": ' json '}']}', ' ']'"),
    ("phi4_mini_json", "'<|tool_call|>[' {['{\"name\": \"f\", \"arguments\": ' json '}']}', ' ']<|/tool_call|>'"),
    ("phi4_mini_functools", "'functools[' {['{\"name\": \"f\", \"arguments\": ' json '}']}', ' ']'"),
    ("mistral_list", "'[TOOL_CALLS][' {['{\"name\": \"f\", \"arguments\": ' json '}']}', ' ']'"),
    ("mistral", "{['[TOOL_CALLS]f[ARGS]' json '']}''"),
    (
        "deepseek_v3",
        "'<｜tool▁calls▁begin｜>' {['<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n' json \
             '\n```<｜tool▁call▁end｜>']}'\n' '<｜tool▁calls▁end｜>'",
    ),
    (
        "deepseek_v31",
        "'<｜tool▁calls▁begin｜>' {['<｜tool▁call▁begin｜>f<｜tool▁sep｜>' json '<｜tool▁call▁end｜>']}'' \
             '<｜tool▁calls▁end｜>'",
    ),
    (
        "kimi_k2",
        "'<|tool_calls_section_begin|>' {['<|tool_call_begin|>functions.f:' /[0-9]+/ \
             '<|tool_call_argument_begin|>' json '<|tool_call_end|>']}'' '<|tool_calls_section_end|>'",
    ),
    (
        "qwen3_coder",
        "{['<tool_call>\n<function=f>\n' ['<parameter=a>\n' json '\n</parameter>'] '\n' \
         (['<parameter=s>\n' any '</parameter>'] '\n' | '') \
         (['<parameter=e>\n' ('x' | 'y') '\n</parameter>'] '\n' | '') '</function>\n</tool_call>']}'\n'",
    ),
    (
        "glm45",
        "{['<tool_call>f\n' ['<arg_key>a</arg_key>\n<arg_value>' json '</arg_value>'] '\n' \
         (['<arg_key>s</arg_key>\n<arg_value>' any '</arg_value>'] '\n' | '') \
         (['<arg_key>e</arg_key>\n<arg_value>' ('x' | 'y') '</arg_value>'] '\n' | '') '</tool_call>']}'\n'",
    ),
    (
        "minimax_m2",
        "'<minimax:tool_call>\n' {['<invoke name=\"f\">\n' ['<parameter name=\"a\">' json '</parameter>'] '\n' \
         (['<parameter name=\"s\">' any '</parameter>'] '\n' | '') \
         (['<parameter name=\"e\">' ('x' | 'y') '</parameter>'] '\n' | '') '</invoke>']}'\n' '\n</minimax:tool_call>'",
    ),
    (
        "deepseek_v32",
        "'<｜DSML｜function_calls>\n' {['<｜DSML｜invoke name=\"f\">\n' \
         ['<｜DSML｜parameter name=\"a\" string=\"false\">' json '</｜DSML｜parameter>'] '\n' \
         (['<｜DSML｜parameter name=\"s\" string=\"true\">' any '</｜DSML｜parameter>'] '\n' | '') \
         (['<｜DSML｜parameter name=\"e\" string=\"true\">' ('x' | 'y') '</｜DSML｜parameter>'] '\n' | '') \
         '</｜DSML｜invoke>']}'\n' '\n</｜DSML｜function_calls>'",
    ),
    (
        "seed_oss",
        "{['<seed:tool_call>\n<function=f>\n' ['<parameter=a>' json '</parameter>'] '\n' \
         (['<parameter=s>' any '</parameter>'] '\n' | '') (['<parameter=e>' ('x' | 'y') '</parameter>'] '\n' | '') \
         '</function>\n</seed:tool_call>']}'\n'",
    ),
    (
        "functiongemma",
        "{['<start_function_call>call:f{' 'a:' json (',s:' ['<escape>' any '<escape>'] | '') \
             (',e:' ('<escape>x<escape>' | '<escape>y<escape>') | '') '}<end_function_call>']}''",
    ),
    (
        "gemma4",
        "{['<|tool_call>call:f{' 'a:' json (',s:' ['<|\"|>' any '<|\"|>'] | '') \
             (',e:' ('<|\"|>x<|\"|>' | '<|\"|>y<|\"|>') | '') '}<tool_call|>']}''",
    ),
    (
        "openai",
        "{['<|channel|>commentary to=functions.f <|constrain|>json<|message|>' json '<|call|>']}\
             '<|start|>assistant'",
    ),
];

#[track_caller]
fn check_written(form: &str, expect: &str) {
    let tag =
        dialect(form, "none").structural_tag(&one_tool(false), &ToolChoice::Required, true, AnswerStart::Answer, false);
    assert_eq!(brief(&tag.unwrap()["format"]), expect, "{form}");
}

#[test]
fn every_form_writes_what_it_was_trained_on() {
    WRITTEN.iter().for_each(|(form, expect)| check_written(form, expect));
    let call = "['f(' 'a=' json (', s=' json | '') (', e=' json | '') ')']";
    check_written("pythonic", &format!("'[' {{{call}}}', ' ']'"));
    check_written("llama4_pythonic", &format!("'<|python_start|>[' {{{call}}}', ' ']<|python_end|>'"));
    check_written("lfm2", &format!("'<|tool_call_start|>[' {{{call}}}', ' ']<|tool_call_end|>'"));
    check_written("olmo3", &format!("'<function_calls>\n' {{{call}}}'\n' '\n</function_calls>'"));
    check_written("gemma3", &format!("'```tool_code\n' {{{call}}}'\n' '\n```'"));
}

fn hermes_call(schema: Value) -> Value {
    json!({
        "type": "tag",
        "begin": "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    })
}

fn hermes_calls(is_single: bool) -> Value {
    json!({
        "type": "tags_with_separator",
        "tags": [hermes_call(one_tool(true).get("f").unwrap().parameters.clone())],
        "separator": "\n",
        "at_least_one": true,
        "stop_after_first": is_single,
    })
}

#[test]
fn a_required_call_is_the_whole_answer() {
    let hermes = dialect("hermes", "none");
    let tag = |choice: &ToolChoice, parallel| {
        hermes.structural_tag(&one_tool(true), choice, parallel, AnswerStart::Answer, false)
    };
    let of = |format: Value| Some(json!({"type": "structural_tag", "format": format}));
    assert_eq!(tag(&ToolChoice::Required, true), of(hermes_calls(false)));
    assert_eq!(tag(&ToolChoice::Required, false), of(hermes_calls(true)));
    assert_eq!(tag(&ToolChoice::Named("f".into()), true), of(hermes_calls(true)));
    assert_eq!(tag(&ToolChoice::Named("g".into()), true), None);
    assert_eq!(tag(&ToolChoice::None, true), None);
    // Without `strict` the schema holds as far as it can be enforced.
    let free =
        hermes.structural_tag(&one_tool(false), &ToolChoice::Required, false, AnswerStart::Answer, false).unwrap();
    assert_eq!(free["format"]["tags"][0]["content"]["strict"], false);
}

#[test]
fn a_tool_without_parameters_has_none() {
    let tools = Tools::new(vec![tool("f", Value::Null, true)]);
    let tag =
        |form| dialect(form, "none").structural_tag(&tools, &ToolChoice::Required, false, AnswerStart::Answer, false);
    let empty = json!({"type": "object", "properties": {}, "additionalProperties": false});
    assert_eq!(tag("hermes").unwrap()["format"]["tags"][0], hermes_call(empty));
    assert_eq!(brief(&tag("pythonic").unwrap()["format"]), "'[' {['f(' ('') ')']}', '1 ']'");
}

#[test]
fn parameters_bring_their_definitions() {
    let root = json!({"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}});
    let tools = Tools::new(vec![tool("f", root, false)]);
    let qwen = dialect("qwen3_coder", "none");
    let tag = qwen.structural_tag(&tools, &ToolChoice::Required, false, AnswerStart::Answer, false).unwrap();
    let parameter = &tag["format"]["tags"][0]["content"]["elements"][0]["elements"][0]["elements"][0];
    let expect = json!({"$ref": "#/$defs/P", "$defs": {"P": {"type": "integer"}}});
    assert_eq!(parameter["content"]["json_schema"], expect);
}

#[test]
fn a_thought_may_come_first() {
    let tag = |calls, thoughts, opening, think| {
        let dialect = dialect(calls, thoughts);
        let tag = dialect.structural_tag(&one_tool(false), &ToolChoice::Required, false, opening, think).unwrap();
        brief(&tag["format"])
    };
    let calls = brief(&hermes_calls(true));
    assert_eq!(tag("hermes", "qwen3", AnswerStart::Answer, false), calls);
    assert_eq!(tag("hermes", "qwen3", AnswerStart::Thought, true), format!("['' any '</think>'] /\\n{{0,2}}/ {calls}"));
    assert_eq!(
        tag("hermes", "qwen3", AnswerStart::Answer, true),
        format!("(['<think>' any '</think>'] /\\n{{0,2}}/ {calls} | {calls})")
    );
    let calls = tag("openai", "openai_gptoss", AnswerStart::Answer, false);
    let thought = "any '<|end|><|start|>assistant']";
    assert_eq!(
        tag("openai", "openai_gptoss", AnswerStart::Answer, true),
        format!("(['<|channel|>analysis<|message|>' {thought} {calls} | {calls})")
    );
}

#[test]
fn auto_enforces_strict_tools_from_the_trigger_on() {
    let tag = |form, tools: &Tools| {
        let tag = dialect(form, "none").structural_tag(tools, &ToolChoice::Auto, true, AnswerStart::Answer, false);
        tag.map(|tag| tag["format"].clone())
    };
    assert_eq!(tag("hermes", &one_tool(false)), None);
    let expect = json!({
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [hermes_call(one_tool(true).get("f").unwrap().parameters.clone())],
        "at_least_one": false,
        "stop_after_first": false,
    });
    assert_eq!(tag("hermes", &one_tool(true)), Some(expect));
    assert_eq!(tag("pythonic", &one_tool(true)), None, "any text may have a bracket");
    assert_eq!(
        brief(&tag("kimi_k2", &one_tool(true)).unwrap()),
        "[\"<|tool_calls_section_begin|>\"] => {['<|tool_calls_section_begin|>' \
         {['<|tool_call_begin|>functions.f:' /[0-9]+/ '<|tool_call_argument_begin|>' json '<|tool_call_end|>']}'' \
         '<|tool_calls_section_end|>']}1"
    );
    let free = tool("g", json!({"properties": {"b": {"type": "string"}}}), false);
    let mixed = Tools::new(one_tool(true).iter().cloned().chain([free]).collect());
    let content = &tag("hermes", &mixed).unwrap()["tags"][1]["content"];
    assert_eq!(content["json_schema"], json!({"type": "object"}));
}

/// Writes texts that conform to a format, and records the calls in them.
struct Writer {
    random: Random,
    text: String,
    /// For each call, its values: its arguments as a whole, or each of them.
    calls: Vec<Vec<Value>>,
}

impl Writer {
    fn pick<'a>(&mut self, all: &'a Value) -> &'a Value {
        let all = all.as_array().unwrap();
        &all[self.random.below(all.len())]
    }

    fn leaf(&mut self, value: Value) {
        if let Some(call) = self.calls.last_mut() {
            call.push(value);
        }
    }

    fn write(&mut self, format: &Value) {
        let word = |key: &str| format[key].as_str().unwrap();
        match format["type"].as_str().unwrap() {
            "const_string" => self.text.push_str(word("value")),
            "regex" => self.text.push_str(if word("pattern") == "[0-9]+" { "12" } else { "\n" }),
            "json_schema" => {
                let value = self.value(&format["json_schema"]);
                self.text.push_str(&value.to_string());
                self.leaf(value);
            }
            "sequence" => format["elements"].as_array().unwrap().iter().for_each(|element| self.write(element)),
            "or" => self.either(&format["elements"]),
            "tag" => self.tag(format),
            "tags_with_separator" => self.calls(format),
            other => panic!("{other}"),
        }
    }

    fn either(&mut self, elements: &Value) {
        let chosen = self.pick(elements);
        self.write(chosen);
        let are_texts = elements.as_array().unwrap().iter().all(|element| element["value"].is_string());
        let text = chosen["value"].as_str().unwrap_or_default();
        if are_texts && !text.is_empty() {
            self.leaf(text.replace("<escape>", "").replace("<|\"|>", "").into());
        }
    }

    fn calls(&mut self, format: &Value) {
        let n = if format["stop_after_first"] == true { 1 } else { 1 + self.random.below(3) };
        for i in 0..n {
            if i > 0 {
                self.text.push_str(format["separator"].as_str().unwrap());
            }
            self.calls.push(Vec::new());
            let tag = self.pick(&format["tags"]);
            self.write(tag);
        }
    }

    fn tag(&mut self, format: &Value) {
        let (begin, end) = (format["begin"].as_str().unwrap(), format["end"].as_str().unwrap());
        self.text.push_str(begin);
        if format["content"]["type"] == "any_text" {
            let text = self.any_text(end);
            self.text.push_str(&text);
            let is_framed = begin.ends_with(">\n");
            let meant = text.strip_suffix('\n').filter(|_| is_framed).unwrap_or(&text);
            self.leaf(meant.into());
        } else {
            self.write(&format["content"]);
        }
        self.text.push_str(end);
    }

    /// Writes any text that does not contain `end`.
    fn any_text(&mut self, end: &str) -> String {
        const PARTS: [&str; 14] =
            ["a", " ", "\n", "\"", "\\", "<", "</", "{", "]", "'", "é😀", "<tool_call>", "\u{7}", "</tool_call>"];
        loop {
            let n = self.random.below(8);
            let text: String = (0..n).map(|_| PARTS[self.random.below(PARTS.len())]).collect();
            if format!("{text}{end}").find(end) == Some(text.len()) {
                return text;
            }
        }
    }

    fn value(&mut self, schema: &Value) -> Value {
        if let Some(values) = schema.get("enum") {
            return self.pick(values).clone();
        }
        match schema["type"].as_str().unwrap() {
            "string" => self.any_text("\u{0}").into(),
            "integer" => (self.random.below(2000) as i64 - 1000).into(),
            "boolean" => (self.random.below(2) == 0).into(),
            "array" => (0..self.random.below(3)).map(|_| self.value(&schema["items"])).collect(),
            "object" => self.object(schema),
            other => panic!("{other}"),
        }
    }

    fn object(&mut self, schema: &Value) -> Value {
        let mut object = Map::new();
        let empty = Map::new();
        for (name, property) in schema["properties"].as_object().unwrap_or(&empty) {
            let is_required = schema["required"].as_array().is_some_and(|all| all.contains(&json!(name)));
            if is_required || self.random.below(2) == 0 {
                object.insert(name.clone(), self.value(property));
            }
        }
        object.into()
    }
}

fn many_tools() -> Tools {
    let m = json!({"type": "array", "items": {"type": "integer"}});
    let properties = json!({
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "e": {"enum": ["x", "y z"]},
        "b": {"type": "boolean"},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"type": "object", "properties": {"k": {"type": "string"}, "m": m}},
    });
    Tools::new(vec![
        tool("one", json!({"type": "object", "properties": properties, "required": ["s", "o"]}), false),
        tool("two.b-c_d", json!({"type": "object", "properties": properties}), false),
        tool("none", json!({"type": "object", "properties": {}}), false),
    ])
}

#[test]
fn what_conforms_is_read_back() {
    for reader in crate::hostile::forms().into_iter().filter(|reader| reader.dialect.has_calls()) {
        for (opening, think) in
            [(AnswerStart::Answer, false), (AnswerStart::Answer, true), (AnswerStart::Thought, true)]
        {
            let reader = Reader { tools: many_tools(), opening, dialect: reader.dialect };
            for seed in 0..40 {
                let choice = if seed % 4 == 0 { ToolChoice::Named("one".into()) } else { ToolChoice::Required };
                let tag = reader.dialect.structural_tag(&reader.tools, &choice, seed % 3 > 0, opening, think).unwrap();
                check_read_back(&reader, &tag["format"], seed);
            }
        }
    }
}

fn check_read_back(reader: &Reader, format: &Value, seed: u64) {
    let mut writer = Writer { random: Random(seed), text: String::new(), calls: Vec::new() };
    writer.write(format);
    let (_, output) = reader.read([writer.text.as_str()]);
    let arguments = output.iter().filter_map(|piece| match piece {
        AnswerPiece::CallArguments { text, .. } => Some(text),
        piece => {
            assert!(!matches!(piece, AnswerPiece::Content(_)), "{:?} gives {output:?}", writer.text);
            None
        }
    });
    let arguments: Vec<&String> = arguments.collect();
    assert_eq!(arguments.len(), writer.calls.len(), "{:?} gives {output:?}", writer.text);
    let n_ends = output.iter().filter(|piece| matches!(piece, AnswerPiece::CallEnd { .. })).count();
    assert_eq!(n_ends, writer.calls.len(), "{:?} gives {output:?}", writer.text);
    for (arguments, values) in arguments.into_iter().zip(&writer.calls) {
        let read: Value =
            serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e}: {arguments} of {:?}", writer.text));
        let members: Vec<&Value> = read.as_object().unwrap().values().collect();
        let is_same = values.iter().eq(members) || values.as_slice() == [read.clone()];
        assert!(is_same, "{:?} gives {arguments}, expected {values:?}", writer.text);
    }
}
