//! Who talks to whom, and the links between the threads of one process.

use crate::error::{Error, Result};
use crate::link::{Link, MemoryLink, Side};
use crate::mesh::{Mesh, Wiring};
use crate::region::Region;
use crate::wait::Waits;
use std::sync::Arc;
use types::{Epoch, Grid, Layout, Rank};

/// Between the ranks of a stage: what stays in the cache while it goes round.
const STAGE_WORDS: u32 = 1 << 17;
/// Between stages: a rank should not have to wait until the next stage takes what it has made.
const HOP_WORDS: u32 = 1 << 20;

/// Whether two ranks ever talk: peers of a stage, the same rank of neighbouring stages, the sampler and the first
/// stage.
pub fn talk(grid: Grid, a: Rank, b: Rank) -> bool {
    let (a_place, b_place) = (grid.place(a), grid.place(b));
    let is_hop = a_place.stage.abs_diff(b_place.stage) == 1 && a_place.tp == b_place.tp;
    let draws = |from: Rank, to: u16| from == grid.sampler() && to == 0;
    a != b && (a_place.stage == b_place.stage || is_hop || draws(a, b_place.stage) || draws(b, a_place.stage))
}

pub fn ring_words(grid: Grid, a: Rank, b: Rank) -> u32 {
    if grid.place(a).stage == grid.place(b).stage { STAGE_WORDS } else { HOP_WORDS }
}

/// All ranks, over memory of this process.
pub fn in_process(layout: &Layout, waits: Waits) -> Result<Vec<Mesh>> {
    let memory = |source| Error::Io { what: "memory between ranks", source };
    let grid = layout.grid();
    let ranks = || (0..grid.n_ranks()).map(Rank);
    let bell = |_| Region::anonymous(Region::bell_bytes()).map(Arc::new);
    let bells: Vec<Arc<Region>> = ranks().map(bell).collect::<std::io::Result<_>>().map_err(memory)?;
    let no_links = || ranks().map(|_| None).collect::<Vec<Option<Link>>>();
    let mut links: Vec<Vec<Option<Link>>> = ranks().map(|_| no_links()).collect();
    for (a, b) in ranks().flat_map(|a| (0..a.0).map(move |b| (a, Rank(b)))).filter(|(a, b)| talk(grid, *a, *b)) {
        let words = ring_words(grid, a, b);
        let region = Arc::new(Region::anonymous(Region::pair_bytes(words)).map_err(memory)?);
        for (side, (from, to)) in [(a, b), (b, a)].into_iter().enumerate() {
            let side = Side::new(region.clone(), side, bells[usize::from(to.0)].clone());
            links[usize::from(from.0)][usize::from(to.0)] = Some(Link::Memory(MemoryLink::new(side, words, None)));
        }
    }
    let wire = |((rank, links), bell)| Wiring { rank, epoch: Epoch::default(), waits, bell, links };
    ranks().zip(links).zip(bells).map(wire).map(|wiring| Mesh::new(layout, wiring)).collect()
}
