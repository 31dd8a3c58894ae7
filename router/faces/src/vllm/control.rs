//! `vllm.Control`: the methods that describe the server, and the abort of requests. Has no knowledge of answers.

use crate::doors::call::{status, tenant};
use crate::vllm::running::RunningRequests;
use proto::v1;
use proto::vllm_server as wire;
use proto::vllm_server::control_server::{Control, ControlServer};
use router::front::frontend::Frontend;
use router::replicas::models::table::{ResolvedModel, VersionSelector};
use std::sync::Arc;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};
use types::TenantId;

/// The name that vLLM's server gives its API.
const API_VERSION: &str = "vllm";
/// The version of the crate vllm-proto that vLLM 0.33 has.
const PROTO_VERSION: &str = "0.6.0";

pub fn service(front: Arc<Frontend>, running: RunningRequests) -> ControlServer<impl Control> {
    let body_bytes_max = front.config.limits.body_bytes_max;
    ControlServer::new(VllmControl { front, running }).max_decoding_message_size(body_bytes_max)
}

struct VllmControl {
    front: Arc<Frontend>,
    running: RunningRequests,
}

impl VllmControl {
    fn tenant(&self, metadata: &MetadataMap) -> Result<TenantId, Status> {
        tenant(&self.front, metadata).map_err(status)
    }

    fn model(&self) -> Result<ResolvedModel, Status> {
        self.front.model("", VersionSelector::Weight).map_err(status)
    }
}

#[tonic::async_trait]
impl Control for VllmControl {
    async fn get_server_info(
        &self,
        request: Request<wire::GetServerInfoRequest>,
    ) -> Result<Response<wire::ServerInfo>, Status> {
        self.tenant(request.metadata())?;
        let context = self.model()?.replica.context;
        let replicas: Vec<v1::ReplicaTopology> = self.front.topologies().flat_map(|page| page.replicas).collect();
        Ok(Response::new(wire::ServerInfo {
            engine_version: env!("CARGO_PKG_VERSION").into(),
            api_version: API_VERSION.into(),
            instance_id: format!("{:08x}", self.front.ids.nonce()),
            parallelism: Some(parallelism(&replicas)),
            max_model_len: context,
            kv_block_size: types::BLOCK_TOKENS,
            total_kv_blocks: replicas.iter().map(|one| u64::from(one.blocks_total)).sum(),
            rl_capabilities: Some(wire::RlCapabilities::default()),
            proto_version: PROTO_VERSION.into(),
            effective_attention_block_size: Some(types::BLOCK_TOKENS.into()),
            ..wire::ServerInfo::default()
        }))
    }

    async fn get_model_info(
        &self,
        request: Request<wire::GetModelInfoRequest>,
    ) -> Result<Response<wire::ModelInfo>, Status> {
        self.tenant(request.metadata())?;
        let ResolvedModel { name, replica, .. } = self.model()?;
        let listed = self.front.models.listed(&self.front.replicas);
        let aliases = listed.into_iter().filter(|(alias, model)| model.name == name && *alias != name);
        Ok(Response::new(wire::ModelInfo {
            model_id: replica.model.clone(),
            served_model_aliases: aliases.map(|(alias, _)| alias).collect(),
            served_model_name: name,
            supports_text_input: true,
            supports_token_ids_input: true,
            ..wire::ModelInfo::default()
        }))
    }

    async fn shutdown(
        &self,
        request: Request<wire::ShutdownRequest>,
    ) -> Result<Response<wire::ShutdownResponse>, Status> {
        self.tenant(request.metadata())?;
        Err(Status::failed_precondition("Shutdown: this router does not manage the processes behind it"))
    }

    async fn abort(&self, request: Request<wire::AbortRequest>) -> Result<Response<wire::AbortResponse>, Status> {
        let tenant = self.tenant(request.metadata())?;
        request.into_inner().request_ids.into_iter().for_each(|id| self.running.abort(tenant, id));
        Ok(Response::new(wire::AbortResponse {}))
    }

    async fn list_loras(
        &self,
        request: Request<wire::ListLorasRequest>,
    ) -> Result<Response<wire::ListLorasResponse>, Status> {
        self.tenant(request.metadata())?;
        Err(Status::failed_precondition("ListLoras: LoRA is not supported"))
    }

    async fn get_kv_event_sources(
        &self,
        request: Request<wire::GetKvEventSourcesRequest>,
    ) -> Result<Response<wire::GetKvEventSourcesResponse>, Status> {
        self.tenant(request.metadata())?;
        Ok(Response::new(wire::GetKvEventSourcesResponse::default()))
    }

    async fn is_paused(
        &self,
        request: Request<wire::IsPausedRequest>,
    ) -> Result<Response<wire::IsPausedResponse>, Status> {
        self.tenant(request.metadata())?;
        Ok(Response::new(wire::IsPausedResponse { paused: self.front.admission.is_draining() }))
    }

    async fn is_sleeping(
        &self,
        request: Request<wire::IsSleepingRequest>,
    ) -> Result<Response<wire::IsSleepingResponse>, Status> {
        self.tenant(request.metadata())?;
        Ok(Response::new(wire::IsSleepingResponse { sleeping: false }))
    }
}

fn parallelism(replicas: &[v1::ReplicaTopology]) -> wire::ParallelismInfo {
    let n_replicas = u32::try_from(replicas.len()).unwrap_or(u32::MAX);
    let (tp, pp) = replicas.first().map_or((1, 1), |first| (first.tp, first.pp));
    wire::ParallelismInfo {
        tensor_parallel_size: tp,
        pipeline_parallel_size: pp,
        data_parallel_size: n_replicas,
        data_parallel_rank: 0,
        decode_context_parallel_size: 1,
        world_size: replicas.iter().map(|one| u64::from(one.tp) * u64::from(one.pp)).sum(),
        data_parallel_size_local: n_replicas,
    }
}
