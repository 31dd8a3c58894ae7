//! The scheduler's invariants, for tests and simulations: called each tick, it panics at the first that does not hold.

use crate::blocks::BlockPool;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceIdx, SequenceState};
use crate::table::BlockTable;
use alloc::vec;
use alloc::vec::Vec;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, Goal};

impl Scheduler {
    pub fn check(&self) {
        self.check_places();
        self.check_limits();
        self.sequences.iter().for_each(|(_, sequence)| self.check_sequence(sequence));
        self.check_in_flight();
        self.check_suspects();
        self.pools.iter().enumerate().for_each(|(group, pool)| self.check_blocks(group, pool));
        self.check_ends();
    }

    /// Each sequence is in the list that it names, and in no other.
    fn check_places(&self) {
        let count = |place| self.sequences.iter().filter(|(_, sequence)| sequence.state == place).count();
        assert_eq!(count(SequenceState::Waiting), self.waiting.len());
        assert_eq!(count(SequenceState::Running), self.running.len());
        assert!(self.waiting.iter().all(|idx| self.sequences[idx].state == SequenceState::Waiting));
        assert!(self.running.iter().all(|&idx| self.sequences[idx].state == SequenceState::Running));
        let rank = |&idx: &SequenceIdx| (self.sequences[idx].rank, self.sequences[idx].key);
        assert!(!self.is_ranked || self.running.is_sorted_by_key(rank));
        assert!(!self.is_ranked || self.tenants.are_many() || self.running.is_sorted_by_key(|idx| rank(idx).1));
        assert_eq!(self.by_id.len(), self.waiting.len() + self.running.len());
        assert!(self.by_id.iter().all(|(id, &idx)| self.sequences[idx].id == *id));
        let live = self.by_id.values().map(|&idx| &self.sequences[idx].request);
        let n_deadlines = live.clone().filter(|request| request.deadline.is_some()).count();
        assert_eq!(n_deadlines, self.deadlines.len());
        assert!(self.deadlines.iter().all(|(_, id)| self.by_id.contains_key(id)));
        let n_waiting_tokens: u64 = self.waiting.iter().map(|idx| u64::from(self.sequences[idx].n_known())).sum();
        assert_eq!(n_waiting_tokens, self.waiting.n_tokens());
        self.check_tenants();
    }

    /// A tenant's counts equal those of its sequences.
    fn check_tenants(&self) {
        self.tenants.check(self.waiting.len(), self.running.len(), self.waiting.n_tokens());
        for (_, sequence) in self.sequences.iter() {
            let tenant = self.tenants.get(sequence.tenant);
            let own = self.sequences.iter().filter(|(_, other)| other.tenant == sequence.tenant);
            let count = |place| own.clone().filter(|(_, other)| other.state == place).count() as u32;
            assert_eq!(
                (count(SequenceState::Waiting), count(SequenceState::Running)),
                (tenant.n_waiting, tenant.n_running)
            );
        }
        assert_eq!(self.displaced.len(), 0, "every displaced request has been reported");
    }

    fn check_limits(&self) {
        assert!(self.running.len() <= self.config.running_max as usize);
        assert!(self.in_flight.len() <= self.config.steps_in_flight_max as usize);
        // Sequences that ran before came back without asking.
        let new = self.waiting.iter().map(|idx| &self.sequences[idx]).filter(|sequence| !sequence.admitted);
        assert!(new.clone().count() <= self.config.waiting_max as usize);
        assert!(new.map(|sequence| u64::from(sequence.n_known())).sum::<u64>() <= self.config.waiting_tokens_max);
    }

    /// `0 <= n_sure <= n_computed <= n_known + n_drawing <= length_max`
    fn check_sequence(&self, sequence: &Sequence) {
        let Sequence { n_sure, n_computed, n_drawing, length_max, .. } = *sequence;
        let n_known = sequence.n_known();
        assert_eq!(
            (n_known, sequence.n_output()),
            (sequence.request.n_tokens() as u32, sequence.request.output.len() as u32)
        );
        assert_eq!(sequence.n_planned, 0, "it is nonzero only while a step is planned");
        assert!(sequence.hashes.len() as u32 <= n_known / BLOCK_TOKENS);
        match sequence.state {
            SequenceState::Waiting => {
                assert_eq!((sequence.generation, n_sure, n_computed, n_drawing), (0, 0, 0, 0));
                assert_eq!((sequence.n_slices_in_flight, sequence.n_stale), (0, 0));
                assert_eq!((sequence.n_entries(), sequence.n_sent), (0, 0));
                assert!(n_known < length_max);
            }
            SequenceState::Running => {
                assert!(sequence.generation != 0 && sequence.held && sequence.admitted);
                assert!(n_sure <= n_computed && n_computed <= n_known + n_drawing);
                assert!(n_known < length_max && n_known + n_drawing <= length_max && n_computed < length_max);
                assert!(n_drawing <= 1 + self.beyond_max());
                assert!(n_computed <= n_known + self.beyond_max());
                assert_eq!(sequence.n_drafts, 0, "it is nonzero only while a step is planned");
                assert!(sequence.n_drafts_target <= sequence.n_guess.min(self.config.drafting.max()));
                let draws = sequence.request.goal != Goal::Pool;
                assert_eq!(
                    n_drawing > 0,
                    draws && n_computed >= n_known,
                    "a sequence draws once all known tokens are computed"
                );
                self.check_tables(sequence);
            }
            SequenceState::Ending => {
                assert!(sequence.n_slices_in_flight > 0, "an ended sequence waits only for its slices");
                self.check_tables(sequence);
            }
        }
    }

    /// The most positions behind its log that a sequence may have planned: those of draws, or of drafts.
    fn beyond_max(&self) -> u32 {
        self.config.slices_ahead_max.max(self.config.drafting.max())
    }

    /// Each group's table has an entry for every planned position, and the ranks have all of them; held are the blocks
    /// that a query may still read, and those that wait for their name.
    fn check_tables(&self, sequence: &Sequence) {
        assert_eq!(sequence.tables.len(), self.pools.len());
        for (pool, table @ BlockTable { blocks, n_passed, n_held }) in self.pools.iter().zip(&sequence.tables) {
            let n_entries = blocks.len() as u32;
            // A slice that was planned behind a missing draw, or for a draft that did not hold, keeps its blocks: it is
            // planned again soon.
            let furthest = sequence.n_computed.max(sequence.n_known() + self.beyond_max());
            assert!((blocks_for(sequence.n_computed)..=blocks_for(furthest)).contains(&n_entries));
            assert_eq!(n_entries, sequence.n_sent, "the ranks have all of its entries");
            assert!(
                *n_passed <= pool.group.n_passed(sequence.earliest_start()),
                "blocks that a query may read are held"
            );
            let earliest = sequence.earliest_start();
            // Of a recurrence: from the block that the next slice reads on.
            let n_carried = if pool.group.is_state() { pool.group.n_passed(earliest) } else { 0 };
            for (i, block) in (0..).zip(blocks) {
                let is_none = *block == BlockId::NONE;
                assert!(is_none || i >= *n_passed, "passed blocks are at the front");
                assert!(
                    !is_none || i < (*n_passed).max(n_carried),
                    "blocks from which a later slice may begin are held"
                );
            }
            assert_eq!(table.held().count() as u32, *n_held);
            if sequence.state == SequenceState::Running && sequence.n_slices_in_flight == 0 {
                assert_eq!(*n_passed, pool.group.n_passed(sequence.n_computed), "no other blocks are held");
            }
        }
    }

    /// A sequence's counts in flight equal those of the steps in flight.
    fn check_in_flight(&self) {
        let first = self.in_flight.oldest().map_or(0, |step| step.id.0);
        assert!(self.in_flight.iter().zip(first..).all(|(step, id)| step.id.0 == id), "the step ids have no gaps");
        for (idx, sequence) in self.sequences.iter().filter(|(_, sequence)| sequence.state != SequenceState::Waiting) {
            let all = self.in_flight.iter().flat_map(|step| &step.slices);
            let own = all.filter(|planned| planned.sequence == idx && planned.generation == sequence.generation);
            assert_eq!(own.clone().count() as u32, sequence.n_slices_in_flight);
            if sequence.state == SequenceState::Running {
                assert!(sequence.n_stale <= sequence.n_slices_in_flight);
                let fresh = own.skip(sequence.n_stale as usize);
                assert_eq!(fresh.clone().map(|planned| planned.draws_max).sum::<u32>(), sequence.n_drawing);
                let landed = fresh.fold(sequence.n_sure, |at, planned| {
                    assert_eq!(at, planned.range.start, "slices follow one another");
                    planned.range.end
                });
                assert_eq!(landed, sequence.n_computed);
            }
        }
    }

    /// At most one suspect runs, and a single step is in flight then: no two can be lost together.
    fn check_suspects(&self) {
        let live = self.by_id.values().map(|&idx| &self.sequences[idx]);
        assert_eq!(live.filter(|sequence| sequence.is_suspect()).count() as u32, self.n_suspects);
        assert!(self.n_suspects == 0 || self.in_flight.len() <= 1);
        assert!(self.running.iter().filter(|&&idx| self.sequences[idx].is_suspect()).count() <= 1);
    }

    /// Each block is free, cached or used, and has as many holders as tables list it. A slice writes only blocks that
    /// its sequence holds alone.
    fn check_blocks(&self, group: usize, pool: &BlockPool) {
        let mut n_holders = vec![0; pool.n_total() as usize];
        let mut n_writers = vec![0; pool.n_total() as usize];
        for (_, sequence) in self.sequences.iter() {
            let table = &sequence.tables[group];
            for (i, block) in table.held() {
                n_holders[block.0 as usize] += 1;
                let is_full = (i as u32 + 1) * BLOCK_TOKENS <= sequence.n_sure;
                n_writers[block.0 as usize] += u32::from(!is_full);
                if let Some(name) = pool.name_of(block) {
                    assert_eq!(sequence.hashes.get(i), Some(name), "a name is the hash of the block's tokens");
                    assert!(is_full, "a block that is written has no name");
                }
            }
        }
        let mut is_free = vec![false; pool.n_total() as usize];
        pool.free().iter().for_each(|block| is_free[block.0 as usize] = true);
        let (mut n_used, mut n_named) = (0, 0);
        for block in (0..pool.n_total()).map(BlockId) {
            let (holders, at) = (pool.refs(block), block.0 as usize);
            assert_eq!(holders, n_holders[at], "reference counts equal the table entries");
            assert!(n_writers[at] == 0 || holders == 1, "a block that is written has one holder");
            let name = pool.name_of(block);
            assert!(name.is_none_or(|name| pool.find(name) == Some(block)), "a name leads to its block");
            assert_eq!(pool.is_cached(block), holders == 0 && name.is_some());
            let has_memory = block.0 < pool.n_committed();
            assert!(has_memory || (holders == 0 && name.is_none()), "a block without memory has no holder");
            assert_eq!(is_free[at], has_memory && holders == 0 && name.is_none());
            n_used += u32::from(holders > 0);
            n_named += u32::from(name.is_some());
        }
        assert_eq!(n_used, pool.n_used());
        assert_eq!(n_named, pool.n_named());
        assert_eq!(pool.n_free() + n_used + pool.n_cached(), pool.n_committed());
    }

    fn check_ends(&self) {
        let ended: Vec<_> = self.ends.iter().filter(|id| self.is_held(id)).collect();
        assert!(ended.is_empty(), "a running request must not be in ends: {ended:?}");
    }

    fn is_held(&self, id: &types::RequestId) -> bool {
        self.by_id.get(id).is_some_and(|&idx| self.sequences[idx].held)
    }
}
