//! Ranks meet at the listener: a stranger is rejected with a reason, and does no harm.

use crate::common;
use crate::common::{EPOCH, join_all, plans};
use collective::{
    CancelFlag, Error, JoinRefusal, LinkEncryption, Mesh, MeshPlan, PeerListener, RefusedPeer, WireChoice,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;
use types::{Epoch, Grid, Layout, Rank, StepId};

fn layout(tp: u16) -> Layout {
    Layout::even(Grid { pp: 1, tp }, 1).unwrap()
}

fn shortly(plans: &mut [(PeerListener, MeshPlan)]) {
    plans.iter_mut().for_each(|(_, plan)| plan.timeouts.join = Duration::from_millis(400));
}

/// Checks that the pair works: tokens move from one to the other.
fn talk(ranks: Vec<Mesh>) {
    let mut ranks = common::over_host(ranks);
    let mut tokens = Vec::new();
    ranks[0].send_tokens(StepId(1), &[Some(5), None]).unwrap();
    ranks[1].recv_tokens(StepId(1), &mut tokens).unwrap();
    assert_eq!(tokens, [Some(5), None]);
}

#[test]
fn missing_rank_is_named() {
    let mut plans = plans(&layout(3), WireChoice::Any);
    shortly(&mut plans);
    // Rank 1 has a listener and never comes.
    let absent = plans.remove(1);
    for result in join_all(plans) {
        assert!(matches!(result, Err(Error::Deadline { rank: Rank(1) })), "{result:?}");
    }
    drop(absent);
}

#[test]
fn a_wrong_secret_is_refused_on_both_sides() {
    let mut plans = plans(&layout(2), WireChoice::Any);
    shortly(&mut plans);
    plans[1].1.secret[31] ^= 1;
    let (door, plan) = plans.remove(0);
    let (results, refusals) = std::thread::scope(|scope| {
        let here = scope.spawn(move || (Mesh::join(&door, plan), door.refusals()));
        let there = join_all(plans).remove(0);
        let (here, refusals) = here.join().unwrap();
        ([here, there], refusals)
    });
    assert!(matches!(results[0], Err(Error::Deadline { rank: Rank(1) })), "{results:?}");
    let why = JoinRefusal::WrongSecret;
    assert!(matches!(results[1], Err(Error::Refused { rank: Rank(0), why: w }) if w == why), "{results:?}");
    assert!(refusals.iter().any(|refused| refused.why == why), "{refusals:?}");
}

#[test]
fn ranks_of_which_one_encrypts_refuse_each_other_by_name() {
    for (ours, theirs) in [(LinkEncryption::Off, LinkEncryption::On), (LinkEncryption::On, LinkEncryption::Off)] {
        let mut plans = plans(&layout(2), WireChoice::Any);
        shortly(&mut plans);
        (plans[0].1.encryption, plans[1].1.encryption) = (theirs, ours);
        let (door, plan) = plans.remove(0);
        let (here, there) = std::thread::scope(|scope| {
            let here = scope.spawn(|| Mesh::join(&door, plan));
            let there = join_all(plans).remove(0);
            (here.join().unwrap(), there)
        });
        let why = JoinRefusal::Encryption { ours, theirs };
        assert!(matches!(there, Err(Error::Refused { rank: Rank(0), why: w }) if w == why), "{there:?}");
        assert!(matches!(here, Err(Error::Deadline { rank: Rank(1) })), "{here:?}");
        let why = JoinRefusal::Encryption { ours: theirs, theirs: ours };
        let refusals = door.refusals();
        assert!(refusals.iter().any(|refused| refused.why == why), "{refusals:?}");
        assert_eq!(why.to_string(), format!("--link-encryption is {ours} there and {theirs} here"));
    }
}

#[test]
fn an_epoch_that_is_over_is_refused() {
    let mut plans = plans(&layout(2), WireChoice::Any);
    shortly(&mut plans);
    let old = Epoch { n: EPOCH.n - 1, ..EPOCH };
    plans[1].1.epoch = old;
    let results = join_all(plans);
    assert!(matches!(results[0], Err(Error::Deadline { rank: Rank(1) })), "{results:?}");
    let Err(Error::Stale { rank: Rank(0), ours, theirs }) = results[1] else { panic!("{results:?}") };
    assert_eq!((ours, theirs), (old, EPOCH));
}

#[test]
fn an_epoch_that_has_not_begun_is_awaited() {
    let mut plans = plans(&layout(2), WireChoice::Any);
    let (door, mut first) = plans.remove(0);
    let (their_door, second) = plans.remove(0);
    let theirs = second.clone();
    let later = Epoch { n: EPOCH.n + 1, ..EPOCH };
    let ranks = std::thread::scope(|scope| {
        let there = scope.spawn(move || Mesh::join(&their_door, MeshPlan { epoch: later, ..theirs }));
        // No further rank of this epoch comes, and every peer that connects receives that it must wait.
        first.timeouts.join = Duration::from_millis(200);
        let here = Mesh::join(&door, first.clone());
        assert!(matches!(here, Err(Error::Deadline { rank: Rank(1) })));
        let early = JoinRefusal::Early { ours: EPOCH, theirs: later };
        assert!(door.refusals().iter().any(|refused| refused.why == early));
        first.timeouts = second.timeouts;
        let here = Mesh::join(&door, MeshPlan { epoch: later, ..first }).unwrap();
        vec![here, there.join().unwrap().unwrap()]
    });
    talk(ranks);
}

#[test]
fn a_listener_serves_one_epoch_after_another() {
    let plans = plans(&layout(2), WireChoice::Any);
    for n in 0..4 {
        let next: Vec<_> =
            plans.iter().map(|(door, plan)| (door, MeshPlan { epoch: Epoch { n, ..EPOCH }, ..plan.clone() })).collect();
        let ranks: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                next.into_iter().map(|(door, plan)| scope.spawn(move || Mesh::join(door, plan).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        talk(ranks);
    }
}

#[test]
fn a_second_one_of_a_rank_is_refused() {
    let mut plans = plans(&layout(3), WireChoice::Any);
    let impostor = (PeerListener::bind("127.0.0.1:0").unwrap(), plans[1].1.clone());
    let last = plans.pop().unwrap();
    let results = std::thread::scope(|scope| {
        let first_two = scope.spawn(move || join_all(plans));
        // By now ranks 0 and 1 have met, and wait for rank 2.
        std::thread::sleep(Duration::from_millis(500));
        let refused = join_all(vec![impostor]).remove(0);
        let why = JoinRefusal::Duplicate;
        assert!(matches!(refused, Err(Error::Refused { rank: Rank(0), why: w }) if w == why), "{refused:?}");
        let last = join_all(vec![last]);
        [first_two.join().unwrap(), last].into_iter().flatten().collect::<Vec<_>>()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn strangers_do_not_disturb_a_join() {
    let mut plans = plans(&layout(2), WireChoice::Any);
    let (door, plan) = plans.remove(0);
    let address = door.address();
    let knock = |bytes: &[u8]| {
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(bytes).unwrap();
        stranger
    };
    // They connect before any rank joins: one sends garbage, one stops halfway, one is silent, one hangs up.
    let mut garbage = knock(&[b'x'; 4096]);
    let strangers = [knock(b"LOCKSTEP\x01\0"), knock(b"")];
    drop(knock(b"LOCK"));
    let ranks = std::thread::scope(|scope| {
        let here = scope.spawn(move || {
            let joined = Mesh::join(&door, plan).unwrap();
            let refusals: Vec<RefusedPeer> = door.refusals();
            assert!(refusals.iter().any(|refused| refused.why == JoinRefusal::Garbage), "{refusals:?}");
            assert!(refusals.iter().any(|refused| refused.why == JoinRefusal::Gone), "{refusals:?}");
            joined
        });
        std::thread::sleep(Duration::from_millis(100));
        let there = join_all(plans).remove(0).unwrap();
        vec![here.join().unwrap(), there]
    });
    talk(ranks);
    // The stranger received nothing.
    let mut received = Vec::new();
    let _ = garbage.read_to_end(&mut received);
    assert!(received.is_empty());
    drop(strangers);
}

/// More strangers than any queue of the system holds, of several kinds, before a meeting and during it.
#[test]
fn strangers_are_dropped_and_block_no_join() {
    let mut plans = plans(&layout(2), WireChoice::Any);
    let (door, plan) = plans.remove(0);
    let address = door.address();
    let knock = |bytes: &[u8]| {
        let mut stranger = TcpStream::connect_timeout(&address, Duration::from_secs(2)).expect("the listener accepts");
        stranger.write_all(bytes).unwrap();
        stranger.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stranger
    };
    // A closed connection returns Ok(0), or an error if it left bytes unread.
    let is_let_go = |mut stranger: TcpStream| match stranger.read(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    let hello = [b"LOCKSTEP".as_slice(), &[2], &[0; 51]].concat();
    for greeting in [b"SSH-2.0", b"x".as_slice(), &[hello.as_slice(), b"!"].concat()] {
        assert!(is_let_go(knock(greeting)), "at once");
    }
    for greeting in [b"".as_slice(), b"LOCK", &hello] {
        let strangers: Vec<_> = (0..400).map(|_| knock(greeting)).collect();
        // All but the last 128, or 256 if the last ones were read late.
        assert!(strangers.into_iter().take(140).all(is_let_go));
    }
    let (silent, early) = (knock(b""), knock(&hello));
    let crowd: Vec<_> = (0..100).flat_map(|_| [knock(b"LOCKSTEP"), knock(&hello)]).collect();
    // A listener keeps only the last few refusals: those of the meeting may displace the others.
    let mut refusals = Vec::new();
    let ranks = std::thread::scope(|scope| {
        let here = scope.spawn(|| Mesh::join(&door, plan).unwrap());
        let there = scope.spawn(|| join_all(plans).remove(0).unwrap());
        while !here.is_finished() || !there.is_finished() {
            refusals.extend(door.refusals());
            std::thread::sleep(Duration::from_millis(1));
        }
        vec![here.join().unwrap(), there.join().unwrap()]
    });
    talk(ranks);
    assert!(is_let_go(silent), "the handshake has timed out");
    // Read while the others are connected: a hang-up is a refusal too.
    refusals.extend(door.refusals());
    drop((early, crowd));
    assert!(refusals.iter().any(|refused| refused.why == JoinRefusal::Silence));
}

/// Version 1 has no seals: such a peer is rejected with that reason at once, whichever side dials.
#[test]
fn another_version_is_refused() {
    for version in [1, 9] {
        let mut plans = plans(&layout(2), WireChoice::Any);
        shortly(&mut plans);
        let (door, plan) = plans.remove(0);
        let mut stranger = TcpStream::connect(door.address()).unwrap();
        let mut hello = [0; 60];
        hello[..9].copy_from_slice(&[b"LOCKSTEP".as_slice(), &[version]].concat());
        stranger.write_all(&hello).unwrap();
        assert!(Mesh::join(&door, plan).is_err());
        assert!(door.refusals().iter().any(|refused| refused.why == JoinRefusal::Version));
        let mut verdict = [0; 4];
        stranger.read_exact(&mut verdict).unwrap();
        assert_eq!(u32::from_le_bytes(verdict), 1);
    }
}

/// Answers like version 1: it read as many bytes, and its verdict on another version was the same.
#[test]
fn a_listener_of_another_version_is_named() {
    let mut plans = plans(&layout(2), WireChoice::Any);
    shortly(&mut plans);
    let old = TcpListener::bind("127.0.0.1:0").unwrap();
    let (door, mut plan) = plans.remove(1);
    plan.peers[0] = old.local_addr().unwrap().to_string();
    let joined = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut dialer = old.accept().unwrap().0;
            dialer.read_exact(&mut [0; 60]).unwrap();
            dialer.write_all(&[1u32.to_le_bytes().as_slice(), &[0; 44]].concat()).unwrap();
        });
        Mesh::join(&door, plan)
    });
    let why = JoinRefusal::Version;
    assert!(matches!(joined, Err(Error::Refused { rank: Rank(0), why: w }) if w == why), "{joined:?}");
}

#[test]
fn a_join_can_be_called_off() {
    let mut plans = plans(&layout(2), WireChoice::Any);
    let (door, plan) = plans.remove(0);
    let cancel = CancelFlag::default();
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            cancel.cancel();
        });
        Mesh::join_until(&door, plan.clone(), &cancel)
    });
    assert!(matches!(result, Err(Error::Aborted)), "{result:?}");
    // A cancel before the join begins is not lost.
    let late = Mesh::join_until(&door, plan, &cancel);
    assert!(matches!(late, Err(Error::Aborted)), "{late:?}");
}

#[test]
fn plans_that_cannot_be_meant_are_refused() {
    let (door, plan) = plans(&layout(2), WireChoice::Any).remove(0);
    let beyond = MeshPlan { rank: Rank(2), ..plan.clone() };
    assert!(matches!(Mesh::join(&door, beyond), Err(Error::Plan(_))));
    let unlisted = MeshPlan { peers: plan.peers[..1].to_vec(), ..plan.clone() };
    assert!(matches!(Mesh::join(&door, unlisted), Err(Error::Plan(_))));
    let alone = MeshPlan { layout: Layout::solo(4), ..plan };
    assert!(matches!(Mesh::join(&door, alone), Ok(mesh) if mesh.is_alone()));
}

#[test]
fn memory_wire_fails_with_socket_peer() {
    let mut plans = plans(&layout(2), WireChoice::Memory);
    shortly(&mut plans);
    plans[1].1.wire = WireChoice::Socket;
    let results = join_all(plans);
    assert!(matches!(results[0], Err(Error::NoSharedMemory { rank: Rank(1) })), "{results:?}");
}
