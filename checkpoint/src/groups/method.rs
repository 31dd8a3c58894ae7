//! How a folder's weights of few bits are stored, by its `quantization_config`.
//!
//! Bits, groups and zeros follow from the tensors' shapes, so that layers may differ. The config decides only what no
//! shape shows, and what is refused.

use super::fp4::ScaleFactor;
use crate::error::ParseError;
use serde_json::Value;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum QuantMethod {
    #[default]
    None,
    Gptq {
        /// The first format stores zeros less one.
        zero_plus: u16,
    },
    Awq,
    /// compressed-tensors, packed or in bytes. The rounding of activations is ignored: here rows have scales of their
    /// own.
    Integers,
    /// LLM.int8 of bitsandbytes. Its outliers are not kept apart: here products are of eight bits, or exact.
    Int8,
    /// NF4 and FP4 of bitsandbytes; each matrix names its own.
    Codes,
    Nvfp4(ScaleFactor),
}

impl QuantMethod {
    pub fn of_gptq(quantized: &Value) -> Result<QuantMethod, ParseError> {
        let bits = &quantized["bits"];
        if [2, 3, 4, 8].iter().all(|known| *bits != *known) {
            return refused(&format!("by gptq to {bits} bits"));
        }
        if quantized["is_marlin_format"] == true || !is_one_of(&quantized["pack_dtype"], &["int32"]) {
            return refused("by gptq and repacked");
        }
        match quantized["checkpoint_format"].as_str() {
            None | Some("gptq") => Ok(QuantMethod::Gptq { zero_plus: 1 }),
            Some("gptq_v2") => Ok(QuantMethod::Gptq { zero_plus: 0 }),
            Some(other) => refused(&format!("by gptq in the format {other}")),
        }
    }

    pub fn of_awq(quantized: &Value) -> Result<QuantMethod, ParseError> {
        let bits = &quantized["bits"];
        if *bits != 4 {
            return refused(&format!("by awq to {bits} bits"));
        }
        if quantized["zero_point"] == false {
            return refused("by awq without zeros");
        }
        match quantized["version"].as_str().map(str::to_lowercase).as_deref() {
            None | Some("gemm") => Ok(QuantMethod::Awq),
            Some(other) => refused(&format!("by awq in the version {other}")),
        }
    }

    pub fn of_bitsandbytes(quantized: &Value) -> Result<QuantMethod, ParseError> {
        let is_set = |names: [&str; 2]| names.iter().any(|name| quantized[*name] == true);
        if is_set(["load_in_8bit", "_load_in_8bit"]) {
            return Ok(QuantMethod::Int8);
        }
        let kind = quantized["bnb_4bit_quant_type"].as_str().unwrap_or("fp4");
        if is_set(["load_in_4bit", "_load_in_4bit"]) && ["nf4", "fp4"].contains(&kind) {
            return Ok(QuantMethod::Codes);
        }
        refused(&format!("by bitsandbytes to {kind}"))
    }

    /// Of one group of compressed-tensors' config.
    pub fn of_integers(group: &Value) -> Result<QuantMethod, ParseError> {
        let weights = &group["weights"];
        let (bits, kind) = (&weights["num_bits"], &weights["type"]);
        if (*bits != 4 && *bits != 8) || kind != "int" {
            return refused(&format!("to {kind} of {bits} bits"));
        }
        if !is_one_of(&weights["strategy"], &["group", "channel", "tensor"]) || weights["strategy"].is_null() {
            return refused(&format!("by the strategy {}", weights["strategy"]));
        }
        if !is_one_of(&weights["actorder"], &["weight", "static"]) {
            return refused(&format!("in the order {} (actorder)", weights["actorder"]));
        }
        if !is_one_of(&group["format"], &["pack-quantized", "int-quantized"]) {
            return refused(&format!("in the format {}", group["format"]));
        }
        Ok(QuantMethod::Integers)
    }

    /// Of one group of compressed-tensors' config in the format of NVFP4.
    pub fn of_nvfp4(group: &Value) -> Result<QuantMethod, ParseError> {
        let weights = &group["weights"];
        let (bits, kind) = (&weights["num_bits"], &weights["type"]);
        if *bits != 4 || kind != "float" || weights["symmetric"] == false {
            return refused(&format!("to {kind} of {bits} bits"));
        }
        if weights["strategy"] != "tensor_group" || !is_one_of(&group["format"], &["nvfp4-pack-quantized"]) {
            return refused(&format!("by the strategy {} in the format {}", weights["strategy"], group["format"]));
        }
        Ok(QuantMethod::Nvfp4(ScaleFactor::Divides))
    }

    /// Of modelopt's config.
    pub fn of_modelopt(algorithm: Option<&str>) -> Result<QuantMethod, ParseError> {
        match algorithm {
            // The scales of eight-bit numbers are found by their names.
            Some("FP8") => Ok(QuantMethod::None),
            Some("NVFP4" | "W4A16_NVFP4") => Ok(QuantMethod::Nvfp4(ScaleFactor::Multiplies)),
            other => refused(&format!("by modelopt as {}", other.unwrap_or("an unknown type"))),
        }
    }
}

/// Whether it is absent or one of these.
fn is_one_of(value: &Value, known: &[&str]) -> bool {
    value.is_null() || value == false || value.as_str().is_some_and(|value| known.contains(&value))
}

fn refused<T>(how: &str) -> Result<T, ParseError> {
    ParseError::unsupported(format!("a folder whose weights are quantized {how} (quantization_config)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_hubs_have_is_read() {
        let gptq = |text: &str| QuantMethod::of_gptq(&json(text));
        let common = r#"{"bits": 4, "group_size": 128, "desc_act": false, "sym": true, "quant_method": "gptq"}"#;
        assert_eq!(gptq(common), Ok(QuantMethod::Gptq { zero_plus: 1 }));
        assert_eq!(gptq(r#"{"bits": 8, "checkpoint_format": "gptq_v2"}"#), Ok(QuantMethod::Gptq { zero_plus: 0 }));
        assert_eq!(gptq(r#"{"bits": 4, "desc_act": true, "group_size": -1}"#), Ok(QuantMethod::Gptq { zero_plus: 1 }));
        assert_eq!(gptq(r#"{"bits": 3, "desc_act": true, "group_size": 128}"#), Ok(QuantMethod::Gptq { zero_plus: 1 }));
        let modelopt = Ok(QuantMethod::Nvfp4(ScaleFactor::Multiplies));
        assert_eq!(QuantMethod::of_modelopt(Some("NVFP4")), modelopt);
        let nvfp4 = r#"{"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}"#;
        assert_eq!(QuantMethod::of_nvfp4(&json(nvfp4)), Ok(QuantMethod::Nvfp4(ScaleFactor::Divides)));
        let awq = r#"{"bits": 4, "group_size": 128, "version": "GEMM", "zero_point": true, "quant_method": "awq"}"#;
        assert_eq!(QuantMethod::of_awq(&json(awq)), Ok(QuantMethod::Awq));
        let eight = r#"{"_load_in_8bit": true, "load_in_4bit": false, "bnb_4bit_quant_type": "fp4"}"#;
        assert_eq!(QuantMethod::of_bitsandbytes(&json(eight)), Ok(QuantMethod::Int8));
        let four = r#"{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true}"#;
        assert_eq!(QuantMethod::of_bitsandbytes(&json(four)), Ok(QuantMethod::Codes));
        let group = r#"{"weights": {"num_bits": 4, "type": "int", "strategy": "group", "actorder": null}}"#;
        assert_eq!(QuantMethod::of_integers(&json(group)), Ok(QuantMethod::Integers));
    }

    #[test]
    fn what_is_not_is_refused_by_name() {
        let gptq = |text: &str| QuantMethod::of_gptq(&json(text));
        let refusals = [
            (gptq(r#"{"bits": 5}"#), "to 5 bits"),
            (QuantMethod::of_modelopt(Some("NVFP4_AWQ")), "NVFP4_AWQ"),
            (QuantMethod::of_modelopt(None), "an unknown type"),
            (QuantMethod::of_nvfp4(&json(r#"{"weights": {"num_bits": 8, "type": "float"}}"#)), "of 8 bits"),
            (
                QuantMethod::of_nvfp4(&json(r#"{"weights": {"num_bits": 4, "type": "float", "strategy": "group"}}"#)),
                "the strategy",
            ),
            (gptq(r#"{"bits": 4, "checkpoint_format": "marlin"}"#), "marlin"),
            (gptq(r#"{"bits": 4, "pack_dtype": "int16"}"#), "repacked"),
            (QuantMethod::of_awq(&json(r#"{"bits": 4, "version": "gemv"}"#)), "version gemv"),
            (QuantMethod::of_awq(&json(r#"{"bits": 4, "zero_point": false}"#)), "without zeros"),
            (QuantMethod::of_awq(&json(r#"{"bits": 8}"#)), "to 8 bits"),
            (QuantMethod::of_bitsandbytes(&json(r#"{"load_in_4bit": true, "bnb_4bit_quant_type": "nf3"}"#)), "to nf3"),
            (QuantMethod::of_integers(&json(r#"{"weights": {"num_bits": 3, "type": "int"}}"#)), "of 3 bits"),
            (
                QuantMethod::of_integers(&json(
                    r#"{"weights": {"num_bits": 4, "type": "int", "strategy": "group", "actorder": "group"}}"#,
                )),
                "actorder",
            ),
        ];
        for (refusal, expect) in refusals {
            let Err(ParseError::Unsupported(why)) = refusal else { panic!("{expect}") };
            assert!(why.contains(expect) && why.contains("quantization_config"), "{why}");
        }
    }
}
