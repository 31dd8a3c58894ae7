//! The workers were lost: everything begins again from its log, in a new epoch.

use crate::blocks::Pool;
use crate::scheduler::{Output, Scheduler};
use crate::sequence::{Place, SequenceIdx};
use alloc::vec::Vec;
use types::cache::blocks_for;
use types::{Epoch, Finish};

impl Scheduler {
    /// All that ran waits again, with its log and its place in the order. The caches of the workers are gone, so no
    /// block has a name; what was in flight will not come back; steps are counted from zero.
    pub fn requeue_all(&mut self, epoch: Epoch, out: &mut Vec<Output>) {
        self.requeue_into(epoch, self.config.n_blocks, out);
    }

    /// The same with workers that have so many blocks. What might outgrow them ends with `Finish::Failed`, so whoever
    /// places the workers gives them blocks for a full context where it can.
    pub fn requeue_into(&mut self, epoch: Epoch, n_blocks: u32, out: &mut Vec<Output>) {
        debug_assert!(epoch > self.epoch, "step ids begin again, so an answer of the old epoch must be known by it");
        self.epoch = epoch;
        self.n_steps = 0;
        self.in_flight.clear();
        self.config.n_blocks = n_blocks;
        self.blocks = Pool::new(n_blocks);
        self.running.clear();
        let all: Vec<SequenceIdx> = self.sequences.iter().map(|(idx, _)| idx).collect();
        all.iter().for_each(|&idx| self.requeue(idx));
        self.ends.clear();
        self.fail_what_cannot_fit(out);
    }

    fn requeue(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        sequence.held = false;
        sequence.table.clear();
        match sequence.place {
            Place::Waiting => {}
            Place::Ending => self.sequences.remove(idx),
            Place::Running => {
                sequence.rewind();
                self.waiting.insert(sequence.key, idx, sequence.n_known());
                self.counters.requeued += 1;
            }
        }
    }

    fn fail_what_cannot_fit(&mut self, out: &mut Vec<Output>) {
        let n_blocks = self.config.n_blocks;
        let fits = |idx: &SequenceIdx| blocks_for(self.sequences[*idx].length_max - 1) <= n_blocks;
        let unfit: Vec<SequenceIdx> = self.waiting.iter().filter(|idx| !fits(idx)).collect();
        unfit.iter().for_each(|&idx| self.end_early(idx, Finish::Failed, out));
    }
}
