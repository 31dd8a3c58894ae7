//! The parts of the router that all faces share, and their queries besides answers: models, limits of a tenant, the
//! cluster's state. Knows no face.

use crate::config::Config;
use crate::front::finished_answer::AnswerQueues;
use crate::front::grammars::Grammars;
use crate::front::public_ids::PublicIds;
use crate::front::reader_watch::ReaderWatch;
use crate::front::stored::ResponseStore;
use crate::front::text_work::TextWork;
use crate::front::threads::LimitedThreads;
use crate::history::History;
use crate::limits::admission::Admission;
use crate::limits::keys::Role;
use crate::limits::tenants::{TenantLimits, Visit};
use crate::refusal::Refusal;
use crate::replicas::models::table::{ModelTable, ResolvedModel, VersionSelector, offers};
use crate::replicas::models::text::ModelText;
use crate::replicas::pool::Replicas;
use proto::v1;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use types::TenantId;

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
    /// Works on texts.
    pub texts: TextWork,
    /// Searches a record, on a thread that no text needs. One client searches at a time: the record may be gigabytes.
    pub record_threads: LimitedThreads,
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
    pub ids: PublicIds,
    /// What happened lately, for the pages that people read.
    pub history: History,
}

impl Frontend {
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
}

pub fn unix_seconds() -> u64 {
    unix_millis() / 1000
}

pub fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
