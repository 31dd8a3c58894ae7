//! A small coordinator for tests: plays requests on ranks according to a plan.

pub mod grid;

use checkpoint::Checkpoint;
use std::collections::VecDeque;
use std::path::PathBuf;
use types::cache::blocks_for;
use types::{
    Activations, BlockId, Epoch, KvDtype, Layout, NumericsMode, Rank, Request, RequestId, Sampling, Slice, Step,
    StepDone, StepId, TokenOut, Want,
};
use worker::{Assignment, MeshSecret, MeshTimeouts, RecalledLogs, Runner};

pub const RUNNING_MAX: u32 = 16;
/// Enough for all requests that may run at a time.
pub const N_BLOCKS: u32 = 400;
pub const CONTEXT: u32 = 400;
pub const VOCAB: u32 = 288;

pub fn assignment(folder: &str) -> Assignment {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../tests/reference", folder].iter().collect();
    let model_path = Some(folder.join("model.gguf")).filter(|path| path.exists()).unwrap_or(folder);
    let checkpoint = Checkpoint::open(&model_path).unwrap();
    let (n_layers, n_groups) = (checkpoint.spec().n_layers, checkpoint.spec().cache_groups().groups().len());
    Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::solo(n_layers),
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        model_path,
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        mode: NumericsMode::Lockstep,
        n_blocks: vec![N_BLOCKS; n_groups],
        kv_bytes: 96 << 20,
        context: CONTEXT,
        batch_tokens_max: 512,
        running_max: RUNNING_MAX,
        timeouts: MeshTimeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        guesses: worker::GuessConfig::default(),
    }
}

/// Returns requests of many lengths and samplings.
pub fn requests(n: u64) -> Vec<Request> {
    let request = |i: u64| Request {
        id: RequestId(i),
        prompt: (0..[1, 5, 16, 17, 90, 230][i as usize % 6]).map(|j| (j * j * 7 + i as u32 * 31) % VOCAB).collect(),
        sampling: Sampling {
            temperature: [0.0, 1.0, 0.6][i as usize % 3],
            top_k: [0, 0, 40, 5][i as usize % 4],
            top_p: [1.0, 0.9][i as usize % 2],
            seed: i,
            tokens_max: 9 + i as u32 % 8,
            logprobs: Some(i as u8 % 3),
            ..Sampling::default()
        },
        ..Request::default()
    };
    (0..n).map(request).collect()
}

#[derive(Clone, Copy)]
pub struct Plan {
    /// The prompt tokens of one step.
    pub chunk: u32,
    /// The requests that run at a time.
    pub together: usize,
    /// After every so many steps, the oldest request with new output is preempted, and begins again.
    pub preempt_every: Option<u64>,
    /// The number of steps over which the requests take turns.
    pub turns: u64,
    /// Steps that are given before the first of them is answered. If there are more than `turns`, a request's next step
    /// is given before its token is known.
    pub in_flight: usize,
}

impl Plan {
    /// One request after another, one step after another.
    pub const ALONE: Plan = Plan { chunk: 512, together: 1, preempt_every: None, turns: 1, in_flight: 1 };
}

/// Runs steps.
pub trait Ranks {
    fn give(&mut self, step: Step);
    /// Returns the answer to the oldest step that has none yet.
    fn answer(&mut self) -> StepDone;
}

/// One rank, which runs each step at once.
pub struct Alone<'a> {
    runner: &'a mut dyn Runner,
    answers: VecDeque<StepDone>,
}

impl<'a> Alone<'a> {
    pub fn new(runner: &'a mut dyn Runner) -> Alone<'a> {
        Alone { runner, answers: VecDeque::new() }
    }
}

impl Ranks for Alone<'_> {
    fn give(&mut self, step: Step) {
        let mut done = StepDone { id: step.id, ..StepDone::default() };
        self.runner.run(&step, &mut done).unwrap();
        self.answers.push_back(done);
    }

    fn answer(&mut self) -> StepDone {
        self.answers.pop_front().unwrap()
    }
}

pub struct Played {
    pub outputs: Vec<Vec<TokenOut>>,
    pub n_preempted: u64,
    pub n_together: usize,
    /// Draws that came back without a token, and were repeated.
    pub n_late: u64,
    /// Drafts that became tokens, and drafts that did not.
    pub n_accepted: usize,
    pub n_rejected: usize,
}

struct Live {
    request: Request,
    outputs: Vec<TokenOut>,
    /// Outputs for which steps were given.
    n_requested: usize,
    n_computed: u32,
    blocks: Vec<BlockId>,
    has_begun: bool,
    /// Its slices in flight that were planned behind a late draw.
    n_void: usize,
    /// How many tokens the ranks have guessed behind its last output.
    n_guess: u16,
}

pub struct Player<'a> {
    ranks: &'a mut dyn Ranks,
    /// Every sequence keeps all of its blocks, which are the same in each group's pool.
    n_groups: usize,
    free: Vec<BlockId>,
    live: Vec<Live>,
    step: Step,
    in_flight: VecDeque<Vec<Slice>>,
    finished: Vec<Live>,
    n_late: u64,
    /// The most drafts of a slice.
    drafts_max: u16,
    n_drafts: [usize; 2],
}

impl<'a> Player<'a> {
    pub fn new(ranks: &'a mut dyn Ranks, assignment: &Assignment) -> Player<'a> {
        let free = (0..N_BLOCKS).map(BlockId).collect();
        let (live, finished, in_flight) = (Vec::new(), Vec::new(), VecDeque::new());
        let n_groups = assignment.n_blocks.len();
        let (step, n_late, drafts_max, n_drafts) = (Step::default(), 0, 0, [0; 2]);
        Player { ranks, n_groups, free, live, step, in_flight, finished, n_late, drafts_max, n_drafts }
    }

    /// Gives slices as many drafts as were guessed, up to this limit.
    pub fn with_drafts(self, drafts_max: u16) -> Player<'a> {
        Player { drafts_max, ..self }
    }

    pub fn play(&mut self, requests: &[Request], plan: Plan) -> Played {
        let mut waiting: VecDeque<_> = requests.iter().cloned().collect();
        let (mut n_preempted, mut n_together) = (0, 0);
        while !waiting.is_empty() || !self.live.is_empty() {
            while self.live.len() < plan.together && !waiting.is_empty() {
                let request = waiting.pop_front().unwrap();
                let (outputs, blocks) = (vec![], vec![]);
                self.live.push(Live {
                    request,
                    outputs,
                    n_requested: 0,
                    n_computed: 0,
                    blocks,
                    has_begun: false,
                    n_void: 0,
                    n_guess: 0,
                });
            }
            if plan.preempt_every.is_some_and(|every| self.step.id.0 % every == every - 1) {
                n_preempted += self.preempt();
            }
            // The requests of this turn, or if none can run, those of the next one.
            let turn = self.step.id.0;
            (turn..turn + plan.turns).any(|turn| self.plan(plan.chunk, turn % plan.turns, plan.turns));
            n_together = n_together.max(self.step.slices.len());
            let is_idle = self.step.slices.is_empty();
            if !is_idle {
                self.in_flight.push_back(self.step.slices.clone());
                self.give();
            }
            if self.in_flight.len() >= if is_idle { 1 } else { plan.in_flight } {
                self.answer();
            }
        }
        self.give();
        assert!(self.ranks.answer().slices.is_empty());
        let mut finished = std::mem::take(&mut self.finished);
        finished.sort_by_key(|live: &Live| live.request.id);
        let outputs = finished.into_iter().map(|live| live.outputs).collect();
        let [n_accepted, n_rejected] = std::mem::take(&mut self.n_drafts);
        Played { outputs, n_preempted, n_together, n_late: std::mem::take(&mut self.n_late), n_accepted, n_rejected }
    }

    fn give(&mut self) {
        let next = StepId(self.step.id.0 + 1);
        self.ranks.give(std::mem::replace(&mut self.step, Step { id: next, ..Step::default() }));
    }

    fn preempt(&mut self) -> u64 {
        while !self.in_flight.is_empty() {
            self.answer();
        }
        // A request without new output would never make progress.
        let has_spoken = |live: &&mut Live| live.has_begun && live.outputs.len() > live.request.output.len();
        let Some(live) = self.live.iter_mut().find(has_spoken) else { return 0 };
        self.free.append(&mut live.blocks);
        self.step.ends.push(live.request.id);
        live.has_begun = false;
        live.n_computed = 0;
        live.n_guess = 0;
        1
    }

    /// Returns whether a request of this turn has something to compute.
    fn plan(&mut self, chunk: u32, turn: u64, turns: u64) -> bool {
        for live in self.live.iter_mut().filter(|live| live.request.id.0 % turns == turn) {
            let request = &mut live.request;
            if live.n_requested == request.sampling.tokens_max as usize {
                continue;
            }
            if !live.has_begun {
                request.output = live.outputs.iter().map(|out| out.token).collect();
                self.step.starts.push(request.clone());
                live.has_begun = true;
            }
            // A request with drafts waits for its answers: the guesses follow the last of them.
            if self.drafts_max > 0 && live.n_requested > live.outputs.len() {
                continue;
            }
            let n_tokens = (request.prompt.len() + live.n_requested) as u32;
            let end = n_tokens.min(live.n_computed + chunk);
            let want = if end == n_tokens { Want::Last } else { Want::Nothing };
            let n_left = (request.sampling.tokens_max as usize - live.n_requested - 1) as u16;
            let n_draft = if want == Want::Last { live.n_guess.min(self.drafts_max).min(n_left) } else { 0 };
            live.n_requested += usize::from(want == Want::Last) + usize::from(n_draft);
            let end = end + u32::from(n_draft);
            self.step.slices.push(Slice { n_draft, ..Slice::new(request.id, live.n_computed..end, want) });
            let n_held = live.blocks.len();
            while live.blocks.len() < blocks_for(end) as usize {
                live.blocks.push(self.free.pop().unwrap());
            }
            (0..self.n_groups).for_each(|_| self.step.blocks.extend_from_slice(&live.blocks[n_held..]));
            live.n_computed = end;
        }
        !self.step.slices.is_empty()
    }

    fn answer(&mut self) {
        let (slices, done) = (self.in_flight.pop_front().unwrap(), self.ranks.answer());
        assert_eq!(done.slices.len(), slices.len());
        for (slice, done) in slices.iter().zip(done.slices) {
            assert_eq!(done.failed, None);
            let live = self.live.iter_mut().find(|live| live.request.id == slice.id).unwrap();
            if live.n_void > 0 {
                assert!(done.tokens.is_empty(), "drawn from nothing");
                live.n_void -= 1;
            } else if slice.want == Want::Last && done.tokens.is_empty() {
                self.n_late += 1;
                (live.n_requested, live.n_computed) = (live.outputs.len(), slice.range.end - 1);
                live.n_void = self.in_flight.iter().flatten().filter(|later| later.id == slice.id).count();
            } else {
                let n_accepted = done.tokens.len().saturating_sub(1);
                self.n_drafts[0] += n_accepted;
                self.n_drafts[1] += usize::from(slice.n_draft) - n_accepted;
                live.outputs.extend(done.tokens);
                live.n_guess = done.n_guess;
                if slice.n_draft > 0 {
                    live.n_requested = live.outputs.len();
                    live.n_computed = (live.request.prompt.len() + live.n_requested - 1) as u32;
                }
            }
        }
        for i in (0..self.live.len()).rev() {
            if self.live[i].outputs.len() == self.live[i].request.sampling.tokens_max as usize {
                let mut live = self.live.remove(i);
                self.free.append(&mut live.blocks);
                self.step.ends.push(live.request.id);
                self.finished.push(live);
            }
        }
    }
}

/// Returns the outputs of the requests as guesses with mistakes.
pub fn recalled(requests: &[Request], played: &Played) -> RecalledLogs {
    let log = |(request, output): (&Request, &Vec<TokenOut>)| {
        request.prompt.iter().copied().chain(output.iter().map(|out| out.token)).collect()
    };
    RecalledLogs { logs: requests.iter().zip(&played.outputs).map(log).collect(), wrong: 25 }
}
