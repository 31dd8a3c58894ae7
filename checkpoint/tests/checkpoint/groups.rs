//! Folders with weights of few bits whose contents contradict their metadata: each is refused with a reason, when it is
//! opened or when the matrix is read.

use checkpoint::{Checkpoint, Tensor};
use half::f16;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use types::{DigitBits, Dtype, ScaleType};

/// A folder that is deleted on drop.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(name)
}

/// A checkpoint's config and header, and the bytes of its tensors.
struct Parts {
    config: Value,
    header: Value,
    data: Vec<u8>,
}

impl Parts {
    fn of(name: &str) -> Parts {
        let folder = reference(name);
        let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Parts { config, header: serde_json::from_slice(&bytes[8..data]).unwrap(), data: bytes[data..].to_vec() }
    }

    /// The first layer's matrix.
    fn tensor(&mut self, suffix: &str) -> &mut Value {
        &mut self.header[format!("{DOWN}{suffix}")]
    }

    fn bytes(&mut self, suffix: &str) -> &mut [u8] {
        let offsets = self.tensor(suffix)["data_offsets"].clone();
        let at = |i: usize| offsets[i].as_u64().unwrap() as usize;
        &mut self.data[at(0)..at(1)]
    }

    fn rename(&mut self, suffix: &str, to: &str) {
        let tensor = self.header.as_object_mut().unwrap().remove(&format!("{DOWN}{suffix}")).unwrap();
        self.header[format!("{DOWN}{to}")] = tensor;
    }

    /// Returns why it is refused, or nothing.
    fn refusal(&self, name: &str) -> String {
        let folder = std::env::temp_dir().join(format!("lockstep-groups-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let scratch = Scratch(folder);
        let header = self.header.to_string().into_bytes();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &self.data].concat();
        std::fs::write(scratch.0.join("model.safetensors"), bytes).unwrap();
        std::fs::write(scratch.0.join("config.json"), self.config.to_string()).unwrap();
        let read = Checkpoint::open(&scratch.0).and_then(|checkpoint| checkpoint.hash_weights());
        read.err().map_or(String::new(), |error| error.to_string())
    }
}

const STATE: &str = ".weight.quant_state.bitsandbytes__nf4";
const DOWN: &str = "model.layers.0.mlp.down_proj";
/// As in `make_few_bits.py`.
const WIDTH: usize = 128;

fn modelopt(algorithm: &str) -> Value {
    json!({"quant_method": "modelopt", "quant_algo": algorithm})
}

/// The bytes of a matrix's numbers, each with its sign unless it is zero. Those of groups become f32.
fn numbers_of(tensor: &Tensor<'_>) -> Vec<u8> {
    let mut bytes = tensor.read().unwrap();
    let Dtype::Grouped(grouped) = tensor.dtype else {
        let halves = bytes.as_chunks_mut::<2>().0.iter_mut().filter(|half| **half == [0, 0x80]);
        halves.for_each(|half| *half = [0; 2]);
        return bytes;
    };
    assert_eq!((grouped.digits, grouped.scale, grouped.has_zeros), (DigitBits::Four, ScaleType::F16, true));
    let number = |block: &[u8], i: usize| {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let digit = block[4 + i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 0xf;
        half(0) * (f32::from(digit) - half(2)) + 0.
    };
    let blocks = bytes.chunks_exact(grouped.block_bytes());
    let numbers = blocks.flat_map(|block| (0..grouped.size.n()).map(move |i| number(block, i)));
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// What is read are the numbers of the format's own unpacker, bit for bit.
#[test]
fn numbers_are_those_of_the_formats_unpackers() {
    for name in ["nvfp4", "nvfp4-modelopt", "gptq-act-order", "gptq-2", "gptq-3"] {
        let folder = reference(name);
        let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let hashes = expected["numbers"].as_object().unwrap();
        assert_eq!(hashes.len(), 14, "{name}");
        for (weight, hash) in hashes {
            let found: String = Sha256::digest(numbers_of(&checkpoint.tensor(weight).unwrap()))
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            assert_eq!(Value::from(found), *hash, "{weight} of {name}");
        }
    }
}

#[test]
fn what_contradicts_itself_is_refused_with_a_reason() {
    type Edit = fn(&mut Parts);
    let edits: &[(&str, Edit, &str)] = &[
        ("awq", |_| {}, ""),
        ("awq", |of| of.rename(".qzeros", ".others"), "has no model.layers.0.mlp.down_proj.qzeros"),
        ("awq", |of| of.rename(".scales", ".others"), "down_proj.scales"),
        ("awq", |of| of.rename(".qweight", ".others"), "type I32"),
        ("awq", |of| of.tensor(".qweight")["shape"] = json!([16, WIDTH]), "cannot be made of"),
        ("awq", |of| of.tensor(".qweight")["dtype"] = json!("F32"), "type I32"),
        ("awq", |of| of.tensor(".scales")["shape"] = json!([WIDTH, 1]), "cannot be made of"),
        ("awq", |of| of.tensor(".qweight")["shape"] = json!([0, 16]), "not safetensors"),
        ("awq", |of| of.tensor(".qweight")["shape"] = json!([u32::MAX, u32::MAX]), "not safetensors"),
        ("awq", |of| of.config["quantization_config"]["version"] = json!("gemv"), "version gemv"),
        ("awq", |of| of.config["quantization_config"] = Value::Null, "type I32"),
        ("awq", |of| of.config["quantization_config"]["quant_method"] = json!("gptq"), "cannot be made of"),
        ("gptq-4", |_| {}, ""),
        ("gptq-4", |of| of.bytes(".g_idx").fill(1), "2 groups, whose column 0 is in group 16843009 (g_idx)"),
        ("gptq-4", |of| of.tensor(".g_idx")["shape"] = json!([WIDTH * 4]), "not safetensors"),
        ("gptq-4", |of| of.bytes(".qzeros")[0] |= 0xf, "stored as 15"),
        ("gptq-4", |of| of.tensor(".qzeros")["shape"] = json!([4, 8]), "cannot be made of"),
        ("gptq-4", |of| of.config["quantization_config"]["bits"] = json!(5), "gptq to 5 bits"),
        ("gptq-8", |of| of.bytes(".qzeros")[0] = 0xff, ""),
        ("gptq-3", |_| {}, ""),
        ("gptq-3", |of| of.tensor(".qweight")["shape"] = json!([4, 384]), "cannot be made of"),
        ("gptq-3", |of| of.tensor(".qzeros")["shape"] = json!([3, 16]), "cannot be made of"),
        ("gptq-3", |of| of.bytes(".qzeros")[0] |= 7, "stored as 7"),
        ("gptq-2", |of| of.bytes(".qzeros")[0] |= 3, ""),
        ("gptq-act-order", |_| {}, ""),
        ("gptq-act-order", |of| of.bytes(".g_idx")[WIDTH * 4 - 4] = 4, "column 127 is in group 4 (g_idx)"),
        ("gptq-act-order", |of| of.bytes(".g_idx").fill(0xff), "column 0 is in group -1 (g_idx)"),
        ("gptq-act-order", |of| of.rename(".g_idx", ".others"), ""),
        ("nvfp4", |_| {}, ""),
        ("nvfp4", |of| of.tensor(".weight_scale")["shape"] = json!([8, WIDTH]), "cannot be made of U8 [128, 64]"),
        ("nvfp4", |of| of.tensor(".weight_packed")["shape"] = json!([64, WIDTH]), "F8_E4M3 [128, 8], F32 [1, 1]"),
        ("nvfp4", |of| of.rename(".weight_scale", ".others"), "has no model.layers.0.mlp.down_proj.weight_scale"),
        ("nvfp4", |of| of.rename(".weight_global_scale", ".others"), "down_proj.weight_global_scale"),
        ("nvfp4", |of| of.bytes(".weight_global_scale").fill(0), "weight_global_scale is 0, which is not a positive"),
        ("nvfp4", |of| of.bytes(".weight_global_scale").fill(0xff), "weight_global_scale is NaN"),
        ("nvfp4", |of| of.config["quantization_config"] = modelopt("NVFP4"), "has type U8"),
        ("nvfp4-modelopt", |of| of.config["quantization_config"] = modelopt("NVFP4"), ""),
        ("nvfp4-modelopt", |of| of.config["quantization_config"] = modelopt("NVFP4_AWQ"), "modelopt as NVFP4_AWQ"),
        ("nvfp4-modelopt", |_| {}, "has type U8"),
        ("packed-4", |of| of.bytes(".weight_shape")[8] = 96, "but weight_shape is [128, 96]"),
        ("packed-4", |of| of.bytes(".weight_shape").fill(0xff), "cannot be made of"),
        ("packed-4", |of| of.tensor(".weight_scale")["shape"] = json!([4, WIDTH]), "cannot be made of"),
        ("packed-4", |of| of.tensor(".weight_scale")["dtype"] = json!("F8_E4M3"), "not safetensors"),
        ("packed-4-zeros", |of| of.tensor(".weight_zero_point")["shape"] = json!([1, 16]), "cannot be made of"),
        ("w8a8", |of| of.rename(".weight_scale", ".others"), "has no model.layers.0.mlp.down_proj.weight_scale"),
        ("w8a8", |of| of.tensor(".weight")["dtype"] = json!("U8"), "cannot be made of"),
        ("llm-int8", |of| of.bytes(".weight_format")[0] = 2, "weight_format"),
        ("nf4", |_| {}, ""),
        ("nf4", |of| of.bytes(STATE)[3] = b'x', "contradicts its quant_state"),
        ("nf4", |of| of.bytes(STATE).fill(b' '), "has no quant_state"),
        ("nf4", |of| of.rename(STATE, ".others"), "has no quant_state"),
        ("nf4", |of| of.tensor(".weight.absmax")["dtype"] = json!("I8"), "contradicts"),
        ("nf4", |of| of.rename(".weight.quant_map", ".others"), "contradicts"),
        ("llm-int8", |of| of.tensor(".weight")["shape"] = json!([64, 256]), "cannot be made of"),
    ];
    for (i, (name, edit, expect)) in edits.iter().enumerate() {
        let mut parts = Parts::of(name);
        edit(&mut parts);
        let why = parts.refusal(&i.to_string());
        assert!(why.contains(expect) && why.is_empty() == expect.is_empty(), "edit {i} of {name}: {why:?}");
    }
}
