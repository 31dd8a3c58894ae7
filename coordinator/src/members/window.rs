//! How each rank spent its time between two looks, from the counters that it reports.

use proto::cluster as wire;
use types::Micros;

#[derive(Default)]
pub(crate) struct TimeWindow {
    since: Micros,
    from: wire::Heartbeat,
    in_flight_from: u64,
    pub last: wire::RankTimes,
}

impl TimeWindow {
    pub fn close(&mut self, beat: &wire::Heartbeat, now: Micros, in_flight: u64) -> wire::RankTimes {
        let grown = heartbeat_growth(&self.from, beat);
        let wall_micros = now.since(self.since).0;
        let (compute_micros, wait_micros) = scale_to_window(wall_micros, grown.compute_micros, grown.wait_micros);
        self.last = wire::RankTimes {
            steps: grown.steps_done,
            wall_micros,
            compute_micros,
            wait_micros,
            idle_micros: wall_micros - compute_micros - wait_micros,
            in_flight_micros: in_flight.saturating_sub(self.in_flight_from).min(wall_micros),
        };
        (self.since, self.from, self.in_flight_from) = (now, *beat, in_flight);
        self.last
    }
}

/// A long step is counted at its end, and may have begun in the window before: its parts are scaled to the window.
fn scale_to_window(wall: u64, compute: u64, wait: u64) -> (u64, u64) {
    let busy = compute.saturating_add(wait);
    if busy <= wall {
        return (compute, wait);
    }
    let scaled = (u128::from(compute) * u128::from(wall) / u128::from(busy)) as u64;
    (scaled, wall - scaled)
}

/// The growth of the counters from one heartbeat to another.
pub(crate) fn heartbeat_growth(from: &wire::Heartbeat, to: &wire::Heartbeat) -> wire::Heartbeat {
    wire::Heartbeat {
        steps_done: to.steps_done.saturating_sub(from.steps_done),
        compute_micros: to.compute_micros.saturating_sub(from.compute_micros),
        idle_micros: to.idle_micros.saturating_sub(from.idle_micros),
        wait_micros: to.wait_micros.saturating_sub(from.wait_micros),
        ..*to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_window_fill_no_more_than_it() {
        assert_eq!(scale_to_window(100, 30, 20), (30, 20));
        assert_eq!(scale_to_window(100, 120, 80), (60, 40));
        assert_eq!(scale_to_window(100, 0, 300), (0, 100));
        assert_eq!(scale_to_window(0, 5, 5), (0, 0));
    }
}
