//! The threads that follow grammars, and their queue. Has no knowledge of requests: only of slots with work.
//!
//! A slot whose answer has begun waits for one mask, which a running pass needs soon. A slot whose answer begins has to
//! compile a grammar or read a log, which takes a hundred times as long. So slots of the first kind come first, and one
//! thread never takes the second kind.

use crate::load::vocabulary::LazyVocabulary;
use crate::runner::masks::MaskConfig;
use crate::runner::masks::slot::{MaskSlot, SlotWork};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use telemetry::metrics;
use types::GrammarFault;

/// The threads end when this is dropped, after their present work.
pub(super) struct MaskThreads(Arc<MaskQueue>);

struct MaskQueue {
    waiting: Mutex<WaitingSlots>,
    /// Notified when there is work, or at the end.
    came: Condvar,
    /// The most slots that wait.
    slots_max: usize,
    /// The most threads that begin answers at a time.
    beginning_max: usize,
}

struct WaitingSlots {
    going_on: VecDeque<Arc<MaskSlot>>,
    beginning: VecDeque<Arc<MaskSlot>>,
    /// The threads that begin an answer.
    n_beginning: usize,
    is_over: bool,
}

impl WaitingSlots {
    /// Allocates all room now, because draws must not allocate.
    fn with_room(slots_max: usize) -> WaitingSlots {
        let room = || VecDeque::with_capacity(slots_max);
        WaitingSlots { going_on: room(), beginning: room(), n_beginning: 0, is_over: false }
    }
}

impl MaskThreads {
    /// Starts the threads. At most `queued_max` slots wait for them.
    pub fn start(
        config: MaskConfig,
        vocabulary: Arc<LazyVocabulary>,
        queued_max: usize,
    ) -> std::io::Result<MaskThreads> {
        let beginning_max = config.threads.saturating_sub(1).max(1);
        let (waiting, came) = (Mutex::new(WaitingSlots::with_room(queued_max)), Condvar::new());
        let queue = Arc::new(MaskQueue { waiting, came, slots_max: queued_max, beginning_max });
        // If a thread cannot start, the drop ends those that have started.
        let threads = MaskThreads(queue.clone());
        for i in 0..config.threads {
            let (queue, vocabulary) = (queue.clone(), vocabulary.clone());
            let run = move || run(&queue, config, &vocabulary);
            std::thread::Builder::new().name(format!("masks {i}")).spawn(run)?;
        }
        Ok(threads)
    }

    /// Sends a thread to this slot, unless it needs none or one is on its way. If too many slots wait, it sends none: a
    /// draw that misses its mask requests it again.
    pub fn enqueue(&self, slot: &Arc<MaskSlot>) {
        let Some(work) = slot.claim_work() else { return };
        if !self.0.push(slot, work) {
            slot.release_work();
        }
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.0.waiting().is_over = true;
        self.0.came.notify_all();
    }
}

impl MaskQueue {
    fn waiting(&self) -> MutexGuard<'_, WaitingSlots> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there was room.
    fn push(&self, slot: &Arc<MaskSlot>, work: SlotWork) -> bool {
        let mut waiting = self.waiting();
        let has_room = waiting.going_on.len() + waiting.beginning.len() < self.slots_max;
        if has_room {
            let of_work = match work {
                SlotWork::GoesOn => &mut waiting.going_on,
                SlotWork::Begins => &mut waiting.beginning,
            };
            of_work.push_back(slot.clone());
            drop(waiting);
            self.came.notify_one();
        }
        has_room
    }

    /// Waits for work. Returns None at the end.
    fn next(&self) -> Option<(Arc<MaskSlot>, SlotWork)> {
        let mut waiting = self.waiting();
        loop {
            if waiting.is_over {
                return None;
            }
            if let Some(slot) = waiting.going_on.pop_front() {
                return Some((slot, SlotWork::GoesOn));
            }
            if waiting.n_beginning < self.beginning_max
                && let Some(slot) = waiting.beginning.pop_front()
            {
                waiting.n_beginning += 1;
                return Some((slot, SlotWork::Begins));
            }
            waiting = self.came.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish_beginning(&self) {
        self.waiting().n_beginning -= 1;
        self.came.notify_one();
    }
}

fn run(queue: &MaskQueue, config: MaskConfig, vocabulary: &LazyVocabulary) {
    while let Some((slot, work)) = queue.next() {
        let mut goes_on = true;
        while goes_on {
            let begun = Instant::now();
            std::thread::sleep(config.delay);
            let followed = catch_unwind(AssertUnwindSafe(|| slot.make_masks(vocabulary)));
            metrics::mask_made(begun.elapsed());
            goes_on = followed.unwrap_or_else(|_panic| {
                slot.fail(GrammarFault::Broken);
                false
            });
        }
        if work == SlotWork::Begins {
            queue.finish_beginning();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::Grammar;

    #[test]
    fn answers_that_go_on_come_first_and_one_thread_is_never_lent_to_those_that_begin() {
        let waiting = Mutex::new(WaitingSlots::with_room(4));
        let queue = MaskQueue { waiting, came: Condvar::new(), slots_max: 4, beginning_max: 1 };
        let slots: Vec<Arc<MaskSlot>> = (0..5).map(|_| Arc::new(MaskSlot::new(Grammar::new(""), &[], 0))).collect();
        let push = |i: usize, work| queue.push(&slots[i], work);
        let next = |i: usize, work| {
            let (slot, got) = queue.next().unwrap();
            assert!(Arc::ptr_eq(&slot, &slots[i]) && got == work, "slot {i}, {work:?}");
        };
        assert!(push(0, SlotWork::Begins) && push(1, SlotWork::Begins) && push(2, SlotWork::GoesOn));
        next(2, SlotWork::GoesOn);
        next(0, SlotWork::Begins);
        // Another answer may begin once this one has begun; work on a running answer comes now.
        assert!(push(3, SlotWork::GoesOn));
        next(3, SlotWork::GoesOn);
        queue.finish_beginning();
        next(1, SlotWork::Begins);
        assert!((0..4).all(|i| push(i, SlotWork::Begins)) && !push(4, SlotWork::GoesOn), "it is full");
        queue.waiting().is_over = true;
        assert!(queue.next().is_none());
    }
}
