//! Start-time fair queueing between tenants, in integers. Knows tokens and weights; no request, no clock.
//!
//! Each tenant has a tag: the tokens that were planned for it, divided by its weight. The lowest tag is served first,
//! so tenants that always have work get tokens in proportion to their weights. A tenant that was idle does not keep its
//! unused share: its tag is moved to that of the tenant that was admitted last.
//!
//! ```text
//! tags   heavy ........|...........    admitted at 20, since then it got more
//!        light ..o->  o                came back: not at 3, but at 20, and so before the heavy one's next
//! ```

use alloc::vec::Vec;
use core::cmp::Ordering;
use types::{TenantId, TenantWeight};

/// How far a token moves the tag of a tenant of weight one: finer than the largest weight, so that nothing is free.
const TOKEN: u64 = 1 << 20;

/// The index of the tenants that found no place of their own, which count as one.
const COMMON: TenantIdx = 0;

pub(crate) type TenantIdx = u32;

#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    /// None for the common place.
    id: Option<TenantId>,
    weight: TenantWeight,
    tag: u64,
    pub n_waiting: u32,
    pub waiting_tokens: u64,
    pub n_running: u32,
    /// Tokens that the step being planned has for it.
    n_planned: u32,
    /// Tokens that the step being planned has for its prompts.
    pub for_chunks: u32,
    /// How many of its sequences were ranked so far.
    n_ranked: u32,
}

impl Tenant {
    fn of(id: Option<TenantId>, weight: TenantWeight, tag: u64) -> Tenant {
        Tenant {
            id,
            weight,
            tag,
            n_waiting: 0,
            waiting_tokens: 0,
            n_running: 0,
            n_planned: 0,
            for_chunks: 0,
            n_ranked: 0,
        }
    }

    fn is_present(&self) -> bool {
        self.n_waiting + self.n_running > 0
    }

    /// Its tag after the step being planned.
    fn tag_planned(&self) -> u64 {
        self.tag.saturating_add(u64::from(self.n_planned) * TOKEN / u64::from(self.weight.0))
    }
}

pub(crate) struct Tenants {
    /// A tenant keeps its place until another needs it.
    all: Vec<Tenant>,
    places_max: u32,
    n_present: u32,
    /// The tag of the tenant that was admitted last.
    latest: u64,
    /// Reused for its memory.
    order: Vec<TenantIdx>,
}

/// Compares `a` and `b` per weight, without dividing.
fn compare_per_weight((a, of_a): (u64, TenantWeight), (b, of_b): (u64, TenantWeight)) -> Ordering {
    (u128::from(a) * u128::from(of_b.0)).cmp(&(u128::from(b) * u128::from(of_a.0)))
}

impl Tenants {
    pub fn new(places_max: u32) -> Tenants {
        let mut all = Vec::with_capacity(places_max as usize + 1);
        all.push(Tenant::of(None, TenantWeight::default(), 0));
        Tenants { all, places_max, n_present: 0, latest: 0, order: Vec::with_capacity(places_max as usize + 1) }
    }

    /// Whether more than one tenant has requests here.
    pub fn are_many(&self) -> bool {
        self.n_present > 1
    }

    #[inline]
    pub fn get(&self, idx: TenantIdx) -> &Tenant {
        &self.all[idx as usize]
    }

    #[inline]
    fn at(&mut self, idx: TenantIdx) -> &mut Tenant {
        &mut self.all[idx as usize]
    }

    pub fn indices(&self) -> impl Iterator<Item = TenantIdx> + Clone + use<> {
        0..self.all.len() as TenantIdx
    }

    /// The place of a tenant, if it has one.
    fn find(&self, id: TenantId) -> Option<TenantIdx> {
        self.indices().find(|&idx| self.get(idx).id == Some(id))
    }

    /// The place of a tenant: its own, a new one, an unused one, or else the common one.
    pub fn find_or_insert(&mut self, id: TenantId, weight: TenantWeight) -> TenantIdx {
        let weight = TenantWeight(weight.0.max(1));
        if let Some(idx) = self.find(id) {
            self.at(idx).weight = weight;
            return idx;
        }
        let tenant = Tenant::of(Some(id), weight, self.latest);
        if self.all.len() <= self.places_max as usize {
            self.all.push(tenant);
            return self.all.len() as TenantIdx - 1;
        }
        match self.left_place() {
            Some(idx) => {
                *self.at(idx) = tenant;
                idx
            }
            None => COMMON,
        }
    }

    /// A tenant that is ahead of the others keeps its place; otherwise it could reset its tag by waiting for a crowd.
    fn left_place(&self) -> Option<TenantIdx> {
        let is_left = |&idx: &TenantIdx| !self.get(idx).is_present() && self.get(idx).tag <= self.latest;
        self.indices().skip(1).find(is_left)
    }

    /// The place of a tenant's requests: its own, or the common one if there is no other. None if it would get a new
    /// one.
    pub fn find_existing(&self, id: TenantId) -> Option<TenantIdx> {
        let has_room = self.all.len() <= self.places_max as usize || self.left_place().is_some();
        self.find(id).or((!has_room).then_some(COMMON))
    }

    pub fn add_waiting(&mut self, idx: TenantIdx, n_tokens: u32) {
        let latest = self.latest;
        let tenant = self.at(idx);
        let is_new = !tenant.is_present();
        if tenant.n_waiting == 0 {
            tenant.tag = tenant.tag.max(latest);
        }
        tenant.n_waiting += 1;
        tenant.waiting_tokens += u64::from(n_tokens);
        self.n_present += u32::from(is_new);
    }

    pub fn remove_waiting(&mut self, idx: TenantIdx, n_tokens: u32) {
        let tenant = self.at(idx);
        tenant.n_waiting -= 1;
        tenant.waiting_tokens -= u64::from(n_tokens);
        self.leaves_if_done(idx);
    }

    /// A waiting sequence begins to run; the tenant stays present.
    pub fn start_running(&mut self, idx: TenantIdx, n_tokens: u32) {
        self.latest = self.latest.max(self.get(idx).tag);
        self.at(idx).n_running += 1;
        self.remove_waiting(idx, n_tokens);
    }

    pub fn remove_running(&mut self, idx: TenantIdx) {
        self.at(idx).n_running -= 1;
        self.leaves_if_done(idx);
    }

    fn leaves_if_done(&mut self, idx: TenantIdx) {
        self.n_present -= u32::from(!self.get(idx).is_present());
        if self.n_present == 0 {
            // No tenant is owed anything: the next one begins at the highest tag.
            self.latest = self.all.iter().map(|tenant| tenant.tag).max().unwrap_or(0).max(self.latest);
        }
    }

    /// A new step: nothing is planned yet for any tenant.
    pub fn begin_step(&mut self) {
        self.all.iter_mut().for_each(|tenant| tenant.n_planned = 0);
    }

    #[inline]
    pub fn plan(&mut self, idx: TenantIdx, n_tokens: u32) {
        self.at(idx).n_planned += n_tokens;
    }

    pub fn unplan(&mut self, idx: TenantIdx, n_tokens: u32) {
        self.at(idx).n_planned -= n_tokens;
    }

    /// Charges tenants for what was planned.
    pub fn charge(&mut self) {
        for tenant in &mut self.all {
            tenant.tag = tenant.tag_planned();
            tenant.n_planned = 0;
        }
    }

    /// Tenants with waiting requests, the next first: the lowest tag; among equals the one that runs less.
    pub fn waiting_in_order(&mut self) -> &[TenantIdx] {
        let mut order = core::mem::take(&mut self.order);
        order.clear();
        order.extend(self.indices().filter(|&idx| self.get(idx).n_waiting > 0));
        if order.len() > 1 {
            order.sort_unstable_by(|&a, &b| self.compare(a, b));
        }
        self.order = order;
        &self.order
    }

    fn compare(&self, a: TenantIdx, b: TenantIdx) -> Ordering {
        let (first, second) = (self.get(a), self.get(b));
        let tags = first.tag_planned().cmp(&second.tag_planned());
        tags.then_with(|| compare_per_weight(first.running(), second.running())).then(a.cmp(&b))
    }

    /// Divides a step's tokens for prompts: in the order of their tags, tenants take what they need (`for_chunks`).
    pub fn divide(&mut self, n_tokens: u32) {
        let mut order = core::mem::take(&mut self.order);
        order.clear();
        order.extend(self.indices().filter(|&idx| self.get(idx).is_present()));
        order.sort_unstable_by(|&a, &b| self.compare(a, b));
        let mut left = n_tokens;
        for &idx in &order {
            let tenant = self.at(idx);
            tenant.for_chunks = tenant.for_chunks.min(left);
            left -= tenant.for_chunks;
        }
        self.order = order;
    }

    /// Before `divide`: sets what every tenant needs, zero or, for a single one, everything.
    pub fn set_needs(&mut self, n_tokens: u32) {
        self.all.iter_mut().for_each(|tenant| tenant.for_chunks = n_tokens);
    }

    pub fn add_need(&mut self, idx: TenantIdx, n_tokens: u32) {
        let tenant = self.at(idx);
        tenant.for_chunks = tenant.for_chunks.saturating_add(n_tokens);
    }

    #[inline]
    pub fn take_for_chunks(&mut self, idx: TenantIdx, n_tokens: u32) {
        self.at(idx).for_chunks -= n_tokens;
    }

    /// The tenant that runs the most for its weight, if it would still run as much as `idx` after giving up one for it.
    /// So sequences do not go back and forth.
    pub fn above_share(&self, idx: TenantIdx) -> Option<TenantIdx> {
        let (n, weight) = self.get(idx).running();
        let most = self.heaviest(idx, Tenant::running)?;
        let (n_of_most, weight_of_most) = self.get(most).running();
        let gives = compare_per_weight((n + 1, weight), (n_of_most.saturating_sub(1), weight_of_most)).is_le();
        (gives && n_of_most > 0).then_some(most)
    }

    /// Among all others, the tenant with the most for its weight.
    pub fn heaviest(&self, idx: TenantIdx, load: impl Fn(&Tenant) -> (u64, TenantWeight)) -> Option<TenantIdx> {
        let others = self.indices().filter(|&other| other != idx);
        others.max_by(|&a, &b| compare_per_weight(load(self.get(a)), load(self.get(b))).then(b.cmp(&a)))
    }

    /// Begins to rank anew, each tenant's sequences from its first.
    pub fn begin_ranks(&mut self) {
        self.all.iter_mut().for_each(|tenant| tenant.n_ranked = 0);
    }

    /// The rank of a tenant's next sequence, in the order of their keys; the lowest is served first. It grows with the
    /// number of its earlier ones, divided by its weight.
    pub fn rank(&mut self, idx: TenantIdx) -> u64 {
        let tenant = self.at(idx);
        tenant.n_ranked += 1;
        u64::from(tenant.n_ranked) * TOKEN / u64::from(tenant.weight.0)
    }

    /// Whether `own` is no more, for its weight, than what the other would keep.
    pub fn is_lighter(&self, own: (u64, TenantWeight), other: TenantIdx, left: u64) -> bool {
        compare_per_weight(own, (left, self.get(other).weight)).is_le()
    }

    pub fn check(&self, n_waiting: usize, n_running: usize, waiting_tokens: u64) {
        let present = self.all.iter().filter(|tenant| tenant.is_present());
        assert_eq!(present.clone().count() as u32, self.n_present);
        assert_eq!(self.all.iter().map(|tenant| tenant.n_waiting as usize).sum::<usize>(), n_waiting);
        assert_eq!(self.all.iter().map(|tenant| tenant.n_running as usize).sum::<usize>(), n_running);
        assert_eq!(self.all.iter().map(|tenant| tenant.waiting_tokens).sum::<u64>(), waiting_tokens);
        assert!(self.all.len() <= self.places_max as usize + 1, "the number of tenants is limited");
        let ids = self.all.iter().filter_map(|tenant| tenant.id);
        assert!(ids.clone().all(|id| ids.clone().filter(|other| *other == id).count() == 1), "a tenant has one place");
    }
}

impl Tenant {
    pub fn running(&self) -> (u64, TenantWeight) {
        (self.n_running.into(), self.weight)
    }

    pub fn waiting(&self) -> (u64, TenantWeight) {
        (self.n_waiting.into(), self.weight)
    }

    pub fn waiting_tokens(&self) -> (u64, TenantWeight) {
        (self.waiting_tokens, self.weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenants(places_max: u32, weights: &[u16]) -> Tenants {
        let mut tenants = Tenants::new(places_max);
        for (i, &weight) in weights.iter().enumerate() {
            assert_eq!(tenants.find_or_insert(TenantId(i as u64), TenantWeight(weight)), i as u32 + 1);
            tenants.add_waiting(i as u32 + 1, 1);
        }
        tenants
    }

    #[test]
    fn tenant_with_least_service_is_next() {
        let mut tenants = tenants(4, &[1, 3]);
        let mut served = [0; 3];
        for _ in 0..4000 {
            let next = tenants.waiting_in_order()[0];
            served[next as usize] += 1;
            tenants.plan(next, 10);
            tenants.charge();
        }
        assert_eq!(served, [0, 1000, 3000]);
    }

    #[test]
    fn returning_tenant_has_no_credit_for_idle_time() {
        let mut tenants = tenants(4, &[1, 1]);
        tenants.remove_waiting(2, 1);
        for _ in 0..100 {
            tenants.add_waiting(1, 1);
            tenants.start_running(1, 1);
            tenants.plan(1, 50);
            tenants.charge();
        }
        tenants.add_waiting(2, 1);
        assert_eq!(tenants.waiting_in_order(), [2, 1]);
        tenants.plan(2, 101);
        tenants.charge();
        assert_eq!(tenants.waiting_in_order(), [1, 2], "the credit is two steps and not a hundred");
    }

    #[test]
    fn places_are_used_again_and_then_shared() {
        let mut tenants = tenants(2, &[1, 1]);
        assert_eq!(tenants.find_or_insert(TenantId(7), TenantWeight(1)), COMMON);
        tenants.remove_waiting(2, 1);
        assert_eq!(tenants.find_or_insert(TenantId(7), TenantWeight(5)), 2);
        assert_eq!(tenants.find(TenantId(1)), None);
        tenants.add_waiting(2, 1);
        tenants.check(2, 0, 2);
    }

    #[test]
    fn tenant_above_its_share_yields() {
        let mut tenants = tenants(4, &[1, 2]);
        let begin = |tenants: &mut Tenants, idx| {
            tenants.add_waiting(idx, 1);
            tenants.start_running(idx, 1);
        };
        begin(&mut tenants, 1);
        assert_eq!(tenants.above_share(2), None, "one of one");
        begin(&mut tenants, 1);
        assert_eq!(tenants.above_share(2), Some(1));
        begin(&mut tenants, 2);
        begin(&mut tenants, 2);
        assert_eq!(tenants.above_share(2), None);
        assert_eq!(tenants.above_share(1), None);
    }
}
