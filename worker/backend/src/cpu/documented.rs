//! What documents list of this crate: how many bits each type takes, and the constants of attention and recurrence.

use super::attention::{CHUNK, TILE};
use super::formats::packing;
use super::lanes::LANES;
use super::recurrence::page::DIM_MAX;
use crate::documents::check;
use types::Dtype;

/// A row of this length has whole blocks of every type.
const ROW: usize = 4096;

fn bits(bytes: usize, n: usize) -> String {
    let bits = format!("{:.2}", bytes as f64 * 8.0 / n as f64);
    bits.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn row(dtype: Dtype) -> String {
    let tile = packing(dtype).tile_bytes(0, ROW).unwrap();
    format!("| {} | {} | {} |\n", dtype.name(), bits(dtype.block_bytes(), dtype.block()), bits(tile, ROW * LANES))
}

#[test]
fn the_documents_have_the_bits_of_every_type() {
    let types = Dtype::ALL.into_iter().filter(|dtype| !matches!(dtype, Dtype::Grouped(_)));
    let rows: String = types.map(row).collect();
    let table = format!("\n\n| type | bits in a file | on a CPU |\n|---|---|---|\n{rows}\n");
    check("docs/formats.md", &[("<!-- packed: begin -->{}<!-- packed: end -->", table)]);
}

#[test]
fn the_documents_have_the_constants_of_kernels() {
    let (tile, chunk) = (TILE.to_string(), CHUNK.to_string());
    check(
        "docs/numerics.md",
        &[
            ("Attention reads KV in tiles of {} positions,", tile.clone()),
            ("Tiles merge into chunks of {} positions,", chunk.clone()),
        ],
    );
    check(
        "docs/glossary.md",
        &[
            ("in attention, {} positions whose tiles are merged;", chunk),
            ("| tile | In attention, {} KV positions", tile),
        ],
    );
    let widest = format!("must be a multiple of {LANES}, up to {{}}.");
    check("docs/limits.md", &[("must be a multiple of {}, up", LANES.to_string()), (&widest, DIM_MAX.to_string())]);
}
