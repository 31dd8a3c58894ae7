//! Picks one replica after the other, whatever their work: for measurements, and where all requests are alike.

use crate::board::pick::row::{OpenReplicas, PickInfo};

pub fn pick(open: &OpenReplicas, info: &PickInfo) -> Option<usize> {
    info.n_before.checked_rem(open.len() as u64).map(|turn| turn as usize)
}
