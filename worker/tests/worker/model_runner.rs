//! A real model behind `Runner`: with any steps, a request's tokens and logprobs are the same, bit for bit, and steps
//! that contradict the protocol are rejected.

use crate::common;
use crate::common::{Alone, Plan, Played, Player, assignment, requests};
use backend::cpu::Isa;
use std::path::PathBuf;
use types::{
    Activations, BlockId, KvDtype, Layout, PolicyDigest, Request, RequestId, Sampling, Slice, Step, StepDone, Want,
};
use worker::{Assignment, CancelFlag, Load, LoadError, ModelLoader, RunError, Runner};

const MODEL: &str = "llama-f16-sharded";
const ALONE: Plan = Plan::ALONE;

fn play(loader: ModelLoader, assignment: &Assignment, plan: Plan) -> Played {
    let (mut runner, _) = loader.build(assignment).unwrap();
    Player::new(&mut Alone::new(&mut runner), assignment).play(&requests(24), plan)
}

fn loader(threads: usize) -> ModelLoader {
    ModelLoader::new(threads)
}

fn assert_same(played: &Played, reference: &Played, what: &str) {
    // Logprobs are compared as numbers: equal f32 that are not zero or NaN are equal bits.
    assert!(played.outputs == reference.outputs, "{what}");
}

#[test]
fn steps_of_any_shape_give_the_same_tokens() {
    for (activations, kv_dtype) in [(Activations::Int8, KvDtype::F16), (Activations::F32, KvDtype::F32)] {
        let assignment = Assignment { activations, kv_dtype, ..assignment(MODEL) };
        let reference = play(loader(1), &assignment, ALONE);
        assert_eq!(reference.outputs.len(), 24);
        let together = play(loader(1), &assignment, Plan { chunk: 30, together: 16, ..ALONE });
        assert_eq!(together.n_together, 16);
        assert_same(&together, &reference, "together");
        for chunk in [1, 7] {
            assert_same(&play(loader(1), &assignment, Plan { chunk, ..ALONE }), &reference, "in chunks");
        }
        let preempted = play(loader(1), &assignment, Plan { chunk: 30, together: 5, preempt_every: Some(3), ..ALONE });
        assert!(preempted.n_preempted > 20);
        assert_same(&preempted, &reference, "preempted");
    }
}

#[test]
fn threads_and_instructions_give_the_same_tokens() {
    let assignment = assignment(MODEL);
    let plan = Plan { chunk: 30, together: 16, ..ALONE };
    let reference = play(ModelLoader { isa: Isa::Plain, ..loader(1) }, &assignment, plan);
    for threads in [1, 2, 4] {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            assert_same(
                &play(ModelLoader { isa, ..loader(threads) }, &assignment, plan),
                &reference,
                "on other threads",
            );
        }
    }
}

#[test]
fn a_shared_prefix_gives_the_same_tokens() {
    let (mut runner, _) = loader(1).build(&assignment(MODEL)).unwrap();
    let prompt: Vec<_> = (0..70).map(|i| (i * 13) % common::VOCAB).collect();
    let sampling = Sampling { temperature: 1.0, logprobs: Some(2), ..Sampling::default() };
    let request =
        |id| Request { id: RequestId(id), prompt: prompt.clone(), sampling: sampling.clone(), ..Request::default() };
    let slice = |id, range| Slice::new(RequestId(id), range, Want::Last);
    let blocks = |ids: &[u32]| ids.iter().copied().map(BlockId).collect::<Vec<_>>();
    let (mut cold, mut warm) = (StepDone::default(), StepDone::default());
    let first = Step {
        starts: vec![request(1)],
        slices: vec![slice(1, 0..70)],
        blocks: blocks(&[9, 2, 5, 7, 0]),
        ..Step::default()
    };
    runner.run(&first, &mut cold).unwrap();
    let second = Step {
        starts: vec![request(2)],
        slices: vec![slice(2, 64..70)],
        blocks: blocks(&[9, 2, 5, 7, 3]),
        ..Step::default()
    };
    runner.run(&second, &mut warm).unwrap();
    assert_eq!(warm.slices[0].tokens.len(), 1);
    assert_eq!(warm.slices, cold.slices);
}

#[test]
fn unloadable_assignments_are_refused() {
    let refused = |change: &dyn Fn(&mut Assignment)| {
        let mut assignment = assignment(MODEL);
        change(&mut assignment);
        loader(1).load(&assignment, &CancelFlag::default()).err().unwrap()
    };
    // No assignment has words of another type.
    assert!("q8".parse::<KvDtype>().is_err() && "f16".parse::<Activations>().is_err());
    assert!(matches!(refused(&|a| a.context = 1 << 20), LoadError::Unsupported(_)));
    assert!(matches!(refused(&|a| a.kv_bytes = 10), LoadError::Memory { .. }));
    assert!(matches!(refused(&|a| a.n_blocks = vec![1 << 20]), LoadError::Memory { .. }));
    for n_blocks in [vec![], vec![9; 2], vec![0], vec![u32::MAX]] {
        assert!(matches!(refused(&|a| a.n_blocks.clone_from(&n_blocks)), LoadError::Unsupported(_)), "{n_blocks:?}");
    }
    assert!(matches!(refused(&|a| a.model_path = "no/such/model".into()), LoadError::Model { .. }));
    assert!(matches!(refused(&|a| a.layout = Layout::solo(3)), LoadError::Unsupported(_)));
}

#[test]
fn a_step_that_contradicts_is_refused() {
    let (mut runner, _) = loader(1).build(&assignment(MODEL)).unwrap();
    let slices = vec![Slice::new(RequestId(5), 0..1, Want::Last)];
    let step = Step { slices, blocks: vec![BlockId(0)], ..Step::default() };
    let refused = runner.run(&step, &mut StepDone::default());
    assert!(matches!(refused, Err(RunError::Protocol { step: 0, .. })), "{refused:?}");
}

/// Copies a folder's files into the temporary folder, under another name.
fn copied(assignment: &Assignment, name: &str) -> PathBuf {
    let copy = std::env::temp_dir().join(format!("lockstep-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&copy).unwrap();
    for entry in std::fs::read_dir(&assignment.model_path).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    copy
}

fn played(runner: &mut dyn Runner, assignment: &Assignment) -> Played {
    Player::new(&mut Alone::new(runner), assignment).play(&requests(6), ALONE)
}

#[test]
fn unchanged_part_is_reread_only_on_request() {
    let original = assignment(MODEL);
    let (model_path, elsewhere) = (copied(&original, "kept"), copied(&assignment("llama-f32-tied"), "other"));
    let away = model_path.with_extension("away");
    let loader = loader(1);
    let first = Assignment { model_path: model_path.clone(), ..original };
    let (mut runner, ready) = loader.build(&first).unwrap();
    let expected = played(&mut runner, &first);
    drop(runner);

    // No file is needed, neither now nor a second time.
    std::fs::rename(&model_path, &away).unwrap();
    let kept = Assignment { policy: Some(ready.policy), ..first };
    for _ in 0..2 {
        let (mut runner, again) = loader.build(&kept).unwrap();
        assert_same(&played(&mut runner, &kept), &expected, "kept");
        assert_eq!(again, ready);
    }

    // A rank reads again if that is possible. Otherwise it continues, and reports why.
    let anew = Assignment { reading: 1, ..kept.clone() };
    let (runner, again) = loader.build(&anew).unwrap();
    assert!(again.unread.as_ref().is_some_and(|why| why.contains("lockstep-kept")), "{again:?}");
    drop(runner);
    std::fs::rename(&elsewhere, &model_path).unwrap();
    let (runner, again) = loader.build(&anew).unwrap();
    assert!(again.unread.as_ref().is_some_and(|why| why.contains("policy")), "{again:?}");
    drop(runner);
    std::fs::remove_dir_all(&model_path).unwrap();
    std::fs::rename(&away, &model_path).unwrap();
    let (mut runner, again) = loader.build(&anew).unwrap();
    assert_same(&played(&mut runner, &anew), &expected, "read again");
    assert_eq!(again, ready);
    drop(runner);

    // Another policy or another part requires a reading, which fails here.
    std::fs::remove_dir_all(&model_path).unwrap();
    let other = Assignment { policy: Some(PolicyDigest([7; 32])), ..anew.clone() };
    assert!(matches!(loader.build(&other).err(), Some(LoadError::Model { .. })));
    // The kept weights are gone as well, because there might not be room for both.
    assert!(matches!(loader.build(&anew).err(), Some(LoadError::Model { .. })));
}
