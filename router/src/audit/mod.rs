//! Runs a share of the finished answers again and names what differs: one at a time, and only on replicas that answer
//! no client. Knows tokens, no text and no client.
//!
//! A repeated request is the last in every queue, reads no prefix cache and leaves nothing there. It is cancelled as
//! soon as a client's request comes to its replica.

mod compare;
mod rerun;

use crate::front::finished_answer::{AnswerQueue, AuditShare, FinishedAnswer, QueuedAnswer};
use crate::front::frontend::Frontend;
use compare::first_difference;
use rerun::{RerunOutcome, RerunPlace, Reruns};
use std::sync::Arc;
use telemetry::metrics;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use types::{Token, Tokens};

/// The limits on answers that wait to be run again: their number and their bytes. Answers beyond them are counted and
/// not audited.
const ANSWERS_MAX: usize = 64;
const ANSWERS_BYTES_MAX: usize = 16 << 20;

/// Returns the queue for this share of all answers. `share` is above 0 and at most 1.
pub fn queue(share: f64) -> (AuditShare, mpsc::Receiver<QueuedAnswer>) {
    let (queue, answers) = AnswerQueue::new(ANSWERS_MAX, ANSWERS_BYTES_MAX, || metrics::audit("dropped"));
    (AuditShare::new(queue, share), answers)
}

/// Audits the answers in the queue, until `end`.
pub async fn run(front: Arc<Frontend>, mut answers: mpsc::Receiver<QueuedAnswer>, end: CancellationToken) {
    let reruns = Reruns { replicas: &front.replicas };
    let audit = async {
        while let Some(queued) = answers.recv().await {
            for slot in 0..queued.answer.choices.len() {
                metrics::audit(audit_choice(&reruns, &queued.answer, slot).await.label());
            }
        }
    };
    end.run_until_cancelled(audit).await;
}

/// The outcome of an audit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AuditOutcome {
    /// Equal at another replica.
    Equal,
    /// Equal on the ranks that gave the answer: there was no other replica.
    EqualInPlace,
    Different,
    /// There was no idle capacity for it.
    Dropped,
    /// The replica was lost, or refused.
    Failed,
}

impl AuditOutcome {
    fn label(self) -> &'static str {
        match self {
            AuditOutcome::Equal => "equal",
            AuditOutcome::EqualInPlace => "equal_in_place",
            AuditOutcome::Different => "different",
            AuditOutcome::Dropped => "dropped",
            AuditOutcome::Failed => "failed",
        }
    }
}

async fn audit_choice(reruns: &Reruns<'_>, answer: &Arc<FinishedAnswer>, slot: usize) -> AuditOutcome {
    let original = &answer.choices[slot].tokens;
    if original.is_empty() {
        return AuditOutcome::Dropped;
    }
    let first = RerunPlace { name: answer.replica.name.clone(), on: reruns.ranks_of(&answer.replica.name) };
    let second = match reruns.rerun(answer, slot, &[&first.name]).await {
        RerunOutcome::Finished(tokens, place) => (tokens, place),
        RerunOutcome::Busy => return AuditOutcome::Dropped,
        RerunOutcome::Lost => return AuditOutcome::Failed,
    };
    let Some(position) = first_difference(original, &second.0) else {
        return if second.1.name == first.name { AuditOutcome::EqualInPlace } else { AuditOutcome::Equal };
    };
    let third = reruns.rerun(answer, slot, &[&first.name, &second.1.name]).await;
    report_difference(answer, slot, position, [(original, &first), (&second.0, &second.1)], &third);
    AuditOutcome::Different
}

/// Logs and counts a difference, with all that is known of it.
fn report_difference(
    answer: &FinishedAnswer,
    slot: usize,
    position: usize,
    [(original, first), (repeated, second)]: [(&Tokens, &RerunPlace); 2],
    third: &RerunOutcome,
) {
    let token = |tokens: &Tokens| tokens.get(position).map_or("none".to_owned(), Token::to_string);
    let (third, third_on) = match third {
        RerunOutcome::Finished(tokens, place) => {
            let verdict = match (tokens == original, tokens == repeated) {
                (true, _) => "equals the first",
                (_, true) => "equals the second",
                _ => "equals neither",
            };
            (verdict, format!("{} ({})", place.name, place.on))
        }
        RerunOutcome::Busy | RerunOutcome::Lost => ("not available", String::new()),
    };
    tracing::error!(
        id = answer.id,
        choice = slot,
        position,
        token = token(original),
        replica = first.name,
        on = first.on,
        other_token = token(repeated),
        other_replica = second.name,
        other_on = second.on,
        third,
        third_on,
        "a rerun of an answer has other tokens: a device or its memory may be damaged",
    );
}
