//! The type of the KV cache, or that the device determines it.

use std::fmt;
use std::str::FromStr;
use types::{DeviceClass, KvDtype, UnknownWord};

/// The value of `--kv-dtype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDtypeChoice {
    /// Determined by the class of the device alone. A choice by free memory would make another policy on each machine,
    /// and streams could not move between them.
    #[default]
    Auto,
    Of(KvDtype),
}

impl KvDtypeChoice {
    pub const ALL: &[KvDtypeChoice] = &[
        KvDtypeChoice::Auto,
        KvDtypeChoice::Of(KvDtype::F16),
        KvDtypeChoice::Of(KvDtype::F32),
        KvDtypeChoice::Of(KvDtype::Int8),
        KvDtypeChoice::Of(KvDtype::Bf16),
    ];

    pub fn name(self) -> &'static str {
        match self {
            KvDtypeChoice::Auto => "auto",
            KvDtypeChoice::Of(dtype) => dtype.name(),
        }
    }

    pub fn dtype_on(self, class: DeviceClass) -> KvDtype {
        match (self, class) {
            (KvDtypeChoice::Of(dtype), _) => dtype,
            (KvDtypeChoice::Auto, DeviceClass::Cuda) => KvDtype::Bf16,
            (KvDtypeChoice::Auto, DeviceClass::Cpu | DeviceClass::Sim) => KvDtype::F16,
        }
    }
}

impl fmt::Display for KvDtypeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvDtypeChoice {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<KvDtypeChoice, UnknownWord> {
        if word == KvDtypeChoice::Auto.name() { Ok(KvDtypeChoice::Auto) } else { word.parse().map(KvDtypeChoice::Of) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_word_and_auto_is_one_of_them() {
        let of_types = KvDtype::ALL.iter().map(|dtype| KvDtypeChoice::Of(*dtype));
        assert_eq!(KvDtypeChoice::ALL.to_vec(), [KvDtypeChoice::Auto].into_iter().chain(of_types).collect::<Vec<_>>());
        for choice in KvDtypeChoice::ALL {
            assert_eq!(choice.to_string().parse(), Ok(*choice));
            let is_open = *choice == KvDtypeChoice::Auto;
            assert_eq!(choice.dtype_on(DeviceClass::Cpu) == choice.dtype_on(DeviceClass::Cuda), !is_open);
        }
    }
}
