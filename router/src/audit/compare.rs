//! Where two answers part. Knows token ids alone.

use types::Token;

/// The first position at which they differ; None if they are equal.
pub fn first_difference(a: &[Token], b: &[Token]) -> Option<usize> {
    let differs = a.iter().zip(b).position(|(a, b)| a != b);
    differs.or_else(|| (a.len() != b.len()).then_some(a.len().min(b.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_part_where_a_token_differs_or_one_is_over() {
        let check = |a: &[Token], b: &[Token], expect| assert_eq!(first_difference(a, b), expect, "{a:?} {b:?}");
        check(&[], &[], None);
        check(&[1, 2], &[1, 2], None);
        check(&[1, 2], &[1, 3], Some(1));
        check(&[1, 2], &[1], Some(1));
        check(&[1], &[1, 2], Some(1));
        check(&[1], &[2, 2], Some(0));
    }
}
