//! What happens to the tier of a world: reads that take long and are answered in any order, pages that are lost, names
//! of pages that are not there, and answers of lost workers. Drawn from a seed of its own.

use super::facts::Facts;
use super::pipeline::Pipeline;
use super::reference::{extend, root};
use super::rng::{Rng, mix};
use super::worker::Cell;
use scheduler::{Config, Scheduler};
use std::collections::{BTreeMap, BTreeSet};
use types::{
    BLOCK_TOKENS, BlockHash, CacheGroup, Epoch, FetchDone, FetchId, Micros, Page, PageKey, Request, Step, Token,
};

/// Names enough that the index never pushes one out.
const MANY_PAGES: u32 = 1 << 14;

/// A fetch that a step has carried, and that is neither answered nor cancelled.
struct OpenFetch {
    pages: Vec<Page>,
    begun: Micros,
    /// No stage reads it before.
    ready: Micros,
}

pub struct SimulatedTier {
    rng: Rng,
    n_pages: u32,
    /// The fetches of a hundred that take long.
    slow: u64,
    /// Ticks of a thousand in which a page is lost, or a name is not true.
    lossy: u64,
    lying: u64,
    open: BTreeMap<FetchId, OpenFetch>,
    /// What the scheduler believes to be stored, if it forgets no name.
    stored: BTreeSet<PageKey>,
    /// Answers on their way to the scheduler, and those of lost workers.
    answers: Vec<FetchDone>,
    old_answers: Vec<FetchDone>,
    names: Vec<BlockHash>,
    /// Steps over all epochs.
    n_steps: u64,
}

impl SimulatedTier {
    pub fn new(seed: u64) -> SimulatedTier {
        let mut rng = Rng(mix(seed ^ 0x7469_6572));
        let n_pages = match rng.below(10) {
            0..6 => 0,
            6 => rng.between(1, 64),
            _ => MANY_PAGES,
        };
        let (slow, lossy, lying) = (rng.below(3) * 20, rng.below(3) * 4, rng.below(3) / 2 * 10);
        SimulatedTier {
            rng,
            n_pages,
            slow,
            lossy,
            lying,
            open: BTreeMap::new(),
            stored: BTreeSet::new(),
            answers: Vec::new(),
            old_answers: Vec::new(),
            names: Vec::new(),
            n_steps: 0,
        }
    }

    pub fn is_on(&self) -> bool {
        self.n_pages > 0
    }

    /// A world in which prompts have pages enough to be fetched. `draw_n_blocks` draws the sizes of its pools.
    pub fn configure(
        &mut self,
        config: Config,
        bases: &mut [Vec<Token>],
        draw_n_blocks: impl Fn(&mut Rng, &Config) -> Vec<u32>,
    ) -> Config {
        if !self.is_on() {
            return config;
        }
        let context_max = self.rng.between(100, 240);
        for base in bases {
            base.extend((0..context_max).map(|_| self.rng.below(1000) as Token));
        }
        let chunk_tokens_max = if self.rng.chance(30) { self.rng.between(1, 8) } else { self.rng.between(8, 60) };
        let waiting_tokens_max = config.waiting_tokens_max.max(3 * u64::from(context_max));
        let config =
            Config { context_max, chunk_tokens_max, waiting_tokens_max, tier_pages_max: self.n_pages, ..config };
        Config { n_blocks: draw_n_blocks(&mut self.rng, &config), ..config }
    }

    /// Makes the names of a request's log known, with what they stand for.
    pub fn add_names(&mut self, request: &Request, output: &[Token], config: &Config, pipeline: &mut Pipeline) {
        if !self.is_on() {
            return;
        }
        let mut prefix = root(request.tenant);
        let log: Vec<Token> = request.prompt.iter().chain(output).copied().collect();
        let prefixes: Vec<u64> = log
            .iter()
            .map(|&token| {
                prefix = extend(prefix, token);
                prefix
            })
            .collect();
        for (name, end) in names(request, &log, config).into_iter().zip((1..).map(|n| n * BLOCK_TOKENS - 1)) {
            let cell = Cell { position: end, prefix: prefixes[end as usize] };
            pipeline.disks.iter_mut().for_each(|disk| disk.add_name(name, cell));
            self.names.push(name);
        }
    }

    /// A request has failed behind `n_sure` positions of its log: what it has computed is stored no longer.
    pub fn fail(&mut self, request: &Request, output: &[Token], n_sure: u32, config: &Config, pipeline: &mut Pipeline) {
        if !self.is_on() || !config.prefix_cache {
            return;
        }
        let log: Vec<Token> = request.prompt.iter().chain(output).copied().take(n_sure as usize).collect();
        // No step reaches the disks of stages that are not there.
        let n_stages = pipeline.n_stages();
        for name in names(request, &log, config) {
            pipeline.disks[..n_stages].iter_mut().for_each(|disk| disk.add_damage(name, self.n_steps));
        }
    }

    /// Checks what a new step has for the tier. Returns the step's number over all epochs.
    pub fn plan(&mut self, step: &Step, config: &Config, now: Micros, facts: &mut Facts) -> u64 {
        self.n_steps += 1;
        assert!(self.is_on() || step.tier.is_empty(), "no work for a tier that is not there");
        for page in &step.tier.stores {
            let is_new = self.stored.insert(page.key);
            assert!(is_new || self.n_pages < MANY_PAGES, "a page is stored once");
            assert!(page.block.0 < config.n_blocks[usize::from(page.key.group)]);
        }
        for id in &step.tier.cancels {
            assert!(self.open.remove(id).is_some(), "only an open fetch is cancelled");
        }
        step.tier.removals.iter().for_each(|key| _ = self.stored.remove(key));
        for fetch in &step.tier.fetches {
            let is_slow = self.rng.chance(self.slow);
            let wait = if is_slow { self.rng.between(300_000, 20_000_000) } else { 0 };
            let open = OpenFetch { pages: fetch.pages.clone(), begun: now, ready: now.plus(wait.into()) };
            assert!(!fetch.pages.is_empty(), "a fetch has pages");
            assert!(self.open.insert(fetch.id, open).is_none(), "fetches have different numbers");
        }
        let groups = &config.groups;
        let blocks: Vec<_> = self.open.values().flat_map(|open| &open.pages).map(place).collect();
        let distinct: BTreeSet<_> = blocks.iter().collect();
        assert_eq!(distinct.len(), blocks.len(), "two fetches never have the same block");
        facts.stores += step.tier.stores.len() as u64;
        facts.state_pages += step.tier.stores.iter().filter(|page| is_state(groups, page)).count() as u64;
        facts.removals += step.tier.removals.len() as u64;
        facts.fetch_cancels += step.tier.cancels.len() as u64;
        facts.fetches_beside += u64::from(self.open.len() > 1);
        self.n_steps
    }

    /// No fetch is awaited beyond its deadline: 5 s, or the time to compute a context, whichever is more. Call after
    /// each attempt to plan that may have had a step.
    pub fn check_deadlines(&self, config: &Config, now: Micros) {
        let longest = 5_000_000 + 100_000 * u64::from(config.context_max);
        assert!(self.open.values().all(|open| now.since(open.begun).0 < longest), "a fetch is open for too long");
    }

    /// The workers are gone. What the disks have is there.
    pub fn lose_workers(&mut self) {
        self.open.clear();
        self.old_answers.append(&mut self.answers);
    }

    /// New workers report some of what their disks have; now and then they have other ones.
    pub fn begin_epoch(&mut self, scheduler: &mut Scheduler, pipeline: &Pipeline) {
        if !self.is_on() {
            return;
        }
        if self.rng.chance(20) {
            self.n_pages = if self.rng.chance(20) { self.rng.between(1, 64) } else { MANY_PAGES };
            // Another number of pages is another index.
            scheduler.set_tier_pages(0);
            scheduler.set_tier_pages(self.n_pages);
            self.stored.clear();
        }
        if self.rng.chance(70) {
            let others = &pipeline.disks[1..pipeline.n_stages()];
            let is_whole = |key: &&PageKey| others.iter().all(|disk| disk.has(key));
            scheduler.add_tier_pages(pipeline.disks[0].keys().filter(is_whole).copied());
        }
    }

    /// What happens beside the steps. Returns by how much time moves.
    pub fn tick(
        &mut self,
        now: Micros,
        epoch: Epoch,
        pipeline: &mut Pipeline,
        scheduler: &mut Scheduler,
        facts: &mut Facts,
    ) -> u64 {
        if !self.is_on() {
            return 0;
        }
        if self.rng.chance(60) {
            self.read(now, epoch, pipeline);
        }
        if self.rng.chance(30) {
            self.answer(scheduler, facts);
        }
        if self.rng.below(1000) < self.lossy {
            let (at, all) = (self.rng.below(pipeline.disks.len() as u64) as usize, self.rng.chance(10));
            pipeline.disks[at].lose_pages(&mut self.rng, all);
            facts.tiers_lost += u64::from(all);
        }
        if self.rng.below(1000) < self.lying && !self.names.is_empty() {
            self.lie(scheduler, facts);
        }
        let is_slow = self.open.values().any(|open| open.ready > now);
        if is_slow && self.rng.chance(4) { self.rng.between(1000, 3_000_000).into() } else { 0 }
    }

    fn read(&mut self, now: Micros, epoch: Epoch, pipeline: &mut Pipeline) {
        let open = &self.open;
        // Stages that a cancel has not reached read on.
        let is_ready = |id| open.get(&id).is_none_or(|open| open.ready <= now);
        if let Some(mut done) = pipeline.read_pages(&mut self.rng, epoch, is_ready) {
            let is_late = self.rng.chance(10);
            done.micros = if is_late { self.rng.below(1_000_000) } else { self.rng.below(2000) };
            self.answers.push(done);
        }
    }

    /// An answer comes, of any fetch. One to a fetch that was cancelled, or of an old epoch, changes nothing.
    fn answer(&mut self, scheduler: &mut Scheduler, facts: &mut Facts) {
        let is_old = self.answers.is_empty() || self.rng.chance(20);
        let answers = if is_old { &mut self.old_answers } else { &mut self.answers };
        if answers.is_empty() {
            return;
        }
        let done = answers.swap_remove(self.rng.below(answers.len() as u64) as usize);
        let before = scheduler.stats();
        scheduler.fetched(&done);
        let after = scheduler.stats();
        // The scheduler may have given up a fetch before a step carries its cancel.
        let open = if is_old || after == before { None } else { self.open.remove(&done.id) };
        let Some(open) = open else {
            assert_eq!(after, before, "an answer that is not awaited changes nothing");
            *(if is_old { &mut facts.old_answers } else { &mut facts.late_answers }) += 1;
            return;
        };
        let (n_pages, n_missing) = (open.pages.len() as u64, done.missing.len() as u64);
        assert_eq!(after.pages_missing - before.pages_missing, n_missing);
        assert_eq!(after.pages_fetched - before.pages_fetched, n_pages - n_missing);
        facts.fetches_torn += u64::from(n_missing > 0 && n_missing < n_pages);
        done.missing.iter().for_each(|&i| _ = self.stored.remove(&open.pages[i as usize].key));
    }

    /// The scheduler is informed of pages that may not be there.
    fn lie(&mut self, scheduler: &mut Scheduler, facts: &mut Facts) {
        let first = self.rng.below(self.names.len() as u64) as usize;
        let names = self.names[first..].iter().take(self.rng.between(1, 10) as usize);
        let groups = 0..scheduler.config().groups.len() as u8;
        let keys: Vec<_> = names.flat_map(|&name| groups.clone().map(move |group| PageKey { group, name })).collect();
        scheduler.add_tier_pages(keys);
        facts.lies += 1;
    }
}

fn place(page: &Page) -> (u8, u32) {
    (page.key.group, page.block.0)
}

fn is_state(groups: &[CacheGroup], page: &Page) -> bool {
    groups[usize::from(page.key.group)].is_state()
}

/// The names of a log's full blocks.
fn names(request: &Request, log: &[Token], config: &Config) -> Vec<BlockHash> {
    let mut name = BlockHash::root(&config.policy, request.cache_owner(), &config.salt);
    let blocks = log.chunks_exact(BLOCK_TOKENS as usize);
    blocks
        .map(|block| {
            name = name.child(block.iter().copied());
            name
        })
        .collect()
}
