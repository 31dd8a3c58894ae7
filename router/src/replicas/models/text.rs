//! Tokenizer and template of one model. Knows no replica and no other model.

use crate::refusal::Refusal;
use checkpoint::{ChatTemplate, Defaults, ModelSpec, Tokenizer};
use proto::v1;
use proto::v1::generate_request::Input;
use types::{Token, Tokens};

/// Who may say a message. A template that meets another one writes it, or nothing, or fails.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// How a model's text is tokenized, rendered and decoded.
pub struct ModelText {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    pub spec: ModelSpec,
    pub defaults: Defaults,
}

impl ModelText {
    /// `add_special` is for plain text; a template writes its special tokens itself. `now` is the time that it is told
    /// when it asks, in Unix seconds.
    pub(crate) fn encode(&self, input: Input, add_special: bool, now: u64) -> Result<Tokens, Refusal> {
        let (field, text, add_special) = match input {
            Input::TokenIds(ids) => return self.checked(ids.ids),
            Input::Text(text) => ("text", text, add_special),
            Input::Chat(chat) => ("chat", self.render(chat, now)?, false),
        };
        let tokens = self.tokenizer.encode(&text, add_special);
        let tokens = tokens.map_err(|error| Refusal::invalid(field, format!("cannot be tokenized: {error}")))?;
        if tokens.is_empty() {
            return Err(Refusal::invalid(field, "the prompt is empty"));
        }
        // A tokenizer may know more tokens than the model has rows for.
        self.check_ids(field, &tokens)?;
        Ok(tokens)
    }

    fn checked(&self, ids: Vec<Token>) -> Result<Tokens, Refusal> {
        if ids.is_empty() {
            return Err(Refusal::invalid("token_ids", "the prompt is empty"));
        }
        self.check_ids("token_ids", &ids)?;
        Ok(ids)
    }

    pub(crate) fn check_ids(&self, field: &'static str, ids: &[Token]) -> Result<(), Refusal> {
        let n_vocab = self.spec.vocab;
        match ids.iter().find(|id| **id >= n_vocab) {
            Some(id) => Err(Refusal::invalid(field, format!("{id} is no token: the vocabulary has {n_vocab}"))),
            None => Ok(()),
        }
    }

    fn render(&self, chat: v1::Chat, now: u64) -> Result<String, Refusal> {
        let no_template = || Refusal::invalid("chat", "the model has no chat template; send text instead");
        let template = self.template.as_ref().ok_or_else(no_template)?;
        if chat.messages.is_empty() {
            return Err(Refusal::invalid("chat", "there are no messages"));
        }
        let is_known = |message: &v1::ChatMessage| ROLES.contains(&message.role.as_str());
        if let Some(i) = chat.messages.iter().position(|message| !is_known(message)) {
            return Err(Refusal::invalid("chat", format!("messages[{i}].role must be one of {}", ROLES.join(", "))));
        }
        let message = |message: v1::ChatMessage| checkpoint::Message { role: message.role, content: message.content };
        let messages: Vec<checkpoint::Message> = chat.messages.into_iter().map(message).collect();
        let rendered = template.render(&messages, chat.add_generation_prompt.unwrap_or(true), now);
        rendered.map_err(|error| Refusal::invalid("chat", error.to_string()))
    }
}
