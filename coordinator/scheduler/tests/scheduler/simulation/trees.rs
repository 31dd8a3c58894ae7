//! Conversations that branch, return and extend, on ranks that check every page that they read. Nine tenths of what
//! could be reused are, as long as there is room; and every answer equals the cold one.

use super::Seed;
use super::pipeline::Pipeline;
use super::reference::run_alone;
use super::rng::{Rng, mix};
use super::worker::{Limits, Worker};
use scheduler::{Config, RequestOutput, Scheduler};
use types::{BLOCK_TOKENS, CacheGroup, Epoch, Micros, Request, RequestId, Sampling, Step, Token};

const CONTEXT: u32 = 4000;

struct Tree {
    rng: Rng,
    scheduler: Scheduler,
    pipeline: Pipeline,
    /// The logs of all turns so far: prompts and answers.
    turns: Vec<Vec<Token>>,
    n_reusable: u64,
    n_reused: u64,
}

impl Tree {
    fn new(seed: u64) -> Tree {
        let mut rng = Rng(mix(seed));
        let groups = match rng.below(3) {
            0 => vec![CacheGroup::STATE, CacheGroup::FULL],
            1 => vec![CacheGroup::FULL, CacheGroup::FULL.with_window(100), CacheGroup::STATE],
            _ => vec![CacheGroup::FULL],
        };
        let of_group = |group: &CacheGroup| if group.is_state() { 200 } else { 4000 };
        let n_blocks: Vec<u32> = groups.iter().map(of_group).collect();
        let batch_tokens_max = [64, 200, 512][rng.below(3) as usize];
        let n_stages = rng.between(1, 3);
        let config = Config {
            groups: groups.clone(),
            n_blocks: n_blocks.clone(),
            context_max: CONTEXT,
            running_max: 8,
            batch_tokens_max,
            chunk_tokens_max: batch_tokens_max,
            chunk_tokens_min: 16,
            n_stages,
            steps_in_flight_max: n_stages + 1,
            ..Config::default()
        };
        let (chunk_tokens_max, running_max) = (batch_tokens_max, 8);
        let (clears, late, guesses_max, right) = (false, 0, 0, 0);
        let limits = Limits { batch_tokens_max, chunk_tokens_max, running_max, clears, late, guesses_max, right };
        let stage = |_| Worker::new(Epoch::default(), &groups, &n_blocks, limits);
        Tree {
            rng,
            scheduler: Scheduler::new(config, Epoch::default()).unwrap(),
            pipeline: Pipeline::new((0..n_stages).map(stage).collect()),
            turns: Vec::new(),
            n_reusable: 0,
            n_reused: 0,
        }
    }

    fn tokens(&mut self, low: u32, high: u32) -> Vec<Token> {
        let n = self.rng.between(low, high);
        (0..n).map(|_| self.rng.below(1000) as Token).collect()
    }

    /// The next turn: mostly of the newest conversation, or of one before, or a new one; now and then a turn is
    /// replaced in the middle.
    fn next_prompt(&mut self, system: &[Token]) -> Vec<Token> {
        let n_turns = self.turns.len() as u64;
        let mut prompt = match self.rng.below(20) {
            _ if n_turns == 0 => system.to_vec(),
            0..3 => system.to_vec(),
            3..10 => self.turns[self.rng.below(n_turns) as usize].clone(),
            10 => {
                let log = &self.turns[self.rng.below(n_turns) as usize];
                log[..self.rng.between(1, log.len() as u32) as usize].to_vec()
            }
            _ => self.turns[n_turns as usize - 1].clone(),
        };
        if prompt.len() > 3000 {
            prompt = system.to_vec();
        }
        prompt.extend(self.tokens(5, 200));
        prompt
    }

    /// The blocks at the front of a prompt that some turn before has computed.
    fn n_in_common(&self, prompt: &[Token]) -> u32 {
        let common = |log: &Vec<Token>| {
            let computed = &log[..log.len() - 1];
            computed.iter().zip(prompt).take_while(|(a, b)| a == b).count()
        };
        let longest = self.turns.iter().map(common).max().unwrap_or(0);
        longest.min(prompt.len() - 1) as u32 / BLOCK_TOKENS * BLOCK_TOKENS
    }

    fn run(&mut self, id: u64, prompt: Vec<Token>) {
        let tokens_max = self.rng.between(1, 80);
        let sampling = Sampling { seed: self.rng.next(), tokens_max, ..Sampling::default() };
        let request = Request { id: RequestId(id), prompt, sampling, ..Request::default() };
        let expected = run_alone(&request, CONTEXT);
        self.n_reusable += u64::from(self.n_in_common(&request.prompt));
        self.scheduler.submit(request.clone(), Micros(0)).unwrap();
        let mut output_tokens = Vec::new();
        while !self.scheduler.is_idle() {
            let mut step = Step::default();
            while self.scheduler.next_step(Micros(0), &mut step) {
                let start = step.starts.first().and_then(|_| step.slices.first());
                self.n_reused += start.map_or(0, |slice| u64::from(slice.range.start));
                self.pipeline.push(std::mem::take(&mut step), self.scheduler.config().n_blocks.clone(), 0);
            }
            self.scheduler.check();
            while let Some(&first) = self.pipeline.movable().first() {
                self.pipeline.advance(first);
            }
            let mut out: Vec<RequestOutput> = Vec::new();
            let Some((_, done)) = self.pipeline.deliver() else { continue };
            self.scheduler.apply(&done, Micros(0), &mut out).unwrap();
            for output in &out {
                output_tokens
                    .extend(done.slices[output.slice].tokens[..output.n_tokens as usize].iter().map(|out| out.token));
            }
        }
        assert_eq!(output_tokens, expected.tokens, "the answer equals that of a cold cache");
        self.turns.push(request.prompt.into_iter().chain(output_tokens).collect());
    }
}

#[test]
fn conversations_find_what_they_left() {
    let (mut n_reused, mut n_reusable) = (0, 0);
    for seed in 0..200 {
        let _named = Seed(seed);
        let mut tree = Tree::new(seed);
        let system = tree.tokens(20, 600);
        for id in 0..12 {
            let prompt = tree.next_prompt(&system);
            tree.run(id, prompt);
        }
        assert_eq!(tree.scheduler.stats().evictions, 0, "there is room");
        n_reused += tree.n_reused;
        n_reusable += tree.n_reusable;
    }
    println!("{n_reused} of {n_reusable} positions were reused");
    assert!(n_reused * 10 >= n_reusable * 9, "{n_reused} of {n_reusable}");
}
