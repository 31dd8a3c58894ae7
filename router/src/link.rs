//! The one stream to a coordinator: one task owns it and the table of requests under way. Knows tokens and positions,
//! no text, no clients and no other replica.
//!
//! A coordinator that is lost takes no stream with it. The table holds each request's token log; whoever has the same
//! policy digest gets prompt and output so far and goes on from there: another replica that is ready, or else the first
//! that will be, the same one included. An entry holds all that another link needs to go on with it.

use crate::beats::Beats;
use crate::board::Salt;
use crate::config::{Config, Waits};
use crate::ledger::{Item, Ledger};
use crate::peers::{Others, Peers};
use crate::pick::Need;
use crate::refusal::Refusal;
use crate::target::Target;
use crate::ticket::{Cancel, Home, Ticket};
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use telemetry::Carried;
use telemetry::metrics;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use types::{Finish, PolicyDigest, Request, RequestId, Token, TokenOut};
use wire::replica_frame::Frame;

/// Frames that the transport has not taken yet; while there are so many, no request is taken from the router's side.
const FRAMES_UNSENT_MAX: usize = 256;
/// Frames handed to the transport at once.
const FRAMES_SENDING_MAX: usize = 16;

/// The replica as its Welcome tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct Replica {
    pub name: String,
    pub model: String,
    pub context: u32,
    pub digest: PolicyDigest,
    pub incarnation: u64,
    /// At the root of its block names.
    pub salt: Salt,
    /// With this router's number at the replica in its upper bits; the lower are a request's key.
    first_id: RequestId,
}

impl Replica {
    pub fn id(&self, key: u64) -> RequestId {
        debug_assert_eq!(RequestId(key).router(), 0, "a trillion requests");
        RequestId(self.first_id.0 | key)
    }
}

/// What is known of the replica at this moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Among those of the other links.
    pub place: usize,
    /// The replica's own, or where it is reached until it has said that.
    pub name: String,
    /// Present while the stream stands and the replica has said that it can serve.
    pub replica: Option<Arc<Replica>>,
    pub state: Option<wire::State>,
    /// It has been silent for some beats.
    pub is_suspected: bool,
    /// Why it gets nothing new at present.
    pub shunned: Option<&'static str>,
}

impl View {
    pub fn of(name: &str) -> View {
        View { name: name.to_owned(), ..View::default() }
    }

    pub fn phase(&self) -> wire::state::Phase {
        match (&self.replica, &self.state) {
            (_, Some(state)) => state.phase(),
            (Some(_), None) => wire::state::Phase::Ready,
            (None, None) => wire::state::Phase::Unspecified,
        }
    }

    pub fn is_ready(&self) -> bool {
        self.replica.is_some() && self.phase() == wire::state::Phase::Ready && !self.is_suspected
    }
}

/// What a request's owner is told.
#[derive(Debug)]
pub enum Told {
    Tokens(Progress),
    /// Nothing follows.
    Refused(Refusal),
}

/// Tokens without gap or repetition, whatever happened to the replica in between.
#[derive(Debug, Default)]
pub struct Progress {
    /// Of the first token, counted from the end of the prompt.
    pub position: u32,
    pub tokens: Vec<TokenOut>,
    pub n_cached: u32,
    pub finish: Option<Finish>,
    /// Logprobs of the prompt's tokens from a position on, as the replica says them: perhaps not for the first time.
    pub scored_position: u32,
    pub scored: Vec<TokenOut>,
    pub pooled: Vec<f32>,
}

/// Where a request's owner hears of it: which slot, and what.
pub type Ear = mpsc::Sender<(u32, Told)>;

/// A request on its way to the replica.
pub struct Submit {
    /// Of all links of this router together.
    pub key: u64,
    /// Its id is filled in here: it depends on the replica.
    pub request: Request,
    /// What its owner calls it.
    pub slot: u32,
    pub deadline: Option<Instant>,
    /// Replicas with another digest would give other tokens.
    pub digest: PolicyDigest,
    /// Tokens of it that the replica's cache is said to have.
    pub n_cached: u32,
    pub adopts: Option<Adopts>,
    /// Of the request's span; empty where nobody records it.
    pub trace: Carried,
    pub ear: Ear,
}

/// A request that the replica may have already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopts {
    pub of: RequestId,
    /// Tokens that the client has.
    pub n_had: u32,
}

/// The side of the link that the rest of the router holds, and the other links.
#[derive(Clone)]
pub struct Link {
    submits: mpsc::Sender<(u64, Box<Entry>)>,
    cancels: mpsc::Sender<Cancel>,
    ledger: Arc<Ledger>,
    /// Of all links of this router together.
    next_key: Arc<AtomicU64>,
    retry_after: Duration,
}

impl Link {
    /// Tokens that the replica has to compute, as far as is known here.
    #[cfg(test)]
    pub fn work(&self) -> u64 {
        self.ledger.work()
    }

    pub fn ledger(&self) -> Arc<Ledger> {
        self.ledger.clone()
    }

    /// How long a request of so many tokens would wait for its first.
    pub fn wait(&self, n_tokens: u64) -> Option<Duration> {
        self.ledger.wait(n_tokens)
    }

    /// False: whatever is submitted now is refused.
    pub fn has_room(&self) -> bool {
        self.cancels.capacity() > 0
    }

    /// So many keys that follow one another, for the choices of one request.
    pub fn keys(&self, n: u64) -> u64 {
        self.next_key.fetch_add(n, Ordering::Relaxed)
    }

    pub fn submit(&self, submit: Submit) -> Result<Ticket, Refusal> {
        let full = || Refusal::Full { retry_after: self.retry_after };
        let cancel = self.cancels.clone().try_reserve_owned().map_err(|_| full())?;
        let last = submit.ear.clone().try_reserve_owned().map_err(|_| full())?;
        let Submit { key, request, slot, deadline, digest, n_cached, adopts, trace, ear } = submit;
        let n_missing = (request.n_tokens() as u64).saturating_sub(n_cached.into());
        let (work, since) = (self.ledger.enter(n_missing), Instant::now());
        let home = Home::at(cancel);
        let ticket = Ticket::new(key, home.clone());
        let (n_lost, heard) = (0, None);
        let entry =
            Entry { request, slot, deadline, digest, adopts, trace, ear, last, home, work, since, n_lost, heard };
        match self.submits.try_send((key, Box::new(entry))) {
            Ok(()) => Ok(ticket),
            Err(_) => {
                ticket.over();
                Err(full())
            }
        }
    }

    /// Takes over what another link had. Given back where this one is full.
    fn adopt(&self, key: u64, mut entry: Box<Entry>) -> Result<(), Box<Entry>> {
        let (Ok(place), Ok(cancel)) = (self.submits.try_reserve(), self.cancels.clone().try_reserve_owned()) else {
            return Err(entry);
        };
        if entry.home.moves_to(cancel) {
            entry.work = self.ledger.enter(entry.request.n_tokens() as u64);
            (entry.adopts, entry.heard) = (None, None);
            place.send((key, entry));
        }
        Ok(())
    }
}

/// The task of a link, which introduces itself to the others. It is to be run.
pub fn link(
    target: watch::Receiver<Target>,
    peers: Peers,
    place: usize,
    next_key: Arc<AtomicU64>,
    config: &Config,
) -> Task {
    let requests_max = config.limits.requests_max;
    let (submits, submitted) = mpsc::channel(requests_max);
    let (cancels, cancelled) = mpsc::channel(requests_max);
    let ledger = Arc::new(Ledger::default());
    let retry_after = config.waits.retry_after;
    peers.introduce(place, Link { submits, cancels, ledger: ledger.clone(), next_key, retry_after });
    Task {
        target,
        aimed: 0,
        waits: config.waits.clone(),
        outputs_unread_max: config.limits.outputs_unread_max,
        losses_max: config.limits.losses_max,
        submitted,
        cancelled,
        views: peers.views(),
        peers,
        place,
        ledger,
        replica: None,
        former: None,
        draining: false,
        recovering_since: None,
        beats: Beats::default(),
        line: Line::Down { until: Instant::now() },
        reattach: config.waits.reattach_min,
        outbound: None,
        outbox: VecDeque::new(),
        table: BTreeMap::new(),
        parked: BTreeMap::new(),
        reason: String::new(),
    }
}

/// A request under way. `request.output` grows with what was told: together with the prompt it is the token log.
struct Entry {
    request: Request,
    slot: u32,
    deadline: Option<Instant>,
    digest: PolicyDigest,
    adopts: Option<Adopts>,
    trace: Carried,
    ear: Ear,
    // A place in the ear's queue that is kept for the end, so that a slow reader hears of it too.
    last: mpsc::OwnedPermit<(u32, Told)>,
    home: Arc<Home>,
    work: Item,
    /// When it began to wait for a replica.
    since: Instant,
    /// How often its replica was lost since it last said a token.
    n_lost: u32,
    /// When the replica that has it last said a token of it.
    heard: Option<Instant>,
}

impl Entry {
    fn end(self, refusal: Refusal) {
        // First, so that who hears of the end and asks again finds this replica free.
        drop(self.work);
        self.last.send((self.slot, Told::Refused(refusal)));
    }

    fn finish(self, progress: Progress) {
        drop(self.work);
        self.last.send((self.slot, Told::Tokens(progress)));
    }

    fn need(&self) -> Need {
        let Request { prompt, sampling, .. } = &self.request;
        Need { digest: self.digest, n_tokens: prompt.len() as u64 + u64::from(sampling.tokens_max) }
    }

    fn frame(&mut self, id: RequestId, now: Instant) -> wire::RouterFrame {
        let mut request = wire::Request::from(&self.request);
        request.id = id.0;
        request.traceparent.clone_from(&self.trace.parent);
        request.tracestate.clone_from(&self.trace.state);
        request.deadline_micros =
            self.deadline.map(|deadline| deadline.saturating_duration_since(now).as_micros() as u64);
        up(match self.adopts.take() {
            Some(Adopts { of, n_had }) => {
                wire::router_frame::Frame::Adopt(wire::Adopt { of: of.0, request: Some(request), n_had })
            }
            None => wire::router_frame::Frame::Submit(request),
        })
    }

    /// The log is complete: nobody has to be waited for who says so, and could be lost before.
    fn finished(&self) -> Option<Finish> {
        let Request { output, sampling, .. } = &self.request;
        let n_output = output.len() as u32;
        match output.last() {
            Some(last) if sampling.is_stop(*last) && n_output > sampling.tokens_min => Some(Finish::Stop),
            Some(_) if n_output >= sampling.tokens_max => Some(Finish::Length),
            _ => None,
        }
    }
}

enum Line {
    Down { until: Instant },
    Dialing(Pin<Box<dyn Future<Output = Result<Up, Status>> + Send>>),
    Up { inbound: Box<Streaming<wire::ReplicaFrame>>, heard: Instant },
}

struct Up {
    outbound: mpsc::Sender<wire::RouterFrame>,
    inbound: Box<Streaming<wire::ReplicaFrame>>,
}

enum Event {
    Submit(u64, Box<Entry>),
    Cancel(Cancel),
    Dial,
    Attached(Up),
    Frame(Frame),
    Lost(Status),
    Sent,
    /// The replicas, as this link sees them, have changed.
    Seen,
    /// The store says otherwise where the replica is, or whether it is there.
    Target,
    Due,
    End,
}

/// Owns the stream and the table. One loop, one closed set of events.
pub struct Task {
    target: watch::Receiver<Target>,
    /// The incarnation that was the last known one when it dialled.
    aimed: u64,
    waits: Waits,
    outputs_unread_max: usize,
    losses_max: u32,
    submitted: mpsc::Receiver<(u64, Box<Entry>)>,
    cancelled: mpsc::Receiver<Cancel>,
    peers: Peers,
    views: watch::Receiver<Vec<View>>,
    /// Among the links.
    place: usize,
    ledger: Arc<Ledger>,
    /// Present while the stream stands and the replica has said that it can serve.
    replica: Option<Arc<Replica>>,
    /// This router's number at the replica, now or before.
    former: Option<wire::FormerNumber>,
    /// It finishes what it has, and takes nothing more.
    draining: bool,
    /// Since when it has been without its ranks.
    recovering_since: Option<Instant>,
    beats: Beats,
    line: Line,
    reattach: Duration,
    outbound: Option<mpsc::Sender<wire::RouterFrame>>,
    outbox: VecDeque<wire::RouterFrame>,
    /// By key, so in order of arrival. A request's id is its key under the router's number at the replica.
    table: BTreeMap<u64, Entry>,
    /// Keys of the table that the replica does not have, and when to submit them again where it asked for patience. Who
    /// else can go on with one takes it.
    parked: BTreeMap<u64, Option<Instant>>,
    /// Of the last failure to reach a coordinator: the same one is not logged again and again.
    reason: String,
}

impl Task {
    /// Runs until `end`, and then ends every request that is left.
    pub async fn run(mut self, end: CancellationToken) {
        loop {
            match self.next_event(&end).await {
                Event::Submit(key, entry) => self.submit(key, *entry),
                Event::Cancel(cancel) => self.cancel(cancel),
                Event::Dial => self.dial(),
                Event::Attached(up) => self.attached(up),
                Event::Frame(frame) => self.hear(frame),
                Event::Lost(status) => self.lost(&status),
                Event::Sent => {}
                Event::Seen => {
                    self.move_away();
                    if self.beats.is_suspected() {
                        self.leave_to_others("a replica is silent: its requests move");
                    }
                }
                Event::Target => self.retarget(),
                Event::Due => self.due(Instant::now()),
                Event::End => break,
            }
            if self.is_forsaken() {
                break;
            }
        }
        self.leave();
        let retry_after = self.waits.retry_after;
        let is_end = end.is_cancelled();
        let refusal = if is_end { Refusal::Draining { retry_after } } else { Refusal::NotReady { retry_after } };
        // Who was just about to be sent here hears of it too.
        self.submitted.close();
        let submitted = std::iter::from_fn(|| self.submitted.try_recv().ok()).map(|(_, entry)| *entry);
        let left = std::mem::take(&mut self.table).into_values().chain(submitted);
        left.for_each(|entry| entry.end(refusal.clone()));
    }

    fn dial(&mut self) {
        let Target { channel, incarnation, .. } = self.target.borrow_and_update().clone();
        self.aimed = incarnation;
        self.line = Line::Dialing(Box::pin(attach(channel, self.waits.attach_max, self.former)));
    }

    /// An open stream stays unless somebody else has claimed the replica later: that the store has lost sight of it is
    /// a suspicion, and the stream is the truth.
    fn retarget(&mut self) {
        let incarnation = self.target.borrow_and_update().incarnation;
        let of_line = self.replica.as_ref().map_or(self.aimed, |replica| replica.incarnation);
        if of_line < incarnation {
            self.reattach = self.waits.reattach_min;
            if !matches!(self.line, Line::Down { .. }) {
                self.lost(&Status::aborted("another coordinator has claimed the replica"));
            }
            self.line = Line::Down { until: Instant::now() };
        }
    }

    /// The store does not have it, nobody answers, and nobody waits for it.
    fn is_forsaken(&self) -> bool {
        let is_down = matches!(self.line, Line::Down { .. });
        is_down && self.table.is_empty() && !self.target.borrow().is_listed
    }

    async fn next_event(&mut self, end: &CancellationToken) -> Event {
        let due = self.next_due();
        let takes_requests = self.outbox.len() < FRAMES_UNSENT_MAX;
        let looks_elsewhere = match self.beats.is_suspected() {
            true => !self.table.is_empty(),
            false => !self.serves() && !self.parked.is_empty(),
        };
        // In a fixed order, so that the same arrivals give the same frames.
        tokio::select! {
            biased;
            () = end.cancelled() => Event::End,
            Some(cancel) = self.cancelled.recv() => Event::Cancel(cancel),
            Some(event) = send_first(&self.outbound, &mut self.outbox) => event,
            Some((key, entry)) = self.submitted.recv(), if takes_requests => Event::Submit(key, entry),
            event = self.line.next(self.waits.replica_silence_max) => event,
            Ok(()) = self.views.changed(), if looks_elsewhere => Event::Seen,
            Ok(()) = self.target.changed() => Event::Target,
            () = until(due) => Event::Due,
        }
    }

    fn submit(&mut self, key: u64, entry: Entry) {
        if entry.ear.is_closed() || entry.home.is_over() {
            // Its owner has left already, and the cancel may have overtaken it.
            return;
        }
        self.table.insert(key, entry);
        self.parked.insert(key, None);
        if self.replica.is_some() {
            self.send(key);
        } else {
            self.move_away();
        }
    }

    /// What waits here may be given to the replica.
    fn serves(&self) -> bool {
        self.replica.is_some() && !self.draining
    }

    /// Gives a parked request to the replica that is there, or ends it where nobody can go on with it.
    fn send(&mut self, key: u64) {
        let (Some(replica), Some(entry)) = (self.replica.clone(), self.table.get_mut(&key)) else { return };
        let (now, need) = (Instant::now(), entry.need());
        if entry.deadline.is_some_and(|deadline| deadline <= now) {
            self.end(key, Refusal::Deadline);
        } else if need.digest == replica.digest && need.n_tokens <= replica.context.into() {
            if entry.n_lost > 0
                && let Err(wait) = self.peers.budget.take(now)
            {
                self.parked.insert(key, Some(now + wait));
                return;
            }
            self.outbox.push_back(entry.frame(replica.id(key), now));
            self.parked.remove(&key);
        } else if !self.move_one(key) && !self.peers.besides(self.place).may_come_for(need) {
            self.end(key, Refusal::Lost);
        }
    }

    /// To the replica that is there, all that wait for it and were not asked for patience.
    fn send_all(&mut self) {
        let waiting = self.parked.iter().filter(|(_, retry)| retry.is_none()).map(|(key, _)| *key);
        let waiting: Vec<u64> = waiting.collect();
        waiting.into_iter().for_each(|key| self.send(key));
    }

    /// Gives what waits here to those who can go on with it at once.
    fn move_away(&mut self) {
        let waiting: Vec<u64> = self.parked.keys().copied().collect();
        let mut others = self.peers.besides(self.place);
        for key in waiting {
            self.move_to(key, &mut others);
        }
    }

    fn move_one(&mut self, key: u64) -> bool {
        let mut others = self.peers.besides(self.place);
        self.move_to(key, &mut others)
    }

    /// True: it is another link's now.
    fn move_to(&mut self, key: u64, others: &mut Others) -> bool {
        let Some(entry) = self.table.get(&key) else { return false };
        let Some(link) = others.ready_for(entry.need(), entry.request.n_tokens() as u64) else { return false };
        if let Err(wait) = self.peers.budget.take(Instant::now()) {
            if let Some(retry) = self.parked.get_mut(&key) {
                retry.get_or_insert(Instant::now() + wait);
            }
            return false;
        }
        let Some(entry) = self.table.remove(&key) else { return false };
        match link.adopt(key, Box::new(entry)) {
            Ok(()) => {
                self.parked.remove(&key);
                true
            }
            Err(entry) => {
                self.table.insert(key, *entry);
                false
            }
        }
    }

    /// What the replica has goes to others, where there are any that can go on with it at once.
    fn leave_to_others(&mut self, why: &'static str) {
        let others = self.peers.besides(self.place);
        let at_the_replica = self.table.iter().filter(|(key, _)| !self.parked.contains_key(key));
        let movable = at_the_replica.filter(|(_, entry)| others.is_any_ready_for(entry.need()));
        let movable: Vec<u64> = movable.map(|(key, _)| *key).collect();
        if !movable.is_empty() {
            tracing::warn!(requests = movable.len(), "{why}");
        }
        for key in movable {
            if self.move_one(key) {
                self.send_cancel(Cancel { key, stopped: false });
            }
        }
    }

    /// The replica does not have it any more.
    fn park(&mut self, key: u64) {
        let (now, losses_max) = (Instant::now(), self.losses_max);
        let Some(entry) = self.table.get_mut(&key) else { return };
        if self.parked.insert(key, None).is_none() {
            (entry.since, entry.n_lost) = (now, entry.n_lost + 1);
        }
        let times = entry.n_lost;
        if times > losses_max {
            self.end(key, Refusal::LostTooOften { times });
        }
    }

    fn cancel(&mut self, cancel: Cancel) {
        let parked = self.parked.contains_key(&cancel.key);
        if self.remove(cancel.key).is_some() && !parked {
            self.send_cancel(cancel);
        }
    }

    fn send_cancel(&mut self, Cancel { key, stopped }: Cancel) {
        let Some(replica) = &self.replica else { return };
        let id = replica.id(key).0;
        let is_its_submit = |frame: &wire::RouterFrame| match &frame.frame {
            Some(wire::router_frame::Frame::Submit(request)) => request.id == id,
            Some(wire::router_frame::Frame::Adopt(adopt)) => adopt.request.as_ref().is_some_and(|of| of.id == id),
            _ => false,
        };
        match self.outbox.iter().position(is_its_submit) {
            // It has not left yet: neither frame is needed.
            Some(unsent) => drop(self.outbox.remove(unsent)),
            None => self.outbox.push_back(up(wire::router_frame::Frame::Cancel(wire::Cancel { id, stopped }))),
        }
    }

    fn attached(&mut self, up: Up) {
        self.outbound = Some(up.outbound);
        self.line = Line::Up { inbound: up.inbound, heard: Instant::now() };
    }

    /// The replica is not there any more; whether it was.
    fn leave(&mut self) -> bool {
        self.peers.show(self.place, |view| (view.replica, view.state, view.is_suspected) = (None, None, false));
        self.peers.hear_anew(self.place);
        self.beats = Beats::default();
        self.ledger.gone();
        (self.draining, self.recovering_since) = (false, None);
        self.replica.take().is_some()
    }

    fn lost(&mut self, status: &Status) {
        let was_attached = self.leave();
        if was_attached {
            self.ledger.broke();
        }
        if was_attached || self.reason != status.message() {
            self.reason = status.message().to_owned();
            tracing::warn!(code = ?status.code(), reason = self.reason, requests = self.table.len(), "no coordinator");
        }
        self.outbound = None;
        self.outbox.clear();
        let keys: Vec<u64> = self.table.keys().copied().collect();
        keys.into_iter().for_each(|key| self.park(key));
        self.move_away();
        self.line = Line::Down { until: Instant::now() + self.reattach };
        self.reattach = (self.reattach * 2).min(self.waits.reattach_max);
    }

    fn hear(&mut self, frame: Frame) {
        let now = Instant::now();
        if self.beats.heard(now) {
            tracing::info!(place = self.place, "a replica is heard again");
            self.peers.show(self.place, |view| view.is_suspected = false);
        }
        match frame {
            Frame::Welcome(welcome) => self.welcome(welcome),
            Frame::State(state) => self.state(state),
            Frame::Refused(refused) => self.refused(refused),
            Frame::Beat(beat) => self.beat(&beat),
            Frame::Outputs(outputs) => outputs.outputs.into_iter().for_each(|output| self.output(output, now)),
        }
    }

    fn beat(&mut self, beat: &wire::Beat) {
        beat.load.iter().for_each(|load| self.ledger.load(load));
        let heard = beat.cached.as_ref().map_or(Ok(()), |told| self.peers.hear(self.place, told));
        if heard.is_err() {
            tracing::warn!("names of cached blocks are missing: all are asked for");
            self.outbox.push_back(up(wire::router_frame::Frame::Recite(wire::Recite {})));
        }
    }

    /// It may be dead, or stopped, or cut off. Its streams go on elsewhere if they can; if not, it may still come.
    fn suspect(&mut self) {
        tracing::warn!(requests = self.table.len(), "a replica is silent: it is suspected");
        self.ledger.broke();
        metrics::replica_suspected(self.replica.as_ref().map_or("", |replica| &replica.name));
        self.peers.show(self.place, |view| view.is_suspected = true);
        self.leave_to_others("a replica is silent: its requests move");
    }

    fn state(&mut self, state: wire::State) {
        use wire::state::Phase;
        self.ledger.told(&state);
        self.draining = state.phase() == Phase::Draining;
        let recovers = matches!(state.phase(), Phase::Recovering | Phase::Loading);
        self.recovering_since = recovers.then(|| self.recovering_since.unwrap_or_else(Instant::now));
        self.peers.show(self.place, |view| view.state = Some(state));
        if self.serves() {
            self.send_all();
        } else {
            self.move_away();
        }
    }

    fn welcome(&mut self, welcome: wire::Welcome) {
        let welcome_beats = u64::from(welcome.beat_millis);
        let replica = match replica(welcome) {
            Ok(replica) => replica,
            Err(status) => return self.lost(&status),
        };
        if replica.incarnation < self.target.borrow().incarnation {
            return self.lost(&Status::failed_precondition("the coordinator's claim is not the last one"));
        }
        tracing::info!(replica = %replica.name, model = %replica.model, digest = %replica.digest, "attached");
        self.reattach = self.waits.reattach_min;
        // Said when this router attaches again, so that nobody computes for the stream that is gone.
        self.beats = Beats::every(Duration::from_millis(welcome_beats), self.waits.beats_missed_max, Instant::now());
        self.former = Some(wire::FormerNumber { incarnation: replica.incarnation, router: replica.first_id.router() });
        let replica = Arc::new(replica);
        self.replica = Some(replica.clone());
        self.peers.show(self.place, |view| (view.name, view.replica) = (replica.name.clone(), Some(replica)));
        self.send_all();
    }

    /// The key of a request that this replica has from us.
    fn key(&self, id: u64) -> Option<u64> {
        let key = id.checked_sub(self.replica.as_ref()?.first_id.0)?;
        let has_it = self.table.contains_key(&key) && !self.parked.contains_key(&key);
        has_it.then_some(key)
    }

    fn refused(&mut self, refused: wire::Refused) {
        let Some(key) = self.key(refused.id) else { return };
        let Some(entry) = self.table.get(&key) else { return };
        let refusal = self.refusal(&refused, entry.request.prompt.len());
        let has_begun = !entry.request.output.is_empty() || entry.n_lost > 0;
        let Some(wait) = refusal.retry_after() else { return self.end(key, refusal) };
        // Who is full was the one with the least work; who drains or is not ready may have neighbours.
        self.parked.insert(key, Some(Instant::now() + wait));
        if !matches!(refusal, Refusal::Full { .. }) && self.move_one(key) {
            return;
        }
        // A stream that has begun is not given up because its replica is busy coming back.
        if !has_begun {
            self.end(key, refusal);
        }
    }

    fn refusal(&self, refused: &wire::Refused, n_prompt: usize) -> Refusal {
        use wire::refused::Reason;
        let retry_after = match refused.retry_after_ms {
            0 => self.waits.retry_after,
            millis => Duration::from_millis(millis.into()),
        };
        match refused.reason() {
            Reason::Full => Refusal::Full { retry_after },
            Reason::Draining => Refusal::Draining { retry_after },
            Reason::NotReady => Refusal::NotReady { retry_after },
            Reason::TooLong => Refusal::TooLarge { n_prompt, message: refused.message.clone() },
            Reason::Deadline => Refusal::Deadline,
            Reason::Unsupported | Reason::Invalid => {
                Refusal::Invalid { field: "request".into(), message: refused.message.clone() }
            }
            Reason::Duplicate | Reason::Unspecified => Refusal::failed(refused.message.clone()),
        }
    }

    fn output(&mut self, output: wire::Output, now: Instant) {
        let Some(key) = self.key(output.id) else { return };
        let Some(entry) = self.table.get_mut(&key) else { return };
        let finish = match output.finished() {
            // Not by this router: it drains and ends what still runs. Others can go on.
            Ok(Some(Finish::Cancelled)) => return self.put_out(key),
            Ok(finish) => finish,
            Err(error) => return self.broken(key, error.to_string()),
        };
        let n_told = entry.request.output.len() as u32;
        let Some(tokens) = splice(n_told, output.position, output.tokens) else {
            return self.broken(key, format!("the replica left a gap: position {} after {n_told}", output.position));
        };
        entry.request.output.extend(tokens.iter().map(|out| out.token as Token));
        if !tokens.is_empty() {
            entry.work.begun();
            entry.n_lost = 0;
            match entry.heard.replace(now) {
                Some(last) => self.ledger.between_tokens(tokens.len(), now.saturating_duration_since(last)),
                None => {
                    self.peers.budget.answered();
                    // What had begun elsewhere waited for more than this replica.
                    if n_told == 0 {
                        self.ledger.first_token(now.saturating_duration_since(entry.since));
                    }
                }
            }
        }
        let finish = finish.or_else(|| entry.finished());
        if tokens.is_empty() && output.scored.is_empty() && finish.is_none() {
            return;
        }
        let progress = Progress {
            position: n_told,
            tokens,
            n_cached: output.cached_tokens,
            finish,
            scored_position: output.scored_position,
            scored: output.scored.into_iter().map(TokenOut::from).collect(),
            pooled: output.pooled,
        };
        if let Some(finish) = finish {
            match finish {
                Finish::Failed => self.ledger.broke(),
                _ => self.ledger.done(),
            }
            return self.finish(key, progress);
        }
        match entry.ear.try_send((entry.slot, Told::Tokens(progress))) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => self.cancel(Cancel { key, stopped: false }),
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.send_cancel(Cancel { key, stopped: false });
                self.end(key, Refusal::SlowReader { unread: self.outputs_unread_max });
            }
        }
    }

    /// The replica has ended a request that somebody still wants.
    fn put_out(&mut self, key: u64) {
        self.park(key);
        if self.move_one(key) {
            return;
        }
        if let Some(retry) = self.parked.get_mut(&key) {
            *retry = Some(Instant::now() + self.waits.retry_after);
        }
    }

    /// What the replica sends of this request cannot be meant.
    fn broken(&mut self, key: u64, message: String) {
        self.send_cancel(Cancel { key, stopped: false });
        self.end(key, Refusal::failed(message));
    }

    fn give_up(&self, key: &u64) -> Option<Instant> {
        self.table.get(key).map(|entry| entry.since + self.waits.replica_absence_max)
    }

    fn next_due(&self) -> Option<Instant> {
        let parked = self.parked.iter().flat_map(|(key, retry)| [*retry, self.give_up(key)]);
        let recovered = self.recovering_since.map(|since| since + self.waits.recovery_max);
        parked.chain([recovered, self.beats.due()]).flatten().min()
    }

    fn due(&mut self, now: Instant) {
        if self.recovering_since.is_some_and(|since| since + self.waits.recovery_max <= now) {
            self.recovering_since = None;
            self.leave_to_others("a replica recovers for too long: its requests move");
        }
        if self.beats.pass(now) {
            self.suspect();
        }
        let parked: Vec<_> = self.parked.iter().map(|(key, retry)| (*key, *retry)).collect();
        for (key, retry) in parked {
            if self.give_up(&key).is_some_and(|give_up| give_up <= now) {
                self.end(key, Refusal::Lost);
            } else if retry.is_some_and(|retry| retry <= now) && !self.move_one(key) {
                self.parked.insert(key, None);
                if self.serves() {
                    self.send(key);
                }
            }
        }
    }

    fn finish(&mut self, key: u64, progress: Progress) {
        if let Some(entry) = self.remove(key) {
            entry.finish(progress);
        }
    }

    fn end(&mut self, key: u64, refusal: Refusal) {
        if let Some(entry) = self.remove(key) {
            entry.end(refusal);
        }
    }

    fn remove(&mut self, key: u64) -> Option<Entry> {
        self.parked.remove(&key);
        self.table.remove(&key)
    }
}

impl Line {
    /// Safe to drop at any point: what is half done stays in the line.
    async fn next(&mut self, silence_max: Duration) -> Event {
        match self {
            Line::Down { until } => {
                sleep_until(*until).await;
                Event::Dial
            }
            Line::Dialing(attempt) => match attempt.await {
                Ok(up) => Event::Attached(up),
                Err(status) => Event::Lost(status),
            },
            Line::Up { inbound, heard } => match timeout_at(*heard + silence_max, inbound.message()).await {
                Ok(Ok(Some(wire::ReplicaFrame { frame }))) => {
                    *heard = Instant::now();
                    frame.map_or(Event::Lost(Status::internal("an empty frame")), Event::Frame)
                }
                Ok(Ok(None)) => Event::Lost(Status::unavailable("the coordinator closed the stream")),
                Ok(Err(status)) => Event::Lost(status),
                Err(_) => Event::Lost(Status::unavailable("the coordinator is silent")),
            },
        }
    }
}

async fn attach(channel: Channel, wait_max: Duration, former: Option<wire::FormerNumber>) -> Result<Up, Status> {
    let (outbound, frames) = mpsc::channel(FRAMES_SENDING_MAX);
    let hello = wire::RouterHello { version: proto::VERSION.to_owned(), former };
    let said = outbound.try_send(up(wire::router_frame::Frame::Hello(hello)));
    debug_assert!(said.is_ok(), "a new queue has room for one frame");
    let mut client = CoordinatorClient::new(channel)
        .max_decoding_message_size(proto::FRAME_BYTES_MAX)
        .max_encoding_message_size(proto::FRAME_BYTES_MAX);
    let attached = timeout(wait_max, client.attach(ReceiverStream::new(frames))).await;
    let inbound = attached.map_err(|_| Status::unavailable("the coordinator does not answer"))??.into_inner();
    Ok(Up { outbound, inbound: Box::new(inbound) })
}

fn up(frame: wire::router_frame::Frame) -> wire::RouterFrame {
    wire::RouterFrame { frame: Some(frame) }
}

/// Hands the first frame to the transport when that has room. Nothing where there is no frame or no transport.
async fn send_first(
    outbound: &Option<mpsc::Sender<wire::RouterFrame>>,
    outbox: &mut VecDeque<wire::RouterFrame>,
) -> Option<Event> {
    let outbound = outbound.as_ref().filter(|_| !outbox.is_empty())?;
    let Ok(permit) = outbound.reserve().await else {
        return Some(Event::Lost(Status::unavailable("the coordinator closed the stream")));
    };
    permit.send(outbox.pop_front()?);
    Some(Event::Sent)
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn replica(welcome: wire::Welcome) -> Result<Replica, Status> {
    if welcome.version != proto::VERSION {
        let message = format!("the coordinator speaks version {}, this router {}", welcome.version, proto::VERSION);
        return Err(Status::failed_precondition(message));
    }
    let malformed = |error: proto::Malformed| Status::internal(format!("the coordinator's welcome: {error}"));
    let digest = proto::policy_digest(&welcome.policy_digest).map_err(malformed)?;
    let Ok(salt) = Salt::try_from(welcome.salt.as_slice()) else {
        return Err(Status::internal("the coordinator's welcome: a salt has sixteen bytes"));
    };
    let Some(first_id) = RequestId::new(welcome.router, 0) else {
        return Err(Status::internal("the coordinator gave this router a number out of range"));
    };
    Ok(Replica {
        name: welcome.replica,
        model: welcome.model,
        context: welcome.context,
        digest,
        incarnation: welcome.incarnation,
        salt,
        first_id,
    })
}

/// What is new in `tokens`, which begin at `position`; nothing if tokens are missing between what was told and them.
///
/// `[0, position) told · [position, n_told) told twice · [n_told, ..) new`
fn splice(n_told: u32, position: u32, tokens: Vec<wire::TokenOut>) -> Option<Vec<TokenOut>> {
    let n_twice = n_told.checked_sub(position)?;
    Some(tokens.into_iter().skip(n_twice as usize).map(TokenOut::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;

    #[test]
    fn splices() {
        let check = |n_told, position, tokens: &[u32], new: Option<&[u32]>| {
            let sent = tokens.iter().map(|token| wire::TokenOut { token: *token, ..Default::default() }).collect();
            let spliced = splice(n_told, position, sent);
            let spliced: Option<Vec<u32>> = spliced.map(|out| out.iter().map(|out| out.token).collect());
            assert_eq!(spliced.as_deref(), new, "{tokens:?} at {position} after {n_told}");
        };
        check(0, 0, &[7, 8], Some(&[7, 8]));
        check(5, 5, &[7], Some(&[7]));
        check(5, 3, &[1, 2, 7], Some(&[7]));
        check(5, 3, &[1], Some(&[]));
        check(5, 5, &[], Some(&[]));
        check(5, 6, &[7], None);
    }

    fn given(dialer: &proto::transport::Dialer) -> (watch::Sender<Target>, watch::Receiver<Target>) {
        watch::channel(Target { channel: dialer.channel(), incarnation: 0, is_listed: true })
    }

    fn peers() -> Peers {
        Peers::new(Budget::new(1000, Instant::now()))
    }

    fn links(peers: &Peers) -> Vec<Link> {
        peers.rows().0.into_iter().map(|place| peers.link(place).unwrap()).collect()
    }

    /// A task that has a replica and no wire: what it would send stands in its outbox.
    fn attached(unread_max: usize) -> (Link, Task) {
        let limits = crate::config::Limits { outputs_unread_max: unread_max, ..Default::default() };
        let (dialer, _) = proto::transport::in_memory();
        let peers = peers();
        peers.sit(View::default());
        let config = Config { limits, ..Config::default() };
        let mut task = link(given(&dialer).1, peers.clone(), 0, Arc::new(AtomicU64::new(1)), &config);
        task.hear(Frame::Welcome(welcome(1)));
        (links(&peers).remove(0), task)
    }

    fn welcome(router: u32) -> wire::Welcome {
        let version = proto::VERSION.to_owned();
        wire::Welcome {
            version,
            router,
            policy_digest: vec![0; 32],
            context: 100,
            salt: vec![0; 16],
            ..Default::default()
        }
    }

    fn submit(link: &Link, n_places: usize) -> (Ticket, mpsc::Receiver<(u32, Told)>) {
        let (ear, heard) = mpsc::channel(n_places);
        let sampling = types::Sampling { tokens_max: 50, stop: vec![9], ..Default::default() };
        let request = Request { prompt: vec![1, 2], sampling, ..Request::default() };
        let digest = PolicyDigest::default();
        let (key, trace) = (link.keys(1), Carried::default());
        let (n_cached, adopts, deadline) = (0, None, None);
        let submit = Submit { key, request, slot: 0, deadline, digest, n_cached, adopts, trace, ear };
        (link.submit(submit).unwrap(), heard)
    }

    /// Takes what the router's side has sent.
    fn take(task: &mut Task) {
        while let Ok(cancel) = task.cancelled.try_recv() {
            task.cancel(cancel);
        }
        while let Ok((key, entry)) = task.submitted.try_recv() {
            task.submit(key, *entry);
        }
    }

    fn id(task: &Task, ticket: &Ticket) -> RequestId {
        task.replica.as_ref().unwrap().id(ticket.key())
    }

    fn token(id: RequestId, position: u32, token: u32) -> Frame {
        let tokens = vec![wire::TokenOut { token, ..Default::default() }];
        let output = wire::Output { id: id.0, position, tokens, ..Default::default() };
        Frame::Outputs(wire::Outputs { outputs: vec![output] })
    }

    /// What stands in the outbox: submits with their output so far, and cancels.
    fn sent(task: &mut Task) -> Vec<(u64, Option<Vec<u32>>)> {
        let frames = task.outbox.drain(..).map(|frame| match frame.frame {
            Some(wire::router_frame::Frame::Submit(request)) => (request.id, Some(request.output)),
            Some(wire::router_frame::Frame::Adopt(adopt)) => {
                let request = adopt.request.unwrap();
                (request.id, Some(request.output))
            }
            Some(wire::router_frame::Frame::Cancel(cancel)) => (cancel.id, None),
            other => panic!("{other:?}"),
        });
        frames.collect()
    }

    #[tokio::test]
    async fn a_slow_reader_is_cut_and_told() {
        let (link, mut task) = attached(2);
        assert_eq!(link.work(), 0);
        let (ticket, mut heard) = submit(&link, 3);
        take(&mut task);
        let id = id(&task, &ticket);
        assert_eq!(sent(&mut task), [(id.0, Some(vec![]))]);
        for position in 0..3 {
            task.hear(token(id, position, 5));
        }
        assert_eq!(sent(&mut task), [(id.0, None)]);
        assert!(task.table.is_empty());
        for position in 0..2 {
            assert!(matches!(heard.try_recv(), Ok((0, Told::Tokens(progress))) if progress.position == position));
        }
        let end = heard.try_recv();
        assert!(matches!(end, Ok((0, Told::Refused(Refusal::SlowReader { unread: 2 })))), "{end:?}");
        assert!(heard.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_cancel_may_come_before_at_and_after_its_request() {
        let (link, mut task) = attached(10);
        drop(submit(&link, 3));
        take(&mut task);
        assert_eq!((sent(&mut task), task.table.len()), (vec![], 0));
        let (ticket, _heard) = submit(&link, 3);
        take(&mut task);
        drop(ticket);
        take(&mut task);
        assert_eq!((sent(&mut task), task.table.len()), (vec![], 0));
        let (ticket, _heard) = submit(&link, 3);
        take(&mut task);
        let id = id(&task, &ticket);
        assert_eq!(sent(&mut task).len(), 1);
        drop(ticket);
        take(&mut task);
        assert_eq!(sent(&mut task), [(id.0, None)]);
        // What was on its way is nobody's.
        task.hear(token(id, 0, 5));
    }

    #[tokio::test]
    async fn a_hundred_thousand_cancels_leave_nothing() {
        let (link, mut task) = attached(10);
        let free = (link.submits.capacity(), link.cancels.capacity());
        for round in 0..1000 {
            // At the replica, with and without a token, in a queue, and ended by a stop string.
            let at_the_replica: Vec<_> = (0..75).map(|_| submit(&link, 3)).collect();
            take(&mut task);
            for (ticket, _) in at_the_replica.iter().take(25) {
                task.hear(token(id(&task, ticket), 0, 5));
            }
            if round % 100 == 50 {
                task.lost(&Status::unavailable("gone"));
                task.hear(Frame::Welcome(welcome(round)));
            }
            let in_a_queue: Vec<_> = (0..25).map(|_| submit(&link, 3)).collect();
            drop(in_a_queue);
            for (i, (ticket, heard)) in at_the_replica.into_iter().enumerate() {
                if i % 3 == 0 { ticket.stopped() } else { drop((heard, ticket)) }
            }
            take(&mut task);
            assert!(task.table.is_empty() && task.parked.is_empty());
            assert_eq!(link.work(), 0);
            assert!(task.outbox.len() <= 3 * 75);
            task.outbox.clear();
        }
        assert_eq!((link.submits.capacity(), link.cancels.capacity()), free);
    }

    #[tokio::test]
    async fn a_lost_replica_gets_the_log_and_a_complete_one_is_at_its_end() {
        let (link, mut task) = attached(10);
        let (goes_on, _heard) = submit(&link, 9);
        let (complete, mut told) = submit(&link, 9);
        take(&mut task);
        sent(&mut task);
        let before = id(&task, &goes_on);
        task.hear(token(before, 0, 5));
        // The stop token: the frame with the word that it was the end need not come.
        task.hear(token(id(&task, &complete), 0, 9));
        let end = told.try_recv();
        assert!(matches!(&end, Ok((0, Told::Tokens(end))) if end.finish == Some(Finish::Stop)), "{end:?}");
        task.lost(&Status::unavailable("gone"));
        assert!(task.replica.is_none());
        task.hear(Frame::Welcome(welcome(2)));
        let id = id(&task, &goes_on);
        assert_eq!(sent(&mut task), [(id.0, Some(vec![5]))]);
        // The old life's ids mean nothing now.
        task.hear(token(before, 1, 6));
        task.hear(token(id, 1, 7));
        assert_eq!(task.table[&goes_on.key()].request.output, [5, 7]);
    }

    /// Two tasks that have replicas; of the second one's, the views must be told to be ready.
    fn neighbours() -> (Vec<Link>, Task, Task) {
        let peers = peers();
        (0..2).for_each(|place| peers.sit(View { place, ..View::default() }));
        let (config, keys) = (Config::default(), Arc::new(AtomicU64::new(1)));
        let new = |place| {
            let (dialer, _) = proto::transport::in_memory();
            let mut task = link(given(&dialer).1, peers.clone(), place, keys.clone(), &config);
            task.hear(Frame::Welcome(welcome(1)));
            task
        };
        let (one, two) = (new(0), new(1));
        (links(&peers), one, two)
    }

    #[tokio::test]
    async fn what_a_lost_replica_had_goes_to_another_and_its_cancel_follows() {
        let (links, mut one, mut two) = neighbours();
        let (begun, _heard) = submit(&links[0], 9);
        let (fresh, _fresh) = submit(&links[0], 9);
        let (unwanted, gone) = submit(&links[0], 9);
        take(&mut one);
        one.hear(token(id(&one, &begun), 0, 5));
        assert_eq!((links[0].work(), links[1].work()), (5, 0));
        // Nobody tells the link of the one that ends meanwhile: what has moved is heard of where it went.
        drop((unwanted, gone));
        one.lost(&Status::unavailable("gone"));
        assert!(one.table.is_empty() && one.parked.is_empty());
        assert_eq!((links[0].work(), links[1].work()), (0, 5));
        take(&mut two);
        let ids = [&begun, &fresh].map(|ticket| id(&two, ticket).0);
        assert_eq!(sent(&mut two), [(ids[0], Some(vec![5])), (ids[1], Some(vec![]))]);
        take(&mut one);
        drop(fresh);
        take(&mut two);
        assert_eq!((sent(&mut two), sent(&mut one)), (vec![(ids[1], None)], vec![]));
    }

    #[tokio::test]
    async fn who_ends_a_request_by_itself_loses_it_to_another() {
        let (links, mut one, mut two) = neighbours();
        let (ticket, mut heard) = submit(&links[0], 9);
        take(&mut one);
        one.hear(token(id(&one, &ticket), 0, 5));
        let ended = wire::Output { id: id(&one, &ticket).0, position: 1, ..Default::default() };
        let ended = wire::Output { finish: wire::Finish::Cancelled.into(), ..ended };
        one.hear(Frame::Outputs(wire::Outputs { outputs: vec![ended] }));
        take(&mut two);
        assert_eq!(sent(&mut two), [(id(&two, &ticket).0, Some(vec![5]))]);
        heard.try_recv().unwrap();
        assert!(heard.try_recv().is_err() && one.table.is_empty());
    }

    #[tokio::test]
    async fn who_recovers_for_too_long_loses_its_requests() {
        let (links, mut one, mut two) = neighbours();
        let (ticket, _heard) = submit(&links[0], 9);
        take(&mut one);
        sent(&mut one);
        let recovers = wire::State { phase: wire::state::Phase::Recovering.into(), ..Default::default() };
        one.hear(Frame::State(recovers));
        let due = one.next_due().unwrap();
        one.due(due);
        assert_eq!((sent(&mut one), one.table.len()), (vec![(id(&two, &ticket).0, None)], 0));
        take(&mut two);
        assert_eq!(sent(&mut two), [(id(&two, &ticket).0, Some(vec![]))]);
    }

    #[tokio::test]
    async fn who_has_less_room_or_another_policy_gets_nothing_and_a_killer_is_not_handed_on_for_ever() {
        let (links, mut one, mut two) = neighbours();
        let (_ticket, mut heard) = submit(&links[0], 9);
        take(&mut one);
        for welcome in
            [wire::Welcome { context: 51, ..welcome(1) }, wire::Welcome { policy_digest: vec![1; 32], ..welcome(1) }]
        {
            two.hear(Frame::Welcome(welcome));
            one.lost(&Status::unavailable("gone"));
            assert_eq!((one.table.len(), one.parked.len()), (1, 1));
            one.hear(Frame::Welcome(self::welcome(1)));
            assert!(one.parked.is_empty());
        }
        for _ in 2..=Config::default().limits.losses_max {
            assert!(heard.try_recv().is_err());
            one.lost(&Status::unavailable("gone"));
            one.hear(Frame::Welcome(welcome(1)));
        }
        let end = heard.try_recv();
        assert!(matches!(end, Ok((0, Told::Refused(Refusal::LostTooOften { times: 9 })))), "{end:?}");
    }

    #[tokio::test]
    async fn a_gap_and_another_version_are_refused() {
        let (link, mut task) = attached(10);
        let (ticket, mut heard) = submit(&link, 9);
        take(&mut task);
        sent(&mut task);
        let id = id(&task, &ticket);
        task.hear(token(id, 1, 5));
        assert_eq!(sent(&mut task), [(id.0, None)]);
        assert!(matches!(heard.try_recv(), Ok((0, Told::Refused(Refusal::Failed { .. })))));
        task.hear(Frame::Welcome(wire::Welcome { version: "0.0.0".into(), ..welcome(1) }));
        assert!(task.replica.is_none() && task.reason.contains("0.0.0"), "{}", task.reason);
    }

    /// A task that is attached under claim 5, and what it is told.
    fn claimed() -> (watch::Sender<Target>, Task) {
        let (dialer, _) = proto::transport::in_memory();
        let (target, aim) = given(&dialer);
        let peers = peers();
        peers.sit(View::default());
        let mut task = link(aim, peers, 0, Arc::new(AtomicU64::new(1)), &Config::default());
        target.send_modify(|target| target.incarnation = 5);
        task.retarget();
        task.line = Line::Dialing(Box::pin(std::future::pending()));
        task.hear(Frame::Welcome(wire::Welcome { incarnation: 5, ..welcome(1) }));
        (target, task)
    }

    #[tokio::test]
    async fn a_later_claim_ends_the_stream_of_an_older_one() {
        let (target, mut task) = claimed();
        assert!(task.replica.is_some());
        // A lease that was made anew is the same claim.
        target.send_modify(|target| target.incarnation = 5);
        task.retarget();
        assert!(task.replica.is_some());
        target.send_modify(|target| target.incarnation = 6);
        task.retarget();
        assert!(task.replica.is_none() && matches!(task.line, Line::Down { .. }));
        // The older one is still there and answers first.
        task.line = Line::Dialing(Box::pin(std::future::pending()));
        task.hear(Frame::Welcome(wire::Welcome { incarnation: 5, ..welcome(1) }));
        assert!(task.replica.is_none() && task.reason.contains("claim"), "{}", task.reason);
        // A claim that the store has not told of yet.
        task.hear(Frame::Welcome(wire::Welcome { incarnation: 7, ..welcome(1) }));
        assert!(task.replica.is_some());
    }

    #[tokio::test]
    async fn who_vanishes_from_the_store_stays_while_the_stream_stands() {
        let (target, mut task) = claimed();
        target.send_modify(|target| target.is_listed = false);
        task.retarget();
        assert!(task.replica.is_some() && !task.is_forsaken());
        task.lost(&Status::unavailable("gone"));
        assert!(task.is_forsaken());
        target.send_modify(|target| target.is_listed = true);
        task.retarget();
        assert!(!task.is_forsaken());
    }
}
