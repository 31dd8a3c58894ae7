//! The keys and their values: JSON, so that `etcdctl get --prefix` is readable.

use crate::state::{ClaimHolder, Member, Registration};
use crate::{addresses, check_name};
use serde::{Deserialize, Serialize};

/// A longer value is no registration.
const VALUE_BYTES_MAX: usize = 64 << 10;

#[derive(Clone, Debug)]
pub(super) struct EtcdKeys {
    /// Ends with a slash.
    pub root: String,
}

/// The entry that a key belongs to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StoreEntry<'a> {
    Claim(&'a str),
    Member(&'a str),
    Post(&'a str),
}

/// A claim's incarnation is the revision at which it was written, but higher than that of the claim before it, even if
/// etcd has lost its data and counts from the start.
#[derive(Debug, Serialize, Deserialize)]
struct ClaimRecord {
    holder: String,
    address: String,
    /// The incarnation is higher than this.
    floor: u64,
}

#[derive(Serialize, Deserialize)]
struct MemberRecord {
    incarnation: u64,
    #[serde(flatten)]
    registration: Registration,
}

impl EtcdKeys {
    pub fn under(prefix: &str) -> EtcdKeys {
        EtcdKeys { root: format!("{}/", prefix.trim_end_matches('/')) }
    }

    pub fn claim(&self, replica: &str) -> String {
        format!("{}claims/{replica}", self.root)
    }

    pub fn member(&self, replica: &str) -> String {
        format!("{}members/{replica}", self.root)
    }

    pub fn post(&self, name: &str) -> String {
        format!("{}posts/{name}", self.root)
    }

    /// None for keys that others may have put there.
    pub fn entry<'a>(&self, key: &'a [u8]) -> Option<StoreEntry<'a>> {
        let key = std::str::from_utf8(key).ok()?.strip_prefix(&self.root)?;
        let (kind, name) = key.split_once('/')?;
        check_name(name).ok()?;
        match kind {
            "claims" => Some(StoreEntry::Claim(name)),
            "members" => Some(StoreEntry::Member(name)),
            "posts" => Some(StoreEntry::Post(name)),
            _ => None,
        }
    }
}

pub(super) fn claim_value(holder: &str, address: &str, floor: u64) -> Vec<u8> {
    let record = ClaimRecord { holder: holder.into(), address: address.into(), floor };
    serde_json::to_vec(&record).expect("strings and numbers are JSON")
}

/// A claim that cannot be read has no holder, but still a revision.
pub(super) fn read_claim(value: &[u8], revision: i64) -> ClaimHolder {
    let record = reject_oversized(value).and_then(|value| serde_json::from_slice(value).ok());
    let unknown = || ClaimRecord { holder: String::new(), address: "unknown".into(), floor: 0 };
    let ClaimRecord { holder, address, floor } = record.unwrap_or_else(unknown);
    ClaimHolder { incarnation: incarnation(revision, floor), holder, address }
}

pub(super) fn incarnation(revision: i64, floor: u64) -> u64 {
    revision.unsigned_abs().max(floor.saturating_add(1))
}

pub(super) fn member_value(incarnation: u64, registration: &Registration) -> Vec<u8> {
    let record = MemberRecord { incarnation, registration: registration.clone() };
    serde_json::to_vec(&record).expect("strings and numbers are JSON")
}

pub(super) fn read_member(value: &[u8]) -> Option<Member> {
    let MemberRecord { incarnation, registration } = serde_json::from_slice(reject_oversized(value)?).ok()?;
    addresses::is_address(&registration.address).then_some(Member { incarnation, registration })
}

pub(super) fn read_post(value: &[u8]) -> Option<String> {
    String::from_utf8(reject_oversized(value)?.to_vec()).ok()
}

fn reject_oversized(value: &[u8]) -> Option<&[u8]> {
    (value.len() <= VALUE_BYTES_MAX).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let keys = EtcdKeys::under("/here/");
        assert_eq!(keys.member("a"), "/here/members/a");
        assert_eq!(keys.entry(keys.member("a:1").as_bytes()), Some(StoreEntry::Member("a:1")));
        assert_eq!(keys.entry(keys.claim("b").as_bytes()), Some(StoreEntry::Claim("b")));
        for foreign in ["/here/members/", "/here/members/a/b", "/here/other/a", "/there/members/a"] {
            assert_eq!(keys.entry(foreign.as_bytes()), None, "{foreign}");
        }
        let registration = Registration { address: "h:1".into(), tp: 2, ..Registration::default() };
        let member = Member { incarnation: 9, registration };
        assert_eq!(read_member(&member_value(9, &member.registration)), Some(member));
        for bad in ["", "{}", "{\"incarnation\": 1, \"address\": \"x\"}", "[1]"] {
            assert_eq!(read_member(bad.as_bytes()), None, "{bad}");
        }
        let long =
            format!("{{\"incarnation\": 1, \"address\": \"h:1\", \"model\": {:?}}}", "x".repeat(VALUE_BYTES_MAX));
        assert_eq!(read_member(long.as_bytes()), None);
    }

    #[test]
    fn incarnations_grow_though_etcd_counts_from_the_start() {
        let first = read_claim(&claim_value("a", "h:1", 0), 40);
        assert_eq!((first.incarnation, first.holder.as_str()), (40, "a"));
        let second = read_claim(&claim_value("b", "h:2", first.incarnation), 3);
        assert_eq!(second.incarnation, 41);
        // A restored claim keeps its incarnation.
        assert_eq!(read_claim(&claim_value("a", "h:1", 39), 5).incarnation, 40);
        assert_eq!(read_claim(b"nonsense", 7).incarnation, 7);
    }
}
