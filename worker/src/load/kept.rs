//! What a rank holds of a model from one place to the next: packed weights, and the device that they are on. Knows no
//! file and no other rank.
//!
//! A runner has them lent. When it is gone they are back on the shelf, where the next place finds them if it is for the
//! same part of the same model, and where nothing else ever is: whoever looks empties the shelf.

use crate::assignment::Assignment;
use crate::load::reading::Reading;
use backend::Device;
use checkpoint::ModelSpec;
use model::Model;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use types::{Part, PolicyDigest};

/// Of one loader. A copy of the loader has another.
#[derive(Default)]
pub struct Shelf(Arc<Mutex<Option<Kept>>>);

struct Kept {
    of: Of,
    /// `Held` of some device.
    held: Box<dyn Any + Send>,
}

/// By which what is held is found again: equals are of the same weights, cut alike, with as much scratch memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Of {
    policy: PolicyDigest,
    part: Part,
    context: u32,
    batch_tokens_max: u32,
    running_max: u32,
}

/// A part of a model on a device.
pub(crate) struct Held<D: Device> {
    pub device: D,
    pub model: Model<D>,
    pub spec: ModelSpec,
    pub policy: PolicyDigest,
    pub reading: Reading,
}

/// The same while a runner has it.
pub(crate) struct Lent<D: Device + 'static> {
    /// Always there until this is dropped.
    held: Option<Held<D>>,
    of: Of,
    shelf: Shelf,
    is_sound: bool,
}

impl Of {
    pub fn new(policy: PolicyDigest, assignment: &Assignment, part: &Part) -> Of {
        let Assignment { context, batch_tokens_max, running_max, .. } = *assignment;
        Of { policy, part: part.clone(), context, batch_tokens_max, running_max }
    }
}

impl Shelf {
    /// What is there, if it is that.
    pub(crate) fn take<D: Device + 'static>(&self, of: Option<&Of>) -> Option<Held<D>> {
        let kept = self.place().take()?;
        let held = kept.held.downcast::<Held<D>>().ok().filter(|_| Some(&kept.of) == of)?;
        // What failed on the device while nobody looked has failed it for good.
        held.device.settle().is_ok().then_some(*held)
    }

    pub(crate) fn lend<D: Device + 'static>(&self, held: Held<D>, of: Of) -> Lent<D> {
        Lent { held: Some(held), of, shelf: Shelf(self.0.clone()), is_sound: true }
    }

    fn place(&self) -> MutexGuard<'_, Option<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for Shelf {
    fn clone(&self) -> Shelf {
        Shelf::default()
    }
}

impl fmt::Debug for Shelf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.place().is_some() { "Shelf(full)" } else { "Shelf(empty)" })
    }
}

impl<D: Device + 'static> Lent<D> {
    pub fn get(&self) -> &Held<D> {
        self.held.as_ref().expect("it is there until this is dropped")
    }

    pub fn get_mut(&mut self) -> &mut Held<D> {
        self.held.as_mut().expect("it is there until this is dropped")
    }

    /// Whatever ends the runner between `begin` and `end` discards the weights, and keeps none for the next runner.
    pub fn begin(&mut self) {
        self.is_sound = false;
    }

    pub fn end(&mut self) {
        self.is_sound = true;
    }
}

impl<D: Device + 'static> Drop for Lent<D> {
    fn drop(&mut self) {
        if let Some(held) = self.held.take().filter(|_| self.is_sound) {
            *self.shelf.place() = Some(Kept { of: self.of.clone(), held: Box::new(held) });
        }
    }
}
