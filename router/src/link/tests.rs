//! A link's task without a wire: what it hears, what it would send, and what its neighbours get of it.

use super::entry::splice;
use super::line::Line;
use super::task::Event;
use super::*;
use crate::budget::Budget;
use crate::target::Target;
use proto::cluster as wire;
use tonic::Status;
use types::Finish;
use wire::replica_frame::Frame;

#[test]
fn splices() {
    let check = |n_told, position, tokens: &[u32], new: Option<&[u32]>| {
        let sent = tokens.iter().map(|token| wire::TokenOut { token: *token, ..Default::default() }).collect();
        let spliced = splice(n_told, position, sent);
        let spliced: Option<Vec<u32>> = spliced.map(|out| out.iter().map(|out| out.token).collect());
        assert_eq!(spliced.as_deref(), new, "{tokens:?} at {position} after {n_told}");
    };
    check(0, 0, &[7, 8], Some(&[7, 8]));
    check(5, 5, &[7], Some(&[7]));
    check(5, 3, &[1, 2, 7], Some(&[7]));
    check(5, 3, &[1], Some(&[]));
    check(5, 5, &[], Some(&[]));
    check(5, 6, &[7], None);
}

fn given(dialer: &proto::transport::Dialer) -> (watch::Sender<Target>, watch::Receiver<Target>) {
    watch::channel(Target { channel: dialer.channel(), incarnation: 0, is_listed: true })
}

fn peers() -> Peers {
    Peers::new(Budget::new(1000, Instant::now()))
}

fn links(peers: &Peers) -> Vec<Link> {
    peers.rows().0.into_iter().map(|place| peers.link(place).unwrap()).collect()
}

/// A task that has a replica and no wire: what it would send stands in its outbox.
fn attached(unread_max: usize) -> (Link, Task) {
    let limits = crate::config::Limits { outputs_unread_max: unread_max, ..Default::default() };
    let (dialer, _) = proto::transport::in_memory();
    let peers = peers();
    peers.sit(View::default());
    let config = Config { limits, ..Config::default() };
    let mut task = link(given(&dialer).1, peers.clone(), 0, Arc::new(AtomicU64::new(1)), &config);
    task.hear(Frame::Welcome(welcome(1)));
    (links(&peers).remove(0), task)
}

fn welcome(router: u32) -> wire::Welcome {
    let version = proto::VERSION.to_owned();
    wire::Welcome { version, router, policy_digest: vec![0; 32], context: 100, salt: vec![0; 16], ..Default::default() }
}

fn submit(link: &Link, n_places: usize) -> (Ticket, mpsc::Receiver<(u32, Told)>) {
    let (ear, heard) = mpsc::channel(n_places);
    let sampling = types::Sampling { tokens_max: 50, stop: vec![9], ..Default::default() };
    let request = Request { prompt: vec![1, 2], sampling, ..Request::default() };
    let digest = PolicyDigest::default();
    let (key, trace) = (link.keys(1), Carried::default());
    let (n_cached, adopts, deadline) = (0, None, None);
    let submit = Submit { key, request, slot: 0, deadline, digest, n_cached, adopts, trace, ear };
    (link.submit(submit).unwrap(), heard)
}

/// Takes what the router's side has sent.
fn take(task: &mut Task) {
    while let Ok(cancel) = task.cancelled.try_recv() {
        task.cancel(cancel);
    }
    while let Ok((key, entry)) = task.submitted.try_recv() {
        task.submit(key, *entry);
    }
}

fn id(task: &Task, ticket: &Ticket) -> RequestId {
    task.replica.as_ref().unwrap().id(ticket.key())
}

fn token(id: RequestId, position: u32, token: u32) -> Frame {
    let tokens = vec![wire::TokenOut { token, ..Default::default() }];
    let output = wire::Output { id: id.0, position, tokens, ..Default::default() };
    Frame::Outputs(wire::Outputs { outputs: vec![output] })
}

/// What stands in the outbox: submits with their output so far, and cancels.
fn sent(task: &mut Task) -> Vec<(u64, Option<Vec<u32>>)> {
    let frames = task.outbox.drain(..).map(|frame| match frame.frame {
        Some(wire::router_frame::Frame::Submit(request)) => (request.id, Some(request.output)),
        Some(wire::router_frame::Frame::Adopt(adopt)) => {
            let request = adopt.request.unwrap();
            (request.id, Some(request.output))
        }
        Some(wire::router_frame::Frame::Cancel(cancel)) => (cancel.id, None),
        other => panic!("{other:?}"),
    });
    frames.collect()
}

#[tokio::test]
async fn a_slow_reader_is_cut_and_told() {
    let (link, mut task) = attached(2);
    assert_eq!(link.work(), 0);
    let (ticket, mut heard) = submit(&link, 3);
    take(&mut task);
    let id = id(&task, &ticket);
    assert_eq!(sent(&mut task), [(id.0, Some(vec![]))]);
    for position in 0..3 {
        task.hear(token(id, position, 5));
    }
    assert_eq!(sent(&mut task), [(id.0, None)]);
    assert!(task.table.is_empty());
    for position in 0..2 {
        assert!(matches!(heard.try_recv(), Ok((0, Told::Tokens(progress))) if progress.position == position));
    }
    let end = heard.try_recv();
    assert!(matches!(end, Ok((0, Told::Refused(Refusal::SlowReader { unread: 2 })))), "{end:?}");
    assert!(heard.try_recv().is_err());
}

#[tokio::test]
async fn a_cancel_may_come_before_at_and_after_its_request() {
    let (link, mut task) = attached(10);
    drop(submit(&link, 3));
    take(&mut task);
    assert_eq!((sent(&mut task), task.table.len()), (vec![], 0));
    let (ticket, _heard) = submit(&link, 3);
    take(&mut task);
    drop(ticket);
    take(&mut task);
    assert_eq!((sent(&mut task), task.table.len()), (vec![], 0));
    let (ticket, _heard) = submit(&link, 3);
    take(&mut task);
    let id = id(&task, &ticket);
    assert_eq!(sent(&mut task).len(), 1);
    drop(ticket);
    take(&mut task);
    assert_eq!(sent(&mut task), [(id.0, None)]);
    // What was on its way is nobody's.
    task.hear(token(id, 0, 5));
}

#[tokio::test]
async fn a_hundred_thousand_cancels_leave_nothing() {
    let (link, mut task) = attached(10);
    let free = (link.submits.capacity(), link.cancels.capacity());
    for round in 0..1000 {
        // At the replica, with and without a token, in a queue, and ended by a stop string.
        let at_the_replica: Vec<_> = (0..75).map(|_| submit(&link, 3)).collect();
        take(&mut task);
        for (ticket, _) in at_the_replica.iter().take(25) {
            task.hear(token(id(&task, ticket), 0, 5));
        }
        if round % 100 == 50 {
            task.lost(&Status::unavailable("gone"));
            task.hear(Frame::Welcome(welcome(round)));
        }
        let in_a_queue: Vec<_> = (0..25).map(|_| submit(&link, 3)).collect();
        drop(in_a_queue);
        for (i, (ticket, heard)) in at_the_replica.into_iter().enumerate() {
            if i % 3 == 0 { ticket.stopped() } else { drop((heard, ticket)) }
        }
        take(&mut task);
        assert!(task.table.is_empty() && task.parked.is_empty());
        assert_eq!(link.work(), 0);
        assert!(task.outbox.len() <= 3 * 75);
        task.outbox.clear();
    }
    assert_eq!((link.submits.capacity(), link.cancels.capacity()), free);
}

#[tokio::test]
async fn a_lost_replica_gets_the_log_and_a_complete_one_is_at_its_end() {
    let (link, mut task) = attached(10);
    let (goes_on, _heard) = submit(&link, 9);
    let (complete, mut told) = submit(&link, 9);
    take(&mut task);
    sent(&mut task);
    let before = id(&task, &goes_on);
    task.hear(token(before, 0, 5));
    // The stop token: the frame with the word that it was the end need not come.
    task.hear(token(id(&task, &complete), 0, 9));
    let end = told.try_recv();
    assert!(matches!(&end, Ok((0, Told::Tokens(end))) if end.finish == Some(Finish::Stop)), "{end:?}");
    task.lost(&Status::unavailable("gone"));
    assert!(task.replica.is_none());
    task.hear(Frame::Welcome(welcome(2)));
    let id = id(&task, &goes_on);
    assert_eq!(sent(&mut task), [(id.0, Some(vec![5]))]);
    // The old life's ids mean nothing now.
    task.hear(token(before, 1, 6));
    task.hear(token(id, 1, 7));
    assert_eq!(task.table[&goes_on.key()].request.output, [5, 7]);
}

/// Two tasks that have replicas; of the second one's, the views must be told to be ready.
fn neighbours() -> (Vec<Link>, Task, Task) {
    let peers = peers();
    (0..2).for_each(|place| peers.sit(View { place, ..View::default() }));
    let (config, keys) = (Config::default(), Arc::new(AtomicU64::new(1)));
    let new = |place| {
        let (dialer, _) = proto::transport::in_memory();
        let mut task = link(given(&dialer).1, peers.clone(), place, keys.clone(), &config);
        task.hear(Frame::Welcome(welcome(1)));
        task
    };
    let (one, two) = (new(0), new(1));
    (links(&peers), one, two)
}

#[tokio::test]
async fn what_a_lost_replica_had_goes_to_another_and_its_cancel_follows() {
    let (links, mut one, mut two) = neighbours();
    let (begun, _heard) = submit(&links[0], 9);
    let (fresh, _fresh) = submit(&links[0], 9);
    let (unwanted, gone) = submit(&links[0], 9);
    take(&mut one);
    one.hear(token(id(&one, &begun), 0, 5));
    assert_eq!((links[0].work(), links[1].work()), (5, 0));
    // Nobody tells the link of the one that ends meanwhile: what has moved is heard of where it went.
    drop((unwanted, gone));
    one.lost(&Status::unavailable("gone"));
    assert!(one.table.is_empty() && one.parked.is_empty());
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
async fn who_ends_a_request_by_itself_loses_it_to_another() {
    let (links, mut one, mut two) = neighbours();
    let (ticket, mut heard) = submit(&links[0], 9);
    take(&mut one);
    one.hear(token(id(&one, &ticket), 0, 5));
    let ended = wire::Output { id: id(&one, &ticket).0, position: 1, ..Default::default() };
    let ended = wire::Output { finish: wire::Finish::Cancelled.into(), ..ended };
    one.hear(Frame::Outputs(wire::Outputs { outputs: vec![ended] }));
    take(&mut two);
    assert_eq!(sent(&mut two), [(id(&two, &ticket).0, Some(vec![5]))]);
    heard.try_recv().unwrap();
    assert!(heard.try_recv().is_err() && one.table.is_empty());
}

#[tokio::test]
async fn who_recovers_for_too_long_loses_its_requests() {
    let (links, mut one, mut two) = neighbours();
    let (ticket, _heard) = submit(&links[0], 9);
    take(&mut one);
    sent(&mut one);
    let recovers = wire::State { phase: wire::state::Phase::Recovering.into(), ..Default::default() };
    one.hear(Frame::State(recovers));
    let due = one.next_due().unwrap();
    one.due(due);
    assert_eq!((sent(&mut one), one.table.len()), (vec![(id(&two, &ticket).0, None)], 0));
    take(&mut two);
    assert_eq!(sent(&mut two), [(id(&two, &ticket).0, Some(vec![]))]);
}

#[tokio::test]
async fn who_has_less_room_or_another_policy_gets_nothing_and_a_killer_is_not_handed_on_for_ever() {
    let (links, mut one, mut two) = neighbours();
    let (_ticket, mut heard) = submit(&links[0], 9);
    take(&mut one);
    for welcome in
        [wire::Welcome { context: 51, ..welcome(1) }, wire::Welcome { policy_digest: vec![1; 32], ..welcome(1) }]
    {
        two.hear(Frame::Welcome(welcome));
        one.lost(&Status::unavailable("gone"));
        assert_eq!((one.table.len(), one.parked.len()), (1, 1));
        one.hear(Frame::Welcome(self::welcome(1)));
        assert!(one.parked.is_empty());
    }
    for _ in 2..=Config::default().limits.losses_max {
        assert!(heard.try_recv().is_err());
        one.lost(&Status::unavailable("gone"));
        one.hear(Frame::Welcome(welcome(1)));
    }
    let end = heard.try_recv();
    assert!(matches!(end, Ok((0, Told::Refused(Refusal::LostTooOften { times: 9 })))), "{end:?}");
}

#[tokio::test(start_paused = true)]
async fn who_may_not_move_yet_is_asked_again_and_again() {
    let (links, mut one, _two) = neighbours();
    let (ticket, _heard) = submit(&links[0], 9);
    take(&mut one);
    sent(&mut one);
    let spend_all = |one: &Task| while one.peers.budget.take(Instant::now()).is_ok() {};
    spend_all(&one);
    one.lost(&Status::unavailable("gone"));
    for _ in 0..3 {
        let again = one.parked[&ticket.key()].expect("a time at which it is tried again");
        assert!(again > Instant::now());
        tokio::time::advance(again - Instant::now()).await;
        spend_all(&one);
        one.due(Instant::now());
        assert_eq!((one.table.len(), links[1].work()), (1, 0));
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    one.due(Instant::now());
    assert!(one.table.is_empty() && links[1].work() > 0);
}

#[tokio::test]
async fn a_panic_ends_one_request_and_the_others_move() {
    let (links, mut one, _two) = neighbours();
    let (_goes_on, mut heard) = submit(&links[0], 9);
    take(&mut one);
    sent(&mut one);
    // There is no room for it beside a router's number, which is checked where there are assertions.
    links[0].next_key.store(1 << 62, Ordering::Relaxed);
    let (_breaks, mut broken) = submit(&links[0], 9);
    let (key, entry) = one.submitted.try_recv().unwrap();
    one.handle(Event::Submit(key, entry));
    assert!(matches!(broken.try_recv(), Ok((0, Told::Refused(Refusal::Failed { .. })))));
    assert!(one.table.is_empty() && one.replica.is_none() && heard.try_recv().is_err());
    assert!(links[1].work() > 0);
}

#[tokio::test]
async fn a_gap_and_another_version_are_refused() {
    let (link, mut task) = attached(10);
    let (ticket, mut heard) = submit(&link, 9);
    take(&mut task);
    sent(&mut task);
    let id = id(&task, &ticket);
    task.hear(token(id, 1, 5));
    assert_eq!(sent(&mut task), [(id.0, None)]);
    assert!(matches!(heard.try_recv(), Ok((0, Told::Refused(Refusal::Failed { .. })))));
    task.hear(Frame::Welcome(wire::Welcome { version: "0.0.0".into(), ..welcome(1) }));
    assert!(task.replica.is_none() && task.reason.contains("0.0.0"), "{}", task.reason);
}

/// A task that is attached under claim 5, and what it is told.
fn claimed() -> (watch::Sender<Target>, Task) {
    let (dialer, _) = proto::transport::in_memory();
    let (target, aim) = given(&dialer);
    let peers = peers();
    peers.sit(View::default());
    let mut task = link(aim, peers, 0, Arc::new(AtomicU64::new(1)), &Config::default());
    target.send_modify(|target| target.incarnation = 5);
    task.retarget();
    task.line = Line::Dialing(Box::pin(std::future::pending()));
    task.hear(Frame::Welcome(wire::Welcome { incarnation: 5, ..welcome(1) }));
    (target, task)
}

#[tokio::test]
async fn a_later_claim_ends_the_stream_of_an_older_one() {
    let (target, mut task) = claimed();
    assert!(task.replica.is_some());
    // A lease that was made anew is the same claim.
    target.send_modify(|target| target.incarnation = 5);
    task.retarget();
    assert!(task.replica.is_some());
    target.send_modify(|target| target.incarnation = 6);
    task.retarget();
    assert!(task.replica.is_none() && matches!(task.line, Line::Down { .. }));
    // The older one is still there and answers first.
    task.line = Line::Dialing(Box::pin(std::future::pending()));
    task.hear(Frame::Welcome(wire::Welcome { incarnation: 5, ..welcome(1) }));
    assert!(task.replica.is_none() && task.reason.contains("claim"), "{}", task.reason);
    // A claim that the store has not told of yet.
    task.hear(Frame::Welcome(wire::Welcome { incarnation: 7, ..welcome(1) }));
    assert!(task.replica.is_some());
}

#[tokio::test]
async fn who_vanishes_from_the_store_stays_while_the_stream_stands() {
    let (target, mut task) = claimed();
    target.send_modify(|target| target.is_listed = false);
    task.retarget();
    assert!(task.replica.is_some() && !task.is_forsaken());
    task.lost(&Status::unavailable("gone"));
    assert!(task.is_forsaken());
    target.send_modify(|target| target.is_listed = true);
    task.retarget();
    assert!(!task.is_forsaken());
}
