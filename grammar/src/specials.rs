//! Texts that are a single special token in some vocabularies. A description names them by text in lines before its
//! rules, and the worker's vocabulary resolves them.

use crate::Vocabulary;
use std::fmt::Write;

/// `special_0`, `special_1`, ..: rules that a description uses, and that are defined when the vocabulary is known.
#[derive(Default)]
pub(crate) struct SpecialTexts(Vec<String>);

const MARK: &str = "// special ";

impl SpecialTexts {
    /// Returns the name of the rule for a text.
    pub(crate) fn rule(&mut self, text: &str) -> String {
        let known = self.0.iter().position(|other| other == text);
        let index = known.unwrap_or_else(|| {
            self.0.push(text.to_owned());
            self.0.len() - 1
        });
        format!("special_{index}")
    }

    /// Returns the description: the named texts, an empty line, and the rules.
    pub(crate) fn describe(&self, rules: &str) -> String {
        let mut text = String::new();
        for special in &self.0 {
            _ = writeln!(text, "{MARK}{}", serde_json::Value::from(special.as_str()));
        }
        text + "\n" + rules
    }
}

/// Returns the Lark text of a description. Each text that it names becomes a rule: the token of that text where the
/// vocabulary has one, or else its bytes.
pub(crate) fn resolve(description: &str, vocabulary: Option<&Vocabulary>) -> Option<String> {
    let (head, rules) = match description.strip_prefix('\n') {
        Some(rules) => ("", rules),
        None => description.split_once("\n\n")?,
    };
    let mut text = rules.to_owned();
    for (i, line) in head.lines().enumerate() {
        let special: String = serde_json::from_str(line.strip_prefix(MARK)?).ok()?;
        _ = write!(text, "\nspecial_{i}: {}", crate::lark::literal(&special));
        if let Some(token) = vocabulary.and_then(|vocabulary| vocabulary.special(&special)) {
            _ = write!(text, " | <[{token}]>");
        }
    }
    Some(text)
}
