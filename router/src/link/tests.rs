//! A link's task without a connection: the frames that it handles, those that it would send, and requests that move.

use super::budget::RetryBudget;
use super::event::LinkEvent;
use super::handle::ReplicaLink;
use super::peers::ReplicaLinks;
use super::receive::splice;
use super::request::{ClientCall, SlotOutput};
use super::target::LinkTarget;
use super::task::LinkTask;
use super::ticket::Ticket;
use super::view::ReplicaView;
use crate::config::{Config, Timeouts};
use crate::refusal::Refusal;
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use telemetry::TraceHeaders;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tonic::Status;
use types::{Finish, PolicyDigest, Request, RequestId};

#[test]
fn splices() {
    let check = |n_sent, position, tokens: &[u32], new: Option<&[u32]>| {
        let tokens = tokens.iter().map(|token| wire::TokenOut { token: *token, ..Default::default() }).collect();
        let mut output = wire::Output { position, tokens, ..Default::default() };
        let is_whole = splice(n_sent, &mut output);
        assert!(!is_whole || output.position == n_sent);
        let tokens: Vec<u32> = output.tokens.iter().map(|out| out.token).collect();
        let spliced = is_whole.then(|| tokens.clone());
        assert_eq!(spliced.as_deref(), new, "{tokens:?} at {position} after {n_sent}");
    };
    check(0, 0, &[7, 8], Some(&[7, 8]));
    check(5, 5, &[7], Some(&[7]));
    check(5, 3, &[1, 2, 7], Some(&[7]));
    check(5, 3, &[1], Some(&[]));
    check(5, 5, &[], Some(&[]));
    check(5, 6, &[7], None);
}

fn given(dialer: &::wire::Dialer) -> (watch::Sender<LinkTarget>, watch::Receiver<LinkTarget>) {
    watch::channel(LinkTarget { channel: dialer.channel(), incarnation: 0, is_listed: true })
}

fn peers() -> ReplicaLinks {
    ReplicaLinks::new(RetryBudget::new(1000, Instant::now()))
}

fn links(peers: &ReplicaLinks) -> Vec<ReplicaLink> {
    peers.rows().0.into_iter().map(|place| peers.link(place).unwrap()).collect()
}

/// A task with a replica and no connection: its frames stay in the outbox.
fn attached(unread_max: usize) -> (ReplicaLink, LinkTask) {
    let limits = crate::config::RouterLimits { outputs_unread_max: unread_max, ..Default::default() };
    let (link, mut task) = detached(&Config { limits, ..Config::default() });
    task.receive(Frame::Welcome(welcome(1)));
    (link, task)
}

/// A task without a replica.
fn detached(config: &Config) -> (ReplicaLink, LinkTask) {
    let (dialer, _) = ::wire::in_memory();
    let peers = peers();
    peers.add_view(ReplicaView::default());
    let task = LinkTask::new(given(&dialer).1, peers.clone(), 0, Arc::new(AtomicU64::new(1)), config);
    (links(&peers).remove(0), task)
}

fn welcome(router: u32) -> wire::Welcome {
    let version = proto::VERSION.to_owned();
    wire::Welcome { version, router, policy_digest: vec![0; 32], context: 100, salt: vec![0; 16], ..Default::default() }
}

fn submit(link: &ReplicaLink, n_places: usize) -> (Ticket, mpsc::Receiver<SlotOutput>) {
    let (outputs, outputs_rx) = mpsc::channel(n_places);
    let sampling = types::Sampling { tokens_max: 50, stop: vec![9], ..Default::default() };
    let request = Request { prompt: vec![1, 2], sampling, ..Request::default() };
    let (digest, trace, first_key) = (PolicyDigest::default(), TraceHeaders::default(), link.keys(1));
    let call =
        Arc::new(ClientCall { first_key, deadline: None, digest, n_cached: 0, trace, needs_progress: false, outputs });
    (link.submit(request, 0, None, &call).unwrap(), outputs_rx)
}

/// Lets the task take what its handles have sent.
fn take(task: &mut LinkTask) {
    while let Ok(cancel) = task.cancelled.try_recv() {
        task.cancel(cancel);
    }
    while let Ok((key, entry)) = task.submitted.try_recv() {
        task.submit(key, *entry);
    }
}

fn id(task: &LinkTask, ticket: &Ticket) -> RequestId {
    task.replica.id(ticket.key()).unwrap()
}

fn token(id: RequestId, position: u32, token: u32) -> Frame {
    let tokens = vec![wire::TokenOut { token, ..Default::default() }];
    let output = wire::Output { id: id.0, position, tokens, ..Default::default() };
    Frame::Outputs(wire::Outputs { outputs: vec![output] })
}

/// Empties the outbox, and returns submits with their output so far, and cancels.
fn sent(task: &mut LinkTask) -> Vec<(u64, Option<Vec<u32>>)> {
    let frames = task.outbox.take().into_iter().map(|frame| match frame {
        wire::router_frame::Frame::Submit(request) => (request.id, Some(request.output)),
        wire::router_frame::Frame::Adopt(adopt) => {
            let request = adopt.request.unwrap();
            (request.id, Some(request.output))
        }
        wire::router_frame::Frame::Cancel(cancel) => (cancel.id, None),
        other => panic!("{other:?}"),
    });
    frames.collect()
}

#[tokio::test]
async fn slow_reader_is_cut_off_with_a_refusal() {
    let (link, mut task) = attached(2);
    assert_eq!(link.work(), 0);
    let (ticket, mut outputs_rx) = submit(&link, 3);
    take(&mut task);
    let id = id(&task, &ticket);
    assert_eq!(sent(&mut task), [(id.0, Some(vec![]))]);
    for position in 0..3 {
        task.receive(token(id, position, 5));
    }
    assert_eq!(sent(&mut task), [(id.0, None)]);
    assert!(task.requests.is_empty());
    for position in 0..2 {
        let (slot, output) = outputs_rx.try_recv().unwrap();
        let output = output.unwrap();
        assert_eq!((slot, output.position, output.finished().unwrap()), (0, position, None));
    }
    let end = outputs_rx.try_recv();
    assert!(matches!(end, Ok((0, Err(Refusal::SlowReader { unread: 2 })))), "{end:?}");
    assert!(outputs_rx.try_recv().is_err());
}

#[tokio::test]
async fn a_cancel_may_come_before_at_and_after_its_request() {
    let (link, mut task) = attached(10);
    drop(submit(&link, 3));
    take(&mut task);
    assert_eq!((sent(&mut task), task.requests.len()), (vec![], 0));
    let (ticket, _outputs_rx) = submit(&link, 3);
    take(&mut task);
    drop(ticket);
    take(&mut task);
    assert_eq!((sent(&mut task), task.requests.len()), (vec![], 0));
    let (ticket, _outputs_rx) = submit(&link, 3);
    take(&mut task);
    let id = id(&task, &ticket);
    assert_eq!(sent(&mut task).len(), 1);
    drop(ticket);
    take(&mut task);
    assert_eq!(sent(&mut task), [(id.0, None)]);
    // A token that was on its way no longer has an owner.
    task.receive(token(id, 0, 5));
}

#[tokio::test]
async fn a_hundred_thousand_cancels_leave_nothing() {
    let (link, mut task) = attached(10);
    let free = (link.submits.capacity(), link.cancels.capacity());
    for round in 0..1000 {
        // Some requests are at the replica, with and without a token, some in a queue, and some ended by a stop string.
        let at_the_replica: Vec<_> = (0..75).map(|_| submit(&link, 3)).collect();
        take(&mut task);
        for (ticket, _) in at_the_replica.iter().take(25) {
            task.receive(token(id(&task, ticket), 0, 5));
        }
        if round % 100 == 50 {
            task.receive_lost(&Status::unavailable("gone"));
            task.receive(Frame::Welcome(welcome(round)));
        }
        let in_a_queue: Vec<_> = (0..25).map(|_| submit(&link, 3)).collect();
        drop(in_a_queue);
        for (i, (ticket, outputs_rx)) in at_the_replica.into_iter().enumerate() {
            if i % 3 == 0 { ticket.stop() } else { drop((outputs_rx, ticket)) }
        }
        take(&mut task);
        assert!(task.requests.is_empty() && task.requests.n_parked() == 0);
        assert_eq!(link.work(), 0);
        assert!(task.outbox.take().len() <= 3 * 75);
    }
    assert_eq!((link.submits.capacity(), link.cancels.capacity()), free);
}

#[tokio::test]
async fn a_lost_replica_gets_the_log_and_a_complete_one_is_at_its_end() {
    let (link, mut task) = attached(10);
    let (goes_on, _outputs_rx) = submit(&link, 9);
    let (complete, mut complete_rx) = submit(&link, 9);
    take(&mut task);
    sent(&mut task);
    let before = id(&task, &goes_on);
    task.receive(token(before, 0, 5));
    // This is the stop token: no further frame is needed for the end.
    task.receive(token(id(&task, &complete), 0, 9));
    let end = complete_rx.try_recv();
    assert!(matches!(&end, Ok((0, Ok(output))) if output.finished().unwrap() == Some(Finish::Stop)), "{end:?}");
    task.receive_lost(&Status::unavailable("gone"));
    assert!(!task.replica.is_attached());
    task.receive(Frame::Welcome(welcome(2)));
    let id = id(&task, &goes_on);
    assert_eq!(sent(&mut task), [(id.0, Some(vec![5]))]);
    // Ids from the replica's former incarnation mean nothing now.
    task.receive(token(before, 1, 6));
    task.receive(token(id, 1, 7));
    assert_eq!(task.requests.get(goes_on.key()).unwrap().request.output, [5, 7]);
}

/// Two links with ready replicas, and their tasks.
fn neighbours() -> (Vec<ReplicaLink>, LinkTask, LinkTask) {
    let peers = peers();
    (0..2).for_each(|place| peers.add_view(ReplicaView { place, ..ReplicaView::default() }));
    let (config, keys) = (Config::default(), Arc::new(AtomicU64::new(1)));
    let new = |place| {
        let (dialer, _) = ::wire::in_memory();
        let mut task = LinkTask::new(given(&dialer).1, peers.clone(), place, keys.clone(), &config);
        task.receive(Frame::Welcome(welcome(1)));
        task
    };
    let (one, two) = (new(0), new(1));
    (links(&peers), one, two)
}

#[tokio::test]
async fn requests_of_a_lost_replica_move_and_their_cancels_follow() {
    let (links, mut one, mut two) = neighbours();
    let (begun, _outputs_rx) = submit(&links[0], 9);
    let (fresh, _fresh) = submit(&links[0], 9);
    let (unwanted, gone) = submit(&links[0], 9);
    take(&mut one);
    one.receive(token(id(&one, &begun), 0, 5));
    assert_eq!((links[0].work(), links[1].work()), (5, 0));
    // The first link learns nothing of the request that ends meanwhile: after a move, its end arrives at the link that
    // has it.
    drop((unwanted, gone));
    one.receive_lost(&Status::unavailable("gone"));
    assert!(one.requests.is_empty() && one.requests.n_parked() == 0);
    assert_eq!((links[0].work(), links[1].work()), (0, 5));
    take(&mut two);
    let ids = [&begun, &fresh].map(|ticket| id(&two, ticket).0);
    assert_eq!(sent(&mut two), [(ids[0], Some(vec![5])), (ids[1], Some(vec![]))]);
    take(&mut one);
    drop(fresh);
    take(&mut two);
    assert_eq!((sent(&mut two), sent(&mut one)), (vec![(ids[1], None)], vec![]));
}

#[tokio::test]
async fn a_request_that_its_replica_ended_moves_to_another() {
    let (links, mut one, mut two) = neighbours();
    let (ticket, mut outputs_rx) = submit(&links[0], 9);
    take(&mut one);
    one.receive(token(id(&one, &ticket), 0, 5));
    let ended = wire::Output { id: id(&one, &ticket).0, position: 1, ..Default::default() };
    let ended = wire::Output { finish: wire::Finish::Cancelled.into(), ..ended };
    one.receive(Frame::Outputs(wire::Outputs { outputs: vec![ended] }));
    take(&mut two);
    assert_eq!(sent(&mut two), [(id(&two, &ticket).0, Some(vec![5]))]);
    outputs_rx.try_recv().unwrap().1.unwrap();
    assert!(outputs_rx.try_recv().is_err() && one.requests.is_empty());
}

#[tokio::test]
async fn requests_of_a_replica_that_recovers_for_too_long_move() {
    let (links, mut one, mut two) = neighbours();
    let (ticket, _outputs_rx) = submit(&links[0], 9);
    take(&mut one);
    sent(&mut one);
    let recovers = wire::State { phase: wire::state::Phase::Recovering.into(), ..Default::default() };
    one.receive(Frame::State(recovers));
    let due = one.next_due().unwrap();
    one.handle_due(due);
    assert_eq!((sent(&mut one), one.requests.len()), (vec![(id(&two, &ticket).0, None)], 0));
    take(&mut two);
    assert_eq!(sent(&mut two), [(id(&two, &ticket).0, Some(vec![]))]);
}

fn recovers() -> wire::State {
    wire::State { phase: wire::state::Phase::Recovering.into(), ..Default::default() }
}

fn unplaced() -> wire::State {
    let unplaced = wire::Unplaced { why: "two workers are missing".into(), micros: 0 };
    wire::State { unplaced: Some(unplaced), ..recovers() }
}

fn ready() -> wire::State {
    wire::State { phase: wire::state::Phase::Ready.into(), ..Default::default() }
}

#[tokio::test]
async fn requests_of_an_unplaced_replica_move_at_once_and_come_only_where_no_other_can() {
    let (links, mut one, mut two) = neighbours();
    let (ticket, _outputs_rx) = submit(&links[0], 9);
    take(&mut one);
    one.receive(token(id(&one, &ticket), 0, 5));
    sent(&mut one);
    one.receive(Frame::State(unplaced()));
    assert_eq!((sent(&mut one), one.requests.len()), (vec![(id(&two, &ticket).0, None)], 0));
    take(&mut two);
    assert_eq!(sent(&mut two), [(id(&two, &ticket).0, Some(vec![5]))]);
    // A request that was sent to it before that was known moves to the other too.
    let (late, _late) = submit(&links[0], 9);
    take(&mut one);
    take(&mut two);
    assert_eq!((sent(&mut one), sent(&mut two)), (vec![], vec![(id(&two, &late).0, Some(vec![]))]));
    // The other cannot be placed either: all wait where they are, until one of them can.
    two.receive(Frame::State(unplaced()));
    let (waits, _waits) = submit(&links[0], 9);
    take(&mut one);
    assert_eq!((sent(&mut one).len(), one.requests.len(), two.requests.len()), (1, 1, 2));
    one.receive(Frame::State(ready()));
    two.dispatch(LinkEvent::Seen);
    assert_eq!((sent(&mut two).len(), two.requests.len()), (2, 0));
    take(&mut one);
    assert_eq!((sent(&mut one).len(), one.requests.len()), (2, 3));
    drop(waits);
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_as_long_as_it_may_at_a_replica_that_does_not_compute_it() {
    let (link, mut task) = attached(10);
    let max = Timeouts::default().replica_absence_max;
    let (running, mut running_rx) = submit(&link, 9);
    take(&mut task);
    task.receive(token(id(&task, &running), 0, 5));
    task.receive(Frame::State(unplaced()));
    tokio::time::advance(max / 2).await;
    let (new, mut new_rx) = submit(&link, 9);
    take(&mut task);
    sent(&mut task);
    // The same on every such report.
    task.receive(Frame::State(unplaced()));
    let is_due = |task: &mut LinkTask| {
        let due = task.next_due().unwrap();
        task.handle_due(due);
        due
    };
    running_rx.try_recv().unwrap().1.unwrap();
    let ids = [&running, &new].map(|ticket| id(&task, ticket).0);
    assert_eq!(is_due(&mut task), Instant::now() + max / 2);
    assert_eq!(sent(&mut task), [(ids[0], None)]);
    let end = running_rx.try_recv().unwrap().1;
    let Err(refusal @ Refusal::Away { waited, .. }) = &end else { panic!("{end:?}") };
    assert!(refusal.to_string().contains("two workers are missing") && *waited <= max, "{refusal}");
    assert!(refusal.retry_after().is_some() && new_rx.try_recv().is_err());
    assert_eq!(is_due(&mut task), Instant::now() + max);
    assert_eq!((sent(&mut task), task.requests.len()), (vec![(ids[1], None)], 0));
    assert!(matches!(new_rx.try_recv(), Ok((0, Err(Refusal::Away { .. })))));
}

#[tokio::test(start_paused = true)]
async fn ranks_that_come_and_go_without_a_token_are_one_absence() {
    let (link, mut task) = attached(10);
    let max = Timeouts::default().replica_absence_max;
    let (ticket, mut outputs_rx) = submit(&link, 9);
    take(&mut task);
    for _ in 0..3 {
        task.receive(Frame::State(recovers()));
        tokio::time::advance(max / 4).await;
        task.receive(Frame::State(ready()));
        // It may take as long as it needs where it is computed.
        assert!(task.next_due().is_none_or(|due| due <= Instant::now() + max));
        tokio::time::advance(max).await;
        task.handle_due(Instant::now());
        assert!(outputs_rx.try_recv().is_err());
    }
    task.receive(token(id(&task, &ticket), 0, 5));
    outputs_rx.try_recv().unwrap().1.unwrap();
    task.receive(Frame::State(recovers()));
    tokio::time::advance(max * 9 / 10).await;
    task.handle_due(Instant::now());
    assert!(outputs_rx.try_recv().is_err(), "it has had a token since");
    task.receive_lost(&Status::unavailable("gone"));
    tokio::time::advance(max / 9).await;
    task.handle_due(Instant::now());
    let end = outputs_rx.try_recv().unwrap().1;
    let Err(refusal @ Refusal::Away { .. }) = &end else { panic!("{end:?}") };
    assert!(refusal.to_string().contains("its coordinator is lost (gone)"), "{refusal}");
}

#[tokio::test]
async fn a_request_that_has_outgrown_a_replica_waits_for_more_room_there_or_elsewhere() {
    let (links, mut one, mut two) = neighbours();
    let shortened = |has| Some(wire::Shortened { requested: 100, has, why: "too little".into() });
    let narrow = |has| Frame::State(wire::State { shortened: shortened(has), ..ready() });
    let (ticket, mut outputs_rx) = submit(&links[0], 9);
    take(&mut one);
    one.receive(token(id(&one, &ticket), 0, 5));
    two.receive(narrow(3));
    let outgrown = wire::Output { id: id(&one, &ticket).0, position: 1, ..Default::default() };
    let outgrown = wire::Output { finish: wire::Finish::Outgrown.into(), ..outgrown };
    one.receive(Frame::Outputs(wire::Outputs { outputs: vec![outgrown] }));
    one.receive(narrow(3));
    sent(&mut one);
    assert_eq!((one.requests.len(), one.requests.n_parked(), two.requests.len()), (1, 1, 0));
    one.handle_due(Instant::now() + Duration::from_secs(5));
    assert_eq!((sent(&mut one), one.requests.n_parked()), (vec![], 1), "it has three tokens by now");
    // There is some room for it elsewhere.
    two.receive(narrow(4));
    one.dispatch(LinkEvent::Seen);
    take(&mut two);
    assert_eq!((sent(&mut two), one.requests.len()), (vec![(id(&two, &ticket).0, Some(vec![5]))], 0));
    outputs_rx.try_recv().unwrap().1.unwrap();
    assert!(outputs_rx.try_recv().is_err());
    // A request that has not begun does not wait.
    one.receive(narrow(2));
    two.receive(narrow(2));
    let (_fresh, mut fresh_rx) = submit(&links[0], 9);
    take(&mut one);
    let end = fresh_rx.try_recv();
    assert!(matches!(&end, Ok((0, Err(Refusal::NotReady { why, .. }))) if why.contains("hold 2 tokens")), "{end:?}");
}

#[tokio::test]
async fn a_request_moves_only_to_the_same_policy_and_room_and_not_for_ever() {
    let (links, mut one, mut two) = neighbours();
    let (_ticket, mut outputs_rx) = submit(&links[0], 9);
    take(&mut one);
    for welcome in
        [wire::Welcome { context: 51, ..welcome(1) }, wire::Welcome { policy_digest: vec![1; 32], ..welcome(1) }]
    {
        two.receive(Frame::Welcome(welcome));
        one.receive_lost(&Status::unavailable("gone"));
        assert_eq!((one.requests.len(), one.requests.n_parked()), (1, 1));
        one.receive(Frame::Welcome(self::welcome(1)));
        assert_eq!(one.requests.n_parked(), 0);
    }
    assert!(outputs_rx.try_recv().is_err());
    one.receive_lost(&Status::unavailable("gone"));
    let end = outputs_rx.try_recv();
    assert!(matches!(end, Ok((0, Err(Refusal::LostTooOften { times: 3 })))), "{end:?}");
}

/// Returns how often a request, alone at its replica, is lost by `lose` until it is given up.
fn n_losses(lose: impl Fn(&mut LinkTask, RequestId), speaks_at: Option<u32>) -> u32 {
    let (link, mut task) = attached(10);
    let (ticket, mut outputs_rx) = submit(&link, 9);
    take(&mut task);
    for n in 1..=20 {
        let id = id(&task, &ticket);
        if speaks_at == Some(n) {
            task.receive(token(id, 0, 5));
            assert!(matches!(outputs_rx.try_recv(), Ok((0, Ok(_)))));
        }
        lose(&mut task, id);
        if let Ok((0, Err(Refusal::LostTooOften { times }))) = outputs_rx.try_recv() {
            assert!(task.requests.is_empty());
            return if speaks_at.is_some() { n } else { times };
        }
        task.receive(Frame::Welcome(welcome(1)));
        // A replica that has ended the request gets it again after a while.
        task.handle_due(Instant::now() + Duration::from_secs(5));
        assert!(task.requests.n_parked() == 0, "it is at the replica again");
    }
    panic!("it is never given up")
}

#[tokio::test]
async fn a_request_is_given_up_earlier_for_coordinators_that_die_with_it_than_for_ranks() {
    let dies = |task: &mut LinkTask, _: RequestId| task.receive_lost(&Status::unavailable("gone"));
    let ends_it = |task: &mut LinkTask, id: RequestId| {
        let output = wire::Output { id: id.0, finish: wire::Finish::Cancelled.into(), ..Default::default() };
        task.receive(Frame::Outputs(wire::Outputs { outputs: vec![output] }));
    };
    assert_eq!(n_losses(dies, None), 3);
    assert_eq!(n_losses(dies, Some(3)), 5, "a token shows that it is not the cause");
    assert_eq!(n_losses(ends_it, None), 9);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_may_not_move_yet_is_tried_again() {
    let (links, mut one, _two) = neighbours();
    let (ticket, _outputs_rx) = submit(&links[0], 9);
    take(&mut one);
    sent(&mut one);
    let spend_all = |one: &LinkTask| while one.place.take_retry(Instant::now()).is_ok() {};
    spend_all(&one);
    one.receive_lost(&Status::unavailable("gone"));
    for _ in 0..3 {
        let again = one.requests.retry_time(ticket.key()).expect("a time at which it is tried again");
        assert!(again > Instant::now());
        tokio::time::advance(again - Instant::now()).await;
        spend_all(&one);
        one.handle_due(Instant::now());
        assert_eq!((one.requests.len(), links[1].work()), (1, 0));
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    one.handle_due(Instant::now());
    assert!(one.requests.is_empty() && links[1].work() > 0);
}

#[tokio::test]
async fn a_panic_ends_one_request_and_the_others_move() {
    let (links, mut one, _two) = neighbours();
    let (_goes_on, mut outputs_rx) = submit(&links[0], 9);
    take(&mut one);
    sent(&mut one);
    // Such a key has no room beside a router's number, which an assertion checks.
    links[0].next_key.store(1 << 62, Ordering::Relaxed);
    let (_breaks, mut broken) = submit(&links[0], 9);
    let (key, entry) = one.submitted.try_recv().unwrap();
    one.handle(LinkEvent::Submit(key, entry));
    assert!(matches!(broken.try_recv(), Ok((0, Err(Refusal::Failed { .. })))));
    assert!(one.requests.is_empty() && !one.replica.is_attached() && outputs_rx.try_recv().is_err());
    assert!(links[1].work() > 0);
}

#[tokio::test]
async fn a_gap_and_another_version_are_refused() {
    let (link, mut task) = attached(10);
    let (ticket, mut outputs_rx) = submit(&link, 9);
    take(&mut task);
    sent(&mut task);
    let id = id(&task, &ticket);
    task.receive(token(id, 1, 5));
    assert_eq!(sent(&mut task), [(id.0, None)]);
    assert!(matches!(outputs_rx.try_recv(), Ok((0, Err(Refusal::Failed { .. })))));
    task.receive(Frame::Welcome(wire::Welcome { version: "0.0.0".into(), ..welcome(1) }));
    assert!(!task.replica.is_attached() && task.connection.reason().contains("0.0.0"), "{}", task.connection.reason());
}

#[tokio::test]
async fn a_router_attaches_to_builds_of_consecutive_protocols_and_to_no_other() {
    let build = |newest: u32| {
        let protocols = Some(wire::Protocols { oldest: newest - 1, newest });
        proto::ProtocolRange::of(&format!("0.{newest}.0"), protocols)
    };
    let check = |router: u32, coordinator: u32, is_met: bool| {
        let (_link, mut task) = detached(&Config { speaks: build(router), ..Config::default() });
        let proto::ProtocolRange { version, protocols } = build(coordinator);
        task.receive(Frame::Welcome(wire::Welcome { version, protocols, ..welcome(1) }));
        assert_eq!(task.replica.is_attached(), is_met, "{router} to {coordinator}: {}", task.connection.reason());
        let names_both =
            [build(router), build(coordinator)].iter().all(|of| task.connection.reason().contains(&of.to_string()));
        assert_eq!(names_both, !is_met, "{}", task.connection.reason());
    };
    check(5, 4, true);
    check(5, 5, true);
    check(4, 5, true);
    check(5, 3, false);
    check(4, 6, false);
}

/// A task that is attached under claim 5, and the sender of its target.
fn claimed() -> (watch::Sender<LinkTarget>, LinkTask) {
    let (dialer, _) = ::wire::in_memory();
    let (target, aim) = given(&dialer);
    let peers = peers();
    peers.add_view(ReplicaView::default());
    let mut task = LinkTask::new(aim, peers, 0, Arc::new(AtomicU64::new(1)), &Config::default());
    target.send_modify(|target| target.incarnation = 5);
    task.retarget();
    task.dispatch(LinkEvent::Dial);
    task.receive(Frame::Welcome(wire::Welcome { incarnation: 5, ..welcome(1) }));
    (target, task)
}

#[tokio::test]
async fn a_later_claim_ends_the_stream_of_an_older_one() {
    let (target, mut task) = claimed();
    assert!(task.replica.is_attached());
    // A lease that was made anew is the same claim.
    target.send_modify(|target| target.incarnation = 5);
    task.retarget();
    assert!(task.replica.is_attached());
    target.send_modify(|target| target.incarnation = 6);
    task.retarget();
    assert!(!task.replica.is_attached() && task.connection.is_down());
    // The older coordinator is still there, and answers first.
    task.dispatch(LinkEvent::Dial);
    task.receive(Frame::Welcome(wire::Welcome { incarnation: 5, ..welcome(1) }));
    assert!(!task.replica.is_attached() && task.connection.reason().contains("claim"), "{}", task.connection.reason());
    // A claim that the store has not reported yet.
    task.receive(Frame::Welcome(wire::Welcome { incarnation: 7, ..welcome(1) }));
    assert!(task.replica.is_attached());
}

#[tokio::test]
async fn a_replica_that_vanishes_from_the_store_stays_while_its_stream_stands() {
    let (target, mut task) = claimed();
    target.send_modify(|target| target.is_listed = false);
    task.retarget();
    assert!(task.replica.is_attached() && !task.is_forsaken());
    task.receive_lost(&Status::unavailable("gone"));
    assert!(task.is_forsaken());
    target.send_modify(|target| target.is_listed = true);
    task.retarget();
    assert!(!task.is_forsaken());
}
