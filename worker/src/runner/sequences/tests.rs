//! Tests how steps change sequences, and which steps are rejected.

use super::*;
use crate::load::vocabulary::LazyVocabulary;
use crate::runner::guesses::{GuessConfig, GuessSource, RecalledLogs};
use crate::runner::masks::MaskConfig;
use backend::PassSlice;
use std::path::Path;
use std::sync::Arc;
use types::{CacheGroup, Failure, Goal, Grammar};

const ID: RequestId = RequestId(1);

fn sequences() -> RankSequences {
    sequences_that(TokenSource::Draws)
}

fn sequences_that(tokens: TokenSource) -> RankSequences {
    RankSequences::new(limits(), tokens)
}

fn limits() -> SequenceLimits {
    SequenceLimits {
        pooling: Default::default(),
        n_vocab: 100,
        context: 64,
        groups: vec![CacheGroup::FULL],
        n_blocks: vec![8],
        rows_max: 40,
        running_max: 2,
        zero_kv: false,
        guesses: GuessConfig::default(),
    }
}

fn request(id: RequestId, n_prompt: u32) -> Request {
    Request { id, prompt: (0..n_prompt).collect(), ..Request::default() }
}

/// Returns masks for requests without a grammar.
fn no_masks() -> GrammarMasks {
    GrammarMasks::new(MaskConfig::default(), Arc::new(LazyVocabulary::new(Path::new("no/such/model"), 100, &[])), 2, 0)
}

fn slice(range: std::ops::Range<u32>, want: Want) -> Slice {
    Slice::new(ID, range, want)
}

fn step(starts: &[Request], slices: &[Slice], blocks: &[u32]) -> Step {
    let blocks = blocks.iter().copied().map(BlockId).collect();
    Step { starts: starts.into(), slices: slices.into(), blocks, ..Step::default() }
}

fn finish(
    sequences: &mut RankSequences,
    step: &Step,
    drawn: &mut Vec<Result<TokenOut, DrawError>>,
    masks: &GrammarMasks,
    message: &mut Vec<Option<Token>>,
    done: &mut Vec<SliceDone>,
) {
    sequences.apply_draws(step, drawn, masks, message, done);
    sequences.report_guesses(step, message, done);
}

/// Runs a step in which every draw is the given token, or fails.
fn run(
    sequences: &mut RankSequences,
    step: &Step,
    token: Option<Token>,
) -> Result<(Batch, Vec<SliceDone>), StepViolation> {
    run_drawn(sequences, step, token.ok_or(DrawError::NotNumbers))
}

fn run_drawn(
    sequences: &mut RankSequences,
    step: &Step,
    token: Result<Token, DrawError>,
) -> Result<(Batch, Vec<SliceDone>), StepViolation> {
    let masks = no_masks();
    let mut batch = sequences.new_batch();
    sequences.begin(step)?;
    sequences.lay_out(step, &mut batch)?;
    let mut draws = Vec::new();
    sequences.collect_draws(step, &masks, &mut draws);
    assert_eq!(draws.len(), batch.outputs.len());
    let out = |token| TokenOut { token, ..TokenOut::default() };
    let mut drawn: Vec<_> = draws.iter().map(|_| token.map(out)).collect();
    let mut done = Vec::new();
    finish(sequences, step, &mut drawn, &masks, &mut Vec::new(), &mut done);
    Ok((batch, done))
}

#[test]
fn a_batch_is_laid_out_slice_by_slice() {
    let mut sequences = sequences();
    let other = Slice { id: RequestId(2), ..slice(0..2, Want::Last) };
    let starts = [request(ID, 20), request(RequestId(2), 2)];
    let first = step(&starts, &[slice(0..17, Want::Nothing), other], &[7, 3, 5]);
    let (batch, done) = run(&mut sequences, &first, Some(42)).unwrap();
    assert_eq!(batch.n_rows(), 19);
    assert_eq!(batch.positions[15..], [15, 16, 0, 1]);
    assert_eq!(batch.outputs, [18]);
    let slices = [PassSlice::new(0..17, 0, Want::Nothing), PassSlice::new(17..19, 0, Want::Last)];
    assert_eq!(batch.slices, slices);
    assert_eq!(batch.tables[0].blocks_of(0), [BlockId(7), BlockId(3)]);
    assert_eq!(batch.tables[0].blocks_of(1), [BlockId(5)]);
    assert!(done[0].tokens.is_empty() && done[1].tokens[0].token == 42);

    let other = Slice { id: RequestId(2), ..slice(2..3, Want::Last) };
    let (batch, _) = run(&mut sequences, &step(&[], &[slice(17..20, Want::Last), other], &[]), Some(43)).unwrap();
    assert_eq!(batch.tokens, [17, 18, 19, 42]);
    assert_eq!(batch.slices[0].range.start, 17);
    assert_eq!(batch.outputs, [2, 3]);
}

#[test]
fn draws_see_the_log_before_the_token() {
    let mut sequences = sequences();
    let again = Request { output: vec![50, 51], ..request(ID, 4) };
    let all = step(&[again], &[slice(0..6, Want::Last)], &[0]);
    sequences.begin(&all).unwrap();
    sequences.lay_out(&all, &mut Batch { tables: vec![Default::default()], ..Batch::default() }).unwrap();
    let (masks, mut draws) = (no_masks(), Vec::new());
    sequences.collect_draws(&all, &masks, &mut draws);
    assert_eq!((draws[0].position(), draws[0].n_output()), (6, 2));
    assert_eq!((draws[0].prompt, draws[0].output), ([0, 1, 2, 3].as_slice(), [50, 51].as_slice()));
}

#[test]
fn a_drawn_token_that_the_log_holds_is_not_learned_twice() {
    let mut sequences = sequences();
    let again = Request { output: vec![50, 51], ..request(ID, 4) };
    run(&mut sequences, &step(&[again], &[slice(0..5, Want::Last)], &[0]), Some(99)).unwrap();
    let (batch, _) = run(&mut sequences, &step(&[], &[slice(5..6, Want::Last)], &[]), Some(52)).unwrap();
    assert_eq!(batch.tokens, [51]);
}

#[test]
fn a_request_that_draws_nothing_fails_alone() {
    let mut sequences = sequences();
    let (_, done) = run(&mut sequences, &step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]), None).unwrap();
    assert!(done[0].failed == Some(Failure::Computation) && done[0].tokens.is_empty());
    // A slice planned ahead has its rows, because other ranks do not know of the failure; its result is discarded.
    let planned = step(&[], &[slice(3..4, Want::Last)], &[]);
    let (batch, done) = run(&mut sequences, &planned, Some(1)).unwrap();
    assert!(batch.tokens == [UNKNOWN] && done[0].failed.is_some() && done[0].tokens.is_empty());
    // After a restart the failure is gone.
    let (_, done) = run(&mut sequences, &step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[4]), Some(8)).unwrap();
    assert!(done[0].failed.is_none() && done[0].tokens.len() == 1);
}

/// Returns the rows that a rank lays out if it receives `token` for each draw, and how many steps' messages it
/// received.
fn run_receiving(sequences: &mut RankSequences, step: &Step, token: Option<Token>) -> (Vec<Token>, usize) {
    let (mut batch, mut n_received) = (sequences.new_batch(), 0);
    sequences.begin(step).unwrap();
    while sequences.step_to_receive(step).is_some() {
        sequences.receive(&vec![token; sequences.pending.steps[0].1]).unwrap();
        n_received += 1;
    }
    sequences.lay_out(step, &mut batch).unwrap();
    sequences.note_remote_draws(step);
    (batch.tokens, n_received)
}

#[test]
fn receiver_waits_only_for_what_it_needs() {
    let mut sequences = sequences_that(TokenSource::Receives { late_max: 2 });
    let other = |range| Slice { id: RequestId(2), ..slice(range, Want::Last) };
    let starts = [request(ID, 3), request(RequestId(2), 3)];
    let mut run_step = |step: &Step, token| run_receiving(&mut sequences, step, token);
    assert_eq!(run_step(&step(&starts, &[slice(0..3, Want::Last)], &[0]), None), (vec![0, 1, 2], 0));
    assert_eq!(run_step(&step(&[], &[other(0..3)], &[1]), None), (vec![0, 1, 2], 0));
    assert_eq!(run_step(&step(&[], &[slice(3..4, Want::Last)], &[]), Some(42)), (vec![42], 1));
    assert_eq!(run_step(&step(&[], &[other(3..4)], &[]), Some(43)), (vec![43], 1));
    // After a restart from the prompt, a token drawn before it is dropped.
    let again = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[2]);
    assert_eq!(run_step(&again, None), (vec![0, 1, 2], 0));
    assert_eq!(run_step(&step(&[], &[slice(3..4, Want::Last)], &[]), Some(44)), (vec![44], 3));
    // More draws than may be late.
    for at in 3..6 {
        run_step(&step(&[request(ID, at)], &[slice(0..at, Want::Last)], &[3]), Some(9));
    }
    assert_eq!(sequences.pending.steps.len(), 3);
}

#[test]
fn a_failed_draw_leaves_the_same_rows_on_all_ranks() {
    let first = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]);
    let next = step(&[], &[slice(3..4, Want::Last)], &[]);
    let mut sampler = sequences();
    run(&mut sampler, &first, None).unwrap();
    let expected = run(&mut sampler, &next, Some(5)).unwrap().0.tokens;
    for tokens in
        [TokenSource::Receives { late_max: 0 }, TokenSource::Receives { late_max: 3 }, TokenSource::NeverKnows]
    {
        let mut sequences = sequences_that(tokens);
        run_receiving(&mut sequences, &first, None);
        assert_eq!(run_receiving(&mut sequences, &next, None).0, expected);
    }
}

#[test]
fn what_a_sampler_cannot_have_drawn_is_refused() {
    let check = |words: &[Option<Token>], expected: StepViolation| {
        let mut sequences = sequences_that(TokenSource::Receives { late_max: 0 });
        run_receiving(&mut sequences, &step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]), None);
        assert_eq!(sequences.step_to_receive(&Step::default()), Some(StepId(0)));
        assert_eq!(sequences.receive(words).unwrap_err(), expected);
    };
    check(&[], StepViolation::NotAsManyTokens { step: 0, n: 0, n_draws: 1 });
    check(&[Some(1), None], StepViolation::NotAsManyTokens { step: 0, n: 2, n_draws: 1 });
    check(&[Some(100)], StepViolation::NoSuchToken { id: ID, token: 100, n_vocab: 100 });
}

/// All draws are in flight: no message is received before it must be.
#[test]
fn what_was_drawn_for_an_earlier_life_is_dropped() {
    let mut sequences = sequences_that(TokenSource::Receives { late_max: 8 });
    let mut silent = |step: &Step| {
        sequences.begin(step).unwrap();
        sequences.lay_out(step, &mut sequences.new_batch()).unwrap();
        sequences.note_remote_draws(step);
    };
    // Preempted with a draw on its way, it restarts from the same log and draws at the same position. Then it ends, and
    // another request takes its id.
    let first = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]);
    let again = Step { ends: vec![ID], ..first.clone() };
    let other = Request { prompt: vec![9, 8, 7], ..request(ID, 3) };
    [&first, &again, &Step { starts: vec![other], ..again.clone() }].into_iter().for_each(&mut silent);
    let next = step(&[], &[slice(3..4, Want::Last)], &[]);
    sequences.begin(&next).unwrap();
    for (token, is_received) in [(50, false), (51, false), (52, true)] {
        assert!(sequences.step_to_receive(&next).is_some(), "a row needs a token that has not been received");
        sequences.receive(&[Some(token)]).unwrap();
        assert_eq!(sequences.held[&ID].is_pending, !is_received, "{token}");
    }
    assert_eq!(sequences.step_to_receive(&next), None);
    let mut batch = sequences.new_batch();
    sequences.lay_out(&next, &mut batch).unwrap();
    assert_eq!(batch.tokens, [52], "its own, once");
}

#[test]
fn a_draw_of_a_log_that_has_gone_on_is_dropped() {
    let mut sequences = sequences_that(TokenSource::Receives { late_max: 8 });
    let first = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]);
    // The draw's token has arrived: the restarted log has it, and draws at the next position.
    let longer = Request { output: vec![50], ..request(ID, 3) };
    let again = Step { ends: vec![ID], ..step(&[longer], &[slice(0..4, Want::Last)], &[0]) };
    for step in [&first, &again] {
        sequences.begin(step).unwrap();
        sequences.lay_out(step, &mut sequences.new_batch()).unwrap();
        sequences.note_remote_draws(step);
    }
    let next = step(&[], &[slice(4..5, Want::Last)], &[]);
    assert_eq!(run_receiving(&mut sequences, &next, Some(77)), (vec![77], 2));
    assert_eq!(sequences.held[&ID].tokens[..5], [0, 1, 2, 50, 77]);
}

#[test]
fn freed_blocks_are_reported_once_before_reuse() {
    let window = CacheGroup::FULL.with_window(20);
    let groups = vec![CacheGroup::FULL, window];
    let limits = SequenceLimits { groups, n_blocks: vec![8, 8], zero_kv: true, ..limits() };
    let mut sequences = RankSequences::new(limits, TokenSource::Draws);
    let mut after = |step: &Step| {
        sequences.begin(step).unwrap();
        let freed = sequences.uncleared().unwrap();
        let blocks: Vec<Vec<u32>> = freed.iter().map(|of| of.iter().map(|block: &BlockId| block.0).collect()).collect();
        freed.iter_mut().for_each(Vec::clear);
        sequences.lay_out(step, &mut sequences.new_batch()).unwrap();
        finish(&mut sequences, step, &mut Vec::new(), &no_masks(), &mut Vec::new(), &mut Vec::new());
        blocks
    };
    let none: Vec<Vec<u32>> = vec![vec![], vec![]];
    let other = RequestId(2);
    let first = step(&[request(ID, 60)], &[slice(0..33, Want::Nothing)], &[1, 2, 3, 4, 5, 6]);
    assert_eq!(after(&first), none);
    // The windowed blocks that the next position does not read are gone for the next step.
    assert_eq!(after(&step(&[], &[slice(33..40, Want::Nothing)], &[])), none);
    let beside = Slice::new(other, 0..5, Want::Nothing);
    let crowd = step(&[request(other, 9)], &[slice(40..60, Want::Nothing), beside.clone()], &[7, 0, 0, 4]);
    assert_eq!(after(&crowd), [vec![], vec![4]]);
    // One ends, and the other restarts in the step that would have ended it.
    let again = Step { ends: vec![ID], ..step(&[request(other, 9)], &[beside], &[2, 2]) };
    assert_eq!(after(&again), [vec![0, 1, 2, 3, 7], vec![0, 4, 5, 6]]);
    assert_eq!(after(&Step { ends: vec![other, ID], ..Step::default() }), [vec![2], vec![2]]);
    assert_eq!(after(&Step::default()), none);
    // No block is shared there, so no sequence begins behind a computed prefix.
    let hit = step(&[request(ID, 50)], &[slice(16..50, Want::Last)], &[0, 1, 2, 3, 0, 1, 2, 3]);
    sequences.begin(&hit).unwrap();
    let refused = sequences.lay_out(&hit, &mut sequences.new_batch()).unwrap_err();
    assert_eq!(refused, StepViolation::Gap { id: ID, start: 16, n_computed: 0 });
}

#[test]
fn a_window_needs_no_block_behind_it_and_each_group_has_its_own_pool() {
    let window = CacheGroup::FULL.with_window(20);
    let windowed = || {
        let limits = SequenceLimits { groups: vec![CacheGroup::FULL, window], n_blocks: vec![8, 4], ..limits() };
        RankSequences::new(limits, TokenSource::Draws)
    };
    let none = BlockId::NONE.0;
    // Behind 48 positions, 29 to 47 are read, so the first of the three blocks is not.
    let hit =
        |blocks: &[u32]| run(&mut windowed(), &step(&[request(ID, 50)], &[slice(48..50, Want::Last)], blocks), Some(1));
    let (batch, _) = hit(&[4, 5, 6, 7, none, 1, 2, 3]).unwrap();
    assert_eq!(batch.tables[0].blocks_of(0), [4, 5, 6, 7].map(BlockId));
    assert_eq!(batch.tables[1].blocks_of(0), [none, 1, 2, 3].map(BlockId));
    hit(&[4, 5, 6, 7, 0, 1, 2, 3]).unwrap();
    let refused = |block, n_blocks| StepViolation::NoSuchBlock { id: ID, block, n_blocks };
    assert_eq!(hit(&[4, 5, 6, 7, none, none, 2, 3]).unwrap_err(), refused(none, 4), "it is read");
    assert_eq!(hit(&[none, 5, 6, 7, none, 1, 2, 3]).unwrap_err(), refused(none, 8), "all is read");
    assert_eq!(hit(&[4, 5, 6, 7, none, 1, 2, 4]).unwrap_err(), refused(4, 4), "the pool is smaller");
    assert_eq!(
        hit(&[4, 5, 6, 7, 9, 1, 2, 3]).unwrap_err(),
        refused(9, 4),
        "a missing block that is not marked as none"
    );
    // The same id in two groups is not the same block.
    hit(&[3, 2, 1, 0, none, 2, 1, 0]).unwrap();
}

#[test]
fn a_recurrence_needs_the_page_that_it_goes_on_from_and_those_of_its_end() {
    let none = BlockId::NONE.0;
    let first = |blocks: &[u32], zero_kv| {
        let limits = SequenceLimits { groups: vec![CacheGroup::STATE], n_blocks: vec![4], zero_kv, ..limits() };
        let mut sequences = RankSequences::new(limits, TokenSource::Draws);
        let ran = run(&mut sequences, &step(&[request(ID, 60)], &[slice(0..40, Want::Nothing)], blocks), None);
        ran.map(|(batch, _)| (sequences, batch))
    };
    let refused = |block| StepViolation::NoSuchBlock { id: ID, block, n_blocks: 4 };
    let (mut sequences, batch) = first(&[none, none, 2], false).unwrap();
    assert_eq!(batch.tables[0].blocks_of(0), [none, none, 2].map(BlockId));
    assert_eq!(first(&[none, none, none], false).err(), Some(refused(none)), "the next slice continues from it");
    assert_eq!(first(&[none, 9, 2], false).err(), Some(refused(9)), "a missing block that is not marked as none");
    let next = |blocks: &[u32]| step(&[], &[slice(40..60, Want::Last)], blocks);
    let (batch, _) = run(&mut sequences, &next(&[3]), Some(1)).unwrap();
    assert_eq!(batch.tables[0].blocks_of(0), [none, none, 2, 3].map(BlockId));
    // A block that was never given is not freed either.
    let (mut sequences, _) = first(&[none, 0, 1], true).unwrap();
    run(&mut sequences, &next(&[3]), Some(1)).unwrap();
    sequences.begin(&Step { ends: vec![ID], ..Step::default() }).unwrap();
    assert_eq!(sequences.uncleared().unwrap(), [[0, 1, 3].map(BlockId).to_vec()]);
    // Behind a shared prefix, the last block of it is read.
    let hit = |blocks: &[u32]| {
        let limits = SequenceLimits { groups: vec![CacheGroup::STATE], n_blocks: vec![4], ..limits() };
        let hit = step(&[request(ID, 50)], &[slice(32..50, Want::Last)], blocks);
        run(&mut RankSequences::new(limits, TokenSource::Draws), &hit, Some(1))
    };
    hit(&[none, 1, 2, 3]).unwrap();
    hit(&[none, 1, none, 3]).unwrap();
    assert_eq!(hit(&[none, none, 2, 3]).unwrap_err(), refused(none));
}

#[test]
fn ends_come_first_and_a_start_replaces() {
    let mut sequences = sequences();
    let two = [request(ID, 3), request(RequestId(2), 3)];
    run(&mut sequences, &step(&two, &[], &[]), None).unwrap();
    let third = request(RequestId(3), 3);
    let ended = Step { ends: vec![RequestId(2)], ..step(&[third], &[], &[]) };
    run(&mut sequences, &ended, None).unwrap();
    run(&mut sequences, &step(&[request(ID, 5)], &[slice(0..5, Want::Last)], &[0]), Some(1)).unwrap();
    assert_eq!(sequences.len(), 2);
}

#[test]
fn a_prefix_computed_by_others_is_full_blocks() {
    let shared =
        |start| run(&mut sequences(), &step(&[request(ID, 40)], &[slice(start..40, Want::Last)], &[1, 2, 3]), Some(1));
    assert_eq!(shared(32).unwrap().0.positions[0], 32);
    assert_eq!(shared(20).unwrap_err(), StepViolation::Gap { id: ID, start: 20, n_computed: 0 });
}

#[test]
fn contradictions_are_refused_by_name() {
    let begun = step(&[request(ID, 20)], &[slice(0..10, Want::Nothing)], &[0]);
    let check = |step: Step, expected: StepViolation| {
        let mut sequences = sequences();
        run(&mut sequences, &begun, None).unwrap();
        assert_eq!(run(&mut sequences, &step, Some(1)).unwrap_err(), expected);
    };
    let last = |range| slice(range, Want::Last);
    let (id, other) = (ID, RequestId(2));
    check(step(&[], &[Slice { id: other, ..last(0..1) }], &[1]), StepViolation::Unknown(other));
    check(step(&[], &[last(11..20)], &[1]), StepViolation::Gap { id, start: 11, n_computed: 10 });
    check(step(&[], &[last(0..20)], &[1]), StepViolation::Gap { id, start: 0, n_computed: 10 });
    check(step(&[], &[last(10..10)], &[]), StepViolation::Empty { id, start: 10 });
    check(step(&[], &[last(10..21)], &[1]), StepViolation::NotInLog { id, end: 21, n_tokens: 20 });
    check(step(&[], &[last(10..u32::MAX)], &[1]), StepViolation::TooLong { id, end: u32::MAX, context: 64 });
    check(step(&[], &[last(10..12), last(12..20)], &[1]), StepViolation::TwoSlices(id));
    check(step(&[], &[last(10..20)], &[]), StepViolation::TooFewBlocks { id, needed: 1, n_left: 0 });
    check(step(&[], &[last(10..20)], &[8]), StepViolation::NoSuchBlock { id, block: 8, n_blocks: 8 });
    check(step(&[], &[last(10..20)], &[1, 2]), StepViolation::BlocksLeftOver(1));
    check(step(&[], &[last(10..20)], &[0]), StepViolation::WrittenTwice { id, block: 0 });
    check(step(&[request(other, 0)], &[], &[]), StepViolation::NoTokens(other));
    check(step(&[request(other, 65)], &[], &[]), StepViolation::TooLong { id: other, end: 65, context: 64 });
    let foreign = Request { prompt: vec![100], ..request(other, 0) };
    check(step(&[foreign], &[], &[]), StepViolation::NoSuchToken { id: other, token: 100, n_vocab: 100 });
    let many = [request(other, 1), request(RequestId(3), 1)];
    check(step(&many, &[], &[]), StepViolation::TooManySequences { n: 3, running_max: 2 });
    let long = Slice { id: other, ..last(0..40) };
    let rows = step(&[request(other, 40)], &[last(10..20), long], &[1, 2, 3, 4]);
    check(rows, StepViolation::TooManyRows { n: 50, rows_max: 40 });
}

fn with_grammar(n_prompt: u32) -> Request {
    Request { grammar: Some(Grammar::new("any")), ..request(ID, n_prompt) }
}

/// A prompt of three tokens; its first draw, the slices planned behind that, the draw again, and the next one.
fn late_steps() -> [Step; 5] {
    let last = |range| step(&[], &[slice(range, Want::Last)], &[]);
    [step(&[with_grammar(3)], &[slice(0..3, Want::Last)], &[0]), last(3..4), last(4..5), last(2..3), last(3..4)]
}

#[test]
fn a_late_draw_comes_again_and_what_was_planned_behind_it_is_void() {
    let mut sequences = sequences();
    let [first, behind, behind_that, again, next] = late_steps();
    let mut run = |step: &Step, drawn| {
        let (batch, done) = run_drawn(&mut sequences, step, drawn).unwrap();
        let tokens: Vec<Token> = done[0].tokens.iter().map(|out| out.token).collect();
        (batch.tokens, batch.positions, tokens, done[0].failed)
    };
    assert_eq!(run(&first, Err(DrawError::Late)), (vec![0, 1, 2], vec![0, 1, 2], vec![], None));
    // The device may draw any token from an empty mask, or fail.
    assert_eq!(run(&behind, Ok(77)), (vec![UNKNOWN], vec![3], vec![], None));
    assert_eq!(run(&behind_that, Err(DrawError::NotNumbers)), (vec![UNKNOWN], vec![4], vec![], None));
    for _ in 0..2 {
        assert_eq!(
            run(&again, Err(DrawError::Late)),
            (vec![2], vec![2], vec![], None),
            "recomputed any number of times"
        );
    }
    assert_eq!(run(&again, Ok(42)), (vec![2], vec![2], vec![42], None));
    assert_eq!(run(&next, Err(DrawError::NothingLeft)), (vec![42], vec![3], vec![], Some(Failure::NoToken)));
}

#[test]
fn a_late_draw_leaves_the_same_rows_on_all_ranks() {
    let drawn = [Err(DrawError::Late), Ok(7), Ok(8), Ok(42), Ok(43)];
    let mut sampler = sequences();
    let steps = late_steps();
    let expected: Vec<_> =
        steps.iter().zip(drawn).map(|(step, drawn)| run_drawn(&mut sampler, step, drawn).unwrap().0.tokens).collect();
    assert_eq!(expected, [vec![0, 1, 2], vec![UNKNOWN], vec![UNKNOWN], vec![2], vec![42]]);
    for late_max in [0, 1, 2, 8] {
        let mut sequences = sequences_that(TokenSource::Receives { late_max });
        let (mut messages, mut laid) = (vec![None, None, None, Some(42), Some(43)].into_iter(), Vec::new());
        for step in &steps {
            let mut batch = sequences.new_batch();
            sequences.begin(step).unwrap();
            while sequences.step_to_receive(step).is_some() {
                sequences.receive(&[messages.next().unwrap()]).unwrap();
            }
            sequences.lay_out(step, &mut batch).unwrap();
            sequences.note_remote_draws(step);
            laid.push(batch.tokens);
        }
        assert_eq!(laid, expected, "late by {late_max}");
    }
    let mut between = sequences_that(TokenSource::NeverKnows);
    let n_rows = |sequences: &mut RankSequences, step| run_receiving(sequences, step, None).0.len();
    assert!(steps.iter().zip(&expected).all(|(step, rows)| n_rows(&mut between, step) == rows.len()));
}

#[test]
fn what_was_not_late_is_not_drawn_again() {
    let [first, behind, _, again, _] = late_steps();
    let refused = |request: Request| {
        let mut sequences = sequences();
        run(&mut sequences, &Step { starts: vec![request], ..first.clone() }, Some(42)).unwrap();
        run(&mut sequences, &behind, Some(43)).unwrap();
        run(&mut sequences, &again, Some(42)).unwrap_err()
    };
    assert_eq!(refused(with_grammar(3)), StepViolation::NotLate { id: ID, position: 3 });
    assert_eq!(refused(request(ID, 3)), StepViolation::Gap { id: ID, start: 2, n_computed: 4 });
    // A prompt is never computed again.
    let mut sequences = sequences_that(TokenSource::NeverKnows);
    run_receiving(&mut sequences, &first, None);
    let within = step(&[], &[slice(1..2, Want::Last)], &[]);
    sequences.begin(&within).unwrap();
    let refused = sequences.lay_out(&within, &mut sequences.new_batch());
    assert_eq!(refused, Err(StepViolation::Gap { id: ID, start: 1, n_computed: 3 }));
}

/// Returns sequences whose guesses are the log to be drawn: three more tokens behind the first four.
fn guessing(tokens: TokenSource) -> RankSequences {
    let recalled = RecalledLogs { logs: vec![vec![0, 1, 2, 50, 51, 52, 53, 54, 55, 56, 57, 58]], wrong: 0 };
    let guesses = GuessConfig { source: GuessSource::Recalled(Arc::new(recalled)), n_max: 4, ..GuessConfig::default() };
    RankSequences::new(SequenceLimits { guesses, ..limits() }, tokens)
}

/// Runs a step on the sampling rank, whose rows draw these tokens. Returns its rows, its answer and its message.
fn verify(
    sequences: &mut RankSequences,
    step: &Step,
    drawn: &[Option<Token>],
) -> (Batch, SliceDone, Vec<Option<Token>>) {
    let (masks, mut batch, mut draws) = (no_masks(), sequences.new_batch(), Vec::new());
    sequences.begin(step).unwrap();
    sequences.lay_out(step, &mut batch).unwrap();
    sequences.collect_draws(step, &masks, &mut draws);
    assert_eq!((draws.len(), batch.outputs.len()), (drawn.len(), drawn.len()));
    let positions: Vec<u32> = draws.iter().map(Draw::position).collect();
    assert_eq!(positions, (step.slices[0].first_drawn()..=step.slices[0].range.end).collect::<Vec<_>>());
    let out = |token: &Option<Token>| token.map(|token| TokenOut { token, ..TokenOut::default() });
    let mut drawn: Vec<_> = drawn.iter().map(|token| out(token).ok_or(DrawError::NotNumbers)).collect();
    let (mut message, mut done) = (Vec::new(), Vec::new());
    finish(sequences, step, &mut drawn, &masks, &mut message, &mut done);
    (batch, done.pop().unwrap(), message)
}

fn with_drafts(range: std::ops::Range<u32>, n_draft: u16) -> Step {
    step(&[], &[Slice { n_draft, ..slice(range, Want::Last) }], &[])
}

fn tokens_of(done: &SliceDone) -> Vec<Token> {
    done.tokens.iter().map(|out| out.token).collect()
}

/// A prompt of three, with guesses behind its first draw; drafts of which two hold; a plain draw; and drafts that all
/// hold.
fn steps_with_drafts() -> [(Step, Vec<Option<Token>>); 5] {
    let first = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]);
    [
        (first, vec![Some(50)]),
        (with_drafts(3..7, 3), vec![Some(51), Some(52), Some(99), Some(77)]),
        (step(&[], &[slice(6..7, Want::Last)], &[]), vec![Some(54)]),
        // Restarts with its output so far, as far as the recalled log has it.
        (
            Step {
                ends: vec![ID],
                ..step(&[Request { output: vec![50, 51], ..request(ID, 3) }], &[slice(0..5, Want::Last)], &[1])
            },
            vec![Some(52)],
        ),
        (with_drafts(5..9, 3), vec![Some(53), Some(54), Some(55), Some(56)]),
    ]
}

#[test]
fn drafts_are_kept_as_far_as_they_are_what_is_drawn() {
    let mut sequences = guessing(TokenSource::Draws);
    let [first, part, plain, again, whole] = steps_with_drafts();
    let (_, done, message) = verify(&mut sequences, &first.0, &first.1);
    assert_eq!((tokens_of(&done), done.n_guess, done.n_hit), (vec![50], 3, 0));
    assert_eq!(message, [Some(50), None, Some(51), Some(52), Some(53), None]);
    let (batch, done, message) = verify(&mut sequences, &part.0, &part.1);
    assert_eq!((batch.tokens, batch.outputs), (vec![50, 51, 52, 53], vec![0, 1, 2, 3]));
    assert_eq!((tokens_of(&done), done.n_hit, done.failed), (vec![51, 52, 99], 2, None));
    assert_eq!((message, done.n_guess), (vec![Some(51), Some(52), Some(99), None, None], 0), "99 has no guesses");
    let (batch, done, message) = verify(&mut sequences, &plain.0, &plain.1);
    assert_eq!((batch.tokens, tokens_of(&done)), (vec![99], vec![54]), "the log continues after the drawn tokens");
    assert_eq!(message, [Some(54)], "without guesses, the message keeps its old form");
    verify(&mut sequences, &again.0, &again.1);
    let (batch, done, _) = verify(&mut sequences, &whole.0, &whole.1);
    assert_eq!((batch.tokens, tokens_of(&done), done.n_hit), (vec![52, 53, 54, 55], vec![53, 54, 55, 56], 4));
}

#[test]
fn a_draw_that_fails_behind_a_draft_comes_again_alone() {
    let mut sequences = guessing(TokenSource::Draws);
    let [first, (part, _), ..] = steps_with_drafts();
    verify(&mut sequences, &first.0, &first.1);
    let (_, done, _) = verify(&mut sequences, &part, &[Some(51), None, Some(53), Some(54)]);
    assert_eq!((tokens_of(&done), done.failed), (vec![51], None));
    let alone = step(&[], &[slice(4..5, Want::Last)], &[]);
    let (batch, done, _) = verify(&mut sequences, &alone, &[None]);
    assert_eq!((batch.tokens, tokens_of(&done), done.failed), (vec![51], vec![], Some(Failure::Computation)));
}

#[test]
fn drafts_leave_the_same_rows_on_all_ranks() {
    let steps = steps_with_drafts();
    let mut sampler = guessing(TokenSource::Draws);
    let sampled: Vec<_> = steps.iter().map(|(step, drawn)| verify(&mut sampler, step, drawn)).collect();
    let rows = |batch: &Batch| (batch.positions.clone(), batch.outputs.clone(), batch.slices.clone());
    for late_max in [0, 1, 8] {
        let mut sequences = guessing(TokenSource::Receives { late_max });
        let mut messages = sampled.iter().map(|(_, _, message)| message);
        for ((step, _), (expected, ..)) in steps.iter().zip(&sampled) {
            let mut batch = sequences.new_batch();
            sequences.begin(step).unwrap();
            while sequences.step_to_receive(step).is_some() {
                sequences.receive(messages.next().unwrap()).unwrap();
            }
            sequences.lay_out(step, &mut batch).unwrap();
            sequences.note_remote_draws(step);
            assert_eq!((&batch.tokens, rows(&batch)), (&expected.tokens, rows(expected)), "late by {late_max}");
        }
    }
    let mut between = guessing(TokenSource::NeverKnows);
    for ((step, _), (expected, ..)) in steps.iter().zip(&sampled) {
        let mut batch = between.new_batch();
        between.begin(step).unwrap();
        between.lay_out(step, &mut batch).unwrap();
        between.note_remote_draws(step);
        assert_eq!(rows(&batch), rows(expected));
    }
}

#[test]
fn unguessed_drafts_and_malformed_messages_are_refused() {
    let first = &steps_with_drafts()[0];
    let refused = |tokens: TokenSource, step: &Step| {
        let mut sequences = guessing(tokens);
        match tokens {
            TokenSource::Draws => drop(verify(&mut sequences, &first.0, &first.1)),
            _ => drop(run_receiving(&mut sequences, &first.0, None)),
        }
        sequences.begin(step).unwrap();
        sequences.lay_out(step, &mut sequences.new_batch()).unwrap_err()
    };
    let too_many = StepViolation::NotGuessed { id: ID, n_draft: 4, n_guess: 3 };
    assert_eq!(refused(TokenSource::Draws, &with_drafts(3..8, 4)), too_many);
    let not_behind_the_log = StepViolation::NotInLog { id: ID, end: 3, n_tokens: 4 };
    assert_eq!(refused(TokenSource::NeverKnows, &with_drafts(3..5, 2)), not_behind_the_log);
    let behind = |start: u32| StepViolation::Gap { id: ID, start, n_computed: 7 };
    for start in [3, 8] {
        let mut sequences = guessing(TokenSource::NeverKnows);
        run_receiving(&mut sequences, &first.0, None);
        run_receiving(&mut sequences, &with_drafts(3..7, 3), None);
        let next = step(&[], &[slice(start..start + 1, Want::Last)], &[]);
        sequences.begin(&next).unwrap();
        assert_eq!(sequences.lay_out(&next, &mut sequences.new_batch()).unwrap_err(), behind(start));
    }
    for words in [vec![Some(50), None], vec![Some(50), None, None, Some(7)], vec![Some(50), Some(51)], vec![]] {
        let mut sequences = guessing(TokenSource::Receives { late_max: 0 });
        run_receiving(&mut sequences, &first.0, None);
        let n = words.len();
        assert_eq!(sequences.receive(&words).unwrap_err(), StepViolation::NotAsManyTokens { step: 0, n, n_draws: 1 });
    }
}

#[test]
fn requests_for_more_than_tokens_get_no_guesses() {
    let n_guess = |request: Request, want: Want| {
        let mut sequences = guessing(TokenSource::Draws);
        let step = step(&[request], &[slice(0..3, want)], &[0]);
        run(&mut sequences, &step, Some(50)).unwrap().1[0].n_guess
    };
    assert_eq!(n_guess(request(ID, 3), Want::Last), 3);
    assert_eq!(n_guess(Request { goal: Goal::Score { top_n: 0 }, ..request(ID, 3) }, Want::Last), 0);
    assert_eq!(n_guess(with_grammar(3), Want::Last), 3);
}
