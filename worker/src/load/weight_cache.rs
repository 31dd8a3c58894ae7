//! What a rank keeps of a model between two assignments: packed weights and their device. Has no knowledge of files or
//! other ranks.
//!
//! A runner borrows the weights, and its drop returns them to the cache. The next assignment finds them there if it is
//! for the same part of the same model. Any `take` empties the cache, so it never holds anything else.

use crate::assignment::Assignment;
use crate::load::draft_weights::{DraftSpec, DraftWeights};
use crate::load::reading::WeightsReadRecord;
use crate::load::scrub::HashedPart;
use crate::load::vocabulary::LazyVocabulary;
use backend::Device;
use checkpoint::ModelSpec;
use model::{Model, MtpHead};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use types::{PolicyDigest, RankPart};

/// The weights kept by one loader. A copy of the loader has another cache.
#[derive(Default)]
pub struct WeightCache(Arc<Mutex<Option<CachedPart>>>);

struct CachedPart {
    of: PartKey,
    held: Box<dyn AnyPart>,
}

/// A `LoadedPart` of some kind of device.
trait AnyPart: Send {
    fn satisfies(&self, assignment: &Assignment) -> bool;
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<D: Device + 'static> AnyPart for LoadedPart<D> {
    fn satisfies(&self, assignment: &Assignment) -> bool {
        let draft_spec = DraftSpec::of(assignment);
        let has_draft = draft_spec.is_none_or(|spec| self.draft.as_ref().is_some_and(|draft| draft.has_spec(&spec)));
        let needs_mtp = assignment.guesses.mtp.is_some() && assignment.layout.part(assignment.rank).is_sampler();
        let has_layers = has_draft && (self.mtp.is_some() || !needs_mtp);
        self.reading.satisfies(assignment) && !self.is_spoilt() && has_layers
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// The key of loaded weights: equal keys have the same weights, cut alike, with as much scratch memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartKey {
    policy: PolicyDigest,
    part: RankPart,
    context: u32,
    batch_tokens_max: u32,
    running_max: u32,
}

/// A part of a model on a device.
pub(crate) struct LoadedPart<D: Device> {
    pub device: D,
    pub model: Model<D>,
    pub spec: ModelSpec,
    pub policy: PolicyDigest,
    pub reading: WeightsReadRecord,
    pub vocabulary: Arc<LazyVocabulary>,
    /// Present on the sampling rank, where a draft model guesses.
    pub draft: Option<DraftWeights<D>>,
    /// Present on the sampling rank, where the model's own layer guesses.
    pub mtp: Option<MtpHead<D>>,
    /// Present if the weights are checked in memory.
    pub hashed: Option<Arc<HashedPart>>,
}

impl<D: Device> LoadedPart<D> {
    fn is_spoilt(&self) -> bool {
        self.hashed.as_ref().is_some_and(|hashed| hashed.is_spoilt())
    }
}

/// `LoadedPart`, while a runner has it.
pub(crate) struct PartInUse<D: Device + 'static> {
    /// Some until this is dropped.
    held: Option<LoadedPart<D>>,
    of: PartKey,
    weight_cache: WeightCache,
    is_sound: bool,
}

impl PartKey {
    pub fn new(policy: PolicyDigest, assignment: &Assignment, part: &RankPart) -> PartKey {
        let Assignment { context, batch_tokens_max, running_max, .. } = *assignment;
        PartKey { policy, part: part.clone(), context, batch_tokens_max, running_max }
    }
}

impl WeightCache {
    /// Empties the cache, and returns its contents if they have this key.
    pub(crate) fn take<D: Device + 'static>(&self, of: Option<&PartKey>) -> Option<LoadedPart<D>> {
        let kept = self.lock().take()?;
        let held = kept.held.into_any().downcast::<LoadedPart<D>>().ok().filter(|_| Some(&kept.of) == of)?;
        // A device that failed while unused has spoilt the part for good.
        (held.device.take_failure().is_ok() && !held.is_spoilt()).then_some(*held)
    }

    /// Returns whether the cache holds what the assignment requires, without opening a file.
    pub(crate) fn holds(&self, of: &PartKey, assignment: &Assignment) -> bool {
        self.lock().as_ref().is_some_and(|kept| kept.of == *of && kept.held.satisfies(assignment))
    }

    pub(crate) fn hand_out<D: Device + 'static>(&self, held: LoadedPart<D>, of: PartKey) -> PartInUse<D> {
        PartInUse { held: Some(held), of, weight_cache: WeightCache(self.0.clone()), is_sound: true }
    }

    fn lock(&self) -> MutexGuard<'_, Option<CachedPart>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for WeightCache {
    fn clone(&self) -> WeightCache {
        WeightCache::default()
    }
}

impl fmt::Debug for WeightCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.lock().is_some() { "WeightCache(full)" } else { "WeightCache(empty)" })
    }
}

impl<D: Device + 'static> PartInUse<D> {
    pub fn get(&self) -> &LoadedPart<D> {
        self.held.as_ref().expect("the part is present until this is dropped")
    }

    pub fn get_mut(&mut self) -> &mut LoadedPart<D> {
        self.held.as_mut().expect("the part is present until this is dropped")
    }

    /// Any end of the runner between `begin` and `end` discards the weights, and keeps none for the next runner.
    pub fn mark_unsound(&mut self) {
        self.is_sound = false;
    }

    pub fn mark_sound(&mut self) {
        self.is_sound = true;
    }
}

impl<D: Device + 'static> Drop for PartInUse<D> {
    fn drop(&mut self) {
        if let Some(held) = self.held.take().filter(|_| self.is_sound) {
            *self.weight_cache.lock() = Some(CachedPart { of: self.of.clone(), held: Box::new(held) });
        }
    }
}
