//! What the router counts and times. Knows no request's content and no client's name.

use crate::http::HttpError;
use crate::refusal::Refusal;
use std::time::Instant;
use telemetry::metrics;

/// Which face a request came through.
#[derive(Clone, Copy, Debug)]
pub enum Face {
    Http,
    Grpc,
}

impl Face {
    fn label(self) -> &'static str {
        match self {
            Face::Http => "http",
            Face::Grpc => "grpc",
        }
    }
}

/// One request from its arrival to its end.
#[derive(Debug)]
pub struct Clock {
    face: Face,
    arrived: Instant,
    last_token: Option<Instant>,
    ended: bool,
}

impl Clock {
    pub fn start(face: Face) -> Clock {
        Clock { face, arrived: Instant::now(), last_token: None, ended: false }
    }

    pub fn tokens(&mut self, n_tokens: usize) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => metrics::first_token(now - self.arrived),
            Some(last) => metrics::between_tokens((now - last) / n_tokens.max(1) as u32),
        }
    }

    pub fn finished(&mut self, reason: &'static str) {
        self.end(reason);
    }

    pub fn refused(&mut self, refusal: &Refusal) {
        self.end(refusal.label());
    }

    /// Counts what a face refuses before it is a request.
    pub fn counted<T>(&mut self, read: Result<T, HttpError>) -> Result<T, HttpError> {
        read.inspect_err(|error| self.end(error.label()))
    }

    fn end(&mut self, outcome: &'static str) {
        if !std::mem::replace(&mut self.ended, true) {
            metrics::request(self.face.label(), outcome, self.arrived.elapsed());
        }
    }
}

impl Drop for Clock {
    /// Neither finished nor refused: the client left.
    fn drop(&mut self) {
        self.end("cancelled");
    }
}
