//! A tenant's limits at this router, and its use of them: requests and tokens a minute, of which it may have a share
//! (`shared`), concurrent requests, places to wait. Knows no keys and no text.

use crate::refusal::{Limit, Refusal, whole_seconds};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use telemetry::metrics;
use tokio::time::Instant;
use types::TenantWeight;

const WEIGHT_MAX: u32 = 1000;
const MINUTE: Duration = Duration::from_secs(60);
/// A share that is the whole limit.
pub const SHARE_ONE: u32 = 1 << 16;

/// The limits in a tenant's line. An absent limit means none; an absent weight is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    weight: Option<u32>,
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u32>,
    concurrent: Option<u32>,
}

impl Quotas {
    /// Reads a word such as `weight=4`.
    pub fn read(&mut self, word: &str) -> Result<(), String> {
        let unknown = || {
            let known = "weight=N, requests_per_minute=N, tokens_per_minute=N or concurrent=N";
            format!("`{word}` is not a limit; use {known}")
        };
        let (name, value) = word.split_once('=').ok_or_else(unknown)?;
        let (limit, max) = match name {
            "weight" => (&mut self.weight, WEIGHT_MAX),
            "requests_per_minute" => (&mut self.requests_per_minute, u32::MAX),
            "tokens_per_minute" => (&mut self.tokens_per_minute, u32::MAX),
            "concurrent" => (&mut self.concurrent, u32::MAX),
            _ => return Err(unknown()),
        };
        let value = value.parse().ok().filter(|value| (1..=max).contains(value));
        let value = value.ok_or_else(|| format!("{name} must be a number from 1 to {max}"))?;
        once(limit, Some(value), name)
    }

    /// Joins both, unless they contradict each other.
    pub fn and(mut self, other: Quotas) -> Result<Quotas, String> {
        once(&mut self.weight, other.weight, "weight")?;
        once(&mut self.requests_per_minute, other.requests_per_minute, "requests_per_minute")?;
        once(&mut self.tokens_per_minute, other.tokens_per_minute, "tokens_per_minute")?;
        once(&mut self.concurrent, other.concurrent, "concurrent")?;
        Ok(self)
    }

    pub fn or(self, other: Quotas) -> Quotas {
        Quotas {
            weight: self.weight.or(other.weight),
            requests_per_minute: self.requests_per_minute.or(other.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(other.tokens_per_minute),
            concurrent: self.concurrent.or(other.concurrent),
        }
    }

    pub fn weight(&self) -> TenantWeight {
        TenantWeight(self.weight.unwrap_or(1) as u16)
    }
}

fn once(limit: &mut Option<u32>, value: Option<u32>, name: &str) -> Result<(), String> {
    match (*limit, value) {
        (Some(before), Some(now)) if before != now => Err(format!("{name} is set twice: {before} and {now}")),
        (before, now) => {
            *limit = before.or(now);
            Ok(())
        }
    }
}

/// How fast a bucket fills: the share of a limit.
#[derive(Clone, Copy, Debug)]
struct RefillRate {
    per_minute: u32,
    share: u32,
}

impl RefillRate {
    /// Returns how long a bucket takes to fill by `n`; without a share it never does.
    fn lasts(self, n: u64) -> Duration {
        let per_minute = u128::from(self.per_minute) * u128::from(self.share);
        let micros = (u128::from(n) * MINUTE.as_micros() * u128::from(SHARE_ONE)).checked_div(per_minute);
        Duration::from_micros(micros.and_then(|micros| u64::try_from(micros).ok()).unwrap_or(u64::MAX))
    }

    fn cap(self, n: u64) -> u64 {
        n.min(self.per_minute.into())
    }
}

/// A token bucket that fills evenly within a minute, stored as the time at which it is full again.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    full_at: Option<Instant>,
}

impl Bucket {
    fn until_full(&self, now: Instant) -> Duration {
        self.full_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
    }

    /// Returns how much can be taken at once.
    fn left(&self, rate: RefillRate, now: Instant) -> u32 {
        let all = u128::from(rate.per_minute) * u128::from(rate.share);
        let used = (self.until_full(now).as_micros() * all).div_ceil(MINUTE.as_micros());
        u32::try_from(all.saturating_sub(used) / u128::from(SHARE_ONE)).unwrap_or(u32::MAX)
    }

    /// Takes `n`. If there is too little, the error is how long to wait.
    fn take(&mut self, n: u64, rate: RefillRate, now: Instant) -> Result<(), Duration> {
        if rate.share == 0 {
            return Err(NO_SHARE_YET);
        }
        let (until_full, lasts) = (self.until_full(now), rate.lasts(rate.cap(n)));
        // A request for all of it, or for more than the share, waits until a bucket in debt is full, and no longer.
        let full_in = until_full + lasts.min(MINUTE);
        if full_in > MINUTE {
            return Err(full_in - MINUTE);
        }
        self.full_at = now.checked_add(until_full + lasts);
        Ok(())
    }

    /// Corrects the bucket if the use differs from what was taken.
    fn settle(&mut self, taken: u64, used: u64, rate: RefillRate, now: Instant) {
        let (taken, until_full) = (rate.cap(taken), self.until_full(now));
        let full_in = match used > taken {
            true => until_full.saturating_add(rate.lasts(used - taken)),
            false => until_full.saturating_sub(rate.lasts(taken - used)),
        };
        self.full_at = now.checked_add(full_in);
    }

    /// Returns the parts of the share that are used up: more than all if it owes.
    fn used_up(&self, now: Instant) -> f64 {
        self.until_full(now).as_secs_f64() / MINUTE.as_secs_f64()
    }

    /// Applies a growth of the share. `used` parts of the growth are used up.
    fn grow(&mut self, (before, after): (u32, u32), used: f64, now: Instant) {
        let (own, new) = (f64::from(before) * self.used_up(now), f64::from(after - before) * used);
        let used_up = ((own + new) / f64::from(after.max(1))).min(USED_MAX);
        self.full_at = now.checked_add(MINUTE.mul_f64(used_up));
    }
}

/// When a client may retry at a router that has just begun, and does not know its share.
const NO_SHARE_YET: Duration = Duration::from_secs(2);
/// A share that is handed on owes at most this.
const USED_MAX: f64 = 60.0;

/// A tenant's use of its limits. Kept for as long as the process lives, whatever the limits become.
#[derive(Debug, Default)]
struct TenantUsage {
    requests: Mutex<Bucket>,
    tokens: Mutex<Bucket>,
    n_under_way: AtomicU64,
    n_waiting: AtomicU64,
    waiting_tokens: AtomicU64,
    /// How much of the limits a minute is this router's, if routers divide them.
    share: AtomicU32,
    /// The demand since the last look, granted or not.
    demanded_requests: AtomicU64,
    demanded_tokens: AtomicU64,
}

impl TenantUsage {
    fn with_share(share: u32) -> TenantUsage {
        TenantUsage { share: share.into(), ..TenantUsage::default() }
    }
}

#[derive(Debug)]
pub struct TenantLimits {
    label: Arc<str>,
    quotas: Quotas,
    /// The sum of all tenants' weights.
    weights: u64,
    used: Arc<TenantUsage>,
}

impl TenantLimits {
    /// A tenant that was not there before begins with this share of its limits.
    pub fn new(
        label: Arc<str>,
        quotas: Quotas,
        weights: u64,
        before: Option<&Arc<TenantLimits>>,
        share: u32,
    ) -> TenantLimits {
        let used = before.map_or_else(|| Arc::new(TenantUsage::with_share(share)), |before| before.used.clone());
        TenantLimits { label, quotas, weights, used }
    }

    /// Whether the tenant has a limit a minute, which routers may divide.
    pub fn is_limited(&self) -> bool {
        self.quotas.requests_per_minute.is_some() || self.quotas.tokens_per_minute.is_some()
    }

    /// Returns the demand since the last call, in parts of the tightest limit.
    pub fn take_demand(&self) -> f64 {
        let per_limit = |n: &AtomicU64, max: Option<u32>| {
            let n = n.swap(0, Relaxed) as f64;
            max.map_or(0.0, |max| n / f64::from(max))
        };
        let Quotas { requests_per_minute, tokens_per_minute, .. } = self.quotas;
        let requests = per_limit(&self.used.demanded_requests, requests_per_minute);
        requests.max(per_limit(&self.used.demanded_tokens, tokens_per_minute))
    }

    /// Changes this router's share of the limits. `free_used` gives how much of a gained part is used up. A lost part
    /// is as used up as the part that stays.
    pub fn set_share(&self, share: u32, free_used: [f64; 2]) {
        let now = Instant::now();
        let before = self.used.share.load(Relaxed);
        if share > before {
            for (bucket, used) in [&self.used.requests, &self.used.tokens].into_iter().zip(free_used) {
                locked(bucket).grow((before, share), used, now);
            }
        }
        self.used.share.store(share, Relaxed);
    }

    /// Returns how much of its share of requests and of tokens is used up, in parts of `SHARE_ONE`.
    pub fn used_up(&self) -> [u32; 2] {
        let now = Instant::now();
        let parts = |bucket: &Mutex<Bucket>| (locked(bucket).used_up(now).min(USED_MAX) * f64::from(SHARE_ONE)) as u32;
        [parts(&self.used.requests), parts(&self.used.tokens)]
    }

    fn rate(&self, per_minute: u32) -> RefillRate {
        RefillRate { per_minute, share: self.used.share.load(Relaxed) }
    }

    /// Returns its name in metrics.
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    pub fn weight(&self) -> TenantWeight {
        self.quotas.weight()
    }

    /// Returns its share of `n` for the case that all tenants use theirs.
    pub fn share_of(&self, n: u64) -> u64 {
        n * u64::from(self.weight().0) / self.weights.max(1)
    }

    pub fn n_waiting(&self) -> u64 {
        self.used.n_waiting.load(Relaxed)
    }

    pub fn waiting_tokens(&self) -> u64 {
        self.used.waiting_tokens.load(Relaxed)
    }

    /// Counts `n` waiting requests, until the result is dropped.
    pub fn wait(self: &Arc<Self>, n: u64) -> WaitingPlaces {
        self.used.n_waiting.fetch_add(n, Relaxed);
        WaitingPlaces { tenant: self.clone(), n, n_tokens: 0 }
    }

    /// Counts an incoming request. One that is refused for its tokens counts too.
    pub fn enter(self: &Arc<Self>, retry_after: Duration) -> Result<Visit, Refusal> {
        metrics::tenant_request(&self.label);
        self.used.demanded_requests.fetch_add(1, Relaxed);
        let n_before = self.used.n_under_way.fetch_add(1, Relaxed);
        let visit = Visit(self.clone());
        match self.quotas.concurrent {
            Some(max) if n_before >= max.into() => Err(limit_refusal(Limit::Concurrent(max), retry_after)),
            _ => self.take(&self.used.requests, 1, self.quotas.requests_per_minute, Limit::Requests).map(|()| visit),
        }
    }

    pub fn count_refusal(&self, refusal: &Refusal) {
        metrics::tenant_refused(&self.label, refusal.label());
    }

    /// Charges the most that a request may use; the unused part is given back at the end. A request for more than the
    /// limit takes all of it.
    pub fn charge(self: &Arc<Self>, n_tokens: u64) -> Result<Charge, Refusal> {
        self.used.demanded_tokens.fetch_add(n_tokens, Relaxed);
        self.take(&self.used.tokens, n_tokens, self.quotas.tokens_per_minute, Limit::Tokens)?;
        Ok(Charge { tenant: self.clone(), taken: n_tokens, n_prompt: 0, n_output: 0, since: Instant::now() })
    }

    fn take(&self, bucket: &Mutex<Bucket>, n: u64, max: Option<u32>, limit: fn(u32) -> Limit) -> Result<(), Refusal> {
        let Some(max) = max else { return Ok(()) };
        let taken = locked(bucket).take(n, self.rate(max), Instant::now());
        taken.map_err(|wait| limit_refusal(limit(max), wait))
    }

    /// Returns the remainder of its limits of requests and of tokens, in this order, if it has them.
    pub fn limit_states(&self) -> [Option<LimitState>; 2] {
        let now = Instant::now();
        let standing = |bucket: &Mutex<Bucket>, max: Option<u32>| {
            let bucket = *locked(bucket);
            max.map(|max| LimitState { max, left: bucket.left(self.rate(max), now), full_in: bucket.until_full(now) })
        };
        let Quotas { requests_per_minute, tokens_per_minute, .. } = self.quotas;
        [standing(&self.used.requests, requests_per_minute), standing(&self.used.tokens, tokens_per_minute)]
    }
}

fn locked(bucket: &Mutex<Bucket>) -> MutexGuard<'_, Bucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

fn limit_refusal(limit: Limit, wait: Duration) -> Refusal {
    Refusal::Limited { limit, retry_after: Duration::from_secs(whole_seconds(wait)) }
}

/// The remainder of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitState {
    pub max: u32,
    pub left: u32,
    pub full_in: Duration,
}

/// A tenant's running request. It is over when this is dropped.
#[derive(Debug)]
pub struct Visit(Arc<TenantLimits>);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.used.n_under_way.fetch_sub(1, Relaxed);
    }
}

/// Places that a tenant's requests hold while they have no token.
#[derive(Debug)]
pub struct WaitingPlaces {
    tenant: Arc<TenantLimits>,
    n: u64,
    n_tokens: u64,
}

impl WaitingPlaces {
    pub fn tenant(&self) -> &TenantLimits {
        &self.tenant
    }

    pub fn hold_tokens(&mut self, n_tokens: u64) {
        self.n_tokens += n_tokens;
        self.tenant.used.waiting_tokens.fetch_add(n_tokens, Relaxed);
    }
}

impl Drop for WaitingPlaces {
    fn drop(&mut self) {
        self.tenant.used.n_waiting.fetch_sub(self.n, Relaxed);
        self.tenant.used.waiting_tokens.fetch_sub(self.n_tokens, Relaxed);
    }
}

/// The charge of a request. It is settled on drop: a request without any answer costs nothing.
#[derive(Debug)]
pub struct Charge {
    tenant: Arc<TenantLimits>,
    taken: u64,
    n_prompt: u64,
    n_output: u64,
    since: Instant,
}

impl Charge {
    /// The replica has begun to answer.
    pub fn begin_answer(&mut self, n_prompt: u64) {
        self.n_prompt = n_prompt;
        metrics::tenant_waited(&self.tenant.label, self.since.elapsed());
    }

    pub fn add_output(&mut self, n_tokens: u64) {
        self.n_output += n_tokens;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        metrics::tenant_tokens(&self.tenant.label, self.n_prompt, self.n_output);
        if let Some(max) = self.tenant.quotas.tokens_per_minute {
            let (used, rate) = (self.n_prompt + self.n_output, self.tenant.rate(max));
            locked(&self.tenant.used.tokens).settle(self.taken, used, rate, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn tenant(words: &str) -> Arc<TenantLimits> {
        let mut quotas = Quotas::default();
        words.split_whitespace().for_each(|word| quotas.read(word).unwrap());
        Arc::new(TenantLimits::new("a".into(), quotas, 4, None, SHARE_ONE))
    }

    #[tokio::test(start_paused = true)]
    async fn requests_come_back_evenly() {
        let tenant = tenant("requests_per_minute=6");
        let refusal = |seconds| Refusal::Limited { limit: Limit::Requests(6), retry_after: SECOND * seconds };
        (0..6).for_each(|_| drop(tenant.enter(SECOND).unwrap()));
        assert_eq!(tenant.enter(SECOND).unwrap_err(), refusal(10));
        tokio::time::advance(SECOND * 4).await;
        assert_eq!(tenant.enter(SECOND).unwrap_err(), refusal(6));
        let standing = LimitState { max: 6, left: 0, full_in: SECOND * 56 };
        assert_eq!(tenant.limit_states(), [Some(standing), None]);
        tokio::time::advance(SECOND * 6).await;
        assert!(tenant.enter(SECOND).is_ok() && tenant.enter(SECOND).is_err());
        tokio::time::advance(SECOND * 600).await;
        (0..6).for_each(|_| drop(tenant.enter(SECOND).unwrap()));
        assert!(tenant.enter(SECOND).is_err(), "no more than a minute's is saved");
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_settled_by_what_was_used() {
        let tenant = tenant("tokens_per_minute=600");
        let left = || tenant.limit_states()[1].unwrap().left;
        let mut charge = tenant.charge(500).unwrap();
        assert_eq!(left(), 100);
        assert_eq!(
            tenant.charge(200).unwrap_err(),
            Refusal::Limited { limit: Limit::Tokens(600), retry_after: SECOND * 10 }
        );
        charge.begin_answer(50);
        charge.add_output(7);
        drop(charge);
        assert_eq!(left(), 543);
        drop(tenant.charge(500).unwrap());
        assert_eq!(left(), 543, "a request without an answer costs nothing");
        tokio::time::advance(SECOND * 60).await;
        // A request for more than the limit takes all of it. Its use beyond the limit is owed.
        let mut charge = tenant.charge(10_000).unwrap();
        assert_eq!(left(), 0);
        charge.begin_answer(900);
        drop(charge);
        let Err(Refusal::Limited { retry_after, .. }) = tenant.charge(1) else { panic!("it owes 300") };
        assert_eq!(retry_after, Duration::from_secs(31));
    }

    #[test]
    fn requests_at_once_are_limited_until_some_end() {
        let tenant = tenant("concurrent=2");
        let (first, _second) = (tenant.enter(SECOND).unwrap(), tenant.enter(SECOND).unwrap());
        let refusal = Refusal::Limited { limit: Limit::Concurrent(2), retry_after: SECOND };
        assert_eq!(tenant.enter(SECOND).unwrap_err(), refusal);
        drop(first);
        assert!(tenant.enter(SECOND).is_ok());
        assert_eq!(tenant.share_of(100), 25);
    }
}
