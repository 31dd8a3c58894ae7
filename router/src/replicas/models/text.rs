//! Tokenizer, template and dialect of one model. Knows no replica and no other model.

use crate::refusal::Refusal;
use crate::replicas::models::conversation::{self, ParsedChat};
use crate::replicas::models::prompted_tools;
use crate::replicas::models::talk::{AnswerParseContext, markers, may_open_thought};
use crate::replicas::models::truncation::PromptCut;
use checkpoint::{ChatTemplate, Checkpoint, Conversation, ModelSpec, SamplingDefaults, TokenTable, Tokenizer};
use dialect::{Dialect, UnknownDialect};
use grammar::Vocabulary;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use types::{Token, Tokens};

/// The form of calls for templates that know no tools.
const PROMPTED_CALLS: &str = "generic";
/// Cohere's names for the uses of texts, and other names of the same use.
const COHERE_USES: [(&str, &[&str]); 5] = [
    ("search_query", &["query", "Retrieval-query"]),
    ("search_document", &["document", "passage", "Retrieval-document"]),
    ("classification", &["Classification"]),
    ("clustering", &["Clustering"]),
    ("image", &[]),
];
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
    /// The beginnings of texts that are embedded, by their uses.
    pub prompts: Arc<BTreeMap<String, String>>,
    /// The template of a model without one, made for its first chat.
    pub fallback: Arc<OnceLock<ChatTemplate>>,
}

/// An input as tokens. For a chat it also has how the answer is read.
pub(crate) struct EncodedInput {
    pub ids: Tokens,
    pub talk: Option<AnswerParseContext>,
    /// Where the second text of a pair begins; 0: it is one text.
    pub second_text: u32,
    /// Whether it was too long, and lost tokens.
    pub is_cut: bool,
}

/// How an input becomes tokens.
#[derive(Clone, Copy)]
pub struct EncodeSettings {
    /// Whether the tokens that the model expects around a text are added. None: to plain text; a template writes its
    /// special tokens itself.
    pub adds_special: Option<bool>,
    /// The time for a template that reads it, in Unix seconds: the same at every router to which a stream is moved.
    pub now: u64,
    /// None: an input of any length stays whole.
    pub cut: Option<PromptCut>,
}

impl EncodeSettings {
    /// Returns the settings for a whole prompt.
    pub fn at(now: u64) -> EncodeSettings {
        EncodeSettings { adds_special: None, now, cut: None }
    }
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
            prompts: Arc::new(checkpoint.prompts()?),
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

    /// Returns what stands before a text for this use. Cohere's names of uses are also known where the model has none
    /// or another name.
    pub fn prompt_for(&self, use_name: &str) -> Result<&str, Refusal> {
        let aliases = COHERE_USES.iter().find(|(name, _)| *name == use_name).map(|(_, aliases)| *aliases);
        let names = [use_name].into_iter().chain(aliases.into_iter().flatten().copied());
        let own = names.into_iter().find_map(|name| self.prompts.get(name));
        match own {
            Some(prompt) => Ok(prompt),
            None if aliases.is_some() => Ok(""),
            None => {
                let known: Vec<&str> = self.prompts.keys().map(String::as_str).collect();
                let all = COHERE_USES.iter().map(|(name, _)| *name).chain(known).collect::<Vec<_>>().join(", ");
                let why = format!("Unsupported input_type '{use_name}'. Supported values: {all}");
                Err(Refusal::invalid("input_type", why))
            }
        }
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

    /// Returns an input's tokens.
    pub(crate) fn encode(&self, input: Input, settings: EncodeSettings) -> Result<EncodedInput, Refusal> {
        Ok(self.encode_input(input, settings, false)?.0)
    }

    /// Encodes as `encode` does, and also returns the span of each token in the text. Token ids in a request have none.
    pub(crate) fn encode_with_places(
        &self,
        input: Input,
        settings: EncodeSettings,
    ) -> Result<(EncodedInput, Option<TokenSpans>), Refusal> {
        self.encode_input(input, settings, true)
    }

    fn encode_input(
        &self,
        input: Input,
        settings: EncodeSettings,
        needs_places: bool,
    ) -> Result<(EncodedInput, Option<TokenSpans>), Refusal> {
        let encoded = |ids, is_cut| EncodedInput { ids, talk: None, second_text: 0, is_cut };
        let (field, text, talk) = match input {
            Input::TokenIds(ids) => {
                let mut ids = self.checked(ids.ids)?;
                let is_cut = cut_tokens(&mut ids, settings.cut, [0, 0]);
                return Ok((encoded(ids, is_cut), None));
            }
            Input::Pair(pair) => return self.encode_pair(&pair, settings.cut).map(|encoded| (encoded, None)),
            Input::Text(text) => ("text", text, None),
            Input::Chat(chat) => {
                let (text, talk) = self.render(chat, settings.now)?;
                ("chat", text, Some(talk))
            }
        };
        let tokens = self.tokenizer.encode_framed(&text, settings.adds_special.unwrap_or(talk.is_none()));
        let (mut ids, frame) =
            tokens.map_err(|error| Refusal::invalid(field, format!("cannot be tokenized: {error}")))?;
        if ids.is_empty() {
            return Err(Refusal::invalid(field, "the prompt is empty"));
        }
        // A tokenizer may know more tokens than the model has rows for.
        self.check_ids(field, &ids)?;
        let mut places = needs_places.then(|| self.tokenizer.char_spans(&text, &ids));
        let is_cut = cut_tokens(&mut ids, settings.cut, frame);
        if let Some(places) = &mut places {
            cut_tokens(places, settings.cut, frame);
        }
        Ok((EncodedInput { talk, ..encoded(ids, is_cut) }, places))
    }

    fn encode_pair(&self, pair: &v1::TextPair, cut: Option<PromptCut>) -> Result<EncodedInput, Refusal> {
        let tokens = |text: &str, n_max: u32| -> Result<Tokens, Refusal> {
            let tokens = self.tokenizer.encode(text, false);
            let mut tokens =
                tokens.map_err(|error| Refusal::invalid("pair", format!("cannot be tokenized: {error}")))?;
            tokens.truncate(if n_max > 0 { n_max as usize } else { tokens.len() });
            Ok(tokens)
        };
        let mut first = tokens(&pair.first, pair.first_tokens_max)?;
        let mut second = tokens(&pair.second, pair.second_tokens_max)?;
        let frame = self.tokenizer.pair_frame();
        let lengths = [first.len(), second.len()];
        let mut is_cut = false;
        if let Some(cut) = cut {
            let shares = PromptCut::shares(lengths, cut.n_max.saturating_sub(frame.n_tokens()));
            is_cut = shares != lengths;
            for (ids, n_max) in [&mut first, &mut second].into_iter().zip(shares) {
                cut_tokens(ids, Some(PromptCut { n_max, side: cut.side }), [0, 0]);
            }
        }
        let (ids, second_text) = frame.around(&first, &second);
        self.check_ids("pair", &ids)?;
        Ok(EncodedInput { ids, talk: None, second_text, is_cut })
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
        let rendered = render_template(template, &read.conversation, now)?;
        check_other_roles(template, &read.conversation, now)?;
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

/// Cuts a list with an element for each token, and returns true if it was too long.
fn cut_tokens<T>(all: &mut Vec<T>, cut: Option<PromptCut>, frame: [usize; 2]) -> bool {
    let dropped = cut.map_or(0..0, |cut| cut.dropped(all.len(), frame));
    let is_cut = !dropped.is_empty();
    drop(all.drain(dropped));
    is_cut
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

/// Refuses messages that the template does not write, because it does not know their role.
fn check_other_roles(template: &ChatTemplate, chat: &Conversation, now: u64) -> Result<(), Refusal> {
    let has_other_role = |i: &usize| conversation::has_other_role(&chat.messages[*i]);
    let others: Vec<usize> = (0..chat.messages.len()).filter(has_other_role).collect();
    if others.is_empty() {
        return Ok(());
    }
    let marker = |i: usize| format!("message {i} of another role");
    let mut marked = chat.clone();
    others.iter().for_each(|i| marked.messages[*i]["content"] = marker(*i).into());
    let rendered = render_template(template, &marked, now)?;
    match others.into_iter().find(|i| !rendered.contains(&marker(*i))) {
        None => Ok(()),
        Some(i) => {
            let role = &chat.messages[i]["role"];
            let message = format!("the model's chat template writes no messages of the role {role}");
            Err(Refusal::invalid(format!("messages[{i}].role"), message))
        }
    }
}

fn render_template(template: &ChatTemplate, chat: &Conversation, now: u64) -> Result<String, Refusal> {
    let refused = |error: checkpoint::Error| Refusal::invalid("chat", error.to_string());
    if template.uses_tools() || !prompted_tools::is_needed(chat) {
        return template.render(chat, now).map_err(refused);
    }
    let in_system = template.render(&prompted_tools::without_tools(chat, true), now);
    // Some templates take no system message.
    in_system.or_else(|_| template.render(&prompted_tools::without_tools(chat, false), now)).map_err(refused)
}
