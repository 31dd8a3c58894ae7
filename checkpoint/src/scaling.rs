//! Quantized weights in a folder: the settings in `quantization_config`, and which scale belongs to which eight-bit
//! numbers. Knows no model.
//!
//! How activations were rounded when the model was made (`input_scale`, `activation_scheme`) is ignored: here they are
//! wider, or each row has its own scale. Scales for an eight-bit KV cache are ignored too, as there is none.

use crate::error::ParseError;
use crate::groups::method::QuantMethod;
use serde_json::{Value, json};

/// modelopt's own config, beside `config.json`.
pub(crate) const MODELOPT_FILE: &str = "hf_quant_config.json";

/// A device keeps one scale for at least this many columns.
const COLUMNS: usize = 32;

/// Which numbers of a matrix share a scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QuantConfig {
    /// Rows and columns that share a scale, if the config names them; otherwise one scale per matrix or row.
    block: Option<[usize; 2]>,
    /// How matrices of few bits are stored, if there are any.
    pub method: QuantMethod,
}

impl From<QuantMethod> for QuantConfig {
    fn from(method: QuantMethod) -> QuantConfig {
        QuantConfig { block: None, method }
    }
}

impl QuantConfig {
    /// Without a `quantization_config`, only a tensor's type can mark it as quantized.
    pub fn from_config(config: &Value) -> Result<QuantConfig, ParseError> {
        let Some(quantized) = config.get("quantization_config").filter(|value| !value.is_null()) else {
            return Ok(QuantConfig::default());
        };
        let method = quantized["quant_method"].as_str().unwrap_or("an unknown method");
        match method {
            "fp8" => QuantConfig::of_fp8(quantized),
            // The blocks of MXFP4 have scales of their own.
            "fbgemm_fp8" | "mxfp4" => Ok(QuantConfig::default()),
            "modelopt" => QuantMethod::of_modelopt(quantized["quant_algo"].as_str()).map(QuantConfig::from),
            "compressed-tensors" => QuantConfig::of_groups(quantized),
            "gptq" => QuantMethod::of_gptq(quantized).map(QuantConfig::from),
            "awq" => QuantMethod::of_awq(quantized).map(QuantConfig::from),
            "bitsandbytes" => QuantMethod::of_bitsandbytes(quantized).map(QuantConfig::from),
            _ => refused(&format!("by {method}")),
        }
    }

    /// Adds the algorithm of modelopt's own file to a `config.json` without a `quantization_config`: older versions of
    /// modelopt write NVFP4 so.
    pub fn add_modelopt(config: &mut Value, own: &Value) {
        let algorithm = own["quantization"]["quant_algo"].as_str().filter(|algorithm| algorithm.contains("NVFP4"));
        if let (Some(algorithm), true) = (algorithm, config.is_object() && config["quantization_config"].is_null()) {
            config["quantization_config"] = json!({"quant_method": "modelopt", "quant_algo": algorithm});
        }
    }

    fn of_fp8(quantized: &Value) -> Result<QuantConfig, ParseError> {
        match quantized.get("fmt").and_then(Value::as_str) {
            None | Some("e4m3") => QuantConfig::of_block(quantized.get("weight_block_size")),
            Some(other) => refused(&format!("as {other}")),
        }
    }

    /// The scaling that all groups share.
    fn of_groups(quantized: &Value) -> Result<QuantConfig, ParseError> {
        let of_group = match quantized["format"].as_str() {
            None | Some("float-quantized" | "naive-quantized") => {
                |group: &Value| QuantConfig::of_weights(&group["weights"])
            }
            Some("pack-quantized" | "int-quantized") => {
                |group: &Value| QuantMethod::of_integers(group).map(QuantConfig::from)
            }
            Some("nvfp4-pack-quantized") => |group: &Value| QuantMethod::of_nvfp4(group).map(QuantConfig::from),
            _ => return refused(&format!("in the format {}", quantized["format"])),
        };
        let is_there =
            |key: &str| quantized.get(key).is_some_and(|value| value.as_object().is_some_and(|o| !o.is_empty()));
        if let Some(key) = ["sparsity_config", "transform_config"].into_iter().find(|key| is_there(key)) {
            return refused(&format!("with a {key}"));
        }
        let Some(groups) = quantized["config_groups"].as_object().filter(|groups| !groups.is_empty()) else {
            return ParseError::malformed("quantization_config has no config_groups");
        };
        let mut all = groups.values().map(of_group);
        let first = all.next().unwrap_or_else(|| Ok(QuantConfig::default()))?;
        for other in all {
            if other? != first {
                return refused("in groups that differ");
            }
        }
        Ok(first)
    }

    fn of_weights(weights: &Value) -> Result<QuantConfig, ParseError> {
        let (bits, kind) = (&weights["num_bits"], &weights["type"]);
        if *bits != 8 || kind != "float" || weights["symmetric"] == false {
            return refused(&format!("to {kind} of {bits} bits"));
        }
        match weights["strategy"].as_str() {
            Some("tensor" | "channel") => Ok(QuantConfig::default()),
            Some("block") => QuantConfig::of_block(weights.get("block_structure")),
            other => refused(&format!("by the strategy {}", other.unwrap_or("null"))),
        }
    }

    fn of_block(block: Option<&Value>) -> Result<QuantConfig, ParseError> {
        let Some(block) = block.filter(|block| !block.is_null()) else { return Ok(QuantConfig::default()) };
        let length = |i: usize| block[i].as_u64().filter(|n| (1..1 << 24).contains(n)).map(|n| n as usize);
        match (length(0), length(1), block.as_array().map(Vec::len)) {
            (Some(rows), Some(columns), Some(2)) if columns.is_multiple_of(COLUMNS) => {
                Ok(QuantConfig { block: Some([rows, columns]), ..QuantConfig::default() })
            }
            _ => refused(&format!("in blocks of {block}")),
        }
    }

    /// Returns the rows and columns that share a scale, for a matrix with this shape of scales.
    pub fn block_of(self, [rows, columns]: [usize; 2], scales: [usize; 2]) -> Result<[usize; 2], ParseError> {
        let fits = |block: &[usize; 2]| [rows.div_ceil(block[0]), columns.div_ceil(block[1])] == scales;
        let n = scales[0].saturating_mul(scales[1]);
        match self.block.filter(fits) {
            _ if n == 1 => Ok([rows, columns]),
            Some(block) => Ok(block),
            None if n == rows && scales.contains(&1) => Ok([1, columns]),
            None => ParseError::malformed(format!("{scales:?} scales for a matrix of {rows} x {columns}")),
        }
    }
}

fn refused<T>(how: &str) -> Result<T, ParseError> {
    ParseError::unsupported(format!("a folder whose weights are quantized {how} (quantization_config)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(quantized: &str) -> Result<QuantConfig, ParseError> {
        let config = format!(r#"{{"quantization_config": {quantized}}}"#);
        QuantConfig::from_config(&serde_json::from_str(&config).unwrap())
    }

    #[test]
    fn what_hubs_have_is_read() {
        let plain = Ok(QuantConfig::default());
        let blocks = Ok(QuantConfig { block: Some([128, 128]), ..QuantConfig::default() });
        assert_eq!(read("null"), plain);
        assert_eq!(read(r#"{"quant_method": "fp8", "activation_scheme": "static"}"#), plain);
        assert_eq!(read(r#"{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}"#), blocks);
        assert_eq!(read(r#"{"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}"#), plain);
        assert_eq!(read(r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#), plain);
        let nvfp4 = read(r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#);
        let own = json!({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}});
        for mut config in [json!({}), json!({"quantization_config": null})] {
            QuantConfig::add_modelopt(&mut config, &own);
            assert_eq!((QuantConfig::from_config(&config), nvfp4 == plain), (nvfp4.clone(), false));
        }
        let mut config = json!({"quantization_config": {"quant_method": "fp8"}});
        QuantConfig::add_modelopt(&mut config, &own);
        assert_eq!(QuantConfig::from_config(&config), plain);
        let group = |weights: &str| {
            read(&format!(
                r#"{{"quant_method": "compressed-tensors", "format": "float-quantized", "sparsity_config": {{}},
                    "config_groups": {{"group_0": {{"weights": {weights}, "targets": ["Linear"]}}}}}}"#
            ))
        };
        assert_eq!(group(r#"{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true}"#), plain);
        let block = r#"{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}"#;
        assert_eq!(group(block), blocks);
        for (weights, expect) in [
            (r#"{"num_bits": 8, "type": "int", "strategy": "channel"}"#, r#"to "int" of 8 bits"#),
            (r#"{"num_bits": 4, "type": "float", "strategy": "group"}"#, "of 4 bits"),
            (r#"{"num_bits": 8, "type": "float", "strategy": "group"}"#, "the strategy group"),
            (
                r#"{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [0, 128]}"#,
                "blocks of [0,128]",
            ),
            ("null", "of null bits"),
        ] {
            let Err(ParseError::Unsupported(why)) = group(weights) else { panic!("{weights}") };
            assert!(why.contains(expect), "{why}");
        }
    }

    #[test]
    fn what_is_not_is_refused_by_name() {
        for (quantized, expect) in [
            (r#"{"quant_method": "gptq", "bits": 5}"#, "by gptq to 5 bits"),
            (r#"{"quant_method": "hqq", "nbits": 4}"#, "by hqq"),
            (r#"{"quant_method": "bitsandbytes"}"#, "by bitsandbytes"),
            (r#"{"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}"#, "by modelopt as NVFP4_AWQ"),
            (r#"{"quant_method": "fp8", "fmt": "e5m2"}"#, "as e5m2"),
            (r#"{"quant_method": "fp8", "weight_block_size": [128, 40]}"#, "blocks of [128,40]"),
            (r#"{"quant_method": "fp8", "weight_block_size": 128}"#, "blocks of 128"),
            (r#"{"quant_method": "compressed-tensors", "format": "marlin-24"}"#, "marlin-24"),
            (r#"{"quant_method": "compressed-tensors", "transform_config": {"a": 1}}"#, "transform_config"),
            ("{}", "an unknown method"),
        ] {
            let Err(ParseError::Unsupported(why)) = read(quantized) else { panic!("{quantized}") };
            assert!(why.contains(expect) && why.contains("quantization_config"), "{why}");
        }
        assert!(matches!(read(r#"{"quant_method": "compressed-tensors"}"#), Err(ParseError::Malformed(_))));
    }

    #[test]
    fn scales_are_counted() {
        let (plain, blocks) =
            (QuantConfig::default(), QuantConfig { block: Some([128, 128]), ..QuantConfig::default() });
        assert_eq!(plain.block_of([300, 576], [1, 1]), Ok([300, 576]));
        assert_eq!(plain.block_of([300, 576], [300, 1]), Ok([1, 576]));
        assert_eq!(plain.block_of([300, 576], [1, 300]), Ok([1, 576]));
        assert_eq!(blocks.block_of([300, 576], [3, 5]), Ok([128, 128]));
        assert_eq!(blocks.block_of([96, 64], [1, 1]), Ok([96, 64]));
        for (scaling, scales) in
            [(plain, [3, 5]), (plain, [299, 1]), (plain, [30, 10]), (blocks, [3, 4]), (blocks, [0, 9])]
        {
            assert!(scaling.block_of([300, 576], scales).is_err(), "{scales:?}");
        }
    }
}
