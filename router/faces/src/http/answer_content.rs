//! An answer so far: text, thoughts and calls, assembled from its deltas. Has no knowledge of pages.

use proto::v1;

#[derive(Debug, Default)]
pub struct AnswerContent {
    pub text: String,
    pub reasoning: String,
    pub calls: Vec<v1::ToolCall>,
}

impl AnswerContent {
    pub fn of_text(text: String) -> AnswerContent {
        AnswerContent { text, ..AnswerContent::default() }
    }

    pub fn add(&mut self, delta: &v1::Delta) {
        self.text.push_str(&delta.text);
        self.reasoning.push_str(&delta.reasoning);
        for part in &delta.tool_calls {
            let at = part.index as usize;
            // A call's first part comes before those of the next call.
            if at == self.calls.len() {
                self.calls.push(v1::ToolCall::default());
            }
            if let Some(call) = self.calls.get_mut(at) {
                call.id.push_str(&part.id);
                call.name.push_str(&part.name);
                call.arguments.push_str(&part.arguments);
            }
        }
    }
}
