//! Tests of peers that break the rules, from inside the crate: every such peer is named, and none causes wrong numbers.

use crate::error::Error;
use crate::frame::{FRAME_WORDS_MAX, FrameHead, FrameKind, HEAD_WORDS, frame_words};
use crate::link::{LinkFault, LinkSeals, LinkSide, PeerLink, Seal, ShmLink, TcpLink};
use crate::mesh::{Mesh, MeshParts};
use crate::plan::LinkEncryption;
use crate::region::Region;
use crate::ring::LINE_WORDS;
use crate::sync::Ordering;
use crate::transfer::{Direction, Payload, Transfer};
use crate::wait::WaitPolicy;
use backend::Memory;
use backend::cpu::{Cpu, CpuConfig, Isa};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use types::{Activations, Epoch, Grid, Layout, Rank};

const EPOCH: Epoch = Epoch { incarnation: 3, n: 4 };
const N_COLS: usize = 40;

/// Returns rank 0 of ten, with a link to the next rank.
fn mesh(link: PeerLink, doorbell: Arc<Region>, deadline: Duration) -> Mesh {
    let layout = Layout::even(Grid { pp: 1, tp: 10 }, 1).unwrap();
    let policy = WaitPolicy { deadline, spin: false };
    let links = [None, Some(link)].into_iter().chain((2..10).map(|_| None)).collect();
    Mesh::new(
        &layout,
        MeshParts { rank: Rank(0), epoch: EPOCH, encryption: LinkEncryption::Off, policy, doorbell, links },
    )
    .unwrap()
}

/// Receives a row from rank 1.
fn receive(mesh: &mut Mesh) -> Result<Vec<f32>, Error> {
    let cpu =
        Cpu::new(CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false }).unwrap();
    let mut buffer = cpu.buffer(1, N_COLS).unwrap();
    mesh.plan([Transfer::block(1, Direction::In, 1, 0..N_COLS)]);
    mesh.exchange(FrameKind::Rows, 1, &|_| 0, &mut RowPayload(&cpu, &mut buffer))?;
    let mut row = vec![0.0; N_COLS];
    cpu.read(&buffer, 0..1, &mut row);
    Ok(row)
}

struct RowPayload<'a>(&'a Cpu, &'a mut <Cpu as Memory>::Buffer);

impl Payload for RowPayload<'_> {
    fn read(&mut self, _row: usize, _col: usize, _out: &mut [u32]) {
        unreachable!("nothing is sent");
    }

    fn write(&mut self, _peer: usize, row: usize, col: usize, words: &[u32]) {
        self.0.write_part(self.1, row, col, bytemuck::cast_slice(words));
    }
}

fn doorbell() -> Arc<Region> {
    Arc::new(Region::anonymous(Region::doorbell_bytes()).unwrap())
}

/// Returns the head that rank 1 should send.
fn due() -> FrameHead {
    FrameHead { kind: FrameKind::Rows, seq: 0, n_words: N_COLS as u32, tag: 1, epoch: EPOCH }
}

fn payload() -> Vec<u32> {
    (0..N_COLS).map(|i| (i as f32).to_bits()).collect()
}

/// The encryption modes of an exchange of rows over a connection.
const MODES: [LinkEncryption; 2] = [LinkEncryption::Off, LinkEncryption::On];
const SECRET: [u8; 32] = [5; 32];

/// Returns the peer's frames, each sealed for its position.
fn frames(mode: LinkEncryption, heads: &[FrameHead]) -> Vec<Vec<u32>> {
    let mut seal = Seal::new(&SECRET, mode);
    let frame = |head: &FrameHead| {
        let mut words = [vec![0; HEAD_WORDS], payload()].concat();
        words.resize(frame_words(N_COLS), 0);
        words.truncate(if head.n_words == 0 { HEAD_WORDS } else { words.len() });
        seal.seal(head, &mut words);
        words
    };
    heads.iter().map(frame).collect()
}

fn frame(mode: LinkEncryption, head: FrameHead) -> Vec<u32> {
    frames(mode, &[head]).remove(0)
}

fn socket_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    (ours, theirs)
}

/// Returns rank 0 beside a peer that sends these words over a socket, and then hangs up or stays silent.
fn mesh_beside_peer(mode: LinkEncryption, words: &[u32], n_bytes: usize, hangs_up: bool) -> (Mesh, Option<TcpStream>) {
    let (ours, mut theirs) = socket_pair();
    theirs.write_all(&bytemuck::cast_slice::<u32, u8>(words)[..n_bytes]).unwrap();
    let seals = LinkSeals { outgoing: Seal::new(&[6; 32], mode), incoming: Seal::new(&SECRET, mode) };
    let link = PeerLink::Tcp(TcpLink::new(ours, seals));
    (mesh(link, doorbell(), Duration::from_millis(300)), (!hangs_up).then_some(theirs))
}

/// Returns what rank 0 receives from it.
fn receive_over_socket(mode: LinkEncryption, words: &[u32], n_bytes: usize, hangs_up: bool) -> Result<Vec<f32>, Error> {
    let (mut mesh, _kept) = mesh_beside_peer(mode, words, n_bytes, hangs_up);
    receive(&mut mesh)
}

const PEER: Rank = Rank(1);

fn is_garbage(result: &Result<Vec<f32>, Error>) -> bool {
    matches!(result, Err(Error::Garbage { rank: PEER, .. }))
}

#[test]
fn what_is_meant_arrives() {
    for mode in MODES {
        let words = frame(mode, due());
        let row = receive_over_socket(mode, &words, 4 * words.len(), true).unwrap();
        assert!(row.iter().enumerate().all(|(i, value)| *value == i as f32));
    }
}

#[test]
fn a_peer_that_ends_or_stops_in_the_middle_is_named() {
    for mode in MODES {
        let words = frame(mode, due());
        for n_bytes in [0, 1, 4 * HEAD_WORDS, 4 * HEAD_WORDS + 3, 4 * words.len() - 1] {
            let ended = receive_over_socket(mode, &words, n_bytes, true);
            assert!(matches!(ended, Err(Error::PeerLost { rank: PEER })), "{n_bytes} bytes: {ended:?}");
            let silent = receive_over_socket(mode, &words, n_bytes, false);
            assert!(matches!(silent, Err(Error::Deadline { rank: PEER })), "{n_bytes} bytes: {silent:?}");
        }
    }
}

/// Changes one bit of each part: the head, the tag, the checksum, the payload, the zeros behind it.
#[test]
fn garbage_on_a_socket_is_named() {
    for mode in MODES {
        let good = frame(mode, due());
        let changed = |at: usize| {
            let mut words = good.clone();
            words[at] ^= 1 << 13;
            words
        };
        let parts = [0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14, HEAD_WORDS, HEAD_WORDS + N_COLS - 1, HEAD_WORDS + N_COLS];
        let long = FrameHead { n_words: FRAME_WORDS_MAX as u32 + 1, ..due() };
        let skip = [vec![FrameHead::skip()], vec![0; 63]].concat();
        for words in parts.map(changed).into_iter().chain([frame(mode, long), skip]) {
            let result = receive_over_socket(mode, &words, 4 * words.len(), false);
            assert!(is_garbage(&result), "{mode:?}: {result:?}");
        }
    }
}

/// An attacker between two ranks can repeat, drop and swap frames with a right tag, and make a checksum right.
#[test]
fn a_frame_that_is_not_the_next_one_is_named() {
    for mode in MODES {
        let sent = frames(mode, &[due(), FrameHead { seq: 1, ..due() }]);
        let [first, second] = [&sent[0], &sent[1]];
        let mut renumbered = first.clone();
        renumbered[2] = 1;
        let head = FrameHead::with_checksum(renumbered.first_chunk().unwrap());
        renumbered[..HEAD_WORDS].copy_from_slice(&head);
        for (what, again) in [("sent again", first), ("sent again as another", &renumbered)] {
            let words = [first.as_slice(), again].concat();
            let (mut mesh, _kept) = mesh_beside_peer(mode, &words, 4 * words.len(), false);
            assert!(receive(&mut mesh).is_ok());
            let result = receive(&mut mesh);
            assert!(is_garbage(&result), "{mode:?}, {what}: {result:?}");
        }
        let swapped = [second.as_slice(), first].concat();
        for (what, words) in [("left out", second), ("swapped", &swapped)] {
            let result = receive_over_socket(mode, words, 4 * words.len(), false);
            assert!(is_garbage(&result), "{mode:?}, {what}: {result:?}");
        }
    }
}

#[test]
fn a_frame_of_another_key_is_named() {
    for mode in MODES {
        let mut words = frame(mode, due());
        Seal::new(&[9; 32], mode).seal(&due(), &mut words);
        let result = receive_over_socket(mode, &words, 4 * words.len(), false);
        assert!(is_garbage(&result), "{mode:?}: {result:?}");
    }
}

#[test]
fn a_peer_that_is_out_of_step_is_named() {
    for mode in MODES {
        let heads = [
            FrameHead { kind: FrameKind::Sums, ..due() },
            FrameHead { seq: 1, ..due() },
            FrameHead { tag: 2, ..due() },
            FrameHead { n_words: N_COLS as u32 - 1, ..due() },
        ];
        for head in heads {
            let words = frame(mode, head);
            let result = receive_over_socket(mode, &words, 4 * words.len(), false);
            assert!(matches!(result, Err(Error::OutOfStep { rank: PEER, .. })), "{result:?}");
        }
        let stale = Epoch { n: EPOCH.n - 1, ..EPOCH };
        let words = frame(mode, FrameHead { epoch: stale, ..due() });
        let result = receive_over_socket(mode, &words, 4 * words.len(), false);
        assert!(matches!(result, Err(Error::Stale { rank: PEER, ours: EPOCH, theirs }) if theirs == stale));
    }
}

fn last_word(n_before: u32) -> FrameHead {
    FrameHead { kind: FrameKind::Break, seq: n_before, n_words: 0, tag: 9, ..due() }
}

#[test]
fn break_off_over_socket_names_the_culprit() {
    for mode in MODES {
        let words = frame(mode, last_word(0));
        let result = receive_over_socket(mode, &words, 4 * words.len(), true);
        assert!(matches!(result, Err(Error::PeerLost { rank: Rank(9) })), "{result:?}");
    }
}

/// The mesh looks for a last frame behind a frame that is still held. There it accepts only the peer's own.
#[test]
fn a_last_word_behind_a_held_frame_is_believed_by_its_seal() {
    for mode in MODES {
        let sent = frames(mode, &[due(), last_word(1)]);
        let mut forged = sent[1].clone();
        forged[4] ^= 1;
        let head = FrameHead::with_checksum(forged.first_chunk().unwrap());
        forged.copy_from_slice(&head);
        for (last, expected) in [(&sent[1], Some(LinkFault::Lost(Some(Rank(9))))), (&forged, None)] {
            let (ours, mut theirs) = socket_pair();
            theirs.write_all(bytemuck::cast_slice(&[sent[0].as_slice(), last].concat())).unwrap();
            let seals = LinkSeals { outgoing: Seal::new(&[6; 32], mode), incoming: Seal::new(&SECRET, mode) };
            let mut link = TcpLink::new(ours, seals);
            while link.peek() == Ok(None) {}
            assert_eq!(link.has_ended(), expected, "{mode:?}");
        }
    }
}

const RING: u32 = 1 << 15;

/// Returns both ends of a link in memory, and the memory that they share.
fn in_memory() -> (ShmLink, ShmLink, Arc<Region>, Arc<Region>) {
    let region = Arc::new(Region::anonymous(Region::pair_bytes(RING)).unwrap());
    let doorbells = [doorbell(), doorbell()];
    let side = |i: usize| ShmLink::new(LinkSide::new(region.clone(), i, doorbells[1 - i].clone()), RING, None);
    (side(0), side(1), region.clone(), doorbells[0].clone())
}

/// Returns what rank 0 receives from a peer that has changed their shared memory like this.
fn receive_over_memory(does: impl FnOnce(&Region, &mut ShmLink)) -> Result<Vec<f32>, Error> {
    let (ours, mut theirs, region, doorbell) = in_memory();
    does(&region, &mut theirs);
    receive(&mut mesh(PeerLink::Shm(ours), doorbell, Duration::from_millis(100)))
}

fn send(link: &mut ShmLink, head: FrameHead) {
    link.reserve_frame(N_COLS).unwrap().unwrap().copy_from_slice(&payload());
    link.send(&head).unwrap();
}

#[test]
fn what_is_meant_arrives_through_memory() {
    let row = receive_over_memory(|_, link| send(link, due())).unwrap();
    assert!(row.iter().enumerate().all(|(i, value)| *value == i as f32));
}

#[test]
fn nonsense_in_shared_memory_is_named() {
    for written in [1, RING + LINE_WORDS, 1 << 31, u32::MAX] {
        let result =
            receive_over_memory(|region, _| region.pair().cursors[1].written.0.store(written, Ordering::Release));
        assert!(matches!(result, Err(Error::Garbage { rank: PEER, .. })), "{written}: {result:?}");
    }
    for (at, word) in [(0, 7), (1, 99), (3, u32::MAX), (3, 1000), (0, FrameHead::skip())] {
        let result = receive_over_memory(|region, link| {
            send(link, due());
            // SAFETY: a word of the first head, which no reader uses yet.
            unsafe { region.ring_start(1, RING).add(at).write(word) };
        });
        assert!(matches!(result, Err(Error::Garbage { rank: PEER, .. })), "{at}: {result:?}");
    }
    let result = receive_over_memory(|region, link| {
        // A head that announces more words than were written.
        send(link, FrameHead { n_words: 4000, ..due() });
        region.pair().cursors[1].written.0.store(LINE_WORDS, Ordering::Release);
    });
    assert!(matches!(result, Err(Error::Garbage { rank: PEER, .. })), "{result:?}");
}

#[test]
fn reader_with_invalid_cursor_is_an_error() {
    let (mut ours, _theirs, region, _) = in_memory();
    let mut n_sent = 0;
    while ours.reserve_frame(FRAME_WORDS_MAX).unwrap().is_some() {
        ours.send(&FrameHead { n_words: FRAME_WORDS_MAX as u32, ..due() }).unwrap();
        n_sent += 1;
    }
    assert_eq!(n_sent, 1);
    region.pair().cursors[0].read.0.store(RING, Ordering::Release);
    assert!(ours.reserve_frame(FRAME_WORDS_MAX).is_err());
}

#[test]
fn a_ring_wraps_with_frames_of_every_length() {
    let (mut ours, mut theirs, ..) = in_memory();
    let mut n_words = 1;
    for seq in 0..3000 {
        n_words = (n_words * 31 + 7) % 9000;
        let head = FrameHead { kind: FrameKind::Sums, seq, n_words: n_words as u32, tag: 0, epoch: EPOCH };
        ours.reserve_frame(n_words).unwrap().unwrap().fill(seq);
        ours.send(&head).unwrap();
        assert_eq!(theirs.peek(), Ok(Some(head)));
        assert!(theirs.payload().iter().all(|word| *word == seq));
        theirs.release();
        assert_eq!(theirs.peek(), Ok(None));
    }
}

#[test]
fn peer_that_blames_invalid_rank_is_blamed() {
    for culprit in [0, 10, 60_000] {
        let result = receive_over_memory(|_, link| link.side().break_off(Rank(culprit)));
        assert!(matches!(result, Err(Error::PeerLost { rank: PEER })), "{culprit}: {result:?}");
    }
}

#[test]
fn break_off_in_memory_names_the_culprit() {
    let result = receive_over_memory(|_, link| link.side().break_off(Rank(9)));
    assert!(matches!(result, Err(Error::PeerLost { rank: Rank(9) })), "{result:?}");
}

#[test]
fn a_peer_that_ended_is_named_but_what_it_sent_counts() {
    let result = receive_over_memory(|_, link| link.side().leave());
    assert!(matches!(result, Err(Error::PeerLost { rank: PEER })));
    let result = receive_over_memory(|_, link| {
        send(link, due());
        link.side().leave();
    });
    assert!(result.is_ok());
    assert!(matches!(receive_over_memory(|_, _| {}), Err(Error::Deadline { rank: PEER })));
}
