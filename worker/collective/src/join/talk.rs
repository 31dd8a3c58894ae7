//! A handshake's side of a connection: fixed lengths, a deadline, and an ear for being called off.

use crate::error::Refusal;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// How often a silent connection is looked away from.
const LOOK: Duration = Duration::from_millis(10);
/// What is said in a handshake fits any socket's buffer: who takes longer reads nothing.
const WRITE: Duration = Duration::from_secs(1);

pub type Said<T> = std::result::Result<T, Refusal>;

pub struct Talk<'a> {
    stream: TcpStream,
    until: Instant,
    is_over: Box<dyn Fn() -> bool + 'a>,
}

impl<'a> Talk<'a> {
    pub fn new(stream: TcpStream, until: Instant, is_over: Box<dyn Fn() -> bool + 'a>) -> Said<Talk<'a>> {
        let prepare = || -> std::io::Result<()> {
            // An accepted connection may have its listener's ways.
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(LOOK))?;
            stream.set_write_timeout(Some(WRITE))
        };
        prepare().map_err(|_| Refusal::Gone)?;
        Ok(Talk { stream, until, is_over })
    }

    pub fn say(&mut self, bytes: &[u8]) -> Said<()> {
        self.stream.write_all(bytes).map_err(|_| Refusal::Gone)
    }

    pub fn hear<const N: usize>(&mut self) -> Said<[u8; N]> {
        let mut bytes = [0; N];
        let mut n = 0;
        while n < N {
            match self.stream.read(&mut bytes[n..]) {
                Ok(0) => return Err(Refusal::Gone),
                Ok(more) => n += more,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                    _ => return Err(Refusal::Gone),
                },
            }
            if n < N && (Instant::now() >= self.until || (self.is_over)()) {
                return Err(Refusal::Silence);
            }
        }
        Ok(bytes)
    }

    /// The connection as links have it.
    pub fn stream(&self) -> std::io::Result<TcpStream> {
        self.stream.set_nonblocking(true)?;
        self.stream.try_clone()
    }
}
