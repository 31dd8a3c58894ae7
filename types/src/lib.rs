//! The vocabulary of Lockstep: plain data that every part may speak.
//!
//! Knows nothing of encodings, clocks, sockets, devices or text. What is decided here is decided once: how a
//! block is hashed, where a sum over K is cut, in which order the pieces are added.
#![no_std]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

extern crate alloc;

pub mod block_hash;
pub mod cache;
pub mod certificate;
pub mod dtype;
pub mod grammar;
pub mod grouped;
pub mod guesses;
pub mod id;
pub mod kv;
pub mod layout;
pub mod leaves;
pub mod numerics;
pub mod policy;
pub mod request;
pub mod reuse;
pub mod sampling;
pub mod step;
pub mod tier;
pub mod topology;
pub mod unsupported;
pub mod weights;

pub use block_hash::{BlockHash, CacheOwner, CacheSalt};
pub use cache::{BLOCKS_MAX, CacheGroup, LayerGroups};
pub use certificate::{Hex, TokensHash, TokensHasher};
pub use dtype::{Dtype, Scales};
pub use grammar::Grammar;
pub use grouped::{DigitBits, GroupSize, GroupedDtype, ScaleType};
pub use guesses::NgramLimits;
pub use id::{BlockId, Epoch, Micros, Rank, RequestId, StepId, TenantId, Token, Tokens};
pub use kv::{BLOCK_TOKENS, KV_PARTS, KvLayout, Sharding, blocks_committed, parts_for};
pub use layout::{Layout, RankPart, Shares, Stage};
pub use leaves::Leaves;
pub use numerics::{Activations, DeviceClass, DeviceKind, KvDtype, NumericsMode, UnknownWord};
pub use policy::{Numerics, PolicyDigest};
pub use request::{CacheHint, Goal, Priority, Request, TenantWeight};
pub use reuse::{PrefixReuse, ReuseEnd};
pub use sampling::{Dry, NumberRange, Penalties, Sampling, Xtc};
pub use step::{
    DRAFT_ROWS_MAX, Failure, Finish, GrammarFault, SCORED_ROWS_MAX, Slice, SliceDone, Step, StepDone, TokenLogprob,
    TokenOut, Want,
};
pub use tier::{FetchDone, FetchId, Page, PageFetch, PageKey, TierWork};
pub use topology::{Grid, GridPlace};
pub use unsupported::Unsupported;
pub use weights::{PieceHash, PieceRun, WeightsRoot};
