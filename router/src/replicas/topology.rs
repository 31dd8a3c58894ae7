//! The live cluster for people: the same facts for gRPC and, as JSON, for `/cluster`. Large clusters have several
//! pages. Knows nothing of requests.

use crate::link::view::{PieceDifference, ReplicaView};
use cluster::StoreHealth;
use proto::cluster as wire;
use proto::v1;
use proto::v1::replica_topology::{StepCost, StepSpeed};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};
use types::PolicyDigest;

/// The limit of a page: it ends with the replica that reaches this many ranks, or this many replicas. So it stays below
/// the four megabytes that gRPC clients read.
const RANKS_MAX: usize = 4096;
const REPLICAS_MAX: usize = 1024;

/// The store that lists the replicas.
pub struct StoreView {
    pub kind: &'static str,
    pub health: StoreHealth,
}

/// Returns one page of all replicas that this router knows of, attached or not: those from the place `from` on. The
/// next page begins where this one ends.
pub fn topology(
    views: &[ReplicaView],
    from: u64,
    store: Option<StoreView>,
    models: Vec<v1::ModelTopology>,
) -> v1::Topology {
    let mut left = views.iter().skip_while(|view| (view.place as u64) < from).peekable();
    let (mut replicas, mut n_ranks) = (Vec::new(), 0);
    while replicas.len() < REPLICAS_MAX && n_ranks < RANKS_MAX {
        let Some(view) = left.next() else { break };
        let replica = replica(view);
        n_ranks += replica.ranks.len();
        replicas.push(replica);
    }
    let next = left.peek().map(|view| view.place as u64);
    v1::Topology { replicas, store: store.map(of_store), models, next }
}

fn of_store(StoreView { kind, health }: StoreView) -> v1::StoreTopology {
    v1::StoreTopology {
        kind: kind.into(),
        connected: health.is_connected(),
        since_unix_seconds: unix_seconds(health.since),
        reason: health.away.unwrap_or_default(),
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn replica(view: &ReplicaView) -> v1::ReplicaTopology {
    let Some(mut state) = view.state.clone() else {
        let phase = if view.replica.is_some() { "ready" } else { "absent" };
        return with_name(view, v1::ReplicaTopology { phase: phase.into(), ..v1::ReplicaTopology::default() });
    };
    let actual = state.actual.unwrap_or_default();
    let measured = |per_s: f64| (per_s > 0.0).then_some(per_s);
    let used = f64::from(state.blocks_used) / f64::from(state.blocks_total.max(1));
    let replica = v1::ReplicaTopology {
        phase: phase(view.phase()).into(),
        epoch: format!("{}.{}", state.epoch_incarnation, state.epoch_n),
        tp: state.tp,
        pp: state.pp,
        n_waiting: state.n_waiting,
        n_running: state.n_running,
        blocks_used: state.blocks_used,
        blocks_total: state.blocks_total,
        // A build that does not report this has all of them from the start.
        blocks_committed: match state.blocks_committed {
            0 => state.blocks_total,
            committed => committed,
        },
        ranks: state.ranks.iter().map(|state| rank(state, used)).collect(),
        n_spares: state.n_spares,
        predicted_tokens_per_s_low: state.prediction.as_ref().map(|prediction| prediction.tokens_per_s_low),
        predicted_tokens_per_s_high: state.prediction.as_ref().map(|prediction| prediction.tokens_per_s_high),
        bottleneck: state.prediction.take().map(|prediction| prediction.bottleneck).unwrap_or_default(),
        alone_tokens_per_s: measured(actual.alone_tokens_per_s),
        busy_tokens_per_s: measured(actual.busy_tokens_per_s),
        tokens: actual.tokens,
        steps: actual.steps,
        starved: actual.starved,
        steps_early: actual.steps_early,
        drafts: actual.drafts,
        drafts_accepted: actual.drafts_accepted,
        backlog_tokens: state.backlog_tokens,
        requested_grid: target_grid(&state),
        apart: state.apart.iter().map(apart).collect(),
        lost: std::mem::take(&mut state.lost).into_iter().map(lost).collect(),
        unplaced: state.unplaced.take().map(unplaced),
        shortened: state.shortened.take().map(shortened),
        step_speed: state.step_speed.take().map(|speed| step_speed(*speed)),
        ..v1::ReplicaTopology::default()
    };
    with_name(view, replica)
}

fn step_speed(speed: wire::StepSpeed) -> StepSpeed {
    let cost = |cost: wire::StepCost| StepCost { rows: cost.rows, ms: cost.micros as f64 / 1e3 };
    StepSpeed {
        costs: speed.costs.into_iter().map(cost).collect(),
        predicted: speed.predicted,
        as_predicted: speed.as_predicted,
        cut_by_time: speed.cut_by_time,
        cut_by_tokens: speed.cut_by_tokens,
        cut_by_blocks: speed.cut_by_blocks,
    }
}

/// Returns the intended grid, if another one is in force.
fn target_grid(state: &wire::State) -> Option<v1::replica_topology::RequestedGrid> {
    let (tp, pp) = (state.requested_tp, state.requested_pp);
    (tp > 0 && (tp, pp) != (state.tp, state.pp)).then_some(v1::replica_topology::RequestedGrid { tp, pp })
}

fn unplaced(wire::Unplaced { why, micros }: wire::Unplaced) -> v1::replica_topology::Unplaced {
    v1::replica_topology::Unplaced { why, seconds: micros / 1_000_000 }
}

fn shortened(wire::Shortened { requested, has, why }: wire::Shortened) -> v1::replica_topology::Shortened {
    v1::replica_topology::Shortened { requested, has, why }
}

fn apart(apart: &wire::Apart) -> v1::ApartTopology {
    v1::ApartTopology {
        host: apart.host.clone(),
        address: apart.address.clone(),
        other_host: apart.other_host.clone(),
        other_address: apart.other_address.clone(),
        why: apart.why.clone(),
        seconds: apart.micros.div_ceil(1_000_000),
    }
}

fn lost(lost: wire::LostRank) -> v1::LostRankTopology {
    let seconds = |micros: u64| micros as f64 / 1e6;
    v1::LostRankTopology {
        rank: lost.rank,
        host: lost.host,
        pid: lost.pid,
        cause: lost.cause,
        why: lost.why,
        seconds_ago: seconds(lost.micros_ago),
        pause_seconds: lost.pause_micros.map(seconds),
        tokens_replayed: lost.tokens_replayed,
        successor_host: lost.successor_host,
        successor_pid: lost.successor_pid,
    }
}

fn differs(PieceDifference { replica, weight, piece }: PieceDifference) -> v1::replica_topology::Differs {
    v1::replica_topology::Differs { replica, weight, piece }
}

fn with_name(view: &ReplicaView, mut replica: v1::ReplicaTopology) -> v1::ReplicaTopology {
    replica.replica.clone_from(&view.name);
    replica.suspected = view.is_suspected;
    replica.protocol = view.protocol();
    replica.shunned = view.shunned.unwrap_or_default().into();
    replica.differs = view.differs.clone().map(differs);
    if let Some(known) = view.replica.as_deref() {
        replica.model.clone_from(&known.model);
        replica.context = known.context;
        replica.policy_digest = known.digest.0.to_vec();
    }
    replica
}

fn rank(state: &wire::RankState, kv_used: f64) -> v1::RankTopology {
    let times = state.times.unwrap_or_default();
    let part = |micros: u64, of: u64| if of == 0 { 0.0 } else { micros as f64 / of as f64 };
    // Without a request no rank waits for anything: such time is no part of a step.
    let idle = times.in_flight_micros.saturating_sub(times.compute_micros + times.wait_micros);
    v1::RankTopology {
        rank: state.rank,
        stage: state.stage,
        tp: state.tp,
        pid: state.pid,
        state: state.state.clone(),
        host: state.host.clone(),
        device: state.device.clone(),
        threads: state.threads,
        layer_start: state.layer_start,
        layer_end: state.layer_end,
        head_start: state.head_start,
        head_end: state.head_end,
        kv_heads: state.kv_heads,
        memory_bytes: state.memory_bytes,
        weight_bytes: state.weight_bytes,
        kv_bytes: state.kv_bytes,
        kv_tokens: state.kv_tokens,
        kv_used,
        steps: times.steps,
        compute_share: part(times.compute_micros, times.wall_micros),
        wait_share: part(times.wait_micros, times.wall_micros),
        idle_share: part(times.idle_micros, times.wall_micros),
        step_compute_micros: part(times.compute_micros, times.steps),
        step_wait_micros: part(times.wait_micros, times.steps),
        step_idle_micros: part(idle, times.steps),
        bubble_share: part(times.in_flight_micros.saturating_sub(times.compute_micros), times.in_flight_micros),
    }
}

fn phase(phase: wire::state::Phase) -> &'static str {
    match phase {
        wire::state::Phase::Ready => "ready",
        wire::state::Phase::Recovering => "recovering",
        wire::state::Phase::Draining => "draining",
        wire::state::Phase::Loading | wire::state::Phase::Unspecified => "loading",
    }
}

pub fn json(topology: &v1::Topology) -> Value {
    let replicas: Vec<Value> = topology.replicas.iter().map(replica_json).collect();
    let models: Vec<Value> = topology.models.iter().map(model_json).collect();
    let store = topology.store.as_ref().map(store_json);
    json!({ "store": store, "models": models, "replicas": replicas, "next": topology.next })
}

fn model_json(model: &v1::ModelTopology) -> Value {
    let share = |share: &v1::model_topology::Share| {
        let digest: Option<[u8; 32]> = share.policy_digest.clone().try_into().ok();
        json!({
            "model": share.model,
            "policy_digest": digest.map(|digest| PolicyDigest(digest).to_string()),
            "weight": share.weight,
            "ready": share.n_ready,
            "replicas": share.n_replicas,
            "like": Some(&share.like).filter(|like| !like.is_empty()),
        })
    };
    json!({ "name": model.name, "versions": model.shares.iter().map(share).collect::<Vec<_>>() })
}

fn store_json(store: &v1::StoreTopology) -> Value {
    json!({
        "kind": store.kind,
        "connected": store.connected,
        "since": store.since_unix_seconds,
        "reason": (!store.reason.is_empty()).then_some(&store.reason),
    })
}

fn replica_json(replica: &v1::ReplicaTopology) -> Value {
    let named = |name: &String| (!name.is_empty()).then(|| name.clone());
    let digest: Option<[u8; 32]> = replica.policy_digest.clone().try_into().ok();
    let predicted = replica.predicted_tokens_per_s_low.zip(replica.predicted_tokens_per_s_high);
    json!({
        "replica": named(&replica.replica),
        "model": named(&replica.model),
        "context": (replica.context > 0).then_some(replica.context),
        "policy_digest": digest.map(|digest| PolicyDigest(digest).to_string()),
        "phase": replica.phase,
        "epoch": named(&replica.epoch),
        "grid": { "tp": replica.tp, "pp": replica.pp },
        "requested_grid": replica.requested_grid.map(|grid| json!({ "tp": grid.tp, "pp": grid.pp })),
        "apart": replica.apart.iter().map(apart_json).collect::<Vec<_>>(),
        "lost": replica.lost.iter().map(lost_json).collect::<Vec<_>>(),
        "unplaced": replica.unplaced.as_ref().map(|of| json!({ "why": of.why, "seconds": of.seconds })),
        "shortened": replica.shortened.as_ref().map(|context| {
            json!({ "requested": context.requested, "has": context.has, "why": context.why })
        }),
        "requests": { "waiting": replica.n_waiting, "running": replica.n_running },
        "backlog_tokens": replica.backlog_tokens,
        "suspected": replica.suspected,
        "shunned": Some(&replica.shunned).filter(|why| !why.is_empty()),
        "differs": replica.differs.as_ref().map(|of| json!({
            "replica": of.replica, "weight": of.weight, "piece": of.piece,
        })),
        "blocks": {
            "used": replica.blocks_used, "committed": replica.blocks_committed, "total": replica.blocks_total,
        },
        "protocol": (replica.protocol > 0).then_some(replica.protocol),
        "tokens_per_s": {
            "predicted": predicted.map(|(low, high)| json!({
                "low": low, "high": high, "bottleneck": replica.bottleneck,
            })),
            "alone": replica.alone_tokens_per_s,
            "busy": replica.busy_tokens_per_s,
        },
        "tokens": replica.tokens,
        "steps": replica.steps,
        "step_speed": replica.step_speed.as_ref().map(step_speed_json),
        "starved": replica.starved,
        "steps_early": replica.steps_early,
        "drafts": { "verified": replica.drafts, "accepted": replica.drafts_accepted },
        "spares": replica.n_spares,
        "ranks": replica.ranks.iter().map(rank_json).collect::<Vec<_>>(),
    })
}

fn step_speed_json(speed: &StepSpeed) -> Value {
    json!({
        "costs": speed.costs.iter().map(|cost| json!({ "rows": cost.rows, "ms": cost.ms })).collect::<Vec<_>>(),
        "predicted": speed.predicted,
        "as_predicted": speed.as_predicted,
        "cuts": { "time": speed.cut_by_time, "tokens": speed.cut_by_tokens, "blocks": speed.cut_by_blocks },
    })
}

fn apart_json(apart: &v1::ApartTopology) -> Value {
    json!({
        "host": apart.host,
        "address": apart.address,
        "other_host": apart.other_host,
        "other_address": apart.other_address,
        "why": apart.why,
        "seconds": apart.seconds,
    })
}

fn lost_json(lost: &v1::LostRankTopology) -> Value {
    let successor = || json!({ "host": lost.successor_host, "pid": lost.successor_pid });
    json!({
        "rank": lost.rank,
        "host": lost.host,
        "pid": lost.pid,
        "cause": lost.cause,
        "why": lost.why,
        "seconds_ago": lost.seconds_ago,
        "pause_seconds": lost.pause_seconds,
        "tokens_replayed": lost.tokens_replayed,
        "successor": (lost.successor_pid > 0).then(successor),
    })
}

fn rank_json(rank: &v1::RankTopology) -> Value {
    json!({
        "rank": rank.rank,
        "stage": rank.stage,
        "tp": rank.tp,
        "pid": rank.pid,
        "state": rank.state,
        "host": rank.host,
        "device": rank.device,
        "threads": rank.threads,
        "layers": [rank.layer_start, rank.layer_end],
        "heads": [rank.head_start, rank.head_end],
        "kv_heads": rank.kv_heads,
        "memory": { "total": rank.memory_bytes, "weights": rank.weight_bytes, "kv": rank.kv_bytes },
        "kv": { "tokens": rank.kv_tokens, "used": rank.kv_used },
        "time": {
            "compute": rank.compute_share, "wait": rank.wait_share, "idle": rank.idle_share,
            "bubble": rank.bubble_share,
        },
        "step_micros": {
            "steps": rank.steps, "compute": rank.step_compute_micros, "wait": rank.step_wait_micros,
            "idle": rank.step_idle_micros,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_reported_as_shares_and_per_step() {
        let times = wire::RankTimes {
            steps: 100,
            wall_micros: 1_000_000,
            compute_micros: 500_000,
            wait_micros: 300_000,
            idle_micros: 200_000,
            in_flight_micros: 1_000_000,
        };
        let ranks =
            vec![wire::RankState { rank: 3, stage: 1, tp: 1, times: Some(times), ..wire::RankState::default() }];
        let prediction =
            wire::Prediction { tokens_per_s_low: 5.0, tokens_per_s_high: 9.0, bottleneck: "compute".into() };
        let state = wire::State {
            blocks_used: 1,
            blocks_total: 4,
            blocks_committed: 3,
            ranks,
            prediction: Some(prediction.into()),
            tp: 2,
            pp: 1,
            requested_tp: 2,
            requested_pp: 2,
            unplaced: Some(wire::Unplaced { why: "too few".into(), micros: 2_999_999 }),
            shortened: Some(wire::Shortened { requested: 9, has: 5, why: "too little".into() }),
            apart: vec![wire::Apart { host: "a".into(), micros: 1_000_001, ..wire::Apart::default() }],
            step_speed: Some(Box::new(wire::StepSpeed {
                costs: vec![wire::StepCost { rows: 8, micros: 5500 }],
                predicted: 7,
                as_predicted: 6,
                cut_by_time: 3,
                ..wire::StepSpeed::default()
            })),
            ..wire::State::default()
        };
        let at_target = wire::State { pp: 2, ..state.clone() };
        assert_eq!((target_grid(&at_target), target_grid(&wire::State::default())), (None, None));
        let differs = Some(PieceDifference { replica: "there".into(), weight: "w".into(), piece: 3 });
        let views = [ReplicaView { state: Some(state), differs, ..ReplicaView::of("here") }, ReplicaView::of("there")];
        let since = UNIX_EPOCH + std::time::Duration::from_secs(7);
        let health = StoreHealth { since, away: Some("no answer".into()) };
        let topology = topology(&views, 0, Some(StoreView { kind: "etcd", health }), Vec::new());
        let rank = &topology.replicas[0].ranks[0];
        assert_eq!((rank.compute_share, rank.wait_share, rank.idle_share, rank.bubble_share), (0.5, 0.3, 0.2, 0.5));
        assert_eq!((rank.step_compute_micros, rank.step_wait_micros, rank.kv_used), (5000.0, 3000.0, 0.25));
        assert_eq!(rank.step_idle_micros, 2000.0);
        let page = json(&topology);
        let replica = &page["replicas"][0];
        assert_eq!(replica["tokens_per_s"]["predicted"]["bottleneck"], "compute");
        assert!(replica["tokens_per_s"]["alone"].is_null() && replica["replica"] == "here");
        assert_eq!(replica["ranks"][0]["step_micros"]["compute"], 5000.0);
        assert_eq!(replica["blocks"], json!({ "used": 1, "committed": 3, "total": 4 }));
        assert_eq!(replica["requested_grid"], json!({ "tp": 2, "pp": 2 }));
        assert_eq!((&replica["apart"][0]["host"], &replica["apart"][0]["seconds"]), (&json!("a"), &json!(2)));
        assert_eq!(replica["unplaced"], json!({ "why": "too few", "seconds": 2 }));
        assert_eq!(replica["shortened"], json!({ "requested": 9, "has": 5, "why": "too little" }));
        assert_eq!(replica["differs"], json!({ "replica": "there", "weight": "w", "piece": 3 }));
        let cuts = json!({ "time": 3, "tokens": 0, "blocks": 0 });
        let costs = json!([{ "rows": 8, "ms": 5.5 }]);
        let step_speed = json!({ "costs": costs, "predicted": 7, "as_predicted": 6, "cuts": cuts });
        assert_eq!(replica["step_speed"], step_speed);
        let store = json!({ "kind": "etcd", "connected": false, "since": 7, "reason": "no answer" });
        assert_eq!(page["store"], store);
        assert!(json(&super::topology(&[], 0, None, Vec::new()))["store"].is_null());
        let absent = &page["replicas"][1];
        assert_eq!((&absent["replica"], &absent["phase"]), (&json!("there"), &json!("absent")));
        assert!(absent["step_speed"].is_null());
        assert!(absent["model"].is_null() && absent["epoch"].is_null() && absent["differs"].is_null());
    }

    fn rank_of(n: u32) -> wire::RankState {
        let address = format!("node-{n:04}.ranks.lockstep.svc.cluster.local");
        wire::RankState {
            rank: n % 64,
            stage: n % 64 / 8,
            tp: n % 8,
            pid: u32::MAX,
            state: "ready".into(),
            host: address.clone(),
            device: "NVIDIA H100 80GB HBM3".into(),
            memory_bytes: u64::MAX >> 8,
            weight_bytes: u64::MAX >> 8,
            kv_bytes: u64::MAX >> 8,
            kv_tokens: u64::from(u32::MAX),
            times: Some(wire::RankTimes { steps: 7 << 30, wall_micros: 9 << 40, ..wire::RankTimes::default() }),
            ..wire::RankState::default()
        }
    }

    #[test]
    fn a_thousand_replicas_of_64_ranks_are_pages_that_a_client_can_read() {
        let of = |place: u32| {
            let ranks = (64 * place..64 * place + 64).map(rank_of).collect();
            let state = Some(wire::State { tp: 8, pp: 8, ranks, ..wire::State::default() });
            // Other replicas have come and gone, so places have gaps.
            ReplicaView { place: 3 * place as usize, state, ..ReplicaView::of(&format!("replica-{place}")) }
        };
        let views: Vec<ReplicaView> = (0..1000).map(of).collect();
        let (mut from, mut names, mut n_ranks, mut n_pages) = (Some(0), Vec::new(), 0, 0);
        while let Some(at) = from {
            let page = topology(&views, at, None, Vec::new());
            // As a gRPC message it has fewer bytes: JSON repeats the names of all fields.
            let n_bytes = json(&page).to_string().len();
            assert!(n_bytes < 4 << 20, "{n_bytes}");
            names.extend(page.replicas.iter().map(|replica| replica.replica.clone()));
            n_ranks += page.replicas.iter().map(|replica| replica.ranks.len()).sum::<usize>();
            (from, n_pages) = (page.next, n_pages + 1);
        }
        assert_eq!((n_pages, n_ranks), (16, 64_000));
        assert!(names.iter().eq(views.iter().map(|view| &view.name)), "each once, in their order");
        // The replica at which the next page began has left: the page begins with the one after it.
        assert_eq!(topology(&views, 4, None, Vec::new()).replicas[0].replica, "replica-2");
        // Absent replicas have no ranks, and end a page all the same.
        let absent: Vec<ReplicaView> =
            (0..2000).map(|place| ReplicaView { place, ..ReplicaView::of("away") }).collect();
        let page = topology(&absent, 0, None, Vec::new());
        assert_eq!((page.replicas.len(), page.next), (1024, Some(1024)));
        assert_eq!(topology(&absent, 1024, None, Vec::new()).next, None);
    }
}
