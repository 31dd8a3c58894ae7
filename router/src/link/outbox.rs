//! The frames for a coordinator that its transport has not taken yet. Knows no requests besides their ids.

use crate::link::event::LinkEvent;
use proto::cluster as wire;
use proto::cluster::router_frame::Frame;
use std::collections::VecDeque;
use tokio::sync::mpsc;
use tonic::Status;
use types::RequestId;

/// Frames that the transport has not taken yet. At this limit, no new request is taken.
const FRAMES_UNSENT_MAX: usize = 256;

#[derive(Default)]
pub(super) struct Outbox {
    /// None while there is no stream.
    transport: Option<mpsc::Sender<wire::RouterFrame>>,
    frames: VecDeque<Frame>,
}

impl Outbox {
    pub fn open(&mut self, transport: mpsc::Sender<wire::RouterFrame>) {
        self.transport = Some(transport);
    }

    /// Drops the frames of a stream that is lost.
    pub fn close(&mut self) {
        self.transport = None;
        self.frames.clear();
    }

    pub fn has_room(&self) -> bool {
        self.frames.len() < FRAMES_UNSENT_MAX
    }

    pub fn push(&mut self, frame: Frame) {
        self.frames.push_back(frame);
    }

    /// Cancels a request at the replica.
    pub fn cancel(&mut self, RequestId(id): RequestId, stopped: bool) {
        let is_its_submit = |frame: &Frame| match frame {
            Frame::Submit(request) => request.id == id,
            Frame::Adopt(adopt) => adopt.request.as_ref().is_some_and(|of| of.id == id),
            _ => false,
        };
        match self.frames.iter().position(is_its_submit) {
            // The request was not sent yet: neither frame is needed.
            Some(unsent) => drop(self.frames.remove(unsent)),
            None => self.push(Frame::Cancel(wire::Cancel { id, stopped })),
        }
    }

    /// Passes the first frame to the transport when that has room. None if there is no frame or no transport.
    pub async fn send_first(&mut self) -> Option<LinkEvent> {
        let transport = self.transport.as_ref().filter(|_| !self.frames.is_empty())?;
        let Ok(permit) = transport.reserve().await else {
            return Some(LinkEvent::Lost(Status::unavailable("the coordinator closed the stream")));
        };
        permit.send(up(self.frames.pop_front()?));
        Some(LinkEvent::Sent)
    }

    #[cfg(test)]
    pub fn take(&mut self) -> Vec<Frame> {
        self.frames.drain(..).collect()
    }
}

pub(super) fn up(frame: Frame) -> wire::RouterFrame {
    wire::RouterFrame { frame: Some(frame) }
}
