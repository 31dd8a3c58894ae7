//! How a prompt that is too long is cut. Knows no tokenizer and no request.

use crate::refusal::Refusal;
use std::ops::Range;

/// How a prompt that is too long is cut.
#[derive(Clone, Copy, Debug)]
pub struct Truncation {
    /// The most tokens that stay. None: as many as there is room for.
    pub n_max: Option<u32>,
    pub side: CutSide,
}

/// Where a prompt loses tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutSide {
    Left,
    Right,
}

/// How many tokens of a prompt stay, and where it loses the others.
#[derive(Clone, Copy, Debug)]
pub struct PromptCut {
    pub n_max: usize,
    pub side: CutSide,
}

impl Truncation {
    /// Returns the cut of a prompt for which there are `room` tokens.
    pub fn within(self, room: u32) -> Result<PromptCut, Refusal> {
        if let Some(n) = self.n_max.filter(|n| *n > room) {
            let why =
                format!("{n} is more than {room}, the room for the prompt. Please request a smaller truncation size.");
            return Err(Refusal::invalid("truncate_prompt_tokens", why));
        }
        Ok(PromptCut { n_max: self.n_max.unwrap_or(room) as usize, side: self.side })
    }
}

impl PromptCut {
    /// Returns the tokens to drop from `n`. The tokens of the frame stay: those that a tokenizer adds before and after
    /// a text.
    pub fn dropped(self, n: usize, [before, after]: [usize; 2]) -> Range<usize> {
        let n_dropped = n.saturating_sub(self.n_max);
        let (before, after) = if before + after <= self.n_max { (before, after) } else { (0, 0) };
        match self.side {
            CutSide::Left => before..before + n_dropped,
            CutSide::Right => n - after - n_dropped..n - after,
        }
    }

    /// Returns how many tokens of the two texts of a pair stay, of which this many may stay in all: the longer one
    /// loses tokens first.
    pub fn shares([first, second]: [usize; 2], n_max: usize) -> [usize; 2] {
        let n_dropped = (first + second).saturating_sub(n_max);
        let (longer, shorter) = (first.max(second), first.min(second));
        let of_longer = n_dropped.min(longer - shorter);
        let both = n_dropped - of_longer;
        // Of two that are equally long, the second loses the odd token.
        let (n_longer, n_shorter) = (longer - of_longer - both.div_ceil(2), shorter - both / 2);
        if first > second { [n_longer, n_shorter] } else { [n_shorter, n_longer] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_keeps_the_frame_of_a_text() {
        let cut = |n_max, side| PromptCut { n_max, side }.dropped(10, [1, 2]);
        assert_eq!((cut(6, CutSide::Right), cut(6, CutSide::Left)), (4..8, 1..5));
        assert!(cut(10, CutSide::Right).is_empty() && cut(12, CutSide::Left).is_empty());
        // A frame that does not fit is cut like the text.
        assert_eq!((cut(2, CutSide::Right), cut(2, CutSide::Left)), (2..10, 0..8));
    }

    #[test]
    fn of_a_pair_the_longer_text_loses_tokens_first() {
        for (lengths, n_max, shares) in [
            ([3, 9], 12, [3, 9]),
            ([3, 9], 8, [3, 5]),
            ([9, 3], 8, [5, 3]),
            ([3, 9], 5, [3, 2]),
            ([4, 4], 5, [3, 2]),
            ([9, 4], 0, [0, 0]),
        ] {
            assert_eq!(PromptCut::shares(lengths, n_max), shares, "{lengths:?} {n_max}");
        }
    }

    #[test]
    fn a_limit_beyond_the_room_is_refused() {
        let truncation = Truncation { n_max: Some(9), side: CutSide::Left };
        assert_eq!(truncation.within(9).unwrap().n_max, 9);
        assert!(truncation.within(8).unwrap_err().to_string().contains("8, the room for the prompt"));
        assert_eq!(Truncation { n_max: None, ..truncation }.within(5).unwrap().n_max, 5);
    }
}
