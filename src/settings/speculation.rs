//! How answers are guessed ahead, in our words and in vLLM's.

use anyhow::ensure;
use clap::Args;
use coordinator::{Drafting, Speculation};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use types::NgramLimits;

/// The most tokens that one step guesses for one request, unless a number is given.
const TOKENS: u16 = 10;
/// What one more row adds to a step on the CPU, in thousandths: see the table in `docs/speculation.md`.
const ROW_PERMILLE: u32 = 270;

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SpeculationSettings {
    /// Guess the next tokens from what a request has said before, and verify them in one step; no answer changes: off,
    /// auto (as many as make it faster), ngram (the same), or a number of tokens for every step
    #[arg(
        long, env = "LOCKSTEP_SPECULATION", value_name = "off|auto|ngram|N", default_value_t = SpeculationChoice::Off,
        conflicts_with = "speculative_config"
    )]
    pub speculation: SpeculationChoice,
    /// The same as vLLM takes it: {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5,
    /// "prompt_lookup_min": 3}
    #[arg(long, env = "LOCKSTEP_SPECULATIVE_CONFIG", value_name = "JSON")]
    pub speculative_config: Option<SpeculativeConfig>,
}

/// How many tokens are guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SpeculationChoice {
    Off,
    Auto,
    Ngram,
    Fixed(u16),
}

impl SpeculationSettings {
    pub fn check(&self) -> anyhow::Result<()> {
        self.speculative_config.as_ref().map_or(Ok(()), SpeculativeConfig::check)
    }

    pub fn speculation(&self) -> Speculation {
        let adaptive = Drafting::Adaptive { max: TOKENS, row_permille: ROW_PERMILLE };
        let drafting = match (&self.speculative_config, self.speculation) {
            (Some(config), _) => Drafting::Fixed(config.num_speculative_tokens),
            (None, SpeculationChoice::Off) => Drafting::Off,
            (None, SpeculationChoice::Auto | SpeculationChoice::Ngram) => adaptive,
            (None, SpeculationChoice::Fixed(n)) => Drafting::Fixed(n),
        };
        let ngrams = self.speculative_config.as_ref().map_or_else(NgramLimits::default, SpeculativeConfig::ngrams);
        Speculation { drafting, ngrams }
    }
}

impl FromStr for SpeculationChoice {
    type Err = String;

    fn from_str(word: &str) -> Result<SpeculationChoice, String> {
        match word {
            "off" => Ok(SpeculationChoice::Off),
            "auto" => Ok(SpeculationChoice::Auto),
            "ngram" => Ok(SpeculationChoice::Ngram),
            number => match number.parse() {
                Ok(0) => Ok(SpeculationChoice::Off),
                Ok(n) if u32::from(n) <= types::DRAFT_ROWS_MAX => Ok(SpeculationChoice::Fixed(n)),
                _ => Err(format!("{word:?} is none of: off, auto, ngram, a number up to {}", types::DRAFT_ROWS_MAX)),
            },
        }
    }
}

impl fmt::Display for SpeculationChoice {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpeculationChoice::Off => to.write_str("off"),
            SpeculationChoice::Auto => to.write_str("auto"),
            SpeculationChoice::Ngram => to.write_str("ngram"),
            SpeculationChoice::Fixed(n) => n.fmt(to),
        }
    }
}

impl TryFrom<String> for SpeculationChoice {
    type Error = String;

    fn try_from(word: String) -> Result<SpeculationChoice, String> {
        word.parse()
    }
}

impl From<SpeculationChoice> for String {
    fn from(choice: SpeculationChoice) -> String {
        choice.to_string()
    }
}

/// What vLLM's `--speculative-config` may say here. Any other field would ask for what is not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeculativeConfig {
    method: Method,
    num_speculative_tokens: u16,
    prompt_lookup_max: Option<u16>,
    prompt_lookup_min: Option<u16>,
}

/// Where guesses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Method {
    Ngram,
}

impl SpeculativeConfig {
    fn check(&self) -> anyhow::Result<()> {
        let (n, max) = (self.num_speculative_tokens, types::DRAFT_ROWS_MAX);
        ensure!(
            (1..=max).contains(&n.into()),
            "--speculative-config: num_speculative_tokens is {n}, and may be from 1 to {max}"
        );
        let NgramLimits { least, most } = self.ngrams();
        ensure!(
            (1..=most).contains(&least),
            "--speculative-config: prompt_lookup_min {least} and prompt_lookup_max {most} leave nothing to look up"
        );
        Ok(())
    }

    /// One of the two alone stands for both, and none for five, as in vLLM.
    fn ngrams(&self) -> NgramLimits {
        let least = self.prompt_lookup_min.or(self.prompt_lookup_max).unwrap_or(5);
        NgramLimits { least, most: self.prompt_lookup_max.unwrap_or(least) }
    }
}

impl FromStr for SpeculativeConfig {
    type Err = String;

    fn from_str(json: &str) -> Result<SpeculativeConfig, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(speculation: &str, config: Option<&str>) -> anyhow::Result<Speculation> {
        let config = config.map(|json| json.parse().map_err(anyhow::Error::msg)).transpose()?;
        let speculation = speculation.parse().map_err(anyhow::Error::msg)?;
        let settings = SpeculationSettings { speculation, speculative_config: config };
        settings.check().map(|()| settings.speculation())
    }

    #[test]
    fn words_and_numbers_say_how_much_is_guessed() {
        let drafting = |word: &str| settings(word, None).map(|speculation| speculation.drafting);
        assert_eq!(drafting("off").unwrap(), Drafting::Off);
        assert_eq!(drafting("0").unwrap(), Drafting::Off);
        assert_eq!(drafting("4").unwrap(), Drafting::Fixed(4));
        assert!(matches!(drafting("auto").unwrap(), Drafting::Adaptive { .. }));
        assert_eq!(drafting("ngram").unwrap(), drafting("auto").unwrap());
        for wrong in ["33", "-1", "eagle", ""] {
            assert!(drafting(wrong).unwrap_err().to_string().contains("none of: off, auto, ngram"), "{wrong}");
        }
        for word in ["off", "auto", "ngram", "7"] {
            assert_eq!(word.parse::<SpeculationChoice>().unwrap().to_string(), word);
        }
    }

    #[test]
    fn vllms_words_are_understood_and_what_is_not_served_is_refused_by_name() {
        let config = |json| settings("off", Some(json));
        let whole = r#"{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}"#;
        let expected = Speculation { drafting: Drafting::Fixed(5), ngrams: NgramLimits { least: 2, most: 4 } };
        assert_eq!(config(whole).unwrap(), expected);
        let ngrams = config(r#"{"method":"ngram","num_speculative_tokens":3}"#).unwrap().ngrams;
        assert_eq!(ngrams, NgramLimits { least: 5, most: 5 });
        let refused = |json, part: &str| {
            let error = config(json).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        refused(r#"{"method":"eagle","num_speculative_tokens":3}"#, "eagle");
        refused(r#"{"method":"ngram","num_speculative_tokens":3,"model":"draft"}"#, "model");
        refused(r#"{"method":"ngram","num_speculative_tokens":0}"#, "num_speculative_tokens is 0");
        refused(
            r#"{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":2,"prompt_lookup_min":3}"#,
            "leave nothing to look up",
        );
        refused("5", "invalid type");
    }
}
