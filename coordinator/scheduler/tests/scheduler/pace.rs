//! The time of a step: prompts get what the sequences that decode leave of it.

use scheduler::{Config, Scheduler, StepPace};
use types::{Epoch, Micros, Priority, Request, RequestId, Sampling, SliceDone, Step, StepDone, TokenOut, Want};

/// A step takes this long for each row.
const ROW_MICROS: u64 = 100;

/// Steps one after another, each as long as its rows take.
struct Bench {
    scheduler: Scheduler,
    steps: Vec<Step>,
}

impl Bench {
    fn new(pace: StepPace) -> Bench {
        let config = Config { pace, batch_tokens_max: 512, chunk_tokens_max: 512, ..Config::default() };
        Bench { scheduler: Scheduler::new(config, Epoch::default()).unwrap(), steps: Vec::new() }
    }

    fn submit(&mut self, id: u64, n_prompt: u32, priority: i8) {
        let prompt = (0..n_prompt).map(|position| position + 1000 * id as u32).collect();
        let sampling = Sampling { tokens_max: 500, ..Sampling::default() };
        let request =
            Request { id: RequestId(id), prompt, sampling, priority: Priority(priority), ..Request::default() };
        self.scheduler.submit(request, Micros(id)).unwrap();
    }

    /// Runs a step, and returns its rows.
    fn step(&mut self) -> u32 {
        let mut step = Step::default();
        assert!(self.scheduler.next_step(Micros(0), &mut step));
        let draw = |want| if want == Want::Last { vec![TokenOut::default()] } else { vec![] };
        let done = step.slices.iter().map(|slice| SliceDone { tokens: draw(slice.want), ..SliceDone::default() });
        let done = StepDone { id: step.id, epoch: step.epoch, slices: done.collect(), micros: 0 };
        let n_rows = step.n_tokens() as u32;
        self.scheduler.apply(&done, Micros(u64::from(n_rows) * ROW_MICROS), &mut Vec::new()).unwrap();
        self.scheduler.check();
        self.steps.push(step);
        n_rows
    }
}

/// Four sequences decode, and their costs are known.
fn four_decode(pace: StepPace, priority: i8) -> Bench {
    let mut bench = Bench::new(pace);
    (0..4).for_each(|id| bench.submit(id, 64, priority));
    assert_eq!(bench.step(), 256, "nothing decodes: a step may have all that is waiting");
    (0..30).for_each(|_| assert_eq!(bench.step(), 4));
    bench
}

#[test]
fn chunks_get_the_time_that_is_left() {
    let mut bench = four_decode(StepPace::fixed(10_000), 0);
    bench.submit(9, 1000, 0);
    let rows: Vec<u32> = (0..9).map(|_| bench.step()).collect();
    // A hundred rows take ten milliseconds, and four of them decode.
    assert!(rows.iter().all(|rows| (85..=105).contains(rows)), "{rows:?}");
    assert!(bench.scheduler.stats().cut_by_time >= 9, "{:?}", bench.scheduler.stats());
    let timing = bench.scheduler.step_timing().unwrap();
    assert!(timing.predicted.0.abs_diff(timing.measured.0) * 5 < timing.measured.0, "{timing:?}");
}

#[test]
fn a_prompt_goes_on_when_no_time_is_left() {
    let mut bench = four_decode(StepPace::fixed(1), 0);
    bench.submit(9, 100, 0);
    let rows: Vec<u32> = (0..7).map(|_| bench.step()).collect();
    assert_eq!(rows, [20, 20, 20, 20, 20, 20, 8], "a block in each step");
}

#[test]
fn time_is_a_multiple_of_what_decoding_costs() {
    let mut bench = four_decode(StepPace { micros: 0, decode_costs: 11 }, 0);
    bench.submit(9, 1000, 0);
    let rows = bench.step();
    assert!((38..=60).contains(&rows), "four rows, and ten times as many: {rows}");
}

/// Requests of a later priority yield their pace.
#[test]
fn only_usual_priorities_keep_their_pace() {
    let mut bench = four_decode(StepPace::fixed(10_000), 1);
    bench.submit(9, 1000, 0);
    assert_eq!((bench.step(), bench.scheduler.stats().cut_by_time), (512, 0));
    assert_eq!(bench.scheduler.stats().cut_by_tokens, 1);
}

#[test]
fn no_limit_is_a_limit_of_any_length() {
    let mut bench = four_decode(StepPace::fixed(u64::MAX), 0);
    bench.submit(9, 1000, 0);
    assert_eq!(bench.step(), 512);
}

#[test]
fn time_counts_those_that_wait_as_decoding() {
    let mut bench = four_decode(StepPace { micros: 0, decode_costs: 3 }, 0);
    (9..29).for_each(|id| bench.submit(id, 200, 0));
    let rows: Vec<u32> = (0..5).map(|_| bench.step()).collect();
    // 24 sequences, three times: not twelve rows, of which eight are for prompts.
    assert!(rows.iter().all(|rows| (55..=90).contains(rows)), "{rows:?}");
}
