//! The screen on a terminal: keys, answers and sizes as they arrive. A thread of its own fetches from the server, so
//! that keys work while the server is silent.

use super::draw::draw;
use super::screen::{Screen, TopQuestion, TopView};
use crate::server::RunningServer;
use anyhow::Context;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::Value;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

/// How long a wait for keys lasts before the next check for answers.
const KEYS_WAIT: Duration = Duration::from_millis(40);
/// How long the loop has to end by itself.
const LEAVE_WAIT: Duration = Duration::from_secs(1);

type TopReply = (TopQuestion, Result<Value, String>);

/// Shows the server until a key or a signal ends it, or after `looks` answers.
pub fn run(server: &RunningServer, every: Duration, looks: Option<u64>) -> anyhow::Result<()> {
    let (_signals, is_over) = flag_on_signal()?;
    end_without_a_terminal(is_over.clone());
    let (question_tx, question_rx) = sync_channel(1);
    let (answer, answers) = sync_channel(1);
    let fetch_server = server.clone();
    std::thread::spawn(move || fetch(&fetch_server, &question_rx, &answer, every));
    let terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let mut live = TopSession {
        terminal,
        screen: Screen::new(server.url()),
        question_tx,
        last_question: TopQuestion::Page(TopView::Cluster),
    };
    let shown = live.show(&answers, &is_over, looks);
    ratatui::restore();
    shown
}

/// Sets a flag on a signal, so that the terminal is restored before the process ends.
fn flag_on_signal() -> anyhow::Result<(Runtime, Arc<AtomicBool>)> {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let is_over = Arc::new(AtomicBool::new(false));
    for kind in [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()] {
        let is_over = is_over.clone();
        runtime.spawn(async move {
            if let Ok(mut signals) = signal(kind) {
                signals.recv().await;
                is_over.store(true, Relaxed);
            }
        });
    }
    Ok((runtime, is_over))
}

/// Ends the process when its terminal is closed. The loop may be unable to: a wait for keys then reads the end of the
/// terminal again and again, and does not return.
fn end_without_a_terminal(is_over: Arc<AtomicBool>) {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return;
    }
    std::thread::spawn(move || {
        // A poll without events waits for the end of the terminal alone.
        let mut watched = [PollFd::new(&stdin, PollFlags::empty())];
        while watched[0].revents().is_empty() {
            // A signal interrupts the poll.
            let _ = poll(&mut watched, None);
        }
        is_over.store(true, Relaxed);
        std::thread::sleep(LEAVE_WAIT);
        std::process::exit(1);
    });
}

/// Fetches the page that was requested last: immediately, and then at intervals.
fn fetch(server: &RunningServer, question_rx: &Receiver<TopQuestion>, answer: &SyncSender<TopReply>, every: Duration) {
    let mut question = TopQuestion::Page(TopView::Cluster);
    loop {
        let page = match question {
            TopQuestion::Page(TopView::Cluster) => server.cluster(),
            TopQuestion::Page(TopView::Requests) => server.get("/requests"),
            TopQuestion::Page(TopView::Load) => server.get("/load/hour"),
            TopQuestion::Timeline(number) => server.get(&format!("/requests/{number}")),
        };
        if answer.send((question, page.map_err(|error| format!("{error:#}")))).is_err() {
            return;
        }
        match question_rx.recv_timeout(every) {
            Ok(other) => question = other,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

struct TopSession {
    terminal: DefaultTerminal,
    screen: Screen,
    question_tx: SyncSender<TopQuestion>,
    last_question: TopQuestion,
}

impl TopSession {
    fn show(&mut self, answers: &Receiver<TopReply>, is_over: &AtomicBool, looks: Option<u64>) -> anyhow::Result<()> {
        let mut n_looks = 0;
        while !is_over.load(Relaxed) {
            self.terminal.draw(|frame| draw(frame, &mut self.screen, Instant::now()))?;
            // During a fetch for another view the new request does not fit into the channel; it is sent at the next
            // turn.
            if self.screen.question() != self.last_question && self.question_tx.try_send(self.screen.question()).is_ok()
            {
                self.last_question = self.screen.question();
            }
            if event::poll(KEYS_WAIT)? && !self.react(&event::read()?) {
                return Ok(());
            }
            if let Ok((question, answer)) = answers.try_recv() {
                self.screen.receive(question, answer, Instant::now());
                n_looks += 1;
            }
            if looks.is_some_and(|max| n_looks >= max) {
                self.terminal.draw(|frame| draw(frame, &mut self.screen, Instant::now()))?;
                return Ok(());
            }
        }
        Ok(())
    }

    fn react(&mut self, event: &Event) -> bool {
        match event {
            Event::Key(key) => self.screen.press(*key),
            // The next drawing reads the new size.
            _ => true,
        }
    }
}
