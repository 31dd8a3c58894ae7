//! The one refusal for what the types can express and nothing serves yet.

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not supported yet")]
pub struct Unsupported(pub &'static str);
