//! The view of requests: running, waiting and recently ended ones, and the timeline of one. Has no text of any request.

use super::bars::{count, sparkline, text, time};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use serde_json::Value;

/// Narrower terminals lose columns.
const WIDE: u16 = 100;
const MIDDLE: u16 = 76;

pub fn rows(page: &Value) -> &[Value] {
    page["requests"].as_array().map_or(&[][..], Vec::as_slice)
}

/// Returns the numbers of waiting and running requests, if this key may read them, and the columns' names.
pub fn head(page: &Value, width: u16) -> Vec<Line<'static>> {
    let under_way = match (page["waiting"].as_u64(), page["running"].as_u64()) {
        (Some(waiting), Some(running)) => format!("{running} run, {waiting} wait"),
        _ => "requests of this API key".to_owned(),
    };
    let tenant_columns = if width >= WIDE { format!("{:<12} {:<16} ", "tenant", "replica") } else { String::new() };
    let api = if width >= MIDDLE { format!("{:<6} ", "api") } else { String::new() };
    let columns = format!(
        "{:>6} {:<10} {tenant_columns}{api}{:>6} {:>6} {:>6} {:>7} {:>7}",
        "number", "state", "prompt", "cached", "answer", "first", "took"
    );
    vec![Line::from(under_way), Line::from(columns).dim()]
}

pub fn row(request: &Value, width: u16) -> Line<'static> {
    let number = |name: &str| request[name].as_f64().map_or_else(|| "-".to_owned(), count);
    let millis = |name: &str| request[name].as_f64().map_or_else(|| "-".to_owned(), |ms| time(ms / 1e3));
    let state = state(request);
    let colour = match (request["over"].as_bool(), &*state) {
        (Some(false), _) => Color::Green,
        (_, "ok") => Color::Reset,
        _ => Color::Yellow,
    };
    let mut spans = vec![
        Span::raw(format!("{:>6} ", text(&request["number"]))),
        Span::styled(format!("{:<10} ", shorten(&state, 10)), Style::new().fg(colour)),
    ];
    if width >= WIDE {
        let (tenant, replica) = (text(&request["tenant"]), text(&request["replica"]));
        spans.push(Span::raw(format!("{:<12} {:<16} ", shorten(&tenant, 12), shorten(&replica, 16))));
    }
    if width >= MIDDLE {
        spans.push(Span::raw(format!("{:<6} ", shorten(&text(&request["api"]), 6))));
    }
    spans.push(Span::raw(format!(
        "{:>6} {:>6} {:>6} {:>7} {:>7}",
        number("prompt"),
        number("cached"),
        number("output"),
        millis("first_token_ms"),
        millis("took_ms"),
    )));
    Line::from(spans)
}

/// Returns the request's state; while a long prompt is computed, also its progress.
fn state(request: &Value) -> String {
    match (request["computed"].as_u64(), request["prompt"].as_u64()) {
        (Some(computed), Some(prompt)) if prompt > 0 => format!("prompt {}%", computed * 100 / prompt),
        _ => text(&request["state"]),
    }
}

fn shorten(text: &str, n: usize) -> String {
    text.chars().take(n).collect()
}

/// Formats one request's timeline, from its arrival on.
pub fn timeline(request: &Value) -> Vec<String> {
    let tokens = |name: &str| request[name].as_f64().map_or_else(|| "-".to_owned(), count);
    let mut lines = vec![
        format!("request {} · {} · {}", text(&request["number"]), text(&request["state"]), text(&request["api"])),
        format!(
            "answer {} · of {} · tenant {}",
            text(&request["id"]),
            text(&request["model"]),
            text(&request["tenant"])
        ),
        format!(
            "{} prompt tokens, {} of them cached · {} tokens of the answer",
            tokens("prompt"),
            tokens("cached"),
            tokens("output")
        ),
        String::new(),
        format!("{:>9}  arrived", "0 ms"),
    ];
    let several = request["choices"].as_u64().is_some_and(|n| n > 1);
    let events = request["events"].as_array().map_or(&[][..], Vec::as_slice);
    lines.extend(events.iter().map(|event| self::event(event, several)));
    if let Some(n) = request["events_unkept"].as_u64().filter(|n| *n > 0) {
        lines.push(format!("{:>9}  {n} more events were dropped", ""));
    }
    if request["over"] == true {
        lines.push(format!("{:>9}  ended: {}", format_millis(&request["took_ms"]), text(&request["state"])));
    }
    let counts = request["tokens"]["counts"].as_array().map_or(&[][..], Vec::as_slice);
    if !counts.is_empty() {
        let width = request["tokens"]["width_ms"].as_f64().unwrap_or(0.0);
        let counts: Vec<Option<f64>> = counts.iter().map(Value::as_f64).collect();
        lines.extend([String::new(), format!("tokens, {} a column:", time(width / 1e3)), sparkline(&counts)]);
    }
    lines
}

fn format_millis(millis: &Value) -> String {
    format!("{:.0} ms", millis.as_f64().unwrap_or(0.0))
}

fn event(event: &Value, several: bool) -> String {
    let what = match event["what"].as_str().unwrap_or("-") {
        "placed" => format!("sent to {}", text(&event["replica"])),
        "started" => match event["cached"].as_u64().unwrap_or(0) {
            0 => "started: no tokens are cached".to_owned(),
            n => format!("started: {n} tokens are cached"),
        },
        "chunk" => format!("computed {} to {}", text(&event["start"]), text(&event["end"])),
        "preempted" => "preempted: it waits until there is memory again".to_owned(),
        "lost" => "a rank was lost: it is computed again".to_owned(),
        "moved" => "moved to another replica".to_owned(),
        other => other.to_owned(),
    };
    let choice = if several { format!(" (answer {})", text(&event["choice"])) } else { String::new() };
    format!("{:>9}  {what}{choice}", format_millis(&event["at_ms"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_long_prompt_shows_how_much_of_it_is_computed() {
        let request = |computed: Value| json!({ "state": "computing", "prompt": 6000, "computed": computed });
        for (computed, expect) in [(json!(1536), "prompt 25%"), (json!(null), "computing")] {
            let row = row(&request(computed), 80).to_string();
            assert!(row.contains(expect), "{row}");
        }
    }
}
