//! Cosines and sines of rotary positions. In f64 by portable arithmetic, so that every machine has the same tables.

use crate::Result;
use backend::{Device, RopeStyle};
use checkpoint::{RopeScaling, RopeSpec};

pub fn load<D: Device>(device: &D, spec: &RopeSpec, context: u32) -> Result<D::Rope> {
    let (cos, sin) = tables(spec, context);
    let style = if spec.pairs { RopeStyle::Pairs } else { RopeStyle::Halves };
    Ok(device.rope(&cos, &sin, spec.dim / 2, style)?)
}

/// cos, sin: [context, dim / 2]
fn tables(spec: &RopeSpec, context: u32) -> (Vec<f32>, Vec<f32>) {
    let turns = frequencies(spec);
    let n = turns.len() * context as usize;
    let (mut cos, mut sin) = (Vec::with_capacity(n), Vec::with_capacity(n));
    for position in 0..context {
        for turn in &turns {
            let (s, c) = libm::sincos(f64::from(position) * turn);
            cos.push(c as f32);
            sin.push(s as f32);
        }
    }
    (cos, sin)
}

/// Radians per position of each pair: `theta^(-2i/dim)`, scaled.
fn frequencies(spec: &RopeSpec) -> Vec<f64> {
    let plain = (0..spec.dim / 2).map(|i| libm::pow(spec.theta, -((2 * i) as f64) / spec.dim as f64));
    plain.map(|turn| scaled(turn, &spec.scaling)).collect()
}
