//! The scheduler against a worker that reads through its block tables, and against each request run alone.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod facts;
mod reference;
mod rng;
mod worker;
mod world;

use facts::Facts;
use world::World;

const SEEDS: u64 = 3000;

/// Names the seed of a run that panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this is seed {0}; `check_seed({0})` runs it again", self.0);
        }
    }
}

fn check_seed(seed: u64) -> Facts {
    let _named = Seed(seed);
    World::new(seed).run()
}

#[test]
fn every_stream_is_what_the_request_says_alone() {
    let mut facts = Facts::default();
    (0..SEEDS).for_each(|seed| facts.add(&check_seed(seed)));
    println!("{facts:#?}");
    assert_eq!(facts.missing(), [""; 0], "everything happened somewhere");
}

#[test]
fn the_same_seed_plans_the_same_steps() {
    for seed in 0..50 {
        let trace = |mut world: World| {
            let facts = world.run();
            (facts, world.trace)
        };
        assert_eq!(trace(World::new(seed)), trace(World::new(seed)), "seed {seed}");
    }
}
