//! Which versions of the routes no replica serves, as after a slip in a name. Their requests go elsewhere without an
//! error, so the operator needs a warning. Knows no requests.

use crate::link::versions::ServedVersion;
use crate::replicas::models::routes::RouteTable;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// A version is reported when it has been missed this long: replicas come and go, and a router that starts knows none.
const MISSED_MAX: Duration = Duration::from_secs(10);

/// The versions that are missed now, by the route's name and the version as it is written there.
#[derive(Default)]
pub struct UnservedVersions(BTreeMap<(String, String), MissedVersion>);

struct MissedVersion {
    since: Instant,
    is_reported: bool,
}

/// A change of one version of a name, reported once.
#[derive(Debug, PartialEq, Eq)]
pub struct RouteChange {
    pub name: String,
    pub version: String,
    pub is_served: bool,
    /// A served version that may have been meant.
    pub like: Option<String>,
}

impl UnservedVersions {
    /// Compares the routes with what replicas serve. A version that is to get nothing is not missed.
    pub fn update_missed(&mut self, table: &RouteTable, versions: &[ServedVersion], now: Instant) -> Vec<RouteChange> {
        let routed = table.iter().flat_map(|(name, shares)| shares.iter().map(move |share| (name, share)));
        let missed = routed.filter(|(_, share)| share.weight > 0 && share.of.pick_version(versions).is_none());
        let missed: BTreeMap<_, _> =
            missed.map(|(name, share)| ((name.clone(), share.of.to_string()), share)).collect();
        let mut changes = Vec::new();
        self.0.retain(|of, before| {
            let is_missed = missed.contains_key(of);
            if !is_missed && before.is_reported {
                let (name, version) = of.clone();
                changes.push(RouteChange { name, version, is_served: true, like: None });
            }
            is_missed
        });
        for ((name, version), share) in missed {
            let of = (name.clone(), version.clone());
            let before = self.0.entry(of).or_insert(MissedVersion { since: now, is_reported: false });
            if !before.is_reported && now.duration_since(before.since) >= MISSED_MAX {
                before.is_reported = true;
                changes.push(RouteChange { name, version, is_served: false, like: share.of.similar_version(versions) });
            }
        }
        changes
    }
}
