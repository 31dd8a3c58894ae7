//! The lines that frame HTTP/1 requests must end in CRLF. A proxy that treats a bare LF differently from this server
//! would see other requests in the same bytes. Therefore a bare LF is refused in heads, chunk sizes and trailers. Finds
//! where bodies begin and end, and leaves all other checks to the HTTP library.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that the HTTP library refuses in every line, with its own response, and the end of the head, for which it
/// waits.
const REFUSED: &[u8] = b"\0\r\n\r\n";
/// The longest relevant line: a length or an encoding.
const LINE_MAX: usize = 256;
const PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// A connection whose framing lines are checked as they are read. Nothing after a bare LF is read.
pub struct StrictLines<IO> {
    io: IO,
    framing: FramingParser,
    has_ended: bool,
}

impl<IO> StrictLines<IO> {
    pub fn new(io: IO) -> StrictLines<IO> {
        StrictLines { io, framing: FramingParser::default(), has_ended: false }
    }
}

#[derive(Default)]
struct FramingParser {
    at: FramingState,
    /// The beginning of the current line.
    line: Vec<u8>,
    has_cr: bool,
    body: BodyLength,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum FramingState {
    /// Before the first line of a request, where empty lines are skipped.
    #[default]
    Start,
    Head,
    Body(u64),
    ChunkSize,
    /// A chunk with the line end after it.
    Chunk(u64),
    Trailers,
    /// HTTP/2, or bytes that the library refuses by itself.
    Unchecked,
}

#[derive(Clone, Copy, Default)]
enum BodyLength {
    #[default]
    None,
    Known(u64),
    Chunked,
}

impl FramingParser {
    /// Checks the next bytes, and returns the place of the first bare LF.
    fn find_bare_lf(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut n_read = 0;
        while n_read < bytes.len() {
            n_read += match &mut self.at {
                FramingState::Unchecked => return None,
                FramingState::Body(left) | FramingState::Chunk(left) => {
                    let n = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len() - n_read);
                    *left -= n as u64;
                    n
                }
                FramingState::Start | FramingState::Head | FramingState::ChunkSize | FramingState::Trailers => {
                    if !self.accept_byte(bytes[n_read]) {
                        return Some(n_read);
                    }
                    1
                }
            };
            match self.at {
                FramingState::Body(0) => self.at = FramingState::Start,
                FramingState::Chunk(0) => self.at = FramingState::ChunkSize,
                _ => {}
            }
        }
        None
    }

    /// Takes a byte of a line, unless it is a bare LF.
    fn accept_byte(&mut self, byte: u8) -> bool {
        let follows_cr = std::mem::replace(&mut self.has_cr, byte == b'\r');
        match byte {
            b'\n' if follows_cr => {
                let line = std::mem::take(&mut self.line);
                self.end_line(&line);
            }
            b'\n' => return false,
            b'\r' => {}
            other if self.line.len() < LINE_MAX => self.line.push(other),
            _ => {}
        }
        true
    }

    fn end_line(&mut self, line: &[u8]) {
        self.at = match self.at {
            FramingState::Start if line.starts_with(PREFACE) => FramingState::Unchecked,
            FramingState::Start if line.is_empty() => FramingState::Start,
            FramingState::Start => FramingState::Head,
            FramingState::Head if line.is_empty() => match std::mem::take(&mut self.body) {
                BodyLength::None => FramingState::Start,
                BodyLength::Known(n) => FramingState::Body(n),
                BodyLength::Chunked => FramingState::ChunkSize,
            },
            FramingState::Head => {
                self.body = body_length(line, self.body);
                FramingState::Head
            }
            FramingState::ChunkSize => match chunk_size(line) {
                Some(0) => FramingState::Trailers,
                // Includes the end of the line after the chunk.
                Some(n) => FramingState::Chunk(n.saturating_add(2)),
                None => FramingState::Unchecked,
            },
            FramingState::Trailers if line.is_empty() => FramingState::Start,
            other => other,
        };
    }
}

/// Returns the body's length after this header, given the headers before it: an encoding overrides a length.
fn body_length(line: &[u8], before: BodyLength) -> BodyLength {
    let Some((name, value)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once(':')) else {
        return before;
    };
    let value = value.trim().to_ascii_lowercase();
    match (name.to_ascii_lowercase().as_str(), before) {
        ("transfer-encoding", _) if value.ends_with("chunked") => BodyLength::Chunked,
        ("content-length", BodyLength::None | BodyLength::Known(_)) => value.parse().map_or(before, BodyLength::Known),
        _ => before,
    }
}

fn chunk_size(line: &[u8]) -> Option<u64> {
    let size = std::str::from_utf8(line).ok()?.split(';').next()?;
    u64::from_str_radix(size.trim(), 16).ok()
}

impl<IO: AsyncRead + Unpin> AsyncRead for StrictLines<IO> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.has_ended {
            return Poll::Ready(Ok(()));
        }
        let n_before = into.filled().len();
        let read = Pin::new(&mut this.io).poll_read(context, into);
        if let Some(at) = this.framing.find_bare_lf(&into.filled()[n_before..]) {
            into.set_filled(n_before + at);
            into.put_slice(&REFUSED[..REFUSED.len().min(into.remaining())]);
            this.has_ended = true;
        }
        read
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for StrictLines<IO> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the place of the first refused byte, which must not depend on how the bytes are divided.
    fn refused(text: &str) -> Option<usize> {
        let read = |n_piece: usize| {
            let mut framing = FramingParser::default();
            let mut pieces = text.as_bytes().chunks(n_piece).enumerate();
            pieces.find_map(|(i, piece)| Some(i * n_piece + framing.find_bare_lf(piece)?))
        };
        let at = read(1);
        assert!((2..9).chain([text.len()]).all(|n| read(n) == at), "{text:?}");
        at
    }

    #[test]
    fn a_bare_lf_is_refused_wherever_it_frames() {
        let head = "POST / HTTP/1.1\r\nHost: a\r\n";
        let at = |text: &str| text.find('~');
        for text in [
            "GET / HTTP/1.1~Host: a\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a~\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n~",
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n3~abc\r\n0\r\n\r\n"),
            &format!("{head}transfer-encoding: gzip, Chunked\r\n\r\n3\r\na\nb\r\n0\r\nTrailer: b~\r\n"),
            // The request after one with a body.
            &format!("{head}Content-Length: 3\r\n\r\na\nbGET / HTTP/1.1~\r\n"),
            &format!("\r\n{head}\r\n\r\nGET / HTTP/1.1\r\nA: b~\r\n"),
        ] {
            assert_eq!(refused(&text.replace('~', "\n")), at(text), "{text:?}");
            assert_eq!(refused(&text.replace('~', "\r\n")), None, "{text:?}");
        }
    }

    #[test]
    fn bodies_and_http2_are_left_alone() {
        let head = "POST / HTTP/1.1\r\nHost: a\r\n";
        for text in [
            format!("{head}Content-Length: 6\r\n\r\na\nb\n\n\n{head}\r\n"),
            format!(
                "{head}Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\n\n\n\n\n\r\n0\r\n\r\n{head}"
            ),
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\n\n".into(),
        ] {
            assert_eq!(refused(&text), None, "{text:?}");
        }
    }
}
