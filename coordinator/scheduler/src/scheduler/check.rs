//! The scheduler's invariants.

use super::Scheduler;
use crate::blocks::BlockPool;
use crate::config::Config;
use crate::pools::BlockPools;
use crate::progress::SequenceProgress;
use crate::sequence::{Sequence, SequenceState};
use crate::slab::SequenceSlab;
use crate::table::BlockTable;
use alloc::vec;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, Goal};

/// Panics at the first invariant that does not hold.
pub(super) fn check(scheduler: &Scheduler) {
    let Scheduler { config, sequences, live, waiting, running, tenants, pools, in_flight, .. } = scheduler;
    live.check(sequences, waiting.len() + running.len());
    waiting.check(sequences);
    running.check(sequences, tenants.are_many());
    tenants.check(waiting.len(), running.len(), waiting.n_tokens());
    check_places(scheduler);
    check_limits(scheduler);
    for (_, sequence) in sequences.iter() {
        check_sequence(sequence, config);
        if sequence.state() != SequenceState::Waiting {
            assert_eq!(sequence.tables.len(), pools.n_groups());
            pools.iter().zip(&sequence.tables).for_each(|(pool, table)| check_table(sequence, table, pool, config));
        }
    }
    check_in_flight(scheduler);
    pools.iter().enumerate().for_each(|(group, pool)| check_blocks(sequences, group, pools, pool));
    let mut held = live.iter().filter(|&idx| sequences[idx].is_held()).map(|idx| sequences[idx].id);
    assert!(held.all(|id| !in_flight.ends().contains(&id)), "a running request must not be in ends");
}

/// Each sequence is in the list that it names, and in no other. A tenant's counts equal those of its sequences.
fn check_places(scheduler: &Scheduler) {
    let Scheduler { sequences, waiting, running, tenants, .. } = scheduler;
    let count = |place| sequences.iter().filter(|(_, sequence)| sequence.state() == place).count();
    assert_eq!(count(SequenceState::Waiting), waiting.len());
    assert_eq!(count(SequenceState::Running), running.len());
    assert!(waiting.iter().all(|idx| sequences[idx].state() == SequenceState::Waiting));
    assert!(running.order().iter().all(|&idx| sequences[idx].state() == SequenceState::Running));
    for (_, sequence) in sequences.iter() {
        let tenant = tenants.get(sequence.tenant);
        let own = sequences.iter().filter(|(_, other)| other.tenant == sequence.tenant);
        let count = |place| own.clone().filter(|(_, other)| other.state() == place).count() as u32;
        let counts = (count(SequenceState::Waiting), count(SequenceState::Running));
        assert_eq!(counts, (tenant.n_waiting, tenant.n_running));
    }
}

fn check_limits(scheduler: &Scheduler) {
    let Scheduler { config, sequences, live, waiting, in_flight, .. } = scheduler;
    assert!(in_flight.len() <= config.steps_in_flight_max as usize);
    // Sequences that ran before came back without asking.
    let new = waiting.iter().map(|idx| &sequences[idx]).filter(|sequence| !sequence.was_admitted());
    assert!(new.clone().count() <= config.waiting_max as usize);
    assert!(new.map(|sequence| u64::from(sequence.n_known())).sum::<u64>() <= config.waiting_tokens_max);
    // At most one suspect runs (`RunningSet::check`), and a single step is in flight then: no two can be lost together.
    let n_suspects = live.iter().filter(|&idx| sequences[idx].is_suspect()).count();
    assert_eq!(n_suspects as u32, sequences.n_suspects());
    assert!(n_suspects == 0 || in_flight.len() <= 1);
}

/// `0 <= n_sure <= n_computed <= n_known + n_drawing <= length_max`
fn check_sequence(sequence: &Sequence, config: &Config) {
    let SequenceProgress { n_sure, n_computed, n_drawing, n_slices_in_flight, n_stale, .. } = *sequence.progress();
    let SequenceProgress { generation, n_entries, n_sent, .. } = *sequence.progress();
    let (n_known, length_max, beyond_max) = (sequence.n_known(), sequence.length_max(), beyond_max(config));
    assert_eq!(
        (n_known, sequence.n_output()),
        (sequence.request.n_tokens() as u32, sequence.request.output.len() as u32)
    );
    assert!(sequence.hashes().len() as u32 <= n_known / BLOCK_TOKENS);
    match sequence.state() {
        SequenceState::Waiting => {
            assert_eq!((generation, n_sure, n_computed, n_drawing), (0, 0, 0, 0));
            assert_eq!((n_slices_in_flight, n_stale), (0, 0));
            assert_eq!((n_entries, n_sent), (0, 0));
            assert!(n_known < length_max);
        }
        SequenceState::Running => {
            assert!(generation != 0 && sequence.is_held() && sequence.was_admitted());
            assert!(n_sure <= n_computed && n_computed <= n_known + n_drawing);
            assert!(n_known < length_max && n_known + n_drawing <= length_max && n_computed < length_max);
            assert!(n_drawing <= 1 + beyond_max);
            assert!(n_computed <= n_known + beyond_max);
            sequence.guesses.check(config.drafting.max());
            let draws = sequence.request.goal != Goal::Pool;
            assert_eq!(
                n_drawing > 0,
                draws && n_computed >= n_known,
                "a sequence draws once all known tokens are computed"
            );
        }
        SequenceState::Ending => {
            assert!(n_slices_in_flight > 0, "an ended sequence waits only for its slices");
        }
    }
}

/// The most positions behind its log that a sequence may have planned: those of draws, or of drafts.
fn beyond_max(config: &Config) -> u32 {
    config.slices_ahead_max.max(config.drafting.max())
}

/// A group's table has an entry for every planned position, and the ranks have all of them; held are the blocks that a
/// query may still read, and those that wait for their name.
fn check_table(sequence: &Sequence, table: &BlockTable, pool: &BlockPool, config: &Config) {
    let SequenceProgress { n_computed, n_sent, n_slices_in_flight, .. } = *sequence.progress();
    let BlockTable { blocks, n_passed, n_held } = table;
    let n_entries = blocks.len() as u32;
    // A slice that was planned behind a missing draw, or for a draft that did not hold, keeps its blocks: it is
    // planned again soon.
    let furthest = n_computed.max(sequence.n_known() + beyond_max(config));
    assert!((blocks_for(n_computed)..=blocks_for(furthest)).contains(&n_entries));
    assert_eq!(n_entries, n_sent, "the ranks have all of its entries");
    assert!(*n_passed <= pool.group.n_passed(sequence.earliest_start()), "blocks that a query may read are held");
    let earliest = sequence.earliest_start();
    // Of a recurrence: from the block that the next slice reads on.
    let n_carried = if pool.group.is_state() { pool.group.n_passed(earliest) } else { 0 };
    for (i, block) in (0..).zip(blocks) {
        let is_none = *block == BlockId::NONE;
        assert!(is_none || i >= *n_passed, "passed blocks are at the front");
        assert!(!is_none || i < (*n_passed).max(n_carried), "blocks from which a later slice may begin are held");
    }
    assert_eq!(table.held().count() as u32, *n_held);
    if sequence.state() == SequenceState::Running && n_slices_in_flight == 0 {
        assert_eq!(*n_passed, pool.group.n_passed(n_computed), "no other blocks are held");
    }
}

/// A sequence's counts in flight equal those of the steps in flight.
fn check_in_flight(scheduler: &Scheduler) {
    let Scheduler { sequences, in_flight, .. } = scheduler;
    let first = in_flight.oldest().map_or(0, |step| step.id.0);
    assert!(in_flight.iter().zip(first..).all(|(step, id)| step.id.0 == id), "the step ids have no gaps");
    for (idx, sequence) in sequences.iter().filter(|(_, sequence)| sequence.state() != SequenceState::Waiting) {
        let progress = sequence.progress();
        let all = in_flight.iter().flat_map(|step| &step.slices);
        let own = all.filter(|planned| planned.sequence == idx && planned.generation == progress.generation);
        assert_eq!(own.clone().count() as u32, progress.n_slices_in_flight);
        if sequence.state() == SequenceState::Running {
            assert!(progress.n_stale <= progress.n_slices_in_flight);
            let fresh = own.skip(progress.n_stale as usize);
            assert_eq!(fresh.clone().map(|planned| planned.draws_max).sum::<u32>(), progress.n_drawing);
            let landed = fresh.fold(progress.n_sure, |at, planned| {
                assert_eq!(at, planned.range.start, "slices follow one another");
                planned.range.end
            });
            assert_eq!(landed, progress.n_computed);
        }
    }
}

/// Each block is free, cached or used, and has as many holders as tables list it. A slice writes only blocks that
/// its sequence holds alone.
fn check_blocks(sequences: &SequenceSlab, group: usize, pools: &BlockPools, pool: &BlockPool) {
    let mut n_holders = vec![0; pool.n_total() as usize];
    let mut n_writers = vec![0; pool.n_total() as usize];
    for (_, sequence) in sequences.iter() {
        let table = &sequence.tables[group];
        for (i, block) in table.held() {
            n_holders[block.0 as usize] += 1;
            let is_full = (i as u32 + 1) * BLOCK_TOKENS <= sequence.progress().n_sure;
            n_writers[block.0 as usize] += u32::from(!is_full);
            if let Some(name) = pool.name_of(block) {
                assert_eq!(sequence.hashes().get(i), Some(name), "a name is the hash of the block's tokens");
                assert!(is_full, "a block that is written has no name");
            }
        }
    }
    for fetch in pools.tier.fetches() {
        fetch.tables[group].held().for_each(|(_, block)| n_holders[block.0 as usize] += 1);
        for page in fetch.pages.iter().filter(|page| usize::from(page.key.group) == group) {
            n_writers[page.block.0 as usize] += 1;
            assert_eq!(pool.name_of(page.block), None, "a block that is fetched has no name yet");
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
