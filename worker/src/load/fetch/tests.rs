//! Tests which runs of a file a worker fetches for its part.

use super::*;
use proto::cluster::LayerBytes;
use types::{Grid, Layout, Rank};

const MIB: u64 = 1 << 20;

/// A header of one MiB, an embedding, and four layers of four MiB each.
fn file() -> ModelFile {
    let span = |layer, start: u64, end: u64| LayerBytes { layer, start: start * MIB, end: end * MIB };
    let layers = (0..4).map(|layer| span(Some(layer), 5 + u64::from(layer) * 4, 9 + u64::from(layer) * 4));
    let spans = std::iter::once(span(None, 1, 5)).chain(layers).collect();
    ModelFile { name: "model.gguf".into(), n_bytes: 21 * MIB, spans }
}

fn files() -> ModelFiles {
    ModelFiles { digest: vec![7; 32], name: "model.gguf".into(), is_folder: false, files: vec![file()] }
}

#[test]
fn a_rank_needs_the_header_its_layers_and_the_ends_of_the_rest() {
    let layout = Layout::even(Grid { pp: 4, tp: 1 }, 4).unwrap();
    let of = |rank| needed_chunks(&file(), &layout.part(Rank(rank)));
    let mib = |n: u64| n * MIB / CHUNK_BYTES;
    for rank in 0..4u16 {
        let needed = of(rank);
        assert!((0..mib(1)).all(|chunk| needed.contains(&chunk)), "the header");
        let start = 5 + u64::from(rank) * 4;
        assert!((mib(start)..mib(start + 4)).all(|chunk| needed.contains(&chunk)), "its layer");
        let edge = rank == 0 || rank == 3;
        assert_eq!(needed.contains(&(mib(2))), edge, "the middle of the embedding");
        assert!(needed.contains(&mib(1)) && needed.contains(&(mib(5) - 1)), "its ends");
    }
    assert_eq!(of(1).len() as u64, mib(1) + mib(4) + 2 * 4);
    let solo = needed_chunks(&file(), &Layout::solo(4).part(Rank(0)));
    assert_eq!(solo.len() as u64, mib(21));
    assert_eq!(chunk_ranges(&solo), std::slice::from_ref(&(0..mib(21))));
    assert_eq!(chunk_ranges(&BTreeSet::from([1, 2, 3, 7, 9, 10])), [1..4, 7..8, 9..11]);
}

#[test]
fn a_journal_is_believed_as_far_as_it_is_whole() {
    let folder = std::env::temp_dir().join(format!("lockstep-journal-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("journal");
    let mut journal = FetchJournal::open(&path, &files()).unwrap();
    journal.add(0, 3..9, [3; 32]).unwrap();
    journal.add(1, 0..1, [1; 32]).unwrap();
    drop(journal);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let mut again = FetchJournal::open(&path, &files()).unwrap();
    assert!(again.has(0, 8) && !again.has(0, 9) && !again.has(1, 0), "the last record was cut");
    again.add(1, 0..1, [1; 32]).unwrap();
    drop(again);
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    let mut other = files();
    other.files[0].n_bytes += 1;
    assert_eq!(FetchJournal::open(&path, &other).unwrap().len(), 0, "of other files");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    assert!(check(&files()).is_ok());
    for name in ["", "..", "../x", "/x", "a/b", ".hidden", "a\0b"] {
        let mut bad = files();
        bad.files[0].name = name.into();
        bad.name = name.into();
        assert!(matches!(check(&bad), Err(FetchError::Manifest(_))), "{name:?}");
    }
    let mut outside = files();
    outside.files[0].n_bytes = 20 * MIB;
    assert!(check(&outside).is_err());
    let mut twice = files();
    twice.files.push(file());
    assert!(check(&twice).is_err());
}

#[test]
fn what_has_been_damaged_is_forgotten_and_nothing_else() {
    let folder = std::env::temp_dir().join(format!("lockstep-checks-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let files = [folder.join("model.gguf")];
    let write = |bytes: &[u8]| std::fs::write(&files[0], bytes).unwrap();
    let of = |chunks: &Range<u64>| checks::hash(&File::open(&files[0]).unwrap(), chunks).unwrap();
    let mut bytes = vec![7; 3 * CHUNK_BYTES as usize + 5];
    write(&bytes);
    let mut journal = FetchJournal::open(&folder.join("journal"), &self::files()).unwrap();
    for run in [0..2, 2..4] {
        let hash = of(&run);
        journal.add(0, run, hash).unwrap();
    }
    let (required, never) = ([BTreeSet::from([0, 1, 2, 3])], CancelFlag::default());
    assert_eq!(IntactChunks::default().remove_damaged(&mut journal, &files, &required, &never), Some(0));
    let over = CancelFlag::default();
    over.cancel();
    assert_eq!(IntactChunks::default().remove_damaged(&mut journal, &files, &required, &over), None);
    *bytes.last_mut().unwrap() = 8;
    write(&bytes);
    assert_eq!(
        IntactChunks::default().remove_damaged(&mut journal, &files, &[BTreeSet::from([0, 1])], &never),
        Some(0),
        "no rank needs the damaged chunk"
    );
    assert_eq!(IntactChunks::default().remove_damaged(&mut journal, &files, &required, &never), Some(2));
    assert!(journal.has(0, 1) && !journal.has(0, 2));
    // A newer record counts, whatever an older one contains.
    let hash = of(&(2..4));
    journal.add(0, 2..4, hash).unwrap();
    assert_eq!(IntactChunks::default().remove_damaged(&mut journal, &files, &required, &never), Some(0));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[tokio::test]
async fn ranks_look_side_by_side_at_what_is_there_and_one_at_a_time_writes() {
    let cache = std::env::temp_dir().join(format!("lockstep-locks-{}", std::process::id()));
    let place = ModelFolder::open(&cache, files()).unwrap();
    let (paths, required) = ([place.file(&place.files.files[0])], [BTreeSet::from([0, 1])]);
    let (checked, never) = (IntactChunks::default(), CancelFlag::default());
    let found = || place.check_and_lock(&checked, &paths, &required, &never);
    let Ok(LockedFolder::Incomplete(ours)) = found().await else { panic!("the folder is empty") };
    assert!(FolderLock::shared(&place.folder).unwrap().is_none(), "no reader holds the folder");
    let mut fetched = place.check_chunks(&checked, &paths, &required, &never).unwrap();
    let out = OpenOptions::new().create_new(true).read(true).write(true).open(&paths[0]).unwrap();
    out.set_len(place.files.files[0].n_bytes).unwrap();
    fetched.journal.add(0, 0..2, checks::hash(&out, &(0..2)).unwrap()).unwrap();
    drop((fetched, ours));
    // Another rank reads it meanwhile.
    let other = FolderLock::shared(&place.folder).unwrap().unwrap();
    let Ok(LockedFolder::Whole(shared)) = found().await else { panic!("the folder has all chunks") };
    assert!(FolderLock::exclusive(&place.folder).unwrap().is_none());
    drop(shared);
    // A missing chunk is written once no rank reads any more.
    let more = [BTreeSet::from([0, 1, 2])];
    let waits = place.check_and_lock(&checked, &paths, &more, &never);
    assert!(timeout(Duration::from_millis(300), waits).await.is_err(), "a reader holds the folder");
    drop(other);
    assert!(matches!(place.check_and_lock(&checked, &paths, &more, &never).await, Ok(LockedFolder::Incomplete(_))));
    std::fs::remove_dir_all(&cache).unwrap();
}
