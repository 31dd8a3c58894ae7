//! The settings of speculative decoding, as our flags and in vLLM's format.

use super::bytes::ByteSize;
use anyhow::{bail, ensure};
use clap::Args;
use coordinator::{DraftPolicy, RowCost, Speculation};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use types::{DeviceClass, Grid, NgramLimits};

/// The default of the most tokens that one step guesses for one request.
const TOKENS: u16 = 16;
/// The cost of one more row in a step on the CPU, in thousandths, before steps have shown it: see the table in
/// `docs/speculation.md`.
const ROW_PERMILLE: u32 = 270;

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SpeculationSettings {
    /// Guess the next tokens from a request's earlier tokens, and verify them in one step; no answer changes: off,
    /// auto (as many as make it faster), ngram (the same), mtp (the model's own layer guesses too), or a number of
    /// tokens for every step [default: auto with a draft model, or on one CPU stage without tensor parallelism;
    /// otherwise off]
    #[arg(
        long,
        alias = "spec-type",
        env = "LOCKSTEP_SPECULATION",
        value_name = "off|auto|ngram|mtp|N",
        conflicts_with = "speculative_config"
    )]
    pub speculation: Option<SpeculationChoice>,
    /// The most tokens that `--speculation auto` guesses for one step [default: 16]; makes auto the default
    #[arg(
        long,
        aliases = ["draft", "draft-n", "spec-draft-n-max"],
        env = "LOCKSTEP_DRAFT_MAX",
        value_name = "N",
        conflicts_with = "speculative_config",
        value_parser = clap::value_parser!(u16).range(0..=i64::from(types::DRAFT_ROWS_MAX))
    )]
    pub draft_max: Option<u16>,
    /// The same in vLLM's form: {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5,
    /// "prompt_lookup_min": 3}, or {"model": "DRAFT", "num_speculative_tokens": 5}
    #[arg(long, env = "LOCKSTEP_SPECULATIVE_CONFIG", value_name = "JSON")]
    pub speculative_config: Option<SpeculativeConfig>,
    /// A smaller model of the same vocabulary that guesses too; `--speculation auto` is then the default. The machine
    /// of the worker that samples must have it, at the same path or in its `--models`
    #[arg(
        long,
        aliases = ["model-draft", "spec-draft-model"],
        env = "LOCKSTEP_DRAFT_MODEL",
        value_name = "MODEL",
        conflicts_with = "speculative_config"
    )]
    pub draft_model: Option<String>,
    /// Memory for the KV cache of the draft model, such as 64MiB [default: 8 full contexts, but at most 256MiB]
    #[arg(long, env = "LOCKSTEP_DRAFT_KV_MEMORY", value_name = "BYTES")]
    pub draft_kv_memory: Option<ByteSize>,
}

/// The number of tokens to guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SpeculationChoice {
    Off,
    Auto,
    Ngram,
    /// As `auto`, and a draft model must be there.
    DraftModel,
    /// As `auto`, and the model's own layer guesses too.
    Mtp,
    Fixed(u16),
}

impl SpeculationSettings {
    pub fn check(&self) -> anyhow::Result<()> {
        self.speculative_config.as_ref().map_or(Ok(()), SpeculativeConfig::check)?;
        let is_used = self.draft_kv_memory.is_none() || self.draft().is_some() || self.uses_mtp();
        ensure!(is_used, "--draft-kv-memory needs a draft model: give --draft-model");
        let is_one = !(self.uses_mtp() && self.draft().is_some());
        ensure!(is_one, "--speculation mtp and --draft-model cannot be given together");
        let needs_model = self.speculation == Some(SpeculationChoice::DraftModel) && self.draft_model.is_none();
        ensure!(!needs_model, "--speculation draft-simple needs a draft model: give --draft-model");
        if let (Some(choice @ (SpeculationChoice::Off | SpeculationChoice::Fixed(_))), Some(max)) =
            (self.speculation, self.draft_max)
        {
            bail!("--draft-max {max} limits `--speculation auto`, and --speculation is {choice}");
        }
        Ok(())
    }

    /// Returns the draft model.
    pub fn draft(&self) -> Option<&str> {
        let of_config = || self.speculative_config.as_ref()?.model.as_deref();
        self.draft_model.as_deref().or_else(of_config)
    }

    /// Returns whether the model's own layer that predicts one token further guesses.
    pub fn uses_mtp(&self) -> bool {
        let of_config =
            self.speculative_config.as_ref().is_some_and(|config| config.method.is_some_and(|of| of.is_mtp()));
        of_config || self.speculation == Some(SpeculationChoice::Mtp)
    }

    /// Sets the path at which the draft model was found.
    pub fn set_draft_path(&mut self, path: String) {
        let of_config = self.speculative_config.as_mut().map(|config| &mut config.model);
        *of_config.unwrap_or(&mut self.draft_model) = Some(path);
    }

    /// Returns whether only the draft model or the model's own layer guesses.
    pub fn is_draft_alone(&self) -> bool {
        self.speculative_config.is_some()
    }

    /// Returns the speculation of a replica with this grid on devices of this class.
    pub fn speculation(&self, grid: Grid, class: DeviceClass) -> Speculation {
        let max = self.draft_max.unwrap_or(TOKENS);
        let adaptive = match max {
            0 => DraftPolicy::Off,
            _ => DraftPolicy::Adaptive { max, row: RowCost::Learned(ROW_PERMILLE) },
        };
        let is_single_cpu = grid == Grid::SOLO && class == DeviceClass::Cpu;
        let default = match is_single_cpu || self.draft_model.is_some() || self.draft_max.is_some() {
            true => SpeculationChoice::Auto,
            false => SpeculationChoice::Off,
        };
        let drafting = match (&self.speculative_config, self.speculation.unwrap_or(default)) {
            (Some(config), _) => config.num_speculative_tokens.map_or(adaptive, DraftPolicy::Fixed),
            (None, SpeculationChoice::Off) => DraftPolicy::Off,
            (None, SpeculationChoice::Fixed(n)) => DraftPolicy::Fixed(n),
            (None, _) => adaptive,
        };
        let ngrams = self.speculative_config.as_ref().map_or_else(NgramLimits::default, SpeculativeConfig::ngrams);
        Speculation { drafting, ngrams }
    }
}

impl SpeculationChoice {
    /// Returns the choice for two sources, which llama.cpp's `--spec-type` separates by a comma.
    fn of_both(one: SpeculationChoice, other: SpeculationChoice) -> Result<SpeculationChoice, String> {
        use SpeculationChoice::{DraftModel, Mtp, Ngram};
        match (one, other) {
            (Ngram, Ngram) => Ok(Ngram),
            (Mtp, Ngram | Mtp) | (Ngram, Mtp) => Ok(Mtp),
            (DraftModel, Ngram | DraftModel) | (Ngram, DraftModel) => Ok(DraftModel),
            _ => Err(format!("{one} and {other} cannot be given together")),
        }
    }
}

impl FromStr for SpeculationChoice {
    type Err = String;

    fn from_str(word: &str) -> Result<SpeculationChoice, String> {
        if let Some((first, rest)) = word.split_once(',') {
            return SpeculationChoice::of_both(first.parse()?, rest.parse()?);
        }
        match word {
            "off" | "none" => Ok(SpeculationChoice::Off),
            "auto" => Ok(SpeculationChoice::Auto),
            "ngram" | "ngram-simple" | "ngram-map-k" | "ngram-map-k4v" | "ngram-mod" | "ngram-cache" => {
                Ok(SpeculationChoice::Ngram)
            }
            "draft-simple" => Ok(SpeculationChoice::DraftModel),
            "mtp" | "draft-mtp" => Ok(SpeculationChoice::Mtp),
            "draft-eagle3" | "draft-dflash" | "draft-dspark" => Err(format!("{word} is not supported")),
            number => match number.parse() {
                Ok(0) => Ok(SpeculationChoice::Off),
                Ok(n) if u32::from(n) <= types::DRAFT_ROWS_MAX => Ok(SpeculationChoice::Fixed(n)),
                _ => Err(format!(
                    "{word:?} is not one of: off, auto, ngram, mtp, a number up to {}",
                    types::DRAFT_ROWS_MAX
                )),
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
            SpeculationChoice::DraftModel => to.write_str("draft-simple"),
            SpeculationChoice::Mtp => to.write_str("mtp"),
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

/// The accepted fields of vLLM's `--speculative-config`. Any other field would request an unsupported feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeculativeConfig {
    method: Option<SpeculationMethod>,
    model: Option<String>,
    /// Without it, as many as make the request faster.
    num_speculative_tokens: Option<u16>,
    prompt_lookup_max: Option<u16>,
    prompt_lookup_min: Option<u16>,
}

/// The source of guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SpeculationMethod {
    Ngram,
    DraftModel,
    #[serde(alias = "qwen3_5_mtp", alias = "qwen3_next_mtp", alias = "glm4_moe_mtp")]
    Mtp,
}

impl SpeculationMethod {
    fn is_mtp(self) -> bool {
        self == SpeculationMethod::Mtp
    }
}

impl SpeculativeConfig {
    fn check(&self) -> anyhow::Result<()> {
        if let Some(n) = self.num_speculative_tokens {
            let max = types::DRAFT_ROWS_MAX;
            ensure!(
                (1..=max).contains(&n.into()),
                "--speculative-config: num_speculative_tokens is {n}; it must be from 1 to {max}"
            );
        }
        let looks_up = self.prompt_lookup_max.or(self.prompt_lookup_min).is_some();
        match (self.method, &self.model) {
            (Some(SpeculationMethod::Ngram | SpeculationMethod::Mtp), None)
            | (Some(SpeculationMethod::DraftModel) | None, Some(_)) => {}
            (Some(method @ (SpeculationMethod::Ngram | SpeculationMethod::Mtp)), Some(model)) => {
                let name = if method.is_mtp() { "mtp" } else { "ngram" };
                bail!("--speculative-config: {name} has no model, and `model` is {model:?}")
            }
            (Some(SpeculationMethod::DraftModel) | None, None) => {
                bail!("--speculative-config: `model` is missing")
            }
        }
        ensure!(
            self.model.is_none() || !looks_up,
            "--speculative-config: a draft model has no prompt lookup; give --draft-model and --speculation for both"
        );
        let NgramLimits { least, most } = self.ngrams();
        ensure!(
            (1..=most).contains(&least),
            "--speculative-config: prompt_lookup_min is {least}; it must be from 1 to prompt_lookup_max, {most}"
        );
        Ok(())
    }

    /// Returns the limits of n-grams. As in vLLM, one bound alone stands for both, and five is the default.
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

    const NOTHING: SpeculationSettings = SpeculationSettings {
        speculation: None,
        draft_max: None,
        speculative_config: None,
        draft_model: None,
        draft_kv_memory: None,
    };

    fn settings(speculation: &str, config: Option<&str>) -> anyhow::Result<Speculation> {
        let config = config.map(|json| json.parse().map_err(anyhow::Error::msg)).transpose()?;
        let speculation = Some(speculation.parse().map_err(anyhow::Error::msg)?);
        let settings = SpeculationSettings { speculation, speculative_config: config, ..NOTHING };
        settings.check().map(|()| settings.speculation(Grid::SOLO, DeviceClass::Cpu))
    }

    #[test]
    fn words_and_numbers_set_the_drafting() {
        let drafting = |word: &str| settings(word, None).map(|speculation| speculation.drafting);
        assert_eq!(drafting("off").unwrap(), DraftPolicy::Off);
        assert_eq!(drafting("0").unwrap(), DraftPolicy::Off);
        assert_eq!(drafting("4").unwrap(), DraftPolicy::Fixed(4));
        assert!(matches!(drafting("auto").unwrap(), DraftPolicy::Adaptive { .. }));
        assert_eq!(drafting("ngram").unwrap(), drafting("auto").unwrap());
        for wrong in ["33", "-1", "eagle", ""] {
            assert!(drafting(wrong).unwrap_err().to_string().contains("not one of: off, auto, ngram, mtp"), "{wrong}");
        }
        for word in ["off", "auto", "ngram", "7"] {
            assert_eq!(word.parse::<SpeculationChoice>().unwrap().to_string(), word);
        }
    }

    const PAIR: Grid = Grid { pp: 2, tp: 1 };

    #[test]
    fn one_cpu_stage_drafts_by_default() {
        let is_off = |grid, class| NOTHING.speculation(grid, class).drafting == DraftPolicy::Off;
        assert!(!is_off(Grid::SOLO, DeviceClass::Cpu));
        assert!(is_off(PAIR, DeviceClass::Cpu) && is_off(Grid::SOLO, DeviceClass::Cuda));
    }

    #[test]
    fn llama_cpps_words_are_understood() {
        let choice = |word: &str| word.parse::<SpeculationChoice>();
        assert_eq!(choice("none"), Ok(SpeculationChoice::Off));
        assert_eq!(choice("ngram-mod,ngram-simple"), Ok(SpeculationChoice::Ngram));
        assert_eq!(choice("draft-mtp,ngram-mod"), Ok(SpeculationChoice::Mtp));
        assert_eq!(choice("ngram-mod,draft-simple"), Ok(SpeculationChoice::DraftModel));
        assert!(choice("draft-eagle3,ngram-mod").unwrap_err().contains("draft-eagle3 is not supported"));
        assert!(choice("none,ngram-mod").unwrap_err().contains("cannot be given together"));
        let alone = settings("draft-simple", None).unwrap_err().to_string();
        assert!(alone.contains("needs a draft model"), "{alone}");
        let limited = |speculation, draft_max| SpeculationSettings { speculation, draft_max, ..NOTHING };
        let drafting = |settings: SpeculationSettings| settings.speculation(PAIR, DeviceClass::Cpu).drafting;
        assert_eq!(drafting(limited(None, Some(16))).max(), 16);
        assert_eq!(drafting(limited(Some(SpeculationChoice::Auto), Some(0))), DraftPolicy::Off);
        let fixed = limited(Some(SpeculationChoice::Fixed(4)), Some(2)).check().unwrap_err().to_string();
        assert!(fixed.contains("limits `--speculation auto`, and --speculation is 4"), "{fixed}");
    }

    #[test]
    fn vllms_words_are_understood_and_what_is_not_served_is_refused_by_name() {
        let config = |json| settings("off", Some(json));
        let whole = r#"{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}"#;
        let expected = Speculation { drafting: DraftPolicy::Fixed(5), ngrams: NgramLimits { least: 2, most: 4 } };
        assert_eq!(config(whole).unwrap(), expected);
        let ngrams = config(r#"{"method":"ngram","num_speculative_tokens":3}"#).unwrap().ngrams;
        assert_eq!(ngrams, NgramLimits { least: 5, most: 5 });
        let refused = |json, part: &str| {
            let error = config(json).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        let auto = config(r#"{"method":"ngram"}"#).unwrap();
        assert_eq!(auto.drafting, settings("auto", None).unwrap().drafting);
        let mtp = r#"{"method":"qwen3_5_mtp","num_speculative_tokens":2}"#.parse().unwrap();
        let mtp = SpeculationSettings { speculative_config: Some(mtp), ..NOTHING };
        mtp.check().unwrap();
        assert!(mtp.uses_mtp() && mtp.is_draft_alone());
        refused(r#"{"method":"mtp","model":"other"}"#, "mtp has no model");
        refused(r#"{"method":"eagle","num_speculative_tokens":3}"#, "eagle");
        refused(r#"{"method":"ngram","num_speculative_tokens":3,"model":"draft"}"#, "model");
        refused(r#"{"method":"ngram","num_speculative_tokens":0}"#, "num_speculative_tokens is 0");
        refused(
            r#"{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":2,"prompt_lookup_min":3}"#,
            "it must be from 1 to prompt_lookup_max",
        );
        refused("5", "invalid type");
        refused(r#"{"num_speculative_tokens":3}"#, "`model` is missing");
        refused(r#"{"method":"draft_model","num_speculative_tokens":3}"#, "`model` is missing");
        refused(r#"{"model":"small","num_speculative_tokens":3,"prompt_lookup_max":2}"#, "has no prompt lookup");
    }

    #[test]
    fn a_draft_model_is_named_in_either_way_and_switches_guessing_on() {
        let named = SpeculationSettings {
            draft_model: Some("small".into()),
            draft_kv_memory: Some(ByteSize(1 << 20)),
            ..NOTHING
        };
        named.check().unwrap();
        let drafting = |settings: &SpeculationSettings| settings.speculation(PAIR, DeviceClass::Cpu).drafting;
        assert!(matches!(drafting(&named), DraftPolicy::Adaptive { .. }));
        let off = SpeculationSettings { speculation: Some(SpeculationChoice::Off), ..named.clone() };
        assert_eq!(drafting(&off), DraftPolicy::Off);
        assert_eq!((named.draft(), named.is_draft_alone()), (Some("small"), false));
        let fixed = SpeculationSettings { speculation: Some(SpeculationChoice::Fixed(4)), ..named.clone() };
        assert_eq!(drafting(&fixed), DraftPolicy::Fixed(4));
        let json = r#"{"model":"small","num_speculative_tokens":3}"#;
        let mut config =
            SpeculationSettings { speculative_config: Some(json.parse().unwrap()), draft_model: None, ..named.clone() };
        config.check().unwrap();
        assert_eq!((drafting(&config), config.is_draft_alone()), (DraftPolicy::Fixed(3), true));
        config.set_draft_path("/models/small".into());
        assert_eq!(config.draft(), Some("/models/small"));
        let unused = SpeculationSettings { draft_model: None, ..named };
        assert!(unused.check().unwrap_err().to_string().contains("needs a draft model"));
    }
}
