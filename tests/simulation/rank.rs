//! The ranks' runner: the worker's own sim, which checks every page that a step reads, within a mesh. No rank ends a
//! step before it has received the message of all others that they computed it. Its time is slept, so it is virtual.

use crate::record::Record;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::sleep;
use turmoil::net::UdpSocket;
use types::{Epoch, Rank, Step, StepDone};
use worker::sim::SimModel;
use worker::{Assignment, CancelFlag, Load, LoadError, LoadedModel, ReadyReport, Rest, RunError, Runner};

pub const MESH_PORT: u16 = 7300;
/// Interval between checks whether the assignment has ended, and between messages to the others.
const LOOK: Duration = Duration::from_millis(40);
/// Room for a message between ranks.
const WORD_BYTES: usize = 32;

/// What a process has received from its peers.
#[derive(Clone)]
pub struct Mesh {
    name: String,
    socket: Arc<UdpSocket>,
    ear: Arc<Mutex<Ear>>,
    message_arrived: Arc<tokio::sync::Notify>,
    record: Record,
}

#[derive(Default)]
struct Ear {
    /// The last step that each rank of an epoch has computed; `None` if it has left.
    words: HashMap<(Epoch, Rank), Option<u64>>,
    /// The epochs in which this process has or had a rank; the bool is true if it has left.
    seats: HashMap<Epoch, (Rank, bool)>,
}

#[derive(Clone, Copy)]
struct Word {
    epoch: Epoch,
    rank: Rank,
    /// The last computed step; None if this rank has left the epoch.
    step: Option<u64>,
    /// Whether it waits for the other's message.
    needs_reply: bool,
}

impl Word {
    fn bytes(self) -> [u8; WORD_BYTES] {
        let mut bytes = [0; WORD_BYTES];
        let step = self.step.map_or(0, |step| step + 1);
        let words = [
            self.epoch.incarnation,
            self.epoch.n.into(),
            u64::from(self.rank.0) << 1 | u64::from(self.needs_reply),
            step,
        ];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn of(bytes: &[u8]) -> Word {
        let word = |i: usize| u64::from_le_bytes(bytes[i * 8..][..8].try_into().unwrap());
        let epoch = Epoch { incarnation: word(0), n: word(1) as _ };
        Word { epoch, rank: Rank((word(2) >> 1) as u16), step: word(3).checked_sub(1), needs_reply: word(2) & 1 == 1 }
    }
}

impl Mesh {
    pub async fn open(name: &str, record: Record) -> std::io::Result<Mesh> {
        let socket = Arc::new(UdpSocket::bind(("0.0.0.0", MESH_PORT)).await?);
        let mesh = Mesh { name: name.to_owned(), socket, ear: Arc::default(), message_arrived: Arc::default(), record };
        tokio::spawn(mesh.clone().listen());
        Ok(mesh)
    }

    async fn listen(self) {
        let mut bytes = [0; WORD_BYTES];
        while let Ok((_, from)) = self.socket.recv_from(&mut bytes).await {
            let word = Word::of(&bytes);
            self.receive(word);
            if let Some(answer) = self.answer(word) {
                let _lost = self.socket.try_send_to(&answer.bytes(), from);
            }
        }
    }

    /// Returns the answer to a waiting rank: that this one has left, like a closed connection; or the last step again,
    /// if that message was lost.
    fn answer(&self, query: Word) -> Option<Word> {
        let ear = self.ear();
        let (rank, has_left) = *ear.seats.get(&query.epoch).filter(|_| query.needs_reply)?;
        let last = ear.words.get(&(query.epoch, rank)).copied().flatten();
        (has_left || last.is_some()).then_some(Word {
            rank,
            step: last.filter(|_| !has_left),
            needs_reply: false,
            ..query
        })
    }

    fn receive(&self, word: Word) {
        let mut ear = self.ear();
        let last = ear.words.entry((word.epoch, word.rank)).or_insert(word.step);
        *last = if word.step.is_none() { None } else { last.and_then(|last| Some(last.max(word.step?))) };
        self.message_arrived.notify_waiters();
    }

    fn ear(&self) -> MutexGuard<'_, Ear> {
        self.ear.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a rank that this one still waits for, or an error if one has left.
    fn awaits(&self, epoch: Epoch, n_ranks: u16, step: u64) -> Result<Option<Rank>, RunError> {
        let ear = self.ear();
        for rank in (0..n_ranks).map(Rank) {
            match ear.words.get(&(epoch, rank)) {
                Some(None) => return Err(RunError::Collective(collective::Error::PeerLost { rank })),
                Some(Some(last)) if *last >= step => {}
                _ => return Ok(Some(rank)),
            }
        }
        Ok(None)
    }

    fn is_hung(&self) -> bool {
        self.record.seen().hung.contains(&self.name)
    }
}

pub struct SimRank {
    pub sim: SimModel,
    pub mesh: Mesh,
}

impl Load for SimRank {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        // The sim itself takes no time, because that would be the machine's time.
        let timeless = SimModel { step_micros: 0, token_micros: 0, slice_micros: 0, ..self.sim.clone() };
        let (sim, ready) = { timeless }.load(assignment, cancel)?;
        let (epoch, rank) = (assignment.epoch, assignment.rank);
        self.mesh.record.note(&self.mesh.name, format!("loads rank {} of {epoch}", rank.0));
        self.mesh.record.seen().epochs.insert((epoch.incarnation, epoch.n));
        let place = Place {
            sim,
            times: self.sim.clone(),
            mesh: self.mesh.clone(),
            epoch,
            rank,
            peers: assignment.mesh_addresses.clone(),
        };
        Ok((Box::new(place), ready))
    }
}

struct Place {
    sim: Box<dyn LoadedModel>,
    times: SimModel,
    mesh: Mesh,
    epoch: Epoch,
    rank: Rank,
    peers: Vec<String>,
}

impl LoadedModel for Place {
    fn join_peers(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        let Place { sim, times, mesh, epoch, rank, peers } = *self;
        let sim = sim.join_peers(cancel)?;
        mesh.ear().seats.insert(epoch, (rank, false));
        mesh.record.note(&mesh.name, format!("meets as rank {} of {epoch}", rank.0));
        Ok(Box::new(MeshRunner { sim, times, mesh, epoch, rank, peers, cancel: cancel.clone(), last: None, micros: 0 }))
    }
}

struct MeshRunner {
    sim: Box<dyn Runner>,
    times: SimModel,
    mesh: Mesh,
    epoch: Epoch,
    rank: Rank,
    peers: Vec<String>,
    cancel: CancelFlag,
    last: Option<u64>,
    /// The time of the last step.
    micros: u64,
}

impl Drop for MeshRunner {
    fn drop(&mut self) {
        self.mesh.ear().seats.insert(self.epoch, (self.rank, true));
    }
}

impl Runner for MeshRunner {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        let mesh = &self.mesh;
        if step.epoch != self.epoch {
            mesh.record.violation(format!("{} of {} runs a step of {}", mesh.name, self.epoch, step.epoch));
        }
        if self.last.is_some_and(|last| step.id.0 != last + 1) {
            mesh.record.violation(format!("{} runs step {} behind step {:?}", mesh.name, step.id.0, self.last));
        }
        self.last = Some(step.id.0);
        self.micros = self.times.step_micros + self.times.token_micros * step.n_tokens() as u64;
        if self.rank == Rank(0) {
            mesh.record.note(&mesh.name, format!("step {} of {}: {} slices", step.id.0, step.epoch, step.slices.len()));
        }
        let result = self.sim.run(step, done);
        if let Err(error) = &result {
            // The sim rejects a step that would give another answer.
            mesh.record.violation(format!("{} cannot run step {}: {error}", mesh.name, step.id.0));
        }
        done.micros = self.micros as u32;
        result
    }

    fn remaining_wait(&mut self) -> Option<Rest<'_>> {
        Some(Box::pin(self.compute()))
    }
}

impl MeshRunner {
    async fn compute(&mut self) -> Result<(), RunError> {
        sleep(Duration::from_micros(self.micros)).await;
        while self.mesh.is_hung() {
            sleep(LOOK).await;
        }
        let n_ranks = self.peers.len().max(1) as u16;
        let step = self.last.unwrap_or_default();
        self.mesh.receive(self.word(step, false));
        while self.mesh.awaits(self.epoch, n_ranks, step)?.is_some() {
            if self.cancel.is_cancelled() {
                return Err(RunError::Collective(collective::Error::Aborted));
            }
            self.send_to_peers(self.word(step, true));
            let arrival = self.mesh.message_arrived.clone();
            let _again = tokio::time::timeout(LOOK, arrival.notified()).await;
        }
        self.send_to_peers(self.word(step, false));
        Ok(())
    }

    fn word(&self, step: u64, needs_reply: bool) -> Word {
        Word { epoch: self.epoch, rank: self.rank, step: Some(step), needs_reply }
    }

    fn send_to_peers(&self, word: Word) {
        for (rank, peer) in self.peers.iter().enumerate() {
            if rank != usize::from(self.rank.0) {
                let _lost = self.mesh.socket.try_send_to(&word.bytes(), peer.as_str());
            }
        }
    }
}
