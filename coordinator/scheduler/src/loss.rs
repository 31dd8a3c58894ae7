//! The reasons for a loss of the workers.

/// Why the workers are gone: determines how likely it is that a request broke them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerLoss {
    /// An operator or a scale-up caused it: no request is to blame.
    Planned,
    /// They died, hang or cannot be reached. Usually a machine is the cause, now and then a request.
    Unexplained,
    /// They reported that a step failed.
    Reported,
}

impl WorkerLoss {
    /// How much the loss adds to the suspicion of each sequence in the lost step.
    pub const fn weight(self) -> u32 {
        match self {
            WorkerLoss::Planned => 0,
            WorkerLoss::Unexplained => 1,
            WorkerLoss::Reported => 2,
        }
    }
}
