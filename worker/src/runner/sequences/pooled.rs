//! The hidden states of one request's positions, as they become one vector. Has no knowledge of devices.

use checkpoint::Pooling;

#[derive(Debug, Default)]
pub(super) struct PooledStates {
    kind: Pooling,
    /// The sum so far, the largest numbers so far, or one position's state.
    values: Vec<f32>,
    n_prompt: usize,
    /// Where the second text of a pair begins; 0: there is one text.
    second_text: u32,
}

impl PooledStates {
    pub fn restart(&mut self, kind: Pooling, n_prompt: usize, second_text: u32) {
        (self.kind, self.n_prompt, self.second_text) = (kind, n_prompt, second_text);
        self.values.clear();
    }

    /// The kind of the token at a position, as the tables of encoders number them.
    pub fn token_type(&self, position: u32) -> u32 {
        u32::from(self.second_text > 0 && position >= self.second_text)
    }

    /// Whether the vector depends on this position.
    pub fn reads(&self, position: u32) -> bool {
        match self.kind {
            Pooling::Mean | Pooling::Max => true,
            Pooling::First => position == 0,
            Pooling::Last => position as usize + 1 == self.n_prompt,
        }
    }

    /// Adds a position's hidden state. Positions come in order, so a sum has one order.
    pub fn add(&mut self, state: &[f32]) {
        let is_first = self.values.is_empty();
        self.values.resize(state.len(), 0.0);
        let values = self.values.iter_mut().zip(state);
        match self.kind {
            Pooling::Mean => values.for_each(|(sum, value)| *sum += value),
            Pooling::Max if !is_first => values.for_each(|(largest, value)| *largest = largest.max(*value)),
            Pooling::Max | Pooling::First | Pooling::Last => self.values.copy_from_slice(state),
        }
    }

    /// Returns the vector of the prompt, if it consists of numbers.
    pub fn write(&self, to: &mut Vec<f32>) {
        let n = match self.kind {
            Pooling::Mean => self.n_prompt as f32,
            Pooling::Max | Pooling::First | Pooling::Last => 1.0,
        };
        to.extend(self.values.iter().map(|value| value / n));
        if !to.iter().all(|value| value.is_finite()) {
            to.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_reads_its_positions() {
        let states = [[1.0, -2.0], [3.0, -4.0], [2.0, -1.0]];
        let pooled = |kind| {
            let mut pooled = PooledStates::default();
            pooled.restart(kind, states.len(), 0);
            for (position, state) in (0..).zip(&states) {
                if pooled.reads(position) {
                    pooled.add(state);
                }
            }
            let mut vector = Vec::new();
            pooled.write(&mut vector);
            vector
        };
        assert_eq!(pooled(Pooling::Mean), [2.0, -7.0 / 3.0]);
        assert_eq!(pooled(Pooling::First), states[0]);
        assert_eq!(pooled(Pooling::Last), states[2]);
        assert_eq!(pooled(Pooling::Max), [3.0, -1.0]);
    }

    #[test]
    fn tokens_of_a_second_text_have_the_kind_1() {
        let mut pooled = PooledStates::default();
        pooled.restart(Pooling::First, 4, 2);
        assert_eq!([0, 1, 2, 3].map(|position| pooled.token_type(position)), [0, 0, 1, 1]);
        pooled.restart(Pooling::First, 4, 0);
        assert_eq!(pooled.token_type(3), 0);
    }
}
