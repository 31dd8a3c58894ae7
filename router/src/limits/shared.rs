//! Divides the limits of tenants among the routers of a cluster. Each router publishes its demand, computes its own
//! part from the numbers of all routers, and takes that part once the others have released it. Knows no key, no
//! request.
//!
//! A limit is cut into parts of 65,536. For each tenant a router publishes `claim`, the parts that it may use now;
//! `wish`, the demand of its clients; and `used`, how much of its part is used up. Once a second it looks:
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
const WISH_GRAIN: u32 = SHARE_ONE / 32;
/// Smaller changes of a due part are not followed.
const DUE_GRAIN: u32 = SHARE_ONE / 128;
/// The most tenants with divided limits; for further tenants each router grants all. A store's value has 64 KiB.
const TENANTS_MAX: usize = 1000;

/// What a router publishes of one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Said {
    claim: u32,
    wish: u32,
    /// Of requests and of tokens, in parts of the router's own part: more than all if it owes.
    used: [u32; 2],
}

/// The sums of what all others publish of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Others {
    n: u32,
    claims: u64,
    wishes: u64,
}

pub struct SharedQuotas {
    keys: ApiKeys,
    post: Post,
    tenants: BTreeMap<TenantId, Divided>,
    /// What the others had published at the last look.
    heard: Heard,
    told: String,
    looked: Option<Instant>,
    n_looks: u32,
}

/// What each other router publishes of each tenant.
type Heard = BTreeMap<String, BTreeMap<TenantId, Said>>;

/// One tenant's part at this router.
#[derive(Clone, Copy, Debug, Default)]
struct Divided {
    said: Said,
    /// The demand in parts of the limit; the mean of the last seconds.
    asked: f64,
    /// How much of the unclaimed parts their former owners had used up.
    free_used: [f64; 2],
}

impl SharedQuotas {
    /// From now on the limits of these keys are those of all routers together.
    pub fn new(keys: &ApiKeys, post: Post) -> SharedQuotas {
        keys.divide();
        let (tenants, heard) = (BTreeMap::new(), BTreeMap::new());
        SharedQuotas { keys: keys.clone(), post, tenants, heard, told: String::new(), looked: None, n_looks: 0 }
    }

    /// Looks once a second. Never ends.
    pub async fn run(mut self) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.look();
        }
    }

    fn look(&mut self) {
        let since = self.looked.replace(Instant::now()).map_or(EVERY, |looked| looked.elapsed());
        let limited = self.keys.limited();
        let asked = |tenant: &TenantLimits| tenant.asked() / since.as_secs_f64().max(0.001);
        let rates: Vec<f64> = limited.iter().map(|(_, tenant)| asked(tenant)).collect();
        if !self.post.is_connected() {
            return;
        }
        let heard = self.post.others().into_iter().map(|(name, text)| (name, read(&text))).collect();
        self.n_looks = self.n_looks.saturating_add(1);
        let before = std::mem::replace(&mut self.heard, heard);
        self.tenants.retain(|id, _| limited.iter().any(|(other, _)| other == id));
        for ((id, tenant), rate) in limited.iter().take(TENANTS_MAX).zip(rates) {
            let divided = self.tenants.entry(*id).or_default();
            divided.wishes(rate);
            divided.hears(*id, &before, &self.heard);
            // The text of a router that began in the same second has not arrived yet.
            if self.n_looks > 2 {
                divided.moves(others_of(*id, &self.heard), tenant);
            }
        }
        for (_, tenant) in limited.iter().skip(TENANTS_MAX) {
            tenant.has_share(SHARE_ONE, [0.0; 2]);
        }
        self.tell();
    }

    fn tell(&mut self) {
        let all: Map<String, Value> =
            self.tenants.iter().map(|(id, divided)| (id_text(*id), divided.said.json())).collect();
        let text = Value::Object(all).to_string();
        if text != self.told {
            self.post.say(text.clone());
            self.told = text;
        }
    }
}

impl Divided {
    /// `rate` is the demand of the last second, in limits a second.
    fn wishes(&mut self, rate: f64) {
        const MINUTE: f64 = 60.0;
        self.asked = (self.asked + rate * MINUTE) / 2.0;
        let wish = (self.asked * f64::from(SHARE_ONE)).min(f64::from(SHARE_ONE)) as u32;
        if wish.abs_diff(self.said.wish) >= WISH_GRAIN || (wish == 0) != (self.said.wish == 0) {
            self.said.wish = wish;
        }
    }

    /// Records how much of the parts was used up that others have released. A router that is gone has not published its
    /// last requests, so all of its part counts as used.
    fn hears(&mut self, id: TenantId, before: &Heard, now: &Heard) {
        let of =
            |said: Option<&BTreeMap<TenantId, Said>>| said.and_then(|said| said.get(&id).copied()).unwrap_or_default();
        let (mut given, mut used) = (0.0, [0.0; 2]);
        for (name, said) in before {
            let before = of(Some(said));
            let let_go = f64::from(before.claim.saturating_sub(of(now.get(name)).claim));
            let level = now.get(name).map_or([SHARE_ONE; 2], |now| of(Some(now)).used);
            given += let_go;
            (0..2).for_each(|i| used[i] += let_go * f64::from(level[i]) / f64::from(SHARE_ONE));
        }
        if given > 0.0 {
            self.free_used = used.map(|used| used / given);
        }
    }

    fn moves(&mut self, others: Others, tenant: &TenantLimits) {
        let (due, before) = (due(self.said.wish, others), self.said.claim);
        let free = u64::from(SHARE_ONE).saturating_sub(others.claims) as u32;
        let wanted = if due.abs_diff(before) < DUE_GRAIN { before } else { due };
        let claim = if wanted <= before { wanted } else { wanted.min(free.max(before)) };
        if claim != before {
            tenant.has_share(claim, self.free_used);
            self.said = Said { claim, used: tenant.used_up(), ..self.said };
        }
    }
}

/// Returns the due part of a router with this demand.
fn due(wish: u32, others: Others) -> u32 {
    let (n, wishes) = (u64::from(others.n) + 1, others.wishes + u64::from(wish));
    let (base, rest) = (u64::from(RESERVE) / n, u64::from(SHARE_ONE - RESERVE));
    let part = match rest.checked_sub(wishes) {
        Some(left) => u64::from(wish) + left / n,
        None => rest * u64::from(wish) / wishes,
    };
    (base + part) as u32
}

fn others_of(id: TenantId, heard: &Heard) -> Others {
    let none = Others { n: heard.len() as u32, ..Others::default() };
    heard.values().filter_map(|said| said.get(&id)).fold(none, |all, said| Others {
        claims: all.claims + u64::from(said.claim),
        wishes: all.wishes + u64::from(said.wish),
        ..all
    })
}

fn id_text(id: TenantId) -> String {
    format!("{:016x}", id.0)
}

impl Said {
    fn json(self) -> Value {
        json!([self.claim, self.wish, self.used[0], self.used[1]])
    }

    fn read(value: &Value) -> Option<Said> {
        let numbers = value.as_array()?.iter().map(|number| u32::try_from(number.as_u64()?).ok());
        let [claim, wish, requests, tokens] = numbers.collect::<Option<Vec<u32>>>()?.try_into().ok()?;
        Some(Said { claim: claim.min(SHARE_ONE), wish: wish.min(SHARE_ONE), used: [requests, tokens] })
    }
}

/// Parses a router's text. Unreadable parts are left out.
fn read(text: &str) -> BTreeMap<TenantId, Said> {
    let all: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    let one = |(id, said): (&String, &Value)| Some((TenantId(u64::from_str_radix(id, 16).ok()?), Said::read(said)?));
    all.iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests;
