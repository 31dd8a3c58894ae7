//! Routers over one store in memory, second by second: what they grant together. Knows no key file and no socket.

use super::*;
use cluster::MemoryStore;
use std::sync::Arc;

const SECOND: Duration = Duration::from_secs(1);
const REQUESTS_A_MINUTE: u32 = 600;

/// A router with one tenant, which may send so many requests a minute to all routers together.
struct Router {
    keys: ApiKeys,
    shared: SharedQuotas,
    granted: u32,
}

impl Router {
    fn start(store: &MemoryStore, name: &str) -> Router {
        let keys = ApiKeys::parse(&format!("a:ka requests_per_minute={REQUESTS_A_MINUTE}")).unwrap();
        let shared = SharedQuotas::new(&keys, store.post(name));
        Router { keys, shared, granted: 0 }
    }

    fn tenant(&self) -> Arc<TenantLimits> {
        self.keys.tenant_limits(self.keys.tenant("ka").unwrap())
    }

    fn request(&mut self, n: u32) {
        let tenant = self.tenant();
        self.granted += (0..n).filter(|_| tenant.enter(SECOND).is_ok()).count() as u32;
    }

    fn claim(&self) -> u32 {
        self.shared.tenants.values().next().map_or(0, |divided| divided.report.claim)
    }
}

/// Returns what one router alone grants in so many seconds: a full bucket, and its refill.
fn alone(seconds: u32) -> f64 {
    f64::from(REQUESTS_A_MINUTE) * (1.0 + f64::from(seconds) / 60.0)
}

/// Passes a second: each router receives so many requests, in ten portions, and then looks.
async fn run_second(routers: &mut [Router], demands: &[u32]) {
    for _ in 0..10 {
        for (router, n) in routers.iter_mut().zip(demands) {
            router.request(n / 10);
        }
        tokio::time::advance(SECOND / 10).await;
    }
    routers.iter_mut().for_each(|router| router.shared.update_shares());
    let claims: u64 = routers.iter().map(|router| u64::from(router.claim())).sum();
    assert!(claims <= u64::from(SHARE_ONE), "never more than there is: {claims}");
}

async fn after_two_looks(routers: &mut [Router]) {
    for _ in 0..3 {
        run_second(routers, &[]).await;
    }
}

#[track_caller]
fn within_a_tenth(granted: u32, of: f64) {
    let part = f64::from(granted) / of;
    assert!((0.9..=1.1).contains(&part), "{granted} of {of:.0}: {part:.3}");
}

fn granted(routers: &[Router]) -> u32 {
    routers.iter().map(|router| router.granted).sum()
}

/// Checks `n` routers over three minutes. `demand` returns how many requests each receives in each second.
async fn check(n: usize, demand: impl Fn(usize, u32) -> u32) {
    let store = MemoryStore::starting_at(1);
    let mut routers: Vec<Router> = (0..n).map(|i| Router::start(&store, &format!("r{i}"))).collect();
    after_two_looks(&mut routers).await;
    for at in 0..180 {
        let demands: Vec<u32> = (0..n).map(|i| demand(i, at)).collect();
        run_second(&mut routers, &demands).await;
    }
    within_a_tenth(granted(&routers), alone(180));
}

#[tokio::test(start_paused = true)]
async fn routers_together_grant_what_one_would_wherever_clients_go() {
    check(1, |_, _| 100).await;
    check(2, |_, _| 100).await;
    check(5, |_, _| 40).await;
    // All clients at one; unequal; from one to another every twenty seconds.
    check(3, |i, _| if i == 1 { 100 } else { 0 }).await;
    check(3, |i, _| [10, 200, 40][i]).await;
    check(3, |i, at| if at / 20 % 3 == i as u32 { 100 } else { 0 }).await;
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_each_router_keeps_its_last_share() {
    let store = MemoryStore::starting_at(1);
    let (near, far) = (store.clone(), store.remote_view());
    let mut routers = vec![Router::start(&near, "near"), Router::start(&far, "far")];
    for _ in 0..20 {
        far.refresh(|_| false);
        run_second(&mut routers, &[100, 50]).await;
    }
    let before = [routers[0].claim(), routers[1].claim()];
    assert!(before.iter().all(|claim| *claim > SHARE_ONE / 4), "{before:?}");
    far.report_away();
    routers.iter_mut().for_each(|router| router.granted = 0);
    for _ in 0..60 {
        // The other clients have gone, and the router that is cut off cannot see which router takes its part.
        run_second(&mut routers[1..], &[100]).await;
    }
    assert_eq!(routers[1].claim(), before[1]);
    within_a_tenth(granted(&routers), f64::from(REQUESTS_A_MINUTE) * f64::from(before[1]) / f64::from(SHARE_ONE));
}

#[tokio::test(start_paused = true)]
async fn a_lost_routers_share_comes_back_and_a_new_one_gets_its_own() {
    let store = MemoryStore::starting_at(1);
    let mut routers: Vec<Router> = ["a", "b"].map(|name| Router::start(&store, name)).into();
    after_two_looks(&mut routers).await;
    for _ in 0..30 {
        run_second(&mut routers, &[100, 100]).await;
    }
    // The router is dropped, as when its lease has lapsed.
    let lost = routers.pop().unwrap().granted;
    for _ in 0..60 {
        run_second(&mut routers, &[100]).await;
    }
    assert_eq!(routers[0].claim(), SHARE_ONE);
    routers.push(Router::start(&store, "c"));
    for _ in 0..90 {
        run_second(&mut routers, &[100, 100]).await;
    }
    assert!(routers[1].claim() > SHARE_ONE / 3, "{}", routers[1].claim());
    within_a_tenth(granted(&routers) + lost, alone(30 + 60 + 90));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_nothing_changes_and_once_a_second_at_most() {
    let store = MemoryStore::starting_at(1);
    let mut routers: Vec<Router> = ["a", "b"].map(|name| Router::start(&store, name)).into();
    after_two_looks(&mut routers).await;
    for _ in 0..20 {
        run_second(&mut routers, &[20, 20]).await;
    }
    let before = store.revision();
    for _ in 0..60 {
        run_second(&mut routers, &[20, 20]).await;
    }
    assert_eq!(store.revision(), before, "steady use sends no update");
    for at in 0..60 {
        run_second(&mut routers, &[at % 7 * 100, at % 5 * 100]).await;
    }
    assert!(store.revision() - before <= 2 * 60, "{}", store.revision() - before);
    assert!(granted(&routers) > 1000);
}

#[tokio::test(start_paused = true)]
async fn of_more_tenants_than_a_value_holds_each_router_grants_all() {
    let store = MemoryStore::starting_at(1);
    let text: String = (0..TENANTS_MAX + 5).map(|i| format!("t{i}:k{i} requests_per_minute=60\n")).collect();
    let keys = ApiKeys::parse(&text).unwrap();
    let other = store.post("other");
    let mut shared = SharedQuotas::new(&keys, store.post("own"));
    (0..4).for_each(|_| shared.update_shares());
    assert!(other.others()["own"].len() < 64 << 10, "{}", other.others()["own"].len());
    let admitted = (0..TENANTS_MAX + 5).filter(|i| {
        let tenant = keys.tenant_limits(keys.tenant(&format!("k{i}")).unwrap());
        tenant.enter(SECOND).is_ok()
    });
    assert_eq!(admitted.count(), TENANTS_MAX + 5, "each tenant has a share");
}

#[test]
fn reports_round_trip_and_nonsense_is_ignored() {
    let report = TenantReport { claim: 7, demand: SHARE_ONE, used: [1, 2 * SHARE_ONE] };
    assert_eq!(TenantReport::read(&report.to_json()), Some(report));
    let text = format!(
        "{{\"{}\": {}, \"x\": [1, 2, 3, 4], \"0000000000000002\": [1, -2, 3, 4]}}",
        id_text(TenantId(1)),
        report.to_json()
    );
    assert_eq!(read(&text), [(TenantId(1), report)].into());
    for nonsense in ["", "[]", "{\"01\": 7}", "{\"01\": [1, 2, 3]}", "{\"01\": [1, 2, 3, 4, 5]}"] {
        assert_eq!(read(nonsense), BTreeMap::new(), "{nonsense}");
    }
    assert_eq!(TenantReport::read(&json!([u32::MAX, u32::MAX, 0, 0])).map(|parsed| parsed.claim), Some(SHARE_ONE));
}
