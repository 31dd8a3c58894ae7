//! The path on this machine of the model to load. Has no knowledge of formats.

use crate::CancelFlag;
use crate::assignment::{Assignment, Load, LoadError, LoadedModel, ReadyReport};
use crate::load::fetch::ModelFetcher;
use std::path::PathBuf;

#[derive(Clone, Debug)]
pub enum ModelSource {
    /// At the path that the coordinator names.
    Assigned,
    /// At this path, whatever the coordinator names.
    Path(PathBuf),
    /// In this folder, under the coordinator's name for it.
    Folder(PathBuf),
    /// Fetched from the coordinator, unless it is on this machine already.
    Fetched(ModelFetcher),
}

/// Returns a loader that first finds the model on this machine.
pub fn load_from(source: ModelSource, loader: Box<dyn Load>) -> Box<dyn Load> {
    Box::new(LocatingLoader { source, loader, model_path: None })
}

struct LocatingLoader {
    source: ModelSource,
    loader: Box<dyn Load>,
    /// Where the model was found last.
    model_path: Option<PathBuf>,
}

impl ModelSource {
    fn locate(&self, assignment: &Assignment, cancel: &CancelFlag) -> Result<PathBuf, LoadError> {
        let assigned_path = &assignment.model_path;
        match self {
            ModelSource::Assigned => Ok(assigned_path.clone()),
            ModelSource::Path(path) => Ok(path.clone()),
            ModelSource::Folder(folder) => Ok(folder.join(assigned_path.file_name().unwrap_or_default())),
            ModelSource::Fetched(fetch) => fetch.fetch_model(assignment, cancel),
        }
    }

    /// Sets the draft model's path: the one that the coordinator names, or the one in the folder. A draft model is
    /// never fetched.
    fn with_draft(&self, assignment: &Assignment) -> Assignment {
        let mut assignment = assignment.clone();
        if let (ModelSource::Folder(folder), Some(draft)) = (self, &mut assignment.guesses.draft_model) {
            draft.path = folder.join(draft.path.file_name().unwrap_or_default());
        }
        assignment
    }
}

impl Load for LocatingLoader {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let model_path = match (&self.source, &self.model_path) {
            // The coordinator may have rejected the bytes of another rank on this machine; `path` would then fetch all
            // of them again.
            (ModelSource::Fetched(_), Some(path)) if self.loader.holds(assignment) => path.clone(),
            _ => self.source.locate(assignment, cancel)?,
        };
        self.model_path = Some(model_path.clone());
        self.loader.load(&Assignment { model_path, ..self.source.with_draft(assignment) }, cancel)
    }

    fn holds(&self, assignment: &Assignment) -> bool {
        self.loader.holds(&self.source.with_draft(assignment))
    }

    fn reject_last_load(&mut self) {
        self.loader.reject_last_load();
        if let (ModelSource::Fetched(fetch), Some(path)) = (&self.source, &self.model_path) {
            fetch.forget(path);
        }
    }
}
