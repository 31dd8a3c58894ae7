//! A worker reports how much of a KV cache is committed only to a coordinator that reads it. For any other one it
//! commits all before the rank is ready.

use super::{Joined, PATIENCE, Scene, assign};
use crate::common;
use proto::cluster::{Assign, KvCommitted, KvTarget, Meet, Ready as IsReady, rank_frame, worker_frame};
use proto::since;
use tokio::time::timeout;
use types::KV_PARTS;
use worker::{Assignment, CancelFlag, Config, KvMemory, Load, LoadError, LoadedModel, ModelLoader, ReadyReport};

/// A hundred MiB, of which the first piece is a third.
const N_BLOCKS: u32 = 25_600;

/// Loads a small model whose cache takes several pieces.
struct Roomy;

impl Load for Roomy {
    fn load(&mut self, _: &Assignment, _: &CancelFlag) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let small = common::assignment("llama-f32-tied");
        let roomy = Assignment { n_blocks: vec![N_BLOCKS; small.n_blocks.len()], kv_bytes: 256 << 20, ..small };
        let (runner, ready) = ModelLoader::new(1).build(&roomy)?;
        Ok((Box::new(runner), ready))
    }
}

impl Joined {
    /// Returns the report in the next heartbeat.
    async fn next_kv_report(&mut self) -> Option<KvCommitted> {
        loop {
            let frame = timeout(PATIENCE, self.inbound.message()).await.unwrap().unwrap().unwrap();
            if let worker_frame::Frame::Heartbeat(beat) = frame.frame.unwrap() {
                return beat.kv;
            }
        }
    }
}

/// Returns the parts that a rank has committed when it is ready.
async fn ready(joined: &mut Joined, protocol: u32) -> Option<u32> {
    ready_as(joined, Assign { protocol, ..assign() }).await.kv_parts
}

async fn ready_as(joined: &mut Joined, assign: Assign) -> IsReady {
    joined.hello().await;
    let meet = Meet { epoch_incarnation: assign.epoch_incarnation, epoch_n: assign.epoch_n };
    joined.send(rank_frame::Frame::Assign(assign)).await;
    joined.loaded().await;
    joined.send(rank_frame::Frame::Meet(meet)).await;
    match joined.receive().await {
        worker_frame::Frame::Ready(ready) => ready,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn kv_parts_are_reported_to_supporting_coordinators() {
    let mut scene = Scene::start_with(Box::new(Roomy)).await;
    let mut joined = scene.joined().await;
    let parts = ready(&mut joined, since::KV_PARTS).await.unwrap();
    assert!(0 < parts && parts < KV_PARTS, "{parts}");
    while joined.next_kv_report().await.unwrap().parts < KV_PARTS {}
    scene.end().await;
}

#[tokio::test]
async fn older_coordinator_receives_no_kv_parts() {
    let mut scene = Scene::start_with(Box::new(Roomy)).await;
    let mut joined = scene.joined().await;
    assert_eq!(ready(&mut joined, since::KV_PARTS - 1).await, None);
    for _ in 0..3 {
        assert!(joined.next_kv_report().await.is_none());
    }
    scene.end().await;
}

/// Returns a worker that commits the targets it receives, on a machine with enough memory.
fn growing() -> Config {
    Config { kv_memory: KvMemory { left: || None, grows: true }, ..Config::default() }
}

#[tokio::test]
async fn growing_cache_has_exactly_its_target() {
    let mut scene = Scene::start_as(Box::new(Roomy), growing()).await;
    let mut joined = scene.joined().await;
    let assign = Assign { protocol: since::KV_PARTS, sends_kv_target: true, ..assign() };
    let Assign { epoch_incarnation, epoch_n, .. } = assign;
    let ready = ready_as(&mut joined, assign).await;
    let first = ready.kv_parts.unwrap();
    assert!(ready.kv_grows && 0 < first && first < KV_PARTS / 16, "{first}");
    for _ in 0..3 {
        assert_eq!(joined.next_kv_report().await.unwrap().parts, first, "nothing more is committed unasked");
    }
    for (n, parts) in (1..).zip([KV_PARTS / 2, KV_PARTS / 8, KV_PARTS, first]) {
        let target = KvTarget { epoch_incarnation, epoch_n, parts, n };
        joined.send(rank_frame::Frame::KvTarget(target)).await;
        let is_there = |kv: &KvCommitted| kv.target == n && kv.parts == parts;
        while !is_there(&joined.next_kv_report().await.unwrap()) {}
    }
    // A target of another epoch is ignored.
    joined
        .send(rank_frame::Frame::KvTarget(KvTarget { epoch_incarnation, epoch_n: epoch_n + 1, parts: 9, n: 9 }))
        .await;
    for _ in 0..3 {
        assert_eq!(joined.next_kv_report().await.unwrap().parts, first);
    }
    scene.end().await;
}

#[tokio::test]
async fn a_coordinator_that_sends_no_targets_has_all_of_a_cache_that_could_grow() {
    let mut scene = Scene::start_as(Box::new(Roomy), growing()).await;
    let mut joined = scene.joined().await;
    let ready = ready_as(&mut joined, Assign { protocol: since::KV_PARTS, ..assign() }).await;
    assert!(!ready.kv_grows);
    while joined.next_kv_report().await.unwrap().parts < KV_PARTS {}
    scene.end().await;
}
