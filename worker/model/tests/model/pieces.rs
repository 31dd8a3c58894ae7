//! The bytes of a model that ranks read: the same pieces on every grid, and all of them. Without processes; no rank
//! meets another.

use backend::cpu::{Cpu, CpuConfig, Isa};
use checkpoint::Checkpoint;
use model::{Model, PassLimits};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use types::{Activations, Grid, Layout, PieceHash, PieceRun, Rank, Shares, Stage};

fn models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference");
    let model = |path: PathBuf| {
        let gguf = path.join("model.gguf");
        let is_model = path.join("config.json").exists() || path.extension().is_some_and(|e| e == "gguf");
        if gguf.exists() { Some(gguf) } else { is_model.then_some(path) }
    };
    let mut models: Vec<_> =
        std::fs::read_dir(folder).unwrap().filter_map(|entry| model(entry.unwrap().path())).collect();
    models.sort();
    assert!(models.len() > 40, "{models:?}");
    models
}

/// Even layouts, one with more ranks than heads, and one with arbitrary cuts.
fn layouts(n_layers: u32) -> Vec<Layout> {
    let even = |tp, pp| Layout::even(Grid { tp, pp }, n_layers).unwrap();
    let shares = |bounds: [u32; 2]| Shares::new([0, bounds[0], bounds[1], Shares::WHOLE].into()).unwrap();
    let cuts = [shares([1_234_567, 9_876_543]), shares([0, 7_777_777])];
    let stages = [0..1, 1..n_layers].into_iter().zip(cuts).filter(|(layers, _)| !layers.is_empty());
    let anywhere = stages.map(|(layers, shares)| Stage { layers, shares }).collect();
    vec![
        even(1, 1),
        even(2, 1),
        even(3, 1),
        even(1, 2.min(n_layers as u16)),
        even(7, 1),
        Layout::new(anywhere).unwrap(),
    ]
}

fn limits(checkpoint: &Checkpoint) -> PassLimits {
    PassLimits { rows_max: 8, outputs_max: 8, context: 64.min(checkpoint.spec().context) }
}

/// The pieces that all ranks of a grid read; panics where two read different bytes of one piece.
fn joined(checkpoint: &Checkpoint, device: &Cpu, layout: &Layout) -> BTreeMap<(String, u32), PieceHash> {
    let limits = limits(checkpoint);
    let mut joined = BTreeMap::new();
    for rank in 0..layout.grid().n_ranks() {
        let model = Model::load(checkpoint, device, &layout.part(Rank(rank)), limits).unwrap();
        for PieceRun { weight, n_pieces, first, hashes } in model.piece_runs() {
            assert!(first + hashes.len() as u32 <= *n_pieces, "{weight}");
            for (piece, hash) in (*first..).zip(hashes) {
                let known = *joined.entry((weight.clone(), piece)).or_insert(*hash);
                assert_eq!(known, *hash, "piece {piece} of {weight}");
            }
        }
    }
    joined
}

#[test]
fn every_grid_reads_the_same_pieces_of_every_model() {
    let config = CpuConfig { threads: 2, activations: Activations::F32, isa: Isa::detect(), spin: false };
    let device = Cpu::new(config).unwrap();
    for path in models() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let whole = checkpoint.hash_weights().unwrap();
        let pieces =
            |run: PieceRun| (run.first..).zip(run.hashes).map(move |(i, hash)| ((run.weight.clone(), i), hash));
        let whole: BTreeMap<_, _> = whole.into_iter().flat_map(pieces).collect();
        let together = checkpoint.spec().joined_layers();
        let is_parted = |layers: &Range<u32>| together.start < layers.start && layers.start < together.end;
        for layout in layouts(checkpoint.spec().n_layers) {
            if layout.stages().iter().any(|stage| is_parted(&stage.layers)) {
                let result = Model::load(&checkpoint, &device, &layout.part(Rank(0)), limits(&checkpoint));
                assert!(matches!(result, Err(model::Error::Parted { .. })), "{}", path.display());
                continue;
            }
            let joined = joined(&checkpoint, &device, &layout);
            assert!(joined == whole, "{}: {layout:?}", path.display());
        }
    }
}
