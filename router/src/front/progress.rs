//! How far a prompt is before the first token of its answer. Knows no face.

use proto::cluster as wire;

/// What is known of a prompt while it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptProgress {
    /// The prompt's tokens.
    pub total: u32,
    /// Those of them that came from the prefix cache.
    pub cached: u32,
    /// Those of them that are computed or cached already.
    pub processed: u32,
}

/// A prompt that is watched until the first token comes: for its client, or for the list of requests.
pub struct WatchedPrompt {
    total: u32,
    /// Whether its client requested progress.
    pub for_client: bool,
    last: Option<PromptProgress>,
}

/// Longer prompts are always watched: they take long enough to be seen in the list.
const LONG_TOKENS: usize = 1024;

/// Whether replicas report the progress of a request with a longest prompt of so many tokens.
pub fn is_watched(n_prompt: usize, for_client: bool) -> bool {
    for_client || n_prompt >= LONG_TOKENS
}

impl WatchedPrompt {
    pub fn new(total: u32, for_client: bool) -> WatchedPrompt {
        WatchedPrompt { total, for_client, last: None }
    }

    /// Returns the new progress that an output reports. Progress only grows, though a replica that is lost begins
    /// again.
    pub fn update(&mut self, output: &wire::Output, has_token: bool) -> Option<PromptProgress> {
        let processed = if has_token { self.total } else { output.computed?.min(self.total) };
        let cached = self.last.map_or(output.cached_tokens.min(processed), |last| last.cached);
        if self.last.is_some_and(|last| last.processed >= processed) {
            return None;
        }
        self.last = Some(PromptProgress { total: self.total, cached, processed });
        self.last
    }
}
