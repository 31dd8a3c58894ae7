//! The named pre-tokenizers of byte-level vocabularies: how a text is cut before merging. An unknown name is refused,
//! because a guess would give other ids.

use serde_json::{Value, json};
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pipeline::PipelinePreTokenizer;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::PipelineSequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
pub(super) const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
pub(super) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const CJK: &str = "[一-龥ࠀ-一가-\u{d7ff}]+";
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
);
/// The letters that have two cases.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ",
    r"Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u{1f7d}",
    r"ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ",
    r"Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⲳⳳⳲꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ\u{10400}-\u{1044f}𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
);
const FINNISH: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// A step of cutting, applied to each piece from the previous step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PretokenizerStep {
    /// Each digit becomes a piece.
    Digits,
    /// Each match becomes a piece, and so does the text between two.
    Regex(&'static str),
}

/// How a text is cut, and what else the name implies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PretokenizerRecipe {
    cuts: &'static [PretokenizerStep],
    /// Characters are first normalised to NFC.
    pub nfc: bool,
    /// A piece that is itself a token is not merged.
    pub ignore_merges: bool,
    /// The default if the file does not set it.
    pub add_bos: bool,
}

const fn plain(cuts: &'static [PretokenizerStep]) -> PretokenizerRecipe {
    PretokenizerRecipe { cuts, nfc: false, ignore_merges: false, add_bos: false }
}

/// The recipe of a value of `tokenizer.ggml.pre`.
pub(super) fn recipe(pre: &str) -> Option<PretokenizerRecipe> {
    use PretokenizerStep::{Digits, Regex};
    const DIGITS: &[PretokenizerStep] = &[Digits, Regex(GPT2)];
    Some(match pre {
        "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "roberta-bpe" | "trillion" | "gigachat" => {
            plain(&[Regex(GPT2)])
        }
        "smollm" | "starcoder" | "refact" | "codeshell" | "exaone" | "minerva-7b" => plain(DIGITS),
        "command-r" => PretokenizerRecipe { nfc: true, ..plain(DIGITS) },
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            PretokenizerRecipe { ignore_merges: true, add_bos: true, ..plain(&[Regex(LLAMA3)]) }
        }
        "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" => plain(&[Regex(LLAMA3)]),
        "qwen2" | "deepseek-r1-qwen" | "megrez" => PretokenizerRecipe { nfc: true, ..plain(&[Regex(QWEN2)]) },
        "stablelm2" => plain(&[Regex(QWEN2)]),
        "tekken" => PretokenizerRecipe { ignore_merges: true, add_bos: true, ..plain(&[Regex(TEKKEN)]) },
        "gpt-4o" | "llama4" => plain(&[Regex(GPT4O)]),
        "deepseek-llm" => plain(&[
            Regex("[\r\n]"),
            Regex(DEEPSEEK_LETTERS),
            Regex(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            Regex(r"\s+$"),
            Regex(CJK),
            Regex(r"\p{N}+"),
        ]),
        "deepseek-coder" => plain(&[Regex("[\r\n]"), Regex(r"\s?\p{L}+"), Regex(r"\s?\p{P}+"), Regex(CJK), Digits]),
        "deepseek-v3" | "hunyuan-dense" => {
            plain(&[Regex(r"\p{N}{1,3}"), Regex("[一-龥\u{3040}-ゟ゠-ヿ]+"), Regex(DEEPSEEK_V3)])
        }
        "falcon" => plain(&[Regex(r"[\p{P}\$\+<=>\^~\|`]+"), Regex(GPT2), Regex("[0-9][0-9][0-9]")]),
        "bloom" | "poro-chat" | "gpt3-finnish" => plain(&[Regex(FINNISH)]),
        "viking" => plain(&[Regex(FINNISH), Digits]),
        _ => return None,
    })
}

impl PretokenizerRecipe {
    /// The cuts in the form of `tokenizer.json`.
    pub fn cuts_as_json(self) -> Vec<Value> {
        let cut = |cut: &PretokenizerStep| match cut {
            PretokenizerStep::Digits => json!({ "type": "Digits", "individual_digits": true }),
            PretokenizerStep::Regex(regex) => {
                json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
            }
        };
        self.cuts.iter().map(cut).collect()
    }

    pub fn pre_tokenizer(self) -> tokenizers::Result<PipelinePreTokenizer> {
        let cut = |cut: &PretokenizerStep| {
            Ok(match cut {
                PretokenizerStep::Digits => PipelinePreTokenizer::Digits(Digits::new(true)),
                PretokenizerStep::Regex(regex) => {
                    let pattern = SplitPattern::Regex((*regex).to_owned());
                    PipelinePreTokenizer::Split(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?)
                }
            })
        };
        let mut cuts = self.cuts.iter().map(cut).collect::<tokenizers::Result<Vec<_>>>()?;
        match (cuts.pop(), cuts.is_empty()) {
            (Some(only), true) => Ok(only),
            (Some(last), false) => {
                cuts.push(last);
                Ok(PipelinePreTokenizer::Sequence(PipelineSequence::new(cuts)))
            }
            (None, _) => Ok(PipelinePreTokenizer::None),
        }
    }
}
