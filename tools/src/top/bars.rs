//! Numbers as characters: bars, curves and short figures. Has no knowledge of the pages.

use ratatui::style::{Color, Style};
use ratatui::text::Span;
use serde_json::Value;

const EIGHTHS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Replaces characters in foreign text that control a terminal or change the direction of text.
pub fn replace_control_chars(text: &str) -> String {
    let is_unseen = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    text.chars().map(|c| if is_unseen(c) { '\u{fffd}' } else { c }).collect()
}

pub fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => replace_control_chars(text),
        other => other.to_string(),
    }
}

/// Returns a bar of `n_cells` cells, filled up to this part.
pub fn bar(part: f64, n_cells: usize) -> String {
    let full = filled(part, n_cells);
    "█".repeat(full) + &"░".repeat(n_cells - full)
}

fn filled(part: f64, n_cells: usize) -> usize {
    let cells = part.clamp(0.0, 1.0) * n_cells as f64;
    // A part above zero fills at least one cell.
    if part > 0.0 { (cells.round() as usize).max(1) } else { 0 }
}

/// Returns parts of one whole side by side, each in its colour.
pub fn stacked_bar(parts: &[(f64, char, Color)], n_cells: usize) -> Vec<Span<'static>> {
    let mut left = n_cells;
    let mut spans = Vec::new();
    for (part, sign, colour) in parts {
        let n = filled(*part, n_cells).min(left);
        left -= n;
        spans.push(Span::styled(sign.to_string().repeat(n), Style::new().fg(*colour)));
    }
    spans.push(Span::raw(" ".repeat(left)));
    spans
}

/// Returns one character for each value, relative to the largest. A value that was not measured is a gap, and not a
/// zero.
pub fn sparkline(values: &[Option<f64>]) -> String {
    let most = values.iter().flatten().copied().fold(0.0, f64::max);
    let sign = |value: &Option<f64>| match value {
        None => ' ',
        Some(value) if most > 0.0 => EIGHTHS[((value / most * 7.0).round() as usize).min(7)],
        Some(_) => EIGHTHS[0],
    };
    values.iter().map(sign).collect()
}

/// Formats a count in at most five characters.
pub fn count(n: f64) -> String {
    match n {
        n if n >= 1e10 => format!("{:.0}G", n / 1e9),
        n if n >= 1e7 => format!("{:.0}M", n / 1e6),
        n if n >= 1e4 => format!("{:.0}k", n / 1e3),
        n if n >= 100.0 || n.fract() == 0.0 => format!("{n:.0}"),
        n => format!("{n:.1}"),
    }
}

/// Formats a time in the unit that people would use.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 90.0 => format!("{:.0} min", s / 60.0),
        s if s >= 10.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.1} s"),
        s if s >= 0.01 => format!("{:.0} ms", s * 1e3),
        s if s >= 0.001 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.0} us", s * 1e6),
    }
}

/// Formats an amount of memory in the unit that people would use.
pub fn memory(bytes: f64) -> String {
    match bytes {
        b if b >= 1024.0 * 1024.0 * 1024.0 * 10.0 => format!("{:.0}G", b / (1u64 << 30) as f64),
        b if b >= 1024.0 * 1024.0 * 1024.0 => format!("{:.1}G", b / (1u64 << 30) as f64),
        b => format!("{:.0}M", (b / (1u64 << 20) as f64).ceil()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_seen_and_what_is_missing_is_no_zero() {
        assert_eq!(
            (bar(0.0, 4), bar(0.01, 4), bar(1.0, 4), bar(7.0, 2)),
            ("░░░░".into(), "█░░░".into(), "████".into(), "██".into())
        );
        assert_eq!(sparkline(&[None, Some(0.0), Some(5.0), Some(10.0)]), " ▁▅█");
        assert_eq!(sparkline(&[Some(0.0), None]), "▁ ");
        let spans = stacked_bar(&[(0.5, 'a', Color::Red), (0.4, 'b', Color::Red), (0.9, 'c', Color::Red)], 8);
        let text: String = spans.iter().map(|span| &*span.content).collect();
        assert_eq!(text, "aaaabbbc");
    }

    #[test]
    fn figures_are_short() {
        assert_eq!([0.0, 7.25, 123.4, 12_345.0, 98_765_432.0].map(count), ["0", "7.2", "123", "12k", "99M"]);
        assert_eq!(
            [0.000_12, 0.0012, 0.042, 1.25, 12.0, 125.0].map(time),
            ["120 us", "1.2 ms", "42 ms", "1.2 s", "12 s", "2 min"]
        );
        assert_eq!([1.0, 5e6, 3e9, 5e10].map(memory), ["1M", "5M", "2.8G", "47G"]);
    }

    #[test]
    fn what_others_wrote_orders_no_terminal_about() {
        assert_eq!(replace_control_chars("a\x1b[2Jb\u{202e}c\u{200b}"), "a\u{fffd}[2Jb\u{fffd}c\u{fffd}");
    }
}
