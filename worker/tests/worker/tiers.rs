//! Pages behind the pools of a device with memory of its own, over the fake driver: what a rank copies to the host and
//! back, through memory or files, equals a recompute bit for bit.

use crate::common::{Alone, Plan, Player, requests};
use crate::cuda::{loader, on_cuda};
use crate::fake_cuda::on_fake_cuda;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use types::{
    BlockHash, BlockId, Epoch, FetchDone, FetchId, Page, PageFetch, PageKey, Request, Slice, Step, StepDone, StepId,
    TierWork, TokenOut, Want,
};
use worker::tier::{KvDiskConfig, KvTiers, KvTiersConfig, TierReports};
use worker::{Assignment, ModelLoader, Runner};

const FULL_BLOCKS: u32 = 2;

/// Pages of the first blocks of a sequence, in these blocks.
fn pages(blocks: [u32; FULL_BLOCKS as usize]) -> Vec<Page> {
    let page = |(i, block)| Page { key: PageKey { group: 0, name: BlockHash([i; 16]) }, block: BlockId(block) };
    (1..).zip(blocks).map(page).collect()
}

struct Rank {
    runner: Box<dyn Runner>,
    n_steps: u64,
    fetched: std::sync::mpsc::Receiver<FetchDone>,
    n_kept: usize,
}

impl Rank {
    fn new(assignment: &Assignment, tiers: &KvTiers) -> Rank {
        let (mut runner, _) = ModelLoader { kv_tiers: Some(tiers.clone()), ..loader() }.build(assignment).unwrap();
        let ((answer, fetched), (keep, kept)) = (channel(), channel());
        let reports = TierReports {
            fetched: Arc::new(move |done| answer.send(done).unwrap()),
            kept: Box::new(move |keys| keep.send(keys.len()).unwrap()),
        };
        assert!(runner.start_tier(reports));
        Rank { runner: Box::new(runner), n_steps: 0, fetched, n_kept: kept.iter().sum() }
    }

    fn run(&mut self, step: Step) -> Vec<TokenOut> {
        let id = StepId(self.n_steps);
        self.n_steps += 1;
        let mut done = StepDone { id, ..StepDone::default() };
        self.runner.run(&Step { id, ..step }, &mut done).unwrap();
        done.slices.into_iter().flat_map(|slice| slice.tokens).collect()
    }

    /// Computes a request behind its first `n` tokens, which these blocks have.
    fn answer(&mut self, request: &Request, n: u32, mut blocks: Vec<BlockId>) -> Vec<TokenOut> {
        let (mut start, mut end, mut out) = (n, request.prompt.len() as u32, Vec::new());
        let mut starts = vec![request.clone()];
        for _ in 0..request.sampling.tokens_max {
            let slices = vec![Slice::new(request.id, start..end, Want::Last)];
            out.extend(self.run(Step {
                starts: std::mem::take(&mut starts),
                slices,
                blocks: std::mem::take(&mut blocks),
                ..Step::default()
            }));
            (start, end) = (end, end + 1);
        }
        out
    }
}

/// A rank computes a prompt, and has its pages stored while another request takes their blocks. Another rank fetches
/// them into other blocks, over the content of other requests.
fn pages_equal_a_recompute(assignment: &Assignment, config: KvTiersConfig) {
    let mut all = requests(11);
    let (mut other, mut request) = (all.remove(4), all.remove(9));
    for request in [&mut request, &mut other] {
        request.prompt.truncate(40);
        request.sampling.tokens_max = 4;
    }
    let (mut alone, _) = loader().build(assignment).unwrap();
    let expected = Player::new(&mut Alone::new(&mut alone), assignment).play(&[request.clone()], Plan::ALONE);
    let blocks = |of: [u32; 3]| of.map(BlockId).to_vec();
    let tiers = KvTiers::open(config, None).unwrap();
    let mut first = Rank::new(assignment, &tiers);
    assert_eq!(first.n_kept, 0);
    assert!(first.answer(&request, 0, blocks([7, 3, 5])) == expected.outputs[0]);
    first.run(Step {
        tier: TierWork { stores: pages([7, 3]), ..TierWork::default() },
        ends: vec![request.id],
        starts: vec![other.clone()],
        slices: vec![Slice::new(other.id, 0..40, Want::Nothing)],
        blocks: blocks([3, 7, 5]),
        ..Step::default()
    });
    drop(first);
    let begun = Instant::now();
    let mut second = loop {
        let rank = Rank::new(assignment, &tiers);
        if rank.n_kept == FULL_BLOCKS as usize {
            break rank;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{} pages are kept", rank.n_kept);
    };
    second.answer(&other, 0, blocks([1, 2, 4]));
    let fetch = PageFetch { id: FetchId(6), pages: pages([2, 1]) };
    let tier = TierWork { fetches: vec![fetch], ..TierWork::default() };
    second.run(Step { tier, ends: vec![other.id], ..Step::default() });
    let done = second.fetched.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(
        FetchDone { micros: 0, ..done },
        FetchDone { epoch: Epoch::default(), id: FetchId(6), ..FetchDone::default() }
    );
    assert!(second.answer(&request, 32, blocks([2, 1, 9])) == expected.outputs[0], "with {tiers:?}");
}

#[test]
fn pages_of_gpus_in_host_memory_and_files_equal_a_recompute() {
    on_fake_cuda("pages_of_gpus_in_host_memory_and_files_equal_a_recompute", &[], || {
        let folder = std::env::temp_dir().join(format!("lockstep-gpu-pages-{}", std::process::id()));
        let disk = |name: &str| Some(KvDiskConfig::new(PathBuf::from(&folder).join(name), 1 << 30));
        for (host_bytes, disk) in [(Some(1 << 20), None), (None, disk("alone")), (Some(1 << 20), disk("both"))] {
            for name in ["llama-bf16-odd", "gpt-oss"] {
                let disk = disk.clone().map(|of| KvDiskConfig { folder: of.folder.join(name), ..of });
                let assignment = on_cuda(name);
                if assignment.n_blocks.len() == 1 {
                    pages_equal_a_recompute(&assignment, KvTiersConfig { host_bytes, disk });
                }
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    });
}
