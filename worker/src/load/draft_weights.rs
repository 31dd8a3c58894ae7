//! A draft model's complete weights, on the sampling rank. They stay from one assignment to the next, with that rank's
//! part of the served model. Has no knowledge of requests.

use crate::assignment::{Assignment, LoadError};
use backend::Device;
use checkpoint::{Checkpoint, ModelSpec};
use collective::CancelFlag;
use model::{LoadSource, Model, PassLimits};
use std::path::PathBuf;
use types::{Layout, Rank, Unsupported};

/// The most rows of one pass: a longer log needs several steps to catch up.
const ROWS_MAX: u32 = 512;

pub(crate) struct DraftWeights<D: Device> {
    /// A device of its own, so that its passes and the target's share no buffer.
    pub device: D,
    pub model: Model<D>,
    pub spec: ModelSpec,
    of: DraftSpec,
}

/// What an assignment requires: equal values have the same weights and as much scratch memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DraftSpec {
    path: PathBuf,
    reading: u32,
    context: u32,
    rows_max: u32,
    running_max: u32,
}

impl DraftSpec {
    /// Returns None for a rank that does not sample, and where no draft model guesses.
    pub fn of(assignment: &Assignment) -> Option<DraftSpec> {
        let Assignment { reading, context, batch_tokens_max, running_max, .. } = *assignment;
        let draft = assignment.guesses.draft_model.as_ref()?;
        let rows_max = batch_tokens_max.min(ROWS_MAX.max(running_max));
        let spec = || DraftSpec { path: draft.path.clone(), reading, context, rows_max, running_max };
        assignment.layout.part(assignment.rank).is_sampler().then(spec)
    }

    fn n_outputs_max(&self) -> usize {
        self.rows_max.min(self.running_max) as usize
    }
}

impl<D: Device> DraftWeights<D> {
    pub fn has_spec(&self, spec: &DraftSpec) -> bool {
        self.of == *spec
    }

    pub fn read(device: D, of: DraftSpec, n_vocab: u32, cancel: &CancelFlag) -> Result<DraftWeights<D>, LoadError> {
        let failed = |source: model::Error| LoadError::Model { path: of.path.clone(), source: source.into() };
        let checkpoint = Checkpoint::open(&of.path).map_err(|error| failed(error.into()))?;
        let spec = checkpoint.spec().clone();
        if spec.vocab != n_vocab {
            return Err(Unsupported("a draft model whose vocabulary differs from the model's").into());
        }
        let part = Layout::solo(spec.n_layers).part(Rank(0));
        let context = of.context.min(spec.context);
        let limits = PassLimits { rows_max: of.rows_max as usize, outputs_max: of.n_outputs_max(), context };
        let source = LoadSource { cancel, packed: None };
        let model = Model::load_from(&checkpoint, &device, &part, limits, source).map_err(failed)?;
        tracing::info!(path = %of.path.display(), bytes = model.weight_bytes(), "loaded a draft model");
        Ok(DraftWeights { device, model, spec, of })
    }

    /// Returns the rows of one pass, and how many of them draw.
    pub fn rows_max(&self) -> (usize, usize) {
        (self.of.rows_max as usize, self.of.n_outputs_max())
    }

    /// Returns the longest log that the draft model guesses behind.
    pub fn context(&self) -> u32 {
        self.of.context.min(self.spec.context)
    }
}
