//! The type of the KV cache, or that the device determines it.

use std::fmt;
use std::str::FromStr;
use types::{DeviceClass, KvDtype, UnknownWord};

/// The value of `--kv-dtype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvChoice {
    /// Determined by the class of the device alone. A choice by free memory would make another policy on each machine,
    /// and streams could not move between them.
    #[default]
    Auto,
    Of(KvDtype),
}

impl KvChoice {
    pub const ALL: &[KvChoice] = &[
        KvChoice::Auto,
        KvChoice::Of(KvDtype::F16),
        KvChoice::Of(KvDtype::F32),
        KvChoice::Of(KvDtype::Int8),
        KvChoice::Of(KvDtype::Bf16),
    ];

    pub fn name(self) -> &'static str {
        match self {
            KvChoice::Auto => "auto",
            KvChoice::Of(dtype) => dtype.name(),
        }
    }

    pub fn on(self, class: DeviceClass) -> KvDtype {
        match (self, class) {
            (KvChoice::Of(dtype), _) => dtype,
            (KvChoice::Auto, DeviceClass::Cuda) => KvDtype::Bf16,
            (KvChoice::Auto, DeviceClass::Cpu | DeviceClass::Sim) => KvDtype::F16,
        }
    }
}

impl fmt::Display for KvChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvChoice {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<KvChoice, UnknownWord> {
        if word == KvChoice::Auto.name() { Ok(KvChoice::Auto) } else { word.parse().map(KvChoice::Of) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_word_and_auto_is_one_of_them() {
        let of_types = KvDtype::ALL.iter().map(|dtype| KvChoice::Of(*dtype));
        assert_eq!(KvChoice::ALL.to_vec(), [KvChoice::Auto].into_iter().chain(of_types).collect::<Vec<_>>());
        for choice in KvChoice::ALL {
            assert_eq!(choice.to_string().parse(), Ok(*choice));
            let is_open = *choice == KvChoice::Auto;
            assert_eq!(choice.on(DeviceClass::Cpu) == choice.on(DeviceClass::Cuda), !is_open);
        }
    }
}
