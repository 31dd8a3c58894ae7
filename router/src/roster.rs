//! Which replicas there are, as the store tells it: a link for each, begun when one appears and ended when one is gone
//! and its stream too. Knows addresses and claims, no requests.

use crate::circuit::Turn;
use crate::config::Config;
use crate::link::{self, View};
use crate::peers::Peers;
use crate::target::Target;
use cluster::{Change, Member, Store, Watch};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use telemetry::metrics;
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// Where a replica's coordinator is reached.
#[derive(Clone, Debug)]
pub struct Coordinator {
    /// As people know it, until the replica says its own name.
    pub name: String,
    pub channel: Channel,
}

/// A channel to an address, or why there can be none.
pub type Dial = Box<dyn Fn(&str) -> Result<Channel, String> + Send>;

/// Where a router's replicas come from.
pub enum Membership {
    /// In this order, from the start to the end.
    Given(Vec<Coordinator>),
    /// Whoever the store has.
    Followed { store: Store, dial: Dial },
}

impl From<Vec<Coordinator>> for Membership {
    fn from(coordinators: Vec<Coordinator>) -> Membership {
        Membership::Given(coordinators)
    }
}

/// Owns the links' tasks.
pub struct Roster {
    watch: Option<Watch>,
    dial: Dial,
    peers: Peers,
    config: Config,
    /// One count for all links, so that no two requests of this router have the same key.
    keys: Arc<AtomicU64>,
    /// By the replica's name in the store.
    seats: BTreeMap<String, Seat>,
    next_place: usize,
    n_looks: u64,
    links: JoinSet<()>,
    /// Of each link's task.
    places: HashMap<Id, Place>,
    end: CancellationToken,
}

/// What outlives a link's task.
struct Place {
    place: usize,
    name: String,
    target: watch::Receiver<Target>,
}

/// A link's place among the others, and what it is told.
struct Seat {
    place: usize,
    target: watch::Sender<Target>,
    address: String,
}

impl Roster {
    /// Links to all that are there by now. Needs a runtime, in which their tasks begin.
    pub fn new(membership: Membership, peers: Peers, config: &Config, end: CancellationToken) -> Roster {
        let unreachable: Dial = Box::new(|_| Err("no replica can be added".into()));
        let (given, watch, dial) = match membership {
            Membership::Given(given) => (given, None, unreachable),
            Membership::Followed { store, dial } => (Vec::new(), Some(store.watch()), dial),
        };
        let config = config.clone();
        let (keys, seats, links) = (Arc::new(AtomicU64::new(1)), BTreeMap::new(), JoinSet::new());
        let (places, next_place, n_looks) = (HashMap::new(), 0, 0);
        let mut roster = Roster { watch, dial, peers, config, keys, seats, next_place, n_looks, links, places, end };
        for Coordinator { name, channel } in given {
            // Whoever holds a sender could say otherwise; nobody will.
            drop(roster.sit(&name, Target { channel, incarnation: 0, is_listed: true }, Duration::ZERO));
        }
        let there = roster.watch.as_mut().map(Watch::now).unwrap_or_default();
        there.into_iter().for_each(|change| roster.apply(change));
        roster
    }

    /// Until `end`, and then until every link has ended.
    pub async fn run(mut self) {
        let end = self.end.clone();
        let mut looks = interval(self.config.waits.judge_every);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                change = next(&mut self.watch), if !end.is_cancelled() => self.apply(change),
                Some(ended) = self.links.join_next_with_id() => match ended {
                    Ok((id, ())) => self.ended(id, false),
                    Err(error) => self.ended(error.id(), true),
                },
                () = end.cancelled(), if !end.is_cancelled() => {}
                _ = looks.tick(), if !end.is_cancelled() => self.judge(),
                else => return,
            }
        }
    }

    /// Who gets nothing new for a while, and who is tried again.
    fn judge(&mut self) {
        self.n_looks += 1;
        for (place, turn) in self.peers.judge(self.n_looks) {
            let mut name = String::new();
            self.peers.show(place, |view| {
                name.clone_from(&view.name);
                view.shunned = match turn {
                    Turn::Shunned { cause, .. } => Some(cause.label()),
                    Turn::Tried => view.shunned,
                    Turn::Trusted => None,
                };
            });
            match turn {
                Turn::Shunned { cause, seconds } => {
                    tracing::warn!(
                        replica = name,
                        cause = cause.label(),
                        seconds,
                        "a replica gets nothing new for a while"
                    );
                    metrics::replica_shunned(&name, Some(cause.label()));
                }
                Turn::Tried => tracing::info!(replica = name, "a replica that was shunned is tried"),
                Turn::Trusted => {
                    tracing::info!(replica = name, "a replica that was shunned is trusted again");
                    metrics::replica_shunned(&name, None);
                }
            }
        }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Is(name, member) => self.is(&name, &member),
            Change::Gone(name) => {
                let Some(seat) = self.seats.get(&name) else { return };
                tracing::info!(replica = name, "the store has it no more: a suspicion, while its stream stands");
                seat.target.send_modify(|target| target.is_listed = false);
            }
        }
    }

    fn is(&mut self, name: &str, member: &Member) {
        let address = &member.registration.address;
        let seat = self.seats.get(name);
        let channel = match seat.filter(|seat| seat.address == *address) {
            Some(seat) => Ok(seat.target.borrow().channel.clone()),
            None => (self.dial)(address),
        };
        let channel = match channel {
            Ok(channel) => channel,
            Err(why) => return tracing::warn!(replica = name, address, why, "it is not dialled"),
        };
        let target = Target { channel, incarnation: member.incarnation, is_listed: true };
        match self.seats.get_mut(name) {
            Some(seat) => {
                seat.address.clone_from(address);
                seat.target.send_if_modified(|now| now.becomes(target));
            }
            None => {
                tracing::info!(replica = name, address, incarnation = member.incarnation, "the store has a replica");
                let (place, target) = self.sit(name, target, Duration::ZERO);
                self.seats.insert(name.into(), Seat { place, target, address: address.clone() });
            }
        }
    }

    /// A new link, which is begun after a while.
    fn sit(&mut self, name: &str, target: Target, after: Duration) -> (usize, watch::Sender<Target>) {
        let place = self.next_place;
        self.next_place += 1;
        let (target, aim) = watch::channel(target);
        self.peers.sit(View { place, ..View::of(name) });
        let task = link::link(aim.clone(), self.peers.clone(), place, self.keys.clone(), &self.config);
        let end = self.end.clone();
        let begun = self.links.spawn(async move {
            if !after.is_zero() {
                // Over in time, unless all of it ends sooner.
                let _passed = timeout(after, end.cancelled()).await;
            }
            task.run(end).await;
        });
        self.places.insert(begun.id(), Place { place, name: name.into(), target: aim });
        (place, target)
    }

    /// Whose replica is still listed has a link again: it came back while the link ended, or nothing was wrong but with
    /// the link's task, whose requests have ended with it.
    fn ended(&mut self, id: Id, has_panicked: bool) {
        let Some(Place { place, name, target }) = self.places.remove(&id) else { return };
        if has_panicked {
            tracing::error!(replica = name, "a link's task broke: another takes its place");
        }
        if self.end.is_cancelled() {
            return;
        }
        self.peers.leave(place);
        let seat = self.seats.get(&name).is_some_and(|seat| seat.place == place).then(|| self.seats.remove(&name));
        let target = target.borrow().clone();
        if !target.is_listed {
            return tracing::info!(replica = name, "a replica is gone");
        }
        // Whatever it broke on may come again.
        let after = if has_panicked { self.config.waits.reattach_max } else { Duration::ZERO };
        let (place, target) = self.sit(&name, target, after);
        if let Some(seat) = seat.flatten() {
            self.seats.insert(name, Seat { place, target, address: seat.address });
        }
    }
}

async fn next(watch: &mut Option<Watch>) -> Change {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}
