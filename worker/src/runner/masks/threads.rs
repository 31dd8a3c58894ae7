//! The threads that follow grammars, and their queue. Knows no request: only slots that have something to do.

use crate::load::vocabulary::LazyVocabulary;
use crate::runner::masks::MaskConfig;
use crate::runner::masks::slot::Slot;
use grammar::GrammarLimits;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use telemetry::metrics;

/// They end when this is dropped, after what they are at.
pub(super) struct Threads {
    queue: SyncSender<Arc<Slot>>,
}

impl Threads {
    /// At most `queued_max` slots wait for a thread.
    pub fn start(config: MaskConfig, vocabulary: Arc<LazyVocabulary>, queued_max: usize) -> std::io::Result<Threads> {
        let (queue, slots) = sync_channel(queued_max);
        let slots = Arc::new(Mutex::new(slots));
        for i in 0..config.threads {
            let (slots, vocabulary) = (slots.clone(), vocabulary.clone());
            let run = move || run(&slots, config, &vocabulary);
            std::thread::Builder::new().name(format!("masks {i}")).spawn(run)?;
        }
        Ok(Threads { queue })
    }

    /// Has a thread come to this slot, unless none is needed or one is on its way. Where too many wait, nobody comes: a
    /// draw that misses its mask asks again.
    pub fn see_to(&self, slot: &Arc<Slot>) {
        if slot.wants_a_thread() && self.queue.try_send(slot.clone()).is_err() {
            slot.is_left();
        }
    }
}

fn run(slots: &Mutex<Receiver<Arc<Slot>>>, config: MaskConfig, vocabulary: &LazyVocabulary) {
    let limits = GrammarLimits::default();
    loop {
        // Whoever holds the lock waits for work, the others for the lock.
        let next = slots.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(slot) = next else { return };
        let mut goes_on = true;
        while goes_on {
            let begun = Instant::now();
            std::thread::sleep(config.delay);
            let followed = catch_unwind(AssertUnwindSafe(|| slot.follow(vocabulary, &limits)));
            metrics::mask_made(begun.elapsed());
            goes_on = followed.unwrap_or_else(|_panic| {
                slot.fail();
                false
            });
        }
    }
}
