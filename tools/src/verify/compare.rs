//! Compares a past answer with the current one of a server, and names the first difference.

use super::answer::{AnsweredChoice, ResponseChoices};
use super::past::PastAnswer;
use super::server::{TokenScore, VerifyClient};
use anyhow::{Context, ensure};
use std::fmt::{self, Display};
use types::{Hex, Token, TokensHash};

/// What a comparison has found.
pub enum Verdict {
    Equal { n_tokens: u64, digest: String },
    Different(Difference),
}

/// The first difference between the answer on record and the present one.
pub enum Difference {
    /// The record has several seeds.
    Seeds(u64, u64),
    Digest {
        recorded: String,
        present: Vec<String>,
    },
    /// The prompt of a choice has other token ids now.
    Prompt {
        choice_idx: usize,
    },
    /// Boxed, because the others are small.
    Token(Box<TokenDifference>),
    /// The texts differ after this many characters.
    Text {
        choice_idx: usize,
        n_chars: usize,
        recorded: String,
        present: String,
    },
    /// A field of a choice, or of its certificate.
    Field {
        choice_idx: usize,
        name: &'static str,
        recorded: String,
        present: String,
    },
}

/// The first position at which the tokens of two answers differ.
pub struct TokenDifference {
    choice_idx: usize,
    position: usize,
    recorded: ShownToken,
    present: ShownToken,
}

/// A token at the position of a difference. None if the answer has ended before.
type ShownToken = Option<(Token, Option<TokenScore>)>;

/// Sends the request again and compares. An error means that there is nothing to compare.
pub fn rerun_and_compare(past: &PastAnswer, server: &VerifyClient) -> anyhow::Result<Verdict> {
    if let [first, second, ..] = past.seeds[..] {
        return Ok(Verdict::Different(Difference::Seeds(first, second)));
    }
    let served = server.digests()?;
    ensure!(!served.is_empty(), "no replica serves");
    let is_served = |digest: &&String| served.iter().any(|served| digests_agree(digest, served));
    if let Some(recorded) = past.answers.digests.iter().find(|digest| !is_served(digest)) {
        return Ok(Verdict::Different(Difference::Digest { recorded: recorded.clone(), present: served }));
    }
    let present = ResponseChoices::read(&server.post(&past.path, &past.rerun_request())?)?;
    let (n_recorded, n_present) = (past.answers.choices.len(), present.choices.len());
    ensure!(n_recorded == n_present, "the response has {n_recorded} choices, and the present answer {n_present}");
    for (choice_idx, (old, new)) in past.answers.choices.iter().zip(&present.choices).enumerate() {
        let parted_by_token = || {
            let mut difference = token_difference(choice_idx, old, new)?;
            difference.score(past, new, server);
            Some(Difference::Token(Box::new(difference)))
        };
        let found = prompt_difference(choice_idx, old, new).or_else(parted_by_token);
        let found =
            found.or_else(|| text_difference(choice_idx, old, new)).or_else(|| field_difference(choice_idx, old, new));
        if let Some(difference) = found {
            return Ok(Verdict::Different(difference));
        }
    }
    let digest = present.choices[0].certificate["policy_digest"].as_str().context("the answer has no certificate")?;
    Ok(Verdict::Equal { n_tokens: present.n_tokens(), digest: digest.to_owned() })
}

/// Whether two digests agree in the digits that both have.
fn digests_agree(a: &str, b: &str) -> bool {
    !a.is_empty() && (a.starts_with(b) || b.starts_with(a))
}

fn prompt_difference(choice_idx: usize, old: &AnsweredChoice, new: &AnsweredChoice) -> Option<Difference> {
    let both = old.prompt_hash().zip(new.prompt_hash());
    both.filter(|(old, new)| old != new).map(|_| Difference::Prompt { choice_idx })
}

fn token_difference(choice_idx: usize, old: &AnsweredChoice, new: &AnsweredChoice) -> Option<TokenDifference> {
    let (old, new) = old.token_ids.as_deref().zip(new.token_ids.as_deref())?;
    let position = first_difference(old.iter(), new.iter())?;
    let at = |ids: &[Token]| ids.get(position).map(|token| (*token, None));
    Some(TokenDifference { choice_idx, position, recorded: at(old), present: at(new) })
}

fn text_difference(choice_idx: usize, old: &AnsweredChoice, new: &AnsweredChoice) -> Option<Difference> {
    const SHOWN_CHARS: usize = 20;
    if old.text.is_empty() && old.token_ids.is_some() {
        // A router's record has no text, and its tokens are enough.
        return None;
    }
    let n_chars = first_difference(old.text.chars(), new.text.chars())?;
    let shown = |text: &str| text.chars().skip(n_chars).take(SHOWN_CHARS).collect();
    Some(Difference::Text { choice_idx, n_chars, recorded: shown(&old.text), present: shown(&new.text) })
}

/// Returns the position at which two sequences differ, or None if they are equal.
fn first_difference<T: PartialEq>(a: impl Iterator<Item = T>, b: impl Iterator<Item = T>) -> Option<usize> {
    let (mut a, mut b) = (a.fuse(), b.fuse());
    for at in 0.. {
        match (a.next(), b.next()) {
            (None, None) => break,
            (a, b) if a != b => return Some(at),
            _ => {}
        }
    }
    None
}

/// Compares how the choices ended, and their certificates. The recorded ids must match the hash in their certificate.
fn field_difference(choice_idx: usize, old: &AnsweredChoice, new: &AnsweredChoice) -> Option<Difference> {
    const FIELDS: [&str; 8] =
        ["version", "policy_digest", "choice", "prompt_hash", "grammar_hash", "answer_hash", "tokens", "finish_reason"];
    let field = |name, recorded, present| Difference::Field { choice_idx, name, recorded, present };
    if let Some((old, new)) = old.finish_reason.as_ref().zip(new.finish_reason.as_ref()).filter(|(a, b)| a != b) {
        return Some(field("finish_reason", old.clone(), new.clone()));
    }
    if let (Some(ids), Some(hash)) = (&new.token_ids, new.certificate["answer_hash"].as_str()) {
        let counted = Hex(&TokensHash::of(ids).0).to_string();
        if counted != hash {
            return Some(field("hash of the present tokens", counted, hash.to_owned()));
        }
    }
    if !old.certificate.is_object() {
        return None;
    }
    let of = |name| (&old.certificate[name], &new.certificate[name]);
    let name = FIELDS.into_iter().find(|name| of(*name).0 != of(*name).1)?;
    Some(field(name, of(name).0.to_string(), of(name).1.to_string()))
}

impl TokenDifference {
    /// Scores both tokens at the first difference. A token that cannot be scored has no score.
    fn score(&mut self, past: &PastAnswer, new: &AnsweredChoice, server: &VerifyClient) {
        let (Some(prompt), Some(ids)) = (&new.prompt_ids, &new.token_ids) else { return };
        let common: Vec<Token> = prompt.iter().chain(&ids[..self.position]).copied().collect();
        for (token, score) in [&mut self.recorded, &mut self.present].into_iter().flatten() {
            let tokens: Vec<Token> = common.iter().copied().chain([*token]).collect();
            *score = server.score(past.model(), &tokens).ok();
        }
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Equal { n_tokens, digest } => write!(f, "equal: {n_tokens} tokens, digest {digest}"),
            Verdict::Different(difference) => write!(f, "different: {difference}"),
        }
    }
}

impl Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Seeds(a, b) => write!(f, "the record contradicts itself: it has the seeds {a} and {b}"),
            Difference::Digest { recorded, present } => {
                write!(f, "the policy digest was {recorded}, and {} is served; nothing was run", present.join(", "))
            }
            Difference::Prompt { choice_idx } => write!(f, "choice {choice_idx}: the prompt has other token ids"),
            Difference::Token(difference) => difference.fmt(f),
            Difference::Text { choice_idx, n_chars, recorded, present } => {
                write!(f, "choice {choice_idx}, character {n_chars}: the text was {recorded:?}, and is {present:?}")
            }
            Difference::Field { choice_idx, name, recorded, present } => {
                write!(f, "choice {choice_idx}: {name} was {recorded}, and is {present}")
            }
        }
    }
}

impl Display for TokenDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TokenDifference { choice_idx, position, recorded, present } = self;
        let (recorded, present) = (format_token(recorded), format_token(present));
        write!(f, "choice {choice_idx}, position {position}: the token was {recorded}, and is {present}")
    }
}

fn format_token(token: &ShownToken) -> String {
    match token {
        None => "none, the answer has ended".to_owned(),
        Some((token, None)) => format!("{token} (it cannot be scored)"),
        Some((token, Some(TokenScore { text, logprob }))) => format!("{token} {text:?} (logprob {logprob:.6})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let check = |a: &str, b: &str, expect| assert_eq!(first_difference(a.chars(), b.chars()), expect, "{a} {b}");
        check("", "", None);
        check("abc", "abc", None);
        check("abc", "abd", Some(2));
        check("abc", "ab", Some(2));
        check("", "a", Some(0));
    }

    #[test]
    fn digests_agree_as_far_as_both_are_written() {
        assert!(digests_agree("0707", "070707") && digests_agree("0707", "0707"));
        assert!(!digests_agree("0708", "070707") && !digests_agree("", "07"));
    }

    fn choice(ids: &[Token], text: &str, certificate: Value) -> AnsweredChoice {
        let finish_reason = Some("stop".to_owned());
        AnsweredChoice {
            text: text.into(),
            token_ids: Some(ids.to_vec()),
            prompt_ids: None,
            finish_reason,
            certificate,
        }
    }

    #[test]
    fn a_certificate_is_compared_by_its_fields_and_its_ids() {
        let certificate =
            |tokens: u32| json!({ "answer_hash": Hex(&TokensHash::of(&[1]).0).to_string(), "tokens": tokens });
        let (old, new) = (choice(&[1], "a", certificate(1)), choice(&[1], "a", certificate(2)));
        let describe = |old: &AnsweredChoice, new: &AnsweredChoice| {
            field_difference(0, old, new).map(|of| of.to_string()).unwrap_or_default()
        };
        assert_eq!(describe(&old, &old), "");
        assert_eq!(describe(&old, &new), "choice 0: tokens was 1, and is 2");
        assert_eq!(describe(&choice(&[1], "a", Value::Null), &old), "");
        let mut other = old.clone();
        other.certificate["grammar_hash"] = "00".into();
        assert_eq!(describe(&old, &other), "choice 0: grammar_hash was null, and is \"00\"");
        assert!(describe(&old, &choice(&[2], "a", certificate(1))).contains("hash of the present tokens"));
        let cut = AnsweredChoice { finish_reason: Some("length".into()), ..old.clone() };
        assert_eq!(describe(&cut, &old), "choice 0: finish_reason was length, and is stop");
    }

    #[test]
    fn difference_is_displayed_with_all_details() {
        let score = Some(TokenScore { text: " a".into(), logprob: -0.5 });
        let difference = TokenDifference { choice_idx: 1, position: 3, recorded: Some((7, score)), present: None };
        let expected =
            "choice 1, position 3: the token was 7 \" a\" (logprob -0.500000), and is none, the answer has ended";
        assert_eq!(difference.to_string(), expected);
    }
}
