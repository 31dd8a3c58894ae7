//! The shard table as text.

use super::{Blueprint, PoolSize, Shard};
use std::fmt;
use std::ops::Range;
use types::{BLOCK_TOKENS, Grid};

const COLUMNS: [&str; 10] =
    ["rank", "stage", "tp", "layers", "heads", "kv heads", "weights", "kv", "kv tokens", "host"];

impl fmt::Display for Blueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Grid { pp, tp } = self.grid;
        let pools: Vec<String> = self.pools.iter().map(PoolSize::text).collect();
        writeln!(f, "tp {tp} x pp {pp} · context {} · {}", self.context, pools.join(" · "))?;
        let rows: Vec<[String; 10]> = self.shards.iter().map(Shard::row).collect();
        let width = |i: usize| rows.iter().map(|row| row[i].len()).chain([COLUMNS[i].len()]).max().unwrap_or(0);
        let line = |f: &mut fmt::Formatter<'_>, cells: [&str; 10]| {
            let padded = cells.iter().enumerate().map(|(i, cell)| format!("{cell:>width$}", width = width(i)));
            f.write_str(&padded.collect::<Vec<_>>().join("  "))
        };
        line(f, COLUMNS)?;
        rows.iter().try_for_each(|row| {
            writeln!(f)?;
            line(f, row.each_ref().map(String::as_str))
        })?;
        self.shortened.iter().try_for_each(|shortened| write!(f, "\n{shortened}"))
    }
}

impl PoolSize {
    fn text(&self) -> String {
        let blocks = format!("{} blocks of {BLOCK_TOKENS}", self.n_blocks);
        match self.group.layout.window() {
            Some(_) if self.group.is_state() => format!("{} states of recurrent layers", self.n_blocks),
            Some(window) => format!("{blocks} for a window of {window}"),
            None => blocks,
        }
    }
}

impl Shard {
    fn row(&self) -> [String; 10] {
        let range = |range: &Range<u32>| format!("{}..{}", range.start, range.end);
        [
            self.rank.0.to_string(),
            self.place.stage.to_string(),
            self.place.tp.to_string(),
            range(&self.layers),
            range(&self.heads),
            range(&self.kv_heads),
            mebibytes(self.weight_bytes),
            mebibytes(self.kv_bytes),
            self.kv_tokens.iter().map(u64::to_string).collect::<Vec<_>>().join(" + "),
            self.host.clone(),
        ]
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{}.{} MiB", bytes >> 20, ((bytes & 0xf_ffff) * 10) >> 20)
}
