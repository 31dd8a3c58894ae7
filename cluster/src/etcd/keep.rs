//! Keeps one claim: takes the name, registers under a lease, and registers again whenever etcd shows another value. The
//! incarnation stays the same until a later claim.

use super::keys::{claim_value, incarnation, member_value, read_claim};
use super::line::{Backoff, CallError, EtcdConnection};
use super::written::{EntryRevision, KeepAction, REWRITE_MIN};
use crate::Error;
use crate::claim::ClaimLost;
use crate::state::{ClaimHolder, Registration, StoreState};
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
pub(super) struct TakenClaim {
    pub incarnation: u64,
    holder: String,
    address: String,
    /// The value that was written under the claim's key.
    record: Vec<u8>,
}

/// Takes a name from its holder. Waits while etcd is away.
pub(super) async fn take_claim(line: &EtcdConnection, replica: &str, address: &str) -> Result<TakenClaim, Error> {
    let holder = new_holder();
    let mut pause = Backoff::new(&line.waits);
    let mut is_logged = false;
    loop {
        match try_take(line, replica, address, &holder).await {
            Ok(Some(taken)) => return Ok(taken),
            // Another coordinator was faster.
            Ok(None) => {}
            Err(CallError::Refused(why)) => return Err(Error::Refused(why)),
            Err(failed) if !std::mem::replace(&mut is_logged, true) => {
                tracing::warn!(replica, why = %Error::from(failed), "the claim waits for the store");
            }
            Err(_) => {}
        }
        pause.wait().await;
    }
}

async fn try_take(
    line: &EtcdConnection,
    replica: &str,
    address: &str,
    holder: &str,
) -> Result<Option<TakenClaim>, CallError> {
    let key = line.keys.claim(replica);
    let key = key.as_str();
    let before = line.call(|mut client| async move { client.get(key, None).await }).await?;
    let (seen, floor) = match before.kvs().first() {
        Some(entry) => {
            let held = read_claim(entry.value(), entry.mod_revision());
            if held.holder == holder {
                // An earlier attempt succeeded, although its answer was lost.
                return Ok(Some(taken_claim(held.incarnation, holder, address, entry.value().to_vec())));
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
    Ok(done.succeeded().then(|| taken_claim(incarnation(revision(&done), floor), holder, address, record)))
}

fn taken_claim(incarnation: u64, holder: &str, address: &str, record: Vec<u8>) -> TakenClaim {
    TakenClaim { incarnation, holder: holder.into(), address: address.into(), record }
}

/// Makes a unique name for this claim.
fn new_holder() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:016x}", since.as_micros(), RandomState::new().build_hasher().finish())
}

async fn transact(line: &EtcdConnection, txn: &Txn) -> Result<TxnResponse, CallError> {
    let request = |mut client: Client| {
        let txn = txn.clone();
        async move { client.txn(txn).await }
    };
    line.call(request).await
}

fn revision(done: &TxnResponse) -> i64 {
    done.header().map_or(0, |header| header.revision())
}

pub(super) struct ClaimKeeper {
    line: Arc<EtcdConnection>,
    state: watch::Receiver<StoreState>,
    registration_rx: watch::Receiver<Registration>,
    lost: watch::Sender<Option<ClaimLost>>,
    replica: String,
    taken: TakenClaim,
    lease: Option<i64>,
    written: EntryRevision,
    /// Whether the log already has a line that the claim is not kept.
    is_logged: bool,
}

/// Why a registration no longer stands.
enum KeepError {
    Lost(ClaimLost),
    Failed(CallError),
}

impl From<CallError> for KeepError {
    fn from(failed: CallError) -> KeepError {
        KeepError::Failed(failed)
    }
}

impl ClaimKeeper {
    pub fn new(
        line: Arc<EtcdConnection>,
        state: watch::Receiver<StoreState>,
        registration_rx: watch::Receiver<Registration>,
        lost: watch::Sender<Option<ClaimLost>>,
        replica: &str,
        taken: TakenClaim,
    ) -> ClaimKeeper {
        let (replica, written) = (replica.to_owned(), EntryRevision::default());
        ClaimKeeper { line, state, registration_rx, lost, replica, taken, lease: None, written, is_logged: false }
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
        let mut pause = Backoff::new(&self.line.waits);
        loop {
            let failed = match self.hold(&mut pause).await {
                KeepError::Lost(lost) => return lost,
                KeepError::Failed(failed) => failed,
            };
            if failed == CallError::LeaseGone {
                tracing::info!(
                    replica = self.replica,
                    "the lease has ended: taking a new one with the same incarnation"
                );
                self.lease = None;
            } else if !std::mem::replace(&mut self.is_logged, true) {
                tracing::warn!(replica = self.replica, why = %Error::from(failed), "the registration cannot be kept");
            }
            pause.wait().await;
        }
    }

    /// Registers, and keeps the registration up until that fails.
    async fn hold(&mut self, pause: &mut Backoff) -> KeepError {
        let failed = async {
            let lease = self.lease().await?;
            self.register(lease).await?;
            pause.reset();
            self.is_logged = false;
            self.stay(lease).await
        };
        match failed.await {
            Ok(never) => match never {},
            Err(ended) => ended,
        }
    }

    async fn lease(&mut self) -> Result<i64, KeepError> {
        if let Some(lease) = self.lease {
            return Ok(lease);
        }
        Ok(*self.lease.insert(self.line.grant().await?))
    }

    async fn stay(&mut self, lease: i64) -> Result<Infallible, KeepError> {
        let every = self.line.waits.beat_every;
        let mut beats = interval_at(Instant::now() + every, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            match self.next(&mut beats).await {
                KeepAction::Beat => self.line.keep_alive(lease).await?,
                KeepAction::Write => self.register(lease).await?,
                KeepAction::Amiss => {
                    sleep(REWRITE_MIN).await;
                    self.register(lease).await?;
                }
            }
        }
    }

    async fn next(&mut self, beats: &mut Interval) -> KeepAction {
        let member = self.line.keys.member(&self.replica);
        let is_amiss = |state: &StoreState| {
            let holds = state.held.get(&self.replica).is_some_and(|held| held.holder == self.taken.holder);
            self.written.precedes(state) && !(holds && self.written.stands(&member, state))
        };
        tokio::select! {
            _ = beats.tick() => KeepAction::Beat,
            Ok(()) = self.registration_rx.changed() => KeepAction::Write,
            Ok(_) = self.state.wait_for(is_amiss) => KeepAction::Amiss,
        }
    }

    /// Writes the registration, in a transaction that checks the holder of the claim.
    async fn register(&mut self, lease: i64) -> Result<(), KeepError> {
        let (claim, member) = (self.line.keys.claim(&self.replica), self.line.keys.member(&self.replica));
        for _ in 0..ROUNDS_MAX {
            let listings = self.state.borrow().listings;
            let value = member_value(self.taken.incarnation, &self.registration_rx.borrow_and_update());
            let txn = Txn::new()
                .when([Compare::value(claim.as_str(), CompareOp::Equal, self.taken.record.clone())])
                .and_then([TxnOp::put(member.as_str(), value, Some(PutOptions::new().with_lease(lease)))])
                .or_else([TxnOp::get(claim.as_str(), None)]);
            let done = transact(&self.line, &txn).await?;
            if done.succeeded() {
                self.written = EntryRevision::at(done.header(), listings);
                return Ok(());
            }
            self.contest(&claim, claim_entry(&done)).await?;
        }
        Err(KeepError::Failed(CallError::Away("the claim keeps changing".into())))
    }

    /// Handles a claim's key that has another value than the one written there. A later claim ends this one; if there
    /// is none, etcd has lost the value, and it is written again.
    async fn contest(&mut self, key: &str, found: Option<KeyValue>) -> Result<(), KeepError> {
        let held = found.as_ref().map(|entry| read_claim(entry.value(), entry.mod_revision()));
        let TakenClaim { incarnation: ours, holder, address, .. } = &self.taken;
        if let Some(ClaimHolder { incarnation: theirs, address: by, .. }) =
            held.filter(|held| held.incarnation >= *ours && held.holder != *holder)
        {
            return Err(KeepError::Lost(ClaimLost { replica: self.replica.clone(), by, ours: *ours, theirs }));
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
            tracing::warn!(replica = self.replica, incarnation = ours, "etcd had lost the claim: it is written again");
            self.taken.record = record;
        }
        Ok(())
    }
}

fn claim_entry(done: &TxnResponse) -> Option<KeyValue> {
    done.op_responses().into_iter().find_map(|response| match response {
        TxnOpResponse::Get(got) => got.kvs().first().cloned(),
        _ => None,
    })
}
