//! What a family's file declares: one constant of this type, which differs from another family's in some fields.

use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{
    BlockNorms, DecoderForm, EncoderSpec, ExpertsSpec, LayerSpec, MixerSpec, ModelMultipliers, PooledLayer, Pooling,
    PositionEncoding, QueryKeyNorms,
};
use crate::error::ParseError;
use crate::names::rows::{MtpTables, TensorMapping};

type Parsed<T> = Result<T, ParseError>;

/// Everything that distinguishes a family.
pub struct FamilyDefinition {
    /// The name as its makers write it.
    pub name: &'static str,
    /// The name that a GGUF has for it, where some families are one.
    pub architecture: &'static str,
    pub rules: FamilyRules,
    pub config: ConfigRules,
    pub readers: ConfigReaders,
    pub gguf: GgufRules,
    pub encoder: EncoderReaders,
    pub tensors: TensorTables,
    pub form: DecoderForm,
    /// The norms of models whose attention and MLP see the same stream, if they differ.
    pub parallel_norms: Option<BlockNorms<&'static str>>,
    /// The norms of models that have experts beside their MLPs.
    pub norms_beside_experts: Option<BlockNorms<&'static str>>,
    /// The form of chats, where a file has no template and its vocabulary shows no form.
    pub chat_form: &'static ChatForm,
}

impl FamilyDefinition {
    pub fn form(&self, is_parallel: bool, has_experts_beside: bool) -> DecoderForm {
        let beside_experts = self.norms_beside_experts.filter(|_| has_experts_beside);
        match self.parallel_norms.filter(|_| is_parallel).or(beside_experts) {
            Some(norms) => DecoderForm { norms, ..self.form },
            None => self.form,
        }
    }
}

/// A usual form of chats.
pub struct ChatForm {
    pub name: &'static str,
    /// A token that only vocabularies of this form have.
    pub token: &'static str,
    pub source: &'static str,
}

/// What holds for models in both formats.
#[derive(Clone, Copy)]
pub struct FamilyRules {
    pub bias: AttentionBias,
    pub query_key_norms: QueryKeyNorms,
    pub norms_values: bool,
    /// Some of its models do without these norms.
    pub norms_are_optional: bool,
    pub has_sinks: bool,
    pub has_gate: bool,
    /// Files may cap scores and logits.
    pub has_caps: bool,
    /// Queries may grow with their positions.
    pub has_temperature: bool,
    /// Rows of the embedding are multiplied by the root of their length.
    pub scales_embedding: bool,
    pub positions: LayerPositions,
    /// In a model with windows, each layer of this number attends to all positions.
    pub window_period: u32,
    pub local_theta: Option<LocalTheta>,
}

/// Whether Q, K and V have a bias.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AttentionBias {
    Never,
    Always,
    /// A file decides; `absent` is the meaning of a config without the key.
    Optional {
        absent: bool,
    },
    /// Like Always, and a config that denies it is refused.
    Required,
}

/// How positions enter layers without a window, and layers with one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LayerPositions {
    pub global: PositionEncoding,
    pub local: PositionEncoding,
}

impl LayerPositions {
    pub const fn all(of: PositionEncoding) -> LayerPositions {
        LayerPositions { global: of, local: of }
    }

    pub fn of_layer(self, is_local: bool) -> PositionEncoding {
        if is_local { self.local } else { self.global }
    }

    pub fn has_rope(self) -> bool {
        self != LayerPositions::all(PositionEncoding::None)
    }
}

/// The base of a rope for layers with a window, which is not scaled.
#[derive(Clone, Copy)]
pub enum LocalTheta {
    /// The config's key for it, and its value without the key.
    Own(&'static str, f32),
    /// That of the other layers.
    Same,
}

/// The values of a `config.json`, and the meaning of absent ones.
#[derive(Clone, Copy)]
pub struct ConfigRules {
    pub class: &'static str,
    /// Classes of the same model without a head, or with others.
    pub other_classes: &'static [&'static str],
    pub model_type: &'static str,
    pub keys: &'static ConfigKeys,
    /// The activations that a config may name and that are implemented.
    pub activations: &'static [&'static str],
    pub eps: f32,
    pub theta: f32,
    /// The part of a head that the rope turns.
    pub turned: f32,
    /// Whether neighbours turn together.
    pub pairs: bool,
    /// Added to a norm's weights before use.
    pub norm_offset: f32,
    pub is_tied: bool,
    pub window: WindowUse,
    /// The key for the number of layers without experts at the front, and its value without the key.
    pub dense_layers: (&'static str, u32),
    /// The names of layers that attend to all positions.
    pub attention_names: &'static [&'static str],
    /// The name YaRN stands for a rope with two sets of divisors.
    pub yarn_is_long: bool,
}

/// The names of a config's values.
pub struct ConfigKeys {
    pub hidden: &'static str,
    pub n_layers: &'static str,
    pub n_heads: &'static str,
    pub context: &'static str,
    pub inner: &'static str,
    pub eps: &'static str,
    pub activation: &'static str,
    /// The keys of the rope's base and of the turned part of a head, where they are outside any object.
    pub theta: &'static str,
    pub turned: &'static str,
}

/// Whether a config's `sliding_window` counts.
#[derive(Clone, Copy)]
pub enum WindowUse {
    Never,
    /// If `use_sliding_window` is true.
    Switched,
    /// `absent` is the window of a config without the key.
    Always {
        absent: Option<u32>,
    },
}

/// What a family computes from a config. Each has a default in `llama.rs`.
#[derive(Clone, Copy)]
pub struct ConfigReaders {
    pub n_layers: fn(&JsonKeys<'_>, &ConfigKeys) -> Parsed<u32>,
    /// From the hidden size's part for each head.
    pub head_dim: fn(&JsonKeys<'_>, u32) -> Parsed<u32>,
    /// The width of the MLP, from the hidden size.
    pub inner: fn(&JsonKeys<'_>, &ConfigKeys, u32) -> Parsed<u32>,
    /// The factor for the product of query and key, from the heads' length.
    pub scale: fn(&JsonKeys<'_>, u32) -> Parsed<f32>,
    pub multipliers: fn(&JsonKeys<'_>) -> Parsed<ModelMultipliers>,
    pub is_parallel: fn(&JsonKeys<'_>) -> Parsed<bool>,
    pub experts: fn(&JsonKeys<'_>) -> Parsed<Option<ExpertsSpec>>,
    /// All layers of a family that lists them in its own way.
    pub layers: Option<LayerReader>,
    /// The mixer of a layer that is listed under this name, or of one that is not listed.
    pub mixer: fn(&JsonKeys<'_>, u32, Option<&str>) -> Parsed<MixerSpec>,
    /// Whether an unlisted layer has a window, from the family's period.
    pub is_local: fn(&JsonKeys<'_>, u32, u32) -> Parsed<bool>,
    /// The positions of a layer, from those in the family's rules.
    pub positions: fn(&JsonKeys<'_>, u32, PositionEncoding) -> Parsed<PositionEncoding>,
    /// Adds to all layers what depends on the others.
    pub adjust_layers: fn(&JsonKeys<'_>, Vec<LayerSpec>) -> Parsed<Vec<LayerSpec>>,
    /// The width of the input that each layer has of its own for each token; 0: there is none.
    pub layer_input: fn(&JsonKeys<'_>) -> Parsed<u32>,
}

/// What distinguishes encoders and classifiers.
#[derive(Clone, Copy)]
pub struct EncoderReaders {
    /// What makes a model an encoder, in a config and in a GGUF.
    pub config: fn(&JsonKeys<'_>) -> Parsed<Option<EncoderSpec>>,
    pub gguf: fn(&GgufKeys<'_>) -> Parsed<Option<EncoderSpec>>,
    /// How a model with a classifier pools, and the layers of the classifier, from the hidden size and the number of
    /// labels.
    pub classifier: ClassifierReader,
}

type ClassifierReader = fn(&JsonKeys<'_>, u32, u32) -> Parsed<(Pooling, Vec<PooledLayer>)>;

type LayerReader = fn(&JsonKeys<'_>) -> Parsed<Vec<LayerSpec>>;

/// The values of a GGUF's metadata, and what a family computes from them.
#[derive(Clone, Copy)]
pub struct GgufRules {
    /// GGUFs of this architecture are read.
    pub is_read: bool,
    /// Another name of the architecture.
    pub also: Option<&'static str>,
    pub variant: Option<GgufVariant>,
    /// The rope rotates pairs: then the converter has permuted Q and K.
    pub pairs: bool,
    /// Texts of control tokens that end an answer.
    pub ends: &'static [&'static str],
    /// The layers of the largest model, whose queries are divided by the root of another number.
    pub n_layers_of_largest: Option<u32>,
    /// The key `attention.scale` counts.
    pub has_scale: bool,
    pub window_pattern: WindowPattern,
    /// The ramp of YaRN begins and ends at whole indices.
    pub truncates_yarn: bool,
    /// Files take back a part of YaRN's factor.
    pub divides_yarn: bool,
    pub multipliers: fn(&GgufKeys<'_>) -> Parsed<ModelMultipliers>,
    pub is_parallel: fn(&GgufKeys<'_>) -> Parsed<bool>,
    /// From the width of the MLP.
    pub experts: fn(&GgufKeys<'_>, u32) -> Parsed<Option<ExpertsSpec>>,
    /// A layer by its number, from one of attention and an MLP with the positions in the family's rules.
    pub layer: fn(&GgufKeys<'_>, u32, LayerSpec) -> Parsed<LayerSpec>,
    /// Adds to all layers what depends on the others.
    pub adjust_layers: fn(&GgufKeys<'_>, Vec<LayerSpec>) -> Parsed<Vec<LayerSpec>>,
    /// Heads and MLPs may differ between layers: the model's are those of the first.
    pub layers_differ: bool,
    /// The factor of scores, where no file has it.
    pub scale: Option<f32>,
    /// The key for the width of each layer's own input.
    pub layer_input: Option<&'static str>,
}

/// A family whose GGUFs have another family's architecture.
#[derive(Clone, Copy)]
pub struct GgufVariant {
    pub architecture: &'static str,
    /// Whether a file of that architecture has a model of this family.
    pub is_in: fn(&GgufKeys<'_>) -> bool,
}

/// The value of `attention.sliding_window_pattern`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum WindowPattern {
    Unused,
    Period,
    /// One truth for each layer.
    List,
}

/// The tensors of a family, in the order in which a model has them.
#[derive(Clone, Copy)]
pub struct TensorTables {
    /// Those outside the layers.
    pub outer: &'static [TensorMapping],
    /// The layers' path in a folder.
    pub layers: &'static str,
    pub norms: TensorRows,
    pub attention: TensorRows,
    pub bias: TensorRows,
    pub query_key_norms: TensorRows,
    pub recurrence: TensorRows,
    pub convolution: TensorRows,
    pub mlp: TensorRows,
    pub experts: TensorRows,
    /// Whether a folder has the experts' matrices transposed where they are not quantized.
    pub turns_plain_experts: bool,
    /// Of the expert that each token uses besides, if there is one.
    pub shared_expert: TensorRows,
    /// Of models whose layers have inputs of their own: outside the layers, and in each.
    pub layer_inputs: &'static [TensorMapping],
    pub layer_input: TensorRows,
    /// Of the layer that predicts one token further, in models that may have one.
    pub mtp: Option<&'static MtpTables>,
}

pub type TensorRows = &'static [&'static [TensorMapping]];
