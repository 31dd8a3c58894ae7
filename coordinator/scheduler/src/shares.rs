//! Divides a step between tenants: the order of running sequences, chunks of prompts, and slots. With a single tenant,
//! nothing here changes a step.

use crate::plan::{PromisedBlocks, StepBudget};
use crate::scheduler::Scheduler;
use crate::sequence::SequenceIdx;

impl Scheduler {
    /// Orders the running sequences by their index within their tenant, divided by the tenant's weight, then by their
    /// keys. The last one is preempted first: it is the newest of the tenant that runs the most.
    ///
    /// ```text
    /// heavy, running 4: a b c d    light, running 1: x    weight 1 both    a x b c d
    /// ```
    pub(crate) fn order_running(&mut self) {
        if core::mem::replace(&mut self.is_ranked, true) {
            return;
        }
        let (running, sequences) = (&mut self.running, &mut self.sequences);
        running.sort_unstable_by_key(|&idx| sequences[idx].key);
        self.tenants.begin_ranks();
        for &idx in running.iter() {
            sequences[idx].rank = self.tenants.rank(sequences[idx].tenant);
        }
        if self.tenants.are_many() {
            running.sort_unstable_by_key(|&idx| (sequences[idx].rank, sequences[idx].key));
        }
    }

    /// Divides `n_tokens` between tenants that have a prompt to compute, or one to begin. A single tenant may have all.
    pub(crate) fn divide_prompt_tokens(&mut self, n_tokens: u32) {
        if !self.tenants.are_many() {
            return self.tenants.set_needs(n_tokens);
        }
        self.tenants.set_needs(0);
        for &idx in &self.running {
            let sequence = &self.sequences[idx];
            if sequence.is_chunk() {
                let n_missing = sequence.n_missing(self.ahead_max);
                self.tenants.add_need(sequence.tenant, n_missing.min(sequence.chunk_max));
            }
        }
        let slice_max = self.config.slice_max();
        for tenant in self.tenants.indices() {
            let first = self.waiting.of(tenant).next().map_or(0, |idx| self.sequences[idx].n_known());
            self.tenants.add_need(tenant, first.min(slice_max));
        }
        self.tenants.divide(n_tokens);
    }

    /// Makes room for the first waiting sequence by preempting those of the tenant furthest above its share, as long as
    /// that keeps as much as the other then has. False: it has to wait for its turn.
    pub(crate) fn preempt_above_share(
        &mut self,
        idx: SequenceIdx,
        n_hits: u32,
        promised: &mut PromisedBlocks,
        left: &mut StepBudget,
    ) -> bool {
        let tenant = self.sequences[idx].tenant;
        let mut above_share = self.tenants.above_share(tenant);
        let is_behind = above_share.is_some();
        while is_behind && !(self.has_free_slot() && self.fits(idx, n_hits, promised)) {
            // A sequence that starts in this step cannot be preempted: the step already has its start.
            let may_give = |&at: &usize| {
                let sequence = &self.sequences[self.running[at]];
                Some(sequence.tenant) == above_share && !sequence.is_starting()
            };
            let last = (0..self.running.len()).filter(may_give).max_by_key(|&at| self.sequences[self.running[at]].key);
            let Some(last) = last else { return false };
            left.n_tokens += self.preempt(last);
            *promised = self.promised();
            above_share = self.tenants.above_share(tenant);
        }
        is_behind
    }

    /// Gives tokens that were kept for a tenant and not used to the chunks of others, as far as blocks are free.
    pub(crate) fn spread_unused_tokens(&mut self, left: StepBudget) {
        let mut n_tokens = left.n_tokens;
        for at in 0..self.running.len() {
            let idx = self.running[at];
            let sequence = &self.sequences[idx];
            if n_tokens == 0 || left.short || !sequence.is_chunk() || sequence.has_rows_to_score() {
                continue;
            }
            let n_missing = sequence.n_missing(self.ahead_max);
            let n_more = (n_missing.min(sequence.chunk_max) - sequence.n_planned).min(n_tokens);
            let n_planned = sequence.n_planned + n_more;
            let end = sequence.n_computed + n_planned;
            if !self.has_blocks(idx, end) {
                continue;
            }
            self.tenants.plan(sequence.tenant, n_more);
            self.sequences[idx].n_planned = n_planned;
            self.take_blocks(idx, end);
            n_tokens -= n_more;
        }
    }
}
