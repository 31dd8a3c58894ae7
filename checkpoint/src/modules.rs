//! Reads the files by which sentence-transformers describes what follows a model's hidden states: the list of modules,
//! how they pool, and their products. Knows no tensor's bytes.

use crate::config::json::keys::JsonKeys;
use crate::config::{PooledActivation, PooledLayer, Pooling, PoolingSpec};
use crate::error::{Error, ParseError, Result};
use crate::small_files::{is_plain_name, read_json, read_json_if_there};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) const LIST: &str = "modules.json";
/// Says what stands before a text, by what the text is for.
pub(crate) const PROMPTS: &str = "config_sentence_transformers.json";
/// More modules than any model has.
const MODULES_MAX: usize = 16;

/// The files of a folder's modules, such as `1_Pooling/config.json`. `has` returns whether a file of that name exists.
pub(crate) fn files(folder: &Path, has: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let list = read_json_if_there(&folder.join(LIST))?;
    let modules = list.as_array().into_iter().flatten().filter_map(|module| module["path"].as_str());
    let modules = modules.filter(|path| is_plain_name(path)).take(MODULES_MAX);
    let of_module = |path: &str| ["config.json", "model.safetensors"].map(|file| in_folder(path, file));
    Ok(modules.flat_map(of_module).filter(|name| has(name)).collect())
}

/// The beginnings that a folder's model expects before texts, by the texts' uses, such as `query`.
pub(crate) fn prompts_of_folder(folder: &Path) -> Result<BTreeMap<String, String>> {
    let config = read_json_if_there(&folder.join(PROMPTS))?;
    let all = config["prompts"].as_object().into_iter().flatten();
    Ok(all.filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_owned()))).collect())
}

/// How a folder pools, if it has a list of modules.
pub(crate) fn pooling_of_folder(folder: &Path) -> Result<Option<PoolingSpec>> {
    let list = read_json_if_there(&folder.join(LIST))?;
    let Some(modules) = list.as_array() else { return Ok(None) };
    let mut pooling = PoolingSpec::default();
    for module in modules {
        let kind = module["type"].as_str().unwrap_or_default();
        let kind = kind.rsplit('.').next().unwrap_or_default();
        let path = module["path"].as_str().unwrap_or_default();
        let config = || {
            if !is_plain_name(path) {
                let what = format!("{LIST} names the folder {path:?}");
                return Err(Error::Malformed { path: folder.to_owned(), what });
            }
            read_json(&folder.join(path).join("config.json"))
        };
        let fault = Error::with_path(folder);
        match kind {
            // An embedding is normalized in any case.
            "Transformer" | "Normalize" => {}
            "Pooling" => pooling.kind = pooling_kind(&config()?).map_err(fault)?,
            "Dense" => pooling.layers.push(dense(path, &config()?).map_err(fault)?),
            other => return ParseError::unsupported(format!("the module {other}")).map_err(fault),
        }
    }
    Ok(Some(pooling))
}

fn pooling_kind(config: &Value) -> std::result::Result<Pooling, ParseError> {
    let by_name = |name: &str| match name {
        "cls" => Ok(Pooling::First),
        "mean" => Ok(Pooling::Mean),
        "max" => Ok(Pooling::Max),
        "lasttoken" => Ok(Pooling::Last),
        other => ParseError::unsupported(format!("pooling by {other}")),
    };
    let keys = JsonKeys(config);
    if let Some(name) = keys.text("pooling_mode") {
        return by_name(name);
    }
    let modes = [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_lasttoken", "lasttoken"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
        ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ];
    let is_set = |key: &str| Ok(keys.bool(key)?.unwrap_or(false));
    let mut set = Vec::new();
    for (key, name) in modes {
        if is_set(key)? {
            set.push(name);
        }
    }
    match set[..] {
        [] => Ok(Pooling::Mean),
        [name] => by_name(name),
        _ => ParseError::unsupported(format!("several ways of pooling at once: {}", set.join(", "))),
    }
}

fn dense(path: &str, config: &Value) -> std::result::Result<PooledLayer, ParseError> {
    let keys = JsonKeys(config);
    let activation = match keys.text("activation_function").and_then(|name| name.rsplit('.').next()) {
        None | Some("Identity") => PooledActivation::None,
        Some("Tanh") => PooledActivation::Tanh,
        Some("GELU") => PooledActivation::GeluErf,
        Some(other) => return ParseError::unsupported(format!("the activation {other} of a module")),
    };
    let layer =
        PooledLayer::product(&in_folder(path, "linear"), keys.length("in_features")?, keys.length("out_features")?);
    Ok(layer.with(activation))
}

/// The name of a module's tensor among all of a model's folder.
pub(crate) fn in_folder(path: &str, tensor: &str) -> String {
    format!("{path}/{tensor}")
}

/// The folder of a module's tensor.
pub(crate) fn folder_of(tensor: &str) -> Option<&str> {
    tensor.split_once('/').map(|(folder, _)| folder)
}
