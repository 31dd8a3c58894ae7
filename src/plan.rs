//! `plan`: what would lie where, without loading it.

use crate::config::{Bytes, Config};
use crate::roles;
use checkpoint::Checkpoint;
use coordinator::{Blueprint, Machine, ModelShape, WorkerId};
use std::fmt::Write;

/// The shard table of this model on this machine.
pub fn table(config: &Config, checkpoint: &Checkpoint) -> anyhow::Result<String> {
    Ok(render(&checkpoint.spec().name, &blueprint(config, checkpoint)?, roles::memory_bytes())?)
}

/// How this machine would be placed, or why it cannot be: known before anything is started.
pub fn blueprint(config: &Config, checkpoint: &Checkpoint) -> anyhow::Result<Blueprint> {
    let machine = Machine {
        worker: WorkerId(0),
        host: "this machine".into(),
        device: "cpu".into(),
        memory_bytes: roles::memory_bytes(),
        threads: config.threads as u32,
    };
    Ok(coordinator::plan(&[machine], &ModelShape::of(checkpoint), &roles::policy(config), None)?)
}

fn render(model: &str, blueprint: &Blueprint, memory: u64) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let grid = blueprint.grid;
    writeln!(out, "{model} · pp={} tp={} · context {}", grid.pp, grid.tp, blueprint.context)?;
    writeln!(
        out,
        "{:>4} {:>5} {:>3}  {:>8} {:>8} {:>8}  {:>10} {:>10} {:>10}  host",
        "rank", "stage", "tp", "layers", "heads", "kv heads", "weights", "kv", "kv tokens"
    )?;
    for shard in &blueprint.shards {
        writeln!(
            out,
            "{:>4} {:>5} {:>3}  {:>8} {:>8} {:>8}  {:>10} {:>10} {:>10}  {} ({})",
            shard.rank.0,
            shard.place.stage,
            shard.place.tp,
            run(&shard.layers),
            run(&shard.heads),
            run(&shard.kv_heads),
            mebibytes(shard.weight_bytes),
            mebibytes(shard.kv_bytes),
            shard.kv_tokens,
            shard.host,
            mebibytes(memory),
        )?;
    }
    Ok(out)
}

fn run(range: &std::ops::Range<u32>) -> String {
    format!("{}..{}", range.start, range.end)
}

fn mebibytes(bytes: u64) -> String {
    Bytes(bytes.next_multiple_of(1 << 20).max(1 << 20)).to_string()
}
