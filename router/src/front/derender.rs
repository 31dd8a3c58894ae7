//! Decodes tokens that were drawn elsewhere: from an answer's tokens to its text, thoughts and calls, without a
//! replica. Knows no face.

use crate::front::calls::CallIds;
use crate::front::stop::Stops;
use crate::front::text::AnswerAssembly;
use crate::front::text_work::{TOKEN_TEXT_BYTES, TextWork};
use crate::refusal::Refusal;
use crate::replicas::models::text::{EncodeSettings, EncodedInput, ModelText};
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use types::{Tokens, TokensHash};

/// The content of one answer, and how many whole calls it has.
pub struct DerenderedAnswer {
    pub delta: v1::Delta,
    pub n_calls: u32,
}

/// Reads answers to a chat. Without a chat, answers are text and nothing else. The tokens were checked.
pub async fn derender(
    texts: &TextWork,
    of: &Arc<ModelText>,
    chat: Option<v1::Chat>,
    answers: Vec<Tokens>,
    now: u64,
) -> Result<Vec<DerenderedAnswer>, Refusal> {
    let read = match chat {
        Some(chat) => Some(texts.encoded(of, Input::Chat(chat), EncodeSettings::at(now)).await?),
        None => None,
    };
    let (of, n_tokens) = (of.clone(), answers.iter().map(Vec::len).sum::<usize>());
    let read_all = move || {
        let numbered = (0..).zip(&answers);
        numbered.map(|(choice, ids)| derender_answer(&of, read.as_ref(), choice, ids)).collect()
    };
    texts.off_runtime(TOKEN_TEXT_BYTES * n_tokens, read_all).await
}

fn derender_answer(of: &ModelText, read: Option<&EncodedInput>, choice: u32, ids: &Tokens) -> DerenderedAnswer {
    let mut assembly = AnswerAssembly::new(&of.tokenizer, Arc::new(Stops::new(Vec::new())), 0, false);
    if let Some(EncodedInput { ids: prompt, talk: Some(talk), .. }) = read {
        // The seed is not known here, because the tokens were drawn elsewhere: ids of calls are a function of the
        // prompt alone.
        assembly = assembly.of_chat(talk, CallIds { seed: 0, choice, prompt: TokensHash::of(prompt) });
    }
    let mut delta = v1::Delta::default();
    for id in ids {
        assembly.push(*id, &mut delta);
    }
    assembly.finish(&mut delta);
    DerenderedAnswer { delta, n_calls: assembly.n_calls() }
}
