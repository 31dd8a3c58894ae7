//! Tests when a rank that holds its part opens the files again.

use super::*;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use types::{Activations, Epoch, KvDtype, Layout, NumericsMode, Rank};

fn copy(to: &Path) {
    let from: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../tests/reference/llama-f16-sharded"].iter().collect();
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Changes the file's time, so that it counts as another file.
fn touch(model: &Path) {
    let shards = std::fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path());
    for shard in shards.filter(|path| path.extension().is_some_and(|of| of == "safetensors")) {
        let file = File::options().write(true).open(shard).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_modified(modified.max(SystemTime::UNIX_EPOCH) + Duration::from_secs(7)).unwrap();
    }
}

fn assignment(model_path: &Path) -> Assignment {
    Assignment {
        epoch: Epoch { incarnation: 1, n: 1 },
        rank: Rank(0),
        layout: Layout::solo(2),
        mesh_addresses: vec![],
        mesh_secret: crate::MeshSecret::default(),
        model_path: model_path.to_owned(),
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        mode: NumericsMode::Lockstep,
        n_blocks: vec![8],
        kv_bytes: 64 << 20,
        context: 100,
        batch_tokens_max: 100,
        running_max: 4,
        timeouts: crate::MeshTimeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        guesses: crate::GuessConfig::default(),
    }
}

const KEEP: ReloadPlan = ReloadPlan::Keep { unread: None };

#[test]
fn files_are_looked_at_for_an_operators_word_and_not_for_a_number() {
    let model = std::env::temp_dir().join(format!("lockstep-reading-{}", std::process::id()));
    copy(&model);
    let of = |incarnation, n, reading| Assignment { epoch: Epoch { incarnation, n }, reading, ..assignment(&model) };
    let mut held = WeightsReadRecord::new(&of(1, 1, 0), &Checkpoint::open(&model).unwrap());
    let is_read = |held: &mut WeightsReadRecord, assignment: &Assignment| {
        matches!(held.plan_reload(assignment), ReloadPlan::Read(Ok(_)))
    };
    assert_eq!(held.plan_reload(&of(1, 9, 0)), KEEP);
    // An operator requests a reading, and the present files are rejected: later epochs do not open them again.
    assert!(is_read(&mut held, &of(1, 10, 1)));
    assert!(is_read(&mut held, &of(1, 11, 1)), "the reading was cancelled");
    touch(&model);
    let ReloadPlan::Read(files) = held.plan_reload(&of(1, 12, 1)) else { panic!("the model is read again") };
    held.record_refused(&of(1, 12, 1), files, "other bytes".into());
    for n in 13..16 {
        assert_eq!(held.plan_reload(&of(1, n, 1)), ReloadPlan::Keep { unread: Some("other bytes".into()) });
    }
    // The files have changed by now.
    touch(&model);
    assert!(is_read(&mut held, &of(1, 17, 1)));
    // A new life of the coordinator has new numbers, and has requested no reading.
    assert_eq!(held.plan_reload(&of(2, 1, 0)), KEEP);
    assert_eq!(held.plan_reload(&of(2, 2, 0)), KEEP);
    std::fs::remove_dir_all(&model).unwrap();
}

#[test]
fn files_that_have_not_changed_are_not_read_again_for_another_coordinators_word() {
    let model = std::env::temp_dir().join(format!("lockstep-reading-same-{}", std::process::id()));
    copy(&model);
    let of = |incarnation, reading| Assignment { epoch: Epoch { incarnation, n: 1 }, reading, ..assignment(&model) };
    let mut held = WeightsReadRecord::new(&of(1, 3), &Checkpoint::open(&model).unwrap());
    assert_eq!(held.plan_reload(&of(2, 1)), KEEP);
    assert_eq!(held.plan_reload(&of(2, 1)), KEEP);
    touch(&model);
    assert!(matches!(held.plan_reload(&of(3, 1)), ReloadPlan::Read(Ok(_))));
    // A missing file is not opened again and again either.
    std::fs::remove_dir_all(&model).unwrap();
    let ReloadPlan::Read(files) = held.plan_reload(&of(3, 1)) else { panic!("the model is read again") };
    assert!(files.is_err());
    held.record_refused(&of(3, 1), files, "gone".into());
    assert_eq!(held.plan_reload(&of(3, 1)), ReloadPlan::Keep { unread: Some("gone".into()) });
}
