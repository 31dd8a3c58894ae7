//! Replicas by what they serve: those of one name and one policy digest are a version. Knows no requests, no weights.

use crate::link::{Replica, View};
use crate::pick::VersionId;
use std::sync::Arc;
use types::PolicyDigest;

/// Of which version a replica is.
pub fn version_of(replica: &Replica) -> VersionId {
    // FNV-1a: names and digests are the operator's, and there are few of them.
    let bytes = replica.digest.0.iter().chain(replica.model.as_bytes());
    let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    VersionId(bytes.fold(0xcbf2_9ce4_8422_2325, hash))
}

#[derive(Clone, Debug)]
pub struct Version {
    pub id: VersionId,
    /// One that serves it: the first that is ready, or else the first.
    pub replica: Arc<Replica>,
    pub n_ready: usize,
    pub n_replicas: usize,
}

impl Version {
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

/// In the order in which they came.
pub fn versions(views: &[View]) -> Arc<[Version]> {
    let mut versions: Vec<Version> = Vec::new();
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
                versions.push(Version { id, replica: replica.clone(), n_ready, n_replicas: 1 });
            }
        }
    }
    versions.into()
}
