//! The cluster's processes: the roles as they ship, each on a host of the simulated network, and started again when
//! they end. Knows no faults.

use crate::model;
use crate::net::{channel, listen};
use crate::rank::{MESH_PORT, Mesh, SimRank};
use crate::record::Record;
use crate::script::{CONTEXT, Host, ROUTERS, ReplicaPlan, Script, VOCAB};
use checkpoint::Sizes;
use cluster::MemoryStore;
use coordinator::{ModelShape, Policy};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use turmoil::Sim;
use types::{Grid, LayerGroups};

/// Whoever watches over processes starts another one so soon.
const RESTART: Duration = Duration::from_millis(300);
/// 16 tokens x 4 layers x K and V x 2 heads x 32 numbers x 2 bytes.
const BLOCK_BYTES: u64 = 16_384;

/// What all processes of a simulation share.
#[derive(Clone)]
pub struct Stage {
    pub script: Arc<Script>,
    pub record: Record,
    pub store: MemoryStore,
}

impl Stage {
    pub fn open(&self, sim: &mut Sim<'_>) {
        for host in self.script.hosts() {
            let stage = self.clone();
            sim.host(host.name(), move || stage.clone().play(host));
        }
    }

    /// A process after the other, for as long as the host is up.
    async fn play(self, host: Host) -> turmoil::Result {
        let name = host.name();
        // A port of the host: the process that comes next finds it bound.
        let mesh = match host {
            Host::Worker(..) => Some(Mesh::open(&name, self.record.clone()).await?),
            Host::Router(_) | Host::Coordinator(_) | Host::Client(_) => None,
        };
        loop {
            let stop = CancellationToken::new();
            self.record.seen().stops.insert(name.clone(), stop.clone());
            self.record.note(&name, "starts");
            let ended = match (host, &mesh) {
                (Host::Router(_), _) => self.router(stop).await,
                (Host::Coordinator(replica), _) => self.coordinator(replica, stop).await,
                (Host::Worker(replica, _), Some(mesh)) => self.worker(&name, replica, mesh, stop).await,
                (Host::Worker(..) | Host::Client(_), _) => Ok(()),
            };
            self.record.note(&name, format!("ended: {ended:?}"));
            if let Err(error) = ended.as_ref().map_err(ToString::to_string) {
                // A device that hung for long is the one reason to end.
                if !error.contains("hangs: it has not come back") {
                    self.record.violation(format!("{name} ended by itself: {error}"));
                }
            }
            sleep(RESTART).await;
        }
    }

    async fn router(&self, stop: CancellationToken) -> turmoil::Result {
        let coordinator = |replica| {
            let name = Host::Coordinator(replica).name();
            router::Coordinator { channel: channel(&name), name }
        };
        let coordinators: Vec<router::Coordinator> = (0..self.script.replicas.len()).map(coordinator).collect();
        let config = router::Config { names: vec!["sim".into()], ..router::Config::default() };
        Ok(router::serve_grpc(config, coordinators, model::text(), listen().await?, stop).await?)
    }

    async fn coordinator(&self, replica: usize, stop: CancellationToken) -> turmoil::Result {
        let name = Host::Coordinator(replica).name();
        let claim = self.store.claim(&format!("replica-{replica}"), &name);
        let config = self.coordinator_config(replica, &self.script.replicas[replica]);
        Ok(coordinator::serve(listen().await?, config, claim, stop).await?)
    }

    async fn worker(&self, name: &str, replica: usize, mesh: &Mesh, stop: CancellationToken) -> turmoil::Result {
        let config = worker::Config {
            host: name.into(),
            pid: 1,
            device: "sim".into(),
            memory_bytes: 1 << 30,
            mesh_address: format!("{name}:{MESH_PORT}"),
            ..worker::Config::default()
        };
        let rank = SimRank { sim: self.script.sim.clone(), mesh: mesh.clone() };
        let channel = channel(&Host::Coordinator(replica).name());
        Ok(worker::serve_in_tasks(channel, Box::new(rank), config, stop).await?)
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
            cache: LayerGroups::full(4),
            sizes: Sizes::default(),
        };
        let policy = Policy {
            grid: Grid { tp: plan.tp, pp: plan.pp, ep: 1 },
            activations: "int8".into(),
            kv_dtype: "f16".into(),
            // Enough for the whole model on each, so that any grid fits.
            kv_memory: Some(self.script.n_blocks * BLOCK_BYTES),
            context: Some(CONTEXT),
            running_max: self.script.running_max,
            slice_max: limits.chunk_tokens_max,
        };
        coordinator::Config {
            replica: format!("replica-{replica}"),
            model: "sim".into(),
            model_path: "/nowhere".into(),
            shape,
            policy,
            prefix_cache: self.script.prefix_cache,
            zero_kv: false,
            salt: [7; 16],
            policy_digest: None,
            mesh_seed: [7; 32],
            limits,
            waits: coordinator::Waits::default(),
        }
    }
}

pub fn routers() -> impl Iterator<Item = Host> {
    (0..ROUTERS).map(Host::Router)
}
