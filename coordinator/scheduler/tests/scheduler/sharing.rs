//! Requests that begin alike and come together: the common prefix is computed once.

use scheduler::{Config, Scheduler};
use types::{
    CacheGroup, Epoch, Finish, Micros, Request, RequestId, Sampling, SliceDone, Step, StepDone, TokenOut, Want,
};

const DRAWN: u32 = 7;

struct Replica {
    scheduler: Scheduler,
    n_computed: u32,
    n_finished: usize,
}

impl Replica {
    fn new(config: Config) -> Replica {
        Replica { scheduler: Scheduler::new(config, Epoch::default()).unwrap(), n_computed: 0, n_finished: 0 }
    }

    /// A prompt with this many tokens in common with all others.
    fn submit(&mut self, id: u64, n_common: u32, n_own: u32) {
        let own = (0..n_own).map(|position| 5000 + 1000 * id as u32 + position);
        let prompt = (0..n_common).map(|position| 10 + position % 900).chain(own).collect();
        let sampling = Sampling { tokens_max: 8, seed: id, ..Sampling::default() };
        self.scheduler
            .submit(Request { id: RequestId(id), prompt, sampling, ..Request::default() }, Micros(id))
            .unwrap();
    }

    /// Runs a step. False if there is none.
    fn step(&mut self) -> bool {
        let mut step = Step::default();
        if !self.scheduler.next_step(Micros(0), &mut step) {
            return false;
        }
        self.n_computed += step.n_tokens() as u32;
        let draw = |want| match want {
            Want::Last => vec![TokenOut { token: DRAWN, ..TokenOut::default() }],
            _ => vec![],
        };
        let slices = step.slices.iter().map(|slice| SliceDone { tokens: draw(slice.want), ..SliceDone::default() });
        let done = StepDone { id: step.id, epoch: step.epoch, slices: slices.collect(), micros: 0 };
        let mut out = Vec::new();
        self.scheduler.apply(&done, Micros(0), &mut out).unwrap();
        self.scheduler.check();
        self.n_finished += out.iter().filter(|output| output.finish == Some(Finish::Length)).count();
        true
    }

    /// Runs until all requests have ended. Returns the positions computed for prompts.
    fn run_out(&mut self) -> u32 {
        while self.step() {}
        // The last token of an answer is drawn and never computed.
        self.n_computed - 7 * self.n_finished as u32
    }
}

#[test]
fn choices_of_a_request_compute_its_prompt_once() {
    let groups = [vec![CacheGroup::FULL], vec![CacheGroup::FULL, CacheGroup::FULL.with_window(64)]];
    for (groups, n_prompt) in groups.into_iter().flat_map(|groups| [(groups.clone(), 1000), (groups, 1008)]) {
        let n_blocks = vec![4096; groups.len()];
        let mut replica = Replica::new(Config { groups, n_blocks, ..Config::default() });
        (0..8).for_each(|id| replica.submit(id, n_prompt, 0));
        let n_computed = replica.run_out();
        assert_eq!(replica.n_finished, 8);
        assert!(n_computed <= n_prompt + 16 * 7, "{n_computed} positions of a prompt of {n_prompt}");
    }
}

#[test]
fn requests_that_begin_alike_compute_the_beginning_once() {
    let mut replica = Replica::new(Config::default());
    (0..32).for_each(|id| replica.submit(id, 512, 40));
    let n_computed = replica.run_out();
    assert_eq!((replica.n_finished, n_computed), (32, 512 + 32 * 40));
}

/// The state behind the prompt's last full block is kept, and each choice gets a page of its own.
#[test]
fn choices_share_the_prompt_of_a_hybrid() {
    let groups = vec![CacheGroup::FULL, CacheGroup::STATE];
    let mut replica = Replica::new(Config { groups, n_blocks: vec![4096, 512], ..Config::default() });
    (0..8).for_each(|id| replica.submit(id, 1000, 0));
    let n_computed = replica.run_out();
    assert_eq!(replica.n_finished, 8);
    assert!(n_computed <= 1000 + 16 * 7, "{n_computed}");
}

/// Whatever ends the sequence that computes, another takes over.
#[test]
fn another_computes_when_the_first_is_cancelled() {
    let mut replica = Replica::new(Config { chunk_tokens_max: 128, batch_tokens_max: 128, ..Config::default() });
    (0..4).for_each(|id| replica.submit(id, 1000, 0));
    (0..3).for_each(|_| assert!(replica.step()));
    assert_eq!(replica.scheduler.stats().n_running, 1, "the others wait for the first");
    replica.scheduler.cancel(RequestId(0), &mut Vec::new());
    let n_computed = replica.run_out();
    assert_eq!(replica.n_finished, 3);
    assert!(n_computed <= 1000 + 16 * 2 + 128, "{n_computed}: what the first has computed stays");
}

#[test]
fn a_short_beginning_is_not_awaited() {
    let mut replica = Replica::new(Config::default());
    (0..4).for_each(|id| replica.submit(id, 40, 100));
    assert!(replica.step());
    let stats = replica.scheduler.stats();
    assert_eq!((stats.n_running, stats.prefixes_awaited), (4, 0));
}

#[test]
fn without_a_prefix_cache_nothing_is_awaited() {
    let mut replica = Replica::new(Config { prefix_cache: false, ..Config::default() });
    (0..2).for_each(|id| replica.submit(id, 200, 0));
    assert_eq!(replica.run_out(), 400);
}
