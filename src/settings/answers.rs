//! The settings for finished answers: which are recorded, and which are run again.

use super::ByteSize;
use anyhow::ensure;
use clap::{ArgAction, Args};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The least bytes of a file: a smaller one would have no room for a long answer.
const FILE_BYTES_MIN: u64 = 64 << 10;

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AnswerSettings {
    /// Folder in which the server records finished answers, as JSON lines, for `lockstep verify` and `lockstep replay`
    ///
    /// Each has its certificate, sampling and seed, and a hash of the client's key.
    #[arg(long, env = "LOCKSTEP_RECORD", value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// Also record tokens of prompts and answers, stop strings and grammars, which `verify` and `replay` need
    #[arg(
        long, env = "LOCKSTEP_RECORD_PROMPTS", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub record_prompts: bool,
    /// Maximum bytes of all files of --record; the oldest files are removed
    #[arg(long, env = "LOCKSTEP_RECORD_BYTES", value_name = "SIZE", default_value = "1GiB")]
    pub record_bytes: ByteSize,
    /// Maximum number of files of --record, each with its share of the bytes
    #[arg(long, env = "LOCKSTEP_RECORD_FILES", value_name = "N", default_value_t = 16)]
    pub record_files: u32,
    /// Share of finished answers, from 0 to 1, that an idle replica computes again, to compare the tokens
    ///
    /// It is another replica if there is one. The log and a metric report each difference.
    #[arg(long, env = "LOCKSTEP_AUDIT", value_name = "RATIO", default_value_t = 0.0)]
    pub audit: f64,
}

impl AnswerSettings {
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(self.record_files >= 2, "--record-files {} is less than 2", self.record_files);
        let of_file = self.record_bytes.0 / u64::from(self.record_files);
        ensure!(
            of_file >= FILE_BYTES_MIN,
            "--record-bytes {} in {} files are less than 64 KiB for each",
            self.record_bytes,
            self.record_files
        );
        ensure!(self.record.is_some() || !self.record_prompts, "--record-prompts needs --record DIR");
        ensure!((0.0..=1.0).contains(&self.audit), "--audit is {}; it must be from 0 to 1", self.audit);
        Ok(())
    }

    pub fn record(&self) -> Option<router::RecordConfig> {
        let of = |dir: &PathBuf| router::RecordConfig {
            dir: dir.clone(),
            prompts: self.record_prompts,
            bytes_max: self.record_bytes.0,
            files_max: self.record_files,
        };
        self.record.as_ref().map(of)
    }

    /// Turns both off, for a server without answers to record.
    pub fn turn_off(&mut self) {
        (self.record, self.record_prompts, self.audit) = (None, false, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ServeSettings;
    use super::super::tests::parse_settings;

    #[test]
    fn a_record_has_a_place_and_room() {
        let check = |words: &str, part: Option<&str>| {
            let message = parse_settings::<ServeSettings>(words).resolved().err().map(|error| error.to_string());
            assert_eq!(message.is_some(), part.is_some(), "{words}: {message:?}");
            assert!(message.is_none_or(|text| text.contains(part.unwrap_or_default())), "{words}");
        };
        check("--record records --record-prompts --record-bytes 1MiB", None);
        check("--record-prompts", Some("--record DIR"));
        check("--record records --record-bytes 1MiB --record-files 17", Some("64 KiB"));
        check("--record records --record-files 1", Some("less than 2"));
        check("--audit 0.01", None);
        check("--audit 1.5", Some("it must be from 0 to 1"));
        check("--audit NaN", Some("it must be from 0 to 1"));
        let kept =
            parse_settings::<ServeSettings>("--record r --record-bytes 8MiB --record-files 4").router.answers.record();
        let kept = kept.unwrap();
        assert_eq!((kept.bytes_max, kept.files_max, kept.prompts), (8 << 20, 4, false));
    }
}
