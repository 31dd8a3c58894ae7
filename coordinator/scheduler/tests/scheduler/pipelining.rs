//! Several stages: which sequences are in which step, how prompts are cut for them, and that no stage waits without
//! need.

use scheduler::{Config, RequestOutput, Scheduler, Stats, WorkerLoss};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use types::{Epoch, Micros, Request, RequestId, Sampling, SliceDone, Step, StepDone, Token, TokenOut, Want};

fn config(n_stages: u32) -> Config {
    Config { n_blocks: vec![1024], running_max: 64, n_stages, steps_in_flight_max: n_stages + 1, ..Config::default() }
}

fn request(id: u64, n_prompt: u32, tokens_max: u32) -> Request {
    let prompt = (0..n_prompt).map(|position| id as Token * 1000 + position).collect();
    let sampling = Sampling { tokens_max, ..Sampling::default() };
    Request { id: RequestId(id), prompt, sampling, ..Request::default() }
}

/// Stages that take one beat per step, and a scheduler that plans between two beats. A stage that must wait for a
/// token, or has no step, is idle for the beat.
struct Pipeline {
    scheduler: Scheduler,
    n_stages: usize,
    /// The steps on their way, the oldest first, and how many stages each has passed.
    steps: VecDeque<(Step, usize)>,
    planned: Vec<Step>,
    /// For each beat, how many stages computed.
    busy: Vec<usize>,
}

impl Pipeline {
    fn new(config: Config) -> Pipeline {
        let n_stages = config.n_stages as usize;
        let scheduler = Scheduler::new(config, Epoch::default()).unwrap();
        Pipeline { scheduler, n_stages, steps: VecDeque::new(), planned: Vec::new(), busy: Vec::new() }
    }

    fn submit(&mut self, request: Request) {
        self.scheduler.submit(request, Micros(0)).unwrap();
    }

    fn beat(&mut self) -> Vec<RequestOutput> {
        let mut step = Step::default();
        while self.scheduler.next_step(Micros(0), &mut step) {
            self.scheduler.check();
            self.planned.push(step.clone());
            self.steps.push_back((step.clone(), 0));
        }
        let moving: Vec<usize> = (0..self.steps.len()).filter(|&i| self.may_move(i)).collect();
        moving.iter().for_each(|&i| self.steps[i].1 += 1);
        self.busy.push(moving.len());
        let mut out = Vec::new();
        while self.steps.front().is_some_and(|(_, n_passed)| *n_passed == self.n_stages) {
            let (step, _) = self.steps.pop_front().unwrap();
            self.scheduler.apply(&answer(&step), Micros(0), &mut out).unwrap();
            self.scheduler.check();
        }
        out
    }

    /// Whether its next stage is free, and no step on its way draws a token that it is to compute.
    fn may_move(&self, i: usize) -> bool {
        let (step, n_passed) = &self.steps[i];
        let is_free = i == 0 || self.steps[i - 1].1 > *n_passed;
        let draws = |slice: &types::Slice, other: &Step| {
            other.slices.iter().any(|before| (before.id, before.want) == (slice.id, Want::Last))
        };
        let mut before = self.steps.iter().take(i).map(|(step, _)| step);
        let awaits = before.any(|other| step.slices.iter().any(|slice| draws(slice, other)));
        is_free && !(*n_passed == 0 && awaits)
    }

    fn run(&mut self, n_beats: usize) {
        (0..n_beats).for_each(|_| drop(self.beat()));
    }

    fn stats(&self) -> Stats {
        self.scheduler.stats()
    }
}

fn answer(step: &Step) -> StepDone {
    let draw = |want| if want == Want::Last { vec![TokenOut { token: 7, ..TokenOut::default() }] } else { vec![] };
    let slices = step.slices.iter().map(|slice| SliceDone { tokens: draw(slice.want), ..SliceDone::default() });
    StepDone { id: step.id, epoch: step.epoch, slices: slices.collect(), micros: 0 }
}

fn ids(step: &Step) -> BTreeSet<u64> {
    step.slices.iter().map(|slice| slice.id.0).collect()
}

#[test]
fn sixteen_sequences_on_two_stages_alternate_by_eights() {
    let mut pipeline = Pipeline::new(config(2));
    (0..16).for_each(|id| pipeline.submit(request(id, 20, 200)));
    pipeline.run(100);
    let steady: Vec<_> = pipeline.planned[4..].iter().map(ids).collect();
    assert!(steady.len() >= 90);
    for pair in steady.windows(2) {
        assert_eq!((pair[0].len(), pair[1].len()), (8, 8));
        assert!(pair[0].is_disjoint(&pair[1]), "{pair:?}");
    }
    assert!(steady.windows(3).all(|three| three[0] == three[2]), "each sequence is in every second step");
    assert!(pipeline.busy[8..].iter().all(|&n_busy| n_busy == 2), "no stage waits: {:?}", pipeline.busy);
}

#[test]
fn any_number_of_sequences_is_spread_evenly_over_any_number_of_stages() {
    for n_stages in 1..=5usize {
        for n_sequences in 1..=33u64 {
            let mut pipeline = Pipeline::new(config(n_stages as u32));
            (0..n_sequences).for_each(|id| pipeline.submit(request(id, 5 + id as u32, 400)));
            pipeline.run(20 + 8 * n_stages);
            let (n_before, early_before) = (pipeline.planned.len(), pipeline.stats().steps_early);
            pipeline.run(60);
            let steady = &pipeline.planned[n_before..];
            let case = format!("{n_sequences} sequences on {n_stages} stages");
            let n_groups = n_stages.min(n_sequences as usize);
            assert!(steady.len() >= 60 * n_groups / n_stages - 1, "{case}: {} steps", steady.len());
            let (least, most) = (n_sequences as usize / n_groups, (n_sequences as usize).div_ceil(n_groups));
            for (i, step) in steady.iter().enumerate() {
                assert!((least..=most).contains(&step.slices.len()), "{case}: {} in step {i}", step.slices.len());
            }
            for round in steady.windows(n_groups) {
                let all: BTreeSet<u64> = round.iter().flat_map(ids).collect();
                assert_eq!(all.len(), n_sequences as usize, "{case}: each sequence once in {n_groups} steps");
            }
            let n_busy: usize = pipeline.busy.iter().rev().take(60).sum();
            assert_eq!(n_busy, 60 * n_groups, "{case}: as many stages compute as can");
            let n_early = pipeline.stats().steps_early - early_before;
            assert_eq!(n_early > 0, n_groups < n_stages, "{case}: steps_early counts steps for which a stage waits");
        }
    }
}

#[test]
fn turns_go_round_even_if_each_step_is_answered_before_the_next() {
    let mut scheduler = Scheduler::new(config(2), Epoch::default()).unwrap();
    (0..3).for_each(|id| scheduler.submit(request(id, 5, 50), Micros(0)).unwrap());
    let mut step = Step::default();
    let planned: Vec<Vec<u64>> = core::iter::from_fn(|| {
        scheduler.next_step(Micros(0), &mut step).then_some(())?;
        scheduler.apply(&answer(&step), Micros(0), &mut Vec::new()).unwrap();
        Some(ids(&step).into_iter().collect())
    })
    .take(6)
    .collect();
    assert_eq!(planned, [vec![0, 1, 2], vec![0], vec![1, 2], vec![0], vec![1, 2], vec![0]]);
}

#[test]
fn groups_even_out_when_sequences_come_and_go() {
    let mut pipeline = Pipeline::new(config(3));
    // Those with an even id end early, and three come late.
    (0..24).for_each(|id| pipeline.submit(request(id, 10, if id % 2 == 0 { 20 } else { 300 })));
    pipeline.run(100);
    (24..27).for_each(|id| pipeline.submit(request(id, 10, 300)));
    pipeline.run(60);
    let steady: Vec<_> = pipeline.planned.iter().rev().take(30).map(ids).collect();
    assert!(steady.iter().all(|step| step.len() == 5), "{steady:?}");
    assert!(steady.windows(4).all(|four| four[0] == four[3] && four[0].is_disjoint(&four[1])));
    assert!(pipeline.busy.iter().rev().take(30).all(|&n_busy| n_busy == 3));
}

#[test]
fn a_long_prompt_fills_the_pipeline_with_its_own_chunks() {
    // (stages, prompt, chunk at most, chunk at least, lengths of the chunks)
    let cases: [(u32, u32, u32, u32, &[u32]); 7] = [
        (1, 300, 512, 64, &[300]),
        (2, 300, 512, 64, &[150, 150]),
        (4, 300, 512, 64, &[75, 75, 75, 75]),
        (4, 300, 512, 128, &[128, 128, 44]),
        (4, 100, 512, 128, &[100]),
        (2, 300, 50, 64, &[50; 6]),
        (3, 301, 512, 1, &[101, 101, 99]),
    ];
    for (n_stages, n_prompt, chunk_tokens_max, chunk_tokens_min, lengths) in cases {
        let mut pipeline = Pipeline::new(Config { chunk_tokens_max, chunk_tokens_min, ..config(n_stages) });
        pipeline.submit(request(1, n_prompt, 1));
        pipeline.run(lengths.len() + n_stages as usize - 1);
        let planned: Vec<_> = pipeline.planned.iter().map(|step| step.slices[0].range.len() as u32).collect();
        assert_eq!(planned, lengths, "{n_prompt} on {n_stages}");
        let n_passes = lengths.len() * n_stages as usize;
        assert_eq!(pipeline.busy.iter().sum::<usize>(), n_passes, "one chunk follows another without a gap");
    }
}

#[test]
fn prompt_is_not_slowed_by_a_decoding_request() {
    let mut pipeline = Pipeline::new(Config { chunk_tokens_max: 32, ..config(2) });
    pipeline.submit(request(1, 5, 300));
    pipeline.run(10);
    pipeline.submit(request(2, 640, 5));
    let n_before = pipeline.planned.len();
    pipeline.run(23);
    let chunks = pipeline.planned[n_before..].iter().filter(|step| ids(step).contains(&2));
    assert!(chunks.clone().count() >= 20, "a chunk in every beat");
    let both: Vec<bool> = chunks.map(|step| ids(step).contains(&1)).collect();
    assert!(both.windows(2).all(|pair| pair[0] != pair[1]), "the decoding request is in every second chunk: {both:?}");
}

#[test]
fn no_request_starves_while_others_come_and_go() {
    let mut pipeline = Pipeline::new(Config { running_max: 7, steps_in_flight_max: 4, ..config(3) });
    let mut last_output_beats = BTreeMap::new();
    for beat in 0..600u64 {
        if beat % 4 == 0 {
            let tokens_max = 1 + (beat * 7 % 40) as u32;
            pipeline.submit(request(beat, 3 + (beat % 50) as u32, tokens_max));
        }
        for output in pipeline.beat() {
            let before = last_output_beats.insert(output.id, beat).unwrap_or(beat);
            assert!(beat - before <= 9, "{} returned no token for {} beats", output.id, beat - before);
            if output.finish.is_some() {
                last_output_beats.remove(&output.id);
            }
        }
    }
    assert!(last_output_beats.values().all(|&last_beat| 600 - last_beat <= 9));
    assert!(pipeline.stats().tokens_drawn > 1000);
}

#[test]
fn bubbles_are_counted_once_each() {
    // One sequence, two stages, nothing ahead: after each plan there is room and nothing to plan.
    let mut pipeline = Pipeline::new(Config { slices_ahead_max: 0, ..config(2) });
    pipeline.submit(request(1, 10, 6));
    let mut step = Step::default();
    pipeline.run(13);
    assert_eq!((pipeline.stats().steps, pipeline.stats().tokens_drawn), (6 + 1, 6));
    assert_eq!(pipeline.stats().starved, 6);
    assert!((0..9).all(|_| !pipeline.scheduler.next_step(Micros(0), &mut step)));
    assert_eq!(pipeline.stats().starved, 6, "nothing runs, so no stage starves");
}

#[test]
fn beside_a_suspect_there_is_one_step_and_so_one_group() {
    let mut scheduler = Scheduler::new(config(2), Epoch::default()).unwrap();
    (0..4).for_each(|id| scheduler.submit(request(id, 5, 9), Micros(0)).unwrap());
    let mut step = Step::default();
    assert!(scheduler.next_step(Micros(0), &mut step));
    scheduler.requeue_all(Epoch { incarnation: 0, n: 1 }, WorkerLoss::Unexplained, &mut Vec::new());
    (4..8).for_each(|id| scheduler.submit(request(id, 5, 9), Micros(0)).unwrap());
    for n_slices in [5, 6, 7, 8, 4] {
        assert!(scheduler.next_step(Micros(0), &mut step));
        assert_eq!(step.slices.len(), n_slices);
        let is_last = scheduler.next_step(Micros(0), &mut Step::default());
        assert_eq!(is_last, n_slices == 4, "two steps in flight again once each request has returned a token");
        if !is_last {
            scheduler.apply(&answer(&step), Micros(0), &mut Vec::new()).unwrap();
        }
        scheduler.check();
    }
}
