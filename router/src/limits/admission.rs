//! Admits requests, or refuses them with a reason before any work is done for them. Knows only counts: of all requests
//! and of each tenant.

use crate::config::RouterLimits;
use crate::limits::retry_after::RetryAfter;
use crate::limits::tenants::{TenantLimits, WaitingPlaces};
use crate::refusal::Refusal;
use std::sync::Arc;
use std::time::Duration;
use telemetry::metrics::{self, QueueLimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use types::Priority;

/// One place in this many is left free by requests that can wait, and by tenants that exceed their share.
const PLACES_FOR_OTHERS: usize = 4;

pub struct Admission {
    waiting: Arc<Semaphore>,
    places: u32,
    tokens: Arc<Semaphore>,
    tokens_max: u32,
    draining: CancellationToken,
    retry_after: Duration,
    retry_estimator: Arc<RetryAfter>,
}

/// Places among the requests that have no token yet. Freed on drop.
#[derive(Debug)]
pub struct AdmissionPermit {
    places: OwnedSemaphorePermit,
    _tokens: Option<OwnedSemaphorePermit>,
    held: WaitingPlaces,
    retry_estimator: Arc<RetryAfter>,
}

impl AdmissionPermit {
    /// The request's first token has come: its places are free for others.
    pub fn free_places(self) {
        self.retry_estimator.freed(self.places.num_permits() as u32);
    }
}

impl Admission {
    pub fn new(limits: &RouterLimits, draining: CancellationToken, retry_after: Duration) -> Admission {
        let max = u32::MAX as usize;
        let (places, tokens_max) = (limits.requests_waiting_max.min(max), limits.waiting_tokens_max.min(max));
        Admission {
            waiting: Arc::new(Semaphore::new(places)),
            places: places as u32,
            tokens: Arc::new(Semaphore::new(tokens_max)),
            tokens_max: tokens_max as u32,
            draining,
            retry_after,
            retry_estimator: Arc::new(RetryAfter::new(places as u32, retry_after)),
        }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// How many requests may wait in all.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Gives places for all choices of a request, or for none.
    pub fn admit(
        &self,
        n_choices: u32,
        priority: Priority,
        tenant: &Arc<TenantLimits>,
    ) -> Result<AdmissionPermit, Refusal> {
        if self.is_draining() {
            return Err(Refusal::Draining { retry_after: self.retry_after });
        }
        if n_choices > self.places {
            let most = self.places;
            let message = format!("the request has {n_choices} answers; this server accepts at most {most} at once");
            return Err(Refusal::invalid("n", message));
        }
        let n_others = if priority > Priority::default() { self.places as usize / PLACES_FOR_OTHERS } else { 0 };
        let n_available = self.waiting.available_permits();
        let is_room = n_available >= n_choices as usize + n_others
            && leaves_room(tenant, tenant.n_waiting(), n_choices, self.places, n_available);
        match self.waiting.clone().try_acquire_many_owned(n_choices) {
            Ok(places) if is_room => {
                let (held, retry_estimator) = (tenant.wait(n_choices.into()), self.retry_estimator.clone());
                Ok(AdmissionPermit { places, _tokens: None, held, retry_estimator })
            }
            _ => Err(self.rejected(QueueLimit::Requests)),
        }
    }

    /// Reserves room for the tokens to compute before the first one is answered. A request with more tokens than there
    /// is room takes all of it.
    pub fn admit_tokens(&self, waiting: &mut AdmissionPermit, n_tokens: usize) -> Result<(), Refusal> {
        let n_tokens = u32::try_from(n_tokens).map_or(self.tokens_max, |n| n.min(self.tokens_max));
        let (tenant, n_available) = (waiting.held.tenant(), self.tokens.available_permits());
        if !leaves_room(tenant, tenant.waiting_tokens(), n_tokens, self.tokens_max, n_available) {
            return Err(self.rejected(QueueLimit::Tokens));
        }
        let tokens = self.tokens.clone().try_acquire_many_owned(n_tokens);
        let tokens = tokens.map_err(|_| self.rejected(QueueLimit::Tokens))?;
        waiting._tokens = Some(tokens);
        waiting.held.hold_tokens(n_tokens.into());
        Ok(())
    }

    /// Returns how long a tenant's request waits, if requests in order of arrival wait for `wait`: the tenant's own
    /// requests are before it, and for each of them those of others in proportion to the weights, with the sum
    /// `weights`.
    pub fn own_wait(&self, wait: Duration, tenant: &TenantLimits, weights: u64) -> Duration {
        let n_all = (self.places as usize).saturating_sub(self.waiting.available_permits()).max(1) as f64;
        let (n_own, weight) = (tenant.n_waiting().max(1) as f64, f64::from(tenant.weight().0));
        let rounds = n_own * (weights as f64 / weight).max(1.0);
        wait.mul_f64((rounds / n_all).min(1.0))
    }

    /// Refuses early a request that its deadline would end unanswered. One of a higher priority does not wait for the
    /// others, and its wait is not measured.
    pub fn in_time(&self, wait: Option<Duration>, left: Option<Duration>, priority: Priority) -> Result<(), Refusal> {
        match (wait, left) {
            (Some(wait), Some(left)) if wait > left && priority >= Priority::default() => {
                let retry_after = (wait - left).clamp(self.retry_after, RETRY_AFTER_MAX.max(self.retry_after));
                Err(Refusal::TooLate { wait, retry_after })
            }
            _ => Ok(()),
        }
    }

    /// Counts a request for which a queue has no room.
    pub fn rejected(&self, limit: QueueLimit) -> Refusal {
        metrics::admission_rejected(None, limit);
        self.full()
    }

    pub fn full(&self) -> Refusal {
        Refusal::Full { retry_after: self.retry_estimator.wait(Instant::now()) }
    }

    /// Adds a time to retry to a replica's refusal. The replica cannot know it: it does not see other refused requests.
    pub fn with_retry_after(&self, refusal: Refusal) -> Refusal {
        if matches!(refusal, Refusal::Full { .. }) { self.full() } else { refusal }
    }
}

/// Whether a tenant may hold `n` more of `n_max`. A tenant that would exceed its share leaves a part to others, unless
/// no other tenant holds any.
fn leaves_room(tenant: &TenantLimits, n_held: u64, n: u32, n_max: u32, n_available: usize) -> bool {
    let is_within = n_held + u64::from(n) <= tenant.share_of(n_max.into());
    let n_others = n_max as usize / PLACES_FOR_OTHERS;
    is_within || n_available >= (n as usize + n_others).min(n_max as usize)
}

/// A longer estimate is too imprecise to use.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn admission(requests_waiting_max: usize, waiting_tokens_max: usize) -> Admission {
        let limits = RouterLimits { requests_waiting_max, waiting_tokens_max, ..RouterLimits::default() };
        Admission::new(&limits, CancellationToken::new(), SECOND)
    }

    fn alone() -> Arc<TenantLimits> {
        Arc::default()
    }

    fn of_two() -> [Arc<TenantLimits>; 2] {
        let keys = crate::limits::keys::ApiKeys::parse("a:ka weight=3\nb:kb").unwrap();
        ["ka", "kb"].map(|key| keys.tenant_limits(keys.tenant(key).unwrap()))
    }

    #[test]
    fn a_tenant_with_more_than_its_share_leaves_room_to_others() {
        let (admission, [heavy, light]) = (admission(16, 100), of_two());
        let admit = |n, tenant| admission.admit(n, Priority(0), tenant);
        let (_share, mut full_share) = (admit(4, &light).unwrap(), admit(4, &light).unwrap());
        assert!(is_full(&admit(5, &light)));
        let _within = admit(8, &heavy).unwrap();
        assert_eq!((light.n_waiting(), heavy.n_waiting()), (8, 8));
        admission.admit_tokens(&mut full_share, 75).unwrap();
        drop(full_share);
        assert!(is_full(&admit(1, &light)), "four are left to others");
        // A tenant that is alone may have all places.
        let mut waiting = admission.admit(1, Priority(0), &heavy).unwrap();
        admission.admit_tokens(&mut waiting, usize::MAX).unwrap();
    }

    #[test]
    fn own_wait_is_short_for_tenant_with_few_requests() {
        let (admission, [heavy, light]) = (admission(64, 100), of_two());
        let _many: Vec<_> = (0..30).map(|_| admission.admit(1, Priority(0), &heavy).unwrap()).collect();
        let _one = admission.admit(1, Priority(0), &light).unwrap();
        let minute = Duration::from_secs(62);
        assert_eq!(admission.own_wait(minute, &light, 4), Duration::from_secs(8));
        assert_eq!(admission.own_wait(minute, &heavy, 4), minute);
        assert_eq!(admission.own_wait(minute, &alone(), 0), Duration::from_secs(2));
    }

    fn is_full<T>(admitted: &Result<T, Refusal>) -> bool {
        matches!(admitted, Err(Refusal::Full { retry_after }) if *retry_after >= SECOND)
    }

    #[test]
    fn a_request_that_can_wait_leaves_room_to_one_that_cannot() {
        let admission = admission(8, 100);
        let background = Priority(1);
        let _six = admission.admit(6, background, &alone()).unwrap();
        assert!(is_full(&admission.admit(1, background, &alone())));
        let one = admission.admit(1, Priority(0), &alone()).unwrap();
        let _last = admission.admit(1, Priority(-1), &alone()).unwrap();
        assert!(is_full(&admission.admit(1, Priority(-1), &alone())));
        drop(one);
        assert!(is_full(&admission.admit(1, background, &alone())));
        assert!(admission.admit(1, Priority(0), &alone()).is_ok());
    }

    #[test]
    fn tokens_have_room_or_wait_outside() {
        let admission = admission(8, 100);
        let waits = || admission.admit(1, Priority(0), &alone()).unwrap();
        let (mut first, mut second, mut third) = (waits(), waits(), waits());
        admission.admit_tokens(&mut first, 60).unwrap();
        assert!(is_full(&admission.admit_tokens(&mut second, 41)));
        admission.admit_tokens(&mut second, 40).unwrap();
        assert!(is_full(&admission.admit_tokens(&mut third, usize::MAX)));
        drop((first, second));
        // A request with more tokens than there is room fits if there is no other.
        admission.admit_tokens(&mut third, usize::MAX).unwrap();
    }

    #[test]
    fn request_that_would_miss_its_deadline_gets_retry_after() {
        let admission = admission(8, 100);
        let check = |wait: Option<u64>, left: Option<u64>, priority, retry_after: Option<u64>| {
            let (wait, left) = (wait.map(Duration::from_secs), left.map(Duration::from_secs));
            let suggested =
                admission.in_time(wait, left, Priority(priority)).err().map(|refusal| refusal.retry_after());
            assert_eq!(
                suggested,
                retry_after.map(|seconds| Some(Duration::from_secs(seconds))),
                "{wait:?} of {left:?}"
            );
        };
        check(Some(10), Some(10), 0, None);
        check(Some(10), Some(3), 0, Some(7));
        check(Some(1000), Some(3), 0, Some(60));
        check(Some(10), Some(3), 1, Some(7));
        check(Some(10), Some(3), -1, None);
        check(Some(10), None, 0, None);
        check(None, Some(0), 0, None);
    }
}
