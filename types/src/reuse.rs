//! How far the prefix cache served a prompt, and why no further.

/// Where the reuse of a prompt ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixReuse {
    /// Why no more was reused. None until the cache was read.
    pub ended: Option<ReuseEnd>,
    /// The position where reuse ended, or up to which the cache had more: a multiple of a block.
    pub position: u32,
    /// How many of the reused tokens came from a tier behind the pools: host memory or disk.
    pub fetched: u32,
}

/// Why no more of a prompt came from the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReuseEnd {
    /// All of its full blocks came from there, as far as any may: one token is always computed.
    Whole,
    /// No request has computed its beginning, or it has no full block.
    FirstUse,
    /// The next block differs from all that was computed behind this prefix.
    Differs,
    /// The blocks are there up to the position, and there is no state of a recurrence to go on from.
    StateNotKept,
    /// The next block was there, and its room was needed.
    Evicted,
    /// The prompt's beginning belongs to another tenant or salt; nothing is shared with those.
    OtherOwner,
    /// The request forbids reading the cache, or needs rows that a hit would skip.
    Bypassed,
    /// The request neither reads nor fills the cache.
    Apart,
    /// There is no prefix cache.
    Off,
    /// A tier behind the pools should have the next block, and it did not come: its page was late, gone or damaged, or
    /// was expected to take longer than computing it.
    NotFetched,
}

impl ReuseEnd {
    pub const ALL: [ReuseEnd; 10] = [
        ReuseEnd::Whole,
        ReuseEnd::FirstUse,
        ReuseEnd::Differs,
        ReuseEnd::StateNotKept,
        ReuseEnd::Evicted,
        ReuseEnd::OtherOwner,
        ReuseEnd::Bypassed,
        ReuseEnd::Apart,
        ReuseEnd::Off,
        ReuseEnd::NotFetched,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            ReuseEnd::Whole => "whole",
            ReuseEnd::FirstUse => "first_use",
            ReuseEnd::Differs => "differs",
            ReuseEnd::StateNotKept => "state_not_kept",
            ReuseEnd::Evicted => "evicted",
            ReuseEnd::OtherOwner => "other_owner",
            ReuseEnd::Bypassed => "bypassed",
            ReuseEnd::Apart => "apart",
            ReuseEnd::Off => "off",
            ReuseEnd::NotFetched => "not_fetched",
        }
    }

    /// Returns the same as the request's own client may see it: a client may not learn that another sent the same
    /// prompt.
    #[must_use]
    pub const fn for_client(self) -> ReuseEnd {
        match self {
            ReuseEnd::OtherOwner => ReuseEnd::FirstUse,
            own => own,
        }
    }
}
