//! The weights of a repository: random numbers in the tensors, types and shards that the published model has.

use checkpoint::ModelSpec;
use checkpoint::names::{FileKind, tensors_in_files};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// How a repository stores its matrices.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum WeightForm {
    Bf16,
    /// F8_E4M3 with a scale for each block of 128 rows and columns.
    Fp8Blocks,
    /// F8_E4M3 with one scale.
    Fp8Tensors,
    /// Experts of MXFP4.
    Mxfp4,
}

impl WeightForm {
    pub fn of(config: &Value) -> WeightForm {
        let quantization = &config["quantization_config"];
        match quantization["quant_method"].as_str() {
            Some("mxfp4") => WeightForm::Mxfp4,
            Some("fp8") if quantization["weight_block_size"].is_array() => WeightForm::Fp8Blocks,
            Some("fp8") => WeightForm::Fp8Tensors,
            _ => WeightForm::Bf16,
        }
    }
}

/// Where the text model of a model with images has its tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum NamePrefix {
    Plain,
    /// `model.language_model.layers`, `lm_head`
    Inner,
    /// `language_model.model.layers`, `language_model.lm_head`
    Outer,
}

impl NamePrefix {
    fn name(self, name: &str) -> String {
        match self {
            NamePrefix::Plain => name.to_owned(),
            NamePrefix::Inner => name.replacen("model.", "model.language_model.", 1),
            NamePrefix::Outer => format!("language_model.{name}"),
        }
    }
}

struct OwnedTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Numbers of both signs between 1/8 and 1.
    fn bf16(&mut self, shape: &[usize]) -> OwnedTensor {
        let number = |_| ((0x3e00 + self.next() % 0x0180) as u16 | (self.next() as u16 & 1) << 15).to_le_bytes();
        let bytes = (0..shape.iter().product()).flat_map(number).collect();
        OwnedTensor { dtype: Dtype::BF16, shape: shape.to_vec(), bytes }
    }

    /// Bytes below `below`, from `from` on.
    fn bytes(&mut self, dtype: Dtype, shape: &[usize], from: u64, below: u64) -> OwnedTensor {
        let n: usize = shape.iter().product();
        let bytes = (0..n).map(|_| (from + self.next() % (below - from)) as u8).collect();
        OwnedTensor { dtype, shape: shape.to_vec(), bytes }
    }
}

/// Returns the files of a model: shards of these names, and the index.
pub fn weight_files(
    spec: &ModelSpec,
    kind: FileKind,
    form: WeightForm,
    prefix: NamePrefix,
    shards: &[String],
) -> BTreeMap<String, Vec<u8>> {
    let mut random = Random(spec.n_heads.into());
    let mut tensors = BTreeMap::new();
    for (name, shape) in tensors_in_files(spec, kind) {
        add_tensor(&mut tensors, &prefix.name(&name), shape, form, &mut random);
    }
    let mut weight_map = serde_json::Map::new();
    let (per_shard, all): (usize, Vec<_>) = (tensors.len().div_ceil(shards.len()), tensors.iter().collect());
    let mut files = BTreeMap::new();
    for (file, tensors) in shards.iter().zip(all.chunks(per_shard)) {
        weight_map.extend(tensors.iter().map(|(name, _)| (name.to_string(), json!(file))));
        let views = tensors
            .iter()
            .map(|(name, tensor)| (name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap()));
        files.insert(file.clone(), safetensors::serialize(views, None).unwrap());
    }
    let index = json!({ "metadata": {}, "weight_map": weight_map });
    files.insert("model.safetensors.index.json".to_owned(), index.to_string().into_bytes());
    files
}

/// Adds one tensor in this form: with the tensors that belong to it.
fn add_tensor(
    tensors: &mut BTreeMap<String, OwnedTensor>,
    name: &str,
    [rows, cols]: [usize; 2],
    form: WeightForm,
    random: &mut Random,
) {
    let is_expert = name.contains(".mlp.experts.") && !name.ends_with("_bias");
    let mut add = |suffix: &str, tensor| drop(tensors.insert(format!("{name}{suffix}"), tensor));
    match form {
        WeightForm::Mxfp4 if is_expert => {
            let shape = [rows, cols / 32, 16];
            add("_blocks", random.bytes(Dtype::U8, &shape, 0, 256));
            add("_scales", random.bytes(Dtype::U8, &shape[..2], 120, 124));
        }
        WeightForm::Fp8Blocks | WeightForm::Fp8Tensors if name.ends_with("_proj.weight") => {
            let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
            add("", random.bytes(Dtype::F8_E4M3, &[rows, cols], 0, 0x28));
            add("_scale_inv", random.bf16(if form == WeightForm::Fp8Blocks { &blocks } else { &[] }));
        }
        // A vector has one dimension.
        _ if rows == 1 => add("", random.bf16(&[cols])),
        _ => add("", random.bf16(&[rows, cols])),
    }
}
