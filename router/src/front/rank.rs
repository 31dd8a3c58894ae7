//! How well pairs of texts fit: by a classifier that reads both, or by the embeddings of each. Knows no face.

use crate::front::embed::Readout;
use crate::front::frontend::Frontend;
use crate::front::parsed_request::ParsedRequest;
use crate::front::recorder::Recorder;
use crate::refusal::Refusal;
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
}

impl TextPairs {
    /// Each of the first texts with that of the others at the same place, or one with all.
    pub fn of(firsts: Vec<String>, seconds: Vec<String>) -> TextPairs {
        let (n, n_firsts) = (seconds.len(), firsts.len());
        let pairs = (0..n).map(|i| (if n_firsts == 1 { 0 } else { i }, n_firsts + i)).collect();
        TextPairs { texts: firsts.into_iter().chain(seconds).collect(), pairs }
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
    TextPairs { texts, pairs }: TextPairs,
    is_raw: bool,
    recorder: &mut Recorder,
) -> Result<PairScores, Refusal> {
    let pair = |(first, second): (usize, usize)| {
        Input::Pair(v1::TextPair { first: texts[first].clone(), second: texts[second].clone() })
    };
    let parsed = ParsedRequest { prompts: pairs.into_iter().map(pair).collect(), ..parsed };
    let reply = front.pool(parsed, if is_raw { Readout::Raw } else { Readout::Scores }, recorder).await?;
    let scores = reply.embeddings.iter().map(|scores| scores.values.first().copied().unwrap_or_default()).collect();
    Ok(PairScores { model: reply.model, scores, n_tokens: reply.usage.map_or(0, |usage| usage.prompt_tokens) })
}

/// Each text is embedded once.
async fn score_by_embeddings(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    TextPairs { texts, pairs }: TextPairs,
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
    let reply = front.embed(ParsedRequest { prompts, ..parsed }, recorder).await?;
    let vector = |text: usize| reply.embeddings[numbered[text]].values.as_slice();
    let scores = pairs.into_iter().map(|(first, second)| cosine(vector(first), vector(second))).collect();
    Ok(PairScores { model: reply.model, scores, n_tokens: reply.usage.map_or(0, |usage| usage.prompt_tokens) })
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
