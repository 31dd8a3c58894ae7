//! What happens to requests when there are fewer ranks, which hold less of a log than the promised context.

use scheduler::{Config, RequestOutput, RequestRejection, Scheduler, WorkerLoss};
use types::{Epoch, Finish, KV_PARTS, Micros, Request, RequestId, Sampling, SliceDone, Step, StepDone, TokenOut, Want};

fn request(id: u64, n_prompt: u32, tokens_max: u32) -> Request {
    let sampling = Sampling { tokens_max, stop: vec![9], ..Sampling::default() };
    Request { id: RequestId(id), prompt: (0..n_prompt).collect(), sampling, ..Request::default() }
}

/// Runs until nothing is left to plan; each draw of the 50th position of a log gives the stop token.
fn run_out(scheduler: &mut Scheduler) -> Vec<RequestOutput> {
    let (mut out, mut step) = (Vec::new(), Step::default());
    while scheduler.next_step(Micros(0), &mut step) {
        let token = |end: u32| TokenOut { token: if end == 50 { 9 } else { 7 }, ..TokenOut::default() };
        let draw = |end: u32, want: Want| if want == Want::Last { vec![token(end)] } else { vec![] };
        let slices = step.slices.iter();
        let slices =
            slices.map(|slice| SliceDone { tokens: draw(slice.range.end, slice.want), ..SliceDone::default() });
        let done = StepDone { id: step.id, epoch: step.epoch, slices: slices.collect(), micros: 0 };
        scheduler.apply(&done, Micros(0), &mut out).unwrap();
        scheduler.check();
    }
    out
}

fn ends(out: &[RequestOutput]) -> Vec<(u64, u32, Finish)> {
    out.iter().filter_map(|output| Some((output.id.0, output.position + output.n_tokens, output.finish?))).collect()
}

/// New workers, which hold `room` tokens of a log.
fn place(scheduler: &mut Scheduler, n: u32, room: u32) -> Vec<RequestOutput> {
    let mut out = Vec::new();
    scheduler.limit_log_length(room, true);
    let epoch = Epoch { incarnation: 0, n };
    scheduler.requeue_into(epoch, &[room.div_ceil(16) * 4], WorkerLoss::Unexplained, &mut out);
    scheduler.check();
    out
}

#[test]
fn logs_that_fit_go_on_and_others_are_outgrown() {
    let config = Config { n_blocks: vec![64], context_max: 256, batch_tokens_max: 64, ..Config::default() };
    let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
    // A short one; a long one that may stop before the end of the room; one without a stop before it; a prompt beyond
    // it.
    let all = [request(1, 10, 5), request(2, 30, 200), request(3, 60, 100), request(4, 70, 10)];
    all.into_iter().for_each(|request| scheduler.submit(request, Micros(0)).unwrap());
    assert_eq!(ends(&place(&mut scheduler, 1, 64)), [(4, 0, Finish::Outgrown)]);
    let refused = scheduler.submit(request(5, 64, 5), Micros(0));
    assert_eq!(refused, Err(RequestRejection::Outgrown { n_tokens: 64, room: 64 }));
    // No log is cut short and called complete: the third ends as one that could go on elsewhere.
    let mut got = ends(&run_out(&mut scheduler));
    got.sort_by_key(|end| end.0);
    assert_eq!(got, [(1, 5, Finish::Length), (2, 21, Finish::Stop), (3, 4, Finish::Outgrown)]);
    assert!(scheduler.is_idle());
    // It comes again, with its output, when there are more ranks.
    assert!(place(&mut scheduler, 2, 256).is_empty());
    let again = Request { output: vec![7; 4], ..request(3, 60, 100) };
    scheduler.submit(again, Micros(0)).unwrap();
    scheduler.submit(request(5, 64, 300), Micros(0)).unwrap();
    let mut got = ends(&run_out(&mut scheduler));
    got.sort_by_key(|end| end.0);
    assert_eq!(got, [(3, 100, Finish::Length), (5, 192, Finish::Length)]);
}

#[test]
fn what_waits_grows_as_long_as_it_may_when_ranks_are_many_again() {
    let config = Config { n_blocks: vec![64], context_max: 256, ..Config::default() };
    let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
    scheduler.submit(request(1, 60, 100), Micros(0)).unwrap();
    assert!(place(&mut scheduler, 1, 64).is_empty() && place(&mut scheduler, 2, 256).is_empty());
    assert_eq!(ends(&run_out(&mut scheduler)), [(1, 100, Finish::Length)]);
}

#[test]
fn request_waits_for_uncommitted_blocks_without_harming_others() {
    let config = Config { n_blocks: vec![64], context_max: 256, batch_tokens_max: 64, ..Config::default() };
    let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
    // Four blocks of 64.
    scheduler.set_committed_parts(KV_PARTS / 16);
    scheduler.submit(request(1, 20, 10), Micros(0)).unwrap();
    scheduler.submit(request(2, 100, 10), Micros(0)).unwrap();
    scheduler.submit(request(3, 20, 60), Micros(0)).unwrap();
    assert_eq!(
        ends(&run_out(&mut scheduler)),
        [(1, 10, Finish::Length)],
        "the second waits, and the third waits behind it"
    );
    scheduler.set_committed_parts(KV_PARTS / 8);
    let mut got = ends(&run_out(&mut scheduler));
    got.sort_by_key(|end| end.0);
    assert_eq!(got, [(2, 10, Finish::Length), (3, 31, Finish::Stop)]);
    // A log that grows beyond what has memory goes on when there is more, without another prefill.
    scheduler.requeue_all(Epoch { incarnation: 0, n: 1 }, WorkerLoss::Planned, &mut Vec::new());
    scheduler.set_committed_parts(KV_PARTS / 16);
    scheduler.submit(request(4, 60, 10), Micros(0)).unwrap();
    let before = scheduler.stats().counters;
    assert_eq!(ends(&run_out(&mut scheduler)), []);
    scheduler.set_committed_parts(KV_PARTS);
    assert_eq!(ends(&run_out(&mut scheduler)), [(4, 10, Finish::Length)]);
    let after = scheduler.stats().counters;
    assert_eq!((after.preemptions - before.preemptions, after.admissions - before.admissions), (0, 1));
}
