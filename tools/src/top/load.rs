//! The view of the load: the last hour in bins, a curve for each figure. A bin in which nothing happened has no value.

use super::bars::{bar, count, replace_control_chars, sparkline, time};
use ratatui::style::Stylize;
use ratatui::text::{Line, Span};
use serde_json::Value;
use std::collections::BTreeMap;

const NAME_WIDTH: usize = 22;
const LAST_WIDTH: usize = 9;
const TENANTS_SHOWN: usize = 8;

struct LoadFigure {
    name: &'static str,
    of: fn(&Value, f64) -> Option<f64>,
    shown: fn(f64) -> String,
}

fn format_percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}

const FIGURES: [LoadFigure; 9] = [
    LoadFigure { name: "tokens/s", of: |bin, seconds| Some(bin["output"].as_f64()? / seconds), shown: count },
    LoadFigure { name: "first token, p50", of: |bin, _| bin["first_token_s"]["p50"].as_f64(), shown: time },
    LoadFigure { name: "first token, p99", of: |bin, _| bin["first_token_s"]["p99"].as_f64(), shown: time },
    LoadFigure { name: "between tokens, p50", of: |bin, _| bin["between_tokens_s"]["p50"].as_f64(), shown: time },
    LoadFigure { name: "between tokens, p99", of: |bin, _| bin["between_tokens_s"]["p99"].as_f64(), shown: time },
    LoadFigure { name: "most running", of: |bin, _| bin["running_max"].as_f64(), shown: count },
    LoadFigure { name: "most waiting", of: |bin, _| bin["waiting_max"].as_f64(), shown: count },
    LoadFigure { name: "refused", of: |bin, _| bin["refused"].as_f64(), shown: count },
    LoadFigure {
        name: "prompts from the cache",
        of: |bin, _| Some(bin["cached"].as_f64()? / bin["prompt"].as_f64().filter(|n| *n > 0.0)?),
        shown: format_percent,
    },
];

pub fn lines(page: &Value, width: u16) -> Vec<Line<'static>> {
    let seconds = page["bin_seconds"].as_f64().unwrap_or(10.0).max(1.0);
    let now = page["now"].as_u64().unwrap_or(0);
    let bins: BTreeMap<u64, &Value> = page["bins"]
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .filter_map(|bin| Some((bin["number"].as_u64()?, bin)))
        .collect();
    let n_columns = (width as usize).saturating_sub(NAME_WIDTH + LAST_WIDTH + 2).clamp(10, 360);
    let span = time(n_columns as f64 * seconds);
    let mut lines = vec![Line::from(format!("the last {span}, {seconds:.0} s a column; a gap has no data")).dim()];
    for figure in FIGURES {
        let first = (now + 1).saturating_sub(n_columns as u64);
        let values: Vec<Option<f64>> =
            (first..=now).map(|number| bins.get(&number).and_then(|bin| (figure.of)(bin, seconds))).collect();
        // The newest bin is not complete, so its rate is too low.
        let last = values.iter().rev().skip(1).take(1).chain(values.last()).flatten().next();
        let last = last.map_or_else(|| "-".to_owned(), |value| (figure.shown)(*value));
        lines.push(Line::from(vec![
            Span::raw(format!("{:<NAME_WIDTH$} {last:>LAST_WIDTH$} ", figure.name)),
            Span::raw(sparkline(&values)).cyan(),
        ]));
    }
    lines.extend(tenants(&bins));
    lines
}

/// Formats each tenant's share of the hour's tokens.
fn tenants(bins: &BTreeMap<u64, &Value>) -> Vec<Line<'static>> {
    let mut tokens: BTreeMap<String, f64> = BTreeMap::new();
    for (name, n) in bins.values().filter_map(|bin| bin["tenants"].as_object()).flatten() {
        *tokens.entry(replace_control_chars(name)).or_default() += n.as_f64().unwrap_or(0.0);
    }
    let all: f64 = tokens.values().sum();
    if tokens.is_empty() || all <= 0.0 {
        return Vec::new();
    }
    let mut tokens: Vec<(String, f64)> = tokens.into_iter().collect();
    tokens.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let row = |(name, n): &(String, f64)| {
        let name: String = name.chars().take(NAME_WIDTH).collect();
        Line::from(format!(
            "{name:<NAME_WIDTH$} {:>LAST_WIDTH$} {} {}",
            count(*n),
            bar(n / all, 20),
            format_percent(n / all)
        ))
    };
    let more = tokens.len().saturating_sub(TENANTS_SHOWN);
    let mut lines = vec![Line::default(), Line::from("tokens by tenant, the last hour").dim()];
    lines.extend(tokens.iter().take(TENANTS_SHOWN).map(row));
    lines.extend((more > 0).then(|| Line::from(format!("and {more} more"))));
    lines
}
