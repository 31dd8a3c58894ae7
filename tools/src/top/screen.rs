//! The state of the screen, as keys and answers change it. Has no knowledge of terminal or server.

use super::requests::rows;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde_json::Value;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopView {
    Cluster,
    Requests,
    Load,
}

impl TopView {
    pub const ALL: [TopView; 3] = [TopView::Cluster, TopView::Requests, TopView::Load];

    pub fn name(self) -> &'static str {
        match self {
            TopView::Cluster => "Cluster",
            TopView::Requests => "Requests",
            TopView::Load => "Load",
        }
    }

    fn cycle(self, by: usize) -> TopView {
        TopView::ALL[(self as usize + by) % TopView::ALL.len()]
    }
}

/// What to fetch for the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopQuestion {
    Page(TopView),
    Timeline(u64),
}

/// The last answer of one kind, and the time since when there has been none.
#[derive(Default)]
pub struct ViewState {
    pub page: Option<Value>,
    pub received_at: Option<Instant>,
    pub error: Option<String>,
}

impl ViewState {
    fn update(&mut self, answer: Result<Value, String>, now: Instant) {
        match answer {
            Ok(page) => (self.page, self.received_at, self.error) = (Some(page), Some(now), None),
            Err(why) => self.error = Some(why),
        }
    }
}

pub struct Screen {
    pub url: String,
    pub view: TopView,
    pub pages: [ViewState; 3],
    /// The request whose timeline is shown.
    pub opened: Option<(u64, ViewState)>,
    /// The selected row in the list of requests.
    pub selected: usize,
    /// The first visible line of a long text.
    pub scroll: usize,
    pub is_help: bool,
}

const PAGE: usize = 10;

impl Screen {
    pub fn new(url: &str) -> Screen {
        let pages = [ViewState::default(), ViewState::default(), ViewState::default()];
        Screen {
            url: url.to_owned(),
            view: TopView::Cluster,
            pages,
            opened: None,
            selected: 0,
            scroll: 0,
            is_help: false,
        }
    }

    pub fn current_state(&self) -> &ViewState {
        match &self.opened {
            Some((_, shown)) => shown,
            None => &self.pages[self.view as usize],
        }
    }

    pub fn question(&self) -> TopQuestion {
        self.opened.as_ref().map_or(TopQuestion::Page(self.view), |(number, _)| TopQuestion::Timeline(*number))
    }

    pub fn receive(&mut self, question: TopQuestion, answer: Result<Value, String>, now: Instant) {
        match (question, &mut self.opened) {
            (TopQuestion::Page(view), _) => self.pages[view as usize].update(answer, now),
            (TopQuestion::Timeline(number), Some((opened, shown))) if number == *opened => shown.update(answer, now),
            // The timeline was closed in the meantime.
            (TopQuestion::Timeline(_), _) => {}
        }
        self.selected = self.selected.min(self.n_requests().saturating_sub(1));
    }

    fn n_requests(&self) -> usize {
        self.pages[TopView::Requests as usize].page.as_ref().map_or(0, |page| rows(page).len())
    }

    fn is_list_shown(&self) -> bool {
        self.view == TopView::Requests && self.opened.is_none()
    }

    /// Handles a key; returns whether the screen stays open.
    pub fn press(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return key.code != KeyCode::Char('c');
        }
        if self.is_help {
            self.is_help = false;
            return key.code != KeyCode::Char('q');
        }
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Char('?' | 'h') => self.is_help = true,
            KeyCode::Tab | KeyCode::Right => self.switch_to(self.view.cycle(1)),
            KeyCode::BackTab | KeyCode::Left => self.switch_to(self.view.cycle(2)),
            KeyCode::Char('1') => self.switch_to(TopView::Cluster),
            KeyCode::Char('2') => self.switch_to(TopView::Requests),
            KeyCode::Char('3') => self.switch_to(TopView::Load),
            KeyCode::Enter if self.is_list_shown() => self.open_selected(),
            KeyCode::Esc | KeyCode::Backspace => self.close(),
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1, true),
            KeyCode::Up | KeyCode::Char('k') => self.move_by(1, false),
            KeyCode::PageDown | KeyCode::Char(' ') => self.move_by(PAGE, true),
            KeyCode::PageUp => self.move_by(PAGE, false),
            KeyCode::Home => self.move_by(usize::MAX, false),
            KeyCode::End => self.move_by(usize::MAX, true),
            _ => {}
        }
        true
    }

    fn switch_to(&mut self, view: TopView) {
        (self.view, self.scroll, self.opened) = (view, 0, None);
    }

    fn close(&mut self) {
        (self.scroll, self.opened) = (0, None);
    }

    fn open_selected(&mut self) {
        let page = self.pages[TopView::Requests as usize].page.as_ref();
        let number = page.and_then(|page| rows(page).get(self.selected)?["number"].as_u64());
        self.opened = number.map(|number| (number, ViewState::default()));
        self.scroll = 0;
    }

    fn move_by(&mut self, by: usize, is_down: bool) {
        let last = self.n_requests().saturating_sub(1);
        let (place, last) = match self.is_list_shown() {
            true => (&mut self.selected, last),
            // Only the drawing has the length of the text.
            false => (&mut self.scroll, usize::MAX),
        };
        *place = if is_down { place.saturating_add(by).min(last) } else { place.saturating_sub(by) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pressed(screen: &mut Screen, codes: &[KeyCode]) -> bool {
        codes.iter().all(|code| screen.press(KeyEvent::new(*code, KeyModifiers::NONE)))
    }

    #[test]
    fn keys_lead_from_view_to_view_and_out() {
        let mut screen = Screen::new("u");
        for (key, expect) in [
            (KeyCode::Tab, TopView::Requests),
            (KeyCode::Tab, TopView::Load),
            (KeyCode::Tab, TopView::Cluster),
            (KeyCode::BackTab, TopView::Load),
            (KeyCode::Char('2'), TopView::Requests),
            (KeyCode::Char('1'), TopView::Cluster),
        ] {
            assert!(pressed(&mut screen, &[key]));
            assert_eq!((screen.view, screen.question()), (expect, TopQuestion::Page(expect)));
        }
        assert!(pressed(&mut screen, &[KeyCode::Char('?')]) && screen.is_help);
        assert!(pressed(&mut screen, &[KeyCode::Char('1')]) && !screen.is_help, "any key closes the help");
        assert!(!pressed(&mut screen, &[KeyCode::Char('q')]));
        assert!(!screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }

    #[test]
    fn a_request_is_chosen_opened_and_left() {
        let mut screen = Screen::new("u");
        let now = Instant::now();
        let list = |n: u64| json!({ "requests": (1..=n).map(|n| json!({ "number": n })).collect::<Vec<_>>() });
        screen.receive(TopQuestion::Page(TopView::Requests), Ok(list(3)), now);
        pressed(&mut screen, &[KeyCode::Char('2'), KeyCode::Down, KeyCode::End, KeyCode::Down, KeyCode::Enter]);
        assert_eq!(screen.question(), TopQuestion::Timeline(3));
        screen.receive(TopQuestion::Timeline(2), Ok(json!({ "number": 2 })), now);
        assert!(screen.current_state().page.is_none(), "another request's timeline");
        screen.receive(TopQuestion::Timeline(3), Ok(json!({ "number": 3 })), now);
        assert_eq!(screen.current_state().page.as_ref().unwrap()["number"], 3);
        screen.receive(TopQuestion::Timeline(3), Err("gone".into()), now);
        assert!(screen.current_state().page.is_some() && screen.current_state().error.is_some(), "the last page stays");
        pressed(&mut screen, &[KeyCode::Esc]);
        screen.receive(TopQuestion::Page(TopView::Requests), Ok(list(1)), now);
        assert_eq!((screen.question(), screen.selected), (TopQuestion::Page(TopView::Requests), 0));
    }
}
