//! The cluster's processes: the roles as they ship, each on a host of the simulated network, and started again when
//! they end. Has no knowledge of faults.

use crate::model;
use crate::net::{channel, channel_to_last, listen};
use crate::rank::{MESH_PORT, Mesh, SimRank};
use crate::record::Record;
use crate::registry::Registry;
use crate::script::{CONTEXT, Host, ROUTERS, ReplicaPlan, Script, VOCAB, replica_name};
use checkpoint::ModelSizes;
use cluster::{Store, follow_last_claim};
use coordinator::{ModelShape, PlacementPolicy};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use turmoil::Sim;
use types::{Activations, Grid, KvDtype, KvLayout, LayerGroups};

/// Time until a supervisor starts the next process.
const RESTART: Duration = Duration::from_millis(300);
/// Interval between checks whether there are two coordinators.
const LOOK: Duration = Duration::from_millis(50);
/// 16 tokens x 4 layers x K and V x 2 heads x 32 numbers x 2 bytes.
const BLOCK_BYTES: u64 = 16_384;

/// The state that all processes of a simulation share.
#[derive(Clone)]
pub struct Stage {
    pub script: Arc<Script>,
    pub record: Record,
    pub registry: Registry,
}

impl Stage {
    pub fn open(&self, sim: &mut Sim<'_>) {
        for host in self.script.hosts() {
            let stage = self.clone();
            sim.host(host.name(), move || stage.clone().play(host));
        }
    }

    /// Runs one process after another, for as long as the host is up.
    async fn play(self, host: Host) -> turmoil::Result {
        let name = host.name();
        // This port belongs to the host, so the next process finds it bound.
        let mesh = match host {
            Host::Worker(..) => Some(Mesh::open(&name, self.record.clone()).await?),
            Host::Router(_) | Host::Coordinator(_) | Host::Rival(_) | Host::Client(_) => None,
        };
        loop {
            if let Host::Rival(replica) = host {
                self.until_disputed(replica, true).await;
            }
            let stop = CancellationToken::new();
            self.record.seen().stops.insert(name.clone(), stop.clone());
            *self.record.seen().starts.entry(name.clone()).or_default() += 1;
            self.record.note(&name, "starts");
            let ended = match (host, &mesh) {
                (Host::Router(_), _) => self.router(host, &stop).await,
                (Host::Coordinator(replica) | Host::Rival(replica), _) => self.coordinator(host, replica, &stop).await,
                (Host::Worker(replica, _), Some(mesh)) => self.worker(host, replica, mesh, &stop).await,
                (Host::Worker(..) | Host::Client(_), _) => Ok(()),
            };
            self.record.note(&name, format!("ended: {ended:?}"));
            // No other process may look for it before it is gone.
            stop.cancel();
            if let Err(error) = ended.as_ref().map_err(ToString::to_string) {
                self.judge_end(host, &error).await;
            }
            sleep(RESTART).await;
        }
    }

    /// A process may end because its device hung for long, or because another process has taken its claim. It comes
    /// back when the other one is gone.
    async fn judge_end(&self, host: Host, error: &str) {
        match host {
            Host::Worker(..) if error.contains("hangs: it has been busy") => {}
            Host::Coordinator(replica) if error.contains("claim lost") => self.until_disputed(replica, false).await,
            Host::Rival(_) if error.contains("claim lost") => {}
            _ => self.record.violation(format!("{} ended by itself: {error}", host.name())),
        }
    }

    async fn until_disputed(&self, replica: usize, is_disputed: bool) {
        while self.record.seen().rivals.contains(&replica) != is_disputed {
            sleep(LOOK).await;
        }
    }

    async fn router(&self, host: Host, stop: &CancellationToken) -> turmoil::Result {
        let store = Store::Memory(self.registry.view(host, stop));
        let replicas = router::Membership::Followed { store, dial: Box::new(|address| Ok(channel(address))) };
        let mut config = router::Config { names: vec!["sim".into()], ..router::Config::default() };
        if let Some(millis) = self.script.failover_millis {
            config.timeouts.replica_absence_max = Duration::from_millis(millis);
        }
        Ok(faces::serve_grpc(config, replicas, model::text(), listen().await?, stop.clone()).await?)
    }

    async fn coordinator(&self, host: Host, replica: usize, stop: &CancellationToken) -> turmoil::Result {
        let view = self.registry.view(host, stop);
        let incoming = listen().await?;
        let claim = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            claim = self.registry.claim(host, replica, &view) => claim,
        };
        let config = self.coordinator_config(replica, &self.script.replicas[replica]);
        Ok(coordinator::serve(incoming, config, claim, stop.clone()).await?)
    }

    async fn worker(&self, host: Host, replica: usize, mesh: &Mesh, stop: &CancellationToken) -> turmoil::Result {
        let name = host.name();
        let config = worker::Config {
            host: name.clone(),
            pid: 1,
            device: "sim".into(),
            memory_bytes: 1 << 30,
            mesh_address: format!("{name}:{MESH_PORT}"),
            ..worker::Config::default()
        };
        let rank = SimRank { sim: self.script.sim.clone(), mesh: mesh.clone() };
        let view = self.registry.view(host, stop);
        let found = stop.run_until_cancelled(follow_last_claim(view.watch(), replica_name(replica))).await;
        let Some(found) = found else { return Ok(()) };
        let channel = channel_to_last(found);
        Ok(worker::serve_in_tasks(channel, Box::new(rank), config, stop.clone()).await?)
    }

    fn coordinator_config(&self, replica: usize, plan: &ReplicaPlan) -> coordinator::Config {
        let limits = coordinator::Limits::default();
        let shape = ModelShape {
            n_layers: 4,
            hidden: 1,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 32,
            inner: 1,
            vocab: VOCAB,
            context: CONTEXT,
            experts: None,
            states: None,
            cache: LayerGroups::alike(4, KvLayout::heads(2, 32)),
            sizes: ModelSizes::default(),
            joined: 0..0,
            draft: 0,
        };
        let policy = PlacementPolicy {
            grid: Grid { tp: plan.tp, pp: plan.pp },
            activations: Activations::Int8,
            kv_dtype: KvDtype::F16,
            // Enough for the whole model on each rank, so that any grid fits.
            kv_memory: Some(self.script.n_blocks * BLOCK_BYTES),
            memory_permille: None,
            state_cache: None,
            context: self.script.is_context_set.then_some(CONTEXT),
            running_max: self.script.running_max,
            slice_max: limits.chunk_tokens_max,
        };
        coordinator::Config {
            replica: replica_name(replica),
            model: "sim".into(),
            model_path: "/nowhere".into(),
            shape,
            policy,
            prefix_cache: self.script.prefix_cache,
            zero_kv: false,
            salt: [7; 16],
            policy_digest: None,
            mesh_seed: [7; 32],
            speaks: proto::ProtocolRange::default(),
            limits,
            waits: coordinator::Timings::default(),
        }
    }
}

pub fn routers() -> impl Iterator<Item = Host> {
    (0..ROUTERS).map(Host::Router)
}
