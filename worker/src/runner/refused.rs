//! Logs refused peers of this worker: one line per address, and then none for a while. Has no knowledge of why a peer
//! is refused.

use collective::RefusedPeer;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use wire::refusals::Refusals;

/// The most reasons in one address's line.
const REASONS_MAX: usize = 4;

pub fn log_refusals(refused: &[RefusedPeer], refusals: &Refusals) {
    for AddressRefusals { from, n, reasons } in group_by_address(refused) {
        let why = reasons.join("; ");
        if let Some(unsaid) = refusals.admit(from, n, &why) {
            let (unsaid, last_unsaid) = (unsaid.count(), unsaid.last);
            tracing::warn!(peer = %from, n, why, unsaid, last_unsaid, "a rank is refused");
        }
    }
}

/// The refusals of one address.
#[derive(Debug, PartialEq, Eq)]
struct AddressRefusals {
    /// The last refused peer.
    from: SocketAddr,
    n: u64,
    reasons: Vec<String>,
}

fn group_by_address(refused: &[RefusedPeer]) -> Vec<AddressRefusals> {
    let mut knocks: BTreeMap<IpAddr, AddressRefusals> = BTreeMap::new();
    for RefusedPeer { from, why } in refused {
        let of_address = knocks.entry(from.ip()).or_insert(AddressRefusals { from: *from, n: 0, reasons: Vec::new() });
        let reason = why.to_string();
        (of_address.from, of_address.n) = (*from, of_address.n + 1);
        if of_address.reasons.len() < REASONS_MAX && !of_address.reasons.contains(&reason) {
            of_address.reasons.push(reason);
        }
    }
    knocks.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use collective::JoinRefusal;
    use types::Epoch;

    #[test]
    fn an_address_has_one_line_with_its_reasons() {
        let one = |port| SocketAddr::from(([10, 0, 0, 1], port));
        let other = SocketAddr::from(([10, 0, 0, 2], 9));
        let early = |n| JoinRefusal::Early { ours: Epoch::default(), theirs: Epoch { incarnation: 0, n } };
        let mut refused = vec![
            RefusedPeer { from: one(1), why: JoinRefusal::Garbage },
            RefusedPeer { from: other, why: JoinRefusal::Silence },
            RefusedPeer { from: one(2), why: JoinRefusal::Silence },
            RefusedPeer { from: one(3), why: JoinRefusal::Garbage },
        ];
        let [garbage, silence] = [JoinRefusal::Garbage, JoinRefusal::Silence].map(|why| why.to_string());
        let expected = [
            AddressRefusals { from: one(3), n: 3, reasons: vec![garbage, silence.clone()] },
            AddressRefusals { from: other, n: 1, reasons: vec![silence] },
        ];
        assert_eq!(group_by_address(&refused), expected);
        refused.extend((1..20).map(|n| RefusedPeer { from: other, why: early(n) }));
        let knocks = group_by_address(&refused);
        assert_eq!((knocks[1].n, knocks[1].reasons.len()), (20, REASONS_MAX));
    }
}
