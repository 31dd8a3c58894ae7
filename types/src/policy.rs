//! What the bits depend on besides the request: two replicas with equal digests give equal tokens.

use core::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PolicyDigest(pub [u8; 32]);

/// Devices that compute by one contract. Those of a class agree in every bit, GPUs if their architecture is one too.
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

    /// What a worker says that it computes on, read: `cuda/sm_90` is a class and, of a GPU, the architecture. What is
    /// not known is a processor.
    pub fn told(device: &str) -> (DeviceClass, &str) {
        let (name, architecture) = device.split_once('/').unwrap_or((device, ""));
        match name {
            "cuda" => (DeviceClass::Cuda, architecture),
            "sim" => (DeviceClass::Sim, ""),
            _ => (DeviceClass::Cpu, ""),
        }
    }
}

/// What may choose the order of a sum, on devices where there is a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Pace {
    /// The model's shapes alone: the same bits on every grid and in any company.
    #[default]
    Lockstep,
    /// Whatever is fastest.
    Fast,
}

impl Pace {
    pub fn name(self) -> &'static str {
        match self {
            Pace::Lockstep => "lockstep",
            Pace::Fast => "fast",
        }
    }

    /// As `name` has it; who says nothing means the first.
    pub fn named(name: &str) -> Option<Pace> {
        match name {
            "" | "lockstep" => Some(Pace::Lockstep),
            "fast" => Some(Pace::Fast),
            _ => None,
        }
    }
}

/// The numeric policy's choices. Everything that can change a bit is a field here and nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numerics<'a> {
    pub device_class: DeviceClass,
    /// Of a GPU (`sm_90`): what a tensor core adds up inside one instruction is its own. Empty elsewhere.
    pub architecture: &'a str,
    pub pace: Pace,
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

    /// Weights as they are stored, and nothing beside them; on what a worker says that it computes on.
    pub fn plain<'a>(
        device: &'a str,
        pace: Pace,
        activations: &'a str,
        kv_dtype: &'a str,
        weights: [u8; 32],
    ) -> Numerics<'a> {
        let (device_class, architecture) = DeviceClass::told(device);
        let (quantization, adapter) = ("none", None);
        Numerics { device_class, architecture, pace, activations, kv_dtype, weights, quantization, adapter }
    }

    pub fn digest(&self) -> PolicyDigest {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 numeric policy");
        hasher.update(&Self::VERSION.to_le_bytes());
        let mut add = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        [self.device_class.name(), self.activations, self.kv_dtype, self.quantization].into_iter().for_each(&mut add);
        // Processors have neither, and their digests are what they were before there were any.
        if self.device_class == DeviceClass::Cuda {
            [self.architecture, self.pace.name()].into_iter().for_each(&mut add);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_knows_what_can_change_a_bit_and_nothing_else() {
        let digest = |device, pace| Numerics::plain(device, pace, "bf16", "bf16", [5; 32]).digest();
        let all = [
            digest("cuda/sm_80", Pace::Lockstep),
            digest("cuda/sm_90", Pace::Lockstep),
            digest("cuda/sm_90", Pace::Fast),
            digest("cpu", Pace::Lockstep),
            digest("sim", Pace::Lockstep),
        ];
        assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");
        // Processors are one class, and have one way to compute.
        assert_eq!(digest("cpu/zen4", Pace::Fast), digest("cpu", Pace::Lockstep));
    }

    #[test]
    fn paces_are_read_as_they_are_written() {
        assert!([Pace::Lockstep, Pace::Fast].iter().all(|pace| Pace::named(pace.name()) == Some(*pace)));
        assert_eq!((Pace::named(""), Pace::named("slow")), (Some(Pace::Lockstep), None));
    }
}
