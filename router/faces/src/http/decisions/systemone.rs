//! vLLM's form: named questions about a state of any JSON, and diagnostics of each answer.

use super::{BY_LETTER, label_question, mean_level, option_line, question_text};
use crate::http::error::HttpError;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::ranking::reply_id;
use axum::Json;
use axum::extract::State;
use router::front::decide::{LabelQuestion, LabelRead, decide};
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const QUESTIONS_MAX: usize = 64;
const OPTIONS_MAX: usize = 26;
const LEVELS_MAX: usize = 10;

pub async fn systemone(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let (parsed, questions, reads) = record_refusal(&mut recorder, read(page).map_err(HttpError::from))?;
    let decided = decide(&front, parsed, reads, &mut recorder).await.map_err(HttpError::from)?;
    let of_each = || questions.iter().zip(&decided.reads);
    let answers: Map<_, _> = of_each().map(|(question, read)| (question.id.clone(), question.answer(read))).collect();
    let diagnostics: Map<_, _> = of_each().map(|(question, read)| (question.id.clone(), diagnostics(read))).collect();
    Ok(Json(json!({
        "id": reply_id("decision"),
        "object": "structured_decision",
        "created": unix_seconds(),
        "model": decided.model,
        "answers": answers,
        "usage": {
            "input_tokens": decided.usage.prompt_tokens,
            "output_tokens": decided.usage.completion_tokens,
        },
        "diagnostics": diagnostics,
        "joint": null,
    })))
}

fn diagnostics(read: &LabelRead) -> Value {
    json!({ "label_mass": read.mass, "argmax_is_label": read.is_likeliest })
}

struct NamedQuestion {
    id: String,
    kind: NamedKind,
}

enum NamedKind {
    Choice(Vec<String>),
    /// Yes or no.
    Noul,
    Score(Vec<String>),
}

type ReadRequest = (ParsedRequest, Vec<NamedQuestion>, Vec<LabelQuestion>);

fn read(page: ApiRequest) -> Result<ReadRequest, Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    let has_media = ["images", "audio", "videos"].into_iter().find(|name| fields.has(name));
    if has_media.is_some() {
        return Err(Refusal::invalid("images", "this model does not take image inputs"));
    }
    if fields.boolean("joint")?.unwrap_or(false) {
        return Err(Refusal::invalid("joint", "this model reads each question on its own"));
    }
    let switches = fields.take("chat_template_kwargs").unwrap_or_default();
    if switches["enable_thinking"].as_bool() == Some(true) {
        let why = "a read is the reply's first token, so thinking must be off";
        return Err(Refusal::invalid("chat_template_kwargs", why));
    }
    let state = match fields.take("state") {
        Some(Value::String(state)) => state,
        Some(state) => state.to_string(),
        None => return Err(Refusal::invalid("state", "is missing")),
    };
    let system = fields.string("instructions")?.unwrap_or_default();
    let Some(Value::Object(all)) = fields.take("questions") else {
        return Err(Refusal::invalid("questions", "must be an object of questions"));
    };
    if all.is_empty() {
        return Err(Refusal::invalid("questions", "needs at least one question"));
    }
    if all.len() > QUESTIONS_MAX {
        return Err(Refusal::invalid("questions", format!("at most {QUESTIONS_MAX} for this model")));
    }
    let (mut questions, mut reads) = (Vec::new(), Vec::new());
    for (id, one) in &all {
        let (question, read) = question(&system, &state, id, one)?;
        questions.push(question);
        reads.push(read);
    }
    let model = fields.string("model")?.unwrap_or_default();
    let placement = fields.placement()?;
    let (priority, deadline, cache_salt) = (fields.priority()?, fields.deadline()?, fields.cache_salt()?);
    let parsed =
        ParsedRequest { model, tenant, body, placement, priority, deadline, cache_salt, ..ParsedRequest::default() };
    Ok((parsed, questions, reads))
}

fn question(system: &str, state: &str, id: &str, one: &Value) -> Result<(NamedQuestion, LabelQuestion), Refusal> {
    let fault = |why: String| Refusal::invalid("questions", format!("question '{id}': {why}"));
    let Value::Object(fields) = one else { return Err(fault("must be an object".into())) };
    let unknown: Vec<&String> =
        fields.keys().filter(|name| !["type", "instructions", "criteria"].contains(&name.as_str())).collect();
    if !unknown.is_empty() {
        return Err(fault(format!("unknown field(s) {unknown:?}")));
    }
    if id.is_empty() {
        return Err(Refusal::invalid("questions", "question ids must be non-empty"));
    }
    let instructions = match &one["instructions"] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let described = |about: Option<&Value>| about.and_then(Value::as_str).unwrap_or_default().to_owned();
    let (kind, labels, lines, ends): (NamedKind, Vec<String>, Vec<String>, &str) = match one["type"].as_str() {
        Some("choice") => {
            let Some(options) = one["criteria"].as_object().filter(|options| !options.is_empty()) else {
                return Err(fault("choice criteria must map option names to a description or null".into()));
            };
            if options.len() > OPTIONS_MAX {
                return Err(fault(format!("at most {OPTIONS_MAX} options for this model")));
            }
            let labels: Vec<String> = ('A'..='Z').take(options.len()).map(String::from).collect();
            let line = |(label, (name, about)): (&String, (&String, &Value))| {
                option_line(label, name, &described(Some(about)))
            };
            let lines = labels.iter().zip(options).map(line).collect();
            (NamedKind::Choice(options.keys().cloned().collect()), labels, lines, BY_LETTER)
        }
        Some("noul") => {
            let criteria = &one["criteria"];
            let is_known = |criteria: &Map<String, Value>| criteria.keys().all(|key| key == "true" || key == "false");
            if !(criteria.is_null() || criteria.as_object().is_some_and(is_known)) {
                return Err(fault("noul criteria must be an object with true and false".into()));
            }
            let line = |label: &str, of: &str| match described(criteria.get(of)).as_str() {
                "" => label.to_owned(),
                about => format!("{label}: {about}"),
            };
            let labels = ["yes", "no"].map(str::to_owned).into();
            (NamedKind::Noul, labels, vec![line("yes", "true"), line("no", "false")], "Answer with yes or no only.")
        }
        Some("score") => {
            let levels = one["criteria"].as_array().filter(|levels| levels.len() >= 2);
            let name = |level: &Value| level.as_str().map_or_else(|| level.to_string(), str::to_owned);
            let Some(levels) = levels.map(|levels| levels.iter().map(name).collect::<Vec<_>>()) else {
                return Err(fault("score criteria must be an ordered list of levels".into()));
            };
            if levels.len() > LEVELS_MAX {
                return Err(fault(format!("at most {LEVELS_MAX} options for this model")));
            }
            if (1..levels.len()).any(|i| levels[..i].contains(&levels[i])) {
                return Err(fault("duplicate option names".into()));
            }
            let labels: Vec<String> = (0..levels.len()).map(|i| i.to_string()).collect();
            let lines = labels.iter().zip(&levels).map(|(label, level)| format!("{label}: {level}")).collect();
            (NamedKind::Score(levels), labels, lines, "Answer with the number of one level only.")
        }
        other => {
            let other = other.unwrap_or_default();
            return Err(fault(format!("unknown question type '{other}'; supported: ['choice', 'noul', 'score']")));
        }
    };
    let text = question_text(state, &instructions, &lines, ends);
    Ok((NamedQuestion { id: id.to_owned(), kind }, label_question(system, text, labels, format!("question '{id}'"))))
}

impl NamedQuestion {
    fn answer(&self, read: &LabelRead) -> Value {
        let named = |names: &[String]| -> Map<String, Value> {
            names.iter().cloned().zip(read.probabilities.iter().map(|of| json!(of))).collect()
        };
        let confidence = read.confidence();
        match &self.kind {
            NamedKind::Choice(names) => json!({
                "type": "choice",
                "choice": names[read.top()],
                "probabilities": named(names),
                "confidence": confidence,
            }),
            NamedKind::Noul => json!({
                "type": "noul",
                "noul": read.probabilities[0],
                "probabilities": named(&["yes".to_owned(), "no".to_owned()]),
                "confidence": confidence,
            }),
            NamedKind::Score(levels) => {
                let numbers: Vec<String> = (0..levels.len()).map(|i| i.to_string()).collect();
                let legend: Map<String, Value> =
                    numbers.iter().cloned().zip(levels.iter().map(|of| json!(of))).collect();
                json!({
                    "type": "score",
                    "score": mean_level(read),
                    "legend": legend,
                    "probabilities": named(&numbers),
                    "confidence": confidence,
                })
            }
        }
    }
}
