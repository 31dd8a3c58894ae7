//! The tensors of the layers behind pooling. Their names in files are in the spec.

use super::{RequiredTensor, StoredTensor};
use crate::config::{PooledLayer, PoolingSpec};

/// Every tensor that these layers must have.
pub fn tensors(spec: &PoolingSpec) -> impl Iterator<Item = (RequiredTensor, StoredTensor)> {
    spec.layers.iter().enumerate().flat_map(|(i, layer)| {
        let [n_out, n_in] = [layer.n_outputs, layer.n_inputs].map(|n| n as usize);
        let product = place(i, "product.weight", &format!("{}.weight", layer.product), [n_out, n_in]);
        let norm = layer.norm.as_ref().map(|norm| place(i, "norm.weight", &format!("{norm}.weight"), [1, n_out]));
        [product].into_iter().chain(norm)
    })
}

/// The tensors that they may have besides.
pub fn biases(spec: &PoolingSpec) -> impl Iterator<Item = (String, StoredTensor)> {
    let of_layer = |(i, layer): (usize, &PooledLayer)| {
        let shape = [1, layer.n_outputs as usize];
        let product = place(i, "product.bias", &format!("{}.bias", layer.product), shape);
        let norm = layer.norm.as_ref().map(|norm| place(i, "norm.bias", &format!("{norm}.bias"), shape));
        [product].into_iter().chain(norm).map(|(expected, source)| (expected.name, source)).collect::<Vec<_>>()
    };
    spec.layers.iter().enumerate().flat_map(of_layer)
}

fn place(layer: usize, name: &str, file: &str, shape: [usize; 2]) -> (RequiredTensor, StoredTensor) {
    let all = if shape[0] == 1 { shape[1] } else { shape[0] };
    let source = StoredTensor {
        file: file.to_owned(),
        stack: None,
        shape,
        before: 0,
        all,
        is_turned: false,
        woven: None,
        cut_by: [None, None],
    };
    (RequiredTensor { name: format!("pooling.{layer}.{name}"), layer: None, shape }, source)
}
