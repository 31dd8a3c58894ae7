//! Each request reports once why no more of its prompt was reused, with the position.

use super::by_hand::{plan, request};
use scheduler::{Config, RequestOutput, Scheduler};
use types::{
    CacheGroup, CacheSalt, Epoch, Goal, Micros, PrefixReuse, Request, ReuseEnd, SliceDone, StepDone, TenantId,
    TokenOut, Want,
};

fn config(groups: &[CacheGroup], n_blocks: &[u32]) -> Config {
    let context_max = 600;
    Config { groups: groups.to_vec(), n_blocks: n_blocks.to_vec(), context_max, state_stride: 0, ..Config::default() }
}

/// Runs a request to its end, and returns the reuse in its outputs, which must all agree.
fn reuse(scheduler: &mut Scheduler, request: Request) -> (Option<ReuseEnd>, u32) {
    scheduler.submit(request, Micros(0)).unwrap();
    let mut out: Vec<RequestOutput> = Vec::new();
    while let Some(step) = plan(scheduler) {
        let draw = |want| if want == Want::Last { vec![TokenOut::default()] } else { vec![] };
        let pool = |want| if want == Want::Pool { vec![1.0] } else { vec![] };
        let done = |want| SliceDone { tokens: draw(want), pooled: pool(want), ..SliceDone::default() };
        let slices = step.slices.iter().map(|slice| done(slice.want)).collect();
        scheduler.apply(&StepDone { id: step.id, epoch: step.epoch, slices, micros: 0 }, Micros(0), &mut out).unwrap();
    }
    let PrefixReuse { ended, position, .. } = out[0].reuse;
    assert!(out.iter().all(|output| output.reuse == out[0].reuse));
    (ended, position)
}

#[test]
fn each_reuse_end_is_reported_where_it_holds() {
    let mut scheduler = Scheduler::new(config(&[CacheGroup::FULL], &[40]), Epoch::default()).unwrap();
    let mut check_reuse =
        |request, ended, position| assert_eq!(reuse(&mut scheduler, request), (Some(ended), position));
    check_reuse(request(1, 0..100, 1), ReuseEnd::FirstUse, 0);
    check_reuse(request(2, 0..100, 1), ReuseEnd::Whole, 96);
    check_reuse(request(3, (0..50).chain(900..950), 1), ReuseEnd::Differs, 48);
    check_reuse(request(4, 0..10, 1), ReuseEnd::FirstUse, 0);
    let tenant = Request { tenant: TenantId(9), ..request(5, 0..100, 1) };
    check_reuse(tenant.clone(), ReuseEnd::OtherOwner, 0);
    check_reuse(Request { cache_salt: CacheSalt([7; 16]), ..request(6, 0..100, 1) }, ReuseEnd::OtherOwner, 0);
    check_reuse(Request { cache_bypass: true, ..request(7, 0..100, 1) }, ReuseEnd::Bypassed, 0);
    check_reuse(Request { goal: Goal::Pool, ..request(8, 0..100, 1) }, ReuseEnd::Bypassed, 0);
    check_reuse(Request { cache_apart: true, ..request(9, 0..100, 1) }, ReuseEnd::Apart, 0);
    check_reuse(Request { id: types::RequestId(10), ..tenant }, ReuseEnd::Whole, 96);
    // A long one needs the room of the others.
    check_reuse(request(11, 5000..5550, 1), ReuseEnd::FirstUse, 0);
    check_reuse(request(12, 0..100, 1), ReuseEnd::Evicted, 0);
    let off = Config { prefix_cache: false, ..config(&[CacheGroup::FULL], &[40]) };
    assert_eq!(
        reuse(&mut Scheduler::new(off, Epoch::default()).unwrap(), request(1, 0..100, 1)),
        (Some(ReuseEnd::Off), 0)
    );
}

#[test]
fn unkept_state_is_distinct_from_evicted_state() {
    let groups = [CacheGroup::STATE, CacheGroup::FULL];
    let mut scheduler = Scheduler::new(config(&groups, &[8, 200]), Epoch::default()).unwrap();
    let mut check_reuse =
        |request, ended, position| assert_eq!(reuse(&mut scheduler, request), (Some(ended), position));
    check_reuse(request(1, 0..100, 1), ReuseEnd::FirstUse, 0);
    check_reuse(request(2, (0..80).chain(900..950), 1), ReuseEnd::StateNotKept, 80);
    check_reuse(request(3, (0..80).chain(1000..1050), 1), ReuseEnd::Differs, 80);
    for id in 4..10 {
        check_reuse(request(id, (0..100).map(|at| at + 5000 * id as u32), 20), ReuseEnd::FirstUse, 0);
    }
    check_reuse(request(10, 0..100, 1), ReuseEnd::Evicted, 96);
}

#[test]
fn what_is_not_in_a_window_any_more_was_evicted() {
    let groups = [CacheGroup::FULL, CacheGroup::FULL.with_window(40)];
    let mut scheduler = Scheduler::new(config(&groups, &[200, 40]), Epoch::default()).unwrap();
    assert_eq!(reuse(&mut scheduler, request(1, 0..500, 1)), (Some(ReuseEnd::FirstUse), 0));
    assert_eq!(reuse(&mut scheduler, request(2, 7000..7500, 1)), (Some(ReuseEnd::FirstUse), 0));
    assert_eq!(reuse(&mut scheduler, request(3, 0..100, 1)), (Some(ReuseEnd::Evicted), 96));
}
