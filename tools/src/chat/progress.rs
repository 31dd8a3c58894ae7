//! The progress of a prompt as one line of the terminal, which disappears when the answer begins. Has no knowledge of
//! the conversation.

use proto::v1::PromptProgress;
use std::io::IsTerminal;

/// A shorter prompt is computed before a user could read the line.
const TOKENS_MIN: u32 = 256;
/// Moves to the start of the line and erases it.
const CLEAR: &str = "\r\x1b[K";

/// The line on standard error. Shows nothing where that is no terminal.
#[derive(Default)]
pub struct ProgressLine {
    is_shown: bool,
}

impl ProgressLine {
    pub fn show(&mut self, prompt: &PromptProgress) {
        let is_whole = prompt.processed >= prompt.total;
        if is_whole || prompt.total - prompt.cached < TOKENS_MIN || !std::io::stderr().is_terminal() {
            return;
        }
        eprint!("{CLEAR}{}", progress_text(prompt));
        self.is_shown = true;
    }

    pub fn clear(&mut self) {
        if std::mem::take(&mut self.is_shown) {
            eprint!("{CLEAR}");
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.clear();
    }
}

fn progress_text(prompt: &PromptProgress) -> String {
    let PromptProgress { total, processed, .. } = prompt;
    format!("reading the prompt: {processed} of {total} tokens, {}%", u64::from(*processed) * 100 / u64::from(*total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_shows_how_many_tokens_are_computed() {
        let prompt = PromptProgress { total: 6000, cached: 16, processed: 1536 };
        assert_eq!(progress_text(&prompt), "reading the prompt: 1536 of 6000 tokens, 25%");
    }
}
