//! Ranks in threads, over any wire.
#![allow(dead_code, reason = "each test uses its part")]

use backend::cpu::{Cpu, CpuConfig, Isa};
use collective::{Error, LinkEncryption, Mesh, MeshPlan, PeerListener, Ranks, WaitPolicy, WireChoice};
use std::time::Duration;
use types::{Activations, Epoch, Layout, Rank, Shares, Stage};

/// splitmix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn float(&mut self) -> f32 {
        // Numbers of very different magnitudes, so that the order of a sum shows in its bits.
        let scale = 10f32.powi(self.below(8) as i32 - 4);
        (self.next() as f32 / u64::MAX as f32 - 0.5) * scale
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Returns uneven shares, some of them empty.
    pub fn shares(&mut self, n_ranks: usize) -> Shares {
        let mut bounds: Vec<u32> = (1..n_ranks).map(|_| self.below(Shares::WHOLE as usize) as u32).collect();
        if n_ranks > 2 && self.below(3) == 0 {
            bounds[1] = bounds[0];
        }
        bounds.extend([0, Shares::WHOLE]);
        bounds.sort_unstable();
        Shares::new(bounds).unwrap()
    }

    pub fn layout(&mut self, tp: usize, pp: u32) -> Layout {
        Layout::new((0..pp).map(|i| Stage { layers: i..i + 1, shares: self.shares(tp) }).collect()).unwrap()
    }
}

pub fn cpu() -> Cpu {
    Cpu::new(CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false }).unwrap()
}

/// Runs each rank on its own thread. Returns the answers in rank order.
pub fn each<T: Send>(ranks: Vec<Ranks<Cpu>>, run: impl Fn(&mut Ranks<Cpu>, &Cpu) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let start = |mut rank: Ranks<Cpu>| scope.spawn(move || run(&mut rank, &cpu()));
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the same ranks over every wire.
pub fn wires(layout: &Layout) -> Vec<(&'static str, Vec<Ranks<Cpu>>)> {
    let spinning = WaitPolicy { spin: true, ..WaitPolicy::default() };
    vec![
        ("memory of one process", over_host(Mesh::in_process(layout))),
        ("memory of one process, spinning", over_host(Mesh::in_process_with(layout, spinning).unwrap())),
        ("shared memory", joined(layout, WireChoice::Memory)),
        ("sockets", joined(layout, WireChoice::Socket)),
        ("sockets, encrypted", joined_by(plans(layout, WireChoice::Socket), LinkEncryption::On)),
    ]
}

pub const EPOCH: Epoch = Epoch { incarnation: 5, n: 2 };

pub fn over_host(meshes: Vec<Mesh>) -> Vec<Ranks<Cpu>> {
    meshes.into_iter().map(Ranks::over_host).collect()
}

pub fn joined(layout: &Layout, wire: WireChoice) -> Vec<Ranks<Cpu>> {
    joined_by(plans(layout, wire), LinkEncryption::Off)
}

fn joined_by(mut plans: Vec<(PeerListener, MeshPlan)>, encryption: LinkEncryption) -> Vec<Ranks<Cpu>> {
    plans.iter_mut().for_each(|(_, plan)| plan.encryption = encryption);
    over_host(join_all(plans).into_iter().map(Result::unwrap).collect())
}

/// Returns a listener and a plan for each rank.
pub fn plans(layout: &Layout, wire: WireChoice) -> Vec<(PeerListener, MeshPlan)> {
    let listeners: Vec<_> = (0..layout.grid().n_ranks()).map(|_| PeerListener::bind("127.0.0.1:0").unwrap()).collect();
    let peers: Vec<_> = listeners.iter().map(|listener| listener.address().to_string()).collect();
    let plan = |(rank, listener)| {
        let mut plan = MeshPlan::new(EPOCH, Rank(rank as u16), layout.clone(), peers.clone(), [7; 32]);
        plan.wire = wire;
        plan.timeouts.op = Duration::from_secs(30);
        (listener, plan)
    };
    listeners.into_iter().enumerate().map(plan).collect()
}

pub fn join_all(plans: Vec<(PeerListener, MeshPlan)>) -> Vec<Result<Mesh, Error>> {
    std::thread::scope(|scope| {
        let start = |(listener, plan)| scope.spawn(move || Mesh::join(&listener, plan));
        let threads: Vec<_> = plans.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
