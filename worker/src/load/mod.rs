//! The sources of a rank's part of the model: files on this machine, a fetch from the coordinator, or the weights that
//! the last rank kept.

pub(crate) mod draft_weights;
pub mod fetch;
mod kept_matchers;
pub mod packed_cache;
pub(crate) mod reading;
pub mod scrub;
pub mod source;
pub(crate) mod vocabulary;
pub mod weight_cache;
