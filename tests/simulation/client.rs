//! Clients: each sends a request, reads to the end, continues at another router when a stream breaks, and compares the
//! answer with the reference. Has no knowledge of the cluster beyond its routers.

use crate::net::channel;
use crate::record::Record;
use crate::rules::{Broken, Rules};
use crate::script::{Host, PlannedCall, ROUTERS};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::inference_client::InferenceClient;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use tonic::Status;
use tonic::transport::Channel;
use types::Tokens;

/// Pause of a client before another attempt.
const BACKOFF: Duration = Duration::from_millis(200);

pub fn millis() -> u64 {
    turmoil::sim_elapsed().unwrap_or_default().as_millis() as u64
}

/// Makes all calls of one client, at their times. Returns when the last has ended.
pub async fn play(client: usize, rules: Arc<Rules>, record: Record) -> turmoil::Result {
    let channels: Vec<Channel> = (0..ROUTERS).map(|router| channel(&Host::Router(router).name())).collect();
    let mut calls = tokio::task::JoinSet::new();
    for (number, plan) in rules.script.calls.iter().enumerate().filter(|(_, planned)| planned.client == client) {
        let call = Call {
            number,
            plan: plan.clone(),
            rules: rules.clone(),
            record: record.clone(),
            channels: channels.clone(),
            got: Tokens::new(),
            handle: None,
        };
        calls.spawn(call.run());
    }
    while let Some(ended) = calls.join_next().await {
        ended?;
    }
    Ok(())
}

struct Call {
    number: usize,
    plan: PlannedCall,
    rules: Arc<Rules>,
    record: Record,
    channels: Vec<Channel>,
    got: Tokens,
    handle: Option<String>,
}

enum Ended {
    Finished(Box<v1::Finished>),
    /// The client has enough tokens.
    Left,
}

impl Call {
    fn name(&self) -> String {
        format!("call {}", self.number)
    }

    async fn run(mut self) {
        self.record.seen().open.insert(self.number);
        sleep(Duration::from_millis(self.plan.at_millis)).await;
        let mut router = self.plan.router;
        loop {
            let begun_millis = millis();
            let handle = self.handle.clone();
            let ended = self.attempt(router).await;
            let status = match ended {
                Ok(Ended::Finished(finished)) => break self.finished(&finished),
                Ok(Ended::Left) => break self.record.count("left"),
                Err(status) => status,
            };
            let has_begun = self.handle != handle;
            self.record.note(&self.name(), format!("at router {router}: {:?}, begun: {has_begun}", status.code()));
            let broken = Broken { begun_millis, at_millis: millis(), router, has_begun, status };
            if let Err(why) = self.rules.judge(&self.plan, &broken) {
                let (name, status) = (self.name(), &broken.status);
                self.record.violation(format!("{name}: {why}: {:?} {}", status.code(), status.message()));
                break;
            }
            if broken.is_deadline() {
                self.record.count("deadline");
                break;
            }
            self.record.count("tried again");
            sleep(BACKOFF).await;
            router = (router + 1) % ROUTERS;
        }
        self.record.note(&self.name(), format!("ends with {} tokens", self.got.len()));
        let mut seen = self.record.seen();
        seen.open.remove(&self.number);
        seen.ended_millis.insert(self.number, millis());
    }

    fn request(&self) -> v1::GenerateRequest {
        let resume = self.handle.clone().map(|handle| v1::Resume { handle, position: self.got.len() as u32 });
        let left = |deadline: u64| (self.plan.at_millis + deadline).saturating_sub(millis()).max(1);
        let deadline_ms = self.plan.deadline_millis.map_or(0, left) as u32;
        v1::GenerateRequest { resume, deadline_ms, ..self.plan.request() }
    }

    async fn attempt(&mut self, router: usize) -> Result<Ended, Status> {
        let mut client = InferenceClient::new(self.channels[router].clone());
        if self.handle.is_some() {
            self.record.count("resumed");
        }
        let mut replies = client.generate(self.request()).await?.into_inner();
        while let Some(reply) = replies.message().await? {
            match reply.event {
                Some(Event::Started(started)) => self.handle = started.resume.map(|resume| resume.handle),
                Some(Event::Delta(delta)) => self.take(&delta),
                Some(Event::Finished(finished)) => return Ok(Ended::Finished(Box::new(finished))),
                Some(Event::PromptLogprobs(_) | Event::PromptProgress(_)) | None => {
                    self.violation("an unrequested event")
                }
            }
            if self.plan.leaves_at.is_some_and(|n_tokens| self.got.len() >= n_tokens) {
                return Ok(Ended::Left);
            }
        }
        Err(Status::data_loss("the stream ended without an end"))
    }

    /// Checks that each index arrives once, in order, with the reference's token.
    fn take(&mut self, delta: &v1::Delta) {
        self.record.note(&self.name(), format!("at {}: {:?}", delta.position, delta.token_ids));
        if !delta.token_ids.is_empty() && delta.position as usize != self.got.len() {
            self.violation(&format!("tokens from {} on, behind {}", delta.position, self.got.len()));
        }
        self.got.extend(&delta.token_ids);
        let (reference, _) = self.plan.reference(&self.rules.script.sim);
        if !reference.starts_with(&self.got) {
            self.violation(&format!("{:?} is not what the reference begins with: {reference:?}", self.got));
        }
    }

    fn finished(&mut self, finished: &v1::Finished) {
        self.record.count("finished");
        let (reference, reason) = self.plan.reference(&self.rules.script.sim);
        if self.got != reference {
            self.violation(&format!("it ends behind {:?}, the reference has {reference:?}", self.got));
        }
        if finished.reason() != reason {
            self.violation(&format!("it ends by {:?} and not by {reason:?}", finished.reason()));
        }
        let usage = finished.usage.unwrap_or_default();
        let expected = (self.plan.prompt.len() as u32, reference.len() as u32);
        if (usage.prompt_tokens, usage.completion_tokens) != expected {
            self.violation(&format!("usage {usage:?}, and it was {expected:?}"));
        }
    }

    fn violation(&self, what: &str) {
        self.record.violation(format!("{}: {what}", self.name()));
    }
}
