//! What the bits depend on besides the request: two replicas with equal digests give equal tokens.

use core::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PolicyDigest(pub [u8; 32]);

/// Devices that agree in every bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceClass {
    Cpu,
    Cuda,
    /// No model at all: tokens from the request's hash.
    Sim,
}

impl DeviceClass {
    pub fn name(self) -> &'static str {
        match self {
            DeviceClass::Cpu => "cpu",
            DeviceClass::Cuda => "cuda",
            DeviceClass::Sim => "sim",
        }
    }
}

/// The numeric policy's choices. Everything that can change a bit is a field here and nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numerics<'a> {
    pub device_class: DeviceClass,
    /// `int8` or `f32`: what meets a quantized weight.
    pub activations: &'a str,
    pub kv_dtype: &'a str,
    /// Of the weights as stored, and of every hyperparameter that shapes the pass.
    pub weights: [u8; 32],
    /// What the loader makes of them, where it changes them (`none`, `q8_0`, ..).
    pub quantization: &'a str,
    pub adapter: Option<[u8; 32]>,
}

impl Numerics<'_> {
    /// Grows with every change to the numeric policy that can change a bit.
    pub const VERSION: u32 = 1;

    /// Weights as they are stored, and nothing beside them.
    pub fn plain<'a>(
        device_class: DeviceClass,
        activations: &'a str,
        kv_dtype: &'a str,
        weights: [u8; 32],
    ) -> Numerics<'a> {
        Numerics { device_class, activations, kv_dtype, weights, quantization: "none", adapter: None }
    }

    pub fn digest(&self) -> PolicyDigest {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 numeric policy");
        hasher.update(&Self::VERSION.to_le_bytes());
        for text in [self.device_class.name(), self.activations, self.kv_dtype, self.quantization] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&self.weights);
        if let Some(adapter) = &self.adapter {
            hasher.update(adapter);
        }
        PolicyDigest(*hasher.finalize().as_bytes())
    }
}

impl fmt::Display for PolicyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PolicyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PolicyDigest({self})")
    }
}
