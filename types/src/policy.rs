//! The inputs of the bits besides the request: two replicas with equal digests give equal tokens.

use crate::numerics::{Activations, DeviceClass, DeviceKind, KvDtype, NumericsMode};
use crate::{Hex, WeightsRoot};
use core::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PolicyDigest(pub [u8; 32]);

/// The numeric policy's choices. Everything that can change a bit is a field here and nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numerics<'a> {
    pub device_class: DeviceClass,
    /// A GPU's architecture (`sm_90`): its tensor cores have their own order of sums within an instruction. Else empty.
    pub architecture: &'a str,
    pub mode: NumericsMode,
    pub activations: Activations,
    pub kv_dtype: KvDtype,
    /// The fingerprint of the configured model, with every hyperparameter that shapes the pass. The root
    /// (`PolicyDigest::loaded`) covers which bytes were loaded.
    pub weights: [u8; 32],
    /// The type that the loader converts weights to (`none`, `q8_0`, ..).
    pub quantization: &'a str,
}

impl Numerics<'_> {
    /// Grows with every change to the numeric policy that can change a bit.
    pub const VERSION: u32 = 2;

    /// The policy for weights as they are stored, on the device that a worker named.
    pub fn plain(
        device: &DeviceKind,
        mode: NumericsMode,
        activations: Activations,
        kv_dtype: KvDtype,
        weights: [u8; 32],
    ) -> Numerics<'_> {
        let (device_class, architecture) = (device.class(), device.architecture());
        Numerics { device_class, architecture, mode, activations, kv_dtype, weights, quantization: "none" }
    }

    pub fn digest(&self) -> PolicyDigest {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 numeric policy");
        hasher.update(&Self::VERSION.to_le_bytes());
        let mut add = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        let (activations, kv_dtype) = (self.activations.name(), self.kv_dtype.name_in_digest());
        [self.device_class.name(), activations, kv_dtype, self.quantization].into_iter().for_each(&mut add);
        // Processors have neither: their digests stay the same as before these fields existed.
        if self.device_class == DeviceClass::Cuda {
            [self.architecture, self.mode.name()].into_iter().for_each(&mut add);
        }
        hasher.update(&self.weights);
        PolicyDigest(*hasher.finalize().as_bytes())
    }
}

impl PolicyDigest {
    /// The digest of a policy after the model was read: `self` covers the configured model, the root its bytes.
    #[must_use]
    pub fn with_weights(self, root: &WeightsRoot) -> PolicyDigest {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 policy over the bytes of the weights");
        hasher.update(&self.0).update(&root.0);
        PolicyDigest(*hasher.finalize().as_bytes())
    }
}

impl fmt::Display for PolicyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(&self.0[..8]).fmt(f)
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
        let digest = |device: &str, mode| {
            let device = device.parse().unwrap();
            Numerics::plain(&device, mode, Activations::Bf16, KvDtype::Bf16, [5; 32]).digest()
        };
        let all = [
            digest("cuda/sm_80", NumericsMode::Lockstep),
            digest("cuda/sm_90", NumericsMode::Lockstep),
            digest("cuda/sm_90", NumericsMode::Fast),
            digest("cpu", NumericsMode::Lockstep),
            digest("sim", NumericsMode::Lockstep),
        ];
        assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");
        let on_cpu = |kv_dtype| {
            Numerics::plain(&DeviceClass::Cpu.into(), NumericsMode::Lockstep, Activations::Int8, kv_dtype, [5; 32])
                .digest()
        };
        assert!(on_cpu(KvDtype::F16) != on_cpu(KvDtype::Int8));
        // Processors are one class and have one mode.
        assert_eq!(digest("cpu/zen4", NumericsMode::Fast), digest("cpu", NumericsMode::Lockstep));
    }

    #[test]
    fn other_bytes_are_another_policy() {
        let meant = PolicyDigest([1; 32]);
        let [a, b] = [2, 3].map(|byte| meant.with_weights(&WeightsRoot([byte; 32])));
        assert!(a != b && a != meant && a != PolicyDigest([4; 32]).with_weights(&WeightsRoot([2; 32])));
    }

    /// Streams move between replicas and releases by these bytes: changing one of them ends every running request.
    #[test]
    fn digests_are_what_they_were() {
        let digest = |device: &str, mode, activations: &str, kv_dtype: &str| {
            let device = device.parse().unwrap();
            let (activations, kv_dtype) = (activations.parse().unwrap(), kv_dtype.parse().unwrap());
            let PolicyDigest(bytes) = Numerics::plain(&device, mode, activations, kv_dtype, [5; 32]).digest();
            alloc::format!("{}", crate::Hex(&bytes))
        };
        assert_eq!(
            digest("cpu", NumericsMode::Lockstep, "int8", "f16"),
            "e64aecaef8882066fc992d09d70dad4db7b211ff41b10ea8c2cd3c089906f74a"
        );
        assert_eq!(
            digest("cpu", NumericsMode::Lockstep, "int8", "int8"),
            "ab5db6cc44c920fa0e5d53d399d052807ca4984987f1d2efb469ff146801345c"
        );
        assert_eq!(
            digest("cuda/sm_90", NumericsMode::Fast, "bf16", "bf16"),
            "5cb391eb33d6b2861658b32c4293bae575275753f89ab7a2406c77b620cb4b88"
        );
        assert_eq!(
            digest("sim", NumericsMode::Lockstep, "f32", "f32"),
            "9826de6afd2e8e136565ea23bd3ce9dda458f0f6cbfa5032bf772a26e0049267"
        );
    }
}
