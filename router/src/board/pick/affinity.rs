//! Requests of a session go to the same replica, from every router and without a table of sessions: replicas are ranked
//! by a hash of session and replica, so that a replica that comes or goes moves only its own sessions. A replica with
//! far more work than the others is passed over. A request without a session is placed by `prefix`.

use crate::board::pick::hash::scatter;
use crate::board::pick::prefix;
use crate::board::pick::row::{OpenReplicas, PickInfo};

pub fn pick(open: &OpenReplicas, info: &PickInfo) -> Option<usize> {
    let Some(session) = info.session else { return prefix::pick(open, info) };
    let load = open.loads.iter().map(|load| u128::from(*load)).sum::<u128>();
    let mean = load.checked_div(open.len() as u128)?;
    // The limit is a quarter above the mean, and one prompt: an idle replica is not passed over for having just one
    // request.
    let load_max = mean + mean / 4 + u128::from(info.n_prompt);
    let able = (0..open.len()).filter(|&at| u128::from(open.loads[at]) <= load_max);
    able.max_by_key(|&at| scatter(session ^ scatter(open.ids[at])))
}
