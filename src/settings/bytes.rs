//! Sizes in bytes, in the notation that people use.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ByteSize(pub u64);

impl std::str::FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| format!("{text:?} does not start with a whole number"))?;
        let scale: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" | "K" => 1 << 10,
            "MiB" | "M" => 1 << 20,
            "GiB" | "G" => 1 << 30,
            "TiB" | "T" => 1 << 40,
            other => return Err(format!("{other:?} is not a unit of bytes: use KiB, MiB, GiB or TiB")),
        };
        number.checked_mul(scale).map(ByteSize).ok_or_else(|| format!("{text} is too large"))
    }
}

impl TryFrom<String> for ByteSize {
    type Error = String;

    fn try_from(text: String) -> Result<ByteSize, String> {
        text.parse()
    }
}

impl From<ByteSize> for String {
    fn from(bytes: ByteSize) -> String {
        bytes.to_string()
    }
}

impl std::fmt::Display for ByteSize {
    /// Prints in the largest unit that is exact, so that the value can be parsed again.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        let exact = units.iter().find(|(bits, _)| self.0 != 0 && self.0.is_multiple_of(1 << bits));
        match exact {
            Some((bits, unit)) => write!(f, "{}{unit}", self.0 >> bits),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_bytes(text: &str, expect: Result<u64, &str>) {
        let got = text.parse::<ByteSize>().map(|bytes| bytes.0);
        match expect {
            Ok(bytes) => assert_eq!(got, Ok(bytes), "{text}"),
            Err(part) => assert!(got.clone().is_err_and(|e| e.contains(part)), "{text}: {got:?}"),
        }
    }

    #[test]
    fn bytes_are_read_as_people_write_them() {
        check_bytes("512MiB", Ok(512 << 20));
        check_bytes("4G", Ok(4 << 30));
        check_bytes("17", Ok(17));
        check_bytes("many", Err("whole number"));
        check_bytes("4Gb", Err("not a unit"));
        check_bytes("99999999TiB", Err("too large"));
        assert_eq!(ByteSize(1536 << 20).to_string(), "1536MiB");
        assert_eq!(ByteSize(3 << 30).to_string(), "3GiB");
    }
}
