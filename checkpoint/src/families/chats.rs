//! Chat templates for models that bring none: the usual form of the model's family, or the form that the special tokens
//! of its vocabulary show. Knows no request.

use super::CHAT_FORMS;
use crate::config::ModelSpec;
use crate::error::Result;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

impl ChatTemplate {
    /// The template for a model without one, and the name of its form.
    pub fn fallback(tokenizer: &Tokenizer, spec: &ModelSpec) -> Result<(&'static str, ChatTemplate)> {
        let of_vocabulary = CHAT_FORMS.into_iter().find(|form| tokenizer.added_token(form.token).is_some());
        let form = of_vocabulary.unwrap_or(spec.family.definition().chat_form);
        let spelled = |token| tokenizer.token_spelled(token);
        let (bos, eos) = (spec.bos.map(spelled), spec.eos.first().copied().map(spelled));
        Ok((form.name, ChatTemplate::new(form.source, bos, eos)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Conversation;
    use serde_json::json;

    #[test]
    fn each_form_renders_a_chat() {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let messages = vec![message("system", "Be brief."), message("user", "Hi"), message("assistant", "Hello")];
        let chat = Conversation { messages, add_generation_prompt: true, ..Conversation::default() };
        let expected = [
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello\
             <|im_end|>\n<|im_start|>assistant\n",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user\
             <|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\n",
            "<s><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>\n\
             <start_of_turn>model\nHello<end_of_turn>\n<start_of_turn>model\n",
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|assistant|>\n",
            "<s>[INST] Be brief. [/INST][INST] Hi [/INST] Hello</s>",
        ];
        for (form, expected) in CHAT_FORMS.iter().zip(expected) {
            let template = ChatTemplate::new(form.source, Some("<s>".into()), Some("</s>".into())).unwrap();
            assert_eq!(template.render(&chat, 0).unwrap(), expected, "{}", form.name);
        }
    }
}
