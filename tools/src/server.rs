//! A running server, for commands that inspect it: JSON over HTTP, with a key. Has no knowledge of the pages' contents.

use crate::server_trust::ServerTrust;
use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use serde_json::Value;
use std::time::Duration;

/// The router that receives the requests.
#[derive(Args, Clone)]
pub struct RouterArgs {
    /// HTTP address of a router
    #[arg(long, env = "LOCKSTEP_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// API key, if the router requires one
    #[arg(long, env = "LOCKSTEP_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    #[command(flatten)]
    pub trust: ServerTrust,
}

/// The limit of a page's size. No cluster's page is longer.
const PAGE_BYTES_MAX: u64 = 16 << 20;
/// The limit of the number of pages. The pages of a larger cluster are cut off here.
const PAGES_MAX: usize = 1000;
const ANSWER_MAX: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct RunningServer {
    agent: ureq::Agent,
    look: RouterArgs,
}

impl RunningServer {
    pub fn new(look: RouterArgs) -> anyhow::Result<RunningServer> {
        let url = &look.url;
        ensure!(
            url.starts_with("http://") || url.starts_with("https://"),
            "--url {url} is not a server's address: give one such as http://127.0.0.1:8000"
        );
        let config = ureq::Agent::config_builder().timeout_global(Some(ANSWER_MAX)).http_status_as_error(false);
        Ok(RunningServer { agent: look.trust.agent(config)?, look })
    }

    pub fn url(&self) -> &str {
        self.look.url.trim_end_matches('/')
    }

    /// Returns the current state of the cluster, all pages together.
    pub fn cluster(&self) -> anyhow::Result<Value> {
        let page = |from: u64| self.get(&format!("/cluster?from={from}"));
        let mut all = page(0)?;
        let mut next = all["next"].as_u64();
        for _ in 1..PAGES_MAX {
            let Some(from) = next else { break };
            let mut more = page(from)?;
            next = more["next"].as_u64();
            let lists = [&mut all, &mut more].map(|of| of.get_mut("replicas").and_then(Value::as_array_mut));
            if let [Some(replicas), Some(more)] = lists {
                replicas.append(more);
            }
        }
        Ok(all)
    }

    /// Returns the JSON at a path.
    pub fn get(&self, path: &str) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.url());
        let mut request = self.agent.get(&url);
        if let Some(key) = &self.look.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().map_err(|error| self.no_answer_error(error))?;
        let text = response.body_mut().with_config().limit(PAGE_BYTES_MAX).read_to_string();
        let text = text.with_context(|| format!("{url} ended its answer early"))?;
        let page = serde_json::from_str::<Value>(&text);
        if !response.status().is_success() {
            bail!("{}", refusal_message(&url, response.status().as_u16(), page.ok()));
        }
        page.with_context(|| format!("{url} does not answer with JSON: is it a Lockstep router?"))
    }

    fn no_answer_error(&self, error: ureq::Error) -> anyhow::Error {
        let why = match error {
            ureq::Error::Io(error) => error.to_string(),
            ureq::Error::Timeout(_) => format!("no answer within {} s", ANSWER_MAX.as_secs()),
            other => other.to_string(),
        };
        anyhow!("no server answers at {}: {why}. `lockstep serve` starts one, --url names another", self.url())
    }
}

fn refusal_message(url: &str, status: u16, page: Option<Value>) -> String {
    let page = page.unwrap_or_default();
    let error_message = page["error"]["message"].as_str().or(page["message"].as_str()).or(page["error"].as_str());
    match (status, error_message) {
        (401, Some(message)) => format!("{url}: {message}: give it with --api-key, or as LOCKSTEP_API_KEY"),
        (404, None) => format!("{url}: there is no such page: is it a Lockstep router of this version?"),
        (_, Some(message)) => format!("{url}: {message}"),
        (status, None) => format!("{url} answers with status {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn refusal_has_server_message_and_advice() {
        let check =
            |status, page: Value, expect: &str| assert_eq!(refusal_message("http://h", status, Some(page)), expect);
        let unknown = json!({ "error": { "message": "this server does not know the API key" } });
        let expected =
            "http://h: this server does not know the API key: give it with --api-key, or as LOCKSTEP_API_KEY";
        check(401, unknown, expected);
        check(403, json!({ "error": "no" }), "http://h: no");
        check(500, json!({}), "http://h answers with status 500");
        check(404, json!({}), "http://h: there is no such page: is it a Lockstep router of this version?");
    }
}
