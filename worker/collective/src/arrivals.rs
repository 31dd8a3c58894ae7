//! Connections that no meeting has taken yet. Each must say a whole Hello within its time, and is kept as long for a
//! meeting to come. Does not know epochs or secrets: the meeting judges what was said.

use crate::error::JoinRefusal;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub const MAGIC: &[u8; 8] = b"LOCKSTEP";
pub const EPOCH: usize = 12;
/// Magic, version, encryption, epoch, from, to, nonce.
pub const HELLO: usize = 8 + 2 + 2 + EPOCH + 2 + 2 + 32;

/// A connection must say who it is within this time.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// So many have not said a whole Hello, and so many wait for a meeting. The oldest go first: a peer says its Hello at
/// once, and dials again if it was sent away.
const WAITING_MAX: usize = 128;

/// A connection, and what it has said.
pub struct WaitingPeer {
    pub stream: TcpStream,
    pub from: SocketAddr,
    pub hello: [u8; HELLO],
    n_heard: usize,
    until: Instant,
}

/// Those who wait, each list in the order of its deadlines.
#[derive(Default)]
pub struct WaitingPeers {
    unheard: VecDeque<WaitingPeer>,
    heard: VecDeque<WaitingPeer>,
}

impl WaitingPeer {
    pub fn new(stream: TcpStream, from: SocketAddr, now: Instant) -> io::Result<WaitingPeer> {
        stream.set_nonblocking(true)?;
        Ok(WaitingPeer { stream, from, hello: [0; HELLO], n_heard: 0, until: now + HANDSHAKE })
    }

    fn is_heard(&self) -> bool {
        self.n_heard == HELLO
    }

    /// Reads what has come. After its Hello a peer says nothing until it is answered.
    fn listen(&mut self) -> Result<(), JoinRefusal> {
        let mut beyond = [0];
        loop {
            let is_heard = self.is_heard();
            let room = if is_heard { &mut beyond[..] } else { &mut self.hello[self.n_heard..] };
            match self.stream.read(room) {
                Ok(0) => return Err(JoinRefusal::Gone),
                Ok(_) if is_heard => return Err(JoinRefusal::Garbage),
                Ok(more) => self.n_heard += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return Err(JoinRefusal::Gone),
            }
            let said = &self.hello[..self.n_heard.min(MAGIC.len())];
            if !MAGIC.starts_with(said) {
                return Err(JoinRefusal::Garbage);
            }
        }
    }
}

impl WaitingPeers {
    pub fn streams(&self) -> impl Iterator<Item = &TcpStream> {
        self.heard.iter().chain(&self.unheard).map(|arrival| &arrival.stream)
    }

    /// When the first of them has waited for too long.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = |list: &VecDeque<WaitingPeer>| list.front().map(|arrival| arrival.until);
        first(&self.unheard).into_iter().chain(first(&self.heard)).min()
    }

    pub fn add(&mut self, arrival: WaitingPeer, refused: impl FnMut(SocketAddr, JoinRefusal)) {
        push(&mut self.unheard, arrival, refused);
    }

    /// The next one for a meeting.
    pub fn take(&mut self) -> Option<WaitingPeer> {
        self.heard.pop_front()
    }

    /// Takes back one that its meeting did not get to. It was here before the others.
    pub fn give_back(&mut self, arrival: WaitingPeer) {
        self.heard.push_front(arrival);
        self.heard.truncate(WAITING_MAX);
    }

    /// Listens to those that have something to say, in the order of `streams`, and ends those whose time is over.
    pub fn listen(&mut self, is_ready: &[bool], now: Instant, mut refused: impl FnMut(SocketAddr, JoinRefusal)) {
        let (heard, unheard) = (std::mem::take(&mut self.heard), std::mem::take(&mut self.unheard));
        let ready = is_ready.iter().copied().chain(std::iter::repeat(false));
        for (mut arrival, is_ready) in heard.into_iter().chain(unheard).zip(ready) {
            let was_heard = arrival.is_heard();
            let listened = if is_ready { arrival.listen() } else { Ok(()) };
            match listened {
                Err(why) => refused(arrival.from, why),
                Ok(()) if !was_heard && arrival.is_heard() => {
                    arrival.until = now + HANDSHAKE;
                    push(&mut self.heard, arrival, &mut refused);
                }
                Ok(()) if now >= arrival.until => refused(arrival.from, JoinRefusal::Silence),
                Ok(()) if was_heard => push(&mut self.heard, arrival, &mut refused),
                Ok(()) => self.unheard.push_back(arrival),
            }
        }
    }
}

fn push(list: &mut VecDeque<WaitingPeer>, arrival: WaitingPeer, mut refused: impl FnMut(SocketAddr, JoinRefusal)) {
    if list.len() >= WAITING_MAX
        && let Some(oldest) = list.pop_front()
    {
        refused(oldest.from, JoinRefusal::Silence);
    }
    list.push_back(arrival);
}
