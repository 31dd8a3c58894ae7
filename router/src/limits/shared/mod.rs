//! Divides the limits of tenants among the routers of a cluster. Each router publishes its demand, computes its own
//! part from the numbers of all routers, and takes that part once the others have released it. Knows no key, no
//! request.
//!
//! A limit is cut into parts of 65,536. For each tenant a router publishes `claim`, the parts that it may use now;
//! `demand`, the demand of its clients; and `used`, how much of its part is used up. Once a second it looks:
//!
//! ```text
//! its due     a sixteenth of the limit in equal parts, and the rest by demand; where the demand is more than there
//!             is, in proportion to it; where it is less, the remainder in equal parts
//! due < claim it releases the difference at once, and publishes that
//! due > claim it takes what no other router claims; with it comes what the former owners had not used up
//! ```
//! The claim of a router that ended is free when its text lapses. While the store is away nothing moves.

use crate::limits::keys::ApiKeys;
use crate::limits::tenants::{SHARE_ONE, TenantLimits};
use cluster::Post;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};
use types::TenantId;

const EVERY: Duration = Duration::from_secs(1);
/// The part that is kept for routers without demand, so that they can begin at once.
const RESERVE: u32 = SHARE_ONE / 16;
/// Smaller changes of the demand are not published.
const DEMAND_GRAIN: u32 = SHARE_ONE / 32;
/// Smaller changes of a due part are not followed.
const DUE_GRAIN: u32 = SHARE_ONE / 128;
/// The most tenants with divided limits; for further tenants each router grants all. A store's value has 64 KiB.
const TENANTS_MAX: usize = 1000;

/// What a router publishes of one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TenantReport {
    claim: u32,
    demand: u32,
    /// Of requests and of tokens, in parts of the router's own part: more than all if it owes.
    used: [u32; 2],
}

/// The sums of what all others publish of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct ReportTotals {
    n: u32,
    claims: u64,
    demands: u64,
}

pub struct SharedQuotas {
    keys: ApiKeys,
    post: Post,
    tenants: BTreeMap<TenantId, TenantShare>,
    /// What the others had published at the last look.
    reports: RouterReports,
    sent: String,
    looked: Option<Instant>,
    n_looks: u32,
}

/// What each other router publishes of each tenant.
type RouterReports = BTreeMap<String, BTreeMap<TenantId, TenantReport>>;

/// One tenant's part at this router.
#[derive(Clone, Copy, Debug, Default)]
struct TenantShare {
    report: TenantReport,
    /// The demand in parts of the limit; the mean of the last seconds.
    mean_demand: f64,
    /// How much of the unclaimed parts their former owners had used up.
    free_used: [f64; 2],
}

impl SharedQuotas {
    /// From now on the limits of these keys are those of all routers together.
    pub fn new(keys: &ApiKeys, post: Post) -> SharedQuotas {
        keys.divide();
        let (tenants, reports) = (BTreeMap::new(), BTreeMap::new());
        SharedQuotas { keys: keys.clone(), post, tenants, reports, sent: String::new(), looked: None, n_looks: 0 }
    }

    /// Looks once a second. Never ends.
    pub async fn run(mut self) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.update_shares();
        }
    }

    fn update_shares(&mut self) {
        let since = self.looked.replace(Instant::now()).map_or(EVERY, |looked| looked.elapsed());
        let limited = self.keys.limited_tenants();
        let demand_rate = |tenant: &TenantLimits| tenant.take_demand() / since.as_secs_f64().max(0.001);
        let rates: Vec<f64> = limited.iter().map(|(_, tenant)| demand_rate(tenant)).collect();
        if !self.post.is_connected() {
            return;
        }
        let reports = self.post.others().into_iter().map(|(name, text)| (name, read(&text))).collect();
        self.n_looks = self.n_looks.saturating_add(1);
        let before = std::mem::replace(&mut self.reports, reports);
        self.tenants.retain(|id, _| limited.iter().any(|(other, _)| other == id));
        for ((id, tenant), rate) in limited.iter().take(TENANTS_MAX).zip(rates) {
            let divided = self.tenants.entry(*id).or_default();
            divided.update_demand(rate);
            divided.apply_reports(*id, &before, &self.reports);
            // The text of a router that began in the same second has not arrived yet.
            if self.n_looks > 2 {
                divided.update_claim(others_of(*id, &self.reports), tenant);
            }
        }
        for (_, tenant) in limited.iter().skip(TENANTS_MAX) {
            tenant.set_share(SHARE_ONE, [0.0; 2]);
        }
        self.publish();
    }

    fn publish(&mut self) {
        let all: Map<String, Value> =
            self.tenants.iter().map(|(id, divided)| (id_text(*id), divided.report.to_json())).collect();
        let text = Value::Object(all).to_string();
        if text != self.sent {
            self.post.publish(text.clone());
            self.sent = text;
        }
    }
}

impl TenantShare {
    /// `rate` is the demand of the last second, in limits a second.
    fn update_demand(&mut self, rate: f64) {
        const MINUTE: f64 = 60.0;
        self.mean_demand = (self.mean_demand + rate * MINUTE) / 2.0;
        let demand = (self.mean_demand * f64::from(SHARE_ONE)).min(f64::from(SHARE_ONE)) as u32;
        if demand.abs_diff(self.report.demand) >= DEMAND_GRAIN || (demand == 0) != (self.report.demand == 0) {
            self.report.demand = demand;
        }
    }

    /// Records how much of the parts was used up that others have released. A router that is gone has not published its
    /// last requests, so all of its part counts as used.
    fn apply_reports(&mut self, id: TenantId, before: &RouterReports, now: &RouterReports) {
        let of = |reports: Option<&BTreeMap<TenantId, TenantReport>>| {
            reports.and_then(|by_tenant| by_tenant.get(&id).copied()).unwrap_or_default()
        };
        let (mut given, mut used) = (0.0, [0.0; 2]);
        for (name, router_reports) in before {
            let before = of(Some(router_reports));
            let let_go = f64::from(before.claim.saturating_sub(of(now.get(name)).claim));
            let level = now.get(name).map_or([SHARE_ONE; 2], |now| of(Some(now)).used);
            given += let_go;
            (0..2).for_each(|i| used[i] += let_go * f64::from(level[i]) / f64::from(SHARE_ONE));
        }
        if given > 0.0 {
            self.free_used = used.map(|used| used / given);
        }
    }

    fn update_claim(&mut self, others: ReportTotals, tenant: &TenantLimits) {
        let (due, before) = (due(self.report.demand, others), self.report.claim);
        let free = u64::from(SHARE_ONE).saturating_sub(others.claims) as u32;
        let target = if due.abs_diff(before) < DUE_GRAIN { before } else { due };
        let claim = if target <= before { target } else { target.min(free.max(before)) };
        if claim != before {
            tenant.set_share(claim, self.free_used);
            self.report = TenantReport { claim, used: tenant.used_up(), ..self.report };
        }
    }
}

/// Returns the due part of a router with this demand.
fn due(demand: u32, others: ReportTotals) -> u32 {
    let (n, demands) = (u64::from(others.n) + 1, others.demands + u64::from(demand));
    let (base, rest) = (u64::from(RESERVE) / n, u64::from(SHARE_ONE - RESERVE));
    let part = match rest.checked_sub(demands) {
        Some(left) => u64::from(demand) + left / n,
        None => rest * u64::from(demand) / demands,
    };
    (base + part) as u32
}

fn others_of(id: TenantId, reports: &RouterReports) -> ReportTotals {
    let none = ReportTotals { n: reports.len() as u32, ..ReportTotals::default() };
    reports.values().filter_map(|by_tenant| by_tenant.get(&id)).fold(none, |all, report| ReportTotals {
        claims: all.claims + u64::from(report.claim),
        demands: all.demands + u64::from(report.demand),
        ..all
    })
}

fn id_text(id: TenantId) -> String {
    format!("{:016x}", id.0)
}

impl TenantReport {
    fn to_json(self) -> Value {
        json!([self.claim, self.demand, self.used[0], self.used[1]])
    }

    fn read(value: &Value) -> Option<TenantReport> {
        let numbers = value.as_array()?.iter().map(|number| u32::try_from(number.as_u64()?).ok());
        let [claim, demand, requests, tokens] = numbers.collect::<Option<Vec<u32>>>()?.try_into().ok()?;
        Some(TenantReport { claim: claim.min(SHARE_ONE), demand: demand.min(SHARE_ONE), used: [requests, tokens] })
    }
}

/// Parses a router's text. Unreadable parts are left out.
fn read(text: &str) -> BTreeMap<TenantId, TenantReport> {
    let all: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    let entry = |(id, value): (&String, &Value)| {
        Some((TenantId(u64::from_str_radix(id, 16).ok()?), TenantReport::read(value)?))
    };
    all.iter().filter_map(entry).collect()
}

#[cfg(test)]
mod tests;
