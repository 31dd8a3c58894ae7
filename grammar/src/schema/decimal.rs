//! Decimal numbers as texts of digits: compared and matched exactly, never rounded.

use crate::words::TextSet;
use serde_json::Number;
use std::cmp::Ordering;

/// A number as its digits: `0.5` is ("0", "5"). Redundant zeros are dropped, and zero has no sign.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Decimal {
    is_negative: bool,
    whole: String,
    part: String,
}

impl Decimal {
    /// A larger exponent is refused: its digits would be written out.
    const EXPONENT_MAX: i32 = 400;

    pub(crate) fn of(number: &Number) -> Option<Decimal> {
        Decimal::read(&number.to_string())
    }

    pub(crate) fn read(text: &str) -> Option<Decimal> {
        let (is_negative, text) = text.strip_prefix('-').map_or((false, text), |text| (true, text));
        let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let exponent: i32 = exponent.trim_start_matches('+').parse().ok()?;
        let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
        if exponent.abs() > Self::EXPONENT_MAX || !(whole.to_owned() + part).bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let (mut whole, mut part) = (whole.to_owned(), part.to_owned());
        for _ in 0..exponent {
            whole.push(if part.is_empty() { '0' } else { part.remove(0) });
        }
        for _ in exponent..0 {
            part.insert(0, whole.pop().unwrap_or('0'));
        }
        let whole = whole.trim_start_matches('0').to_owned();
        let part = part.trim_end_matches('0').to_owned();
        let is_negative = is_negative && !(whole.is_empty() && part.is_empty());
        Some(Decimal { is_negative, whole, part })
    }

    pub(crate) fn is_integer(&self) -> bool {
        self.part.is_empty()
    }

    /// Returns the shortest notation of the number.
    pub(crate) fn shortest_notation(&self) -> String {
        let (sign, whole) =
            (if self.is_negative { "-" } else { "" }, if self.whole.is_empty() { "0" } else { &self.whole });
        if self.part.is_empty() { format!("{sign}{whole}") } else { format!("{sign}{whole}.{}", self.part) }
    }

    fn is_zero(&self) -> bool {
        self.whole.is_empty() && self.part.is_empty()
    }

    /// Returns the digits as one whole number, and how many of them are behind the point.
    pub(crate) fn to_scaled_integer(&self) -> Option<(u64, usize)> {
        (self.whole.clone() + &self.part).parse().ok().map(|digits| (digits, self.part.len()))
    }

    /// Whether this is a multiple of another number, to compare automata with. None where the numbers are too large to
    /// decide.
    #[cfg(test)]
    pub(crate) fn is_multiple_of(&self, of: &Decimal) -> Option<bool> {
        let places = self.part.len().max(of.part.len());
        let scaled = |of: &Decimal| -> Option<u128> {
            let digits = of.whole.clone() + &of.part + &"0".repeat(places - of.part.len());
            if digits.is_empty() { Some(0) } else { digits.parse().ok() }
        };
        let by = scaled(of)?;
        if by == 0 {
            return None;
        }
        // Digit by digit, as the number may be longer than any type.
        let digits = self.whole.clone() + &self.part + &"0".repeat(places - self.part.len());
        let rest = digits
            .bytes()
            .try_fold(0u128, |rest, digit| Some(rest.checked_mul(10)?.checked_add(u128::from(digit - b'0'))? % by));
        rest.map(|rest| rest == 0)
    }

    /// All notations of this number.
    pub(crate) fn words(&self) -> TextSet {
        let sign = if self.is_negative { "-" } else { "" };
        let whole = if self.whole.is_empty() { "0" } else { &self.whole };
        TextSet::regex(match self.part.is_empty() {
            true => format!("{sign}{whole}(?:\\.0+)?"),
            false => format!("{sign}{whole}\\.{}0*", self.part),
        })
    }

    /// All larger numbers among those that `number_words` has.
    pub(crate) fn larger_numbers(&self, or_equal: bool) -> TextSet {
        let positive = || TextSet::regex("[0-9.]+");
        if self.is_negative {
            let nearer = TextSet::not(TextSet::regex(format!("-(?:{})", self.magnitude_above(!or_equal))));
            return TextSet::Any(vec![positive(), TextSet::All(vec![TextSet::regex("-[0-9.]+"), nearer])]);
        }
        match self.is_zero() {
            true if or_equal => positive(),
            true => TextSet::All(vec![positive(), TextSet::not(TextSet::regex("[0.]+"))]),
            false => TextSet::regex(self.magnitude_above(or_equal)),
        }
    }

    /// The digits of magnitudes above this one's.
    fn magnitude_above(&self, or_equal: bool) -> String {
        const PART: &str = "(?:\\.[0-9]+)?";
        let n = self.whole.len();
        let mut ways = vec![format!("[1-9][0-9]{{{n},}}{PART}")];
        for (i, digit) in self.whole.bytes().enumerate().filter(|(_, digit)| *digit < b'9') {
            let (same, left) = (&self.whole[..i], n - i - 1);
            ways.push(format!("{same}[{}-9][0-9]{{{left}}}{PART}", (digit + 1) as char));
        }
        let whole = if n == 0 { "0" } else { &self.whole };
        for (i, digit) in self.part.bytes().enumerate().filter(|(_, digit)| *digit < b'9') {
            ways.push(format!("{whole}\\.{}[{}-9][0-9]*", &self.part[..i], (digit + 1) as char));
        }
        ways.push(match (self.part.is_empty(), or_equal) {
            (true, true) => format!("{whole}{PART}"),
            (true, false) => format!("{whole}\\.[0-9]*[1-9][0-9]*"),
            (false, true) => format!("{whole}\\.{}[0-9]*", self.part),
            (false, false) => format!("{whole}\\.{}[0-9]*[1-9][0-9]*", self.part),
        });
        ways.join("|")
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Decimal) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Decimal) -> Ordering {
        let magnitude = |a: &Decimal, b: &Decimal| {
            a.whole.len().cmp(&b.whole.len()).then_with(|| a.whole.cmp(&b.whole)).then_with(|| a.part.cmp(&b.part))
        };
        match (self.is_negative, other.is_negative) {
            (false, false) => magnitude(self, other),
            (true, true) => magnitude(other, self),
            (true, false) => Ordering::Less,
            (false, true) => Ordering::Greater,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_above_a_bound_are_those_that_compare_so() {
        let texts =
            ["0", "1", "-1", "0.5", "-0.5", "0.05", "9", "10", "10.0", "10.01", "99", "100", "-10", "-9.99", "3.0"];
        for bound in ["0", "0.5", "-0.5", "10", "-10", "9.99", "99", "3"] {
            let bound = Decimal::read(bound).unwrap();
            for text in texts {
                let number = Decimal::read(text).unwrap();
                assert_eq!(
                    bound.larger_numbers(true).has(text, 10_000).unwrap(),
                    number >= bound,
                    "{text} >= {bound:?}"
                );
                assert_eq!(
                    bound.larger_numbers(false).has(text, 10_000).unwrap(),
                    number > bound,
                    "{text} > {bound:?}"
                );
                assert_eq!(bound.words().has(text, 10_000).unwrap(), number == bound, "{text} == {bound:?}");
            }
        }
    }

    #[test]
    fn exponents_are_written_out() {
        for (text, same) in [("1e2", "100"), ("1.5e-3", "0.0015"), ("12e-1", "1.2"), ("-0.0", "0"), ("1E+1", "10")] {
            assert_eq!(Decimal::read(text), Decimal::read(same), "{text}");
        }
        assert_eq!(Decimal::read("1e999"), None);
    }

    #[test]
    fn multiples_are_exact() {
        let cases = [("35", "1.5", false), ("4.5", "1.5", true), ("0.0075", "0.0001", true), ("0", "7", true)];
        for (number, of, expect) in cases {
            let (number, of) = (Decimal::read(number).unwrap(), Decimal::read(of).unwrap());
            assert_eq!(number.is_multiple_of(&of), Some(expect), "{number:?} {of:?}");
        }
    }
}
