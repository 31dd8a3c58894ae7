//! Prompts that request the text between two texts, with the model's own tokens for that. Has no knowledge of pages.

use checkpoint::Tokenizer;
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::frontend::Frontend;
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use std::sync::Arc;
use types::{Token, Tokens};

/// How models spell the tokens before the prefix, the suffix and the answer.
const SPELLINGS: [[&str; 3]; 5] = [
    // Qwen 2.5 Coder, CodeGemma.
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // StarCoder.
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // Code Llama.
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    // DeepSeek Coder.
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
];
/// How models spell the token before a file's name.
const FILE_SPELLINGS: [&str; 2] = ["<|file_sep|>", "<file_sep>"];

/// An arbitrary text, which shows whether the tokenizer puts a token before a text.
const BEGINS: &str = "a";

/// Two texts, and the known beginning of the text between them.
#[derive(Default)]
pub struct Infill {
    /// Other files, each with its name.
    pub files: Vec<(String, String)>,
    pub before: String,
    pub after: String,
    /// How the text between them begins.
    pub begun: String,
}

impl Infill {
    fn n_bytes(&self) -> usize {
        let files = self.files.iter().map(|(name, text)| name.len() + text.len());
        files.sum::<usize>() + self.before.len() + self.after.len() + self.begun.len()
    }
}

/// Returns the prompt's tokens. `field` is the page's name for the text after the gap.
pub async fn prompt(
    front: &Frontend,
    text: &Arc<ModelText>,
    infill: Infill,
    field: &'static str,
) -> Result<Input, Refusal> {
    let none = || Refusal::invalid(field, "the model has no fill-in-the-middle tokens");
    let marks = InfillTokens::of(&text.tokenizer).ok_or_else(none)?;
    let text = text.clone();
    let tokens = front.texts.off_runtime(infill.n_bytes(), move || marks.build_prompt(&text, &infill)).await?;
    let broken = |error: checkpoint::Error| Refusal::invalid(field, format!("cannot be tokenized: {error}"));
    Ok(Input::TokenIds(v1::TokenIds { ids: tokens.map_err(broken)? }))
}

/// Whether a model supports this.
pub fn supports_infill(text: &ModelText) -> bool {
    InfillTokens::of(&text.tokenizer).is_some()
}

/// The tokens of one spelling. The model has all of them.
struct InfillTokens {
    prefix: Token,
    suffix: Token,
    middle: Token,
    file: Option<Token>,
}

impl InfillTokens {
    fn of(tokenizer: &Tokenizer) -> Option<InfillTokens> {
        let file = FILE_SPELLINGS.iter().find_map(|name| tokenizer.added_token(name));
        SPELLINGS.iter().find_map(|[prefix, suffix, middle]| {
            Some(InfillTokens {
                prefix: tokenizer.added_token(prefix)?,
                suffix: tokenizer.added_token(suffix)?,
                middle: tokenizer.added_token(middle)?,
                file,
            })
        })
    }

    /// `files · prefix mark · before · suffix mark · after · middle mark · begun`
    fn build_prompt(&self, text: &ModelText, infill: &Infill) -> checkpoint::Result<Tokens> {
        let tokenizer = &text.tokenizer;
        let mut tokens = Tokens::new();
        // If the tokenizer puts this token before a text, it also belongs before these tokens.
        let begins = tokenizer.encode(BEGINS, true)?;
        tokens.extend(text.spec.bos.filter(|bos| begins.first() == Some(bos)));
        for (name, text) in &infill.files {
            tokens.extend(self.file);
            tokens.extend(tokenizer.encode(&format!("{name}\n{text}\n"), false)?);
        }
        tokens.push(self.prefix);
        tokens.extend(tokenizer.encode(&infill.before, false)?);
        tokens.push(self.suffix);
        tokens.extend(tokenizer.encode(&infill.after, false)?);
        tokens.push(self.middle);
        tokens.extend(tokenizer.encode(&infill.begun, false)?);
        Ok(tokens)
    }
}
