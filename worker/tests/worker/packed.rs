//! Ranks whose weights come from files of packed weights give the tokens of ranks that pack them.

use crate::common::grid::Threads;
use crate::common::{Alone, Plan, Player, assignment, requests};
use std::fs::DirEntry;
use std::path::Path;
use std::time::{Duration, Instant};
use types::{Grid, Layout};
use worker::{ModelLoader, PackedCache, PackedCacheConfig, Scrubber};

/// Files are written in the background.
fn wait_for_files(folder: &Path, n_files: usize) {
    let is_whole = |entry: &DirEntry| entry.path().extension().is_some_and(|of| of == "packed");
    let count =
        || std::fs::read_dir(folder).into_iter().flatten().filter(|entry| entry.as_ref().is_ok_and(is_whole)).count();
    let begun = Instant::now();
    while count() != n_files {
        assert!(begun.elapsed() < Duration::from_secs(20), "{} files instead of {n_files}", count());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn grids_from_files_give_the_tokens_of_one_rank() {
    let folder = std::env::temp_dir().join(format!("lockstep-packed-grids-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let plain = ModelLoader { spin: false, ..ModelLoader::new(1) };
    let config = PackedCacheConfig { folder: folder.clone(), bytes_max: 1 << 30 };
    let (packed_cache, scrubber) = (Some(PackedCache::new(config)), Some(Scrubber::new(0.1)));
    let packed = ModelLoader { packed_cache, scrubber, ..plain.clone() };
    let (assignment, requests) = (assignment("llama-deep.gguf"), requests(8));
    let (mut runner, _) = plain.build(&assignment).unwrap();
    let expected = Player::new(&mut Alone::new(&mut runner), &assignment).play(&requests, Plan::ALONE);
    let mut n_files = 0;
    for (tp, pp) in [(1, 1), (2, 1), (1, 2)] {
        let layout = Layout::even(Grid { tp, pp }, 5).unwrap();
        let plan = Plan { chunk: 60, together: 9, preempt_every: Some(4), turns: pp.into(), in_flight: 2 };
        // The first start packs.
        for is_first in [true, false] {
            let mut grid = Threads::start(&packed, &assignment, &layout);
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            grid.end();
            assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}");
            n_files += usize::from(tp * pp) * usize::from(is_first);
            wait_for_files(&folder, n_files);
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
