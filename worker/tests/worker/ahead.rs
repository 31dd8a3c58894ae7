//! Steps that begin before the step before them is answered, and passes repeated as graphs, on ranks over a driver that
//! runs kernels on an emulator. The tokens are those of steps that wait for each other. The host waits at most once per
//! step, and the device receives the next step before that wait.

use crate::common::grid::Threads;
use crate::common::{Alone, Plan, Played, Player, Ranks, assignment, recalled, requests};
use crate::fake_cuda::on_fake_cuda;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use types::{Activations, Grid, KvDtype, Layout, Request, Sampling, Step, StepDone};
use worker::{Assignment, CarrierChoice, ComputeDevice, GuessConfig, ModelLoader, Runner, UpcomingSteps};

const MODEL: &str = "llama-bf16-odd";
const DEEP: &str = "llama-deep.gguf";

fn loader(graphs: bool) -> ModelLoader {
    let device = ComputeDevice::Cuda { ordinal: 0, cache: None };
    ModelLoader { device, spin: false, graphs, ..ModelLoader::new(1) }
}

fn on_cuda(name: &str) -> Assignment {
    Assignment { activations: Activations::Bf16, kv_dtype: KvDtype::Bf16, ..assignment(name) }
}

/// Requests that the device draws alone, and every third one that needs the host.
fn mixed(n: u64, tokens_max: u32) -> Vec<Request> {
    let change = |(i, mut request): (usize, Request)| {
        request.prompt.truncate(40);
        let Sampling { seed, temperature, .. } = request.sampling;
        let plain = Sampling { seed, temperature, logprobs: Some(0), ..Sampling::default() };
        request.sampling = if i % 3 == 2 { request.sampling } else { plain };
        request.sampling.tokens_max = tokens_max;
        request
    };
    requests(n).into_iter().enumerate().map(change).collect()
}

fn plain(n: u64, tokens_max: u32) -> Vec<Request> {
    let requests =
        mixed(3 * n, tokens_max).into_iter().enumerate().filter(|(i, _)| i % 3 != 2).map(|(_, request)| request);
    requests.take(n as usize).collect()
}

/// One rank that sees the next step while it runs one.
struct Ahead<'a> {
    runner: &'a mut dyn Runner,
    given: VecDeque<Step>,
}

struct Front<'a>(&'a VecDeque<Step>);

impl UpcomingSteps for Front<'_> {
    fn next(&mut self) -> Option<&Step> {
        self.0.front()
    }
}

impl Ranks for Ahead<'_> {
    fn give(&mut self, step: Step) {
        self.given.push_back(step);
    }

    fn answer(&mut self) -> StepDone {
        let step = self.given.pop_front().unwrap();
        let mut done = StepDone { id: step.id, ..StepDone::default() };
        self.runner.run_with(&step, &mut Front(&self.given), &mut done).unwrap();
        done
    }
}

fn alone(assignment: &Assignment, requests: &[Request]) -> Played {
    let (mut runner, _) = loader(false).build(assignment).unwrap();
    Player::new(&mut Alone::new(&mut runner), assignment).play(requests, Plan::ALONE)
}

fn ahead(assignment: &Assignment, requests: &[Request], plan: Plan) -> Played {
    let (mut runner, _) = loader(true).build(assignment).unwrap();
    let mut ranks = Ahead { runner: &mut runner, given: VecDeque::new() };
    Player::new(&mut ranks, assignment).play(requests, Plan { in_flight: 2, ..plan })
}

/// The driver's calls since the last look.
struct Trace {
    path: PathBuf,
    n_read: usize,
}

impl Trace {
    fn new() -> Trace {
        let path = PathBuf::from(std::env::var_os("FAKE_CUDA_TRACE").unwrap());
        Trace { path, n_read: 0 }
    }

    fn more(&mut self) -> Vec<String> {
        let text = std::fs::read_to_string(&self.path).unwrap();
        let lines: Vec<String> = text.lines().skip(self.n_read).map(str::to_owned).collect();
        self.n_read += lines.len();
        lines
    }
}

/// A test's own trace file, removed at the end.
struct TraceFile(String);

impl TraceFile {
    fn new(test: &str) -> TraceFile {
        let name = format!("lockstep-trace-{test}-{}", std::process::id());
        TraceFile(std::env::temp_dir().join(name).to_str().unwrap().to_owned())
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        // The file is absent if the test runs in a process of its own.
        let _gone = std::fs::remove_file(&self.0);
    }
}

fn count(lines: &[String], what: &str) -> usize {
    lines.iter().filter(|line| *line == what).count()
}

#[test]
fn steps_that_are_begun_ahead_give_the_tokens_of_one_after_another() {
    on_fake_cuda("steps_that_are_begun_ahead_give_the_tokens_of_one_after_another", &[], || {
        let assignment = on_cuda(MODEL);
        for (requests, together) in [(plain(5, 9), 5), (mixed(6, 6), 4)] {
            let expected = alone(&assignment, &requests);
            for preempt_every in [None, Some(4)] {
                let plan = Plan { chunk: 19, together, preempt_every, ..Plan::ALONE };
                let played = ahead(&assignment, &requests, plan);
                assert!(played.outputs == expected.outputs, "{together} together, preempted {preempt_every:?}");
                assert_eq!(played.n_preempted > 0, preempt_every.is_some());
            }
        }
    });
}

/// Returns a step in which each request draws its next token.
fn decode(id: u64, requests: &[Request]) -> Step {
    let slices = requests.iter().map(|request| {
        let at = request.prompt.len() as u32 + id as u32 - 1;
        types::Slice::new(request.id, at..at + 1, types::Want::Last)
    });
    Step { id: types::StepId(id), slices: slices.collect(), ..Step::default() }
}

#[test]
fn host_submits_next_step_before_its_only_wait() {
    let file = TraceFile::new("waits");
    let screws = [("FAKE_CUDA_TRACE", &*file.0)];
    on_fake_cuda("host_submits_next_step_before_its_only_wait", &screws, || {
        let assignment = on_cuda(MODEL);
        // Each request stays within one block, so that no step has blocks to give.
        let mut requests = plain(3, 12);
        requests.iter_mut().for_each(|request| request.prompt = vec![3, 1, request.id.0 as u32]);
        let mut first = decode(0, &requests);
        first.slices.iter_mut().for_each(|slice| slice.range = 0..3);
        first.blocks = (0..3).map(types::BlockId).collect();
        first.starts = requests.clone();
        let (mut runner, _) = loader(true).build(&assignment).unwrap();
        let mut given: VecDeque<Step> = std::iter::once(first).chain((1..12).map(|id| decode(id, &requests))).collect();
        let (mut trace, mut n_graphs) = (Trace::new(), 0);
        trace.more();
        while let Some(step) = given.pop_front() {
            let mut done = StepDone { id: step.id, ..StepDone::default() };
            runner.run_with(&step, &mut Front(&given), &mut done).unwrap();
            assert!(done.slices.iter().all(|slice| slice.tokens.len() == 1), "{done:?}");
            let calls = trace.more();
            n_graphs += count(&calls, "graph");
            // The first step finishes the work of loading.
            assert!(count(&calls, "wait") <= 1 || step.id.0 == 0, "step {}: {calls:?}", step.id.0);
            if step.id.0 == 0 || given.is_empty() {
                continue;
            }
            // All of this step began while the step before it ran, so these calls belong to the next step.
            let uploaded_at = calls.iter().position(|line| line == "upload").unwrap();
            let waits = calls.iter().position(|line| line == "wait");
            // While a rank makes a graph, the begun pass may have ended.
            let has_recorded = count(&calls, "record") > 0;
            assert!(waits.map_or(has_recorded, |waits| uploaded_at < waits), "step {}: {calls:?}", step.id.0);
            assert!(calls.iter().any(|line| line == "launch take_drawn"), "it takes tokens on the device: {calls:?}");
        }
        assert!(n_graphs >= 8, "{n_graphs} graphs");
    });
}

#[test]
fn ranks_of_one_device_take_and_give_back_no_memory_while_they_serve() {
    let file = TraceFile::new("memory");
    // The driver waits for the whole context where a real one may, and a kernel of one rank waits for the kernel of the
    // other. If memory changed hands in between, the ranks would report a passed deadline.
    let screws = [("FAKE_CUDA_TRACE", &*file.0), ("FAKE_CUDA_GRAPHS_WAIT", "1")];
    on_fake_cuda("ranks_of_one_device_take_and_give_back_no_memory_while_they_serve", &screws, || {
        let (assignment, requests) = (on_cuda(DEEP), mixed(3, 6));
        let expected = alone(&assignment, &requests);
        let mut trace = Trace::new();
        for (tp, pp) in [(2, 1), (2, 2)] {
            let loader = ModelLoader { carrier: CarrierChoice::Ipc, ..loader(true) };
            let layout = Layout::even(Grid { tp, pp }, assignment.layout.n_layers()).unwrap();
            let plan = Plan { chunk: 25, together: 3, in_flight: usize::from(pp), ..Plan::ALONE };
            let mut grid = Threads::start(&loader, &assignment, &layout);
            trace.more();
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            let calls = trace.more();
            grid.end();
            assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}");
            let of = |what: &str| count(&calls, what);
            assert!(of("instantiate") >= 2 && of("graph") >= 4 && of("launch sum_one_shot") > 0, "tp {tp}, pp {pp}");
            let waiting = ["allocate", "free", "load", "unload"].map(|what| (what, of(what)));
            assert!(waiting.iter().all(|(_, n)| *n == 0), "while they served, tp {tp}, pp {pp}: {waiting:?}");
        }
    });
}

#[test]
fn graphs_carry_sums_of_devices() {
    let file = TraceFile::new("sums");
    let screws = [("FAKE_CUDA_TRACE", &*file.0)];
    on_fake_cuda("graphs_carry_sums_of_devices", &screws, || {
        let (assignment, requests) = (on_cuda(DEEP), mixed(3, 6));
        let expected = alone(&assignment, &requests);
        let mut trace = Trace::new();
        let over_memory = [(CarrierChoice::Ipc, 2, 1), (CarrierChoice::Ipc, 2, 2)];
        let others = [(CarrierChoice::Nccl, 2, 1), (CarrierChoice::Nccl, 2, 2), (CarrierChoice::Host, 1, 2)];
        for (carrier, tp, pp) in over_memory.into_iter().chain(others) {
            let loader = ModelLoader { carrier, ..loader(true) };
            let layout = Layout::even(Grid { tp, pp }, assignment.layout.n_layers()).unwrap();
            let plan = Plan { chunk: 25, together: 3, in_flight: usize::from(pp), ..Plan::ALONE };
            let mut grid = Threads::start(&loader, &assignment, &layout);
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            grid.end();
            assert!(played.outputs == expected.outputs, "{carrier:?} tp {tp}, pp {pp}");
            let calls = trace.more();
            assert!(count(&calls, "graph") >= 4, "{carrier:?} tp {tp}, pp {pp}");
            let is_over_memory = carrier == CarrierChoice::Ipc;
            assert_eq!(count(&calls, "launch sum_one_shot") > 0, is_over_memory, "{carrier:?} tp {tp}, pp {pp}");
        }
    });
}

/// A device draws behind drafts as it draws everywhere, and a step with drafts does not begin before its turn.
#[test]
fn drafts_on_a_device_give_the_tokens_of_none() {
    on_fake_cuda("drafts_on_a_device_give_the_tokens_of_none", &[], || {
        for (model, grid) in [(MODEL, None), (DEEP, Some(Grid { tp: 2, pp: 2 }))] {
            let (assignment, requests) = (on_cuda(model), mixed(4, 9));
            let expected = alone(&assignment, &requests);
            let assignment = Assignment { guesses: GuessConfig { n_max: 5, ..GuessConfig::default() }, ..assignment };
            let recalled = Some(Arc::new(recalled(&requests, &expected)));
            let loader = ModelLoader { recalled, carrier: CarrierChoice::Host, ..loader(true) };
            let plan = Plan { chunk: 19, together: 4, preempt_every: Some(6), in_flight: 2, ..Plan::ALONE };
            let played = match grid {
                None => {
                    let (mut runner, _) = loader.build(&assignment).unwrap();
                    let mut ranks = Ahead { runner: &mut runner, given: VecDeque::new() };
                    Player::new(&mut ranks, &assignment).with_drafts(4).play(&requests, plan)
                }
                Some(grid) => {
                    let layout = Layout::even(grid, assignment.layout.n_layers()).unwrap();
                    let mut ranks = Threads::start(&loader, &assignment, &layout);
                    let played = Player::new(&mut ranks, &assignment).with_drafts(4).play(&requests, plan);
                    ranks.end();
                    played
                }
            };
            assert!(played.outputs == expected.outputs, "{model} on {grid:?}");
            let (n_accepted, n_rejected) = (played.n_accepted, played.n_rejected);
            assert!(n_accepted > 3 && n_rejected > 3, "{model} on {grid:?}: {n_accepted} and {n_rejected}");
        }
    });
}
