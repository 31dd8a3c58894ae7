//! The reading of the model under which a rank read its weights, and whether an assignment requires another reading.
//! Compares files by their stamps; has no knowledge of their contents.

use crate::assignment::Assignment;
use checkpoint::{Checkpoint, FileStamp};

/// The stamps of the model's present files, or why they cannot be opened.
pub(crate) type FileStamps = Result<Vec<FileStamp>, String>;

/// The reading of the weights that a rank holds.
#[derive(Debug)]
pub(crate) struct WeightsReadRecord {
    of: ReadingNumber,
    /// The files' stamps when they were read.
    files: Vec<FileStamp>,
    refused: Option<RefusedFiles>,
}

/// A number counts within one life of the coordinator. The next life begins with zero, without a request to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReadingNumber {
    incarnation: u64,
    n: u32,
}

/// Files that were opened for a reading and differ from the held weights.
#[derive(Debug)]
struct RefusedFiles {
    files: FileStamps,
    why: String,
}

/// What an assignment requires of the rank that holds its part.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReloadPlan {
    /// The rank keeps its weights. `unread` has the reason if a reading was due and failed.
    Keep { unread: Option<String> },
    /// The rank reads the present files again.
    Read(FileStamps),
}

impl ReadingNumber {
    fn of(assignment: &Assignment) -> ReadingNumber {
        ReadingNumber { incarnation: assignment.epoch.incarnation, n: assignment.reading }
    }
}

impl WeightsReadRecord {
    /// Returns the reading of this checkpoint.
    pub fn new(assignment: &Assignment, checkpoint: &Checkpoint) -> WeightsReadRecord {
        WeightsReadRecord { of: ReadingNumber::of(assignment), files: checkpoint.stamps(), refused: None }
    }

    /// Decides whether to read again. A new number alone does not cause it while the files are unchanged; an operator's
    /// request does.
    pub fn plan_reload(&mut self, assignment: &Assignment) -> ReloadPlan {
        let now = ReadingNumber::of(assignment);
        let (is_same, is_of_other_life) = (now == self.of, now.incarnation != self.of.incarnation);
        if self.satisfies(assignment) {
            return self.keep(now);
        }
        let files = Checkpoint::open(&assignment.model_path).map(|found| found.stamps()).map_err(|why| why.to_string());
        if let Some(refused) = self.refused.as_ref().filter(|refused| is_same && refused.files == files) {
            return ReloadPlan::Keep { unread: Some(refused.why.clone()) };
        }
        match files {
            Ok(files) if files == self.files && (is_same || is_of_other_life) => self.keep(now),
            files => ReloadPlan::Read(files),
        }
    }

    /// Returns whether the rank already holds what the assignment requires, without opening a file.
    pub fn satisfies(&self, assignment: &Assignment) -> bool {
        let now = ReadingNumber::of(assignment);
        now == self.of && self.refused.is_none() || now.incarnation != self.of.incarnation && now.n == 0
    }

    fn keep(&mut self, now: ReadingNumber) -> ReloadPlan {
        (self.of, self.refused) = (now, None);
        ReloadPlan::Keep { unread: None }
    }

    /// Records that the present files differ from the held weights: they are not opened again while they stay as they
    /// are.
    pub fn record_refused(&mut self, assignment: &Assignment, files: FileStamps, why: String) {
        (self.of, self.refused) = (ReadingNumber::of(assignment), Some(RefusedFiles { files, why }));
    }
}

#[cfg(test)]
mod tests;
