//! `status`: prints the state of the cluster once. Reads `/cluster` of a router and formats it; has no knowledge of how
//! that page is made.

use crate::out;
use crate::server::{RouterArgs, RunningServer};
use clap::Args;
use serde_json::Value;
use std::fmt::Write;
use std::time::{Duration, UNIX_EPOCH};

#[derive(Args)]
pub struct StatusCommand {
    /// List this machine's devices, drivers, memory and libraries, and exit
    #[arg(long)]
    pub devices: bool,
    #[command(flatten)]
    pub look: RouterArgs,
}

impl StatusCommand {
    /// `devices` lists those of this machine.
    pub fn run(self, devices: fn() -> String) -> anyhow::Result<()> {
        out::print(&if self.devices { devices() } else { render(&RunningServer::new(self.look)?.cluster()?) })
    }
}

const COLUMNS: [&str; 17] = [
    "rank", "stage", "tp", "state", "host", "device", "pid", "layers", "heads", "weights", "kv", "kv used", "compute",
    "wait", "idle", "bubble", "step",
];

/// Formats the page of all replicas.
pub fn render(page: &Value) -> String {
    let store = if page["store"].is_null() { String::new() } else { store(&page["store"]) };
    let replicas = page["replicas"].as_array().map_or(&[][..], Vec::as_slice);
    if replicas.is_empty() {
        return format!("{store}no replica is attached\n");
    }
    store + &models(&page["models"]) + &replicas.iter().map(replica).collect::<Vec<_>>().join("\n")
}

/// Formats the source of the list of replicas.
pub fn store(store: &Value) -> String {
    let kind = store["kind"].as_str().unwrap_or("-");
    let since = UNIX_EPOCH + Duration::from_secs(store["since"].as_u64().unwrap_or(0));
    let seconds = since.elapsed().unwrap_or_default().as_secs();
    match store["reason"].as_str() {
        None => format!("store: {kind} · connected for {seconds} s\n"),
        Some(reason) => format!("store: {kind} · unreachable for {seconds} s, no member joins or leaves: {reason}\n"),
    }
}

/// Formats model names and the versions behind them. Returns an empty string if there is just one of each.
pub fn models(models: &Value) -> String {
    let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
    let models = list(models);
    if models.len() < 2 && models.iter().all(|model| list(&model["versions"]).len() < 2) {
        return String::new();
    }
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let share = |share: &Value| {
        let (model, digest) = (text(&share["model"]), text(&share["policy_digest"]));
        let standing = match (share["replicas"].as_u64(), share["like"].as_str()) {
            (Some(0), Some(like)) => format!("no replica serves it: did you mean {like}?"),
            (Some(0), None) => "no replica serves it".to_owned(),
            _ => format!("{} of {} ready", share["ready"], share["replicas"]),
        };
        format!("{model}@{digest}:{} ({standing})", share["weight"])
    };
    let line = |model: &Value| {
        let shares: Vec<String> = list(&model["versions"]).iter().map(share).collect();
        format!("{} = {}\n", text(&model["name"]), shares.join(", "))
    };
    models.iter().map(line).collect()
}

/// Returns how many blocks have memory, while not all have.
fn committed_blocks_text(blocks: &Value) -> String {
    let committed = blocks["committed"].as_u64().filter(|n| Some(*n) < blocks["total"].as_u64());
    committed.map_or_else(String::new, |n| format!(" ({n} have memory)"))
}

fn replica(replica: &Value) -> String {
    let mut out = String::new();
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let (grid, requests, blocks) = (&replica["grid"], &replica["requests"], &replica["blocks"]);
    if replica["phase"] == "absent" {
        return format!("{} · absent\n", text(&replica["replica"]));
    }
    // Writing to a string does not fail.
    let _written = writeln!(
        out,
        "{} · {} · {} · epoch {} · tp {} x pp {}{} · {} running, {} waiting, {} tokens to do · \
         {}/{} blocks{} · {} spares",
        text(&replica["replica"]),
        text(&replica["model"]),
        text(&replica["phase"]),
        text(&replica["epoch"]),
        grid["tp"],
        grid["pp"],
        target_grid_text(&replica["requested_grid"]),
        requests["running"],
        requests["waiting"],
        replica["backlog_tokens"],
        blocks["used"],
        blocks["total"],
        committed_blocks_text(blocks),
        replica["spares"],
    );
    let _written = writeln!(out, "{}", speed(&replica["tokens_per_s"]));
    if let Some(steps) = steps_text(&replica["step_speed"]) {
        let _written = writeln!(out, "{steps}");
    }
    if let Some(drafts) = drafts_text(&replica["drafts"]) {
        let _written = writeln!(out, "{drafts}");
    }
    for note in notes(replica) {
        let _written = writeln!(out, "{note}");
    }
    let ranks = replica["ranks"].as_array().map_or(&[][..], Vec::as_slice);
    let rows: Vec<[String; 17]> = std::iter::once(COLUMNS.map(str::to_owned)).chain(ranks.iter().map(rank)).collect();
    for row in &rows {
        let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
        let cells: Vec<String> = row.iter().enumerate().map(|(i, cell)| format!("{cell:>w$}", w = width(i))).collect();
        let _written = writeln!(out, "{}", cells.join("  "));
    }
    out
}

/// Returns the problems of a replica, each with its reason.
pub fn notes(replica: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut notes = Vec::new();
    let (unplaced, shortened, differs) = (&replica["unplaced"], &replica["shortened"], &replica["differs"]);
    if let Some(why) = text(&unplaced["why"]) {
        notes.push(format!("{} for {} s: {why}", text(&replica["phase"]).unwrap_or_default(), unplaced["seconds"]));
    }
    notes.extend(list(&replica["lost"]).iter().map(loss_text));
    if let Some(why) = text(&shortened["why"]) {
        notes.push(format!("context {} and not {}: {why}", shortened["has"], shortened["requested"]));
    }
    if let (Some(other), Some(weight)) = (text(&differs["replica"]), text(&differs["weight"])) {
        let piece = &differs["piece"];
        notes.push(format!(
            "the bytes of the weight {weight} (piece {piece}) differ from those of {other}: one of the files is damaged"
        ));
    }
    if let Some(why) = text(&replica["shunned"]) {
        notes.push(format!("gets no new requests: {why}"));
    }
    if replica["suspected"] == true {
        notes.push("its coordinator is silent".to_owned());
    }
    notes.extend(list(&replica["apart"]).iter().map(partition_text));
    notes
}

pub fn target_grid_text(target: &Value) -> String {
    match target.is_null() {
        true => String::new(),
        false => format!(" (requested: tp {} x pp {})", target["tp"], target["pp"]),
    }
}

/// Formats the last loss of a rank, and its cost.
fn loss_text(lost: &Value) -> String {
    let text = |name: &str| lost[name].as_str().unwrap_or("-");
    let ago = lost["seconds_ago"].as_f64().unwrap_or(0.0);
    let since = match (lost["pause_seconds"].as_f64(), lost["successor"]["pid"].as_u64()) {
        (None, _) => "its replica pauses".to_owned(),
        (Some(pause), successor) => {
            let holder = successor.map_or_else(
                || "the grid continues without it".to_owned(),
                |pid| format!("pid {pid} on {} holds it", lost["successor"]["host"].as_str().unwrap_or("-")),
            );
            format!("a pause of {pause:.1} s, {} positions computed again, {holder}", lost["tokens_replayed"])
        }
    };
    let (cause, why, host) = (text("cause"), text("why"), text("host"));
    format!("rank {} was lost {ago:.0} s ago: pid {} on {host}, {cause} ({why}); {since}", lost["rank"], lost["pid"])
}

fn partition_text(apart: &Value) -> String {
    let text = |name: &str| apart[name].as_str().unwrap_or("-").to_owned();
    format!(
        "{} of {} and {} of {} cannot reach each other: the first is excluded for {} s: {}",
        text("address"),
        text("host"),
        text("other_address"),
        text("other_host"),
        apart["seconds"],
        text("why"),
    )
}

pub fn speed(tokens_per_s: &Value) -> String {
    let number = |value: &Value| value.as_f64().map_or_else(|| "-".into(), |n| format!("{n:.0}"));
    let predicted = &tokens_per_s["predicted"];
    let band = match predicted.is_null() {
        true => "predicted -".into(),
        false => format!(
            "predicted {} to {} for one sequence ({})",
            number(&predicted["low"]),
            number(&predicted["high"]),
            predicted["bottleneck"].as_str().unwrap_or("-")
        ),
    };
    format!(
        "tokens/s: {band} · one sequence {} · all {}",
        number(&tokens_per_s["alone"]),
        number(&tokens_per_s["busy"])
    )
}

/// Returns what steps of some widths take, and how many were predicted well.
fn steps_text(speed: &Value) -> Option<String> {
    let predicted = speed["predicted"].as_f64().filter(|n| *n > 0.0)?;
    let cost = |cost: &Value| format!("{} rows {:.1} ms", cost["rows"], cost["ms"].as_f64().unwrap_or(0.0));
    let costs: Vec<String> = speed["costs"].as_array()?.iter().map(cost).collect();
    let percent = speed["as_predicted"].as_f64().unwrap_or(0.0) / predicted * 100.0;
    Some(format!("steps: {} · {percent:.0}% within a fifth of the prediction", costs.join(", ")))
}

/// Returns how many guessed tokens steps verified, and how many of them became tokens. None before the first one.
pub fn drafts_text(drafts: &Value) -> Option<String> {
    let verified = drafts["verified"].as_f64().filter(|n| *n > 0.0)?;
    let accepted = drafts["accepted"].as_f64().unwrap_or(0.0);
    Some(format!("drafts: {accepted} of {verified} accepted ({:.0}%)", accepted / verified * 100.0))
}

fn rank(rank: &Value) -> [String; 17] {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let range = |pair: &Value| format!("{}..{}", pair[0], pair[1]);
    let mebibytes = |bytes: &Value| format!("{} MiB", bytes.as_u64().unwrap_or(0).div_ceil(1 << 20));
    let percent = |share: &Value| format!("{:.0}%", share.as_f64().unwrap_or(0.0) * 100.0);
    let (memory, time, step) = (&rank["memory"], &rank["time"], &rank["step_micros"]);
    let micros = ["compute", "wait", "idle"].map(|part| format!("{:.0}", step[part].as_f64().unwrap_or(0.0)));
    [
        text(&rank["rank"]),
        text(&rank["stage"]),
        text(&rank["tp"]),
        text(&rank["state"]),
        text(&rank["host"]),
        text(&rank["device"]),
        text(&rank["pid"]),
        range(&rank["layers"]),
        range(&rank["heads"]),
        mebibytes(&memory["weights"]),
        mebibytes(&memory["kv"]),
        percent(&rank["kv"]["used"]),
        percent(&time["compute"]),
        percent(&time["wait"]),
        percent(&time["idle"]),
        percent(&time["bubble"]),
        format!("{} us", micros.join("+")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn versions_are_rendered_in_a_line() {
        let version = |model: &str, n: u32, like: Option<&str>| {
            let (weight, policy_digest) = (9, "01");
            json!({
                "model": model, "policy_digest": policy_digest, "weight": weight, "ready": n, "replicas": n,
                "like": like,
            })
        };
        let versions = [version("v2", 2, None), version("v-2", 0, Some("v2")), version("w", 0, None)];
        let text = render(&json!({ "models": [{ "name": "chat", "versions": versions }], "replicas": [{}] }));
        let line = "chat = v2@01:9 (2 of 2 ready), v-2@01:9 (no replica serves it: did you mean v2?), \
                    w@01:9 (no replica serves it)";
        assert_eq!(text.lines().next(), Some(line));
    }

    #[test]
    fn a_page_becomes_a_table() {
        let rank = json!({
            "rank": 0, "stage": 0, "tp": 0, "pid": 7, "state": "ready", "host": "here", "device": "cuda",
            "layers": [0, 30], "heads": [0, 5], "memory": { "weights": 5 << 20, "kv": 1 }, "kv": { "used": 0.5 },
            "time": { "compute": 0.75, "wait": 0.25, "idle": 0.0, "bubble": 0.125 },
            "step_micros": { "compute": 900.4, "wait": 300.0, "idle": 0.0 },
        });
        let page = json!({ "replicas": [{
            "replica": "local", "model": "m", "phase": "ready", "epoch": "1.1", "grid": { "tp": 1, "pp": 1 },
            "requested_grid": { "tp": 2, "pp": 1 },
            "apart": [{
                "host": "h", "address": "a:1", "other_host": "i", "other_address": "b:2", "why": "mute", "seconds": 9,
            }],
            "unplaced": { "why": "too few", "seconds": 7 },
            "lost": [
                { "rank": 1, "host": "h", "pid": 8, "cause": "gone", "why": "closed", "seconds_ago": 4.2,
                  "pause_seconds": 1.5, "tokens_replayed": 48, "successor": { "host": "i", "pid": 9 } },
                { "rank": 2, "host": "h", "pid": 6, "cause": "silent", "why": "mute", "seconds_ago": 1.0 },
            ],
            "shortened": { "requested": 9, "has": 5, "why": "too little" },
            "differs": { "replica": "there", "weight": "w", "piece": 3 },
            "requests": { "running": 2, "waiting": 0 }, "spares": 0,
            "blocks": { "used": 1, "committed": 2, "total": 4 },
            "tokens_per_s": { "predicted": { "low": 5.0, "high": 9.0, "bottleneck": "compute" }, "alone": 7.0 },
            "step_speed": {
                "costs": [{ "rows": 1, "ms": 5.25 }, { "rows": 32, "ms": 31.0 }], "predicted": 8, "as_predicted": 6,
            },
            "drafts": { "verified": 40, "accepted": 30 },
            "ranks": [rank],
        }] });
        let text = render(&page);
        for part in [
            "tp 1 x pp 1 (requested: tp 2 x pp 1) ·",
            "ready for 7 s: too few",
            "rank 1 was lost 4 s ago: pid 8 on h, gone (closed); a pause of 1.5 s, 48 positions computed again, pid 9",
            "rank 2 was lost 1 s ago: pid 6 on h, silent (mute); its replica pauses",
            "context 5 and not 9: too little",
            "1/4 blocks (2 have memory) ·",
            "the bytes of the weight w (piece 3) differ from those of there",
            "a:1 of h and b:2 of i cannot reach",
            "local · m · ready",
            "predicted 5 to 9",
            "one sequence 7 · all -",
            "steps: 1 rows 5.2 ms, 32 rows 31.0 ms · 75% within",
            "drafts: 30 of 40 accepted (75%)",
            "0..30",
            "cuda",
            "5 MiB",
            "900+300+0 us",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let widths: Vec<usize> = text.lines().skip(10).map(|line| line.chars().count()).collect();
        assert!(widths.len() == 2 && widths[0] == widths[1], "{text}");
        assert!(render(&json!({})).contains("no replica"));
        let away = json!({ "replicas": [{ "replica": "there:1", "phase": "absent" }] });
        assert_eq!(render(&away), "there:1 · absent\n");
        let store = json!({ "kind": "etcd", "connected": false, "since": 7, "reason": "no answer" });
        let store_text = render(&json!({ "store": store, "replicas": [] }));
        assert!(
            store_text.starts_with("store: etcd · unreachable for ")
                && store_text.ends_with("no replica is attached\n"),
            "{store_text}"
        );
        assert!(
            render(&json!({ "store": { "kind": "static", "since": 7 } })).starts_with("store: static · connected for ")
        );
        // A page of another kind is shown as far as possible.
        assert!(render(&json!({ "replicas": [{}] })).contains("predicted -"));
    }
}
