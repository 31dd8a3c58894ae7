//! How far a prompt is before the first token of its answer. Knows no face.

use proto::cluster as wire;

/// What is known of a prompt while it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptProgress {
    /// The prompt's tokens.
    pub total: u32,
    /// Those of them that came from the prefix cache.
    pub cached: u32,
    /// Those of them that need not be computed any more, with the cached ones.
    pub processed: u32,
}

/// A prompt that a client watches, until the first token comes.
pub struct WatchedPrompt {
    total: u32,
    last: Option<PromptProgress>,
}

impl WatchedPrompt {
    pub fn new(total: u32) -> WatchedPrompt {
        WatchedPrompt { total, last: None }
    }

    /// What an output tells that is new: it only grows, though a replica that is lost begins again.
    pub fn hear(&mut self, output: &wire::Output, has_token: bool) -> Option<PromptProgress> {
        let processed = if has_token { self.total } else { output.computed?.min(self.total) };
        let cached = self.last.map_or(output.cached_tokens.min(processed), |last| last.cached);
        if self.last.is_some_and(|last| last.processed >= processed) {
            return None;
        }
        self.last = Some(PromptProgress { total: self.total, cached, processed });
        self.last
    }
}
