//! Base64 (RFC 4648, section 4), in which vocabularies store bytes. Decoding is strict: no spaces, no missing padding.

/// Returns None if the text is not base64.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let n_padding = text.iter().rev().take(2).take_while(|digit| **digit == b'=').count();
    let digits = &text[..text.len() - n_padding];
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let mut bits = 0;
        for digit in group {
            bits = bits << 6 | value_of(*digit)?;
        }
        // A group of n digits holds n - 1 bytes. The bits behind them must be zero, so that no two texts are equal.
        let n_spare = group.len() * 6 - (group.len() - 1) * 8;
        if bits & ((1 << n_spare) - 1) != 0 {
            return None;
        }
        bytes.extend_from_slice(&(bits >> n_spare).to_be_bytes()[5 - group.len()..]);
    }
    Some(bytes)
}

pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().chain([&0; 3]).take(3).fold(0, |bits, byte| bits << 8 | usize::from(*byte));
        for i in 0..4 {
            text.push(if i <= group.len() { char::from(DIGITS[bits >> (18 - 6 * i) & 63]) } else { '=' });
        }
    }
    text
}

fn value_of(digit: u8) -> Option<u32> {
    Some(u32::from(match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::{decode, encode};

    #[test]
    fn decodes_and_encodes_the_examples_of_the_standard() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmE=", "fooba"),
            ("Zm9vYmFy", "foobar"),
        ] {
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()), "{text}");
            assert_eq!(encode(bytes.as_bytes()), text);
        }
        assert_eq!(decode("+/+/").unwrap(), [0xfb, 0xff, 0xbf]);
    }

    #[test]
    fn refuses_what_is_not_base64() {
        for text in
            ["Z", "Zg", "Zg=", "Zh==", "Zm9=", "=", "====", "Z===", "Zg==Zg==", "Zm 9", "Zm9v\n", "Zm9é", "_-_-"]
        {
            assert_eq!(decode(text), None, "{text:?}");
        }
    }
}
