//! Which replicas there are, by the store: a link to each, begun when the replica appears and ended when both the
//! replica and its stream are gone. Knows addresses and claims, no requests.

use crate::board::circuit::CircuitChange;
use crate::config::Config;
use crate::link::peers::ReplicaLinks;
use crate::link::target::LinkTarget;
use crate::link::task::LinkTask;
use crate::link::view::ReplicaView;
use crate::replicas::compare::Comparisons;
use crate::replicas::models::unserved::{RouteChange, UnservedVersions};
use cluster::{Member, MemberChange, MemberWatch, Store};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use telemetry::metrics;
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// The channel to a replica's coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorChannel {
    /// The name for people, until the replica reports its own.
    pub name: String,
    pub channel: Channel,
}

/// Makes a channel to an address, or returns the reason why it cannot.
pub type Dial = Box<dyn Fn(&str) -> Result<Channel, String> + Send>;

/// Where a router's replicas come from.
pub enum Membership {
    /// These replicas, in this order, for the whole run.
    Given(Vec<CoordinatorChannel>),
    /// The replicas that the store lists.
    Followed { store: Store, dial: Dial },
}

impl From<Vec<CoordinatorChannel>> for Membership {
    fn from(coordinators: Vec<CoordinatorChannel>) -> Membership {
        Membership::Given(coordinators)
    }
}

/// Owns the links' tasks.
pub struct LinkSupervisor {
    watch: Option<MemberWatch>,
    dial: Dial,
    peers: ReplicaLinks,
    config: Config,
    /// Counts the keys of all links, so that each request of this router has its own.
    keys: Arc<AtomicU64>,
    /// By the replica's name in the store.
    seats: BTreeMap<String, LinkHandle>,
    next_place: usize,
    n_looks: u64,
    links: JoinSet<()>,
    /// The place of each link's task.
    places: HashMap<Id, LinkRecord>,
    comparisons: Comparisons,
    unserved: UnservedVersions,
    end: CancellationToken,
}

/// What is kept of a link when its task has ended.
struct LinkRecord {
    place: usize,
    name: String,
    target: watch::Receiver<LinkTarget>,
}

/// A link's place, and the sender of its replica's target.
struct LinkHandle {
    place: usize,
    target: watch::Sender<LinkTarget>,
    address: String,
}

impl LinkSupervisor {
    /// Makes links to all replicas known by now. Needs a runtime, in which their tasks begin.
    pub fn new(membership: Membership, peers: ReplicaLinks, config: &Config, end: CancellationToken) -> LinkSupervisor {
        let unreachable: Dial = Box::new(|_| Err("no replica can be added".into()));
        let (given, watch, dial) = match membership {
            Membership::Given(given) => (given, None, unreachable),
            Membership::Followed { store, dial } => (Vec::new(), Some(store.watch()), dial),
        };
        let config = config.clone();
        let (keys, seats, links) = (Arc::new(AtomicU64::new(1)), BTreeMap::new(), JoinSet::new());
        let (places, comparisons, unserved) = (HashMap::new(), Comparisons::default(), UnservedVersions::default());
        let mut roster = LinkSupervisor {
            watch,
            dial,
            peers,
            config,
            keys,
            seats,
            next_place: 0,
            n_looks: 0,
            links,
            places,
            comparisons,
            unserved,
            end,
        };
        for CoordinatorChannel { name, channel } in given {
            // Dropped, because the target of a given replica never changes.
            drop(roster.spawn_link(&name, LinkTarget { channel, incarnation: 0, is_listed: true }, Duration::ZERO));
        }
        let there = roster.watch.as_mut().map(MemberWatch::take_available).unwrap_or_default();
        there.into_iter().for_each(|change| roster.apply(change));
        roster
    }

    /// Runs until `end`, and then until every link has ended.
    pub async fn run(mut self) {
        let end = self.end.clone();
        let mut looks = interval(self.config.timeouts.judge_every);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                change = next(&mut self.watch), if !end.is_cancelled() => self.apply(change),
                Some(ended) = self.links.join_next_with_id() => match ended {
                    Ok((id, ())) => self.handle_link_end(id, false),
                    Err(error) => self.handle_link_end(error.id(), true),
                },
                () = end.cancelled(), if !end.is_cancelled() => {}
                _ = looks.tick(), if !end.is_cancelled() => {
                    self.judge();
                    self.compare();
                    self.report_unserved();
                }
                else => return,
            }
        }
    }

    /// Judges which replicas get no new requests for a while, and which are tried again.
    fn judge(&mut self) {
        self.n_looks += 1;
        for (place, turn) in self.peers.judge(self.n_looks) {
            let mut name = String::new();
            self.peers.update_view(place, |view| {
                name.clone_from(&view.name);
                view.shunned = match turn {
                    CircuitChange::Shunned { cause, .. } => Some(cause.label()),
                    CircuitChange::Tried => view.shunned,
                    CircuitChange::Trusted => None,
                };
            });
            match turn {
                CircuitChange::Shunned { cause, seconds } => {
                    tracing::warn!(
                        replica = name,
                        cause = cause.label(),
                        seconds,
                        "a replica gets no new requests for a while"
                    );
                    metrics::replica_shunned(&name, Some(cause.label()));
                }
                CircuitChange::Tried => tracing::info!(replica = name, "trying a shunned replica"),
                CircuitChange::Trusted => {
                    tracing::info!(replica = name, "a shunned replica is trusted again");
                    metrics::replica_shunned(&name, None);
                }
            }
        }
    }

    /// Names the weight where replicas of one model have read other bytes of it.
    fn compare(&mut self) {
        let places = &self.places;
        let channel = |place| {
            let of = places.values().find(|of| of.place == place)?;
            Some(of.target.borrow().channel.clone())
        };
        self.comparisons.look(&self.peers, channel);
    }

    /// Logs versions that a route names and no replica serves.
    fn report_unserved(&mut self) {
        let (table, versions) = (self.config.routes.table(), self.peers.versions());
        for RouteChange { name, version, is_served, like } in
            self.unserved.update_missed(&table, &versions, Instant::now())
        {
            metrics::route_unserved(&name, &version, !is_served);
            let meant = like.map_or_else(String::new, |like| format!(": did you mean `{like}`?"));
            match is_served {
                true => tracing::info!(route = name, version, "a replica serves this version, or no route names it"),
                false => {
                    tracing::warn!(
                        route = name,
                        version,
                        "no replica serves this version; others get its share{meant}"
                    );
                }
            }
        }
    }

    fn apply(&mut self, change: MemberChange) {
        match change {
            MemberChange::Is(name, member) => self.upsert(&name, &member),
            MemberChange::Gone(name) => {
                let Some(seat) = self.seats.get(&name) else { return };
                tracing::info!(replica = name, "the store no longer lists it; it stays while its stream is open");
                seat.target.send_modify(|target| target.is_listed = false);
            }
        }
    }

    fn upsert(&mut self, name: &str, member: &Member) {
        let address = &member.registration.address;
        let seat = self.seats.get(name);
        let channel = match seat.filter(|seat| seat.address == *address) {
            Some(seat) => Ok(seat.target.borrow().channel.clone()),
            None => (self.dial)(address),
        };
        let channel = match channel {
            Ok(channel) => channel,
            Err(why) => return tracing::warn!(replica = name, address, why, "cannot dial its address"),
        };
        let target = LinkTarget { channel, incarnation: member.incarnation, is_listed: true };
        match self.seats.get_mut(name) {
            Some(seat) => {
                seat.address.clone_from(address);
                seat.target.send_if_modified(|now| now.becomes(target));
            }
            None => {
                tracing::info!(replica = name, address, incarnation = member.incarnation, "the store lists a replica");
                let (place, target) = self.spawn_link(name, target, Duration::ZERO);
                self.seats.insert(name.into(), LinkHandle { place, target, address: address.clone() });
            }
        }
    }

    /// Makes a link. Its task begins after the delay `after`.
    fn spawn_link(&mut self, name: &str, target: LinkTarget, after: Duration) -> (usize, watch::Sender<LinkTarget>) {
        let place = self.next_place;
        self.next_place += 1;
        let (target, aim) = watch::channel(target);
        self.peers.add_view(ReplicaView { place, ..ReplicaView::of(name) });
        let task = LinkTask::new(aim.clone(), self.peers.clone(), place, self.keys.clone(), &self.config);
        let end = self.end.clone();
        let begun = self.links.spawn(async move {
            if !after.is_zero() {
                // The wait ends after the delay, or when the router ends.
                let _passed = timeout(after, end.cancelled()).await;
            }
            task.run(end).await;
        });
        self.places.insert(begun.id(), LinkRecord { place, name: name.into(), target: aim });
        (place, target)
    }

    /// Handles the end of a link's task. If its replica is still listed, it gets another link: the replica came back
    /// while the link ended, or the link's task panicked and its requests ended with it.
    fn handle_link_end(&mut self, id: Id, has_panicked: bool) {
        let Some(LinkRecord { place, name, target }) = self.places.remove(&id) else { return };
        if has_panicked {
            tracing::error!(replica = name, "a link's task panicked: starting another");
        }
        if self.end.is_cancelled() {
            return;
        }
        self.peers.remove(place);
        let seat = self.seats.get(&name).is_some_and(|seat| seat.place == place).then(|| self.seats.remove(&name));
        let target = target.borrow().clone();
        if !target.is_listed {
            return tracing::info!(replica = name, "a replica is gone");
        }
        // The cause of the panic may come again, so the next link waits a little.
        let after = if has_panicked { self.config.timeouts.reattach_max } else { Duration::ZERO };
        let (place, target) = self.spawn_link(&name, target, after);
        if let Some(seat) = seat.flatten() {
            self.seats.insert(name, LinkHandle { place, target, address: seat.address });
        }
    }
}

async fn next(watch: &mut Option<MemberWatch>) -> MemberChange {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}
