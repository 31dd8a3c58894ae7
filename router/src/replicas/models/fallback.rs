//! Chat templates for models that bring none: the usual form of the model's family, which the special tokens of its
//! vocabulary show, or else ChatML. Knows no request.

use checkpoint::{ChatTemplate, Family, ModelSpec, Tokenizer};

/// A usual form of chats.
struct ChatForm {
    name: &'static str,
    /// A token that only vocabularies of this form have.
    token: &'static str,
    source: &'static str,
}

const CHATML: ChatForm = ChatForm {
    name: "ChatML",
    token: "<|im_start|>",
    source: "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
};
const MISTRAL: ChatForm = ChatForm {
    name: "Mistral",
    token: "[INST]",
    source: "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}\
        {{ eos_token }}{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}",
};
const FORMS: [ChatForm; 5] = [
    CHATML,
    ChatForm {
        name: "Llama 3",
        token: "<|start_header_id|>",
        source: "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}\
            <|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}\
            {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    },
    ChatForm {
        name: "Gemma",
        token: "<start_of_turn>",
        source: "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' \
            else 'user' }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}\
            <start_of_turn>model\n{% endif %}",
    },
    ChatForm {
        name: "Phi-3",
        token: "<|assistant|>",
        source: "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    },
    MISTRAL,
];

/// The template for a model without one, and the name of its form.
pub fn fallback(tokenizer: &Tokenizer, spec: &ModelSpec) -> checkpoint::Result<(&'static str, ChatTemplate)> {
    let is_mistral = matches!(spec.family, Family::Mistral | Family::Mixtral | Family::Ministral | Family::Ministral3);
    let of_vocabulary = FORMS.iter().find(|form| tokenizer.added_token(form.token).is_some());
    let form = of_vocabulary.unwrap_or(if is_mistral { &MISTRAL } else { &CHATML });
    let spelled = |token| tokenizer.token_spelled(token);
    let (bos, eos) = (spec.bos.map(spelled), spec.eos.first().copied().map(spelled));
    Ok((form.name, ChatTemplate::new(form.source, bos, eos)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::Conversation;
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
        for (form, expected) in FORMS.iter().zip(expected) {
            let template = ChatTemplate::new(form.source, Some("<s>".into()), Some("</s>".into())).unwrap();
            assert_eq!(template.render(&chat, 0).unwrap(), expected, "{}", form.name);
        }
    }
}
