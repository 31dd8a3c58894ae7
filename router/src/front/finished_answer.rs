//! Finished answers, for records and audits. Knows no file and no face. Requests never wait for these queues: an answer
//! that finds no room is dropped and counted.

use crate::front::parameters::NumberParameter;
use crate::link::view::ReplicaInfo;
use proto::v1;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use telemetry::metrics;
use tokio::sync::mpsc;
use types::{Request, Token, Tokens};

/// A request with all of its answers, each whole.
pub struct FinishedAnswer {
    /// The reply's id without its page's prefix.
    pub id: String,
    /// When the request was submitted, in milliseconds since 1970.
    pub began: u64,
    pub model: String,
    pub replica: Arc<ReplicaInfo>,
    /// The part that the requests of all its choices share: all but prompt and choice.
    pub base_request: Request,
    /// The client's sampling, with the defaults and the seed filled in.
    pub sampling: v1::Sampling,
    pub n_choices: u32,
    pub first_choice: u32,
    pub prompts: Vec<Tokens>,
    /// Each prompt's choices follow one another.
    pub choices: Vec<FinishedChoice>,
}

pub struct FinishedChoice {
    pub tokens: Tokens,
    pub certificate: v1::Certificate,
}

impl FinishedAnswer {
    /// Returns the request of one of its choices.
    pub fn request(&self, slot: usize) -> Request {
        let prompt = self.prompts.get(slot / self.n_choices.max(1) as usize).cloned().unwrap_or_default();
        let mut request = Request { prompt, ..self.base_request.clone() };
        request.sampling.choice = self.first_choice + (slot % self.n_choices.max(1) as usize) as u32;
        request
    }

    fn n_bytes(&self) -> usize {
        const REST_BYTES: usize = 4 << 10;
        let n_tokens: usize =
            self.prompts.iter().chain(self.choices.iter().map(|choice| &choice.tokens)).map(Vec::len).sum();
        let grammar = self.base_request.grammar.as_ref().map_or(0, types::Grammar::n_bytes);
        REST_BYTES + n_tokens * size_of::<Token>() + self.base_request.sampling.lists_bytes() + grammar
    }
}

/// A queue of finished answers; clones share its room.
#[derive(Clone)]
pub struct AnswerQueue {
    answers: mpsc::Sender<QueuedAnswer>,
    n_bytes: Arc<AtomicUsize>,
    bytes_max: usize,
    dropped: fn(),
}

/// An answer in a queue. Its bytes count until it is dropped.
pub struct QueuedAnswer {
    pub answer: Arc<FinishedAnswer>,
    _bytes: QueuedBytes,
}

struct QueuedBytes {
    all: Arc<AtomicUsize>,
    n: usize,
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.all.fetch_sub(self.n, Relaxed);
    }
}

impl AnswerQueue {
    /// Returns a queue of so many answers and bytes. `dropped` counts what finds no room.
    pub fn new(answers_max: usize, bytes_max: usize, dropped: fn()) -> (AnswerQueue, mpsc::Receiver<QueuedAnswer>) {
        let (answers, receiver) = mpsc::channel(answers_max);
        (AnswerQueue { answers, n_bytes: Arc::default(), bytes_max, dropped }, receiver)
    }

    fn offer(&self, answer: &Arc<FinishedAnswer>) {
        let n = answer.n_bytes();
        let bytes = QueuedBytes { all: self.n_bytes.clone(), n };
        let is_room = self.n_bytes.fetch_add(n, Relaxed) + n <= self.bytes_max;
        let queued = QueuedAnswer { answer: answer.clone(), _bytes: bytes };
        if !is_room || self.answers.try_send(queued).is_err() {
            (self.dropped)();
        }
    }
}

/// The queues that receive finished answers.
#[derive(Default)]
pub struct AnswerQueues {
    pub record: Option<AnswerQueue>,
    pub audit: Option<AuditShare>,
}

/// The queue of the answers that are run again, and which share of all answers that is.
pub struct AuditShare {
    pub queue: AnswerQueue,
    pub share: f64,
    n_seen: AtomicUsize,
}

impl AuditShare {
    pub fn new(queue: AnswerQueue, share: f64) -> AuditShare {
        AuditShare { queue, share, n_seen: AtomicUsize::new(0) }
    }

    /// Whether this answer is one of the share: evenly spread, and exact over many.
    fn sample_next(&self) -> bool {
        let n = self.n_seen.fetch_add(1, Relaxed) as f64;
        ((n + 1.0) * self.share).floor() > (n * self.share).floor()
    }
}

impl AnswerQueues {
    /// Returns the queues that receive the answers to the next request, or None if there are none.
    pub fn subscribers(&self) -> Option<Vec<AnswerQueue>> {
        let audit = self.audit.as_ref().filter(|audit| audit.sample_next()).map(|audit| &audit.queue);
        let queues: Vec<AnswerQueue> = self.record.iter().chain(audit).cloned().collect();
        (!queues.is_empty()).then_some(queues)
    }
}

/// A request's sampling, and the queues that receive the answer when it is over.
pub struct AnswerSubscription {
    pub sampling: Box<v1::Sampling>,
    queues: Vec<AnswerQueue>,
    n_slots: usize,
    tokens_max: Option<u32>,
    began: u64,
}

impl AnswerSubscription {
    pub fn new(sampling: Box<v1::Sampling>, queues: Vec<AnswerQueue>) -> AnswerSubscription {
        AnswerSubscription { sampling, queues, n_slots: 0, tokens_max: None, began: 0 }
    }

    /// Adds the requests that are submitted at this time.
    pub fn for_requests(self, requests: &[Request], began: u64) -> AnswerSubscription {
        let tokens_max = requests.iter().map(|request| request.sampling.tokens_max).max();
        AnswerSubscription { n_slots: requests.len(), tokens_max, began, ..self }
    }

    pub fn into_keeper(
        self,
        base_request: Request,
        started: &v1::Started,
        replica: &Arc<ReplicaInfo>,
        numbers: Range<u32>,
        certified: bool,
    ) -> AnswerKeeper {
        let sampling = self.resolved_sampling(&base_request);
        let answer = FinishedAnswer {
            id: started.id.clone(),
            began: self.began,
            model: started.model.clone(),
            replica: replica.clone(),
            base_request,
            sampling,
            n_choices: numbers.len() as u32,
            first_choice: numbers.start,
            prompts: Vec::new(),
            choices: Vec::new(),
        };
        let ended = std::iter::repeat_with(|| None).take(self.n_slots).collect();
        AnswerKeeper { answer, ended, queues: self.queues, certified }
    }

    /// Returns the client's sampling with every default filled in. Logprobs are left out: they change no token.
    fn resolved_sampling(&self, base_request: &Request) -> v1::Sampling {
        let sampling = &base_request.sampling;
        let mut resolved = v1::Sampling {
            penalty_window: Some(sampling.penalties.window),
            defaults: v1::sampling::Defaults::Unspecified.into(),
            seed: Some(sampling.seed),
            max_tokens: self.tokens_max,
            logprobs: None,
            prompt_logprobs: None,
            ..(*self.sampling).clone()
        };
        for (parameter, _) in NumberParameter::with_recommendations() {
            (parameter.request)(&mut resolved, (parameter.get)(sampling));
        }
        resolved
    }
}

/// Collects the answers to one request as they end.
pub struct AnswerKeeper {
    answer: FinishedAnswer,
    ended: Vec<Option<FinishedChoice>>,
    queues: Vec<AnswerQueue>,
    /// Whether the client requested certificates.
    certified: bool,
}

impl AnswerKeeper {
    /// Stores the tokens of a choice that has ended. Returns true once all choices have ended.
    pub fn finish_choice(&mut self, slot: u32, finished: &mut v1::Finished, tokens: Tokens) -> bool {
        let certificate = match self.certified {
            true => finished.certificate.clone(),
            false => finished.certificate.take(),
        };
        if let (Some(place), Some(certificate)) = (self.ended.get_mut(slot as usize), certificate) {
            *place = Some(FinishedChoice { tokens, certificate });
        }
        self.ended.iter().all(Option::is_some)
    }

    /// Hands the whole answer to the queues.
    pub fn deliver(self: Box<Self>, prompts: Vec<Tokens>) {
        let AnswerKeeper { mut answer, ended, queues, .. } = *self;
        answer.prompts = prompts;
        answer.choices = ended.into_iter().flatten().collect();
        let answer = Arc::new(answer);
        queues.iter().for_each(|queue| queue.offer(&answer));
    }
}

/// Counts an answer that found no room in a record's queue.
pub fn record_dropped() {
    metrics::records("dropped", 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::PolicyDigest;

    fn answer(n_tokens: usize) -> Arc<FinishedAnswer> {
        Arc::new(FinishedAnswer {
            id: String::new(),
            began: 0,
            model: String::new(),
            replica: Arc::new(ReplicaInfo::for_test("m", PolicyDigest::default())),
            base_request: Request::default(),
            sampling: v1::Sampling::default(),
            n_choices: 2,
            first_choice: 3,
            prompts: vec![vec![1; n_tokens], vec![2]],
            choices: Vec::new(),
        })
    }

    #[test]
    fn a_queue_has_room_for_so_many_answers_and_bytes() {
        let one = answer(1000).n_bytes();
        let (queue, mut receiver) = AnswerQueue::new(3, 2 * one, || ());
        (0..5).for_each(|_| queue.offer(&answer(1000)));
        let n_received =
            |receiver: &mut mpsc::Receiver<QueuedAnswer>| std::iter::from_fn(|| receiver.try_recv().ok()).count();
        assert_eq!((n_received(&mut receiver), queue.n_bytes.load(Relaxed)), (2, 0));
        (0..5).for_each(|_| queue.offer(&answer(1)));
        assert_eq!((n_received(&mut receiver), queue.n_bytes.load(Relaxed)), (3, 0));
    }

    #[test]
    fn a_share_is_exact_and_spread() {
        let of = |share: f64, n: usize| {
            let audit = AuditShare::new(AnswerQueue::new(1, 1, || ()).0, share);
            (0..n).filter(|_| audit.sample_next()).count()
        };
        assert_eq!((of(1.0, 100), of(0.25, 100), of(0.01, 1000), of(0.01, 99)), (100, 25, 10, 0));
    }

    #[test]
    fn each_slot_has_its_prompt_and_choice() {
        let answer = answer(1);
        let of = |slot| (answer.request(slot).prompt, answer.request(slot).sampling.choice);
        assert_eq!([0, 1, 2, 3].map(of), [(vec![1], 3), (vec![1], 4), (vec![2], 3), (vec![2], 4)]);
    }
}
