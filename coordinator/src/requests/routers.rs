//! The attached routers: the requests of each, and the frames for it. Knows nothing of steps or ranks.

use super::names::{BLOCKS_RECITED_MAX, BlockNameChanges};
use crate::outbound::Outbound;
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use proto::since;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use tonic::Status;
use types::{Micros, RequestId};

#[derive(Default)]
pub(crate) struct Routers {
    table: BTreeMap<u32, Router>,
}

struct Router {
    attachment: Attachment,
    /// The protocol that its stream speaks.
    protocol: u32,
    /// Its requests that were accepted and have not ended.
    live: HashSet<RequestId>,
    /// The outputs of the steps since the last flush.
    outputs: Vec<wire::Output>,
    name_cursor: NameCursor,
}

/// How many of the names of cached blocks the router was sent.
#[derive(Default)]
struct NameCursor {
    /// The number of frames with names so far.
    n_frames: u64,
    /// The names of blocks below this one were sent anew. None: it has all.
    recited: Option<u32>,
}

enum Attachment {
    Up {
        frames: Outbound<wire::ReplicaFrame>,
        welcomed: bool,
    },
    /// Its requests go on for a grace period.
    Gone {
        since: Micros,
    },
}

impl Routers {
    pub fn attach(&mut self, router: u32, protocol: u32, frames: Outbound<wire::ReplicaFrame>) {
        let attachment = Attachment::Up { frames, welcomed: false };
        let name_cursor = NameCursor { n_frames: 0, recited: Some(0) };
        let (live, outputs) = (HashSet::new(), Vec::new());
        self.table.insert(router, Router { attachment, protocol, live, outputs, name_cursor });
    }

    pub fn is_attached(&self, router: u32) -> bool {
        matches!(self.table.get(&router), Some(Router { attachment: Attachment::Up { .. }, .. }))
    }

    /// Whether its router has left while the request is still here.
    pub fn is_abandoned(&self, id: RequestId) -> bool {
        let is_left =
            |router: &Router| matches!(router.attachment, Attachment::Gone { .. }) && router.live.contains(&id);
        self.table.get(&id.router()).is_some_and(is_left)
    }

    /// The stream has ended. The router's requests are kept until `forsaken`.
    pub fn gone(&mut self, router: u32, why: Status, now: Micros) {
        let Some(entry) = self.table.get_mut(&router) else { return };
        if let Attachment::Up { frames, .. } = std::mem::replace(&mut entry.attachment, Attachment::Gone { since: now })
        {
            frames.close(why);
        }
        self.forget_if_idle(router);
    }

    /// Forgets the former number of a router that has come back. Returns its requests, whose output has no reader any
    /// more.
    pub fn forget(&mut self, number: u32) -> Vec<RequestId> {
        let Some(router) = self.table.remove(&number) else { return Vec::new() };
        if let Attachment::Up { frames, .. } = router.attachment {
            frames.close(Status::aborted("this router has attached again"));
        }
        sorted(router.live)
    }

    /// Requests whose routers have been gone for longer than the grace period.
    pub fn abandoned_requests(&self, now: Micros, grace_micros: u64) -> Vec<RequestId> {
        let is_over = |router: &&Router| match router.attachment {
            Attachment::Gone { since } => now.since(since).0 >= grace_micros,
            Attachment::Up { .. } => false,
        };
        sorted(self.table.values().filter(is_over).flat_map(|router| router.live.iter().copied()).collect())
    }

    pub fn all_live(&self) -> Vec<RequestId> {
        sorted(self.table.values().flat_map(|router| router.live.iter().copied()).collect())
    }

    pub fn request_accepted(&mut self, id: RequestId) {
        if let Some(router) = self.table.get_mut(&id.router()) {
            router.live.insert(id);
        }
    }

    /// It was accepted, and is refused after all.
    pub fn request_retracted(&mut self, id: RequestId) {
        if let Some(router) = self.table.get_mut(&id.router()) {
            router.live.remove(&id);
            self.forget_if_idle(id.router());
        }
    }

    /// Keeps an output for the next flush.
    pub fn push(&mut self, mut output: wire::Output) {
        let id = RequestId(output.id);
        let Some(router) = self.table.get_mut(&id.router()) else { return };
        let has_ended = output.finish() != wire::Finish::Unspecified;
        if router.protocol < since::GRAMMARS && matches!(output.finish(), wire::Finish::NoToken | wire::Finish::Grammar)
        {
            output.finish = wire::Finish::Failed.into();
        }
        if let Attachment::Up { .. } = router.attachment {
            router.outputs.push(output);
        }
        if has_ended {
            router.live.remove(&id);
            self.forget_if_idle(id.router());
        }
    }

    /// Sends each router one frame with its outputs. Returns the requests of those that leave too much unread: they are
    /// cut off.
    pub fn flush(&mut self) -> Vec<RequestId> {
        let due: Vec<u32> =
            self.table.iter().filter(|(_, router)| !router.outputs.is_empty()).map(|(number, _)| *number).collect();
        due.into_iter().flat_map(|number| self.flush_one(number)).collect()
    }

    fn flush_one(&mut self, number: u32) -> Vec<RequestId> {
        let Some(router) = self.table.get_mut(&number) else { return Vec::new() };
        let outputs = std::mem::take(&mut router.outputs);
        self.send(number, Frame::Outputs(wire::Outputs { outputs }))
    }

    /// Returns the router's requests if its queue is full: they are to be cancelled.
    #[must_use]
    pub fn send(&mut self, number: u32, frame: Frame) -> Vec<RequestId> {
        let Some(Router { attachment: Attachment::Up { frames, .. }, .. }) = self.table.get(&number) else {
            return Vec::new();
        };
        match frames.is_full_for(wire::ReplicaFrame { frame: Some(frame) }) {
            true => self.cut(number),
            false => Vec::new(),
        }
    }

    /// Without its frames the router cannot go on with any stream, so nothing is kept for it.
    fn cut(&mut self, number: u32) -> Vec<RequestId> {
        let Some(router) = self.table.remove(&number) else { return Vec::new() };
        tracing::warn!(
            router = number,
            n_requests = router.live.len(),
            "a router does not read its frames and is disconnected"
        );
        if let Attachment::Up { frames, .. } = router.attachment {
            frames.close(Status::resource_exhausted("this router has too many unread frames"));
        }
        sorted(router.live)
    }

    /// Welcomes every router that was not welcomed yet.
    #[must_use]
    pub fn welcome(&mut self, welcome: impl Fn(u32) -> wire::Welcome) -> Vec<RequestId> {
        let mut new = Vec::new();
        for (number, router) in &mut self.table {
            if let Attachment::Up { welcomed: welcomed @ false, .. } = &mut router.attachment {
                *welcomed = true;
                new.push(*number);
            }
        }
        new.into_iter().flat_map(|number| self.send(number, Frame::Welcome(welcome(number)))).collect()
    }

    #[must_use]
    pub fn broadcast(&mut self, state: &wire::State) -> Vec<RequestId> {
        let all: Vec<u32> = self.table.keys().copied().collect();
        all.into_iter().flat_map(|number| self.send(number, Frame::State(state.clone()))).collect()
    }

    /// Sends the router all names again.
    pub fn resend_names_to(&mut self, number: u32) {
        if let Some(router) = self.table.get_mut(&number) {
            router.name_cursor.recited = Some(0);
        }
    }

    pub fn resend_names_to_all(&mut self) {
        self.table.values_mut().for_each(|router| router.name_cursor.recited = Some(0));
    }

    /// Sends a beat to every router that was welcomed. `names` adds the names of some blocks, and returns whether there
    /// are more.
    #[must_use]
    pub fn beat(
        &mut self,
        load: wire::Load,
        changes: &BlockNameChanges,
        names: impl Fn(Range<u32>, &mut Vec<u64>) -> bool,
    ) -> Vec<RequestId> {
        let is_welcomed = |router: &Router| matches!(router.attachment, Attachment::Up { welcomed: true, .. });
        let all = self.table.iter_mut().filter(|(_, router)| is_welcomed(router));
        let beats: Vec<(u32, wire::Beat)> = all
            .map(|(number, router)| {
                (
                    *number,
                    wire::Beat { load: Some(load), cached: router.name_cursor.next_cached_names(changes, &names) },
                )
            })
            .collect();
        beats.into_iter().flat_map(|(number, beat)| self.send(number, Frame::Beat(beat))).collect()
    }

    pub fn close_all(&mut self, why: &Status) {
        for (_, router) in std::mem::take(&mut self.table) {
            if let Attachment::Up { frames, .. } = router.attachment {
                frames.close(why.clone());
            }
        }
    }

    fn forget_if_idle(&mut self, number: u32) {
        let is_idle = |router: &Router| matches!(router.attachment, Attachment::Gone { .. }) && router.live.is_empty();
        if self.table.get(&number).is_some_and(is_idle) {
            self.table.remove(&number);
        }
    }
}

impl NameCursor {
    /// The changes, and the next piece for a router that needs all names. A name that changes beyond the piece is sent
    /// as a change, and perhaps again with its piece: the router keeps a set.
    fn next_cached_names(
        &mut self,
        changes: &BlockNameChanges,
        names: impl Fn(Range<u32>, &mut Vec<u64>) -> bool,
    ) -> Option<wire::Cached> {
        let anew = self.recited == Some(0);
        // At the beginning the pieces cover everything.
        let (mut added, dropped) =
            if anew { (Vec::new(), Vec::new()) } else { (changes.added.clone(), changes.dropped.clone()) };
        if let Some(first) = self.recited {
            let end = first + BLOCKS_RECITED_MAX;
            self.recited = names(first..end, &mut added).then_some(end);
        }
        if !anew && added.is_empty() && dropped.is_empty() {
            return None;
        }
        self.n_frames += 1;
        Some(wire::Cached { sequence: self.n_frames, anew, added, dropped })
    }
}

/// Sorted, so that the order does not depend on a hash map.
fn sorted(ids: HashSet<RequestId>) -> Vec<RequestId> {
    let mut ids: Vec<RequestId> = ids.into_iter().collect();
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::outbound;
    use std::collections::BTreeSet;

    /// Applies to `known` what the router receives.
    fn apply_cached(known: &mut BTreeSet<u64>, cached: Option<wire::Cached>, sequence: u64) {
        let Some(report) = cached else { return };
        assert_eq!(report.sequence, sequence);
        if report.anew {
            known.clear();
        }
        known.extend(&report.added);
        known.retain(|name| !report.dropped.contains(name));
    }

    /// A router of the build before reads these two ends as none, and waits for ever.
    #[test]
    fn router_gets_no_finish_that_its_protocol_lacks() {
        use proto::cluster::Finish::{Failed, Grammar, NoToken, Stop};
        for (protocol, expected) in
            [(since::GRAMMARS - 1, [Failed, Failed, Stop]), (since::GRAMMARS, [NoToken, Grammar, Stop])]
        {
            let mut routers = Routers::default();
            routers.attach(0, protocol, outbound(1).0);
            for finish in [NoToken, Grammar, Stop] {
                routers.push(wire::Output { finish: finish.into(), ..wire::Output::default() });
            }
            let outputs = &routers.table[&0].outputs;
            assert_eq!(outputs.iter().map(wire::Output::finish).collect::<Vec<_>>(), expected, "{protocol}");
        }
    }

    #[test]
    fn names_recited_in_pieces_are_complete_despite_changes() {
        let n_blocks = 2 * BLOCKS_RECITED_MAX + 5;
        let mut named: Vec<Option<u64>> = (0..n_blocks).map(|block| Some(block.into())).collect();
        let (mut cursor, mut known) = (NameCursor { n_frames: 0, recited: Some(0) }, BTreeSet::from([77_777]));
        for beat in 1..=4 {
            // A name in a piece that was sent, one in a piece that was not, and one that replaces another.
            let (gone, later) = (beat as usize, n_blocks as usize - beat as usize);
            let dropped = [named[gone].take(), named[later].take()].into_iter().flatten().collect();
            named[gone] = Some(1_000_000 + beat);
            let changes = BlockNameChanges { added: vec![1_000_000 + beat], dropped, ..BlockNameChanges::default() };
            let names = |blocks: Range<u32>, out: &mut Vec<u64>| {
                let end = (blocks.end as usize).min(named.len());
                out.extend(named[blocks.start as usize..end].iter().flatten());
                end < named.len()
            };
            let cached = cursor.next_cached_names(&changes, names);
            assert!(cached.as_ref().is_none_or(|report| report.anew == (beat == 1) && report.added.len() < 5000));
            apply_cached(&mut known, cached, beat);
        }
        assert_eq!(cursor.recited, None);
        assert_eq!(known, named.iter().flatten().copied().collect());
        assert!(
            cursor
                .next_cached_names(&BlockNameChanges::default(), |_, _| panic!("the router knows all names"))
                .is_none()
        );
    }
}
