//! The fields that constrain an answer: OpenAI's `response_format`, vLLM's `structured_outputs` and the older
//! `guided_..`, llama.cpp's `grammar` and `json_schema`, SGLang's `regex` and `ebnf`. They become one `Structure`. Two
//! of them in one request are refused.

use crate::http::fields::{Fields, wrong_type};
use proto::v1;
use proto::v1::structure::{Choices, Form};
use router::front::structure::{FIELD, vllm_grammar};
use router::refusal::Refusal;
use serde_json::{Map, Value};

/// A structure, and the field in which the client sent it.
pub struct RequestedStructure {
    pub structure: v1::Structure,
    pub field: &'static str,
}

/// Reads all of these fields. None if the answer is free text.
pub fn structure(fields: &mut Fields) -> Result<Option<RequestedStructure>, Refusal> {
    let candidates: [(&'static str, Option<Form>); 10] = [
        ("response_format", response_format(fields)?),
        ("structured_outputs", structured_outputs(fields)?),
        ("guided_json", fields.take("guided_json").map(|value| json_form("guided_json", value)).transpose()?),
        ("guided_regex", fields.string("guided_regex")?.map(Form::Regex)),
        ("guided_choice", fields.take("guided_choice").map(|value| choices("guided_choice", value)).transpose()?),
        ("guided_grammar", fields.string("guided_grammar")?.map(vllm_grammar)),
        // llama.cpp's own.
        ("grammar", fields.string("grammar")?.filter(|text| !text.is_empty()).map(Form::Gbnf)),
        ("json_schema", json_schema(fields)?),
        // SGLang's.
        ("regex", fields.string("regex")?.filter(|text| !text.is_empty()).map(Form::Regex)),
        ("ebnf", fields.string("ebnf")?.filter(|text| !text.is_empty()).map(Form::Ebnf)),
    ];
    let mut present = candidates.into_iter().filter_map(|(field, form)| Some((field, form?)));
    let Some((field, form)) = present.next() else { return Ok(None) };
    if let Some((other, _)) = present.next() {
        return Err(Refusal::invalid(other, format!("contradicts `{field}`: an answer has one structure")));
    }
    Ok(Some(RequestedStructure { structure: v1::Structure { form: Some(form) }, field }))
}

/// Renames the field of a refusal to the client's name.
pub fn rename_field(refusal: Refusal, field: Option<&'static str>) -> Refusal {
    match field {
        Some(field) => refusal.renamed(&[(FIELD, field)]),
        None => refusal,
    }
}

fn response_format(fields: &mut Fields) -> Result<Option<Form>, Refusal> {
    const NAME: &str = "response_format";
    let Some(mut format) = fields.object(NAME)? else { return Ok(None) };
    match format.take("type").as_ref().and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => match format.take("schema") {
            // llama.cpp accepts a schema here too.
            Some(schema) => json_form(NAME, schema).map(Some),
            None => Ok(Some(Form::JsonObject(true))),
        },
        Some("json_schema") => openai_form(format).map(Some),
        Some("regex") => {
            let pattern = format.take("pattern").or_else(|| format.take("regex"));
            Ok(Some(Form::Regex(string("response_format.pattern", pattern)?)))
        }
        Some("grammar") => {
            let text = string("response_format.grammar", format.take("grammar"))?;
            Ok(Some(vllm_grammar(text)))
        }
        Some("structural_tag") => Ok(Some(Form::StructuralTag(tag_value(format).to_string()))),
        _ => Err(Refusal::invalid("response_format.type", "must be text, json_object, json_schema or structural_tag")),
    }
}

/// `strict` makes no difference: every schema is enforced, and an unsupported one is refused by name.
fn openai_form(mut format: Fields) -> Result<Form, Refusal> {
    const NAME: &str = "response_format.json_schema";
    let inner = match format.take("json_schema") {
        Some(Value::Object(inner)) => inner,
        // llama.cpp accepts the schema itself here.
        None => match format.take("schema") {
            Some(schema) => return json_form("response_format.schema", schema),
            None => return Err(Refusal::invalid(NAME, "is missing")),
        },
        Some(other) => return Err(wrong_type(NAME, "an object", &other)),
    };
    let mut inner = Fields::of(inner);
    inner.boolean("strict")?;
    match inner.take("schema") {
        Some(schema) => json_form("response_format.json_schema.schema", schema),
        None => Err(Refusal::invalid("response_format.json_schema.schema", "is missing")),
    }
}

/// Returns a structural tag unchanged, of the older kind or the newer one.
fn tag_value(format: Fields) -> Value {
    let mut tag = Map::from_iter([("type".to_owned(), "structural_tag".into())]);
    tag.extend(format.rest());
    Value::Object(tag)
}

fn structured_outputs(fields: &mut Fields) -> Result<Option<Form>, Refusal> {
    const NAME: &str = "structured_outputs";
    let Some(mut inner) = fields.object(NAME)? else { return Ok(None) };
    let candidates = [
        inner.take("json").map(|value| json_form("structured_outputs.json", value)).transpose()?,
        inner.string("regex")?.map(Form::Regex),
        inner.take("choice").map(|value| choices("structured_outputs.choice", value)).transpose()?,
        inner.string("grammar")?.map(vllm_grammar),
        inner.boolean("json_object")?.filter(|is_enabled| *is_enabled).map(Form::JsonObject),
        inner.take("structural_tag").map(tag_form).transpose()?,
    ];
    let unserved = ["whitespace_pattern", "disable_additional_properties"];
    if let Some(name) = unserved.into_iter().find(|name| inner.take(name).is_some_and(|value| value != false)) {
        return Err(Refusal::Invalid {
            field: format!("{NAME}.{name}").into(),
            message: "is not supported yet".into(),
        });
    }
    let mut present = candidates.into_iter().flatten();
    match (present.next(), present.next()) {
        (_, Some(_)) => Err(Refusal::invalid(NAME, "has several forms; an answer has one structure")),
        (form, None) => Ok(form),
    }
}

fn tag_form(value: Value) -> Result<Form, Refusal> {
    match value {
        Value::String(text) => Ok(Form::StructuralTag(text)),
        tag @ Value::Object(_) => Ok(Form::StructuralTag(tag.to_string())),
        other => Err(wrong_type("structured_outputs.structural_tag", "a structural tag", &other)),
    }
}

/// Reads llama.cpp's top-level field. An empty schema counts as absent.
fn json_schema(fields: &mut Fields) -> Result<Option<Form>, Refusal> {
    let schema = fields.take("json_schema").filter(|schema| schema.as_object().is_none_or(|all| !all.is_empty()));
    schema.map(|schema| json_form("json_schema", schema)).transpose()
}

/// A JSON schema, as JSON or as text with JSON in it.
fn json_form(field: &'static str, value: Value) -> Result<Form, Refusal> {
    match value {
        Value::String(text) => Ok(Form::JsonSchema(text)),
        schema @ (Value::Object(_) | Value::Bool(_)) => Ok(Form::JsonSchema(schema.to_string())),
        other => Err(wrong_type(field, "a JSON schema", &other)),
    }
}

fn choices(field: &'static str, value: Value) -> Result<Form, Refusal> {
    let Value::Array(all) = value else { return Err(wrong_type(field, "a list of texts", &value)) };
    let text = |value: Value| match value {
        Value::String(text) => Ok(text),
        other => Err(wrong_type(field, "a list of texts", &other)),
    };
    let texts = all.into_iter().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok(Form::Choice(Choices { texts }))
}

fn string(field: &'static str, value: Option<Value>) -> Result<String, Refusal> {
    match value {
        Some(Value::String(text)) => Ok(text),
        None => Err(Refusal::invalid(field, "is missing")),
        Some(other) => Err(wrong_type(field, "a string", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<Option<RequestedStructure>, Refusal> {
        let Value::Object(members) = body else { panic!("no object") };
        structure(&mut Fields::of(members))
    }

    #[test]
    fn each_field_sets_one_form() {
        let check = |body: Value, field: &str, form: Form| {
            let requested = read(body.clone()).unwrap().unwrap();
            assert_eq!((requested.field, requested.structure.form), (field, Some(form)), "{body}");
        };
        let schema = || Form::JsonSchema(r#"{"type":"integer"}"#.into());
        let integer = json!({ "type": "integer" });
        let named = json!({ "name": "n", "schema": integer, "strict": true });
        let format = |value: Value| json!({ "response_format": value });
        check(format(json!({ "type": "json_object" })), "response_format", Form::JsonObject(true));
        check(format(json!({ "type": "json_object", "schema": integer })), "response_format", schema());
        check(format(json!({ "type": "json_schema", "json_schema": named })), "response_format", schema());
        check(format(json!({ "type": "json_schema", "schema": integer })), "response_format", schema());
        let tag = json!({ "type": "structural_tag", "format": { "type": "any_text" } });
        check(format(tag.clone()), "response_format", Form::StructuralTag(tag.to_string()));
        let outputs = |value: Value| json!({ "structured_outputs": value });
        check(outputs(json!({ "json": integer })), "structured_outputs", schema());
        check(outputs(json!({ "json": "{\"type\":\"integer\"}" })), "structured_outputs", schema());
        check(outputs(json!({ "regex": "a+" })), "structured_outputs", Form::Regex("a+".into()));
        let texts = || Form::Choice(Choices { texts: vec!["a".into(), "b".into()] });
        check(outputs(json!({ "choice": ["a", "b"] })), "structured_outputs", texts());
        check(
            outputs(json!({ "grammar": "root ::= \"a\"" })),
            "structured_outputs",
            Form::Ebnf("root ::= \"a\"".into()),
        );
        check(json!({ "guided_json": integer }), "guided_json", schema());
        check(json!({ "guided_regex": "a" }), "guided_regex", Form::Regex("a".into()));
        check(json!({ "guided_choice": ["a", "b"] }), "guided_choice", texts());
        check(json!({ "guided_grammar": "start: \"a\"" }), "guided_grammar", Form::Lark("start: \"a\"".into()));
        check(json!({ "grammar": "root ::= \"a\"" }), "grammar", Form::Gbnf("root ::= \"a\"".into()));
        check(json!({ "json_schema": integer }), "json_schema", schema());
    }

    #[test]
    fn what_changes_nothing_is_no_structure() {
        for body in [
            json!({}),
            json!({ "response_format": { "type": "text" }, "structured_outputs": {}, "guided_json": null }),
            json!({ "grammar": "", "json_schema": {}, "structured_outputs": { "json_object": false } }),
        ] {
            assert!(read(body.clone()).unwrap().is_none(), "{body}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, field) in [
            (json!({ "response_format": "json" }), "response_format"),
            (json!({ "response_format": { "type": "xml" } }), "response_format.type"),
            (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema"),
            (json!({ "guided_regex": "a", "grammar": "b" }), "grammar"),
            (json!({ "guided_choice": "a" }), "guided_choice"),
            (json!({ "guided_json": 1 }), "guided_json"),
            (json!({ "structured_outputs": { "regex": "a", "json": {} } }), "structured_outputs"),
            (
                json!({ "structured_outputs": { "regex": "a", "whitespace_pattern": " " } }),
                "structured_outputs.whitespace_pattern",
            ),
        ] {
            match read(body.clone()) {
                Err(Refusal::Invalid { field: named, .. }) => assert_eq!(named, field, "{body}"),
                _ => panic!("{body} was taken"),
            }
        }
    }
}
