//! The tensors of the layers behind pooling. Their names in files are in the spec.

use super::{RequiredTensor, StoredTensor};
use crate::config::{PooledLayer, PoolingSpec};

/// Notes which of the layers have biases. `has` returns whether the file has a tensor.
pub fn find_biases(spec: &mut PoolingSpec, has: impl Fn(&str) -> bool) {
    for layer in &mut spec.layers {
        let has_bias = |name: &str| has(&format!("{name}.bias"));
        layer.biases = [has_bias(&layer.product), layer.norm.as_deref().is_some_and(has_bias)];
    }
}

/// Every tensor of these layers.
pub fn tensors(spec: &PoolingSpec) -> impl Iterator<Item = (RequiredTensor, StoredTensor)> {
    spec.layers.iter().enumerate().flat_map(|(i, layer)| of_layer(i, layer))
}

fn of_layer(i: usize, layer: &PooledLayer) -> Vec<(RequiredTensor, StoredTensor)> {
    let [n_out, n_in] = [layer.n_outputs, layer.n_inputs].map(|n| n as usize);
    let (norm, [has_bias, has_norm_bias]) = (layer.norm.as_deref(), layer.biases);
    let all = [
        (Some(layer.product.as_str()), "product", "weight", [n_out, n_in]),
        (Some(layer.product.as_str()).filter(|_| has_bias), "product", "bias", [1, n_out]),
        (norm, "norm", "weight", [1, n_out]),
        (norm.filter(|_| has_norm_bias), "norm", "bias", [1, n_out]),
    ];
    let place = |(file, name, kind, shape): (Option<&str>, &str, &str, [usize; 2])| {
        Some(place(format!("pooling.{i}.{name}.{kind}"), format!("{}.{kind}", file?), shape))
    };
    all.into_iter().filter_map(place).collect()
}

fn place(name: String, file: String, shape: [usize; 2]) -> (RequiredTensor, StoredTensor) {
    let all = if shape[0] == 1 { shape[1] } else { shape[0] };
    let (stack, woven) = (None, None);
    let source = StoredTensor { file, stack, shape, before: 0, all, is_turned: false, woven, cut_by: [None, None] };
    (RequiredTensor { name, layer: None, shape }, source)
}
