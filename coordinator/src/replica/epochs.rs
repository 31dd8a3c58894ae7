//! The loop's part that carries out what an event leads to: epochs end and begin, and lost workers are dismissed. The
//! decisions are the deployment's; here they take effect for ranks, requests, routers and operators, in this order.

use super::Replica;
use crate::Error;
use crate::deployment::Transition;
use crate::deployment::endings::EpochEnding;

impl Replica {
    pub(super) fn perform(&mut self, transition: Transition) -> Result<(), Error> {
        match transition {
            Transition::BeginEpoch => self.begin_epoch()?,
            Transition::EndEpoch(why) => self.end_epoch(why),
            Transition::Place => self.place(),
            Transition::Restart(why) => {
                self.end_epoch(why);
                self.place();
            }
        }
        Ok(())
    }

    /// Dismisses one worker after the other: the next may hold a rank of the epoch that follows.
    pub(super) fn take_losses(&mut self) -> Result<(), Error> {
        while let Some(lost) = self.deployment.take_loss() {
            let now = self.clock.now();
            let Some((loss, transition)) = self.deployment.dismiss(lost) else { continue };
            self.perform(transition)?;
            if let Some(loss) = loss {
                self.recoveries.rank_lost(loss, now);
            }
        }
        Ok(())
    }

    fn place(&mut self) {
        self.deployment.place(self.requests.promised_context(), self.clock.now());
    }

    /// The requests wait for the next epoch.
    fn end_epoch(&mut self, why: EpochEnding) {
        let now = self.clock.now();
        if self.requests.has_served() {
            let tokens_requeued = self.requests.stats().tokens_requeued;
            self.recoveries.epoch_ended(self.deployment.epoch(), why, tokens_requeued, now);
        }
        let next = self.deployment.end_epoch(why, now);
        self.requests.epoch_ended(next, why.loss(), now);
    }

    /// Begins to serve, or goes on serving, once all ranks are ready.
    fn begin_epoch(&mut self) -> Result<(), Error> {
        let now = self.clock.now();
        let Some(start) = self.deployment.epoch_start() else { return Ok(()) };
        self.requests.epoch_begins(&self.config, &start, now)?;
        self.deployment.serve(now);
        self.requests.add_tier_pages(self.deployment.take_kept_pages());
        let (grid, tokens_requeued) = (self.deployment.grid(), self.requests.stats().tokens_requeued);
        let cost = self.recoveries.served(grid, tokens_requeued, now, |rank| self.deployment.successor(rank));
        if let Some(cost) = cost {
            self.changes.answer(grid, cost, self.deployment.reload_failures());
        }
        self.requests.welcome(now);
        Ok(())
    }
}
