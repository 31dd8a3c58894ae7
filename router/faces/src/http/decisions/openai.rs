//! OpenAI's form: a list of questions of three kinds, and a list of answers.

use super::evidence::{text_of_content, text_of_input};
use super::{BY_LETTER, label_question, mean_level, option_line, question_text, usage};
use crate::http::error::HttpError;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use axum::Json;
use axum::extract::State;
use router::front::decide::{LabelQuestion, LabelRead, decide, option_labels};
use router::front::frontend::Frontend;
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::sync::Arc;

const QUESTIONS_MAX: usize = 400;
const CHOICES: std::ops::RangeInclusive<usize> = 2..=255;
const LEVELS: std::ops::RangeInclusive<usize> = 2..=10;

pub async fn decisions(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let (parsed, questions, reads) = record_refusal(&mut recorder, read(&front, page).map_err(HttpError::from))?;
    let decided = decide(&front, parsed, reads, &mut recorder).await.map_err(HttpError::from)?;
    let answers = questions.iter().zip(&decided.reads).map(|(question, read)| question.answer(read));
    Ok(Json(json!({
        "model": decided.model,
        "answers": answers.collect::<Vec<_>>(),
        "usage": usage(&decided.usage),
    })))
}

struct ListedQuestion {
    name: Value,
    kind: AnswerKind,
}

enum AnswerKind {
    Predicate,
    /// The values, each a text or a truth.
    Choice(Vec<Value>),
    Score(Vec<String>),
}

type ReadRequest = (ParsedRequest, Vec<ListedQuestion>, Vec<LabelQuestion>);

fn read(front: &Frontend, page: ApiRequest) -> Result<ReadRequest, Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    fields.refuse(&["stream", "temperature", "tools", "images"])?;
    let model = fields.string("model")?.unwrap_or_default();
    let text = front.text(&model)?;
    let input = fields.take("input").ok_or_else(|| Refusal::invalid("input", "is missing"))?;
    let state = text_of_input(input)?;
    let Some(Value::Array(all)) = fields.take("questions") else {
        return Err(Refusal::invalid("questions", "must be a list of questions"));
    };
    if all.is_empty() || all.len() > QUESTIONS_MAX {
        return Err(Refusal::invalid(
            "questions",
            format!("must be 1 to {QUESTIONS_MAX} questions, got {}", all.len()),
        ));
    }
    let (mut questions, mut reads) = (Vec::new(), Vec::new());
    for (i, one) in all.iter().enumerate() {
        let (question, read) = question(&text, &state, i, one)?;
        questions.push(question);
        reads.push(read);
    }
    let placement = fields.placement()?;
    let (priority, deadline, cache_salt) = (fields.priority()?, fields.deadline()?, fields.cache_salt()?);
    let parsed =
        ParsedRequest { model, tenant, body, placement, priority, deadline, cache_salt, ..ParsedRequest::default() };
    Ok((parsed, questions, reads))
}

fn question(of: &ModelText, state: &str, i: usize, one: &Value) -> Result<(ListedQuestion, LabelQuestion), Refusal> {
    let fault = |why: &str| Refusal::invalid("questions", format!("question {i} {why}"));
    let name = match one.get("name") {
        None => Value::Null,
        Some(Value::String(name)) => name.as_str().into(),
        Some(_) => return Err(fault("has a name that is no text: name must be a string when provided")),
    };
    let instructions = text_of_content("questions", &one["instructions"])?;
    let list = |field: &str, n: std::ops::RangeInclusive<usize>| match one[field].as_array() {
        Some(all) if n.contains(&all.len()) => Ok(all),
        _ => Err(fault(&format!("must have {} to {} {field}", n.start(), n.end()))),
    };
    let described = |option: &Value| option["description"].as_str().unwrap_or_default().to_owned();
    let (kind, options): (AnswerKind, Vec<(String, String)>) = match one["type"].as_str() {
        Some("predicate") => {
            (AnswerKind::Predicate, ["false", "true"].map(|truth| (truth.into(), String::new())).into())
        }
        Some("choice") => {
            let choices = list("choices", CHOICES)?;
            let values: Vec<Value> = choices.iter().map(|choice| choice["value"].clone()).collect();
            if !values.iter().all(|value| value.is_string() || value.is_boolean()) {
                return Err(fault("must have choices whose value is a string or a boolean"));
            }
            if (1..values.len()).any(|i| values[..i].contains(&values[i])) {
                return Err(fault("has equal choices: choice values must be distinct"));
            }
            let options = choices.iter().map(|choice| (choice["value"].to_string(), described(choice))).collect();
            (AnswerKind::Choice(values), options)
        }
        Some("score") => {
            let levels = list("levels", LEVELS)?;
            let label = |level: &Value| level["label"].as_str().map(str::to_owned);
            let labels = levels.iter().map(label).collect::<Option<Vec<_>>>();
            let labels = labels.ok_or_else(|| fault("must have levels with a label that is a string"))?;
            let options = labels.iter().cloned().zip(levels.iter().map(described)).collect();
            (AnswerKind::Score(labels), options)
        }
        _ => return Err(fault("must have the type predicate, choice or score")),
    };
    let letters = option_labels(of, options.len())?;
    let lines = letters.iter().zip(&options).map(|(letter, (option, about))| option_line(letter, option, about));
    let text = question_text(state, &instructions, &lines.collect::<Vec<_>>(), BY_LETTER);
    Ok((ListedQuestion { name, kind }, label_question("", text, letters, format!("question {i}"))))
}

impl ListedQuestion {
    fn answer(&self, read: &LabelRead) -> Value {
        let (name, probabilities) = (&self.name, &read.probabilities);
        match &self.kind {
            AnswerKind::Predicate => json!({ "type": "predicate", "name": name, "probability": probabilities[1] }),
            AnswerKind::Choice(values) => {
                let of_each = values.iter().zip(probabilities);
                let of_each = of_each.map(|(value, of)| json!({ "value": value, "probability": of }));
                json!({
                    "type": "choice",
                    "name": name,
                    "choice": values[read.top()],
                    "confidence": read.confidence(),
                    "probabilities": of_each.collect::<Vec<_>>(),
                })
            }
            AnswerKind::Score(labels) => {
                let of_each = labels.iter().zip(probabilities).enumerate();
                let of_each = of_each.map(|(i, (label, of))| json!({ "value": i, "label": label, "probability": of }));
                json!({
                    "type": "score",
                    "name": name,
                    "score": mean_level(read),
                    "confidence": read.confidence(),
                    "probabilities": of_each.collect::<Vec<_>>(),
                })
            }
        }
    }
}
