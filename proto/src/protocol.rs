//! Which protocols a build speaks, and the one at which two builds meet. Knows no frame that comes behind a hello.

use crate::cluster as wire;
use std::fmt;

/// The protocol of the frames as they are now. `DESIGN.md` lists the changes that are allowed within one number.
pub const NEWEST: u32 = 2;
/// The oldest protocol that is still spoken: at least the one before `NEWEST`, so that a cluster can be rolled.
pub const OLDEST: u32 = 1;
/// The frames of builds that sent only their version.
const BEFORE_NUMBERS: u32 = 1;

/// Features that came with a number: a build before it would ignore them. Each is sent only where the number that was
/// met is at least that.
pub mod since {
    /// A request's grammar, and answers and ends that only a request with one can have.
    pub const GRAMMARS: u32 = 2;
    /// The sampler guesses tokens, and slices have drafts.
    pub const GUESSES: u32 = 2;
    /// A rank is ready before all of its KV cache has memory, and reports how much has.
    pub const KV_PARTS: u32 = 2;
    /// A request that fills no cache, as an audit's.
    pub const APART: u32 = 2;
    /// The logprobs of tokens that a request names.
    pub const NAMED_LOGPROBS: u32 = 2;
    /// Penalties that look at the last tokens only.
    pub const PENALTY_WINDOWS: u32 = 2;
    /// All that a request can use.
    pub const NEWEST_OF_REQUESTS: u32 = 2;
}

/// Returns the protocol that this request's features need.
pub fn needed(request: &types::Request) -> u32 {
    let names_tokens = !request.sampling.logprob_token_ids.is_empty();
    let by = [
        (request.grammar.is_some(), since::GRAMMARS),
        (request.cache_apart, since::APART),
        (names_tokens, since::NAMED_LOGPROBS),
        (request.sampling.penalties.window > 0, since::PENALTY_WINDOWS),
    ];
    by.into_iter().filter_map(|(has_it, number)| has_it.then_some(number)).max().unwrap_or(OLDEST)
}

/// A build, and the range of protocols that it speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtocolRange {
    pub version: String,
    /// Absent for a build from before protocols had numbers.
    pub protocols: Option<wire::Protocols>,
}

/// Two builds that have no protocol in common.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no protocol in common: this is {ours}, the peer is {theirs}")]
pub struct NoCommonProtocol {
    pub ours: ProtocolRange,
    pub theirs: ProtocolRange,
}

impl Default for ProtocolRange {
    /// The range of this build.
    fn default() -> Self {
        ProtocolRange::of(crate::VERSION, Some(wire::Protocols { oldest: OLDEST, newest: NEWEST }))
    }
}

impl ProtocolRange {
    /// This build with no protocol newer than this: it behaves towards every peer as an older build.
    pub fn up_to(newest: u32) -> ProtocolRange {
        ProtocolRange::of(crate::VERSION, Some(wire::Protocols { oldest: OLDEST.min(newest), newest }))
    }

    /// Whether it supports the features of this number.
    pub fn knows(&self, number: u32) -> bool {
        self.protocols.map_or(BEFORE_NUMBERS, |protocols| protocols.newest) >= number
    }

    pub fn of(version: &str, protocols: Option<wire::Protocols>) -> ProtocolRange {
        ProtocolRange { version: version.to_owned(), protocols }
    }

    /// The newest protocol that both speak. A build from before numbers understands only builds of its own version.
    pub fn newest_common(&self, theirs: ProtocolRange) -> Result<u32, NoCommonProtocol> {
        let is_same_version = self.version == theirs.version;
        let met = match (self.protocols, theirs.protocols) {
            (Some(ours), Some(theirs)) => common(ours, theirs),
            (Some(numbered), None) | (None, Some(numbered)) => {
                let before = wire::Protocols { oldest: BEFORE_NUMBERS, newest: BEFORE_NUMBERS };
                common(numbered, before).filter(|_| is_same_version)
            }
            (None, None) => is_same_version.then_some(BEFORE_NUMBERS),
        };
        met.ok_or_else(|| NoCommonProtocol { ours: self.clone(), theirs })
    }
}

fn common(ours: wire::Protocols, theirs: wire::Protocols) -> Option<u32> {
    let (oldest, newest) = (ours.oldest.max(theirs.oldest), ours.newest.min(theirs.newest));
    (oldest <= newest).then_some(newest)
}

impl fmt::Display for ProtocolRange {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Quoted, because it comes from the peer.
        write!(to, "version {:?}, which speaks ", self.version)?;
        match self.protocols {
            None => write!(to, "protocols without a number"),
            Some(wire::Protocols { oldest, newest }) if oldest == newest => write!(to, "protocol {newest}"),
            Some(wire::Protocols { oldest, newest }) => write!(to, "protocols {oldest} to {newest}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speaks(version: &str, oldest: u32, newest: u32) -> ProtocolRange {
        ProtocolRange::of(version, Some(wire::Protocols { oldest, newest }))
    }

    #[test]
    fn two_builds_meet_at_the_newest_protocol_that_both_speak() {
        let check = |ours: (u32, u32), theirs: (u32, u32), met: Option<u32>| {
            let (ours, theirs) = (speaks("1.0.0", ours.0, ours.1), speaks("1.1.0", theirs.0, theirs.1));
            assert_eq!(ours.newest_common(theirs.clone()).ok(), met, "{ours} and {theirs}");
            assert_eq!(theirs.newest_common(ours.clone()).ok(), met, "{theirs} and {ours}");
        };
        check((3, 4), (4, 5), Some(4));
        check((3, 4), (3, 4), Some(4));
        check((1, 9), (3, 4), Some(4));
        check((4, 4), (4, 4), Some(4));
        check((3, 3), (4, 5), None);
        check((1, 2), (4, 5), None);
        // A range without anything in it.
        check((5, 2), (1, 9), None);
        check((0, 0), (1, 9), None);
    }

    #[test]
    fn a_build_without_numbers_understands_its_own_version_alone() {
        let check = |ours: &ProtocolRange, version: &str, met: Option<u32>| {
            assert_eq!(ours.newest_common(ProtocolRange::of(version, None)).ok(), met, "{ours} and {version}");
        };
        check(&speaks("1.0.0", 1, 2), "1.0.0", Some(1));
        check(&speaks("1.0.0", 1, 2), "1.0.1", None);
        check(&speaks("1.0.0", 2, 3), "1.0.0", None);
        check(&ProtocolRange::of("1.0.0", None), "1.0.0", Some(1));
        check(&ProtocolRange::of("1.0.0", None), "1.0.1", None);
    }

    #[test]
    fn a_refusal_names_both_versions_and_both_ranges() {
        let refusal = speaks("1.4.0", 4, 5).newest_common(speaks("1.2.0", 2, 2)).unwrap_err();
        let ours = "no protocol in common: this is version \"1.4.0\", which speaks protocols 4 to 5";
        assert_eq!(refusal.to_string(), format!("{ours}, the peer is version \"1.2.0\", which speaks protocol 2"));
        let old = speaks("1.4.0", 4, 5).newest_common(ProtocolRange::of("0.9", None)).unwrap_err();
        assert!(old.to_string().ends_with("the peer is version \"0.9\", which speaks protocols without a number"));
    }

    #[test]
    fn this_build_speaks_a_range_and_understands_itself() {
        assert_eq!(ProtocolRange::default().newest_common(ProtocolRange::default()), Ok(NEWEST));
    }
}
