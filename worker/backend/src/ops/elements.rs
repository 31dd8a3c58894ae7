//! Functions of single elements: activations, scales, caps.

/// What stands between the products of an MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MlpActivation {
    Gated(Gate),
    /// Without a gate.
    Plain(ElementOp),
}

/// An operation on each element x.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ElementOp {
    /// gelu(x), in the tanh form
    Gelu,
    /// gelu(x), in the form with the error function
    GeluErf,
    /// max(x, 0)^2
    ReluSquared,
    /// x * factor
    Scale(f32),
    /// cap * tanh(x / cap)
    SoftCap(f32),
}

/// How the gate of an MLP acts on its other half.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// silu(gate) * up
    Silu,
    /// gelu(gate) * up, in the tanh form
    Gelu,
    /// gelu(gate) * up, in the form with the error function
    GeluErf,
    Clamped(Clamp),
}

/// `(up + 1) * gate * sigmoid(alpha * gate)`, where the gate is at most `limit`, and `up` from -limit to limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clamp {
    pub alpha: f32,
    pub limit: f32,
}
