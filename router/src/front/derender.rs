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

/// The content of one piece, and how many whole calls its answer has so far.
pub struct DerenderedAnswer {
    pub delta: v1::Delta,
    pub n_calls: u32,
}

/// A piece of an answer, or the whole.
pub struct DrawnPiece {
    pub choice: u32,
    /// The tokens of the pieces before it, which are read again: nothing is kept between pieces.
    pub before: Tokens,
    pub ids: Tokens,
    /// Whether the answer ends with it.
    pub is_last: bool,
}

/// Reads answers to a chat. Without a chat, answers are text and nothing else. The tokens were checked.
pub async fn derender(
    texts: &TextWork,
    of: &Arc<ModelText>,
    chat: Option<v1::Chat>,
    pieces: Vec<DrawnPiece>,
    now: u64,
) -> Result<Vec<DerenderedAnswer>, Refusal> {
    let read = match chat {
        Some(chat) => Some(texts.encoded(of, Input::Chat(chat), EncodeSettings::at(now)).await?),
        None => None,
    };
    let n_tokens: usize = pieces.iter().map(|piece| piece.before.len() + piece.ids.len()).sum();
    let of = of.clone();
    let read_all = move || pieces.iter().map(|piece| derender_piece(&of, read.as_ref(), piece)).collect();
    texts.off_runtime(TOKEN_TEXT_BYTES * n_tokens, read_all).await
}

fn derender_piece(of: &ModelText, read: Option<&EncodedInput>, piece: &DrawnPiece) -> DerenderedAnswer {
    let mut assembly = AnswerAssembly::new(&of.tokenizer, Arc::new(Stops::new(Vec::new())), 0, false);
    if let Some(EncodedInput { ids: prompt, talk: Some(talk), .. }) = read {
        // The seed is not known here, because the tokens were drawn elsewhere: ids of calls are a function of the
        // prompt alone.
        assembly = assembly.of_chat(talk, CallIds { seed: 0, choice: piece.choice, prompt: TokensHash::of(prompt) });
    }
    let mut read_before = v1::Delta::default();
    for id in &piece.before {
        assembly.push(*id, &mut read_before);
    }
    let mut delta = v1::Delta::default();
    for id in &piece.ids {
        assembly.push(*id, &mut delta);
    }
    if piece.is_last {
        assembly.finish(&mut delta);
    }
    DerenderedAnswer { delta, n_calls: assembly.n_calls() }
}
