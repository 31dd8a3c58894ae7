//! Values for sampling parameters that a request leaves out: those of the model's files, or else those of the
//! catalogue's card, or else the vendor's own defaults. Knows no request.

use checkpoint::SamplingDefaults;
use proto::v1::sampling::Defaults as Vendor;

/// The sampling of a request that sets none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResolvedDefaults {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub penalty_window: u32,
}

/// OpenAI's servers and vLLM.
const NEUTRAL: ResolvedDefaults =
    ResolvedDefaults { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, penalty_window: 0 };
/// llama.cpp: `common_params_sampling`.
const LLAMA_CPP: ResolvedDefaults =
    ResolvedDefaults { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, penalty_window: 64, ..NEUTRAL };
/// Ollama: `DefaultOptions`.
const OLLAMA: ResolvedDefaults = ResolvedDefaults {
    temperature: 0.8,
    top_k: 40,
    top_p: 0.9,
    repetition_penalty: 1.1,
    penalty_window: 64,
    ..NEUTRAL
};

impl ResolvedDefaults {
    /// `card` is the catalogue's: vendors with neutral defaults have none.
    pub fn of(vendor: i32, files: &SamplingDefaults, card: &SamplingDefaults) -> ResolvedDefaults {
        match Vendor::try_from(vendor).unwrap_or_default() {
            Vendor::Unspecified => NEUTRAL.filled_from(files),
            Vendor::LlamaCpp => LLAMA_CPP.filled_from(card).filled_from(files),
            Vendor::Ollama => OLLAMA.filled_from(card).filled_from(files),
        }
    }

    /// Uses these values for parameters that `recommended` leaves out.
    fn filled_from(self, recommended: &SamplingDefaults) -> ResolvedDefaults {
        ResolvedDefaults {
            temperature: recommended.temperature.unwrap_or(self.temperature),
            top_k: recommended.top_k.unwrap_or(self.top_k),
            top_p: recommended.top_p.unwrap_or(self.top_p),
            min_p: recommended.min_p.unwrap_or(self.min_p),
            repetition_penalty: recommended.repetition_penalty.unwrap_or(self.repetition_penalty),
            penalty_window: recommended.penalty_window.unwrap_or(self.penalty_window),
        }
    }
}

/// The vendors that have defaults of their own, by their names in a request.
const VENDORS: [(&str, Vendor); 2] = [("llama.cpp", Vendor::LlamaCpp), ("ollama", Vendor::Ollama)];

/// Returns the vendor of this name.
pub fn vendor(name: &str) -> Option<Vendor> {
    let neutral = (name == "openai").then_some(Vendor::Unspecified);
    neutral.or_else(|| VENDORS.iter().find(|(known, _)| *known == name).map(|(_, vendor)| *vendor))
}

/// Returns the name of a vendor; none for the neutral ones.
pub fn name(vendor: Vendor) -> Option<&'static str> {
    VENDORS.iter().find(|(_, known)| *known == vendor).map(|(name, _)| *name)
}

/// Returns a window in llama.cpp's words: -1 stands for all of the context.
pub fn last_n(window: u32) -> i32 {
    i32::try_from(window).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_before_cards_and_cards_before_vendors() {
        let none = SamplingDefaults::default();
        let files = SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..none };
        let card = SamplingDefaults { temperature: Some(0.2), top_p: Some(0.9), ..none };
        let of = |vendor: Vendor, files, card| ResolvedDefaults::of(vendor.into(), files, card);
        assert_eq!(of(Vendor::Unspecified, &none, &card), NEUTRAL);
        assert_eq!(of(Vendor::LlamaCpp, &none, &none), LLAMA_CPP);
        assert_eq!(of(Vendor::Ollama, &none, &none), OLLAMA);
        let by_files = ResolvedDefaults { temperature: 0.6, top_k: 20, ..NEUTRAL };
        assert_eq!(of(Vendor::Unspecified, &files, &card), by_files);
        let by_both = ResolvedDefaults { temperature: 0.6, top_k: 20, top_p: 0.9, ..LLAMA_CPP };
        assert_eq!(of(Vendor::LlamaCpp, &files, &card), by_both);
        assert_eq!(of(Vendor::Ollama, &none, &card), ResolvedDefaults { temperature: 0.2, ..OLLAMA });
    }
}
