//! All sequences of the scheduler, and how many of them may have broken the ranks.

use crate::sequence::{Sequence, SequenceState};
use crate::sequence_index::{Awaited, AwaitedPrefix};
use alloc::vec::Vec;

pub(crate) use crate::sequence_index::SequenceIdx;

/// Sequences by index; an index is reused after its sequence is gone.
#[derive(Default)]
pub(crate) struct SequenceSlab {
    slots: Vec<Option<Sequence>>,
    vacant: Vec<SequenceIdx>,
    n_generations: u64,
    /// How many waiting or running sequences are suspects.
    n_suspects: u32,
}

impl SequenceSlab {
    pub fn insert(&mut self, sequence: Sequence) -> SequenceIdx {
        match self.vacant.pop() {
            Some(idx) => {
                self.slots[idx as usize] = Some(sequence);
                idx
            }
            None => {
                self.slots.push(Some(sequence));
                (self.slots.len() - 1) as SequenceIdx
            }
        }
    }

    pub fn remove(&mut self, idx: SequenceIdx) {
        debug_assert!(self.slots[idx as usize].is_some());
        self.slots[idx as usize] = None;
        self.vacant.push(idx);
    }

    /// The sequence that a slice was planned for, unless it has been dropped since.
    #[inline]
    pub fn of_generation(&mut self, idx: SequenceIdx, generation: u64) -> Option<&mut Sequence> {
        self.slots.get_mut(idx as usize)?.as_mut().filter(|sequence| sequence.progress().generation == generation)
    }

    /// Whether a prefix of a waiting sequence is still being computed for another, or fetched.
    pub fn is_prefix_awaited(&self, idx: SequenceIdx) -> bool {
        self[idx].awaited.is_some_and(|awaited| {
            let Awaited::Prefix(AwaitedPrefix { of, generation, position }) = awaited else { return true };
            let other = self.slots.get(of as usize).and_then(Option::as_ref);
            other.is_some_and(|other| {
                let progress = other.progress();
                let is_running = other.state() == SequenceState::Running && progress.generation == generation;
                is_running && progress.n_sure < position
            })
        })
    }

    /// The number of the next admission.
    pub fn next_generation(&mut self) -> u64 {
        self.n_generations += 1;
        self.n_generations
    }

    /// Adds to the suspicion of the sequence that a lost slice was planned for. One that is ending will not run again,
    /// and is not accused.
    pub fn accuse(&mut self, idx: SequenceIdx, generation: u64, weight: u32) {
        let sequence = self.of_generation(idx, generation);
        if let Some(sequence) = sequence.filter(|sequence| sequence.state() == SequenceState::Running) {
            let is_new = sequence.accuse(weight);
            self.n_suspects += u32::from(is_new);
        }
    }

    /// It got a token or ended: it is no suspect any more.
    #[inline]
    pub fn clear_suspicion(&mut self, idx: SequenceIdx) {
        let was_suspect = self[idx].clear_suspicion();
        self.n_suspects -= u32::from(was_suspect);
    }

    pub fn n_suspects(&self) -> u32 {
        self.n_suspects
    }

    pub fn is_empty(&self) -> bool {
        self.vacant.len() == self.slots.len()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.slots.iter_mut().flatten()
    }

    pub fn iter(&self) -> impl Iterator<Item = (SequenceIdx, &Sequence)> + Clone {
        self.slots.iter().enumerate().filter_map(|(idx, slot)| Some((idx as SequenceIdx, slot.as_ref()?)))
    }
}

impl core::ops::Index<SequenceIdx> for SequenceSlab {
    type Output = Sequence;

    #[inline]
    fn index(&self, idx: SequenceIdx) -> &Sequence {
        self.slots[idx as usize].as_ref().expect("an index in use names a sequence")
    }
}

impl core::ops::IndexMut<SequenceIdx> for SequenceSlab {
    #[inline]
    fn index_mut(&mut self, idx: SequenceIdx) -> &mut Sequence {
        self.slots[idx as usize].as_mut().expect("an index in use names a sequence")
    }
}
