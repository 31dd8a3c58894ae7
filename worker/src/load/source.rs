//! The path on this machine of the model to load. Has no knowledge of formats.

use crate::CancelFlag;
use crate::assignment::{Assignment, Load, LoadError, Loaded, Ready};
use crate::load::fetch::Fetch;
use std::path::PathBuf;

#[derive(Clone, Debug)]
pub enum Source {
    /// At the path that the coordinator names.
    AsTold,
    /// At this path, whatever the coordinator names.
    Path(PathBuf),
    /// In this folder, under the coordinator's name for it.
    Folder(PathBuf),
    /// Fetched from the coordinator, unless it is on this machine already.
    Fetched(Fetch),
}

/// Returns a loader that first finds the model on this machine.
pub fn load_from(source: Source, loader: Box<dyn Load>) -> Box<dyn Load> {
    Box::new(Located { source, loader, model_path: None })
}

struct Located {
    source: Source,
    loader: Box<dyn Load>,
    /// Where the model was found last.
    model_path: Option<PathBuf>,
}

impl Source {
    fn path(&self, assignment: &Assignment, cancel: &CancelFlag) -> Result<PathBuf, LoadError> {
        let told = &assignment.model_path;
        match self {
            Source::AsTold => Ok(told.clone()),
            Source::Path(path) => Ok(path.clone()),
            Source::Folder(folder) => Ok(folder.join(told.file_name().unwrap_or_default())),
            Source::Fetched(fetch) => fetch.model(assignment, cancel),
        }
    }

    /// Sets the draft model's path: the one that the coordinator names, or the one in the folder. A draft model is
    /// never fetched.
    fn with_draft(&self, assignment: &Assignment) -> Assignment {
        let mut assignment = assignment.clone();
        if let (Source::Folder(folder), Some(draft)) = (self, &mut assignment.guesses.draft_model) {
            draft.path = folder.join(draft.path.file_name().unwrap_or_default());
        }
        assignment
    }
}

impl Load for Located {
    fn load(&mut self, assignment: &Assignment, cancel: &CancelFlag) -> Result<(Box<dyn Loaded>, Ready), LoadError> {
        let model_path = match (&self.source, &self.model_path) {
            // The coordinator may have rejected the bytes of another rank on this machine; `path` would then fetch all
            // of them again.
            (Source::Fetched(_), Some(path)) if self.loader.holds(assignment) => path.clone(),
            _ => self.source.path(assignment, cancel)?,
        };
        self.model_path = Some(model_path.clone());
        self.loader.load(&Assignment { model_path, ..self.source.with_draft(assignment) }, cancel)
    }

    fn holds(&self, assignment: &Assignment) -> bool {
        self.loader.holds(&self.source.with_draft(assignment))
    }

    fn distrust(&mut self) {
        self.loader.distrust();
        if let (Source::Fetched(fetch), Some(path)) = (&self.source, &self.model_path) {
            fetch.forget(path);
        }
    }
}
