//! How often a source's guesses hold, and how many guesses of a draft model are worth their passes. Has no knowledge of
//! tokens.

/// A probability of one.
const SURE: u32 = 1 << 16;
/// The weight of the newest observation is one in this many.
const MEMORY: u32 = 8;
/// A guess must return this many eighths of its cost.
const GAIN_MIN: u64 = 9;
/// The draws without a guess before a source that did not pay is tried again. It doubles from the first to the second.
const PAUSE_MIN: u16 = 16;
const PAUSE_MAX: u16 = 256;

/// The cost of a draft model's guess, in thousandths of a step of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftCost {
    /// Another row of the step that verifies.
    pub row_permille: u32,
    /// A pass of the draft model.
    pub pass_permille: u32,
}

/// The probability that a guess holds if those before it held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct AcceptanceRate(u32);

impl AcceptanceRate {
    pub const fn percent(percent: u32) -> AcceptanceRate {
        AcceptanceRate(SURE / 100 * percent)
    }

    /// The start value for a source, before any observation.
    pub const fn of_source() -> AcceptanceRate {
        AcceptanceRate::percent(50)
    }

    /// The start value for a draft model, before any observation.
    pub const fn of_model() -> AcceptanceRate {
        AcceptanceRate::percent(75)
    }

    /// Notes that the first `n_hit` of `n_tried` guesses held, and the next one did not.
    pub fn note(&mut self, n_tried: usize, n_hit: usize) {
        (0..n_hit).for_each(|_| self.0 += (SURE - self.0) / MEMORY);
        if n_hit < n_tried {
            self.0 -= self.0 / MEMORY;
        }
    }
}

/// When a draft model guesses for a sequence, and how many tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct DraftBackoff {
    /// Draws until the next attempt, and the length of the last pause.
    left: u16,
    last: u16,
}

impl DraftBackoff {
    /// Returns how many guesses pay among `n_rows` rows. If none does, it still tries one now and then, because texts
    /// change.
    pub fn n_worth(&mut self, cost: Option<DraftCost>, holds: AcceptanceRate, n_max: usize, n_rows: usize) -> usize {
        let Some(cost) = cost else { return n_max };
        let n = cost.n_paying(holds, n_max, n_rows.max(1) as u64);
        if n > 0 {
            *self = DraftBackoff::default();
            return n;
        }
        if self.left > 0 {
            self.left -= 1;
            return 0;
        }
        self.last = (self.last * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        self.left = self.last;
        n_max.min(1)
    }
}

impl DraftCost {
    /// Each of `n_rows` sequences shares the draft model's passes, and has a row of its own in the step that verifies.
    fn n_paying(&self, AcceptanceRate(acceptance): AcceptanceRate, n_max: usize, n_rows: u64) -> usize {
        let (row, pass) = (u64::from(self.row_permille), u64::from(self.pass_permille));
        // Without guesses a step of this time gives one token per row.
        let step = 1000 + row * (n_rows - 1);
        let costs = row * n_rows + pass * step / 1000;
        let mut holds = u64::from(SURE);
        let pays = |holds: u64| holds * step * 8 > u64::from(SURE) * costs * GAIN_MIN;
        let n_paying = (0..n_max).take_while(|_| {
            holds = holds * u64::from(acceptance) / u64::from(SURE);
            pays(holds)
        });
        n_paying.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHEAP: DraftCost = DraftCost { row_permille: 50, pass_permille: 200 };

    #[test]
    fn as_many_are_guessed_as_pay() {
        let n = |percent, n_rows| CHEAP.n_paying(AcceptanceRate::percent(percent), 8, n_rows);
        assert_eq!((n(95, 1), n(80, 1), n(60, 1), n(25, 1)), (8, 5, 2, 0));
        assert_eq!((n(90, 32), n(80, 32)), (0, 0), "among many a row is most of what its token would cost");
        let free = DraftCost { row_permille: 0, pass_permille: 0 };
        assert_eq!(free.n_paying(AcceptanceRate::percent(50), 8, 1), 8);
        let dear = DraftCost { row_permille: 0, pass_permille: 1000 };
        assert_eq!(dear.n_paying(AcceptanceRate::percent(99), 8, 1), 0, "a draft that costs as much as its target");
    }

    #[test]
    fn what_does_not_pay_is_tried_ever_more_seldom() {
        let (mut pauses, bad) = (DraftBackoff::default(), AcceptanceRate::percent(10));
        let tried: Vec<usize> = (0..200).filter(|_| pauses.n_worth(Some(CHEAP), bad, 8, 1) > 0).collect();
        assert_eq!(tried, [0, 17, 50, 115]);
        assert_eq!(pauses.n_worth(Some(CHEAP), AcceptanceRate::percent(95), 8, 1), 8);
        assert_eq!((pauses.left, pauses.last), (0, 0));
        assert_eq!(pauses.n_worth(None, bad, 4, 1), 4, "a fixed number requires no measurement");
    }

    #[test]
    fn acceptance_follows_what_held() {
        let mut of = AcceptanceRate::percent(50);
        (0..40).for_each(|_| of.note(4, 4));
        assert!(of > AcceptanceRate::percent(95), "{of:?}");
        (0..40).for_each(|_| of.note(4, 0));
        assert!(of < AcceptanceRate::percent(5), "{of:?}");
    }
}
