//! The layers that a pooled vector goes through: those of an embedding, or a classifier. Knows no rows of a pass.

use crate::error::Result;
use crate::weights::{MatrixRows, WeightLoader};
use backend::{Device, ElementOp, Memory};
use checkpoint::{ModelSpec, PooledActivation, PooledLayer};

pub struct PooledLayers<M: Memory>(Vec<Layer<M>>);

/// A product, an activation and a norm.
struct Layer<M: Memory> {
    product: M::Matrix,      // product.weight [n_outputs, n_inputs]
    bias: Option<M::Vector>, // product.bias [n_outputs]
    activation: Option<ElementOp>,
    /// Weight and bias. [n_outputs] each
    norm: Option<[M::Vector; 2]>, // norm
    eps: f32,
    // One row each.
    input: M::Buffer,
    output: M::Buffer,
    normed: M::Buffer,
}

impl<M: Memory> PooledLayers<M> {
    /// Loads the layers, on the rank that samples.
    pub fn load(all: &WeightLoader<'_, M>, spec: &ModelSpec) -> Result<PooledLayers<M>> {
        let layers = spec.pooling.layers.iter().filter(|_| all.part().is_sampler()).enumerate();
        let load = |(i, of)| Layer::load(&all.at_path("pooling").at_path(i), of, spec.norm_eps);
        layers.map(load).collect::<Result<_>>().map(PooledLayers)
    }
}

impl<M: Memory> Layer<M> {
    fn load(at: &WeightLoader<'_, M>, of: &PooledLayer, eps: f32) -> Result<Layer<M>> {
        let (n_in, n_out, device) = (of.n_inputs as usize, of.n_outputs as usize, at.device());
        let bias = |name: &str| at.bias(name, n_out, 0..n_out);
        let norm = |_: &String| -> Result<[M::Vector; 2]> {
            let bias = bias("norm")?.unwrap_or_else(|| vec![0.0; n_out]);
            Ok([at.vector_plus("norm", n_out, 0.0)?, at.vector("norm.bias", &bias)?])
        };
        Ok(Layer {
            product: at.rows(n_in, &[MatrixRows::all("product", n_out)])?,
            bias: bias("product")?.map(|bias| at.vector("product.bias", &bias)).transpose()?,
            activation: match of.activation {
                PooledActivation::None => None,
                PooledActivation::Tanh => Some(ElementOp::SoftCap(1.0)),
                PooledActivation::GeluErf => Some(ElementOp::GeluErf),
            },
            norm: of.norm.as_ref().map(norm).transpose()?,
            eps,
            input: device.buffer(1, n_in)?,
            output: device.buffer(1, n_out)?,
            normed: device.buffer(1, n_out)?,
        })
    }
}

impl<D: Device> PooledLayers<D> {
    /// Replaces a pooled vector by what these layers make of it.
    pub fn forward(&mut self, device: &D, pooled: &mut Vec<f32>) {
        self.0.iter_mut().for_each(|layer| layer.forward(device, pooled));
    }
}

impl<D: Device> Layer<D> {
    fn forward(&mut self, device: &D, x: &mut Vec<f32>) {
        device.write(&mut self.input, 0, x);
        device.linear(&self.input, &self.product, 1, &mut self.output);
        if let Some(bias) = &self.bias {
            device.add_bias(&mut self.output, bias, 1);
        }
        if let Some(op) = self.activation {
            device.map(&mut self.output, op, 1);
        }
        let output = match &self.norm {
            Some([weight, bias]) => {
                device.layer_norm(&self.output, weight, bias, self.eps, 1, &mut self.normed);
                &self.normed
            }
            None => &self.output,
        };
        x.resize(device.cols(output), 0.0);
        device.read(output, 0..1, x);
    }
}
