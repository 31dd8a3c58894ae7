//! A replica's own reports, and its present state as this router knows it. Knows no requests.

use crate::board::Salt;
use proto::ProtocolRange;
use proto::cluster as wire;
use std::sync::Arc;
use tonic::Status;
use types::{PolicyDigest, RequestId};

/// A replica, by its Welcome.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaInfo {
    pub name: String,
    pub model: String,
    pub context: u32,
    pub digest: PolicyDigest,
    /// The digest by the fingerprint of its model, if its coordinator sends one.
    pub meant: Option<PolicyDigest>,
    pub incarnation: u64,
    /// The root of its block names.
    pub salt: Salt,
    /// The protocol that its coordinator and this router speak.
    pub protocol: u32,
    /// The id of key 0: this router's number at the replica in the upper bits, a request's key in the lower.
    pub(super) first_id: RequestId,
}

impl ReplicaInfo {
    pub(super) fn of(welcome: wire::Welcome, speaks: &ProtocolRange) -> Result<ReplicaInfo, Status> {
        let met = speaks.newest_common(ProtocolRange::of(&welcome.version, welcome.protocols));
        let protocol = met.map_err(|refusal| Status::failed_precondition(refusal.to_string()))?;
        tracing::debug!(replica = welcome.replica, version = welcome.version, protocol, "a replica's welcome");
        let malformed = |error: proto::Malformed| Status::internal(format!("the coordinator's welcome: {error}"));
        let digest = proto::policy_digest(&welcome.policy_digest).map_err(malformed)?;
        let meant = match welcome.policy_meant.is_empty() {
            true => None,
            false => Some(proto::policy_digest(&welcome.policy_meant).map_err(malformed)?),
        };
        let Ok(salt) = Salt::try_from(welcome.salt.as_slice()) else {
            return Err(Status::internal("the coordinator's welcome: a salt must have 16 bytes"));
        };
        let Some(first_id) = RequestId::new(welcome.router, 0) else {
            return Err(Status::internal("the coordinator assigned this router a number out of range"));
        };
        Ok(ReplicaInfo {
            name: welcome.replica,
            model: welcome.model,
            context: welcome.context,
            digest,
            meant,
            incarnation: welcome.incarnation,
            salt,
            protocol,
            first_id,
        })
    }

    #[cfg(test)]
    pub fn for_test(model: &str, digest: PolicyDigest) -> ReplicaInfo {
        let (name, salt, first_id, protocol) = (String::new(), Salt::default(), RequestId(0), proto::NEWEST);
        ReplicaInfo {
            name,
            model: model.into(),
            context: 100,
            digest,
            meant: None,
            incarnation: 1,
            salt,
            protocol,
            first_id,
        }
    }

    pub fn id(&self, key: u64) -> RequestId {
        debug_assert_eq!(RequestId(key).router(), 0, "a trillion requests");
        RequestId(self.first_id.0 | key)
    }
}

/// Returns how many tokens of a request the ranks have room for in this state.
pub(super) fn room(state: &wire::State) -> u32 {
    state.shortened.as_ref().map_or(u32::MAX, |shortened| shortened.has)
}

/// The present state of a replica as this router knows it.
#[derive(Clone, Debug, Default)]
pub struct ReplicaView {
    /// The link's number among the links.
    pub place: usize,
    /// The replica's own name, or until that is known, its address.
    pub name: String,
    /// Present while the stream is open and the replica has reported that it can serve.
    pub replica: Option<Arc<ReplicaInfo>>,
    pub state: Option<wire::State>,
    /// The replica has been silent for some beats.
    pub is_suspected: bool,
    /// Why the replica gets no new requests at present.
    pub shunned: Option<&'static str>,
    /// In what it differs from most replicas of its model.
    pub differs: Option<PieceDifference>,
}

/// The first piece of a weight that is not the same as another replica's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceDifference {
    pub replica: String,
    pub weight: String,
    pub piece: u32,
}

impl ReplicaView {
    pub fn of(name: &str) -> ReplicaView {
        ReplicaView { name: name.to_owned(), ..ReplicaView::default() }
    }

    pub fn phase(&self) -> wire::state::Phase {
        match (&self.replica, &self.state) {
            (_, Some(state)) => state.phase(),
            (Some(_), None) => wire::state::Phase::Ready,
            (None, None) => wire::state::Phase::Unspecified,
        }
    }

    /// Returns how many tokens of a request its ranks have room for.
    pub fn room(&self) -> u32 {
        self.state.as_ref().map_or(u32::MAX, room)
    }

    /// Returns the newest protocol that its coordinator, its ranks and this router speak.
    pub fn protocol(&self) -> u32 {
        let met = self.replica.as_ref().map_or(0, |replica| replica.protocol);
        // A build of protocol 1 does not report what its ranks speak.
        self.state.as_ref().map_or(met, |state| state.protocol.max(proto::OLDEST).min(met))
    }

    /// Whether there are no machines for its ranks.
    pub fn is_unplaced(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.unplaced.is_some())
    }

    /// Returns the replica in its present incarnation, and whether it is ready.
    pub fn serving(&self) -> Option<(Arc<ReplicaInfo>, bool)> {
        self.replica.clone().map(|replica| (replica, self.is_ready()))
    }

    /// Whether the replica has reported what it serves, or that it does not serve now.
    pub fn is_known(&self) -> bool {
        use wire::state::Phase;
        self.replica.is_some() || !matches!(self.phase(), Phase::Unspecified | Phase::Ready)
    }

    pub fn is_ready(&self) -> bool {
        self.replica.is_some() && self.phase() == wire::state::Phase::Ready && !self.is_suspected
    }
}
