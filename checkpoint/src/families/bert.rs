//! BERT and its relatives, which are encoders with the norms behind the sums: RoBERTa and XLM-R, which leave out the
//! first rows of the table of positions, MPNet, whose scores depend on distances, and Nomic, which has a rope and a
//! gated MLP.

use super::definition::{
    AttentionBias, ConfigKeys, ConfigRules, EncoderReaders, FamilyDefinition, FamilyRules, LayerPositions, TensorTables,
};
use super::llama::{HALVES, KEYS, LLAMA, UNREAD};
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{
    Activation, BlockNorms, DecoderForm, EncoderSpec, NormKind, Norms, PooledActivation, PooledLayer, Pooling,
    PositionEncoding,
};
use crate::error::ParseError;
use crate::names::rows::Dim::{
    BeforeFirst, Context, DistanceBuckets, Heads, Hidden, Inner, KvHeads, One, QueryHeads, TokenTypes, Vocab,
};
use crate::names::rows::{
    DISTANCES, Dim, EMBEDDING, EMBEDDING_NORM, EMBEDDING_NORM_BIAS, POSITIONS, QKV, TOKEN_TYPES, TensorMapping, part,
    renamed, whole,
};

pub const BERT: FamilyDefinition = FamilyDefinition {
    name: "BERT",
    architecture: "bert",
    rules: FamilyRules {
        bias: AttentionBias::Required,
        positions: LayerPositions::all(PositionEncoding::None),
        ..LLAMA.rules
    },
    config: ConfigRules {
        class: "BertModel",
        other_classes: &["BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"],
        model_type: "bert",
        keys: &ConfigKeys { eps: "layer_norm_eps", ..KEYS },
        activations: &["gelu"],
        eps: 1e-12,
        ..LLAMA.config
    },
    gguf: HALVES,
    encoder: EncoderReaders {
        config: |keys| encoder_at(keys, 0),
        gguf: gguf_encoder,
        classifier: |_, hidden, n| {
            let pooler = PooledLayer::product("pooler.dense", hidden, hidden).with(PooledActivation::Tanh);
            Ok((Pooling::First, vec![pooler, PooledLayer::product("classifier", hidden, n)]))
        },
    },
    tensors: TensorTables {
        outer: BERT_OUTER,
        layers: "encoder.layer",
        norms: &[BERT_NORMS],
        attention: &[BERT_ATTENTION],
        bias: &[],
        mlp: &[BERT_MLP],
        ..LLAMA.tensors
    },
    form: DecoderForm {
        activation: Activation::PlainGeluErf,
        norms: BlockNorms::InTurn {
            attention: Norms::OfSum("post_attention_layernorm"),
            mlp: Norms::OfSum("post_mlp_layernorm"),
        },
        norm_kind: NormKind::Layer,
        learns_positions: true,
        norms_embedding: true,
        norms_output: false,
        ..LLAMA.form
    },
    ..LLAMA
};

pub const ROBERTA: FamilyDefinition = FamilyDefinition {
    name: "RoBERTa",
    config: ConfigRules {
        class: "RobertaModel",
        other_classes: &[
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
            "CamembertModel",
            "CamembertForMaskedLM",
            "CamembertForSequenceClassification",
        ],
        model_type: "roberta",
        ..BERT.config
    },
    // A GGUF of it is one of BERT: its table of positions begins with that of the first token.
    gguf: UNREAD,
    encoder: EncoderReaders {
        config: |keys| encoder_at(keys, keys.optional("pad_token_id")?.unwrap_or(1) + 1),
        classifier: |_, hidden, n| Ok((Pooling::First, dense_and_output(hidden, n))),
        ..BERT.encoder
    },
    ..BERT
};

pub const MPNET: FamilyDefinition = FamilyDefinition {
    name: "MPNet",
    architecture: "mpnet",
    config: ConfigRules {
        class: "MPNetModel",
        other_classes: &["MPNetForMaskedLM", "MPNetForSequenceClassification"],
        model_type: "mpnet",
        ..BERT.config
    },
    gguf: UNREAD,
    encoder: EncoderReaders {
        config: |keys| {
            Ok(Some(EncoderSpec {
                n_rows_before_first: keys.optional("pad_token_id")?.unwrap_or(1) + 1,
                n_distance_buckets: keys.optional("relative_attention_num_buckets")?.unwrap_or(32),
                ..EncoderSpec::PLAIN
            }))
        },
        ..ROBERTA.encoder
    },
    tensors: TensorTables { attention: &[MPNET_ATTENTION], norms: &[MPNET_NORMS], ..BERT.tensors },
    ..BERT
};

pub const NOMIC_BERT: FamilyDefinition = FamilyDefinition {
    name: "Nomic",
    architecture: "nomic-bert",
    rules: FamilyRules { bias: AttentionBias::Never, positions: LLAMA.rules.positions, ..BERT.rules },
    config: ConfigRules {
        class: "NomicBertModel",
        other_classes: &["NomicBertForMaskedLM"],
        model_type: "nomic_bert",
        activations: &["silu", "swiglu"],
        theta: 1000.0,
        ..BERT.config
    },
    encoder: EncoderReaders { classifier: no_classifier, ..BERT.encoder },
    tensors: TensorTables {
        outer: NOMIC_OUTER,
        layers: "encoder.layers",
        norms: &[NOMIC_NORMS],
        attention: &[NOMIC_ATTENTION],
        mlp: &[NOMIC_MLP],
        ..BERT.tensors
    },
    form: DecoderForm { activation: Activation::Silu, learns_positions: false, ..BERT.form },
    ..BERT
};

/// The same model with the keys of its makers' own code.
pub const NOMIC_OWN_KEYS: FamilyDefinition = FamilyDefinition {
    name: "Nomic (own keys)",
    config: ConfigRules {
        keys: &ConfigKeys {
            hidden: "n_embd",
            n_layers: "n_layer",
            n_heads: "n_head",
            context: "n_positions",
            inner: "n_inner",
            eps: "layer_norm_epsilon",
            activation: "activation_function",
            theta: "rotary_emb_base",
            turned: "rotary_emb_fraction",
        },
        ..NOMIC_BERT.config
    },
    gguf: UNREAD,
    encoder: EncoderReaders { config: nomic_with_own_keys, ..NOMIC_BERT.encoder },
    ..NOMIC_BERT
};

/// Refuses what only some of its makers' models have.
fn nomic_with_own_keys(keys: &JsonKeys<'_>) -> Result<Option<EncoderSpec>, ParseError> {
    let refused = [
        ("prenorm", "norms before the sublayers"),
        ("parallel_block", "sublayers side by side"),
        ("qkv_proj_bias", "a bias of Q, K and V"),
        ("mlp_fc1_bias", "a bias of the MLP"),
        ("mlp_fc2_bias", "a bias of the MLP"),
        ("rotary_emb_interleaved", "a rope of pairs"),
        ("use_rms_norm", "RMS norms"),
    ];
    for (key, what) in refused {
        if keys.bool(key)?.unwrap_or(false) {
            return ParseError::unsupported(format!("{what} in this architecture"));
        }
    }
    if keys.optional("num_experts")?.is_some_and(|n| n > 0) {
        return ParseError::unsupported("experts in this architecture");
    }
    encoder_at(keys, 0)
}

/// A table of kinds of tokens, and one of positions with this many rows before that of the first token.
fn encoder_at(keys: &JsonKeys<'_>, n_rows_before_first: u32) -> Result<Option<EncoderSpec>, ParseError> {
    match keys.text("position_embedding_type") {
        None | Some("absolute") => {}
        Some(other) => return ParseError::unsupported(format!("position_embedding_type {other}")),
    }
    if keys.bool("is_decoder")?.unwrap_or(false) {
        return ParseError::unsupported("a BERT that is a decoder");
    }
    let n_token_types = keys.optional("type_vocab_size")?.unwrap_or(2);
    Ok(Some(EncoderSpec { n_token_types, n_rows_before_first, ..EncoderSpec::PLAIN }))
}

fn gguf_encoder(keys: &GgufKeys<'_>) -> Result<Option<EncoderSpec>, ParseError> {
    let n_rows = keys.gguf.tensor("token_types.weight").map_or(0, |table| match table.dims[..] {
        [n, _] => n,
        _ => 1,
    });
    let n_token_types = crate::config::length("the number of rows of token_types.weight", n_rows)?;
    Ok(Some(EncoderSpec { n_token_types, ..EncoderSpec::PLAIN }))
}

/// A classifier of two products.
fn dense_and_output(hidden: u32, n: u32) -> Vec<PooledLayer> {
    let dense = PooledLayer::product("classifier.dense", hidden, hidden).with(PooledActivation::Tanh);
    vec![dense, PooledLayer::product("classifier.out_proj", hidden, n)]
}

fn no_classifier(_: &JsonKeys<'_>, _: u32, _: u32) -> Result<(Pooling, Vec<PooledLayer>), ParseError> {
    ParseError::unsupported("a classifier of this architecture")
}

const WORDS: &str = "embeddings.word_embeddings.weight";
const TYPES: &str = "embeddings.token_type_embeddings.weight";

const BERT_OUTER: &[TensorMapping] = &[
    renamed(EMBEDDING, [Vocab, Hidden], WORDS, "token_embd.weight"),
    TensorMapping {
        name: POSITIONS,
        dims: [Context, Hidden],
        folder: part("embeddings.position_embeddings.weight", &[BeforeFirst], &[BeforeFirst, Context]),
        gguf: whole("position_embd.weight"),
    },
    renamed(TOKEN_TYPES, [TokenTypes, Hidden], TYPES, "token_types.weight"),
    renamed(EMBEDDING_NORM, [One, Hidden], "embeddings.LayerNorm.weight", "token_embd_norm.weight"),
    renamed(EMBEDDING_NORM_BIAS, [One, Hidden], "embeddings.LayerNorm.bias", "token_embd_norm.bias"),
    renamed(DISTANCES, [DistanceBuckets, QueryHeads], "encoder.relative_attention_bias.weight", ""),
];

const fn biased(name: &'static str, n: Dim, folder: &'static str, gguf: &'static str) -> TensorMapping {
    renamed(name, [One, n], folder, gguf)
}

const BERT_NORMS: &[TensorMapping] = &[
    biased(ATTENTION_NORM, Hidden, "attention.output.LayerNorm.weight", "attn_output_norm.weight"),
    biased(ATTENTION_NORM_BIAS, Hidden, "attention.output.LayerNorm.bias", "attn_output_norm.bias"),
    biased(MLP_NORM, Hidden, "output.LayerNorm.weight", "layer_output_norm.weight"),
    biased(MLP_NORM_BIAS, Hidden, "output.LayerNorm.bias", "layer_output_norm.bias"),
];
const ATTENTION_NORM: &str = "post_attention_layernorm.weight";
const ATTENTION_NORM_BIAS: &str = "post_attention_layernorm.bias";
const MLP_NORM: &str = "post_mlp_layernorm.weight";
const MLP_NORM_BIAS: &str = "post_mlp_layernorm.bias";

const BERT_ATTENTION: &[TensorMapping] = &[
    renamed("self_attn.q_proj.weight", [Heads, Hidden], "attention.self.query.weight", "attn_q.weight"),
    renamed("self_attn.k_proj.weight", [KvHeads, Hidden], "attention.self.key.weight", "attn_k.weight"),
    renamed("self_attn.v_proj.weight", [KvHeads, Hidden], "attention.self.value.weight", "attn_v.weight"),
    renamed("self_attn.o_proj.weight", [Hidden, Heads], "attention.output.dense.weight", "attn_output.weight"),
    biased("self_attn.q_proj.bias", Heads, "attention.self.query.bias", "attn_q.bias"),
    biased("self_attn.k_proj.bias", KvHeads, "attention.self.key.bias", "attn_k.bias"),
    biased("self_attn.v_proj.bias", KvHeads, "attention.self.value.bias", "attn_v.bias"),
    biased("self_attn.o_proj.bias", Hidden, "attention.output.dense.bias", "attn_output.bias"),
];
const BERT_MLP: &[TensorMapping] = &[
    renamed("mlp.up_proj.weight", [Inner, Hidden], "intermediate.dense.weight", "ffn_up.weight"),
    renamed("mlp.down_proj.weight", [Hidden, Inner], "output.dense.weight", "ffn_down.weight"),
    biased("mlp.up_proj.bias", Inner, "intermediate.dense.bias", "ffn_up.bias"),
    biased("mlp.down_proj.bias", Hidden, "output.dense.bias", "ffn_down.bias"),
];

const MPNET_NORMS: &[TensorMapping] = &[
    biased(ATTENTION_NORM, Hidden, "attention.LayerNorm.weight", ""),
    biased(ATTENTION_NORM_BIAS, Hidden, "attention.LayerNorm.bias", ""),
    biased(MLP_NORM, Hidden, "output.LayerNorm.weight", ""),
    biased(MLP_NORM_BIAS, Hidden, "output.LayerNorm.bias", ""),
];
const MPNET_ATTENTION: &[TensorMapping] = &[
    renamed("self_attn.q_proj.weight", [Heads, Hidden], "attention.attn.q.weight", ""),
    renamed("self_attn.k_proj.weight", [KvHeads, Hidden], "attention.attn.k.weight", ""),
    renamed("self_attn.v_proj.weight", [KvHeads, Hidden], "attention.attn.v.weight", ""),
    renamed("self_attn.o_proj.weight", [Hidden, Heads], "attention.attn.o.weight", ""),
    biased("self_attn.q_proj.bias", Heads, "attention.attn.q.bias", ""),
    biased("self_attn.k_proj.bias", KvHeads, "attention.attn.k.bias", ""),
    biased("self_attn.v_proj.bias", KvHeads, "attention.attn.v.bias", ""),
    biased("self_attn.o_proj.bias", Hidden, "attention.attn.o.bias", ""),
];

/// A part of the matrix that files have for Q, K and V.
const fn of_qkv(name: &'static str, rows: Dim, before: &'static [Dim]) -> TensorMapping {
    let [folder, gguf] = [part("attn.Wqkv.weight", before, QKV), part("attn_qkv.weight", before, QKV)];
    TensorMapping { name, dims: [rows, Hidden], folder, gguf }
}

const NOMIC_OUTER: &[TensorMapping] = &[
    renamed(EMBEDDING, [Vocab, Hidden], WORDS, "token_embd.weight"),
    renamed(TOKEN_TYPES, [TokenTypes, Hidden], TYPES, "token_types.weight"),
    renamed(EMBEDDING_NORM, [One, Hidden], "emb_ln.weight", "token_embd_norm.weight"),
    renamed(EMBEDDING_NORM_BIAS, [One, Hidden], "emb_ln.bias", "token_embd_norm.bias"),
];
const NOMIC_NORMS: &[TensorMapping] = &[
    biased(ATTENTION_NORM, Hidden, "norm1.weight", "attn_output_norm.weight"),
    biased(ATTENTION_NORM_BIAS, Hidden, "norm1.bias", "attn_output_norm.bias"),
    biased(MLP_NORM, Hidden, "norm2.weight", "layer_output_norm.weight"),
    biased(MLP_NORM_BIAS, Hidden, "norm2.bias", "layer_output_norm.bias"),
];
const NOMIC_ATTENTION: &[TensorMapping] = &[
    of_qkv("self_attn.q_proj.weight", Heads, &[]),
    of_qkv("self_attn.k_proj.weight", KvHeads, &[Heads]),
    of_qkv("self_attn.v_proj.weight", KvHeads, &[Heads, KvHeads]),
    renamed("self_attn.o_proj.weight", [Hidden, Heads], "attn.out_proj.weight", "attn_output.weight"),
];
const NOMIC_MLP: &[TensorMapping] = &[
    renamed("mlp.gate_proj.weight", [Inner, Hidden], "mlp.fc12.weight", "ffn_gate.weight"),
    renamed("mlp.up_proj.weight", [Inner, Hidden], "mlp.fc11.weight", "ffn_up.weight"),
    renamed("mlp.down_proj.weight", [Hidden, Inner], "mlp.fc2.weight", "ffn_down.weight"),
];
