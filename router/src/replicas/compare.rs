//! Finds replicas that mean the same model and have read other bytes of it. Requests the hashes of two of them, once,
//! to find the first weight in which they differ. Knows no requests. The result stands in the replica's view until it
//! has gone.

use crate::link::peers::ReplicaLinks;
use crate::link::view::{PieceDifference, ReplicaInfo, ReplicaView};
use proto::ProtocolRange;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{GetHashesRequest, WeightHash, WeightHashes};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;
use types::PolicyDigest;

/// The time for both answers of both replicas.
const ANSWERS_MAX: Duration = Duration::from_secs(10);
/// The largest models that there are have some hundred thousand weights.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// The most comparisons at once. More are needed only while many digests meet.
const REQUESTS_MAX: usize = 4;
/// The number of looks, one a second, until two replicas without an answer are compared again.
const LOOKS_UNTIL_AGAIN: u64 = 60;

/// The digests of one that differs and of one that it differs from. Two replicas with the same digests differ in the
/// same way.
type Digests = ([u8; 32], [u8; 32]);

/// What is known of replicas that differ.
#[derive(Default)]
pub struct Comparisons {
    known: BTreeMap<Digests, WeightComparisonState>,
    requests: JoinSet<(Digests, Result<WeightPiece, Status>)>,
    n_looks: u64,
}

enum WeightComparisonState {
    Requested,
    Found(WeightPiece),
    /// Compared again at this look.
    Silent {
        until: u64,
    },
}

/// The first piece that is not the same.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WeightPiece {
    weight: String,
    piece: u32,
}

/// A replica, and one of the majority from which it differs.
#[derive(Debug, PartialEq)]
struct Pair {
    place: usize,
    replica: Arc<ReplicaInfo>,
    name: String,
    other_place: usize,
    other: Arc<ReplicaInfo>,
    other_name: String,
}

impl Pair {
    fn digests(&self) -> Digests {
        (self.replica.digest.0, self.other.digest.0)
    }
}

impl Comparisons {
    /// Call about once a second. `channel` is the one to the replica at a place.
    pub fn look(&mut self, peers: &ReplicaLinks, channel: impl Fn(usize) -> Option<Channel>) {
        self.n_looks += 1;
        while let Some(joined) = self.requests.try_join_next() {
            // The result of a broken task has no digests: its pair stays `Requested`, until it goes.
            let Ok((digests, answer)) = joined else { continue };
            self.apply_answer(digests, answer);
        }
        let (pairs, shown) = differing_replicas(&peers.views().borrow());
        let current: BTreeSet<Digests> = pairs.iter().map(Pair::digests).collect();
        self.known.retain(|digests, _| current.contains(digests));
        let mut differ = BTreeMap::new();
        for pair in &pairs {
            match self.known.get(&pair.digests()) {
                Some(WeightComparisonState::Found(WeightPiece { weight, piece })) => {
                    let (replica, weight, piece) = (pair.other_name.clone(), weight.clone(), *piece);
                    differ.insert(pair.place, PieceDifference { replica, weight, piece });
                }
                Some(WeightComparisonState::Requested) => {}
                Some(WeightComparisonState::Silent { until }) if self.n_looks < *until => {}
                Some(WeightComparisonState::Silent { .. }) | None => self.request_comparison(pair, &channel),
            }
        }
        update_differences(peers, &shown, differ);
    }

    fn request_comparison(&mut self, pair: &Pair, channel: impl Fn(usize) -> Option<Channel>) {
        let Some((of, other)) = channel(pair.place).zip(channel(pair.other_place)) else { return };
        if self.requests.len() >= REQUESTS_MAX {
            return;
        }
        let (replica, than) = (&pair.name, &pair.other_name);
        tracing::warn!(replica, than, "two replicas of one model have read different bytes: comparing them");
        let (digests, expected) = (pair.digests(), [pair.replica.digest, pair.other.digest]);
        self.known.insert(digests, WeightComparisonState::Requested);
        self.requests.spawn(async move {
            let answer = timeout(ANSWERS_MAX, first_difference([of, other], expected)).await;
            (digests, answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("the replicas did not answer in time"))))
        });
    }

    fn apply_answer(&mut self, digests: Digests, answer: Result<WeightPiece, Status>) {
        let known = match answer {
            Ok(piece) => WeightComparisonState::Found(piece),
            Err(why) => {
                tracing::warn!(why = why.message(), "cannot determine in which weight two replicas differ");
                WeightComparisonState::Silent { until: self.n_looks + LOOKS_UNTIL_AGAIN }
            }
        };
        self.known.insert(digests, known);
    }
}

/// Returns the replicas that differ, and what is shown of that.
fn differing_replicas(views: &[ReplicaView]) -> (Vec<Pair>, BTreeMap<usize, PieceDifference>) {
    let shown = views.iter().filter_map(|view| Some((view.place, view.differs.clone()?)));
    (differing_pairs(views), shown.collect())
}

fn update_differences(
    peers: &ReplicaLinks,
    shown: &BTreeMap<usize, PieceDifference>,
    found: BTreeMap<usize, PieceDifference>,
) {
    for place in shown.keys().filter(|place| !found.contains_key(place)) {
        peers.update_view(*place, |view| view.differs = None);
    }
    for (place, differs) in found.into_iter().filter(|(place, differs)| shown.get(place) != Some(differs)) {
        let (replica, PieceDifference { replica: than, weight, piece }) = (peers.name(place), &differs);
        tracing::warn!(replica, than, weight, piece, "two replicas differ in a weight: a file of one is damaged");
        peers.update_view(place, |view| view.differs = Some(differs));
    }
}

/// A replica's view, and what it serves.
type ServingView<'a> = (&'a ReplicaView, &'a Arc<ReplicaInfo>);

/// Returns the replicas that mean the same model as others and have another digest than most of these.
fn differing_pairs(views: &[ReplicaView]) -> Vec<Pair> {
    let mut alike: BTreeMap<(&str, [u8; 32]), Vec<ServingView<'_>>> = BTreeMap::new();
    for (view, replica) in views.iter().filter_map(|view| Some((view, view.replica.as_ref()?))) {
        if let Some(PolicyDigest(meant)) = replica.meant {
            alike.entry((&replica.model, meant)).or_default().push((view, replica));
        }
    }
    alike.into_values().flat_map(|alike| minority_pairs(&alike)).collect()
}

fn minority_pairs(alike: &[ServingView<'_>]) -> Vec<Pair> {
    if alike.iter().all(|(_, of)| of.digest == alike[0].1.digest) {
        return Vec::new();
    }
    let n_like = |digest| alike.iter().filter(|(_, of)| of.digest == digest).count();
    // Of equal counts, the one that was known first.
    let most = alike.iter().rev().max_by_key(|(_, of)| n_like(of.digest));
    let Some((usual, other)) = most.copied() else { return Vec::new() };
    let differ = alike.iter().filter(|(_, of)| of.digest != other.digest);
    let pair = |(view, replica): &ServingView<'_>| Pair {
        place: view.place,
        replica: (*replica).clone(),
        name: view.name.clone(),
        other_place: usual.place,
        other: other.clone(),
        other_name: usual.name.clone(),
    };
    differ.map(pair).collect()
}

async fn first_difference(channels: [Channel; 2], expected: [PolicyDigest; 2]) -> Result<WeightPiece, Status> {
    let [ours, theirs] = hashes(&channels, expected, "").await?;
    let none = || Status::not_found("the replicas report equal hashes of all weights");
    let weight = first_weight(&ours.weights, &theirs.weights).ok_or_else(none)?;
    let [ours, theirs] = hashes(&channels, expected, &weight).await?;
    let same = ours.pieces.chunks(32).zip(theirs.pieces.chunks(32)).take_while(|(a, b)| a == b).count();
    Ok(WeightPiece { weight, piece: u32::try_from(same).unwrap_or(u32::MAX) })
}

async fn hashes(channels: &[Channel; 2], expected: [PolicyDigest; 2], of: &str) -> Result<[WeightHashes; 2], Status> {
    let fetch = async |at: usize| {
        let mut client = CoordinatorClient::new(channels[at].clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let ProtocolRange { version, protocols } = ProtocolRange::default();
        let request = GetHashesRequest { version, weight: of.to_owned(), protocols };
        let answer = client.get_hashes(request).await?.into_inner();
        match answer.policy_digest[..] == expected[at].0 {
            true => Ok(answer),
            false => Err(Status::aborted("a replica now serves another policy")),
        }
    };
    let (ours, theirs) = tokio::join!(fetch(0), fetch(1));
    Ok([ours?, theirs?])
}

/// Returns, by name, the first weight that only one has, or that is not the same.
fn first_weight(ours: &[WeightHash], theirs: &[WeightHash]) -> Option<String> {
    let by_name = |of: &'_ [WeightHash]| -> BTreeMap<String, Vec<u8>> {
        of.iter().map(|of| (of.weight.clone(), of.hash.clone())).collect()
    };
    let (ours, theirs) = (by_name(ours), by_name(theirs));
    let differs = |name: &&String| ours.get(*name) != theirs.get(*name);
    let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    names.into_iter().find(differs).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(place: usize, meant: Option<u8>, digest: u8) -> ReplicaView {
        let meant = meant.map(|byte| PolicyDigest([byte; 32]));
        let mut replica = ReplicaInfo::for_test("m", PolicyDigest([digest; 32]));
        replica.meant = meant;
        ReplicaView { place, replica: Some(Arc::new(replica)), ..ReplicaView::of(&place.to_string()) }
    }

    fn found(views: &[ReplicaView]) -> Vec<(usize, usize)> {
        differing_pairs(views).iter().map(|pair| (pair.place, pair.other_place)).collect()
    }

    #[test]
    fn outlier_is_compared_with_a_replica_of_the_majority() {
        let all = [view(0, Some(1), 7), view(1, Some(1), 8), view(2, Some(1), 8), view(3, Some(1), 9)];
        assert_eq!(found(&all), [(0, 1), (3, 1)]);
        assert_eq!(found(&all[..2]), [(1, 0)], "at equal counts, the first is the reference");
        // Another model is meant to differ. A replica that does not report what it means is compared with no other.
        assert_eq!(found(&[view(0, Some(1), 7), view(1, Some(2), 8), view(2, None, 9)]), []);
        assert_eq!(found(&[ReplicaView::of("away"), view(1, Some(1), 8)]), []);
    }

    #[test]
    fn a_weight_that_only_one_has_differs() {
        let of = |weights: &[(&str, u8)]| -> Vec<WeightHash> {
            weights
                .iter()
                .map(|(weight, byte)| WeightHash { weight: (*weight).into(), hash: vec![*byte; 32] })
                .collect()
        };
        let ours = of(&[("a", 1), ("b", 2), ("d", 4)]);
        for (theirs, differs) in [
            (of(&[("a", 1), ("b", 2), ("d", 4)]), None),
            (of(&[("a", 1), ("b", 3), ("d", 5)]), Some("b")),
            (of(&[("a", 1), ("b", 2)]), Some("d")),
            (of(&[("a", 1), ("b", 2), ("c", 3), ("d", 4)]), Some("c")),
        ] {
            assert_eq!(first_weight(&ours, &theirs).as_deref(), differs);
            assert_eq!(first_weight(&theirs, &ours).as_deref(), differs);
        }
    }
}
