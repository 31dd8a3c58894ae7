//! A model on disk: its shape, its tensors, its tokenizer, its chat template, and where to get it.
//!
//! Knows nothing of devices, requests or the cluster, and does not read the environment: such values are arguments.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod base64;
mod bundle;
pub mod catalogue;
pub mod config;
mod conversation;
pub mod error;
mod families;
pub mod file;
pub mod gguf;
mod groups;
mod hashing;
mod modules;
pub mod names;
mod outline;
mod pieces;
mod safetensors;
mod scaling;
mod sizes;
mod small_files;
pub mod spans;
mod split;
pub mod template;
pub mod tensor;
mod threads;
pub mod tokenizer;
mod window;

pub use bundle::TextBundle;
pub use catalogue::{FetchProgress, LocatedModel, ModelChecks, ModelSources};
pub use config::{
    Activation, AttentionSpec, BlockNorms, ClampedSilu, ConvolutionSpec, DecoderForm, EncoderSpec, ExpertScores,
    ExpertsSpec, Family, KvHeads, LayerSpec, MixerSpec, ModelMultipliers, ModelSpec, NormKind, Norms, PooledActivation,
    PooledLayer, Pooling, PoolingSpec, PositionEncoding, ProjectionFactors, QueryKeyNorms, QueryTemperature,
    RecurrenceRule, RecurrenceSpec, RecurrenceStorage, RopeScaling, RopeSpec, SamplingDefaults, ScoreActivation,
    StateHeads, StateSpaceRule,
};
pub use conversation::{Conversation, TEMPLATE_NAMES};
pub use error::{Error, Result};
pub use file::{FileStamp, SourceFile};
pub use names::MtpSpec;
pub use pieces::WeightPieces;
pub use sizes::{LayerSizes, ModelSizes};
pub use split::JoinedGguf;
pub use template::ChatTemplate;
pub use tensor::{ScaleBytes, Tensor};
pub use threads::{StopFn, in_threads};
pub use tokenizer::{Detokenizer, TokenTable, Tokenizer};
pub use window::{BandHashes, TensorWindow};

use crate::gguf::Gguf;
use crate::names::mtp::MtpWeights;
use crate::names::{FileKind, StoredTensor};
use crate::safetensors::Shards;
use crate::scaling::{MODELOPT_FILE, QuantConfig};
use crate::small_files::{read_json, read_json_if_there};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use types::Dtype;

/// An opened model. Weights are read on demand.
pub struct Checkpoint {
    path: PathBuf,
    spec: ModelSpec,
    defaults: SamplingDefaults,
    weights: WeightFiles,
    /// The location of each tensor, by its Hugging Face name.
    sources: HashMap<String, StoredTensor>,
    /// The layer that predicts one token further.
    mtp: Option<MtpWeights>,
}

enum WeightFiles {
    Gguf(JoinedGguf),
    Folder(Shards),
}

impl Checkpoint {
    /// Opens a `.gguf` file (any part of a split model), or a folder with `config.json` and safetensors. Fails with the
    /// tensor's name unless every tensor of the model exists with the right shape and a supported type.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let checkpoint = if path.is_dir() { Checkpoint::open_folder(path)? } else { Checkpoint::open_gguf(path)? };
        checkpoint.check_tensors()?;
        Ok(checkpoint)
    }

    fn open_gguf(path: &Path) -> Result<Checkpoint> {
        let parts = split::open(path)?;
        let name = catalogue::name_of(path);
        let spec = ModelSpec::from_gguf(&parts.header, &parts.bytes, &name).map_err(Error::with_path(path))?;
        let defaults = SamplingDefaults::from_gguf(&parts.header).map_err(Error::with_path(path))?;
        Ok(Checkpoint::new(path, spec, defaults, WeightFiles::Gguf(parts)))
    }

    /// Checks a GGUF of `n_bytes` by its first bytes, which `start` holds. False if its header goes on behind them.
    pub(crate) fn check_start(start: &Path, n_bytes: u64) -> Result<bool> {
        let file = SourceFile::open_filled(start)?;
        let Some((mut header, bytes)) = Gguf::read_start(&file, n_bytes)? else { return Ok(false) };
        let is_split = header.unsigned("split.count").map_err(Error::with_path(start))?.is_some_and(|count| count > 1);
        if is_split {
            // The tensors of other parts are not known yet, and only the first part contains the architecture.
            return ModelSpec::check_architecture(&header, &bytes).map_err(Error::with_path(start)).map(|()| true);
        }
        header.assume_factors();
        let spec = ModelSpec::from_gguf(&header, &bytes, "").map_err(Error::with_path(start))?;
        let weights = WeightFiles::Gguf(JoinedGguf { header, bytes, files: vec![file] });
        Checkpoint::new(start, spec, SamplingDefaults::default(), weights).check_tensors()?;
        Ok(true)
    }

    fn open_folder(path: &Path) -> Result<Checkpoint> {
        let config_path = path.join("config.json");
        let mut config = read_json(&config_path)?;
        QuantConfig::add_modelopt(&mut config, &read_json_if_there(&path.join(MODELOPT_FILE))?);
        let generation = read_json_if_there(&path.join("generation_config.json"))?;
        let tokenizer = read_json_if_there(&path.join("tokenizer_config.json"))?;
        let name = catalogue::name_of(path);
        let mut spec =
            ModelSpec::from_config(&config, &generation, &tokenizer, &name).map_err(Error::with_path(&config_path))?;
        if let Some(pooling) = modules::pooling_of_folder(path)?.filter(|_| !spec.pooling.is_classifier()) {
            spec.pooling = PoolingSpec { prefixes: spec.pooling.prefixes, ..pooling };
        }
        let products = spec.pooling.layers.iter().map(|layer| layer.product.as_str());
        let modules: Vec<String> = products.filter_map(modules::folder_of).map(str::to_owned).collect();
        let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
        let defaults = SamplingDefaults::from_generation_config(&generation);
        let scaling = QuantConfig::from_config(&config).map_err(Error::with_path(&config_path))?;
        Ok(Checkpoint::new(path, spec, defaults, WeightFiles::Folder(Shards::open(path, &modules, scaling)?)))
    }

    fn new(path: &Path, mut spec: ModelSpec, defaults: SamplingDefaults, weights: WeightFiles) -> Checkpoint {
        names::pooling::find_biases(&mut spec.pooling, |name| weights.find(name).is_some());
        let first = spec.layers.iter().position(|layer| layer.has_experts);
        let format = weights.kind(&spec, first.map(|layer| format!("model.layers.{layer}")).as_deref());
        let sources = names::stored_tensors(&spec, format);
        let mtp_kind = |layer: &str| weights.kind(&spec, spec.experts.map(|_| layer));
        let mtp = MtpWeights::find(&spec, mtp_kind, |name| weights.find(name).is_some());
        Checkpoint { path: path.to_owned(), spec, defaults, weights, sources, mtp }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The layer that predicts one token further, if the file has it.
    pub fn mtp(&self) -> Option<&MtpSpec> {
        self.mtp.as_ref().map(|mtp| &mtp.spec)
    }

    /// The stored bytes of that layer, by its parts.
    pub fn mtp_sizes(&self) -> Option<ModelSizes> {
        ModelSizes::of_mtp(self)
    }

    /// The sampling that the model's makers recommend, if any.
    pub fn defaults(&self) -> &SamplingDefaults {
        &self.defaults
    }

    /// Whether there is a tensor with this Hugging Face name.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The tensor with this Hugging Face name, whatever its name in the file.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        self.find(name).ok_or_else(|| Error::NoTensor { path: self.path.clone(), name: name.to_owned() })
    }

    fn find(&self, name: &str) -> Option<Tensor<'_>> {
        let source = self.source(name)?;
        let in_file = self.find_in_shape(source)?;
        let matrix = in_file.part(source.before_matrix(), source.shape_of_matrix())?;
        let whole = if source.is_turned { matrix.transposed() } else { matrix };
        let part = whole.part(source.before, source.shape_of_part())?;
        Some(match source.woven {
            None => part,
            Some(woven) => part.interleaved(woven, source.shape),
        })
    }

    /// The location of a tensor of the model, or of the layer that predicts one token further.
    fn source(&self, name: &str) -> Option<&StoredTensor> {
        self.sources.get(name).or_else(|| self.mtp.as_ref()?.sources.get(name))
    }

    /// A vector that a file stores with more dimensions is one all the same.
    fn find_in_shape(&self, source: &StoredTensor) -> Option<Tensor<'_>> {
        let tensor = self.find_stored(&source.file)?;
        let is_flat = source.is_vector() && source.stack.is_none() && tensor.is_plain();
        Some(if is_flat { tensor.flattened() } else { tensor })
    }

    /// A tensor by its name in the file.
    fn find_stored(&self, name: &str) -> Option<Tensor<'_>> {
        self.weights.find(name)
    }

    /// Returns the stamps of the weight files at opening: equal stamps mean equal bytes.
    pub fn stamps(&self) -> Vec<FileStamp> {
        self.files().iter().map(SourceFile::stamp).collect()
    }

    /// Checks that all reads belong to one model. Call it after the last read: it names a file that was truncated,
    /// written to or replaced meanwhile.
    pub fn check_unchanged(&self) -> Result<()> {
        self.files().iter().try_for_each(SourceFile::check_unchanged)
    }

    fn files(&self) -> &[SourceFile] {
        match &self.weights {
            WeightFiles::Folder(shards) => shards.files(),
            WeightFiles::Gguf(parts) => &parts.files,
        }
    }

    fn check_tensors(&self) -> Result<()> {
        for expected in names::required_tensors(&self.spec) {
            let no_tensor = || Error::NoTensor { path: self.path.clone(), name: expected.name.clone() };
            let source = self.sources.get(&expected.name).ok_or_else(no_tensor)?;
            if let WeightFiles::Folder(shards) = &self.weights {
                shards.check(&names_in_folder(&source.file)).map_err(Error::with_path(&self.path))?;
            }
            let tensor = self.find_in_shape(source).ok_or_else(no_tensor)?;
            let needed = source.shape_in_file();
            if tensor.shape != needed {
                let what = format!(
                    "the tensor {} has the shape {:?}, and the model needs {needed:?}",
                    expected.name, tensor.shape
                );
                return Err(Error::Malformed { path: self.path.clone(), what });
            }
            if (source.is_turned || source.is_vector()) && !tensor.is_plain() {
                let what = format!("the tensor {} of the type {}", source.file, tensor.dtype.name());
                return Err(Error::Unsupported { path: self.path.clone(), what });
            }
        }
        Ok(())
    }

    /// The types of the model's matrices, by descending size. Vectors are left out: they are never packed.
    pub fn quantization(&self) -> Vec<Dtype> {
        let mut weights: Vec<(Dtype, usize)> = Vec::new();
        for expected in names::required_tensors(&self.spec).iter().filter(|expected| expected.shape[0] > 1) {
            let Some(tensor) = self.find(&expected.name) else { continue };
            match weights.iter_mut().find(|(known, _)| *known == tensor.dtype) {
                Some((_, n_bytes)) => *n_bytes += tensor.n_bytes(),
                None => weights.push((tensor.dtype, tensor.n_bytes())),
            }
        }
        weights.sort_by_key(|(_, n_bytes)| std::cmp::Reverse(*n_bytes));
        weights.into_iter().map(|(dtype, _)| dtype).collect()
    }

    /// The bytes of the model's parts in the file.
    pub fn sizes(&self) -> ModelSizes {
        ModelSizes::of(self)
    }

    /// The tokenizer: that of a folder's files, or a GGUF's vocabulary.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.weights {
            WeightFiles::Gguf(parts) => Tokenizer::from_gguf(&parts.header, &parts.bytes, &self.path),
            WeightFiles::Folder(_) => Tokenizer::from_folder(&self.path),
        }
    }

    /// Returns the tokens as bytes, for callers that make masks and no text.
    pub fn token_table(&self) -> Result<TokenTable> {
        self.tokenizer().map(TokenTable::new)
    }

    /// The beginnings that an embedding model expects before texts, by the texts' uses, such as `query`.
    pub fn prompts(&self) -> Result<BTreeMap<String, String>> {
        match &self.weights {
            WeightFiles::Gguf(_) => Ok(BTreeMap::new()),
            WeightFiles::Folder(_) => modules::prompts_of_folder(&self.path),
        }
    }

    /// The template that turns a chat into a prompt, if the model has one.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        match &self.weights {
            WeightFiles::Gguf(parts) => ChatTemplate::from_gguf(&parts.header, &parts.bytes, &self.path),
            WeightFiles::Folder(_) => ChatTemplate::from_folder(&self.path),
        }
    }
}

impl ModelSources {
    /// The public hub, Python's pip, and this cache, for models that can be served.
    pub fn new(cache: PathBuf) -> ModelSources {
        let config = |path: &Path| ModelSpec::open(path).map(drop);
        ModelSources::with_checks(cache, ModelChecks { config, start_of_gguf: Checkpoint::check_start })
    }
}

impl ModelSpec {
    /// Opens a `config.json` alone: a model's shape, without weights or tokenizer.
    pub fn open(config_path: &Path) -> Result<ModelSpec> {
        let name = config_path.parent().map_or_else(String::new, catalogue::name_of);
        let config = read_json(config_path)?;
        ModelSpec::from_config(&config, &Value::Null, &Value::Null, &name).map_err(Error::with_path(config_path))
    }

    /// The same from parsed JSON; `name` takes the place of the file's path.
    pub fn of_config(config: &Value, name: &str) -> Result<ModelSpec> {
        let fault = Error::with_path(Path::new(name));
        ModelSpec::from_config(config, &Value::Null, &Value::Null, name).map_err(fault)
    }
}

impl WeightFiles {
    /// A tensor by its name in the file.
    fn find(&self, name: &str) -> Option<Tensor<'_>> {
        match self {
            WeightFiles::Folder(shards) => names_in_folder(name).into_iter().find_map(|name| shards.tensor(&name)),
            WeightFiles::Gguf(JoinedGguf { header, files, .. }) => {
                let entry = header.tensor(name)?;
                let shape = tensor::rows_and_cols(&entry.dims).ok()?;
                Some(Tensor::new(&files[entry.file], entry.bytes.start, entry.dtype, shape))
            }
        }
    }

    /// The format of a file whose layer at this path has experts: how it stores them.
    fn kind(&self, spec: &ModelSpec, layer: Option<&str>) -> FileKind {
        let stack = || self.find(&format!("{}.{}", layer?, names::GATE_UP_TOGETHER));
        match self {
            WeightFiles::Gguf(_) => FileKind::Gguf,
            WeightFiles::Folder(_) => match stack() {
                None => FileKind::Folder,
                Some(stack) if is_turned(spec, &stack) => FileKind::FolderOfTurnedStacks,
                Some(_) => FileKind::FolderOfStacks,
            },
        }
    }
}

/// Whether the matrices in this tensor, gate and up of all experts, are transposed. In gpt-oss the stored type
/// determines it, and in other families the shape, unless both lengths are equal.
fn is_turned(spec: &ModelSpec, stack: &Tensor<'_>) -> bool {
    let gate_up = spec.experts.map_or(0, |experts| 2 * experts.inner as usize);
    let by_shape = stack.cols() == gate_up && gate_up != spec.hidden as usize;
    let is_scaled = stack.scales.is_some() || !stack.is_plain();
    !is_scaled && (by_shape || spec.family.definition().tensors.turns_plain_experts)
}

/// Where models with a head keep an encoder.
const BASES: [&str; 6] = ["bert", "roberta", "mpnet", "nomic_bert", "model", "camembert"];

/// Returns the names that a folder may use for a tensor. GPT-2's own folder has no `transformer.` prefix, and a folder
/// of layers alone no `model.`. In a model
/// that also takes images, the text model is a part, under one of three names.
fn names_in_folder(name: &str) -> Vec<Cow<'_, str>> {
    let below = |part: &str| name.strip_prefix("model.").map(|name| Cow::Owned(format!("model.{part}.{name}")));
    let in_older = Cow::Owned(format!("language_model.{name}"));
    let shorter = name.strip_prefix("transformer.").or(name.strip_prefix("model.")).map(Cow::Borrowed);
    let in_base = BASES.iter().map(|base| Cow::Owned(format!("{base}.{name}")));
    let older_norm = name.contains("LayerNorm").then(|| {
        let older = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        [Cow::Owned(format!("bert.{older}")), Cow::Owned(older)]
    });
    let in_whole = below("language_model").into_iter().chain(below("text_model"));
    let names = [Cow::Borrowed(name)].into_iter().chain(shorter).chain(in_whole).chain([in_older]);
    names.chain(in_base).chain(older_norm.into_iter().flatten()).collect()
}

#[cfg(test)]
#[path = "../../tests/common/documents.rs"]
mod documents;
#[cfg(test)]
mod tests;
