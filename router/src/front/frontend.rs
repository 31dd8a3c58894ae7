//! The parts of the router that all faces share, and their queries besides answers: models, tokens of a text, the
//! cluster's state. Knows no face.

use crate::config::Config;
use crate::front::finished_answer::AnswerQueues;
use crate::front::grammars::Grammars;
use crate::front::parsed_request::{chat_length, length};
use crate::front::reader_watch::ReaderWatch;
use crate::front::stored::ResponseStore;
use crate::front::structure;
use crate::history::History;
use crate::limits::admission::Admission;
use crate::limits::keys::Role;
use crate::limits::tenants::{TenantLimits, Visit};
use crate::refusal::Refusal;
use crate::replicas::models::table::{ModelTable, ResolvedModel, VersionSelector, offers};
use crate::replicas::models::text::{EncodedInput, ModelText, TokenSpans};
use crate::replicas::pool::Replicas;
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use types::{TenantId, Tokens};

/// Longer texts are read, rendered and tokenized on threads of their own, where they hold up no other request.
const BYTES_INLINE_MAX: usize = 64 << 10;
/// About how many bytes of text a token has.
pub const TOKEN_TEXT_BYTES: usize = 4;

/// The parts of the router that all faces share.
pub struct Frontend {
    pub config: Config,
    pub models: ModelTable,
    pub replicas: Replicas,
    pub admission: Admission,
    /// Counts the generations that are still held.
    pub streams: TaskTracker,
    /// Gives up streams that their clients do not read.
    pub reader_watch: Arc<ReaderWatch>,
    /// Permits for work on long texts.
    pub long_texts: Arc<Semaphore>,
    /// The permit to search a record.
    pub record_reads: Arc<Semaphore>,
    /// Grammars that were compiled lately.
    pub grammars: Arc<Grammars>,
    /// Responses that are kept so that later ones can continue them.
    pub responses: ResponseStore,
    /// The queues that receive finished answers.
    pub answers: AnswerQueues,
    /// Permits for the bytes of bodies that are being read.
    pub bodies: Arc<Semaphore>,
    /// When this server began, in seconds since 1970.
    pub since: u64,
    /// Part of every public id: so two routers, or two runs of one, never give the same id.
    pub nonce: u32,
    /// Counts the requests to which their clients gave no id.
    pub n_unnamed: AtomicU64,
    /// Counts what clients keep here beside responses.
    pub n_kept: AtomicU64,
    /// What happened lately, for the pages that people read.
    pub history: History,
}

/// A prompt that is rendered without a replica.
pub struct RenderedPrompt {
    pub ids: Tokens,
    /// Where each token stands in the text, if the client requested that and there is a text.
    pub places: Option<TokenSpans>,
    pub structure: Option<v1::Structure>,
}

impl Frontend {
    pub fn next_request(&self) -> u64 {
        self.n_unnamed.fetch_add(1, Relaxed)
    }

    /// Returns an id that is unique among all things that are kept here.
    pub fn next_public_id(&self) -> String {
        format!("{:08x}{:016x}", self.nonce, self.n_kept.fetch_add(1, Relaxed))
    }

    /// Returns a request's own deadline or the router's, whichever is sooner.
    pub fn deadline(&self, own: Option<Instant>) -> Option<Instant> {
        let ours = self.config.timeouts.request_max.and_then(|max| Instant::now().checked_add(max));
        own.into_iter().chain(ours).min()
    }

    /// Counts a request that is no generation.
    pub fn visit(&self, tenant: TenantId) -> Result<Visit, Refusal> {
        self.count_tenant_visit(&self.config.keys.tenant_limits(tenant))
    }

    /// Counts a request of a tenant, if the tenant's limits let it in.
    pub fn count_tenant_visit(&self, tenant: &Arc<TenantLimits>) -> Result<Visit, Refusal> {
        tenant.enter(self.config.timeouts.retry_after).inspect_err(|refusal| tenant.count_refusal(refusal))
    }

    /// Returns the model that a client names, and the version of it that answers. An empty name means the first.
    pub fn model(&self, name: &str, by: VersionSelector) -> Result<ResolvedModel, Refusal> {
        self.models.model(name, by, &self.replicas)
    }

    /// Returns a model's tokenizer and template, for requests that need no replica.
    pub fn text(&self, name: &str) -> Result<Arc<ModelText>, Refusal> {
        self.models.text(name, &self.replicas)
    }

    /// Whether the owner of a key may see the cluster on the clients' port. If operators have a port of their own, only
    /// a key that names an operator may.
    pub fn shows_cluster_to(&self, role: Role) -> bool {
        let keys = &self.config.keys;
        match self.config.operators.is_some() {
            true => role == Role::Operator && !keys.is_open(),
            false => role == Role::Operator || !keys.name_operators(),
        }
    }

    /// Returns the live cluster for people: the page that begins at the place `from`.
    pub fn topology(&self, from: u64) -> v1::Topology {
        self.replicas.topology(from, offers(self.models.offers(&self.replicas)))
    }

    /// Returns all pages of the live cluster.
    pub fn topologies(&self) -> impl Iterator<Item = v1::Topology> {
        std::iter::successors(Some(self.topology(0)), |page| page.next.map(|from| self.topology(from)))
    }

    /// Returns a prompt's tokens. `add_special` is for plain text; a template writes its special tokens itself. `now`
    /// is the time that the template reads: the same at every router to which a stream is moved.
    pub async fn tokens(
        &self,
        of: &Arc<ModelText>,
        input: Input,
        add_special: bool,
        now: u64,
    ) -> Result<Tokens, Refusal> {
        Ok(self.encoded(of, input, add_special, now).await?.ids)
    }

    /// Returns an input's tokens, as `tokens` does, and for a chat also how its answer is read.
    pub(super) async fn encoded(
        &self,
        of: &Arc<ModelText>,
        input: Input,
        add_special: bool,
        now: u64,
    ) -> Result<EncodedInput, Refusal> {
        let of = of.clone();
        self.off_runtime(length(&input), move || of.encode(input, add_special, now)).await?
    }

    /// Returns a prompt's tokens, and what its answer must be, including what the calls of a chat require.
    pub async fn render_request(
        &self,
        of: &Arc<ModelText>,
        input: Input,
        structure: Option<v1::Structure>,
        wants_places: bool,
        now: u64,
    ) -> Result<RenderedPrompt, Refusal> {
        let (read, n_bytes) = (of.clone(), length(&input));
        let encode = move || match wants_places {
            true => read.encode_with_places(input, now),
            false => read.encode(input, true, now).map(|encoded| (encoded, None)),
        };
        let (EncodedInput { ids, talk }, places) = self.off_runtime(n_bytes, encode).await??;
        let structure = structure::grammar_spec(structure, talk.as_ref())?.as_ref().map(structure::to_structure);
        Ok(RenderedPrompt { ids, places, structure })
    }

    /// Returns the text of the prompt that a chat becomes, as `tokens` would read it.
    pub async fn render_chat(&self, of: &Arc<ModelText>, chat: v1::Chat, now: u64) -> Result<String, Refusal> {
        let of = of.clone();
        self.off_runtime(chat_length(&chat), move || of.render(chat, now).map(|(text, _)| text)).await?
    }

    /// Returns the text of tokens that were checked, without special ones.
    pub async fn detokenize(&self, of: &Arc<ModelText>, ids: Tokens) -> Result<String, Refusal> {
        let of = of.clone();
        self.off_runtime(TOKEN_TEXT_BYTES * ids.len(), move || of.tokenizer.decode(&ids, false)).await
    }

    /// Runs work that costs as much as reading `n_bytes`: inline if they are few, otherwise on one of a few threads, so
    /// that no stream waits for it.
    pub async fn off_runtime<T: Send + 'static>(
        &self,
        n_bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        if n_bytes <= BYTES_INLINE_MAX { Ok(work()) } else { self.on_text_thread(work).await }
    }

    /// Runs work on one of a few threads, so that no stream waits for it.
    pub async fn on_text_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        self.on_limited_thread(&self.long_texts, work).await
    }

    /// Searches a record on a thread that no text needs. One client searches at a time: the record may be gigabytes.
    pub async fn on_record_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        self.on_limited_thread(&self.record_reads, work).await
    }

    async fn on_limited_thread<T: Send + 'static>(
        &self,
        places: &Arc<Semaphore>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let timeouts = &self.config.timeouts;
        let place = timeout(timeouts.body_max, places.clone().acquire_owned()).await;
        let place = place.ok().and_then(Result::ok).ok_or(Refusal::Full { retry_after: timeouts.retry_after })?;
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        done.await.map_err(|_| Refusal::failed("the text could not be processed"))
    }
}

pub fn unix_seconds() -> u64 {
    unix_millis() / 1000
}

pub fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
