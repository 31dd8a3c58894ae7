//! The workers: who is there, what each says of itself, and what follows from it of who hangs, is slow or is not
//! reached. Knows no requests.

mod distrusted;
pub mod hangs;
pub mod patience;
pub mod ranks;
pub mod slow;
pub mod unreachable;
mod window;
pub mod workers;
