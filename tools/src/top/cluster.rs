//! The view of the cluster: a line for each rank of each replica, and above them the problems.

use super::bars::{bar, memory, replace_control_chars, stacked_bar, text, time};
use crate::status::{drafts_text, models, notes, speed, store, target_grid_text};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use serde_json::Value;

/// Narrower terminals show fewer columns; the least important ones disappear first.
const WIDE: u16 = 90;
const MIDDLE: u16 = 72;
/// Cells of a bar of time.
const TIME_CELLS: usize = 16;

pub fn lines(page: &Value, width: u16) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if !page["store"].is_null() {
        lines.extend(each(&store(&page["store"])));
    }
    lines.extend(each(&models(&page["models"])));
    let replicas = page["replicas"].as_array().map_or(&[][..], Vec::as_slice);
    if replicas.is_empty() {
        lines.push(Line::from("no replica is attached").yellow());
    }
    for replica in replicas {
        lines.extend(self::replica(replica, width));
        lines.push(Line::default());
    }
    lines
}

fn each(text: &str) -> Vec<Line<'static>> {
    text.lines().map(|line| Line::from(replace_control_chars(line))).collect()
}

fn replica(replica: &Value, width: u16) -> Vec<Line<'static>> {
    let phase = text(&replica["phase"]);
    let colour = if phase == "ready" { Color::Green } else { Color::Yellow };
    let mut head =
        vec![Span::raw(text(&replica["replica"])).bold(), Span::raw(" · "), Span::raw(phase.clone()).fg(colour)];
    if phase == "absent" {
        return vec![Line::from(head)];
    }
    let (grid, requests, blocks) = (&replica["grid"], &replica["requests"], &replica["blocks"]);
    head.push(Span::raw(format!(
        " · {} · tp {} x pp {}{} · epoch {} · {} spares",
        text(&replica["model"]),
        grid["tp"],
        grid["pp"],
        target_grid_text(&replica["requested_grid"]),
        text(&replica["epoch"]),
        replica["spares"],
    )));
    let mut lines = vec![Line::from(head)];
    lines.push(Line::from(format!(
        "{} run, {} wait · KV {} of {} blocks",
        requests["running"], requests["waiting"], blocks["used"], blocks["total"]
    )));
    lines.push(Line::from(speed(&replica["tokens_per_s"])));
    lines.extend(drafts_text(&replica["drafts"]).map(Line::from));
    lines.extend(notes(replica).iter().map(|note| Line::from(replace_control_chars(note)).yellow()));
    let ranks = replica["ranks"].as_array().map_or(&[][..], Vec::as_slice);
    if !ranks.is_empty() {
        lines.push(legend(width));
    }
    lines.extend(ranks.iter().map(|of| rank(of, width)));
    lines
}

fn legend(width: u16) -> Line<'static> {
    let place = if width >= WIDE { format!("{:<14} {:>7} {:<6} ", "host", "pid", "device") } else { String::new() };
    let layers = if width >= MIDDLE { format!("{:>8} {:>7} ", "layers", "step") } else { String::new() };
    let mut spans =
        vec![Span::raw(format!("rank stage tp {:<8} {place}{layers}{:>6} {:<9} ", "state", "memory", "KV"))];
    for (word, (_, colour)) in ["compute ", "wait ", "idle"].iter().zip(COLOURS) {
        spans.push(Span::styled(*word, Style::new().fg(colour)));
    }
    Line::from(spans).dim()
}

/// The parts of a rank's time: computing, waiting for other ranks, without a step.
const COLOURS: [(char, Color); 3] = [('█', Color::Green), ('▓', Color::Yellow), ('░', Color::DarkGray)];

fn rank(rank: &Value, width: u16) -> Line<'static> {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let state = text(&rank["state"]);
    let is_well = state == "ready";
    let memory = memory(number(&rank["memory"]["weights"]) + number(&rank["memory"]["kv"]));
    let step: f64 = ["compute", "wait", "idle"].iter().map(|part| number(&rank["step_micros"][*part])).sum();
    let used = number(&rank["kv"]["used"]);
    let mut spans = vec![
        Span::raw(format!("{:>4} {:>5} {:>2} ", text(&rank["rank"]), text(&rank["stage"]), text(&rank["tp"]))),
        Span::styled(
            format!("{:<8} ", cut(&state, 8)),
            Style::new().fg(if is_well { Color::Green } else { Color::Red }),
        ),
    ];
    if width >= WIDE {
        let (host, device) = (text(&rank["host"]), text(&rank["device"]));
        spans.push(Span::raw(format!("{:<14} {:>7} {:<6} ", cut(&host, 14), text(&rank["pid"]), cut(&device, 6))));
    }
    if width >= MIDDLE {
        let layers = format!("{}..{}", rank["layers"][0], rank["layers"][1]);
        let step = if step > 0.0 { time(step / 1e6) } else { "-".to_owned() };
        spans.push(Span::raw(format!("{layers:>8} {step:>7} ")));
    }
    spans.push(Span::raw(format!("{memory:>6} {}{:>3.0}% ", bar(used, 4), used * 100.0)));
    let share = |name: &str| number(&rank["time"][name]);
    let shares = [share("compute"), share("wait"), share("idle")];
    let of_time: Vec<_> = shares.into_iter().zip(COLOURS).map(|(part, (sign, colour))| (part, sign, colour)).collect();
    spans.extend(stacked_bar(&of_time, TIME_CELLS));
    Line::from(spans)
}

fn cut(text: &str, n: usize) -> String {
    match text.chars().count() > n {
        true => text.chars().take(n - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}
