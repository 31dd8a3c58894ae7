//! A small vocabulary, and texts through matchers.

use grammar::{GrammarLimits, GrammarRefused, GrammarSpec, Matcher, TokenMask, Vocabulary, compile};
use types::{Grammar, Token};

/// Every byte is token 0 to 255; then words, two special tokens, and the end.
pub const WORDS: &[&str] = &["the", "true", "null", "{\"", "\":", "\", \"", "  ", "name", "ab", "abc"];
pub const TOOL: Token = 256 + 10;
pub const END: Token = TOOL + 2;
pub const N_VOCAB: usize = END as usize + 11;

pub fn vocabulary() -> Vocabulary {
    let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let words = WORDS.iter().map(|word| word.as_bytes().to_vec());
    let plain: Vec<(Vec<u8>, bool)> = bytes.into_iter().chain(words).map(|word| (word, false)).collect();
    let special = ["<tool_call>", "</tool_call>", "<|end|>"].map(|text| (text.as_bytes().to_vec(), true));
    let all: Vec<(Vec<u8>, bool)> = plain.into_iter().chain(special).collect();
    Vocabulary::new(all.iter().map(|(word, special)| (word.as_slice(), *special)), N_VOCAB, &[END]).unwrap()
}

pub fn compiled(spec: &GrammarSpec) -> Result<Grammar, GrammarRefused> {
    compile(spec, &GrammarLimits::default())
}

pub fn matcher(vocabulary: &Vocabulary, spec: &GrammarSpec) -> Matcher {
    Matcher::new(vocabulary, &compiled(spec).unwrap(), &GrammarLimits::default()).unwrap()
}

/// Whether the bytes, one token each, are a complete answer. Each is looked up in the mask before it is taken.
pub fn takes(vocabulary: &Vocabulary, grammar: &Grammar, text: &str) -> bool {
    let mut matcher = Matcher::new(vocabulary, grammar, &GrammarLimits::default()).unwrap();
    let mut mask = TokenMask::default();
    for byte in text.bytes() {
        matcher.fill_mask(&mut mask).unwrap();
        let is_allowed = mask.allows(Token::from(byte));
        assert_eq!(matcher.accept(Token::from(byte)).is_ok(), is_allowed, "{text:?} at {byte}");
        if !is_allowed {
            return false;
        }
    }
    matcher.fill_mask(&mut mask).unwrap();
    assert_eq!(mask.allows(END), matcher.is_complete().unwrap(), "{text:?}");
    mask.allows(END)
}

/// `yes` are answers, `no` are not.
pub fn check(spec: &GrammarSpec, yes: &[&str], no: &[&str]) {
    let vocabulary = vocabulary();
    let grammar = compiled(spec).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
    let cases = yes.iter().map(|text| (text, true)).chain(no.iter().map(|text| (text, false)));
    for (text, expect) in cases {
        assert_eq!(takes(&vocabulary, &grammar, text), expect, "{spec:?} and {text:?}");
    }
}
