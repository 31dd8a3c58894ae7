//! Where this machine has the model that it is told to load. Knows paths and no formats.

use crate::runner::{Assignment, Load, LoadError, Ready, Runner};
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// At the coordinator's path.
    AsTold,
    /// Here, whatever the coordinator's path is.
    Path(PathBuf),
    /// In this folder, under the name that it has at the coordinator.
    Folder(PathBuf),
}

/// A loader that finds the model on this machine first.
pub fn load_from(source: Source, loader: Box<dyn Load>) -> Box<dyn Load> {
    Box::new(Located { source, loader })
}

struct Located {
    source: Source,
    loader: Box<dyn Load>,
}

impl Source {
    fn path(&self, told: &std::path::Path) -> PathBuf {
        match self {
            Source::AsTold => told.to_owned(),
            Source::Path(path) => path.clone(),
            Source::Folder(folder) => folder.join(told.file_name().unwrap_or_default()),
        }
    }
}

impl Load for Located {
    fn load(&mut self, assignment: &Assignment) -> Result<(Box<dyn Runner>, Ready), LoadError> {
        let model_path = self.source.path(&assignment.model_path);
        self.loader.load(&Assignment { model_path, ..assignment.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_machine_may_have_the_model_elsewhere() {
        let told = Path::new("/models/tiny.gguf");
        assert_eq!(Source::AsTold.path(told), told);
        assert_eq!(Source::Path("/here.gguf".into()).path(told), Path::new("/here.gguf"));
        assert_eq!(Source::Folder("/disk".into()).path(told), Path::new("/disk/tiny.gguf"));
    }
}
