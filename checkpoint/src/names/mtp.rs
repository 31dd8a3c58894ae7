//! The layer of a model that predicts one token further (multi-token prediction, MTP): its shape, and where a file
//! stores its tensors. Files may lack it, and no token of the model depends on it.

use super::rows::{MTP_EMBEDDING, MTP_HEAD, MTP_LAYER_OF_GGUF, MTP_PRODUCT, MtpTables, TensorMapping};
use super::{FileKind, StoredTensor, expected_tensor, tensors_of_layer};
use crate::config::{LayerSpec, MixerSpec, ModelSpec};
use std::collections::HashMap;

/// The shape of the layer that predicts one token further. It is no part of a model's spec, because the spec identifies
/// what determines the model's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct MtpSpec {
    /// A model of this layer alone, with the shapes and rules of the whole model.
    pub layer: ModelSpec,
    /// Whether the file has an embedding for this layer alone.
    pub has_embedding: bool,
    /// Whether the file has an output head for this layer alone.
    pub has_head: bool,
}

/// The layer's shape, and the location of each of its tensors by the name that the model uses.
pub(crate) struct MtpWeights {
    pub spec: MtpSpec,
    pub sources: HashMap<String, StoredTensor>,
}

impl MtpWeights {
    /// The layer of a model of this spec. None if the file does not have it. `kind_of` returns how a folder stores the
    /// experts of the layer at a path.
    pub fn find(
        spec: &ModelSpec,
        kind_of: impl FnOnce(&str) -> FileKind,
        has: impl Fn(&str) -> bool,
    ) -> Option<MtpWeights> {
        let tables = spec.family.definition().tensors.mtp?;
        let paths = LayerPaths { n_layers: spec.n_layers, tables };
        let kind = kind_of(&paths.in_folder());
        let layer = spec_of_layer(spec);
        let outer = |row: &'static TensorMapping| paths.outer(&layer, kind, row);
        let mut sources: HashMap<_, _> = tables.outer.iter().map(outer).collect();
        if !has(&sources.get(MTP_PRODUCT)?.file) {
            return None;
        }
        sources.extend(tables.ends.iter().map(outer).filter(|(_, source)| has(&source.file)));
        sources.extend(paths.inner(&layer, kind));
        let has = |name: &str| sources.contains_key(name);
        Some(MtpWeights {
            spec: MtpSpec { has_embedding: has(MTP_EMBEDDING), has_head: has(MTP_HEAD), layer },
            sources,
        })
    }
}

/// All positions attend to all before them, and the MLP is as in the model's last layers.
fn spec_of_layer(spec: &ModelSpec) -> ModelSpec {
    let positions = spec.family.definition().rules.positions.of_layer(false);
    let mixer = MixerSpec::Attention;
    let layer = LayerSpec { mixer, positions, has_mlp: true, has_experts: spec.experts.is_some(), ..LayerSpec::EMPTY };
    ModelSpec { n_layers: 1, layers: vec![layer], ..spec.clone() }
}

/// The paths of the layer in files.
struct LayerPaths {
    n_layers: u32,
    tables: &'static MtpTables,
}

impl LayerPaths {
    fn in_folder(&self) -> String {
        self.numbered(self.tables.layer)
    }

    fn numbered(&self, name: &str) -> String {
        name.replace("{n}", &self.n_layers.to_string())
    }

    fn outer(&self, layer: &ModelSpec, kind: FileKind, row: &'static TensorMapping) -> (String, StoredTensor) {
        let (expected, source) = expected_tensor(layer, kind, row, None, None);
        (expected.name, StoredTensor { file: self.numbered(&source.file), ..source })
    }

    /// The tensors that each layer of the model has, named `mtp.layers.0.*`.
    fn inner(&self, layer: &ModelSpec, kind: FileKind) -> impl Iterator<Item = (String, StoredTensor)> {
        let usual = match kind {
            FileKind::Gguf => "blk",
            _ => layer.family.definition().tensors.layers,
        };
        let path = if kind == FileKind::Gguf { self.numbered(MTP_LAYER_OF_GGUF) } else { self.in_folder() };
        let moved = move |name: &str, from: &str, to: &str| {
            name.strip_prefix(from).map_or_else(|| name.to_owned(), |rest| format!("{to}{rest}"))
        };
        tensors_of_layer(layer, kind, 0, &layer.layers[0]).map(move |(expected, source)| {
            let file = moved(&source.file, &format!("{usual}.0"), &path);
            (moved(&expected.name, "model.layers", "mtp.layers"), StoredTensor { file, ..source })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn files(model: &str, kind: FileKind, names: &[&str]) -> Vec<String> {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(model).join("config.json");
        let found = MtpWeights::find(&ModelSpec::open(&config).unwrap(), |_| kind, |_| true).unwrap();
        names.iter().map(|name| found.sources[*name].file.clone()).collect()
    }

    #[test]
    fn names_are_those_of_each_kind_of_file() {
        const NAMES: [&str; 5] = [
            MTP_PRODUCT,
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.norm.weight",
            MTP_HEAD,
            "mtp.layers.0.self_attn.q_proj.weight",
        ];
        let qwen = ["mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight", "mtp.lm_head.weight"];
        let qwen = [&qwen[..], &["mtp.layers.0.self_attn.q_proj.weight"]].concat();
        assert_eq!(files("qwen3.5-mtp", FileKind::Folder, &NAMES), qwen);
        let glm = ["eh_proj.weight", "hnorm.weight", "shared_head.norm.weight", "shared_head.head.weight"];
        let glm = [&glm[..], &["self_attn.q_proj.weight"]].concat().into_iter();
        let glm: Vec<String> = glm.map(|name| format!("model.layers.2.{name}")).collect();
        assert_eq!(files("glm4-moe-mtp", FileKind::Folder, &NAMES), glm);
        // As llama.cpp's converter names them.
        let gguf = ["nextn.eh_proj", "nextn.hnorm", "nextn.shared_head_norm", "nextn.shared_head_head", "attn_q"];
        let gguf: Vec<String> = gguf.iter().map(|name| format!("blk.2.{name}.weight")).collect();
        for model in ["qwen3.5-mtp", "glm4-moe-mtp"] {
            assert_eq!(files(model, FileKind::Gguf, &NAMES), gguf, "{model}");
        }
    }

    #[test]
    fn a_family_without_such_layers_has_none() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/qwen2/config.json");
        let spec = ModelSpec::open(&config).unwrap();
        assert!(MtpWeights::find(&spec, |_| FileKind::Folder, |_| true).is_none());
    }
}
