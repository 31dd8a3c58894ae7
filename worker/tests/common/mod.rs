//! A coordinator small enough to see through: plays requests on a runner as a plan says.

use checkpoint::Checkpoint;
use std::path::PathBuf;
use types::cache::blocks_for;
use types::{
    BlockId, Epoch, Layout, Rank, Request, RequestId, Sampling, Slice, SliceDone, Step, StepDone, StepId, TokenOut,
    Want,
};
use worker::{Assignment, MeshSecret, Runner};

pub const RUNNING_MAX: u32 = 16;
pub const CONTEXT: u32 = 400;
pub const VOCAB: u32 = 288;

pub fn assignment(folder: &str) -> Assignment {
    let model_path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../tests/reference", folder].iter().collect();
    let n_layers = Checkpoint::open(&model_path).unwrap().spec().n_layers;
    Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::solo(n_layers),
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        model_path,
        activations: "int8".into(),
        kv_dtype: "f16".into(),
        kv_bytes: 4 << 20,
        context: CONTEXT,
        batch_tokens_max: 512,
        running_max: RUNNING_MAX,
    }
}

/// Requests of all lengths and tempers.
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
    /// Tokens of a prompt per step.
    pub chunk: u32,
    /// Requests that run at once.
    pub together: usize,
    /// The oldest that has said something since it began is thrown out every so many steps, and begins again.
    pub preempt_every: Option<u64>,
}

pub struct Played {
    pub outputs: Vec<Vec<TokenOut>>,
    pub n_preempted: u64,
    pub n_together: usize,
}

struct Live {
    request: Request,
    outputs: Vec<TokenOut>,
    n_computed: u32,
    blocks: Vec<BlockId>,
    has_begun: bool,
}

pub struct Player<'a> {
    runner: &'a mut dyn Runner,
    free: Vec<BlockId>,
    live: Vec<Live>,
    step: Step,
}

impl<'a> Player<'a> {
    pub fn new(runner: &'a mut dyn Runner, n_blocks: u32) -> Player<'a> {
        Player { runner, free: (0..n_blocks).map(BlockId).collect(), live: Vec::new(), step: Step::default() }
    }

    pub fn play(&mut self, requests: &[Request], plan: Plan) -> Played {
        let mut waiting: std::collections::VecDeque<_> = requests.iter().cloned().collect();
        let mut finished = Vec::new();
        let (mut n_preempted, mut n_together) = (0, 0);
        let mut done = StepDone::default();
        while !waiting.is_empty() || !self.live.is_empty() {
            while self.live.len() < plan.together && !waiting.is_empty() {
                let request = waiting.pop_front().unwrap();
                self.live.push(Live { request, outputs: vec![], n_computed: 0, blocks: vec![], has_begun: false });
            }
            if plan.preempt_every.is_some_and(|every| self.step.id.0 % every == every - 1) {
                n_preempted += self.preempt();
            }
            self.plan(plan.chunk);
            n_together = n_together.max(self.step.slices.len());
            self.runner.run(&self.step, &mut done).unwrap();
            self.step.clear();
            self.step.id = StepId(self.step.id.0 + 1);
            self.apply(&done.slices, &mut finished);
        }
        self.runner.run(&self.step, &mut done).unwrap();
        self.step.clear();
        finished.sort_by_key(|live: &Live| live.request.id);
        Played { outputs: finished.into_iter().map(|live| live.outputs).collect(), n_preempted, n_together }
    }

    fn preempt(&mut self) -> u64 {
        // One that has said nothing since it began would never get on.
        let has_spoken = |live: &&mut Live| live.has_begun && live.outputs.len() > live.request.output.len();
        let Some(live) = self.live.iter_mut().find(has_spoken) else { return 0 };
        self.free.append(&mut live.blocks);
        self.step.ends.push(live.request.id);
        live.has_begun = false;
        live.n_computed = 0;
        1
    }

    fn plan(&mut self, chunk: u32) {
        for live in &mut self.live {
            let request = &mut live.request;
            if !live.has_begun {
                request.output = live.outputs.iter().map(|out| out.token).collect();
                self.step.starts.push(request.clone());
                live.has_begun = true;
            }
            let n_tokens = (request.prompt.len() + live.outputs.len()) as u32;
            let end = n_tokens.min(live.n_computed + chunk);
            let want = if end == n_tokens { Want::Last } else { Want::Nothing };
            self.step.slices.push(Slice { id: request.id, range: live.n_computed..end, n_draft: 0, want });
            while live.blocks.len() < blocks_for(end) as usize {
                let block = self.free.pop().unwrap();
                live.blocks.push(block);
                self.step.blocks.push(block);
            }
            live.n_computed = end;
        }
    }

    fn apply(&mut self, done: &[SliceDone], finished: &mut Vec<Live>) {
        assert_eq!(done.len(), self.live.len());
        for (live, done) in self.live.iter_mut().zip(done) {
            assert!(!done.failed);
            live.outputs.extend(done.tokens.iter().cloned());
        }
        for i in (0..self.live.len()).rev() {
            if self.live[i].outputs.len() == self.live[i].request.sampling.tokens_max as usize {
                let mut live = self.live.remove(i);
                self.free.append(&mut live.blocks);
                self.step.ends.push(live.request.id);
                finished.push(live);
            }
        }
    }
}
