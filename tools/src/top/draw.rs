//! Draws the screen: a line of views, the selected view, and a line of keys. Long lines are cut off; long lists are
//! scrolled.

use super::bars::replace_control_chars;
use super::screen::{Screen, TopView};
use super::{cluster, load, requests};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use std::time::{Duration, Instant};

/// The age from which on the screen shows how old an answer is.
const FRESH_MAX: Duration = Duration::from_secs(5);

const KEYS: &str = "q quit · Tab 1 2 3 views · ↑ ↓ move · Enter open · Esc back · ? help";
const HELP: [&str; 12] = [
    "1 2 3, Tab, ← →     cluster, requests, load",
    "↑ ↓ j k, PgUp PgDn  move",
    "Enter, Esc          open a request's timeline, and close it",
    "q, Ctrl-C           quit",
    "",
    "Cluster: a line is a rank. Its memory is weights and KV cache; the bar of",
    "its time shows computing, waiting for its peers within a step, and idle.",
    "Requests: `prompt` and `cached` are tokens, `first` is the time to the first",
    "token, `took` is the whole time. Running requests come first.",
    "Load: a column is ten seconds, the right one is now. A gap has no data.",
    "",
    "Any key goes back.",
];

pub fn draw(frame: &mut Frame<'_>, screen: &mut Screen, now: Instant) {
    let [top, notice, body, bottom] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(title(screen), top);
    frame.render_widget(self::notice(screen, now), notice);
    frame.render_widget(Line::from(KEYS).dim(), bottom);
    if screen.is_help {
        frame.render_widget(Paragraph::new(HELP.map(Line::from).to_vec()), body);
    } else if screen.view == TopView::Requests && screen.opened.is_none() {
        list(frame, screen, body);
    } else {
        page(frame, screen, body);
    }
}

fn title(screen: &Screen) -> Line<'static> {
    let mut spans = vec![Span::raw("lockstep top ").bold()];
    for (at, view) in TopView::ALL.into_iter().enumerate() {
        let name = Span::raw(format!(" {} {} ", at + 1, view.name()));
        spans.push(if view == screen.view { name.reversed() } else { name });
    }
    spans.push(Span::raw(format!(" {}", screen.url)).dim());
    Line::from(spans)
}

/// Returns why there is nothing to show, or how old it is.
fn notice(screen: &Screen, now: Instant) -> Line<'static> {
    let shown = screen.current_state();
    let age = shown.received_at.map(|at| now.saturating_duration_since(at));
    match (&shown.error, age) {
        (Some(why), Some(age)) => Line::from(format!("{} s old: {}", age.as_secs(), replace_control_chars(why))).red(),
        (Some(why), None) => Line::from(replace_control_chars(why)).red(),
        (None, Some(age)) if age > FRESH_MAX => Line::from(format!("{} s old", age.as_secs())).yellow(),
        (None, Some(_)) => Line::default(),
        (None, None) => Line::from("asking ..").dim(),
    }
}

fn page(frame: &mut Frame<'_>, screen: &mut Screen, area: Rect) {
    let Some(page) = &screen.current_state().page else { return };
    let lines = match (&screen.opened, screen.view) {
        (Some(_), _) => requests::timeline(page).into_iter().map(Line::from).collect(),
        (None, TopView::Load) => load::lines(page, area.width),
        (None, _) => cluster::lines(page, area.width),
    };
    screen.scroll = screen.scroll.min(lines.len().saturating_sub(area.height.into()));
    let first = u16::try_from(screen.scroll).unwrap_or(u16::MAX);
    frame.render_widget(Paragraph::new(lines).scroll((first, 0)), area);
}

/// Draws the list of requests, whose head stays and whose selected row is visible. Formats only the visible rows.
fn list(frame: &mut Frame<'_>, screen: &mut Screen, area: Rect) {
    let Some(page) = &screen.current_state().page else { return };
    let rows = requests::rows(page);
    let mut lines = requests::head(page, area.width);
    let room = usize::from(area.height).saturating_sub(lines.len()).max(1);
    let first = screen.scroll.clamp((screen.selected + 1).saturating_sub(room), screen.selected);
    for (at, request) in rows.iter().enumerate().skip(first).take(room) {
        let row = requests::row(request, area.width);
        lines.push(if at == screen.selected { row.reversed() } else { row });
    }
    if rows.is_empty() {
        lines.push(Line::from("there are no requests yet").dim());
    }
    screen.scroll = first;
    frame.render_widget(Paragraph::new(lines), area);
}

#[cfg(test)]
mod tests {
    use super::super::screen::TopQuestion;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
    use serde_json::{Value, json};

    fn rank(n: u32) -> Value {
        json!({
            "rank": n, "stage": n / 2, "tp": n % 2, "pid": 4000 + n, "state": "ready",
            "host": "a-host-with-a-long-name",
            "device": "cpu", "layers": [0, 15], "memory": { "weights": 50 << 20, "kv": 64 << 20 },
            "kv": { "used": 0.25 },
            "time": { "compute": 0.5, "wait": 0.25, "idle": 0.25 },
            "step_micros": { "compute": 900.0, "wait": 200.0, "idle": 0.0 },
        })
    }

    fn cluster() -> Value {
        json!({ "replicas": [{
            "replica": "local", "model": "smollm2", "phase": "recovering", "epoch": "1.1", "spares": 0,
            "grid": { "tp": 2, "pp": 2 }, "requests": { "running": 2, "waiting": 1 },
            "blocks": { "used": 5, "total": 20 }, "unplaced": { "why": "needs 4 workers, 3 are there", "seconds": 12 },
            "tokens_per_s": { "alone": 7.0 }, "ranks": (0..4).map(rank).collect::<Vec<_>>(),
        }] })
    }

    fn requests(n: u64) -> Value {
        let request = |n: u64| {
            json!({
                "number": n, "state": "running", "over": false, "api": "chat", "tenant": "ann", "replica": "local",
                "prompt": 100 + n, "cached": 64, "output": 5, "first_token_ms": 40.0, "took_ms": 1500.0,
            })
        };
        json!({ "waiting": 1, "running": 2, "requests": (1..=n).map(request).collect::<Vec<_>>() })
    }

    fn load() -> Value {
        let bin = |number: u64, output: u64| {
            json!({
                "number": number, "output": output, "prompt": 10, "cached": 5, "refused": 0,
                "running_max": 2, "waiting_max": 0,
                "first_token_s": { "p50": 0.05, "p99": null }, "tenants": { "ann": output, "bob": 1 },
            })
        };
        json!({ "bin_seconds": 10, "now": 9, "seconds": 95, "bins": [bin(5, 10), bin(7, 100), bin(8, 50)] })
    }

    fn screen() -> Screen {
        let mut screen = Screen::new("http://127.0.0.1:8000");
        let now = Instant::now();
        for (view, page) in [(TopView::Cluster, cluster()), (TopView::Requests, requests(40)), (TopView::Load, load())]
        {
            screen.receive(TopQuestion::Page(view), Ok(page), now);
        }
        screen
    }

    fn seen(screen: &mut Screen, (width, height): (u16, u16)) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, screen, Instant::now())).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn press(screen: &mut Screen, code: KeyCode) {
        screen.press(KeyEvent::new(code, KeyModifiers::NONE));
    }

    #[test]
    fn every_view_fits_every_width_and_loses_columns_and_not_lines() {
        for width in [20, 60, 80, 120, 200] {
            let mut screen = screen();
            let seen = seen(&mut screen, (width, 20));
            let ranks = seen.iter().filter(|line| line.contains("ready")).count();
            assert_eq!(ranks, 4, "{width}: {seen:#?}");
            assert_eq!(seen.iter().any(|line| line.contains("4003")), width >= 90, "{width}: {seen:#?}");
            assert!(seen.last().unwrap().starts_with("q quit"), "{seen:#?}");
        }
        let seen = seen(&mut screen(), (60, 20)).join("\n");
        for part in [
            "1 Cluster",
            "recovering for 12 s: needs 4 workers, 3 are there",
            "2 run, 1 wait · KV 5 of 20 blocks",
            "114M",
            "█░░░ 25%",
            "████████▓▓▓▓░░░░",
        ] {
            assert!(seen.contains(part), "{part} is not in\n{seen}");
        }
    }

    #[test]
    fn the_chosen_request_is_always_in_view() {
        let mut screen = screen();
        press(&mut screen, KeyCode::Char('2'));
        let first = seen(&mut screen, (60, 10));
        assert!(first[2].starts_with("2 run, 1 wait") && first[4].trim_start().starts_with("1 "), "{first:#?}");
        press(&mut screen, KeyCode::End);
        let last = seen(&mut screen, (60, 10));
        assert!(last[8].trim_start().starts_with("40 ") && last[3].contains("cached"), "{last:#?}");
        press(&mut screen, KeyCode::Up);
        assert_eq!(seen(&mut screen, (60, 10)), last, "a move within the screen does not scroll");
        press(&mut screen, KeyCode::Home);
        assert_eq!(seen(&mut screen, (60, 10)), first);
    }

    #[test]
    fn timeline_is_shown_in_words() {
        let mut screen = screen();
        press(&mut screen, KeyCode::Char('2'));
        press(&mut screen, KeyCode::Enter);
        let mut request = requests(1)["requests"][0].clone();
        let event = |at: f64, what: &str| {
            json!({ "at_ms": at, "what": what, "choice": 0, "cached": 64,
            "start": 64, "end": 101 })
        };
        request["events"] =
            json!([event(0.4, "placed"), event(1.0, "started"), event(20.0, "chunk"), event(99.0, "lost")]);
        request["tokens"] = json!({ "width_ms": 50.0, "counts": [0, 2, 4] });
        (request["over"], request["state"]) = (true.into(), "stop".into());
        screen.receive(TopQuestion::Timeline(1), Ok(request), Instant::now());
        let seen = seen(&mut screen, (80, 24)).join("\n");
        for part in
            ["64 tokens are cached", "computed 64 to 101", "99 ms  a rank was lost", "1500 ms  ended: stop", "▁▅█"]
        {
            assert!(seen.contains(part), "{part} is not in\n{seen}");
        }
    }

    #[test]
    fn an_hour_is_drawn_with_its_gaps() {
        let mut screen = screen();
        press(&mut screen, KeyCode::Char('3'));
        let seen = seen(&mut screen, (60, 24));
        let tokens = seen.iter().find(|line| line.starts_with("tokens/s")).unwrap();
        assert!(tokens.contains("5 ") && tokens.ends_with("▂ █▅"), "{seen:#?}");
        assert!(seen.iter().any(|line| line.starts_with("ann") && line.ends_with("98%")), "{seen:#?}");
        assert!(
            seen.iter().any(|line| line.starts_with("first token, p99") && line.trim_end().ends_with('-')),
            "{seen:#?}"
        );
    }

    #[test]
    fn missing_or_old_data_is_labelled() {
        let mut screen = Screen::new("u");
        assert_eq!(seen(&mut screen, (60, 6))[1], "asking ..");
        screen.receive(TopQuestion::Page(TopView::Cluster), Err("no server answers".into()), Instant::now());
        assert_eq!(seen(&mut screen, (60, 6))[1], "no server answers");
        screen.receive(TopQuestion::Page(TopView::Cluster), Ok(cluster()), Instant::now());
        screen.receive(TopQuestion::Page(TopView::Cluster), Err("gone\x1b[2J".into()), Instant::now());
        let seen = seen(&mut screen, (60, 8));
        assert!(seen[1] == "0 s old: gone\u{fffd}[2J" && seen[2].starts_with("local"), "{seen:#?}");
    }
}
