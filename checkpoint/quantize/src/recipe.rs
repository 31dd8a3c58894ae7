//! Which type each tensor of a model gets: the recipes of llama.cpp, under its names. Knows no bytes.
//!
//! A recipe has a type for most matrices. Matrices whose errors cost most get more bits: the head, and in some layers
//! the values of attention and the last matrix of the MLP. Vectors, norms and small matrices stay as they are.

use crate::error::Error;
use std::str::FromStr;
use types::Dtype;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3KS,
    Q3KM,
    Q3KL,
    Q4KS,
    Q4KM,
    Q5KS,
    Q5KM,
    Q6K,
    F16,
    BF16,
}

impl Recipe {
    pub const ALL: [Recipe; 16] = [
        Recipe::Q4_0,
        Recipe::Q4_1,
        Recipe::Q5_0,
        Recipe::Q5_1,
        Recipe::Q8_0,
        Recipe::Q2K,
        Recipe::Q3KS,
        Recipe::Q3KM,
        Recipe::Q3KL,
        Recipe::Q4KS,
        Recipe::Q4KM,
        Recipe::Q5KS,
        Recipe::Q5KM,
        Recipe::Q6K,
        Recipe::F16,
        Recipe::BF16,
    ];

    /// The name, the type of most matrices, and the number in `general.file_type`.
    const fn row(self) -> (&'static str, Dtype, u32) {
        match self {
            Recipe::Q4_0 => ("q4_0", Dtype::Q4_0, 2),
            Recipe::Q4_1 => ("q4_1", Dtype::Q4_1, 3),
            Recipe::Q5_0 => ("q5_0", Dtype::Q5_0, 8),
            Recipe::Q5_1 => ("q5_1", Dtype::Q5_1, 9),
            Recipe::Q8_0 => ("q8_0", Dtype::Q8_0, 7),
            Recipe::Q2K => ("q2_k", Dtype::Q2K, 10),
            Recipe::Q3KS => ("q3_k_s", Dtype::Q3K, 11),
            Recipe::Q3KM => ("q3_k_m", Dtype::Q3K, 12),
            Recipe::Q3KL => ("q3_k_l", Dtype::Q3K, 13),
            Recipe::Q4KS => ("q4_k_s", Dtype::Q4K, 14),
            Recipe::Q4KM => ("q4_k_m", Dtype::Q4K, 15),
            Recipe::Q5KS => ("q5_k_s", Dtype::Q5K, 16),
            Recipe::Q5KM => ("q5_k_m", Dtype::Q5K, 17),
            Recipe::Q6K => ("q6_k", Dtype::Q6K, 18),
            Recipe::F16 => ("f16", Dtype::F16, 1),
            Recipe::BF16 => ("bf16", Dtype::BF16, 32),
        }
    }

    pub const fn name(self) -> &'static str {
        self.row().0
    }

    pub(crate) const fn dtype(self) -> Dtype {
        self.row().1
    }

    pub(crate) const fn file_type(self) -> u32 {
        self.row().2
    }

    /// All names, for messages.
    pub fn names() -> String {
        Recipe::ALL.map(Recipe::name).join(", ")
    }
}

impl FromStr for Recipe {
    type Err = Error;

    fn from_str(name: &str) -> Result<Recipe, Error> {
        let lower = name.to_ascii_lowercase();
        let found = Recipe::ALL.into_iter().find(|recipe| recipe.name() == lower);
        found.ok_or_else(|| Error::UnknownRecipe { name: name.to_owned() })
    }
}

/// What the choice of types depends on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecipeInputs {
    pub n_layers: usize,
    /// Query heads for each head of keys and values.
    pub n_grouped: u64,
    pub n_experts: u64,
    /// Tensors with values of attention.
    pub n_values: usize,
    /// Without it, the embedding is the head too.
    pub has_head: bool,
}

/// A tensor's purpose, by its name in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TensorRole {
    Head,
    Embedding,
    AttentionValues,
    AttentionKeys,
    AttentionOutput,
    MlpDown,
    Other,
}

impl TensorRole {
    fn of(name: &str) -> TensorRole {
        const ROLES: [(&str, TensorRole); 6] = [
            ("attn_qkv.weight", TensorRole::AttentionValues),
            ("attn_kv_b.weight", TensorRole::AttentionValues),
            ("attn_v.weight", TensorRole::AttentionValues),
            ("attn_k.weight", TensorRole::AttentionKeys),
            ("attn_output.weight", TensorRole::AttentionOutput),
            ("ffn_down", TensorRole::MlpDown),
        ];
        match name {
            "output.weight" => TensorRole::Head,
            "token_embd.weight" | "per_layer_token_embd.weight" => TensorRole::Embedding,
            _ => ROLES.iter().find(|(part, _)| name.contains(part)).map_or(TensorRole::Other, |(_, role)| *role),
        }
    }
}

/// Whether this tensor has values of attention, alone or with queries and keys.
pub(crate) fn has_values(name: &str) -> bool {
    TensorRole::of(name) == TensorRole::AttentionValues
}

/// The layer in a tensor's name, `blk.7.attn_v.weight`.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// Parts of the names of matrices that stay as they are: small, or sensitive.
const UNCHANGED: &[&str] = &[
    "_norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "attn_rel_b.weight",
    "time_mix_",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    ".position_embd",
];

/// Whether a recipe changes a tensor. `dims` are from the slowest to the fastest.
pub(crate) fn is_changed(name: &str, dims: &[u64]) -> bool {
    let n_dims = dims.iter().skip_while(|dim| **dim == 1).count();
    let is_unchanged = UNCHANGED.iter().any(|part| name.contains(part));
    let is_position = matches!(name, "position_embd.weight" | "token_types.weight");
    n_dims >= 2 && name.ends_with("weight") && !is_unchanged && !is_position
}

/// Chooses types of tensors, which it gets in the order of their layers.
pub(crate) struct TypeChooser {
    recipe: Recipe,
    inputs: RecipeInputs,
    n_values_seen: usize,
    n_downs_seen: usize,
}

impl TypeChooser {
    pub fn new(recipe: Recipe, inputs: RecipeInputs) -> TypeChooser {
        TypeChooser { recipe, inputs, n_values_seen: 0, n_downs_seen: 0 }
    }

    /// The type of the next tensor, of which `is_changed` is true.
    pub fn next(&mut self, name: &str, columns: u64) -> Dtype {
        let plain = self.recipe.dtype();
        if plain.block() == 1 {
            return plain;
        }
        let role = TensorRole::of(name);
        let dtype = match role {
            TensorRole::Head => self.head(columns),
            TensorRole::Embedding if !self.inputs.has_head => self.head(columns),
            TensorRole::AttentionValues => self.values(),
            TensorRole::AttentionKeys if self.inputs.n_experts == 8 => Dtype::Q8_0,
            TensorRole::AttentionOutput => self.attention_output(),
            TensorRole::MlpDown => self.mlp_down(name),
            TensorRole::Embedding | TensorRole::AttentionKeys | TensorRole::Other => plain,
        };
        self.n_values_seen += usize::from(role == TensorRole::AttentionValues);
        self.n_downs_seen += usize::from(role == TensorRole::MlpDown);
        fitting(dtype, columns)
    }

    fn head(&self, columns: u64) -> Dtype {
        let plain = self.recipe.dtype();
        let is_whole = columns.is_multiple_of(plain.block() as u64);
        if plain == Dtype::Q8_0 || !is_whole { Dtype::Q8_0 } else { Dtype::Q6K }
    }

    fn values(&self) -> Dtype {
        let (seen, n) = (self.n_values_seen, self.inputs.n_values);
        let dtype = match self.recipe {
            Recipe::Q2K if self.inputs.n_grouped >= 4 => Dtype::Q4K,
            Recipe::Q2K => Dtype::Q3K,
            Recipe::Q3KM if seen < 2 => Dtype::Q5K,
            Recipe::Q3KM => Dtype::Q4K,
            Recipe::Q3KL => Dtype::Q5K,
            Recipe::Q4KM | Recipe::Q5KM if gets_more_bits(seen, n) => Dtype::Q6K,
            Recipe::Q4KS if seen < 4 => Dtype::Q5K,
            other => other.dtype(),
        };
        // In Llama 70B and models like it, eight heads share these values, so they are few.
        let are_few = self.inputs.n_layers == 80 && self.inputs.n_grouped >= 8;
        match dtype {
            _ if self.inputs.n_experts == 8 => Dtype::Q8_0,
            Dtype::Q3K | Dtype::Q4K if are_few => Dtype::Q5K,
            _ => dtype,
        }
    }

    fn attention_output(&self) -> Dtype {
        let has_eight = self.inputs.n_experts == 8;
        match self.recipe {
            Recipe::Q2K | Recipe::Q3KS | Recipe::Q3KM | Recipe::Q4KS | Recipe::Q4KM if has_eight => Dtype::Q5K,
            Recipe::Q3KL if has_eight => Dtype::Q3K,
            Recipe::Q2K => Dtype::Q3K,
            Recipe::Q3KM => Dtype::Q4K,
            Recipe::Q3KL => Dtype::Q5K,
            other => other.dtype(),
        }
    }

    fn mlp_down(&self, name: &str) -> Dtype {
        let n = self.inputs.n_layers;
        let counted = self.n_downs_seen;
        let layer = if self.inputs.n_experts > 1 { layer_of(name).unwrap_or(counted) } else { counted };
        match self.recipe {
            Recipe::Q2K => Dtype::Q3K,
            Recipe::Q3KM if layer < n / 16 => Dtype::Q5K,
            Recipe::Q3KM => Dtype::Q4K,
            Recipe::Q3KL => Dtype::Q5K,
            Recipe::Q4KM | Recipe::Q5KM if gets_more_bits(layer, n) => Dtype::Q6K,
            Recipe::Q4KS if layer < n / 8 => Dtype::Q5K,
            other => other.dtype(),
        }
    }
}

/// The first and the last eighth of the layers, and every third one between them.
fn gets_more_bits(layer: usize, n: usize) -> bool {
    let eighth = n / 8;
    layer < eighth || layer >= 7 * n / 8 || (layer - eighth) % 3 == 2
}

/// The type itself, or one with smaller blocks where the columns do not fill whole ones.
fn fitting(dtype: Dtype, columns: u64) -> Dtype {
    let is_whole = |dtype: Dtype| columns.is_multiple_of(dtype.block() as u64);
    let smaller = match dtype {
        _ if is_whole(dtype) => dtype,
        Dtype::Q2K | Dtype::Q3K => Dtype::IQ4NL,
        Dtype::Q4K => Dtype::Q5_0,
        Dtype::Q5K => Dtype::Q5_1,
        Dtype::Q6K => Dtype::Q8_0,
        _ => Dtype::F16,
    };
    if is_whole(smaller) { smaller } else { Dtype::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types_of(recipe: Recipe, inputs: RecipeInputs, part: &str) -> Vec<Dtype> {
        let mut chooser = TypeChooser::new(recipe, inputs);
        (0..inputs.n_layers).map(|layer| chooser.next(&format!("blk.{layer}.{part}.weight"), 4096)).collect()
    }

    /// llama.cpp writes Llama 3 8B so.
    #[test]
    fn layers_of_q4_k_m_get_the_types_that_llama_cpp_gives_them() {
        let inputs = RecipeInputs { n_layers: 32, n_grouped: 4, n_experts: 0, n_values: 32, has_head: true };
        let more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31];
        let expected: Vec<Dtype> =
            (0..32).map(|layer| if more.contains(&layer) { Dtype::Q6K } else { Dtype::Q4K }).collect();
        assert_eq!(types_of(Recipe::Q4KM, inputs, "attn_v"), expected);
        assert_eq!(types_of(Recipe::Q4KM, inputs, "ffn_down"), expected);
        assert_eq!(types_of(Recipe::Q4KM, inputs, "attn_q"), [Dtype::Q4K; 32]);
        let small = types_of(Recipe::Q4KS, inputs, "ffn_down");
        assert_eq!((&small[..4], &small[4..]), (&[Dtype::Q5K; 4][..], &[Dtype::Q4K; 28][..]));
    }

    #[test]
    fn head_and_embedding() {
        let check = |recipe: Recipe, has_head: bool, expect: [Dtype; 2]| {
            let inputs = RecipeInputs { n_layers: 2, has_head, ..RecipeInputs::default() };
            let mut chooser = TypeChooser::new(recipe, inputs);
            let got = ["token_embd.weight", "output.weight"].map(|name| chooser.next(name, 512));
            assert_eq!(got, expect, "{recipe:?}");
        };
        check(Recipe::Q4KM, true, [Dtype::Q4K, Dtype::Q6K]);
        check(Recipe::Q4KM, false, [Dtype::Q6K, Dtype::Q6K]);
        check(Recipe::Q4_0, true, [Dtype::Q4_0, Dtype::Q6K]);
        check(Recipe::Q8_0, false, [Dtype::Q8_0, Dtype::Q8_0]);
        check(Recipe::F16, true, [Dtype::F16, Dtype::F16]);
    }

    #[test]
    fn columns_that_fill_no_block_get_a_type_with_smaller_ones() {
        let check = |recipe: Recipe, columns: u64, expect: Dtype| {
            let mut chooser = TypeChooser::new(recipe, RecipeInputs { n_layers: 8, ..RecipeInputs::default() });
            assert_eq!(chooser.next("blk.0.attn_q.weight", columns), expect, "{recipe:?}, {columns}");
        };
        check(Recipe::Q4KM, 576, Dtype::Q5_0);
        check(Recipe::Q5KS, 576, Dtype::Q5_1);
        check(Recipe::Q6K, 576, Dtype::Q8_0);
        check(Recipe::Q2K, 576, Dtype::IQ4NL);
        check(Recipe::Q3KS, 576, Dtype::IQ4NL);
        check(Recipe::Q8_0, 40, Dtype::F16);
        check(Recipe::Q4KM, 40, Dtype::F16);
        check(Recipe::BF16, 40, Dtype::BF16);
    }

    #[test]
    fn vectors_norms_and_small_matrices_stay() {
        let check = |name: &str, dims: &[u64], expect: bool| assert_eq!(is_changed(name, dims), expect, "{name}");
        check("blk.0.attn_q.weight", &[64, 64], true);
        check("blk.0.ffn_up_exps.weight", &[8, 64, 64], true);
        check("blk.0.attn_q.bias", &[64], false);
        check("blk.0.attn_norm.weight", &[64], false);
        check("blk.0.ffn_gate_inp.weight", &[8, 64], false);
        check("blk.0.ssm_conv1d.weight", &[64, 4], false);
        check("blk.0.ssm_a", &[64, 4], false);
        check("rope_freqs.weight", &[32], false);
        check("blk.0.attn_q.weight", &[1, 1, 64], false);
    }

    #[test]
    fn names_are_read_in_any_case() {
        assert_eq!(Recipe::ALL.map(|recipe| recipe.name().parse::<Recipe>().unwrap()), Recipe::ALL);
        assert_eq!("Q4_K_M".parse::<Recipe>().unwrap(), Recipe::Q4KM);
        let error = "q4_k".parse::<Recipe>().unwrap_err().to_string();
        assert!(error.contains("no type q4_k") && error.contains("q4_k_m"), "{error}");
    }
}
