//! The bytes of each token, and which are control tokens. Knows the two alphabets in which vocabularies are written.

use crate::error::ParseError;
use types::Token;

/// Larger than any vocabulary: an id determines the size of tables.
pub(super) const VOCAB_MAX: usize = 1 << 22;

/// The bytes of all tokens in one run: `bytes[starts[id]..starts[id + 1]]` is token `id`.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    starts: Vec<u32>,
    special: Vec<bool>,
    spelling: Spelling,
}

/// The alphabet of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// A printable character for each byte, as in GPT-2.
    ByteLevel,
    /// Text with `▁` for a space, and `<0x0A>` for a byte that has no text.
    SentencePiece,
    /// Text with `##` before a part inside of a word.
    WordPiece,
}

/// Marks a part inside of a word.
pub(super) const INSIDE_OF_WORD: &str = "##";

impl TokenBytes {
    /// Takes the tokens in the order of their ids.
    pub fn collect(
        spelling: Spelling,
        tokens: impl Iterator<Item = (Vec<u8>, bool)>,
    ) -> Result<TokenBytes, ParseError> {
        let mut pieces = TokenBytes { bytes: Vec::new(), starts: vec![0], special: Vec::new(), spelling };
        for (bytes, special) in tokens {
            pieces.bytes.extend_from_slice(&bytes);
            let Ok(end) = u32::try_from(pieces.bytes.len()) else {
                return ParseError::malformed("a vocabulary of more than 4 GiB");
            };
            pieces.starts.push(end);
            pieces.special.push(special);
        }
        Ok(pieces)
    }

    pub fn len(&self) -> usize {
        self.special.len()
    }

    pub fn bytes(&self, id: Token) -> &[u8] {
        let id = id as usize;
        if id < self.len() { &self.bytes[self.starts[id] as usize..self.starts[id + 1] as usize] } else { &[] }
    }

    pub fn is_special(&self, id: Token) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// A token as its vocabulary writes it.
    pub fn spelled(&self, id: Token) -> String {
        let bytes = self.bytes(id);
        match (self.spelling, std::str::from_utf8(bytes)) {
            (_, Ok(text)) if self.is_special(id) => text.to_owned(),
            (Spelling::ByteLevel, _) => spell_bytes(bytes),
            (Spelling::SentencePiece, Ok(text)) if !text.contains(|c: char| c.is_ascii_control()) => {
                text.replace(' ', "▁")
            }
            (Spelling::WordPiece, text) => {
                let text = text.unwrap_or_default();
                text.strip_prefix(' ').map_or_else(|| format!("{INSIDE_OF_WORD}{text}"), str::to_owned)
            }
            // Bytes that are no text have tokens of their own.
            (Spelling::SentencePiece, _) => bytes.iter().map(|byte| format!("<0x{byte:02X}>")).collect(),
        }
    }
}

impl Spelling {
    pub fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Spelling::ByteLevel => {
                let mut bytes = Vec::with_capacity(token.len());
                for character in token.chars() {
                    match byte_of(character) {
                        Some(byte) => bytes.push(byte),
                        None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
                bytes
            }
            Spelling::SentencePiece => match byte_token(token) {
                Some(byte) => vec![byte],
                None => token.replace('▁', " ").into_bytes(),
            },
            Spelling::WordPiece => match token.strip_prefix(INSIDE_OF_WORD) {
                Some(part) if !part.is_empty() => part.as_bytes().to_vec(),
                _ => format!(" {token}").into_bytes(),
            },
        }
    }
}

/// The byte that a token such as `<0x0A>` names.
fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// GPT-2's alphabet: printable bytes are themselves, and the 68 others follow from U+0100 on, in order.
fn byte_of(character: char) -> Option<u8> {
    const PRINTABLE: [std::ops::RangeInclusive<u32>; 3] = [0x21..=0x7E, 0xA1..=0xAC, 0xAE..=0xFF];
    let code = u32::from(character);
    if PRINTABLE.iter().any(|range| range.contains(&code)) {
        return u8::try_from(code).ok();
    }
    match code.checked_sub(0x100)? {
        i @ 0..=0x20 => Some(i as u8),
        i @ 0x21..=0x42 => Some((i - 0x21 + 0x7F) as u8),
        0x43 => Some(0xAD),
        _ => None,
    }
}

/// The inverse: the spelling of a byte.
fn character_of(byte: u8) -> char {
    let code = match byte {
        0..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x100 + 0x21 + u32::from(byte) - 0x7F,
        0xAD => 0x143,
        printable => u32::from(printable),
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Bytes as a byte-level vocabulary writes them.
pub(super) fn spell_bytes(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| character_of(*byte)).collect()
}

/// Returns the bytes without a token in a byte-level vocabulary, in its spelling. Some small models lack a few control
/// characters. Merging requires all 256, so these get ids behind the last, which are dropped from its output.
pub(super) fn missing_bytes(known: impl Fn(&str) -> bool) -> Vec<String> {
    (0..=255).map(|byte| character_of(byte).to_string()).filter(|text| !known(text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        assert!((0..=255).all(|byte| byte_of(character_of(byte)) == Some(byte)));
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn a_token_is_spelled_as_it_was_read() {
        for (spelling, texts) in [
            (Spelling::ByteLevel, ["Ġthe", "Ċ", "Ã©", "<|im_end|>"]),
            (Spelling::SentencePiece, ["▁the", "<0xC3>", "<0x0A>", "</s>"]),
        ] {
            let special = |text: &str| text.starts_with("<|") || text == "</s>";
            let read = |text: &str| if special(text) { text.into() } else { spelling.bytes(text) };
            let pieces = TokenBytes::collect(spelling, texts.iter().map(|text| (read(text), special(text)))).unwrap();
            assert!((0..).zip(texts).all(|(id, text)| pieces.spelled(id) == text), "{spelling:?}");
        }
    }

    #[test]
    fn spellings() {
        assert_eq!(Spelling::ByteLevel.bytes("ĠtheĊ"), b" the\n");
        assert_eq!(Spelling::ByteLevel.bytes("Ã©"), "é".as_bytes());
        assert_eq!(Spelling::SentencePiece.bytes("▁the"), b" the");
        assert_eq!(Spelling::SentencePiece.bytes("<0x0A>"), b"\n");
        assert_eq!(Spelling::SentencePiece.bytes("<0x0AB>"), b"<0x0AB>");
    }
}
