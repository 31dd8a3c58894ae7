//! The sampling of a request that sets no parameter: what the model's files recommend, or else the catalogue's card, or
//! else the vendor's own defaults. Knows no request.

use crate::front::parameters::NumberParameter;
use checkpoint::SamplingDefaults;
use proto::v1::sampling::Defaults as Vendor;
use types::Sampling;

/// Returns the vendor's sampling for a model. `card` is the catalogue's: vendors with neutral defaults have none.
pub fn default_sampling(vendor: i32, files: &SamplingDefaults, card: &SamplingDefaults) -> Sampling {
    let vendor = Vendor::try_from(vendor).unwrap_or_default();
    let (card, penalty_window) = match vendor {
        Vendor::Unspecified => (None, 0),
        Vendor::LlamaCpp | Vendor::Ollama => (Some(card), 64),
    };
    let models = || [files].into_iter().chain(card);
    let mut sampling = Sampling::default();
    for (parameter, defaults) in NumberParameter::with_recommendations() {
        let recommended = models().find_map(defaults.recommended);
        (parameter.set)(&mut sampling, recommended.unwrap_or(defaults.of(vendor)));
    }
    sampling.penalties.window = models().find_map(|model| model.penalty_window).unwrap_or(penalty_window);
    sampling
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
    use types::Penalties;

    #[test]
    fn files_come_before_cards_and_cards_before_vendors() {
        let none = SamplingDefaults::default();
        let files = SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..none };
        let card = SamplingDefaults { temperature: Some(0.2), top_p: Some(0.9), ..none };
        let of = |vendor: Vendor, files, card| default_sampling(vendor.into(), files, card);
        let neutral = Sampling { temperature: 1.0, ..Sampling::default() };
        let penalties = |repetition| Penalties { repetition, window: 64, ..Penalties::default() };
        let vendors = Sampling { temperature: 0.8, top_k: 40, ..Sampling::default() };
        let llama_cpp = Sampling { top_p: 0.95, min_p: 0.05, penalties: penalties(1.0), ..vendors.clone() };
        let ollama = Sampling { top_p: 0.9, penalties: penalties(1.1), ..vendors };
        assert_eq!(of(Vendor::Unspecified, &none, &card), neutral);
        assert_eq!(of(Vendor::LlamaCpp, &none, &none), llama_cpp);
        assert_eq!(of(Vendor::Ollama, &none, &none), ollama);
        let by_files = Sampling { temperature: 0.6, top_k: 20, ..neutral };
        assert_eq!(of(Vendor::Unspecified, &files, &card), by_files);
        let by_both = Sampling { temperature: 0.6, top_k: 20, top_p: 0.9, ..llama_cpp };
        assert_eq!(of(Vendor::LlamaCpp, &files, &card), by_both);
        assert_eq!(of(Vendor::Ollama, &none, &card), Sampling { temperature: 0.2, ..ollama });
    }
}
