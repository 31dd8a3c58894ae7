//! Which ranks communicate, and the links between threads of one process.

use crate::error::{Error, Result};
use crate::link::{LinkSide, PeerLink, ShmLink};
use crate::mesh::{Mesh, MeshParts};
use crate::plan::LinkEncryption;
use crate::region::Region;
use crate::wait::WaitPolicy;
use std::sync::Arc;
use types::{Epoch, Grid, Layout, Rank};

/// The ring size between the ranks of a stage: it stays in the cache.
const STAGE_WORDS: u32 = 1 << 17;
/// The ring size between stages: a rank should not wait until the next stage takes its rows.
const HOP_WORDS: u32 = 1 << 20;

/// Returns whether two ranks ever communicate: ranks of a stage, the same rank of neighbouring stages, the sampler and
/// the first stage.
pub fn are_peers(grid: Grid, a: Rank, b: Rank) -> bool {
    let (a_place, b_place) = (grid.place(a), grid.place(b));
    let is_hop = a_place.stage.abs_diff(b_place.stage) == 1 && a_place.tp == b_place.tp;
    let draws = |from: Rank, to: u16| from == grid.sampler() && to == 0;
    a != b && (a_place.stage == b_place.stage || is_hop || draws(a, b_place.stage) || draws(b, a_place.stage))
}

pub fn ring_words(grid: Grid, a: Rank, b: Rank) -> u32 {
    if grid.place(a).stage == grid.place(b).stage { STAGE_WORDS } else { HOP_WORDS }
}

impl Mesh {
    /// Returns the only rank of a model of `n_layers` layers.
    pub fn solo(n_layers: u32) -> Mesh {
        Mesh::alone(&Layout::solo(n_layers))
    }

    /// Returns the only rank of this layout.
    pub(crate) fn alone(layout: &Layout) -> Mesh {
        // Panics without memory, as a Vec would.
        in_process(layout, WaitPolicy::default()).expect("a page of memory").remove(0)
    }

    /// Returns all ranks, in order, for threads of one process. They sleep while they wait.
    pub fn in_process(layout: &Layout) -> Vec<Mesh> {
        // Panics without memory, as a Vec would.
        Mesh::in_process_with(layout, WaitPolicy::default()).expect("memory for the rings of one process")
    }

    pub fn in_process_with(layout: &Layout, policy: WaitPolicy) -> Result<Vec<Mesh>> {
        in_process(layout, policy)
    }
}

/// Returns all ranks, over memory of this process.
fn in_process(layout: &Layout, policy: WaitPolicy) -> Result<Vec<Mesh>> {
    let memory = |source| Error::Io { what: "memory between ranks", source };
    let grid = layout.grid();
    let ranks = || (0..grid.n_ranks()).map(Rank);
    let doorbell = |_| Region::anonymous(Region::doorbell_bytes()).map(Arc::new);
    let doorbells: Vec<Arc<Region>> = ranks().map(doorbell).collect::<std::io::Result<_>>().map_err(memory)?;
    let no_links = || ranks().map(|_| None).collect::<Vec<Option<PeerLink>>>();
    let mut links: Vec<Vec<Option<PeerLink>>> = ranks().map(|_| no_links()).collect();
    for (a, b) in ranks().flat_map(|a| (0..a.0).map(move |b| (a, Rank(b)))).filter(|(a, b)| are_peers(grid, *a, *b)) {
        let words = ring_words(grid, a, b);
        let region = Arc::new(Region::anonymous(Region::pair_bytes(words)).map_err(memory)?);
        for (side, (from, to)) in [(a, b), (b, a)].into_iter().enumerate() {
            let side = LinkSide::new(region.clone(), side, doorbells[usize::from(to.0)].clone());
            links[usize::from(from.0)][usize::from(to.0)] = Some(PeerLink::Shm(ShmLink::new(side, words, None)));
        }
    }
    // Memory of one process needs no encryption.
    let (epoch, encryption) = (Epoch::default(), LinkEncryption::Off);
    let wire = |((rank, links), doorbell)| MeshParts { rank, epoch, encryption, policy, doorbell, links };
    ranks().zip(links).zip(doorbells).map(wire).map(|wiring| Mesh::new(layout, wiring)).collect()
}
