//! Keeps one claim: takes the name, registers under a lease, and registers again whenever etcd shows another value. The
//! incarnation stays the same until a later claim.

use super::keys::{claim_value, incarnation, member_value, read_claim};
use super::line::{Failed, Line, Pause};
use super::written::{Next, REWRITE_MIN, Written};
use crate::Error;
use crate::claim::ClaimLost;
use crate::state::{ClaimHolder, Registration, State};
use etcd_client::{Client, Compare, CompareOp, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse};
use std::convert::Infallible;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep};
use tokio_util::sync::CancellationToken;

/// A round fails only if it has found another claim, which is rare.
const ROUNDS_MAX: usize = 8;

/// A name that was taken.
pub(super) struct Taken {
    pub incarnation: u64,
    holder: String,
    address: String,
    /// The value that was written under the claim's key.
    record: Vec<u8>,
}

/// Takes a name from its holder. Waits while etcd is away.
pub(super) async fn take(line: &Line, replica: &str, address: &str) -> Result<Taken, Error> {
    let holder = new_holder();
    let mut pause = Pause::new(&line.waits);
    let mut is_told = false;
    loop {
        match try_take(line, replica, address, &holder).await {
            Ok(Some(taken)) => return Ok(taken),
            // Another coordinator was faster.
            Ok(None) => {}
            Err(Failed::Refused(why)) => return Err(Error::Refused(why)),
            Err(failed) if !std::mem::replace(&mut is_told, true) => {
                tracing::warn!(replica, why = %Error::from(failed), "the claim waits for the store");
            }
            Err(_) => {}
        }
        pause.wait().await;
    }
}

async fn try_take(line: &Line, replica: &str, address: &str, holder: &str) -> Result<Option<Taken>, Failed> {
    let key = line.keys.claim(replica);
    let key = key.as_str();
    let before = line.call(|mut client| async move { client.get(key, None).await }).await?;
    let (seen, floor) = match before.kvs().first() {
        Some(entry) => {
            let held = read_claim(entry.value(), entry.mod_revision());
            if held.holder == holder {
                // An earlier attempt succeeded, although its answer was lost.
                return Ok(Some(taken(held.incarnation, holder, address, entry.value().to_vec())));
            }
            (entry.mod_revision(), held.incarnation)
        }
        None => (0, 0),
    };
    let record = claim_value(holder, address, floor);
    let txn = Txn::new().when([Compare::mod_revision(key, CompareOp::Equal, seen)]).and_then([TxnOp::put(
        key,
        record.clone(),
        None,
    )]);
    let done = transact(line, &txn).await?;
    Ok(done.succeeded().then(|| taken(incarnation(revision(&done), floor), holder, address, record)))
}

fn taken(incarnation: u64, holder: &str, address: &str, record: Vec<u8>) -> Taken {
    Taken { incarnation, holder: holder.into(), address: address.into(), record }
}

/// Makes a unique name for this claim.
fn new_holder() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:016x}", since.as_micros(), RandomState::new().build_hasher().finish())
}

async fn transact(line: &Line, txn: &Txn) -> Result<TxnResponse, Failed> {
    let ask = |mut client: Client| {
        let txn = txn.clone();
        async move { client.txn(txn).await }
    };
    line.call(ask).await
}

fn revision(done: &TxnResponse) -> i64 {
    done.header().map_or(0, |header| header.revision())
}

pub(super) struct Keeper {
    line: Arc<Line>,
    state: watch::Receiver<State>,
    says: watch::Receiver<Registration>,
    lost: watch::Sender<Option<ClaimLost>>,
    replica: String,
    taken: Taken,
    lease: Option<i64>,
    written: Written,
    /// Whether the log already has a line that the claim is not kept.
    is_told: bool,
}

/// Why a registration no longer stands.
enum Ended {
    Lost(ClaimLost),
    Failed(Failed),
}

impl From<Failed> for Ended {
    fn from(failed: Failed) -> Ended {
        Ended::Failed(failed)
    }
}

impl Keeper {
    pub fn new(
        line: Arc<Line>,
        state: watch::Receiver<State>,
        says: watch::Receiver<Registration>,
        lost: watch::Sender<Option<ClaimLost>>,
        replica: &str,
        taken: Taken,
    ) -> Keeper {
        let (replica, written) = (replica.to_owned(), Written::default());
        Keeper { line, state, says, lost, replica, taken, lease: None, written, is_told: false }
    }

    /// Runs until `end` or a later claim; then deletes its entry.
    pub async fn run(mut self, end: CancellationToken) {
        if let Some(lost) = end.run_until_cancelled(self.keep()).await {
            tracing::error!(replica = self.replica, by = lost.by, ours = lost.ours, theirs = lost.theirs, "claim lost");
            self.lost.send_replace(Some(lost));
        }
        if let Some(lease) = self.lease {
            // If etcd is away, the entry lapses with its lease.
            let _away = self.line.call(|mut client| async move { client.lease_revoke(lease).await }).await;
        }
    }

    async fn keep(&mut self) -> ClaimLost {
        let mut pause = Pause::new(&self.line.waits);
        loop {
            let failed = match self.hold(&mut pause).await {
                Ended::Lost(lost) => return lost,
                Ended::Failed(failed) => failed,
            };
            if failed == Failed::LeaseGone {
                tracing::info!(replica = self.replica, "the lease has ended: a new one under the same incarnation");
                self.lease = None;
            } else if !std::mem::replace(&mut self.is_told, true) {
                tracing::warn!(replica = self.replica, why = %Error::from(failed), "the registration is not kept");
            }
            pause.wait().await;
        }
    }

    /// Registers, and keeps the registration up until that fails.
    async fn hold(&mut self, pause: &mut Pause) -> Ended {
        let failed = async {
            let lease = self.lease().await?;
            self.register(lease).await?;
            pause.reset();
            self.is_told = false;
            self.stay(lease).await
        };
        match failed.await {
            Ok(never) => match never {},
            Err(ended) => ended,
        }
    }

    async fn lease(&mut self) -> Result<i64, Ended> {
        if let Some(lease) = self.lease {
            return Ok(lease);
        }
        Ok(*self.lease.insert(self.line.grant().await?))
    }

    async fn stay(&mut self, lease: i64) -> Result<Infallible, Ended> {
        let every = self.line.waits.beat_every;
        let mut beats = interval_at(Instant::now() + every, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            match self.next(&mut beats).await {
                Next::Beat => self.line.keep_alive(lease).await?,
                Next::Write => self.register(lease).await?,
                Next::Amiss => {
                    sleep(REWRITE_MIN).await;
                    self.register(lease).await?;
                }
            }
        }
    }

    async fn next(&mut self, beats: &mut Interval) -> Next {
        let member = self.line.keys.member(&self.replica);
        let is_amiss = |state: &State| {
            let holds = state.held.get(&self.replica).is_some_and(|held| held.holder == self.taken.holder);
            self.written.precedes(state) && !(holds && self.written.stands(&member, state))
        };
        tokio::select! {
            _ = beats.tick() => Next::Beat,
            Ok(()) = self.says.changed() => Next::Write,
            Ok(_) = self.state.wait_for(is_amiss) => Next::Amiss,
        }
    }

    /// Writes the registration, in a transaction that checks the holder of the claim.
    async fn register(&mut self, lease: i64) -> Result<(), Ended> {
        let (claim, member) = (self.line.keys.claim(&self.replica), self.line.keys.member(&self.replica));
        for _ in 0..ROUNDS_MAX {
            let listings = self.state.borrow().listings;
            let value = member_value(self.taken.incarnation, &self.says.borrow_and_update());
            let txn = Txn::new()
                .when([Compare::value(claim.as_str(), CompareOp::Equal, self.taken.record.clone())])
                .and_then([TxnOp::put(member.as_str(), value, Some(PutOptions::new().with_lease(lease)))])
                .or_else([TxnOp::get(claim.as_str(), None)]);
            let done = transact(&self.line, &txn).await?;
            if done.succeeded() {
                self.written = Written::at(done.header(), listings);
                return Ok(());
            }
            self.contest(&claim, found(&done)).await?;
        }
        Err(Ended::Failed(Failed::Away("the claim changes all the time".into())))
    }

    /// Handles a claim's key that has another value than the one written there. A later claim ends this one; if there
    /// is none, etcd has lost the value, and it is written again.
    async fn contest(&mut self, key: &str, found: Option<KeyValue>) -> Result<(), Ended> {
        let held = found.as_ref().map(|entry| read_claim(entry.value(), entry.mod_revision()));
        let Taken { incarnation: ours, holder, address, .. } = &self.taken;
        if let Some(ClaimHolder { incarnation: theirs, address: by, .. }) =
            held.filter(|held| held.incarnation >= *ours && held.holder != *holder)
        {
            return Err(Ended::Lost(ClaimLost { replica: self.replica.clone(), by, ours: *ours, theirs }));
        }
        let seen = found.map_or(0, |entry| entry.mod_revision());
        let record = claim_value(holder, address, ours.saturating_sub(1));
        let txn = Txn::new().when([Compare::mod_revision(key, CompareOp::Equal, seen)]).and_then([TxnOp::put(
            key,
            record.clone(),
            None,
        )]);
        let done = transact(&self.line, &txn).await?;
        if done.succeeded() {
            tracing::warn!(replica = self.replica, incarnation = ours, "etcd had forgotten the claim");
            self.taken.record = record;
        }
        Ok(())
    }
}

fn found(done: &TxnResponse) -> Option<KeyValue> {
    done.op_responses().into_iter().find_map(|response| match response {
        TxnOpResponse::Get(got) => got.kvs().first().cloned(),
        _ => None,
    })
}
