//! The model's exact prompt and answer, in vLLM's format: texts with all special tokens, and the tokens' ids. Has no
//! knowledge of items.

use proto::v1;
use router::front::frontend::Frontend;
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::sync::Arc;
use types::Tokens;

pub struct RawMessages {
    of: Arc<ModelText>,
    prompt: Value,
    output_ids: Tokens,
}

impl RawMessages {
    pub async fn of(front: &Frontend, of: Arc<ModelText>, prompt: Tokens) -> Result<RawMessages, Refusal> {
        let text = front.texts.detokenize(&of, prompt.clone()).await?;
        Ok(RawMessages { of, prompt: message(&text, &prompt), output_ids: Tokens::new() })
    }

    pub fn add_delta(&mut self, delta: &v1::Delta) {
        self.output_ids.extend(&delta.token_ids);
    }

    pub fn add_to(&self, reply: &mut Value) {
        reply["input_messages"] = json!([self.prompt]);
        reply["output_messages"] =
            json!([message(&self.of.tokenizer.decode(&self.output_ids, false), &self.output_ids)]);
    }
}

fn message(text: &str, ids: &Tokens) -> Value {
    json!({ "type": "raw_message_tokens", "message": text, "tokens": ids })
}
