//! Reads, renders and tokenizes texts: long ones on threads, where they hold up no other request. Knows no request and
//! no replica.

use crate::front::structure;
use crate::front::threads::LimitedThreads;
use crate::refusal::Refusal;
use crate::replicas::models::text::{EncodeSettings, EncodedInput, ModelText, TokenSpans};
use proto::v1;
use proto::v1::content_part::Part;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use types::Tokens;

/// Longer texts are read, rendered and tokenized on threads of their own, where they hold up no other request.
const BYTES_INLINE_MAX: usize = 64 << 10;
/// About how many bytes of text a token has.
pub const TOKEN_TEXT_BYTES: usize = 4;
/// The cost of a message in a template besides its text, in bytes.
const MESSAGE_BYTES: usize = 64;

pub struct TextWork {
    threads: LimitedThreads,
}

/// A prompt that is rendered without a replica.
pub struct RenderedPrompt {
    pub ids: Tokens,
    /// Where each token stands in the text, if the client requested that and there is a text.
    pub places: Option<TokenSpans>,
    pub structure: Option<v1::Structure>,
}

impl TextWork {
    pub fn new(threads: LimitedThreads) -> TextWork {
        TextWork { threads }
    }

    /// Returns the tokens of a whole prompt. `add_special` is for plain text; a template writes its special tokens
    /// itself. `now` is the time that the template reads: the same at every router to which a stream is moved.
    pub async fn tokens(
        &self,
        of: &Arc<ModelText>,
        input: Input,
        add_special: bool,
        now: u64,
    ) -> Result<Tokens, Refusal> {
        let settings = EncodeSettings { adds_special: (!add_special).then_some(false), ..EncodeSettings::at(now) };
        Ok(self.encoded(of, input, settings).await?.ids)
    }

    /// Returns an input's tokens, as `tokens` does, and for a chat also how its answer is read.
    pub(super) async fn encoded(
        &self,
        of: &Arc<ModelText>,
        input: Input,
        settings: EncodeSettings,
    ) -> Result<EncodedInput, Refusal> {
        let of = of.clone();
        self.off_runtime(length(&input), move || of.encode(input, settings)).await?
    }

    /// Returns a prompt's tokens, and what its answer must be, including what the calls of a chat require.
    pub async fn render_request(
        &self,
        of: &Arc<ModelText>,
        input: Input,
        structure: Option<v1::Structure>,
        wants_places: bool,
        settings: EncodeSettings,
    ) -> Result<RenderedPrompt, Refusal> {
        let (read, n_bytes) = (of.clone(), length(&input));
        let encode = move || match wants_places {
            true => read.encode_with_places(input, settings),
            false => read.encode(input, settings).map(|encoded| (encoded, None)),
        };
        let (EncodedInput { ids, talk, .. }, places) = self.off_runtime(n_bytes, encode).await??;
        let structure = structure::grammar_spec(structure, talk.as_ref())?.as_ref().map(structure::to_structure);
        Ok(RenderedPrompt { ids, places, structure })
    }

    /// Returns the text of the prompt that a chat becomes, as `tokens` would read it.
    pub async fn render_chat(&self, of: &Arc<ModelText>, chat: v1::Chat, now: u64) -> Result<String, Refusal> {
        let of = of.clone();
        self.off_runtime(chat_length(&chat), move || of.render(chat, now).map(|(text, _)| text)).await?
    }

    /// Returns the text of tokens that were checked, without special ones.
    pub async fn detokenize(&self, of: &Arc<ModelText>, ids: Tokens) -> Result<String, Refusal> {
        let of = of.clone();
        self.off_runtime(TOKEN_TEXT_BYTES * ids.len(), move || of.tokenizer.decode(&ids, false)).await
    }

    /// Runs work that costs as much as reading `n_bytes`: inline if they are few, otherwise on one of a few threads, so
    /// that no stream waits for it.
    pub async fn off_runtime<T: Send + 'static>(
        &self,
        n_bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        if n_bytes <= BYTES_INLINE_MAX { Ok(work()) } else { self.on_thread(work).await }
    }

    /// Runs work on one of a few threads, so that no stream waits for it.
    pub async fn on_thread<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
        self.threads.run(work).await
    }
}

/// Returns the cost of reading an input, in bytes of text.
fn length(input: &Input) -> usize {
    match input {
        Input::TokenIds(_) => 0,
        Input::Text(text) => text.len(),
        Input::Pair(pair) => pair.first.len() + pair.second.len(),
        Input::Chat(chat) => chat_length(chat),
    }
}

fn chat_length(chat: &v1::Chat) -> usize {
    let tools: usize = chat.tools.iter().map(String::len).sum();
    let rest = chat.documents.len() + chat.template_variables.len() + chat.template.len();
    tools + rest + chat.messages.iter().map(message_length).sum::<usize>()
}

fn message_length(message: &v1::ChatMessage) -> usize {
    let calls = message.tool_calls.iter().map(|call| MESSAGE_BYTES + call.name.len() + call.arguments.len());
    let parts = message.parts.iter().map(|part| match &part.part {
        Some(Part::Text(text)) => MESSAGE_BYTES + text.len(),
        _ => MESSAGE_BYTES,
    });
    let texts = message.role.len() + message.content.len() + message.reasoning.len();
    MESSAGE_BYTES + texts + parts.sum::<usize>() + calls.sum::<usize>()
}
