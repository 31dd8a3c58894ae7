//! An answer that is read event by event, and continues at the next router if its stream breaks off. Knows the events
//! of `lockstep.v1`, and no address.
//!
//! `Started` has a handle. With it and the number of tokens that were read, any router of the cluster sends the rest.
//! If nothing was read yet, the request is sent again as it was.

use crate::connect::LockstepClient;
use crate::v1::generate_reply::Event;
use crate::v1::{Delta, GenerateReply, GenerateRequest, Resume, Started};
use std::error::Error;
use std::time::{Duration, Instant};
use tonic::{Code, Status, Streaming};

/// The wait before the first retry. It doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// The events of one answer.
pub struct AnswerStream {
    client: LockstepClient,
    /// What the next call sends: from `Started` on, it resumes the stream.
    request: GenerateRequest,
    deadline: Option<Instant>,
    /// Present while a router sends the answer.
    replies: Option<Streaming<GenerateReply>>,
    /// The number of the router that the next call goes to.
    router: usize,
    has_started: bool,
    has_prompt_logprobs: bool,
    n_unfinished: u32,
    /// The breaks since the last new token.
    n_breaks: u32,
    retries_max: u32,
}

impl AnswerStream {
    pub(crate) fn new(client: LockstepClient, request: GenerateRequest, retries_max: u32) -> AnswerStream {
        let deadline = Duration::from_millis(request.deadline_ms.into());
        AnswerStream {
            client,
            deadline: (!deadline.is_zero()).then(|| Instant::now() + deadline),
            replies: None,
            router: 0,
            has_started: false,
            has_prompt_logprobs: false,
            n_unfinished: request.n.max(1),
            n_breaks: 0,
            retries_max,
            request,
        }
    }

    /// Returns the next event, as if the stream had never broken off. None after the last `Finished`. Several choices
    /// in one stream (`n`) cannot be resumed: their stream ends with an error if it breaks off behind `Started`.
    pub async fn next_event(&mut self) -> Result<Option<Event>, Status> {
        while self.n_unfinished > 0 {
            match self.read().await {
                Ok(event) => {
                    if let Some(event) = self.record(event) {
                        return Ok(Some(event));
                    }
                }
                Err(status) => self.recover(status).await?,
            }
        }
        Ok(None)
    }

    async fn read(&mut self) -> Result<Event, Status> {
        let replies = match self.replies.take() {
            Some(replies) => replies,
            None => {
                let request = GenerateRequest { deadline_ms: self.deadline_ms()?, ..self.request.clone() };
                self.client.router(self.router).generate(request).await?.into_inner()
            }
        };
        let reply = self.replies.insert(replies).message().await?;
        let reply = reply.ok_or_else(|| Status::unavailable("the stream ended before the answer did"))?;
        reply.event.ok_or_else(|| Status::unimplemented("the router sent an event that this client does not know"))
    }

    /// Returns what is left of the deadline; zero for none.
    fn deadline_ms(&self) -> Result<u32, Status> {
        let Some(deadline) = self.deadline else { return Ok(0) };
        match deadline.saturating_duration_since(Instant::now()).as_millis() {
            0 => Err(Status::deadline_exceeded("the request's deadline has passed")),
            left => Ok(u32::try_from(left).unwrap_or(u32::MAX)),
        }
    }

    /// Records what has been read. Returns None for an event that the caller has already.
    fn record(&mut self, event: Event) -> Option<Event> {
        match &event {
            Event::Started(started) => {
                self.record_handle(started);
                return (!std::mem::replace(&mut self.has_started, true)).then_some(event);
            }
            Event::PromptLogprobs(_) => {
                return (!std::mem::replace(&mut self.has_prompt_logprobs, true)).then_some(event);
            }
            Event::PromptProgress(_) => {}
            Event::Delta(Delta { position, token_ids, .. }) => {
                if let Some(resume) = &mut self.request.resume {
                    resume.position = position + token_ids.len() as u32;
                }
                self.n_breaks = 0;
            }
            Event::Finished(_) => self.n_unfinished = self.n_unfinished.saturating_sub(1),
        }
        Some(event)
    }

    /// The handle of a resumed stream names the replica that serves it now.
    fn record_handle(&mut self, started: &Started) {
        let Some(handle) = &started.resume else { return };
        let position = self.request.resume.as_ref().map_or(0, |resume| resume.position);
        self.request.resume = Some(Resume { handle: handle.handle.clone(), position });
    }

    /// Waits until the next call may be made. Returns the error if there can be none.
    async fn recover(&mut self, status: Status) -> Result<(), Status> {
        self.replies = None;
        let is_resumable = !self.has_started || self.request.resume.is_some();
        if !is_break(&status) || !is_resumable || self.n_breaks >= self.retries_max {
            // A further read would send the request again.
            self.n_unfinished = 0;
            return Err(status);
        }
        tokio::time::sleep(pause(self.n_breaks)).await;
        self.n_breaks += 1;
        self.router += 1;
        Ok(())
    }
}

/// Whether the connection or the router was lost. All other errors are the cluster's answer to the request.
fn is_break(status: &Status) -> bool {
    // A status that a router has sent has no source.
    status.code() == Code::Unavailable || (status.source().is_some() && status.code() != Code::DeadlineExceeded)
}

fn pause(n_breaks: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << n_breaks.min(16)).min(PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit() {
        let all: Vec<u128> = [0, 1, 2, 5, 6, 1000].map(|n| pause(n).as_millis()).into();
        assert_eq!(all, [50, 100, 200, 1600, 2000, 2000]);
    }

    #[test]
    fn only_lost_connections_and_routers_are_breaks() {
        assert!(is_break(&Status::unavailable("draining")));
        for status in [Status::invalid_argument("x"), Status::resource_exhausted("full"), Status::unknown("x")] {
            assert!(!is_break(&status), "{status}");
        }
        let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(is_break(&Status::from_error(Box::new(lost))));
    }
}
