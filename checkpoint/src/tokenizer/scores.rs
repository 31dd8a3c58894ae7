//! SentencePiece's merging, expressed as the ordered merges of the `tokenizers` crate: two neighbours become one token
//! in the order of that token's score.

use std::collections::HashMap;
use types::Token;

/// Longer tokens are not produced by merging: every split of one is looked up.
const PIECE_CHARS_MAX: usize = 256;

/// Every pair of tokens that makes a token, best first. Among pairs for one token, those with lower ids first.
pub(super) fn merges(tokens: &[&str], scores: &[f64], ids: &HashMap<&str, Token>) -> Vec<(String, String)> {
    let mut merges = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|(_, token)| token.chars().count() <= PIECE_CHARS_MAX) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(left_id), Some(right_id)) = (ids.get(left), ids.get(right)) {
                merges.push((id, *left_id, *right_id, left, right));
            }
        }
    }
    merges.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then((a.0, a.1, a.2).cmp(&(b.0, b.1, b.2))));
    merges.into_iter().map(|(_, _, _, left, right)| (left.to_owned(), right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_score_comes_first() {
        let tokens = ["a", "b", "c", "ab", "bc", "abc"];
        let ids = tokens.iter().zip(0..).map(|(token, id)| (*token, id)).collect();
        let pairs = merges(&tokens, &[0.0, 0.0, 0.0, -2.0, -1.0, -3.0], &ids);
        let pairs: Vec<_> = pairs.iter().map(|(left, right)| (left.as_str(), right.as_str())).collect();
        assert_eq!(pairs, [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]);
    }
}
