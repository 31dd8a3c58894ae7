//! In which reading of the model a rank has read what it holds, and whether another place asks it to read again. Knows
//! files by their stamps; nothing of what is in them.

use crate::assignment::Assignment;
use checkpoint::{Checkpoint, Stamp};

/// What the model's files are now, or why they cannot be opened.
pub(crate) type FilesNow = Result<Vec<Stamp>, String>;

/// Of what a rank holds.
#[derive(Debug)]
pub(crate) struct Reading {
    of: ReadingNumber,
    /// As the files were that it was read from.
    files: Vec<Stamp>,
    refused: Option<RefusedFiles>,
}

/// A number counts within one life of the coordinator: the next one begins with zero, and has asked for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReadingNumber {
    incarnation: u64,
    n: u32,
}

/// Files that were looked at for a reading, and are not what is held.
#[derive(Debug)]
struct RefusedFiles {
    files: FilesNow,
    why: String,
}

/// What a place asks of who holds its part.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// It keeps what it has, and says why it did not read again, if it was to and could not.
    Keep { unread: Option<String> },
    /// To read again what is there now.
    Read(FilesNow),
}

impl ReadingNumber {
    fn of(assignment: &Assignment) -> ReadingNumber {
        ReadingNumber { incarnation: assignment.epoch.incarnation, n: assignment.reading }
    }
}

impl Reading {
    /// What was read from this checkpoint.
    pub fn new(assignment: &Assignment, checkpoint: &Checkpoint) -> Reading {
        Reading { of: ReadingNumber::of(assignment), files: checkpoint.stamps(), refused: None }
    }

    /// Files that have not changed are not read for a number alone; but for an operator's word they are.
    pub fn asks(&mut self, assignment: &Assignment) -> Ask {
        let now = ReadingNumber::of(assignment);
        let (is_same, is_of_other_life) = (now == self.of, now.incarnation != self.of.incarnation);
        if self.is_kept_for(assignment) {
            return self.keep(now);
        }
        let files = Checkpoint::open(&assignment.model_path).map(|found| found.stamps()).map_err(|why| why.to_string());
        if let Some(refused) = self.refused.as_ref().filter(|refused| is_same && refused.files == files) {
            return Ask::Keep { unread: Some(refused.why.clone()) };
        }
        match files {
            Ok(files) if files == self.files && (is_same || is_of_other_life) => self.keep(now),
            files => Ask::Read(files),
        }
    }

    /// Whether no file needs to be looked at to know that this is what the assignment asks for.
    pub fn is_kept_for(&self, assignment: &Assignment) -> bool {
        let now = ReadingNumber::of(assignment);
        now == self.of && self.refused.is_none() || now.incarnation != self.of.incarnation && now.n == 0
    }

    fn keep(&mut self, now: ReadingNumber) -> Ask {
        (self.of, self.refused) = (now, None);
        Ask::Keep { unread: None }
    }

    /// What is there is not what is held: it is not looked at again while it stays so.
    pub fn refuse(&mut self, assignment: &Assignment, files: FilesNow, why: String) {
        (self.of, self.refused) = (ReadingNumber::of(assignment), Some(RefusedFiles { files, why }));
    }
}

#[cfg(test)]
mod tests;
