//! The handshake: each side proves that it has the epoch's secret, without sending it, and both agree on a wire.
//!
//! ```text
//! dialer                                        acceptor
//! Hello   version, encryption, epoch,
//!         from, to, nonce                  ──▶
//!                                          ◀──  Greeting  refusal or not, epoch, nonce
//! proof   MAC(session, "dial")             ──▶
//!                                          ◀──  verdict and proof: MAC(session, "accept")
//! Offer   host, regions                    ──▶
//!                                          ◀──  Answer    whether they could be opened; its doorbell
//! verdict whether that could be opened     ──▶
//! ```
//! The session's key is a MAC of Hello and Greeting under the secret. Both contain nonces, so nothing can be replayed.
//! The messages after the proofs carry a MAC too. The keys of a connection's frames are derived from the session's key,
//! one for each direction: no two connections and no two epochs share a key.

use super::stream::{HandshakeResult, HandshakeStream};
use crate::arrivals::{EPOCH, HELLO, MAGIC};
use crate::error::{Error, JoinRefusal, Result};
use crate::link::{LinkSeals, LinkSide, PeerLink, Seal, ShmLink, TcpLink};
use crate::plan::{LinkEncryption, MeshPlan, WireChoice};
use crate::region::{Nonce, Region, RegionExport, boot_id};
use crate::wiring::ring_words;
use std::net::TcpStream;
use std::sync::Arc;
use types::{Epoch, Rank};

/// Version 1 has neither an encryption field nor seals. A Hello keeps its length, so that both versions can read it.
const VERSION: u16 = 2;

const GREETING: usize = 4 + EPOCH + 32;
const MAC: usize = 32;
/// The dialer's offer: host, pid, the pair's number and nonce, the doorbell's number and nonce; zero if it offers none.
const OFFER: usize = 4 + 32 + 4 + 2 * (4 + 32);
/// The acceptor's answer: whether it could open the offer, pid, the doorbell's number and nonce.
const ANSWER: usize = 4 + 4 + 4 + 32;

/// What each side of a connection needs for the handshake.
pub struct Handshake<'a> {
    pub plan: &'a MeshPlan,
    pub offer: Option<&'a RegionExport>,
    pub stream: HandshakeStream<'a>,
}

/// A peer that has proved its identity, and the chosen link.
pub struct JoinedPeer {
    stream: TcpStream,
    memory: Option<(Arc<Region>, usize, Arc<Region>)>,
    seals: LinkSeals,
}

/// The two sides of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HandshakeSide {
    Dialer,
    Acceptor,
}

impl JoinedPeer {
    pub fn into_link(self, plan: &MeshPlan, rank: Rank) -> Result<PeerLink> {
        match self.memory {
            Some((region, side, doorbell)) => {
                let words = ring_words(plan.layout.grid(), plan.rank, rank);
                let side = LinkSide::new(region, side, doorbell);
                Ok(PeerLink::Shm(ShmLink::new(side, words, Some(self.stream))))
            }
            None if plan.wire == WireChoice::Memory => Err(Error::NoSharedMemory { rank }),
            None => Ok(PeerLink::Tcp(TcpLink::new(self.stream, self.seals))),
        }
    }
}

/// Returns random bytes that were never used before.
pub fn new_nonce() -> Result<Nonce> {
    let mut nonce = [0; 32];
    let flags = rustix::rand::GetRandomFlags::empty();
    match rustix::rand::getrandom(&mut nonce, flags) {
        Ok(32) => Ok(nonce),
        Ok(_) => Err(Error::Plan("the system has too few random bytes")),
        Err(error) => Err(Error::Io { what: "random bytes", source: error.into() }),
    }
}

/// A key that only the two sides of one connection have.
struct SessionKey([u8; 32]);

impl SessionKey {
    fn new(secret: &[u8; 32], hello: &[u8; HELLO], greeting: &[u8; GREETING]) -> SessionKey {
        SessionKey(*blake3::keyed_hash(secret, &[hello.as_slice(), greeting].concat()).as_bytes())
    }

    /// Returns the seals of the connection's frames for `side`.
    fn seals(&self, side: HandshakeSide, encryption: LinkEncryption) -> LinkSeals {
        let seal = |from: &str| Seal::new(self.mac("frames of the", from.as_bytes()).as_bytes(), encryption);
        let (dialer, acceptor) = (seal("dialer"), seal("acceptor"));
        match side {
            HandshakeSide::Dialer => LinkSeals { outgoing: dialer, incoming: acceptor },
            HandshakeSide::Acceptor => LinkSeals { outgoing: acceptor, incoming: dialer },
        }
    }

    fn mac(&self, what: &str, body: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, &[what.as_bytes(), body].concat())
    }

    /// Checks a MAC. blake3's hashes compare in constant time.
    fn is_valid_mac(&self, what: &str, body: &[u8], mac: [u8; MAC]) -> bool {
        self.mac(what, body) == blake3::Hash::from_bytes(mac)
    }
}

/// Reads fields of a fixed length, one after another.
struct FieldReader<'a>(&'a [u8]);

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("lengths are constants, and add up");
        self.0 = rest;
        *field
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn rank(&mut self) -> Rank {
        Rank(self.u16())
    }

    fn epoch(&mut self) -> Epoch {
        Epoch { incarnation: u64::from_le_bytes(self.take()), n: self.u32() }
    }
}

/// Joins fields into a message of a fixed length.
fn message<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    fields.concat().try_into().expect("lengths are constants, and add up")
}

fn epoch_bytes(epoch: Epoch) -> [u8; EPOCH] {
    message(&[&epoch.incarnation.to_le_bytes(), &epoch.n.to_le_bytes()])
}

/// Returns the code that sends the verdict to the dialer; 0 accepts it.
fn verdict(refusal: Option<JoinRefusal>) -> u32 {
    match refusal {
        None => 0,
        Some(JoinRefusal::Version) => 1,
        Some(JoinRefusal::WrongSecret) => 2,
        Some(JoinRefusal::Stale { .. }) => 3,
        Some(JoinRefusal::Early { .. }) => 4,
        Some(JoinRefusal::Duplicate) => 5,
        Some(JoinRefusal::Unexpected) => 6,
        Some(JoinRefusal::Garbage | JoinRefusal::Silence | JoinRefusal::Gone) => 7,
        Some(JoinRefusal::Encryption { .. }) => 8,
    }
}

/// Reads the verdict as the dialer, whose own epoch is `ours`.
fn check_verdict(verdict: u32, plan: &MeshPlan, theirs: Epoch) -> HandshakeResult<()> {
    let (ours, encryption) = (plan.epoch, plan.encryption);
    Err(match verdict {
        0 => return Ok(()),
        1 => JoinRefusal::Version,
        2 => JoinRefusal::WrongSecret,
        3 => JoinRefusal::Stale { ours, theirs },
        4 => JoinRefusal::Early { ours: theirs, theirs: ours },
        5 => JoinRefusal::Duplicate,
        6 => JoinRefusal::Unexpected,
        8 => JoinRefusal::Encryption { ours: encryption, theirs: encryption.other() },
        _ => JoinRefusal::Garbage,
    })
}

impl Handshake<'_> {
    /// Identifies the peer that sent the Hello; `take` gives it its slot. A refusal names the slot that it leaves
    /// empty.
    pub fn accept(
        &mut self,
        hello: &[u8; HELLO],
        take: impl Fn(Rank) -> HandshakeResult<()>,
    ) -> std::result::Result<(Rank, JoinedPeer), (Option<Rank>, JoinRefusal)> {
        let (rank, session) = self.recognize(hello, &take).map_err(|why| (None, why))?;
        let met = self.accept_wire(rank, &session).map_err(|why| (Some(rank), why))?;
        Ok((rank, met))
    }

    fn recognize(
        &mut self,
        hello: &[u8; HELLO],
        take: &impl Fn(Rank) -> HandshakeResult<()>,
    ) -> HandshakeResult<(Rank, SessionKey)> {
        let judged = self.check_hello(hello);
        if judged == Err(JoinRefusal::Garbage) {
            return Err(JoinRefusal::Garbage);
        }
        let nonce = new_nonce().map_err(|_| JoinRefusal::Gone)?;
        let code = verdict(judged.err()).to_le_bytes();
        let greeting = message::<GREETING>(&[&code, &epoch_bytes(self.plan.epoch), &nonce]);
        self.stream.send(&greeting)?;
        let rank = judged?;
        let session = SessionKey::new(&self.plan.secret, hello, &greeting);
        let proof = self.stream.receive()?;
        let result = match session.is_valid_mac("dial", &[], proof) {
            true => take(rank),
            false => Err(JoinRefusal::WrongSecret),
        };
        let code = verdict(result.err()).to_le_bytes();
        let proof = session.mac("accept", &code);
        // If the verdict cannot be sent, the offer will not arrive either, and that fails.
        let _ = self.stream.send(&message::<{ 4 + MAC }>(&[&code, proof.as_bytes()]));
        result.map(|()| (rank, session))
    }

    /// Returns the rank that sent the Hello, if it is an expected one.
    fn check_hello(&self, hello: &[u8; HELLO]) -> HandshakeResult<Rank> {
        let mut fields = FieldReader(hello);
        let ours = self.plan.epoch;
        if &fields.take::<8>() != MAGIC {
            return Err(JoinRefusal::Garbage);
        }
        if fields.u16() != VERSION {
            return Err(JoinRefusal::Version);
        }
        let encryption = self.plan.encryption;
        if fields.u16() != encryption as u16 {
            return Err(JoinRefusal::Encryption { ours: encryption, theirs: encryption.other() });
        }
        let (theirs, from, to) = (fields.epoch(), fields.rank(), fields.rank());
        if theirs < ours {
            return Err(JoinRefusal::Stale { ours, theirs });
        }
        if theirs > ours {
            return Err(JoinRefusal::Early { ours, theirs });
        }
        let is_expected = to == self.plan.rank && from > to && from.0 < self.plan.layout.grid().n_ranks();
        if is_expected { Ok(from) } else { Err(JoinRefusal::Unexpected) }
    }

    /// Proves this rank's identity to `rank`, and agrees on the wire.
    pub fn dial(&mut self, rank: Rank) -> HandshakeResult<JoinedPeer> {
        let plan = self.plan;
        let (from, to) = (plan.rank.0.to_le_bytes(), rank.0.to_le_bytes());
        let nonce = new_nonce().map_err(|_| JoinRefusal::Gone)?;
        let (version, encryption) = (VERSION.to_le_bytes(), (plan.encryption as u16).to_le_bytes());
        let hello = message::<HELLO>(&[MAGIC, &version, &encryption, &epoch_bytes(plan.epoch), &from, &to, &nonce]);
        self.stream.send(&hello)?;
        let greeting = self.stream.receive::<GREETING>()?;
        let mut fields = FieldReader(&greeting);
        let (code, theirs) = (fields.u32(), fields.epoch());
        check_verdict(code, plan, theirs)?;
        let session = SessionKey::new(&plan.secret, &hello, &greeting);
        self.stream.send(session.mac("dial", &[]).as_bytes())?;
        let answer = self.stream.receive::<{ 4 + MAC }>()?;
        let mut fields = FieldReader(&answer);
        let (code, proof) = (fields.take::<4>(), fields.take());
        // Read before the proof is checked: under a wrong secret there is no valid proof.
        check_verdict(u32::from_le_bytes(code), plan, theirs)?;
        match session.is_valid_mac("accept", &code, proof) {
            true => self.offer_wire(rank, &session),
            false => Err(JoinRefusal::WrongSecret),
        }
    }

    /// Makes the pair's region as the dialer, which is side 0.
    fn offer_wire(&mut self, rank: Rank, session: &SessionKey) -> HandshakeResult<JoinedPeer> {
        let pair = self.make_pair(rank);
        let (host, pid) = (host_id(), std::process::id().to_le_bytes());
        let offer = match (&pair, self.offer) {
            (Some((_, pair)), Some(doorbell)) => {
                let [pair_number, bell_number] = [pair, doorbell].map(|offer| offer.number().to_le_bytes());
                let offered = 1u32.to_le_bytes();
                message::<OFFER>(&[&offered, &host, &pid, &pair_number, &pair.nonce, &bell_number, &doorbell.nonce])
            }
            _ => [0; OFFER],
        };
        self.send_sealed(session, "offer", &offer)?;
        let answer = self.receive_sealed::<ANSWER>(session, "answer")?;
        let mut fields = FieldReader(&answer);
        let is_opened = fields.u32() == 1;
        let (pid, number, nonce) = (fields.u32(), fields.u32(), fields.take());
        let doorbell = is_opened.then(|| Region::open(pid, number, Region::doorbell_bytes(), &nonce).ok()).flatten();
        self.send_sealed(session, "settled", &u32::from(doorbell.is_some()).to_le_bytes())?;
        let memory = pair.zip(doorbell).map(|((region, _), doorbell)| (Arc::new(region), 0, Arc::new(doorbell)));
        self.joined_peer(memory, session.seals(HandshakeSide::Dialer, self.plan.encryption))
    }

    fn make_pair(&self, rank: Rank) -> Option<(Region, RegionExport)> {
        self.offer?;
        let words = ring_words(self.plan.layout.grid(), self.plan.rank, rank);
        RegionExport::make(Region::pair_bytes(words), new_nonce().ok()?).ok()
    }

    fn accept_wire(&mut self, rank: Rank, session: &SessionKey) -> HandshakeResult<JoinedPeer> {
        let offer = self.receive_sealed::<OFFER>(session, "offer")?;
        let regions = self.open(rank, &offer);
        let answer = match (&regions, self.offer) {
            (Some(_), Some(doorbell)) => {
                let [opened, pid, number] = [1, std::process::id(), doorbell.number()].map(u32::to_le_bytes);
                message::<ANSWER>(&[&opened, &pid, &number, &doorbell.nonce])
            }
            _ => [0; ANSWER],
        };
        self.send_sealed(session, "answer", &answer)?;
        let settled = self.receive_sealed::<4>(session, "settled")?;
        let is_settled = u32::from_le_bytes(settled) == 1;
        let memory = regions.filter(|_| is_settled).map(|(pair, doorbell)| (Arc::new(pair), 1, Arc::new(doorbell)));
        self.joined_peer(memory, session.seals(HandshakeSide::Acceptor, self.plan.encryption))
    }

    /// Opens the pair's region and the peer's doorbell, if the peer is on this host and both match the offer.
    fn open(&self, rank: Rank, offer: &[u8; OFFER]) -> Option<(Region, Region)> {
        self.offer?;
        let mut fields = FieldReader(offer);
        let (is_offered, their_host) = (fields.u32() == 1, fields.take());
        if !is_offered || host_id() != their_host {
            return None;
        }
        let pid = fields.u32();
        let words = ring_words(self.plan.layout.grid(), self.plan.rank, rank);
        let pair = Region::open(pid, fields.u32(), Region::pair_bytes(words), &fields.take()).ok()?;
        let doorbell = Region::open(pid, fields.u32(), Region::doorbell_bytes(), &fields.take()).ok()?;
        Some((pair, doorbell))
    }

    fn joined_peer(
        &self,
        memory: Option<(Arc<Region>, usize, Arc<Region>)>,
        seals: LinkSeals,
    ) -> HandshakeResult<JoinedPeer> {
        let stream = self.stream.stream().map_err(|_| JoinRefusal::Gone)?;
        Ok(JoinedPeer { stream, memory, seals })
    }

    fn send_sealed(&mut self, session: &SessionKey, what: &str, body: &[u8]) -> HandshakeResult<()> {
        self.stream.send(&[body, session.mac(what, body).as_bytes()].concat())
    }

    fn receive_sealed<const N: usize>(&mut self, session: &SessionKey, what: &str) -> HandshakeResult<[u8; N]> {
        let body = self.stream.receive()?;
        let mac = self.stream.receive()?;
        if session.is_valid_mac(what, &body, mac) { Ok(body) } else { Err(JoinRefusal::Garbage) }
    }
}

/// Returns a hash that identifies the machine's current boot, and reveals no more than that.
fn host_id() -> [u8; 32] {
    *blake3::hash(&boot_id()).as_bytes()
}
