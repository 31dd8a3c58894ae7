//! The protocol that a role uses with other roles. Has no knowledge of frames.

use clap::Args;
use proto::{NEWEST, OLDEST, ProtocolRange};
use serde::{Deserialize, Serialize};

#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProtocolSettings {
    /// Newest protocol version to use with other roles [default: the newest that this build knows]
    ///
    /// Features of newer versions stay off. An upgrade can so keep its new features off until every role has been
    /// replaced.
    #[arg(
        long, env = "LOCKSTEP_PROTOCOL_MAX", value_name = "N",
        value_parser = clap::value_parser!(u32).range(i64::from(OLDEST)..=i64::from(NEWEST))
    )]
    pub protocol_max: Option<u32>,
}

impl ProtocolSettings {
    pub fn speaks(&self) -> ProtocolRange {
        self.protocol_max.map_or_else(ProtocolRange::default, ProtocolRange::up_to)
    }
}
