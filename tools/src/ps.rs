//! `ps`: the models that a server has loaded, one line for each replica. Reads `/cluster`.

use crate::out;
use crate::server::{RouterArgs, RunningServer};
use clap::Args;
use indicatif::HumanBytes;
use serde_json::Value;

#[derive(Args)]
pub struct PsCommand {
    #[command(flatten)]
    pub look: RouterArgs,
}

impl PsCommand {
    pub fn run(self) -> anyhow::Result<()> {
        out::print(&table(&RunningServer::new(self.look)?.cluster()?))
    }
}

fn table(page: &Value) -> String {
    let names = ["MODEL", "REPLICA", "STATE", "SIZE", "DEVICE", "GRID", "CONTEXT", "REQUESTS"];
    let replicas = page["replicas"].as_array().map_or(&[][..], Vec::as_slice);
    let rows: Vec<[String; 8]> = std::iter::once(names.map(str::to_owned)).chain(replicas.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..names.len()).map(width).collect();
    let line = |row: &[String; 8]| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

fn row(replica: &Value) -> [String; 8] {
    let text = |value: &Value| value.as_str().map_or_else(|| "-".to_owned(), str::to_owned);
    let ranks = replica["ranks"].as_array().map_or(&[][..], Vec::as_slice);
    let bytes =
        |rank: &Value| ["weights", "kv"].iter().map(|part| rank["memory"][*part].as_u64().unwrap_or(0)).sum::<u64>();
    let mut devices: Vec<String> = ranks.iter().map(|rank| text(&rank["device"])).collect();
    devices.sort();
    devices.dedup();
    let (grid, requests) = (&replica["grid"], &replica["requests"]);
    [
        text(&replica["model"]),
        text(&replica["replica"]),
        text(&replica["phase"]),
        if ranks.is_empty() { "-".to_owned() } else { HumanBytes(ranks.iter().map(bytes).sum()).to_string() },
        if devices.is_empty() { "-".to_owned() } else { devices.join("+") },
        if grid.is_null() { "-".to_owned() } else { format!("tp {} x pp {}", grid["tp"], grid["pp"]) },
        replica["context"].as_u64().map_or_else(|| "-".to_owned(), |n| n.to_string()),
        if requests.is_null() {
            "-".to_owned()
        } else {
            format!("{} run, {} wait", requests["running"], requests["waiting"])
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_is_a_replica() {
        let rank = json!({ "device": "cpu", "memory": { "weights": 3u64 << 20, "kv": 1u64 << 20 } });
        let ready = json!({
            "replica": "local", "model": "smollm2", "phase": "ready", "context": 2048, "grid": { "tp": 2, "pp": 1 },
            "requests": { "running": 1, "waiting": 0 }, "ranks": [rank, rank],
        });
        let text = table(&json!({ "replicas": [ready, { "replica": "there:1", "phase": "absent" }] }));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "smollm2  local    ready   8.00 MiB  cpu     tp 2 x pp 1  2048     1 run, 0 wait");
        assert_eq!(lines[2], "-        there:1  absent  -         -       -            -        -");
        assert_eq!(table(&json!({})).lines().count(), 1);
    }
}
