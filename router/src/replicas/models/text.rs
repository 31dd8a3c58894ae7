//! Tokenizer, template and dialect of one model. Knows no replica and no other model.

use crate::refusal::Refusal;
use crate::replicas::models::conversation::{self, ParsedChat};
use crate::replicas::models::prompted_tools;
use crate::replicas::models::talk::{AnswerParseContext, markers, may_open_thought};
use checkpoint::{ChatTemplate, Checkpoint, Conversation, ModelSpec, SamplingDefaults, TokenTable, Tokenizer};
use dialect::{Dialect, UnknownDialect};
use grammar::Vocabulary;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value};
use std::sync::{Arc, OnceLock};
use types::{Token, Tokens};

/// The form of calls for templates that know no tools.
const PROMPTED_CALLS: &str = "generic";
/// The variables of templates that switch the model's thinking.
pub const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// A variable of templates, and the field that sets it.
const EFFORT: &str = "reasoning_effort";
const THINKING_BUDGET: &str = "thinking_token_budget";

/// How a model's text is tokenized, rendered, decoded and read. Cheap to clone.
#[derive(Clone)]
pub struct ModelText {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    pub spec: ModelSpec,
    /// The sampling that the model's files recommend.
    pub defaults: SamplingDefaults,
    /// The sampling that the catalogue recommends.
    pub card: SamplingDefaults,
    /// How the model writes calls and thoughts.
    pub dialect: Dialect,
    /// Whether clients may send a chat template of their own.
    pub trusts_templates: bool,
    /// The operator's values for the template's variables, unless a client sets them.
    pub variables: Map<String, Value>,
    /// A hash of the bytes of all tokens, made for the first request that has a grammar.
    pub tokens_hash: Arc<OnceLock<[u8; 32]>>,
    /// The template of a model without one, made for its first chat.
    pub fallback: Arc<OnceLock<ChatTemplate>>,
}

/// An input as tokens. For a chat it also has how the answer is read.
pub(crate) struct EncodedInput {
    pub ids: Tokens,
    pub talk: Option<AnswerParseContext>,
    /// Where the second text of a pair begins; 0: it is one text.
    pub second_text: u32,
}

/// The characters `start..end` of a text that each of its tokens stands for.
pub type TokenSpans = Vec<(usize, usize)>;

impl ModelText {
    pub fn of(checkpoint: &Checkpoint) -> checkpoint::Result<ModelText> {
        let text = ModelText {
            tokenizer: checkpoint.tokenizer()?,
            template: None,
            spec: checkpoint.spec().clone(),
            defaults: *checkpoint.defaults(),
            card: SamplingDefaults::default(),
            dialect: Dialect::NONE,
            trusts_templates: false,
            variables: Map::new(),
            tokens_hash: Arc::default(),
            fallback: Arc::default(),
        };
        Ok(match checkpoint.chat_template()? {
            Some(template) => text.with_template(template),
            None => text,
        })
    }

    /// Returns the same model with another template, and the dialect that it shows.
    pub fn with_template(self, template: ChatTemplate) -> ModelText {
        let dialect = dialect_of(&template);
        ModelText { template: Some(template), dialect, ..self }
    }

    /// Returns the same model with calls and thoughts of these names, if they are given.
    pub fn with_dialect(self, calls: Option<&str>, thoughts: Option<&str>) -> Result<ModelText, UnknownDialect> {
        let dialect = calls.map_or(Ok(self.dialect), |name| self.dialect.with_call_form(name))?;
        let dialect = thoughts.map_or(Ok(dialect), |name| dialect.with_thought_form(name))?;
        Ok(ModelText { dialect, ..self })
    }

    /// The length of an embedding.
    pub fn embedding_length(&self) -> u32 {
        self.spec.pooling.n_outputs(self.spec.hidden)
    }

    /// Refuses an answer of tokens where the model draws none.
    pub(crate) fn check_generates(&self) -> Result<(), Refusal> {
        let what = match self.spec.pooling.is_classifier() {
            true => "a classifier: use /v1/score, /v1/rerank or /classify",
            false if self.spec.encoder.is_some() => "an encoder: use /v1/embeddings",
            false => return Ok(()),
        };
        Err(Refusal::invalid("model", format!("draws no tokens, because it is {what}")))
    }

    /// Returns the hash of the vocabulary that ranks make masks for.
    pub(crate) fn hash_of_tokens(&self) -> [u8; 32] {
        let hash = || {
            let table = TokenTable::new(self.tokenizer.clone());
            let n_vocab = self.spec.vocab as usize;
            Vocabulary::hash_of(table.tokens().take(n_vocab), n_vocab, &self.spec.eos)
        };
        *self.tokens_hash.get_or_init(hash)
    }

    pub(crate) fn known_tokens_hash(&self) -> Option<[u8; 32]> {
        self.tokens_hash.get().copied()
    }

    /// Returns an input's tokens. `add_special` is for plain text; a template writes its special tokens itself. `now`
    /// is the time for a template that reads it, in Unix seconds.
    pub(crate) fn encode(&self, input: Input, add_special: bool, now: u64) -> Result<EncodedInput, Refusal> {
        Ok(self.encode_input(input, add_special, now)?.0)
    }

    /// Encodes as `encode` does, and also returns the span of each token in the text. Token ids in a request have none.
    pub(crate) fn encode_with_places(
        &self,
        input: Input,
        now: u64,
    ) -> Result<(EncodedInput, Option<TokenSpans>), Refusal> {
        let (encoded, text) = self.encode_input(input, true, now)?;
        let places = text.map(|text| self.tokenizer.char_spans(&text, &encoded.ids));
        Ok((encoded, places))
    }

    fn encode_input(
        &self,
        input: Input,
        add_special: bool,
        now: u64,
    ) -> Result<(EncodedInput, Option<String>), Refusal> {
        let (field, text, talk) = match input {
            Input::TokenIds(ids) => {
                return Ok((EncodedInput { ids: self.checked(ids.ids)?, talk: None, second_text: 0 }, None));
            }
            Input::Pair(pair) => return self.encode_pair(&pair).map(|encoded| (encoded, None)),
            Input::Text(text) => ("text", text, None),
            Input::Chat(chat) => {
                let (text, talk) = self.render(chat, now)?;
                ("chat", text, Some(talk))
            }
        };
        let tokens = self.tokenizer.encode(&text, add_special && talk.is_none());
        let ids = tokens.map_err(|error| Refusal::invalid(field, format!("cannot be tokenized: {error}")))?;
        if ids.is_empty() {
            return Err(Refusal::invalid(field, "the prompt is empty"));
        }
        // A tokenizer may know more tokens than the model has rows for.
        self.check_ids(field, &ids)?;
        Ok((EncodedInput { ids, talk, second_text: 0 }, Some(text)))
    }

    fn encode_pair(&self, pair: &v1::TextPair) -> Result<EncodedInput, Refusal> {
        let encoded = self.tokenizer.encode_pair(&pair.first, &pair.second);
        let (ids, second_text) =
            encoded.map_err(|error| Refusal::invalid("pair", format!("cannot be tokenized: {error}")))?;
        self.check_ids("pair", &ids)?;
        Ok(EncodedInput { ids, talk: None, second_text })
    }

    fn checked(&self, ids: Vec<Token>) -> Result<Tokens, Refusal> {
        if ids.is_empty() {
            return Err(Refusal::invalid("token_ids", "the prompt is empty"));
        }
        self.check_ids("token_ids", &ids)?;
        Ok(ids)
    }

    pub fn check_ids(&self, field: &'static str, ids: &[Token]) -> Result<(), Refusal> {
        let n_vocab = self.spec.vocab;
        match ids.iter().find(|id| **id >= n_vocab) {
            Some(id) => Err(Refusal::invalid(field, format!("{id} is out of vocabulary: there are {n_vocab} tokens"))),
            None => Ok(()),
        }
    }

    /// Returns the prompt of a chat, and how its answer is read.
    pub(crate) fn render(&self, chat: v1::Chat, now: u64) -> Result<(String, AnswerParseContext), Refusal> {
        let mut read = conversation::read(chat)?;
        let sent = read.template.as_deref().map(|source| self.sent_template(source)).transpose()?;
        let template = match sent.as_ref().or(self.template.as_ref()) {
            Some(template) => template,
            None => self.fallback_template()?,
        };
        if let Some(effort) = read.effort.take() {
            apply_effort(template, self.dialect, &mut read.conversation, effort)?;
        }
        for (name, value) in &self.variables {
            read.conversation.variables.entry(name).or_insert_with(|| value.clone());
        }
        // A model without thoughts fulfils a budget of zero.
        if read.thinking_token_budget.is_some_and(|n| n > 0) && !self.dialect.has_thoughts() {
            let why = "cannot be enforced: the model's reasoning format is unknown (set --reasoning-parser)";
            return Err(Refusal::invalid(THINKING_BUDGET, why));
        }
        let rendered = render_template(template, &read, now)?;
        let opening = self.dialect.opens_thought(&rendered);
        let ParsedChat { tools, choice, is_parallel, includes_reasoning, thinking_token_budget, .. } = read;
        let talk = AnswerParseContext {
            dialect: self.dialect,
            tools,
            choice,
            is_parallel,
            includes_reasoning,
            opening,
            thinking_token_budget,
            may_open_thought: may_open_thought(&self.dialect, opening, &rendered),
            markers: markers(&self.dialect, &self.tokenizer),
        };
        Ok((rendered, talk))
    }

    /// Returns the template of a model that brings none. Its first use is logged.
    fn fallback_template(&self) -> Result<&ChatTemplate, Refusal> {
        if let Some(template) = self.fallback.get() {
            return Ok(template);
        }
        let failed = |error: checkpoint::Error| Refusal::failed(error.to_string());
        let (form, template) = ChatTemplate::fallback(&self.tokenizer, &self.spec).map_err(failed)?;
        Ok(self.fallback.get_or_init(|| {
            let model = &*self.spec.name;
            tracing::warn!(
                model,
                form,
                "this model has no chat template: using a common one (set another with --chat-template; \
                 `run --raw` and completions need none)"
            );
            template
        }))
    }

    fn sent_template(&self, source: &str) -> Result<ChatTemplate, Refusal> {
        if !self.trusts_templates {
            let why = "the server was started without --trust-request-chat-template";
            return Err(Refusal::invalid("chat_template", why));
        }
        let like = |own: &ChatTemplate| own.with_source(source);
        let template = self.template.as_ref().map_or_else(|| ChatTemplate::new(source, None, None), like);
        template.map_err(|error| Refusal::invalid("chat_template", error.to_string()))
    }
}

fn dialect_of(template: &ChatTemplate) -> Dialect {
    let dialect = Dialect::of_template(template.source());
    if template.uses_tools() {
        return dialect;
    }
    // Every build has the generic form.
    dialect.with_call_form(PROMPTED_CALLS).unwrap_or(dialect)
}

/// Sets how much the model is to think in the template's variables. A template that has only a switch gets it on or
/// off. A template that reads no such variable would think as before.
fn apply_effort(
    template: &ChatTemplate,
    dialect: Dialect,
    chat: &mut Conversation,
    effort: String,
) -> Result<(), Refusal> {
    let is_none = effort == "none";
    // A model that does not think has no degrees of it.
    let mut is_applied = !dialect.has_thoughts();
    for switch in SWITCHES.into_iter().filter(|switch| template.reads(switch)) {
        // A degree does not switch thoughts on if the client has switched them off.
        let value = chat.variables.entry(switch).or_insert(true.into());
        *value = (!is_none && *value != false).into();
        is_applied = true;
    }
    if template.reads(EFFORT) {
        chat.variables.insert(EFFORT.to_owned(), effort.into());
        is_applied = true;
    }
    let why = "the model's chat template does not use it; chat_template_kwargs may have an equivalent";
    if is_applied { Ok(()) } else { Err(Refusal::invalid(EFFORT, why)) }
}

fn render_template(template: &ChatTemplate, read: &ParsedChat, now: u64) -> Result<String, Refusal> {
    let chat = &read.conversation;
    let refused = |error: checkpoint::Error| Refusal::invalid("chat", error.to_string());
    if template.uses_tools() || !prompted_tools::is_needed(chat) {
        return template.render(chat, now).map_err(refused);
    }
    let in_system = template.render(&prompted_tools::without_tools(chat, true), now);
    // Some templates take no system message.
    in_system.or_else(|_| template.render(&prompted_tools::without_tools(chat, false), now)).map_err(refused)
}
