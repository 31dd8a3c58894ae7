//! `verify` and `replay`: run an answer, or all answers of a record, again on a server, and compare. They use only the
//! HTTP API, and do not start the server.

mod answer;
mod compare;
mod past;
pub mod replay;
mod server;

pub use compare::Verdict;
pub use past::PastAnswer;

use crate::out;
use crate::server_trust::ServerTrust;
use anyhow::Context;
use clap::Args;
use compare::rerun_and_compare;
use server::VerifyClient;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use telemetry::logs;

const URL: &str = "http://127.0.0.1:8000";

#[derive(Args)]
pub struct VerifyOptions {
    /// JSON file with the request and its response, or the id of an answer that was recorded
    #[arg(index = 1, value_name = "FILE|ID")]
    pub answer: String,
    /// Running server to use, if no MODEL is given [default: http://127.0.0.1:8000]
    #[arg(long, env = "LOCKSTEP_URL")]
    pub url: Option<String>,
    #[command(flatten)]
    pub trust: ServerTrust,
}

/// The exit codes. `INCOMPARABLE` stands for everything that prevents a comparison.
const EQUAL: u8 = 0;
const DIFFERENT: u8 = 1;
const INCOMPARABLE: u8 = 2;

/// Prints the result and returns the exit code. There is no verdict if only the settings were to be printed.
pub fn exit_code(verdict: anyhow::Result<Option<Verdict>>) -> ExitCode {
    let code = match verdict {
        Ok(None) => EQUAL,
        Ok(Some(verdict)) => {
            out::print_last_line(&verdict.to_string());
            if matches!(verdict, Verdict::Equal { .. }) { EQUAL } else { DIFFERENT }
        }
        Err(error) => {
            logs::write_line(&format!("lockstep: cannot be compared: {}", out::error_text(&error)));
            INCOMPARABLE
        }
    };
    code.into()
}

impl VerifyOptions {
    /// Runs the answer again on the server at `--url`. `records` is the folder of `--record`.
    pub fn verdict_of_running(&self, key: Option<String>, records: Option<&Path>) -> anyhow::Result<Verdict> {
        let server = VerifyClient::from_url(self.url.as_deref().unwrap_or(URL), key).trusting(&self.trust)?;
        rerun_and_compare(&self.find_past_answer(records, Some(&server))?, &server)
    }

    /// Returns the answer from a file or from a folder of records.
    pub fn past_answer(&self, records: Option<&Path>) -> anyhow::Result<PastAnswer> {
        self.find_past_answer(records, None)
    }

    /// Returns the recorded answer: from a file, from a folder of records, or from the server's record.
    fn find_past_answer(&self, records: Option<&Path>, server: Option<&VerifyClient>) -> anyhow::Result<PastAnswer> {
        let (id, file) = (&self.answer, Path::new(&self.answer));
        if file.exists() {
            return PastAnswer::read(file);
        }
        if let Some(dir) = records {
            let dir_named = || dir.display().to_string();
            let line = router::find_record(dir, id).with_context(dir_named)?;
            let line = line.with_context(|| format!("{} has no record of {id}", dir_named()))?;
            return PastAnswer::parse(&line).with_context(|| format!("the record of {id}"));
        }
        let server =
            server.with_context(|| format!("{id} is not a file; give --record DIR, the folder with its record"))?;
        let record = server.record(id).with_context(|| format!("{id} is not a file"))?;
        PastAnswer::of(&record).with_context(|| format!("the record of {id}"))
    }
}

/// Runs the answer again on a server of one model, when it is ready. The model may have another name there.
pub fn verdict_of_private(past: PastAnswer, address: SocketAddr) -> anyhow::Result<Verdict> {
    let server = VerifyClient::ready_at(address)?;
    rerun_and_compare(&past.without_model(), &server)
}
