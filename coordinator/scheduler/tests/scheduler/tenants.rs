//! Shares of competing tenants, counted in tokens, steps and places: by weight, and which tenant waits for which.

use scheduler::{Config, RequestRejection, Scheduler};
use std::collections::BTreeMap;
use types::{Epoch, Micros, Request, RequestId, Sampling, Step, StepDone, TenantId, TenantWeight, TokenOut, Want};

const HEAVY: u64 = 1;
const LIGHT: u64 = 2;

struct House {
    scheduler: Scheduler,
    n_requests: u64,
    /// Tokens planned for each tenant.
    tokens: BTreeMap<u64, u64>,
    tenants: BTreeMap<RequestId, u64>,
    n_ended: BTreeMap<u64, u64>,
    step: Step,
}

fn config() -> Config {
    Config { n_blocks: vec![4000], running_max: 8, batch_tokens_max: 64, chunk_tokens_max: 64, ..Config::default() }
}

impl House {
    fn open(config: Config) -> House {
        House {
            scheduler: Scheduler::new(config, Epoch::default()).unwrap(),
            n_requests: 0,
            tokens: BTreeMap::new(),
            tenants: BTreeMap::new(),
            n_ended: BTreeMap::new(),
            step: Step::default(),
        }
    }

    fn offer(
        &mut self,
        tenant: u64,
        weight: u16,
        n_prompt: u32,
        tokens_max: u32,
    ) -> Result<RequestId, RequestRejection> {
        self.n_requests += 1;
        let id = RequestId(self.n_requests);
        let request = Request {
            id,
            tenant: TenantId(tenant),
            weight: TenantWeight(weight),
            // No request finds another's blocks.
            prompt: (0..n_prompt).map(|i| i + 1000 * self.n_requests as u32).collect(),
            sampling: Sampling { tokens_max, ..Sampling::default() },
            ..Request::default()
        };
        self.scheduler.submit(request, Micros(self.n_requests))?;
        self.tenants.insert(id, tenant);
        Ok(id)
    }

    fn submit(&mut self, tenant: u64, weight: u16, n_prompt: u32, tokens_max: u32) -> RequestId {
        self.offer(tenant, weight, n_prompt, tokens_max).unwrap()
    }

    /// Runs one step and its answer. Returns which requests have a slice in it.
    fn step(&mut self) -> Vec<RequestId> {
        if !self.scheduler.next_step(Micros(0), &mut self.step) {
            return Vec::new();
        }
        let mut done = StepDone { id: self.step.id, epoch: self.step.epoch, ..StepDone::default() };
        done.slices.resize_with(self.step.slices.len(), Default::default);
        for (slice, answer) in self.step.slices.iter().zip(&mut done.slices) {
            *self.tokens.entry(self.tenants[&slice.id]).or_default() += u64::from(slice.range.end - slice.range.start);
            if slice.want == Want::Last {
                answer.tokens.push(TokenOut { token: slice.range.end, ..TokenOut::default() });
            }
        }
        let mut out = Vec::new();
        self.scheduler.apply(&done, Micros(0), &mut out).unwrap();
        for output in out.iter().filter(|output| output.finish.is_some()) {
            *self.n_ended.entry(self.tenants[&output.id]).or_default() += 1;
        }
        self.scheduler.check();
        self.step.slices.iter().map(|slice| slice.id).collect()
    }

    /// Returns after how many steps it begins.
    fn steps_until_begun(&mut self, id: RequestId) -> u32 {
        (1..1000).find(|_| self.step().contains(&id)).unwrap()
    }
}

#[track_caller]
fn check_shares(weights: &[u16], (n_prompt, tokens_max): (u32, u32)) {
    let mut house = House::open(Config { waiting_max: 64, ..config() });
    for _ in 0..3000 {
        for (i, &weight) in weights.iter().enumerate() {
            while house.offer(i as u64, weight, n_prompt, tokens_max).is_ok() {
                let given: Vec<_> = std::iter::from_fn(|| house.scheduler.take_displaced()).collect();
                if !given.is_empty() || house.scheduler.stats().n_waiting == 64 {
                    break;
                }
            }
        }
        house.step();
    }
    let (total, sum) = (house.tokens.values().sum::<u64>(), weights.iter().map(|w| u64::from(*w)).sum::<u64>());
    for (i, &weight) in weights.iter().enumerate() {
        let (got, due) = (house.tokens[&(i as u64)], total * u64::from(weight) / sum);
        assert!(got.abs_diff(due) * 10 <= due, "{weights:?}, {n_prompt} + {tokens_max}: {:?}", house.tokens);
    }
}

#[test]
fn busy_tenants_get_their_share_of_tokens() {
    for weights in [&[1, 1][..], &[1, 3], &[2, 1, 1], &[5, 1]] {
        for shape in [(10, 20), (200, 4), (64, 64)] {
            check_shares(weights, shape);
        }
    }
}

#[test]
fn one_at_fifty_times_its_share_is_not_waited_for() {
    let mut house = House::open(config());
    for _ in 0..400 {
        house.submit(HEAVY, 1, 300, 50);
    }
    (0..30).for_each(|_| drop(house.step()));
    for _ in 0..20 {
        let light = house.submit(LIGHT, 1, 40, 5);
        assert_eq!(house.steps_until_begun(light), 1, "in the next step");
        let n_before = house.n_ended.get(&LIGHT).copied().unwrap_or(0);
        let n_steps = (1..100).find(|_| {
            house.step();
            house.n_ended.get(&LIGHT).copied().unwrap_or(0) > n_before
        });
        assert!(n_steps.unwrap() <= 6, "it returns a token in every step: {n_steps:?}");
    }
    assert_eq!(house.n_ended[&LIGHT], 20);
    let before = house.tokens[&HEAVY];
    (0..10).for_each(|_| drop(house.step()));
    assert_eq!(house.tokens[&HEAVY], before + 640, "the heavy tenant gets the rest");
}

#[test]
fn long_prompts_of_one_do_not_hold_up_short_ones_of_another() {
    let mut house = House::open(config());
    for _ in 0..8 {
        house.submit(HEAVY, 1, 3000, 1);
    }
    (0..10).for_each(|_| drop(house.step()));
    for _ in 0..10 {
        let light = house.submit(LIGHT, 1, 20, 2);
        assert_eq!(house.steps_until_begun(light), 1);
    }
}

#[test]
fn tenant_above_its_block_share_is_preempted() {
    // Two of the heavy tenant's requests fill the pool.
    let mut house = House::open(Config { n_blocks: vec![20], context_max: 300, ..config() });
    for _ in 0..4 {
        house.submit(HEAVY, 1, 120, 40);
    }
    (0..10).for_each(|_| drop(house.step()));
    assert_eq!(house.scheduler.stats().n_running, 2);
    let light = house.submit(LIGHT, 1, 60, 4);
    assert_eq!(house.steps_until_begun(light), 1);
    assert_eq!(house.scheduler.stats().preemptions, 1);
    (0..1000).for_each(|_| drop(house.step()));
    assert_eq!((house.n_ended[&HEAVY], house.n_ended[&LIGHT]), (4, 1), "and all end");
}

#[test]
fn full_queue_admits_a_tenant_with_less_in_it() {
    let mut house = House::open(Config { waiting_max: 10, ..config() });
    let heavy: Vec<RequestId> = (0..10).map(|_| house.submit(HEAVY, 1, 10, 10)).collect();
    assert!(matches!(house.offer(HEAVY, 1, 10, 10), Err(RequestRejection::Full { limit: "waiting_max", max: 10 })));
    for n in 1..=5 {
        house.submit(LIGHT, 1, 10, 10);
        assert_eq!(house.scheduler.take_displaced(), Some(heavy[10 - n]), "the last one is displaced");
        assert_eq!(house.scheduler.take_displaced(), None);
        house.scheduler.check();
    }
    assert!(house.offer(LIGHT, 1, 10, 10).is_err(), "half of the queue is the share of an equal weight");
    assert!(house.offer(LIGHT, 3, 10, 10).is_ok(), "a weight of three has a larger share");
    assert!(house.scheduler.take_displaced().is_some());
    // The same for tokens.
    let mut house = House::open(Config { context_max: 100, waiting_tokens_max: 100, ..config() });
    for _ in 0..2 {
        house.submit(HEAVY, 1, 45, 10);
    }
    assert!(matches!(
        house.offer(LIGHT, 1, 60, 10),
        Err(RequestRejection::Full { limit: "waiting_tokens_max", max: 100 })
    ));
    house.submit(LIGHT, 1, 30, 10);
    assert!(house.scheduler.take_displaced().is_some());
    assert_eq!(house.scheduler.stats().waiting_tokens, 75);
}

#[test]
fn tenants_without_end_share_the_common_place() {
    let mut house = House::open(Config { tenants_max: 4, waiting_max: 100, ..config() });
    for tenant in 0..60 {
        house.submit(100 + tenant, 1, 10, 4);
    }
    let mut n_steps = 0;
    while house.n_ended.values().sum::<u64>() < 60 {
        house.step();
        n_steps += 1;
        assert!(n_steps < 1000, "no tenant starves");
    }
}
