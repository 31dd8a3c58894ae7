//! When requests are sent: as others end, or at times of a schedule. One thread per open request, because each only
//! waits.

use super::lengths::SplitMix64;
use super::stream::{BenchClient, BenchRequest, RequestTiming};
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

pub enum ArrivalPattern {
    /// `concurrency` requests are open at any time.
    Closed { concurrency: usize },
    /// Poisson arrivals, `rate` a second on average, whatever else is open. One beyond `open_max` fails.
    Open { rate: f64, open_max: usize },
}

pub enum RequestOutcome {
    Answered(RequestTiming),
    Failed(String),
}

pub struct LoadResult {
    pub outcomes: Vec<RequestOutcome>,
    /// From the sending of the first request to the end of the last answer.
    pub took: Duration,
}

pub fn run(
    server: &BenchClient,
    requests: &[BenchRequest],
    arrivals: &ArrivalPattern,
    random: &mut SplitMix64,
    ended: &(dyn Fn(&RequestOutcome) + Sync),
) -> LoadResult {
    let begun = Instant::now();
    let outcomes = match *arrivals {
        ArrivalPattern::Closed { concurrency } => run_closed_loop(server, requests, concurrency, ended),
        ArrivalPattern::Open { rate, open_max } => {
            run_open_loop(server, requests, &draw_send_times(requests.len(), rate, random), open_max, ended)
        }
    };
    LoadResult { outcomes, took: begun.elapsed() }
}

fn run_closed_loop(
    server: &BenchClient,
    requests: &[BenchRequest],
    concurrency: usize,
    ended: &(dyn Fn(&RequestOutcome) + Sync),
) -> Vec<RequestOutcome> {
    let queue = Mutex::new(requests.iter().collect::<VecDeque<_>>());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let client = || {
        let answers = std::iter::from_fn(|| next().map(|request| run_request(server, request, ended)));
        answers.collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..concurrency.min(requests.len())).map(|_| scope.spawn(client)).collect();
        let panicked = |_| vec![RequestOutcome::Failed("its thread panicked".into())];
        clients.into_iter().flat_map(|client| client.join().unwrap_or_else(panicked)).collect()
    })
}

/// The sending times of requests, from the beginning of the run.
fn draw_send_times(n: usize, rate: f64, random: &mut SplitMix64) -> Vec<Duration> {
    let mut at = 0.0;
    (0..n)
        .map(|_| {
            let now = at;
            at += random.exponential(rate);
            Duration::from_secs_f64(now)
        })
        .collect()
}

fn run_open_loop(
    server: &BenchClient,
    requests: &[BenchRequest],
    schedule: &[Duration],
    open_max: usize,
    ended: &(dyn Fn(&RequestOutcome) + Sync),
) -> Vec<RequestOutcome> {
    let (sender, outcomes) = mpsc::sync_channel(requests.len().max(1));
    let begun = Instant::now();
    thread::scope(|scope| {
        let mut under_way: Vec<thread::ScopedJoinHandle<'_, ()>> = Vec::new();
        for (request, at) in requests.iter().zip(schedule) {
            thread::sleep(at.saturating_sub(begun.elapsed()));
            under_way.retain(|client| !client.is_finished());
            let sender = sender.clone();
            if under_way.len() < open_max {
                // The channel has room for all and its receiver outlives the scope.
                under_way.push(scope.spawn(move || drop(sender.send(run_request(server, request, ended)))));
            } else {
                drop(sender.send(RequestOutcome::Failed(format!("{open_max} requests are under way"))));
            }
        }
    });
    drop(sender);
    outcomes.into_iter().collect()
}

fn run_request(
    server: &BenchClient,
    request: &BenchRequest,
    ended: &(dyn Fn(&RequestOutcome) + Sync),
) -> RequestOutcome {
    let outcome = match server.request_completion(request) {
        Ok(timed) => RequestOutcome::Answered(timed),
        Err(why) => RequestOutcome::Failed(format!("{why:#}")),
    };
    ended(&outcome);
    outcome
}

impl fmt::Display for ArrivalPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArrivalPattern::Closed { concurrency } => write!(f, "{concurrency} at once"),
            ArrivalPattern::Open { rate, .. } => write!(f, "{rate}/s"),
        }
    }
}
