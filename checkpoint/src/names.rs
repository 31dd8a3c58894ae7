//! What a tensor of the Llama family is called, in a Hugging Face folder and in a GGUF, and which shape it must have.
//! One table, from which everything else follows.

use crate::config::ModelSpec;

/// A length that the spec knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dim {
    One,
    Hidden,
    Heads,
    KvHeads,
    Inner,
    Vocab,
}

/// Hugging Face's name, the GGUF's name, `[rows, cols]`. `{}` is the layer.
type Row = (&'static str, &'static str, [Dim; 2]);

const LAYER: [Row; 9] = [
    ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", [Dim::One, Dim::Hidden]),
    ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", [Dim::Heads, Dim::Hidden]),
    ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", [Dim::KvHeads, Dim::Hidden]),
    ("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", [Dim::KvHeads, Dim::Hidden]),
    ("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", [Dim::Hidden, Dim::Heads]),
    ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", [Dim::One, Dim::Hidden]),
    ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", [Dim::Inner, Dim::Hidden]),
    ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", [Dim::Inner, Dim::Hidden]),
    ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", [Dim::Hidden, Dim::Inner]),
];

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const NORM: &str = "model.norm.weight";
pub const HEAD: &str = "lm_head.weight";

const OUTER: [Row; 3] = [
    (EMBEDDING, "token_embd.weight", [Dim::Vocab, Dim::Hidden]),
    (NORM, "output_norm.weight", [Dim::One, Dim::Hidden]),
    (HEAD, "output.weight", [Dim::Vocab, Dim::Hidden]),
];

/// One tensor that a model must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub name: String,
    /// None for what belongs to no layer: the embedding, the last norm, the head.
    pub layer: Option<u32>,
    pub shape: [usize; 2],
}

/// Every tensor that a model of this spec must have, layers in order.
pub fn expected(spec: &ModelSpec) -> Vec<Expected> {
    let of = |(name, _, dims): &Row, layer: Option<u32>| Expected {
        name: layer.map_or_else(|| (*name).to_owned(), |layer| in_layer(name, layer)),
        layer,
        shape: dims.map(|dim| length(dim, spec)),
    };
    let outer = OUTER.iter().filter(|row| row.0 != HEAD || !spec.tied_embeddings).map(|row| of(row, None));
    let layers = (0..spec.n_layers).flat_map(|layer| LAYER.iter().map(move |row| of(row, Some(layer))));
    outer.chain(layers).collect()
}

/// The name that a GGUF has for a Hugging Face name.
pub fn gguf_name(name: &str) -> Option<String> {
    if let Some(row) = OUTER.iter().find(|row| row.0 == name) {
        return Some(row.1.to_owned());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let row = LAYER.iter().find(|row| row.0.strip_prefix("model.layers.{}.") == Some(rest))?;
    Some(in_layer(row.1, layer))
}

fn in_layer(pattern: &str, layer: u32) -> String {
    pattern.replacen("{}", &layer.to_string(), 1)
}

fn length(dim: Dim, spec: &ModelSpec) -> usize {
    let length = match dim {
        Dim::One => 1,
        Dim::Hidden => spec.hidden,
        Dim::Heads => spec.n_heads * spec.head_dim,
        Dim::KvHeads => spec.n_kv_heads * spec.head_dim,
        Dim::Inner => spec.inner,
        Dim::Vocab => spec.vocab,
    };
    length as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hugging_face_to_gguf() {
        let check = |name: &str, expect: Option<&str>| assert_eq!(gguf_name(name).as_deref(), expect);
        check("model.embed_tokens.weight", Some("token_embd.weight"));
        check("lm_head.weight", Some("output.weight"));
        check("model.layers.12.self_attn.o_proj.weight", Some("blk.12.attn_output.weight"));
        check("model.layers.0.post_attention_layernorm.weight", Some("blk.0.ffn_norm.weight"));
        check("model.layers.x.mlp.up_proj.weight", None);
        check("model.layers.0.mlp.bias", None);
        check("", None);
    }
}
