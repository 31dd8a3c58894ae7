//! Groups replicas into versions: those of one model name and one policy digest. Knows no requests and no weights.

use crate::board::pick::{VersionId, fnv};
use crate::link::view::{ReplicaInfo, ReplicaView};
use std::sync::Arc;
use types::PolicyDigest;

/// The version that a replica serves.
pub fn version_of(replica: &ReplicaInfo) -> VersionId {
    // Names and digests come from the operator, and there are few: no stronger hash is needed.
    VersionId(fnv(replica.digest.0.iter().chain(replica.model.as_bytes())))
}

#[derive(Clone, Debug)]
pub struct ServedVersion {
    pub id: VersionId,
    /// A replica that serves it: the first that is ready, or else the first.
    pub replica: Arc<ReplicaInfo>,
    pub n_ready: usize,
    pub n_replicas: usize,
}

impl ServedVersion {
    pub fn digest(&self) -> PolicyDigest {
        self.replica.digest
    }

    pub fn model(&self) -> &str {
        &self.replica.model
    }

    pub fn is_ready(&self) -> bool {
        self.n_ready > 0
    }
}

/// The ready version that most replicas have, and of equals the first.
pub fn most_common<'a>(versions: impl DoubleEndedIterator<Item = &'a ServedVersion>) -> Option<&'a ServedVersion> {
    // Of equals, `max_by_key` takes the last.
    versions.rev().filter(|version| version.is_ready()).max_by_key(|version| version.n_replicas)
}

/// All versions, in the order in which their first replicas came.
pub fn versions(views: &[ReplicaView]) -> Arc<[ServedVersion]> {
    let mut versions: Vec<ServedVersion> = Vec::new();
    for view in views {
        let Some(replica) = &view.replica else { continue };
        let id = version_of(replica);
        let known = versions.iter_mut().find(|version| version.id == id);
        match known {
            Some(version) => {
                if view.is_ready() && version.n_ready == 0 {
                    version.replica = replica.clone();
                }
                version.n_replicas += 1;
                version.n_ready += usize::from(view.is_ready());
            }
            None => {
                let n_ready = usize::from(view.is_ready());
                versions.push(ServedVersion { id, replica: replica.clone(), n_ready, n_replicas: 1 });
            }
        }
    }
    versions.into()
}
