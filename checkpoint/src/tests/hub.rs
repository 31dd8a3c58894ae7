//! The configs of widely used models, as their repositories have them: each is read, or refused for a known reason.

use super::*;
use crate::documents::check;
use crate::names::{FileKind, required_tensors, stored_tensors};
use crate::small_files::read_json;
use std::collections::BTreeSet;

use ConfigOutcome::{Refused, Served};
use Family::*;

/// What becomes of a model's config.
enum ConfigOutcome {
    /// It is read as a model of this family.
    Served(Family),
    /// The text of the error.
    Refused(&'static str),
}

/// Each file of `tests/hub`, without its ending.
const OUTCOMES: &[(&str, ConfigOutcome)] = &[
    ("deepseek-r1-distill-qwen-1.5b", Served(Qwen2)),
    ("deepseek-r1-distill-qwen-7b", Served(Qwen2)),
    ("deepseek-v3", Refused("the architecture DeepseekV3ForCausalLM")),
    ("devstral-small-2", Served(Ministral3)),
    ("falcon-h1-0.5b", Served(FalconH1)),
    ("gemma-2-9b-it", Served(Gemma2)),
    ("gemma-3-1b-it", Served(Gemma3)),
    ("gemma-3-4b-it", Served(Gemma3)),
    ("gemma-4-26b-a4b", Served(Gemma4)),
    ("glm-4.5", Served(Glm4Moe)),
    ("gpt-oss-20b", Served(GptOss)),
    ("gpt-oss-20b-bf16", Served(GptOss)),
    ("gpt2-large", Served(Gpt2)),
    ("granite-3.3-8b-instruct", Served(Granite)),
    ("granite-4.0-h-350m", Served(GraniteHybrid)),
    ("lfm2.5-1.2b-auto-round", Refused("a folder whose weights are quantized by auto-round (quantization_config)")),
    ("lfm2.5-1.2b-thinking", Served(Lfm2)),
    ("lfm2.5-8b-a1b", Served(Lfm2Moe)),
    ("llama-3.1-70b-fp8", Served(Llama)),
    ("llama-3.1-8b", Served(Llama)),
    ("llama-3.2-1b-instruct", Served(Llama)),
    ("llama-3.2-3b-instruct", Served(Llama)),
    ("llama-3.3-70b-instruct", Served(Llama)),
    ("llama-4-scout", Refused("the architecture llama4_text")),
    ("mistral-7b-instruct-v0.3", Served(Mistral)),
    ("mistral-small-3.1", Served(Mistral)),
    ("mixtral-8x7b", Served(Mixtral)),
    ("nemotron-3-nano", Served(NemotronH)),
    ("nemotron-3-super-fp8", Refused("experts with a moe_latent_size of 1024")),
    ("nemotron-h-56b", Served(NemotronH)),
    ("olmo-2-7b", Served(Olmo2)),
    ("olmo-3.1-32b-instruct", Served(Olmo3)),
    ("phi-3-mini-4k-instruct", Served(Phi3)),
    ("phi-3.5-mini-instruct", Served(Phi3)),
    ("phi-4", Served(Phi3)),
    ("phi-4-mini-instruct", Served(Phi3)),
    ("pythia-6.9b-deduped", Served(GptNeox)),
    ("qwen2.5-7b-instruct", Served(Qwen2)),
    ("qwen3-0.6b", Served(Qwen3)),
    ("qwen3-30b-a3b", Served(Qwen3Moe)),
    ("qwen3-32b-fp8", Served(Qwen3)),
    ("qwen3-8b", Served(Qwen3)),
    ("qwen3-next-80b-a3b", Served(Qwen3Next)),
    ("qwen3.5-27b", Served(Qwen35)),
    ("qwen3.5-35b-a3b", Served(Qwen35Moe)),
    (
        "qwen3.6-35b-a3b-nvfp4",
        Refused("a folder whose weights are quantized by modelopt as MIXED_PRECISION (quantization_config)"),
    ),
    ("smollm2-1.7b-instruct", Served(Llama)),
    ("smollm3-3b-base", Served(SmolLm3)),
    ("tiny-aya-earth", Served(Cohere2)),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/hub")
}

fn read_spec(file: &Value, name: &str) -> std::result::Result<ModelSpec, ParseError> {
    ModelSpec::from_config(&file["config"], &file["generation_config"], &file["tokenizer_config"], name)
}

fn read_file(name: &str) -> Value {
    read_json(&folder().join(format!("{name}.json"))).unwrap()
}

#[test]
fn each_file_has_an_outcome() {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let files: BTreeSet<String> = files.filter_map(|file| file.strip_suffix(".json").map(str::to_owned)).collect();
    assert_eq!(files, OUTCOMES.iter().map(|(name, _)| (*name).to_owned()).collect());
}

/// Of some models it is known how many tensors and numbers their files hold.
#[test]
fn served_models_have_the_tensors_of_their_files() {
    let mut n_known = 0;
    for (name, _) in OUTCOMES {
        let file = read_file(name);
        let [n_tensors, n_parameters] = ["n_tensors", "n_parameters"].map(|key| file[key].as_u64());
        if n_tensors.or(n_parameters).is_none() {
            continue;
        }
        let spec = read_spec(&file, name).unwrap();
        let stored: BTreeSet<String> =
            stored_tensors(&spec, FileKind::Folder).into_values().map(|tensor| tensor.file).collect();
        let numbers = required_tensors(&spec).iter().map(|tensor| (tensor.shape[0] * tensor.shape[1]) as u64).sum();
        let found = [stored.len() as u64, numbers];
        assert_eq!(found, [n_tensors.unwrap_or(found[0]), n_parameters.unwrap_or(found[1])], "{name}");
        n_known += 1;
    }
    assert!(n_known >= 6, "{n_known} models with known tensors");
}

#[test]
fn configs_of_hubs_are_read_or_refused_for_a_reason() {
    let mut rows = String::new();
    let mut wrong = Vec::new();
    for (name, expect) in OUTCOMES {
        let file = read_file(name);
        let found = match read_spec(&file, name) {
            Ok(spec) => format!("as {}", spec.family.name()),
            Err(ParseError::Malformed(what) | ParseError::Unsupported(what)) => format!("refused: {what}"),
        };
        let outcome = match expect {
            Served(family) => format!("as {}", family.name()),
            Refused(what) => format!("refused: {what}"),
        };
        if found != outcome {
            wrong.push(format!("{name}: {found}, expected {outcome}"));
        }
        rows += &row(name, &file, &found);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let head = "| file | repository | outcome | what is known | source |\n|---|---|---|---|---|";
    let table = ("<!-- models: begin -->{}<!-- models: end -->", format!("\n\n{head}\n{rows}\n"));
    check("tests/hub/README.md", &[table]);
}

fn row(name: &str, file: &Value, outcome: &str) -> String {
    let sources: Vec<&str> = file["source"].as_array().unwrap().iter().map(|source| source.as_str().unwrap()).collect();
    let text = |key: &str| file[key].as_str().unwrap().to_owned();
    format!("| {name} | {} | {outcome} | {} | {} |\n", text("hub"), text("known"), sources.join("; "))
}
