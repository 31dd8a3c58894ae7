//! One side of a handshake's connection: fixed lengths, a deadline, and a check for cancellation.

use crate::error::JoinRefusal;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// How often a wait on a silent connection checks for cancellation.
const LOOK: Duration = Duration::from_millis(10);
/// A handshake's messages fit any socket's buffer: a write that takes longer means that the peer does not read.
const WRITE: Duration = Duration::from_secs(1);

pub type HandshakeResult<T> = std::result::Result<T, JoinRefusal>;

pub struct HandshakeStream<'a> {
    stream: TcpStream,
    until: Instant,
    is_over: Box<dyn Fn() -> bool + 'a>,
}

impl<'a> HandshakeStream<'a> {
    pub fn new(
        stream: TcpStream,
        until: Instant,
        is_over: Box<dyn Fn() -> bool + 'a>,
    ) -> HandshakeResult<HandshakeStream<'a>> {
        let prepare = || -> std::io::Result<()> {
            // An accepted connection may have inherited its listener's mode.
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(LOOK))?;
            stream.set_write_timeout(Some(WRITE))
        };
        prepare().map_err(|_| JoinRefusal::Gone)?;
        Ok(HandshakeStream { stream, until, is_over })
    }

    pub fn send(&mut self, bytes: &[u8]) -> HandshakeResult<()> {
        self.stream.write_all(bytes).map_err(|_| JoinRefusal::Gone)
    }

    pub fn receive<const N: usize>(&mut self) -> HandshakeResult<[u8; N]> {
        let mut bytes = [0; N];
        let mut n = 0;
        while n < N {
            match self.stream.read(&mut bytes[n..]) {
                Ok(0) => return Err(JoinRefusal::Gone),
                Ok(more) => n += more,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                    _ => return Err(JoinRefusal::Gone),
                },
            }
            if n < N && (Instant::now() >= self.until || (self.is_over)()) {
                return Err(JoinRefusal::Silence);
            }
        }
        Ok(bytes)
    }

    /// Returns the connection, in the mode that links expect.
    pub fn stream(&self) -> std::io::Result<TcpStream> {
        self.stream.set_nonblocking(true)?;
        self.stream.try_clone()
    }
}
