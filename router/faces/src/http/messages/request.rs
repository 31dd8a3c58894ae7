//! A request for a message, or for a count of its tokens: both read the same chat. Has no knowledge of answers.

use crate::http::fields::{Fields, StreamOptions};
use crate::http::known::Endpoint;
use crate::http::messages::thinking::{self, ThinkingOptions};
use crate::http::messages::{tools, turns};
use crate::http::page::ApiRequest;
use crate::http::single::{self, objects};
use proto::v1;
use proto::v1::generate_request::Input;
use proto::v1::structure::Form;
use router::front::frontend::Frontend;
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use serde_json::{Map, Value};

pub struct MessagesRequest {
    pub parsed: ParsedRequest,
    pub options: MessageOptions,
}

/// The client's options for the answer.
pub struct MessageOptions {
    pub is_stream: bool,
    pub shows_thoughts: bool,
    /// The field that constrains the answer.
    pub structure_field: &'static str,
}

/// The parts of a request that become the prompt, and the constraint on the answer.
pub struct ChatInput {
    pub chat: v1::Chat,
    thinking: ThinkingOptions,
    structure: Option<v1::Structure>,
    structure_field: &'static str,
}

pub fn parse_request(front: &Frontend, mut page: ApiRequest) -> Result<MessagesRequest, Refusal> {
    let fields = &mut page.fields;
    fields.check(Endpoint::Messages)?;
    let model = fields.string("model")?.unwrap_or_default();
    let ChatInput { chat, thinking, structure, structure_field } = read_chat(fields)?;
    // A model without thoughts meets every budget.
    let thinks = || front.text(&model).is_ok_and(|text| text.dialect.has_thoughts());
    let chat = v1::Chat { thinking_token_budget: thinking.budget.filter(|_| thinks()), ..chat };
    let mut sampling = fields.sampling()?;
    sampling.stop.extend(fields.strings("stop_sequences")?);
    sampling.structure = structure;
    if sampling.max_tokens.is_none() {
        return Err(Refusal::invalid("max_tokens", "is missing"));
    }
    let is_stream = fields.boolean("stream")?.unwrap_or(false);
    let parsed = single::prompt_request(fields, model, Input::Chat(chat), sampling)?;
    let parsed = page.complete_request(parsed, is_stream.then(StreamOptions::default), &front.config.limits)?;
    Ok(MessagesRequest {
        parsed,
        options: MessageOptions { is_stream, shows_thoughts: thinking.is_shown, structure_field },
    })
}

pub fn read_chat(fields: &mut Fields) -> Result<ChatInput, Refusal> {
    let system = turns::system(fields.take("system"))?;
    let messages = turns::messages(objects("messages", fields.take("messages"))?)?;
    let chat = v1::Chat { messages: system.into_iter().chain(messages).collect(), ..v1::Chat::default() };
    let chat = tools::read(fields, turns::continue_last_turn(chat)?)?;
    let (output, older) = (fields.object("output_config")?, fields.object("output_format")?);
    let OutputConfig { effort, structure, structure_field } = parse_output_config(output, older)?;
    let mut variables = Map::new();
    variables.extend(effort.map(|effort| ("reasoning_effort".to_owned(), effort.into())));
    let (thinking, chat) = thinking::read(fields, chat, &mut variables)?;
    let template_variables = if variables.is_empty() { String::new() } else { Value::Object(variables).to_string() };
    Ok(ChatInput { chat: v1::Chat { template_variables, ..chat }, thinking, structure, structure_field })
}

struct OutputConfig {
    effort: Option<String>,
    structure: Option<v1::Structure>,
    structure_field: &'static str,
}

/// `output_format` is the older place of `output_config.format`.
fn parse_output_config(config: Option<Fields>, older: Option<Fields>) -> Result<OutputConfig, Refusal> {
    let (mut effort, mut format) = (None, None);
    if let Some(mut config) = config {
        effort = config.string("effort").map_err(|refusal| refusal.renamed(&[("effort", EFFORT)]))?;
        format = config.object("format").map_err(|refusal| refusal.renamed(&[("format", FORMAT)]))?;
        // Other members may change the answer, so they are refused.
        if let Some(name) = config.rest().iter().find_map(|(name, value)| (!value.is_null()).then_some(name)) {
            return Err(Refusal::invalid(format!("output_config.{name}"), "is not supported"));
        }
    }
    if effort.as_deref().is_some_and(|effort| !EFFORTS.contains(&effort)) {
        return Err(Refusal::invalid(EFFORT, format!("must be one of {}", EFFORTS.join(", "))));
    }
    let (structure, structure_field) = match (format, older) {
        (Some(_), Some(_)) => {
            return Err(Refusal::invalid(
                OLDER_FORMAT,
                "contradicts `output_config.format`: an answer has one structure",
            ));
        }
        (None, Some(older)) => (Some(schema(OLDER_FORMAT, older)?), OLDER_FORMAT),
        (format, None) => (format.map(|format| schema(FORMAT, format)).transpose()?, FORMAT),
    };
    Ok(OutputConfig { effort, structure, structure_field })
}

const EFFORT: &str = "output_config.effort";
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];
const FORMAT: &str = "output_config.format";
const OLDER_FORMAT: &str = "output_format";

fn schema(field: &'static str, mut format: Fields) -> Result<v1::Structure, Refusal> {
    if format.take("type").is_none_or(|kind| kind != "json_schema") {
        return Err(Refusal::invalid(format!("{field}.type"), "must be json_schema"));
    }
    match format.take("schema") {
        Some(schema @ Value::Object(_)) => Ok(v1::Structure { form: Some(Form::JsonSchema(schema.to_string())) }),
        _ => Err(Refusal::invalid(format!("{field}.schema"), "must be a JSON schema, which is an object")),
    }
}
