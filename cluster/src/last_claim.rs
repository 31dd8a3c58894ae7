//! The last claim of a replica, and the sign that ends connections to the holder of an earlier claim.

use crate::state::{Member, MemberChange, MemberWatch};
use std::collections::BTreeMap;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The coordinator with a replica's last claim, as the store has it.
#[derive(Clone, Debug)]
pub struct LastClaim {
    pub incarnation: u64,
    pub address: String,
    /// Cancelled when a coordinator at another address has claimed the replica later. A coordinator without a
    /// connection to the store cannot see this, and would keep workers that the later one needs.
    pub superseded: CancellationToken,
}

/// The claims that connections may have been made under, by address.
#[derive(Debug, Default)]
struct Claims(BTreeMap<String, (u64, CancellationToken)>);

impl Claims {
    /// Ends connections to the coordinator of an earlier claim at another address. A store that was restored may return
    /// an earlier claim: that ends no connection. A coordinator that is started again at its address ends none either.
    fn apply(&mut self, member: Member) -> LastClaim {
        let Member { incarnation, registration } = member;
        let address = registration.address;
        self.0.retain(|other, (earlier, superseded)| {
            let is_superseded = *other != address && *earlier < incarnation;
            if is_superseded {
                superseded.cancel();
            }
            !is_superseded
        });
        let (known, superseded) = self.0.entry(address.clone()).or_default();
        *known = incarnation;
        LastClaim { incarnation, address, superseded: superseded.clone() }
    }
}

/// Follows a replica's last claim; waits until there is one. A vanished entry changes nothing: an open stream counts
/// more, and the next coordinator registers its own.
pub async fn follow_last_claim(mut members: MemberWatch, replica: String) -> watch::Receiver<LastClaim> {
    let mut claims = Claims::default();
    let (last_claim_tx, last_claim_rx) = watch::channel(claims.apply(next(&mut members, &replica).await));
    tokio::spawn(async move {
        loop {
            let member = tokio::select! {
                biased;
                () = last_claim_tx.closed() => break,
                member = next(&mut members, &replica) => member,
            };
            let last = claims.apply(member);
            if last_claim_tx.borrow().address != last.address {
                let LastClaim { address, incarnation, .. } = &last;
                tracing::info!(replica, address, incarnation, "the coordinator of this replica has moved");
            }
            last_claim_tx.send_replace(last);
        }
    });
    last_claim_rx
}

async fn next(members: &mut MemberWatch, replica: &str) -> Member {
    loop {
        match members.next().await {
            MemberChange::Is(name, member) if name == replica => return member,
            MemberChange::Is(..) | MemberChange::Gone(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Registration;

    #[test]
    fn only_a_later_claim_at_another_address_ends_connections() {
        let member = |incarnation, address: &str| Member {
            incarnation,
            registration: Registration { address: address.into(), ..Registration::default() },
        };
        let check = |news: &[(u64, &str)], now: (u64, &str), is_superseded: bool| {
            let mut claims = Claims::default();
            let mut last = claims.apply(member(5, "a:1"));
            let before = last.superseded.clone();
            news.iter().for_each(|(incarnation, address)| last = claims.apply(member(*incarnation, address)));
            assert_eq!((last.incarnation, last.address.as_str()), now, "{news:?}");
            assert_eq!(before.is_cancelled(), is_superseded, "{news:?}");
            assert!(!last.superseded.is_cancelled(), "{news:?}");
        };
        check(&[(6, "b:1")], (6, "b:1"), true);
        check(&[(5, "a:1")], (5, "a:1"), false);
        // Started again in its place: its connections have ended by themselves.
        check(&[(7, "a:1")], (7, "a:1"), false);
        check(&[(7, "a:1"), (8, "b:1")], (8, "b:1"), true);
        // From a store that was restored: the coordinator that serves registers again.
        check(&[(3, "old:1")], (3, "old:1"), false);
        check(&[(3, "old:1"), (5, "a:1")], (5, "a:1"), false);
        check(&[(3, "old:1"), (5, "a:1"), (6, "b:1")], (6, "b:1"), true);
    }
}
