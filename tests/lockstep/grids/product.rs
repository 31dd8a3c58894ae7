//! The full product of families, grids and wires, for `make grids`; CI runs a cover of it. Its table is kept with the
//! other results.

use super::{FAMILIES, FEW_BLOCKS, GRID_MAX, WIRES, alone, check_equal, hard_requests, setup};
use crate::common::requests::REQUESTS;
use crate::common::{Replica, Setup};
use std::io::Write;
use std::path::Path;
use worker::WireChoice;

/// The families that the cover leaves out, and other forms of files.
const OTHER_FAMILIES: [&str; 20] = [
    "olmo2",
    "olmo3",
    "granite",
    "granite-moe",
    "glm4",
    "glm4-moe",
    "ministral",
    "ministral3",
    "cohere2",
    "gpt-neox",
    "gpt-oss",
    "gpt-oss-bf16",
    "qwen3-vl-moe",
    "qwen3.5",
    "gguf-qwen3.5-moe",
    "lfm2",
    "lfm2-moe",
    "bamba",
    "nemotron-h",
    "nemotron-h-moe",
];

/// One line of the table.
struct Row {
    family: &'static str,
    grid: String,
    wire: &'static str,
    n_requests: usize,
    n_tokens: usize,
    n_hits: u32,
    n_preempted: u32,
}

/// Takes too long for CI.
#[tokio::test]
async fn the_whole_product() {
    if std::env::var_os("LOCKSTEP_GRIDS").is_none() {
        // Directly to stderr: the harness shows a test's output only when it fails.
        return std::io::stderr().write_all(b"NOT RUN: the whole product of grids, which is `make grids`\n").unwrap();
    }
    let mut rows = Vec::new();
    let mut refused = Vec::new();
    let families = || FAMILIES.into_iter().chain(OTHER_FAMILIES);
    for family in families() {
        let base = Setup { n_blocks: FEW_BLOCKS, prefix_cache: true, ..setup(family, "int8", "f16") };
        let requests = hard_requests(family);
        let expected = alone(&Setup { prefix_cache: false, n_blocks: 2048, ..base.clone() }, &requests).await;
        for (tp, pp) in (1..=GRID_MAX).flat_map(|tp| (1..=GRID_MAX).map(move |pp| (tp, pp))) {
            let setup = base.on(tp, pp);
            if let Err(why) = setup.layout() {
                refused.push(format!("| {family} | {tp} x {pp} | {why} |"));
                continue;
            }
            for wire in WIRES {
                let setup = Setup { wire, ..setup.clone() };
                let mut replica = Replica::start(&setup).await;
                let answers = replica.run(&requests).await;
                let seen = replica.seen();
                replica.stop().await;
                check_equal(&format!("{family}, tp {tp}, pp {pp}, {wire:?}"), &requests, &answers, &expected);
                rows.push(Row {
                    family,
                    grid: format!("{tp} x {pp}"),
                    wire: if wire == WireChoice::Memory { "shm" } else { "tcp" },
                    n_requests: answers.len(),
                    n_tokens: answers.iter().map(|answer| answer.drawn.len()).sum(),
                    n_hits: seen.hits,
                    n_preempted: seen.restarts,
                });
                println!("{}", rows.last().unwrap().line());
            }
        }
    }
    write(&rows, &refused);
    for family in families() {
        let has_both = |row: &Row| row.family == family && row.n_hits > 0 && row.n_preempted > 0;
        assert!(rows.iter().any(has_both), "{family}: prefix hits and preemption");
    }
}

impl Row {
    fn line(&self) -> String {
        let Row { family, grid, wire, n_requests, n_tokens, n_hits, n_preempted } = self;
        format!("| {family} | {grid} | {wire} | {n_requests} | {n_tokens} | {n_hits} | {n_preempted} | all |")
    }
}

fn write(rows: &[Row], refused: &[String]) {
    let mut page = format!(
        "# Every family on every grid\n\n\
         Made by `make grids`. Each run: {REQUESTS} mixed requests at once on a pool of\n\
         {FEW_BLOCKS} blocks with the prefix cache on, workers as threads, every pair of ranks over shared memory or \
         over TCP.\nEqual: answers whose token ids and logprobs have the bits that the request has alone on one \
         rank.\n\n\
         {} runs, {} tokens.\n\n\
         | checkpoint | tp x pp | wire | requests | tokens | prefix hits | preemptions | equal |\n\
         |---|---|---|---:|---:|---:|---:|---|\n",
        rows.len(),
        rows.iter().map(|row| row.n_tokens).sum::<usize>()
    );
    rows.iter().for_each(|row| page.push_str(&(row.line() + "\n")));
    page.push_str("\n## Refused\n\nA tiny checkpoint cannot be cut into more parts than it has.\n\n");
    page.push_str("| checkpoint | tp x pp | the coordinator's error |\n|---|---|---|\n");
    refused.iter().for_each(|line| page.push_str(&format!("{line}\n")));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("grids.md"), page).unwrap();
}
