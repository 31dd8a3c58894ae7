//! Where a rank's part of the model comes from: its own files, a coordinator that lends them, or what the rank before
//! has kept.

pub mod fetch;
pub mod kept;
pub(crate) mod reading;
pub mod source;
