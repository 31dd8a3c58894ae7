//! The choices of the numeric policy, each a closed set of words: the type of activations, the type of K and V, what
//! may choose the order of a sum, the device. Any other word is refused wherever it comes from.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use core::fmt;
use core::str::FromStr;

/// A word that is not in a closed set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not a {of}: use {known}")]
pub struct UnknownWord {
    pub word: String,
    /// The name of the set.
    pub of: &'static str,
    pub known: &'static str,
}

/// The member of `all` that has this name.
fn named<T: Copy>(all: &[T], name: fn(T) -> &'static str, word: &str) -> Option<T> {
    all.iter().copied().find(|member| name(*member) == word)
}

/// The type of activations when they are multiplied by a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// Int8 where the weight is quantized, bf16 where it is bf16; otherwise f32.
    Int8,
    F32,
    /// Only on CUDA.
    Bf16,
}

impl Activations {
    pub const ALL: &[Activations] = &[Activations::Int8, Activations::F32, Activations::Bf16];

    pub const fn name(self) -> &'static str {
        match self {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
            Activations::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Activations {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Activations, UnknownWord> {
        let unknown = || UnknownWord { word: word.to_owned(), of: "type of activations", known: "int8, f32 or bf16" };
        named(Activations::ALL, Activations::name, word).ok_or_else(unknown)
    }
}

/// The type that K and V are stored in, and read back from even by the step that wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    F16,
    F32,
    /// Only on the CPU. Each row of a head has a scale, and keys are turned before they are rounded.
    Int8,
    /// Only on CUDA.
    Bf16,
    /// No device computes with it yet; a simulated datacenter uses it to show what it would save.
    Fp8,
}

impl KvDtype {
    /// The types that some device computes with. No word selects any other.
    pub const ALL: &[KvDtype] = &[KvDtype::F16, KvDtype::F32, KvDtype::Int8, KvDtype::Bf16];

    pub const fn name(self) -> &'static str {
        match self {
            KvDtype::F16 => "f16",
            KvDtype::F32 => "f32",
            KvDtype::Int8 => "int8",
            KvDtype::Bf16 => "bf16",
            KvDtype::Fp8 => "fp8",
        }
    }

    /// The name in the digest of a policy. It differs from the word that selects the type where that word once meant
    /// other bits: int8 once kept keys as they are, and now keeps them turned.
    pub(crate) const fn name_in_digest(self) -> &'static str {
        match self {
            KvDtype::Int8 => "int8, turned",
            _ => self.name(),
        }
    }

    /// The bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            KvDtype::Fp8 | KvDtype::Int8 => 1,
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
        }
    }

    /// The bytes of one position's K or V of a head with `n` numbers. In int8 they are whole lanes, and an f32 scales
    /// them.
    pub const fn row_bytes(self, n: u32) -> u64 {
        match self {
            KvDtype::Int8 => (n as u64).next_multiple_of(16) + 4,
            _ => n as u64 * self.bytes() as u64,
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvDtype {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<KvDtype, UnknownWord> {
        let unknown = || UnknownWord { word: word.to_owned(), of: "KV dtype", known: "f16, int8, bf16 or f32" };
        named(KvDtype::ALL, KvDtype::name, word).ok_or_else(unknown)
    }
}

/// Determines the order of a sum, on devices where there is a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NumericsMode {
    /// The model's shapes alone: the same bits on every grid and in any company.
    #[default]
    Lockstep,
    /// Whatever is fastest.
    Fast,
}

impl NumericsMode {
    pub const ALL: &[NumericsMode] = &[NumericsMode::Lockstep, NumericsMode::Fast];

    pub const fn name(self) -> &'static str {
        match self {
            NumericsMode::Lockstep => "lockstep",
            NumericsMode::Fast => "fast",
        }
    }
}

impl fmt::Display for NumericsMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NumericsMode {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<NumericsMode, UnknownWord> {
        let unknown = || UnknownWord { word: word.to_owned(), of: "mode of numerics", known: "lockstep or fast" };
        named(NumericsMode::ALL, NumericsMode::name, word).ok_or_else(unknown)
    }
}

/// Devices that compute by one contract. Two devices of a class agree in every bit; GPUs only if their architecture is
/// equal too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceClass {
    Cpu,
    Cuda,
    /// No model at all: tokens come from the request's hash.
    Sim,
}

impl DeviceClass {
    pub const ALL: &[DeviceClass] = &[DeviceClass::Cpu, DeviceClass::Cuda, DeviceClass::Sim];

    pub const fn name(self) -> &'static str {
        match self {
            DeviceClass::Cpu => "cpu",
            DeviceClass::Cuda => "cuda",
            DeviceClass::Sim => "sim",
        }
    }
}

/// The device that a worker reports: `cpu`, `sim`, or `cuda/sm_90` with the architecture.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceKind {
    class: DeviceClass,
    name: String,
}

impl DeviceKind {
    /// A GPU of this architecture, as `sm_90`.
    pub fn cuda(architecture: &str) -> DeviceKind {
        DeviceKind { class: DeviceClass::Cuda, name: format!("{}/{architecture}", DeviceClass::Cuda.name()) }
    }

    pub fn class(&self) -> DeviceClass {
        self.class
    }

    /// A GPU's architecture. Empty for processors: no architecture of theirs could change a bit.
    pub fn architecture(&self) -> &str {
        match self.class {
            DeviceClass::Cuda => self.name.split_once('/').map_or("", |(_, architecture)| architecture),
            DeviceClass::Cpu | DeviceClass::Sim => "",
        }
    }
}

impl From<DeviceClass> for DeviceKind {
    fn from(class: DeviceClass) -> DeviceKind {
        DeviceKind { class, name: class.name().to_owned() }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl FromStr for DeviceKind {
    type Err = UnknownWord;

    /// A worker of an older version reports no device, and computes on its processor.
    fn from_str(text: &str) -> Result<DeviceKind, UnknownWord> {
        let word = text.split_once('/').map_or(text, |(class, _)| class);
        let class = match text.is_empty() {
            true => Some(DeviceClass::Cpu),
            false => named(DeviceClass::ALL, DeviceClass::name, word),
        };
        let unknown = || UnknownWord { word: text.to_owned(), of: "device", known: "cpu, cuda/sm_NN or sim" };
        Ok(DeviceKind { class: class.ok_or_else(unknown)?, name: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn check<T: FromStr<Err = UnknownWord> + fmt::Display + PartialEq + fmt::Debug>(all: &[T], wrong: &[&str]) {
        for member in all {
            assert_eq!(member.to_string().parse::<T>().as_ref(), Ok(member));
        }
        for word in wrong {
            let error = word.parse::<T>().unwrap_err().to_string();
            assert!(error.contains(&format!("{word:?}")) && error.contains("use "), "{error}");
        }
    }

    #[test]
    fn words_are_read_as_they_are_written_and_others_refused() {
        check(Activations::ALL, &["", "int4", "INT8", "f16"]);
        check(KvDtype::ALL, &["", "int3", "fp8", "f16 "]);
        check(NumericsMode::ALL, &["", "slow", "Fast"]);
        let kinds = ["cpu", "cpu/zen4", "cuda/sm_90", "sim", ""].map(|text| text.parse::<DeviceKind>().unwrap());
        check(&kinds, &["gpu", "tpu/v5", "Cpu", "/sm_90x/"]);
        let known = kinds.map(|kind| (kind.class(), kind.architecture().to_owned()));
        let [cpu, zen, cuda, sim, old] = &known;
        assert_eq!([cpu, zen, old].map(|kind| (kind.0, kind.1.as_str())), [(DeviceClass::Cpu, ""); 3]);
        assert_eq!((cuda.0, cuda.1.as_str(), sim.0), (DeviceClass::Cuda, "sm_90", DeviceClass::Sim));
    }
}
