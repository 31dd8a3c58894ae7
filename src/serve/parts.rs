//! Tasks that run side by side and end in order. Has no knowledge of what they do.

use anyhow::Context;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A role's task, and its name in errors.
pub struct RoleTask {
    name: &'static str,
    end: CancellationToken,
    task: Option<JoinHandle<anyhow::Result<()>>>,
}

impl RoleTask {
    /// Starts a task that ends well when `end` is cancelled.
    pub fn start(
        name: &'static str,
        end: CancellationToken,
        role: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) -> RoleTask {
        RoleTask { name, end, task: Some(tokio::spawn(role)) }
    }

    /// Cancel safe: the task is taken out only once it has ended.
    async fn wait(&mut self) -> anyhow::Result<()> {
        let Some(task) = &mut self.task else { return Ok(()) };
        let result = task.await;
        self.task = None;
        result.with_context(|| format!("{} panicked", self.name))?.with_context(|| format!("{} failed", self.name))
    }
}

/// Runs tasks until the first of them ends, and then ends the others one after another.
pub async fn run_all(mut parts: Vec<RoleTask>) -> anyhow::Result<()> {
    let first = poll_fn(|cx| {
        let ended = parts.iter_mut().find_map(|part| match pin!(part.wait()).poll(cx) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        });
        ended.map_or(Poll::Pending, Poll::Ready)
    });
    let mut outcome = first.await;
    for mut part in parts {
        part.end.cancel();
        // The first failure is the cause; the other tasks must end in any case.
        let ended = part.wait().await;
        outcome = outcome.and(ended);
    }
    outcome
}
