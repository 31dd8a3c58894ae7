//! Connections that no meeting has taken yet. Each must send a whole Hello within its time, and then waits for a
//! meeting as long again. Has no knowledge of epochs or secrets: the meeting checks the Hello.

use crate::error::JoinRefusal;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub const MAGIC: &[u8; 8] = b"LOCKSTEP";
pub const EPOCH: usize = 12;
/// Magic, version, encryption, epoch, from, to, nonce.
pub const HELLO: usize = 8 + 2 + 2 + EPOCH + 2 + 2 + 32;

/// A connection must identify itself within this time.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// The most connections without a whole Hello, and the most that wait for a meeting. Of the address that has the most,
/// the oldest is dropped first: a peer sends its Hello at once, and dials again if it was dropped.
const WAITING_MAX: usize = 128;

/// A connection, and the bytes of its Hello so far.
pub struct IncomingConnection {
    pub stream: TcpStream,
    pub from: SocketAddr,
    pub hello: [u8; HELLO],
    n_received: usize,
    until: Instant,
}

/// The waiting connections, each list in the order of its deadlines.
#[derive(Default)]
pub struct IncomingConnections {
    without_hello: VecDeque<IncomingConnection>,
    with_hello: VecDeque<IncomingConnection>,
}

impl IncomingConnection {
    pub fn new(stream: TcpStream, from: SocketAddr, now: Instant) -> io::Result<IncomingConnection> {
        stream.set_nonblocking(true)?;
        Ok(IncomingConnection { stream, from, hello: [0; HELLO], n_received: 0, until: now + HANDSHAKE })
    }

    fn has_hello(&self) -> bool {
        self.n_received == HELLO
    }

    /// Reads the bytes that have arrived. After its Hello a peer sends nothing until it gets an answer.
    fn read_hello(&mut self) -> Result<(), JoinRefusal> {
        let mut beyond = [0];
        loop {
            let is_whole = self.has_hello();
            let room = if is_whole { &mut beyond[..] } else { &mut self.hello[self.n_received..] };
            match self.stream.read(room) {
                Ok(0) => return Err(JoinRefusal::Gone),
                Ok(_) if is_whole => return Err(JoinRefusal::Garbage),
                Ok(more) => self.n_received += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return Err(JoinRefusal::Gone),
            }
            let received = &self.hello[..self.n_received.min(MAGIC.len())];
            if !MAGIC.starts_with(received) {
                return Err(JoinRefusal::Garbage);
            }
        }
    }
}

impl IncomingConnections {
    pub fn streams(&self) -> impl Iterator<Item = &TcpStream> {
        self.with_hello.iter().chain(&self.without_hello).map(|arrival| &arrival.stream)
    }

    /// Returns when the first connection exceeds its time.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = |list: &VecDeque<IncomingConnection>| list.front().map(|arrival| arrival.until);
        first(&self.without_hello).into_iter().chain(first(&self.with_hello)).min()
    }

    pub fn add(&mut self, arrival: IncomingConnection, refused: impl FnMut(SocketAddr, JoinRefusal)) {
        push(&mut self.without_hello, arrival, refused);
    }

    /// Returns the next connection for a meeting.
    pub fn take(&mut self) -> Option<IncomingConnection> {
        self.with_hello.pop_front()
    }

    /// Takes back a connection that its meeting did not process. It goes before the others, as it was here first.
    pub fn give_back(&mut self, arrival: IncomingConnection) {
        self.with_hello.push_front(arrival);
        self.with_hello.truncate(WAITING_MAX);
    }

    /// Reads from the connections with new bytes, in the order of `streams`, and ends those whose time is over.
    pub fn read_arrived(&mut self, is_ready: &[bool], now: Instant, mut refused: impl FnMut(SocketAddr, JoinRefusal)) {
        let (greeted, silent) = (std::mem::take(&mut self.with_hello), std::mem::take(&mut self.without_hello));
        let ready = is_ready.iter().copied().chain(std::iter::repeat(false));
        for (mut arrival, is_ready) in greeted.into_iter().chain(silent).zip(ready) {
            let had_hello = arrival.has_hello();
            let listened = if is_ready { arrival.read_hello() } else { Ok(()) };
            match listened {
                Err(why) => refused(arrival.from, why),
                Ok(()) if !had_hello && arrival.has_hello() => {
                    arrival.until = now + HANDSHAKE;
                    push(&mut self.with_hello, arrival, &mut refused);
                }
                Ok(()) if now >= arrival.until => refused(arrival.from, JoinRefusal::Silence),
                Ok(()) if had_hello => push(&mut self.with_hello, arrival, &mut refused),
                Ok(()) => self.without_hello.push_back(arrival),
            }
        }
    }
}

fn push(
    list: &mut VecDeque<IncomingConnection>,
    arrival: IncomingConnection,
    mut refused: impl FnMut(SocketAddr, JoinRefusal),
) {
    list.push_back(arrival);
    if list.len() > WAITING_MAX
        && let Some(displaced) = oldest_of_largest_address(list).and_then(|at| list.remove(at))
    {
        refused(displaced.from, JoinRefusal::Silence);
    }
}

/// Returns the place of the oldest connection from the address that has the most, so that a flood displaces itself.
fn oldest_of_largest_address(list: &VecDeque<IncomingConnection>) -> Option<usize> {
    let mut n_of = BTreeMap::<IpAddr, usize>::new();
    list.iter().for_each(|arrival| *n_of.entry(arrival.from.ip()).or_default() += 1);
    let (largest, _) = n_of.into_iter().max_by_key(|(_, n)| *n)?;
    list.iter().position(|arrival| arrival.from.ip() == largest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_flood_from_one_address_displaces_itself() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let arrival = |host: u8, n: u16| {
            let stream = TcpStream::connect(address).unwrap();
            IncomingConnection::new(stream, SocketAddr::from(([192, 0, 2, host], n)), Instant::now()).unwrap()
        };
        let (mut list, mut displaced) = (VecDeque::new(), Vec::new());
        push(&mut list, arrival(2, 0), |_, _| panic!("there is room"));
        for n in 0..WAITING_MAX as u16 + 2 {
            push(&mut list, arrival(1, n), |from, _| displaced.push(from.port()));
            let _accepted = listener.accept().unwrap();
        }
        assert_eq!((list.len(), list[0].from.port()), (WAITING_MAX, 0));
        assert_eq!(list[0].from.ip(), IpAddr::from([192, 0, 2, 2]));
        assert_eq!(displaced, [0, 1, 2]);
    }
}
