//! How well pairs of texts fit: by a classifier that reads both, or by the embeddings of each. Knows no face.

use crate::front::embed::{Readout, ReadoutKind};
use crate::front::frontend::{Frontend, unix_seconds};
use crate::front::parsed_request::ParsedRequest;
use crate::front::recorder::Recorder;
use crate::refusal::Refusal;
use crate::replicas::models::text::{EncodeSettings, ModelText};
use crate::replicas::models::truncation::{CutSide, PromptCut};
use proto::v1;
use proto::v1::generate_request::Input;
use std::collections::HashMap;
use std::sync::Arc;

/// The scores of pairs, in their order.
pub struct PairScores {
    pub model: String,
    pub scores: Vec<f32>,
    pub n_tokens: u32,
}

/// Pairs of texts, as numbers of texts.
pub struct TextPairs {
    pub texts: Vec<String>,
    pub pairs: Vec<(usize, usize)>,
    /// The most tokens of the first texts and of the others. Zero: all.
    pub tokens_max: [u32; 2],
}

impl TextPairs {
    /// Each of the first texts with that of the others at the same place, or one with all.
    pub fn of(firsts: Vec<String>, seconds: Vec<String>) -> TextPairs {
        let (n, n_firsts) = (seconds.len(), firsts.len());
        let pairs = (0..n).map(|i| (if n_firsts == 1 { 0 } else { i }, n_firsts + i)).collect();
        TextPairs { texts: firsts.into_iter().chain(seconds).collect(), pairs, tokens_max: [0, 0] }
    }
}

/// Returns how well the texts of each pair fit: the score of a classifier with one label, or the cosine of the two
/// embeddings. `parsed` has everything but the prompts. A classifier's score is activated unless it is `raw`.
pub async fn score_pairs(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    of: TextPairs,
    is_raw: bool,
    recorder: &mut Recorder,
) -> Result<PairScores, Refusal> {
    let pooling = &front.text(&parsed.model).inspect_err(|refusal| recorder.record_refusal(refusal))?.spec.pooling;
    match pooling.labels.len() {
        0 => score_by_embeddings(front, parsed, of, recorder).await,
        1 => score_by_classifier(front, parsed, of, is_raw, recorder).await,
        n => {
            let refusal = Refusal::invalid("model", format!("is a classifier of {n} labels: a score needs one"));
            recorder.record_refusal(&refusal);
            Err(refusal)
        }
    }
}

async fn score_by_classifier(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    TextPairs { texts, pairs, tokens_max: [first_tokens_max, second_tokens_max] }: TextPairs,
    is_raw: bool,
    recorder: &mut Recorder,
) -> Result<PairScores, Refusal> {
    let pair = |(first, second): (usize, usize)| {
        let (first, second) = (texts[first].clone(), texts[second].clone());
        Input::Pair(v1::TextPair { first, second, first_tokens_max, second_tokens_max })
    };
    let parsed = ParsedRequest { prompts: pairs.into_iter().map(pair).collect(), ..parsed };
    let reply = front.pool(parsed, Readout { is_raw, ..Readout::of(ReadoutKind::Scores) }, recorder).await?;
    let scores = reply.embeddings.iter().map(|scores| scores.values.first().copied().unwrap_or_default()).collect();
    Ok(PairScores { model: reply.model, scores, n_tokens: reply.usage.map_or(0, |usage| usage.prompt_tokens) })
}

/// Each text is embedded once.
async fn score_by_embeddings(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    TextPairs { texts, pairs, tokens_max }: TextPairs,
    recorder: &mut Recorder,
) -> Result<PairScores, Refusal> {
    let (mut prompts, mut numbers) = (Vec::new(), HashMap::new());
    let mut number_of = |text: String| {
        *numbers.entry(text.clone()).or_insert_with(|| {
            prompts.push(Input::Text(text));
            prompts.len() - 1
        })
    };
    let numbered: Vec<usize> = texts.into_iter().map(&mut number_of).collect();
    let n_firsts = pairs.first().map_or(0, |(_, second)| *second);
    let is_first = |number: usize| numbered[..n_firsts].contains(&number);
    if tokens_max != [0, 0] {
        let of = front.text(&parsed.model)?;
        for (number, prompt) in prompts.iter_mut().enumerate() {
            let n_max = tokens_max[usize::from(!is_first(number))] as usize;
            *prompt = shortened(front, &of, prompt.clone(), n_max).await?;
        }
    }
    let reply = front.embed(ParsedRequest { prompts, ..parsed }, recorder).await?;
    let vector = |text: usize| reply.embeddings[numbered[text]].values.as_slice();
    let scores = pairs.into_iter().map(|(first, second)| cosine(vector(first), vector(second))).collect();
    Ok(PairScores { model: reply.model, scores, n_tokens: reply.usage.map_or(0, |usage| usage.prompt_tokens) })
}

/// Returns a text as tokens of which at most `n_max` are its own, if it has more.
async fn shortened(front: &Frontend, of: &Arc<ModelText>, input: Input, n_max: usize) -> Result<Input, Refusal> {
    let Input::Text(text) = &input else { return Ok(input) };
    // No token has less than one byte.
    if n_max == 0 || text.len() <= n_max {
        return Ok(input);
    }
    let encoded = |settings: EncodeSettings| front.texts.encoded(of, input.clone(), settings);
    let whole = EncodeSettings::at(unix_seconds());
    let n_own = encoded(EncodeSettings { adds_special: Some(false), ..whole }).await?.ids.len();
    if n_own <= n_max {
        return Ok(input);
    }
    let n_around = encoded(whole).await?.ids.len() - n_own;
    let cut = Some(PromptCut { n_max: n_max + n_around, side: CutSide::Right });
    Ok(Input::TokenIds(v1::TokenIds { ids: encoded(EncodeSettings { cut, ..whole }).await?.ids }))
}

/// The product of two vectors of length one, summed in their order.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + f64::from(*a) * f64::from(*b)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_text_is_paired_with_all_and_several_in_turn() {
        let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(TextPairs::of(texts(&["q"]), texts(&["a", "b"])).pairs, [(0, 1), (0, 2)]);
        assert_eq!(TextPairs::of(texts(&["q", "r"]), texts(&["a", "b"])).pairs, [(0, 2), (1, 3)]);
    }
}
