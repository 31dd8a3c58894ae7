//! A part of a memory, with the range of vLLM's `--gpu-memory-utilization`: above 0, and at most 1.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct MemoryPart(u16);

impl MemoryPart {
    pub fn permille(self) -> u16 {
        self.0
    }
}

impl TryFrom<f64> for MemoryPart {
    type Error = String;

    fn try_from(part: f64) -> Result<MemoryPart, String> {
        let permille = (part * 1000.0).round();
        if !(1.0..=1000.0).contains(&permille) {
            return Err(format!("{part} is out of range: give a part of the memory from 0.001 to 1"));
        }
        Ok(MemoryPart(permille as u16))
    }
}

impl From<MemoryPart> for f64 {
    fn from(part: MemoryPart) -> f64 {
        f64::from(part.0) / 1000.0
    }
}

impl std::str::FromStr for MemoryPart {
    type Err = String;

    fn from_str(text: &str) -> Result<MemoryPart, String> {
        text.parse::<f64>().map_err(|_| format!("{text:?} is not a number"))?.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_above_nothing_and_at_most_all() {
        for (text, permille) in [("0.9", 900), ("1", 1000), (".001", 1), ("0.8504", 850)] {
            assert_eq!(text.parse(), Ok(MemoryPart(permille)), "{text}");
        }
        for text in ["0", "-0.5", "1.1", "90", "NaN", "inf", "half", ""] {
            assert!(text.parse::<MemoryPart>().is_err(), "{text}");
        }
        assert_eq!(f64::from(MemoryPart(850)), 0.85);
    }
}
