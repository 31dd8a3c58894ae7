//! Compressed bodies. Has no knowledge of pages.

use crate::http::error::HttpError;
use flate2::read::MultiGzDecoder;
use http::StatusCode;
use std::io::Read;

/// The compression of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyEncoding {
    Plain,
    Gzip,
}

impl BodyEncoding {
    /// Reads a `content-encoding`. None if this server does not support it.
    pub fn parse(encoding: &str) -> Option<BodyEncoding> {
        match encoding.trim() {
            "" | "identity" => Some(BodyEncoding::Plain),
            "gzip" | "x-gzip" => Some(BodyEncoding::Gzip),
            _ => None,
        }
    }
}

/// Decompresses a gzip body to at most `bytes_max` bytes: a small body may expand to a very large one.
pub fn decompress_gzip(packed: &[u8], bytes_max: usize) -> Result<Vec<u8>, HttpError> {
    let mut bytes = Vec::new();
    let read = MultiGzDecoder::new(packed).take(bytes_max as u64 + 1).read_to_end(&mut bytes);
    let broken = |error| HttpError::bad_request(StatusCode::BAD_REQUEST, format!("the body is invalid gzip: {error}"));
    read.map_err(broken)?;
    if bytes.len() > bytes_max { Err(HttpError::too_large(bytes_max)) } else { Ok(bytes) }
}
