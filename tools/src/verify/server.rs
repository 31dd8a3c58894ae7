//! The server that answers again: a plain client of its HTTP API. Has no knowledge of answers.

use crate::server_trust::ServerTrust;
use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use types::Token;
use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;

pub struct VerifyClient {
    agent: ureq::Agent,
    url: String,
    key: Option<String>,
}

/// Enough for an answer of any length, on any machine.
const ANSWER_MAX: Duration = Duration::from_secs(3600);
/// The size limit of a reply. No real reply is longer.
const REPLY_BYTES_MAX: u64 = 256 << 20;
/// The interval and the number of checks whether the server is ready: a large model takes minutes.
const READY_POLL: Duration = Duration::from_millis(20);
const READY_POLLS_MAX: u32 = 30_000;

/// One token at a position: its text, and its logprob.
pub struct TokenScore {
    pub text: String,
    pub logprob: f64,
}

fn agent_config() -> ConfigBuilder<AgentScope> {
    ureq::Agent::config_builder().timeout_global(Some(ANSWER_MAX)).http_status_as_error(false)
}

impl VerifyClient {
    pub fn from_url(url: &str, key: Option<String>) -> VerifyClient {
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        VerifyClient { agent: agent_config().build().into(), url, key }
    }

    /// Returns the same server, whose certificate must be signed by the given authority.
    pub fn trusting(self, trust: &ServerTrust) -> anyhow::Result<VerifyClient> {
        Ok(VerifyClient { agent: trust.agent(agent_config())?, ..self })
    }

    /// Returns the server at this address, which requires no key, when it is ready.
    pub fn ready_at(address: SocketAddr) -> anyhow::Result<VerifyClient> {
        let server = VerifyClient::from_url(&format!("http://{address}"), None);
        server.wait_until_ready()?;
        Ok(server)
    }

    fn wait_until_ready(&self) -> anyhow::Result<()> {
        for _ in 0..READY_POLLS_MAX {
            let ready = self.agent.get(format!("{}/ready", self.url)).call();
            if ready.is_ok_and(|reply| reply.status().is_success()) {
                return Ok(());
            }
            std::thread::sleep(READY_POLL);
        }
        bail!("the model was not ready in time")
    }

    /// Returns the digests of the served policies, each as its first hexadecimal digits.
    pub fn digests(&self) -> anyhow::Result<Vec<String>> {
        let cluster = self.get("/cluster")?;
        let versions = cluster["models"].as_array().into_iter().flatten().map(|model| &model["versions"]);
        let all = versions.filter_map(Value::as_array).flatten();
        Ok(all.filter_map(|version| version["policy_digest"].as_str().map(str::to_owned)).collect())
    }

    /// Returns the server's record of an answer.
    pub fn record(&self, id: &str) -> anyhow::Result<Value> {
        let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        ensure!(is_id, "{id} is not an id of an answer either");
        self.get(&format!("/records/{id}"))
    }

    fn get(&self, path: &str) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.url);
        let mut http_request = self.agent.get(&url);
        if let Some(key) = &self.key {
            http_request = http_request.header("authorization", format!("Bearer {key}"));
        }
        self.read_json(http_request.call(), &url)
    }

    pub fn post(&self, path: &str, request: &Value) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.url);
        let mut http_request = self.agent.post(&url).content_type("application/json");
        if let Some(key) = &self.key {
            http_request = http_request.header("authorization", format!("Bearer {key}"));
        }
        self.read_json(http_request.send(request.to_string()), &url)
    }

    /// Scores the last of these tokens after the others.
    pub fn score(&self, model: Option<&Value>, tokens: &[Token]) -> anyhow::Result<TokenScore> {
        let mut request = json!({ "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0 });
        if let Some(model) = model {
            request["model"] = model.clone();
        }
        let reply = self.post("/v1/completions", &request)?;
        let scores = reply["choices"][0]["prompt_logprobs"].as_array().and_then(|all| all.last());
        let score = scores.zip(tokens.last()).map(|(score, last)| &score[last.to_string()]);
        let logprob = score.and_then(|score| score["logprob"].as_f64()).context("the reply has no logprob")?;
        let text = score.and_then(|score| score["decoded_token"].as_str()).unwrap_or_default().to_owned();
        Ok(TokenScore { text, logprob })
    }

    fn read_json(
        &self,
        reply: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
        url: &str,
    ) -> anyhow::Result<Value> {
        let mut reply = reply.with_context(|| format!("{url} does not answer"))?;
        let text = reply.body_mut().with_config().limit(REPLY_BYTES_MAX).read_to_string()?;
        if !reply.status().is_success() {
            bail!("{url} answers with {}: {text}", reply.status());
        }
        serde_json::from_str(&text).with_context(|| format!("{url} does not answer with JSON"))
    }
}
