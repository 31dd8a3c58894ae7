//! Hubs that redirect, break off, lie and change their files: what is fetched is gone on with or refused, and never
//! half of a file, or two halves, under its name.

use super::*;

/// A hub with one file, whose list is always right about `file`; `answer` speaks for the rest.
fn hub_of(file: &[u8], sha256: Option<&str>, answer: impl Fn(&HubRequest) -> Answer + Send + 'static) -> Hub {
    let lfs = sha256.map(|oid| serde_json::json!({ "oid": oid }));
    let list = serde_json::json!([{"type": "file", "path": "m-Q4_1.gguf", "size": file.len(), "lfs": lfs}]).to_string();
    hub_that(move |request| match request.path.starts_with(LISTS) {
        true => Answer::new("200 OK", list.as_bytes()),
        false => answer(request),
    })
}

const MODEL: &str = "org/m:Q4_1";

fn sha(file: &[u8]) -> String {
    hub::hex(&Sha256::digest(file))
}

/// Nothing has the model's name; how much of it is kept for another try.
fn only_a_part(sources: &ModelSources) -> Option<u64> {
    assert!(locate(MODEL, sources).is_err());
    let folder = sources.cache.join("models/org--m--Q4_1");
    assert!(!folder.join("m-Q4_1.gguf").exists());
    std::fs::metadata(folder.join("m-Q4_1.gguf.part")).ok().map(|part| part.len())
}

fn pulled(sources: &ModelSources) -> Vec<u8> {
    let located = pull(MODEL, sources, &mut |_| {}).unwrap();
    verify_recorded(&located.path).unwrap();
    let file = std::fs::read(located.path).unwrap();
    std::fs::remove_dir_all(&sources.cache).unwrap();
    file
}

#[test]
fn a_redirect_is_followed_with_its_range_and_without_the_token() {
    let file = gguf(1);
    let blob = file.clone();
    let away = hub_of(&file, None, move |request| match (&*request.path, request.has_token) {
        ("/blob", false) => Answer::file(&blob, request.from),
        _ => Answer::new("404 Not Found", b""),
    });
    let to = away.endpoint.clone();
    let near = hub_of(&file, Some(&sha(&file)), move |request| match request.has_token {
        true => Answer { headers: format!("location: {to}/blob\r\n"), ..Answer::new("302 Found", b"") },
        false => Answer::new("401 Unauthorized", b""),
    });
    let sources = ModelSources { hub_token: Some("secret".into()), ..sources("redirect", &near) };
    let folder = sources.cache.join("models/org--m--Q4_1");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("m-Q4_1.gguf.part"), &file[..1234]).unwrap();
    assert!(pulled(&sources) == file);
    assert_eq!(away.file_requests(), ["/blob 1234"]);
}

#[test]
fn a_fetch_whose_connection_is_cut_goes_on_where_it_was() {
    let file = gguf(2);
    let of_hub = file.clone();
    let hub = hub_of(&file, Some(&sha(&file)), move |request| {
        let cut = if request.before < 2 { 100_000 } else { usize::MAX };
        Answer { cut, ..Answer::file(&of_hub, request.from) }
    });
    let sources = sources("cut", &hub);
    for n_kept in [100_000, 200_000] {
        let refused = pull(MODEL, &sources, &mut |_| {}).unwrap_err();
        assert!(matches!(refused, Error::Fetch { .. }), "{refused}");
        assert_eq!(only_a_part(&sources), Some(n_kept));
    }
    assert!(pulled(&sources) == file);
    let path = "/org/m/resolve/main/m-Q4_1.gguf";
    assert_eq!(hub.file_requests(), [0, 100_000, 200_000].map(|from| format!("{path} {from}")));
}

#[test]
fn a_file_that_has_changed_since_is_refused_and_fetched_anew() {
    let (before, file) = (gguf(3), gguf(4));
    let of_hub = file.clone();
    let hub = hub_of(&file, Some(&sha(&file)), move |request| Answer::file(&of_hub, request.from));
    let sources = sources("changed", &hub);
    let folder = sources.cache.join("models/org--m--Q4_1");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("m-Q4_1.gguf.part"), &before[..150_000]).unwrap();
    let refused = pull(MODEL, &sources, &mut |_| {}).unwrap_err();
    assert!(matches!(refused, Error::Checksum { .. }), "{refused}");
    assert_eq!(only_a_part(&sources), None);
    assert!(pulled(&sources) == file);
}

/// Without a checksum a part is worth nothing: the file may be another one by now.
#[test]
fn a_file_without_a_checksum_is_never_put_together_from_two() {
    let (before, file) = (gguf(5), gguf(6));
    let of_hub = file.clone();
    let hub = hub_of(&file, None, move |request| Answer::file(&of_hub, request.from));
    let sources = sources("unchecked", &hub);
    let folder = sources.cache.join("models/org--m--Q4_1");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("m-Q4_1.gguf.part"), &before[..150_000]).unwrap();
    assert!(pulled(&sources) == file);
}

#[test]
fn a_hub_without_ranges_begins_again_and_one_that_sends_other_ranges_is_refused() {
    let file = gguf(7);
    for is_lying in [false, true] {
        let of_hub = file.clone();
        let hub = hub_of(&file, Some(&sha(&file)), move |request| match (is_lying, request.from) {
            (false, _) => Answer::new("200 OK", &of_hub),
            (true, from) => {
                Answer { headers: "content-range: bytes 0-9/300000\r\n".into(), ..Answer::file(&of_hub, from) }
            }
        });
        let sources = sources(&format!("ranges-{is_lying}"), &hub);
        let folder = sources.cache.join("models/org--m--Q4_1");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("m-Q4_1.gguf.part"), &file[..1000]).unwrap();
        if is_lying {
            let refused = pull(MODEL, &sources, &mut |_| {}).unwrap_err().to_string();
            assert!(refused.contains("did not send the part from byte 1000"), "{refused}");
            assert_eq!(only_a_part(&sources), Some(1000));
            std::fs::remove_dir_all(&sources.cache).unwrap();
        } else {
            assert!(pulled(&sources) == file);
        }
    }
}

#[test]
fn more_or_less_than_was_announced_is_refused() {
    let file = gguf(8);
    for n_bytes in [1000, 300_001] {
        let mut of_hub = file.clone();
        of_hub.resize(n_bytes, 1);
        let hub = hub_of(&file, Some(&sha(&file)), move |_| Answer::new("200 OK", &of_hub));
        let sources = sources(&format!("length-{n_bytes}"), &hub);
        let refused = pull(MODEL, &sources, &mut |_| {}).unwrap_err().to_string();
        assert!(refused.contains("of 300000 bytes") || refused.contains("more than the announced 300000"), "{refused}");
        assert!(only_a_part(&sources).is_some_and(|kept| kept <= 300_000));
        std::fs::remove_dir_all(&sources.cache).unwrap();
    }
}

/// A disk on which no file grows beyond a hundred thousand bytes. What had room is written, as disks do.
fn write_to_a_small_disk(file: &mut std::fs::File, bytes: &[u8]) -> std::io::Result<()> {
    let room = 100_000_usize.saturating_sub(file.metadata()?.len() as usize);
    file.write_all(&bytes[..room.min(bytes.len())])?;
    if bytes.len() > room { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(()) }
}

#[test]
fn full_disk_error_is_reported_and_fetch_resumes() {
    let file = gguf(9);
    let of_hub = file.clone();
    let hub = hub_of(&file, Some(&sha(&file)), move |request| Answer::file(&of_hub, request.from));
    let roomy = sources("full", &hub);
    let small = ModelSources { write: write_to_a_small_disk, ..roomy.clone() };
    // A second try on the full disk finds the part, and gains nothing.
    for missing in [200_000, 200_000] {
        let refused = pull(MODEL, &small, &mut |_| {}).unwrap_err();
        let Error::NoRoom { path, needed, .. } = &refused else { panic!("{refused}") };
        assert!(path.ends_with("m-Q4_1.gguf.part") && (missing..=300_000).contains(needed), "{refused}");
        assert!(refused.to_string().contains("there is not enough space"), "{refused}");
        assert_eq!(only_a_part(&small), Some(100_000));
    }
    assert!(pulled(&roomy) == file);
    assert_eq!(hub.file_requests().last().unwrap(), "/org/m/resolve/main/m-Q4_1.gguf 100000");
}

/// Where the disk is full for the hub's file, it is for the package's too, which is larger.
#[test]
fn a_full_disk_has_no_second_source() {
    let file = vec![1; 200_000];
    let hub = hub_that(move |request| Answer::file(&file, request.from));
    let python = Some("/bin/false".to_owned());
    let sources = ModelSources { python, write: write_to_a_small_disk, ..sources("full-entry", &hub) };
    let refused = pull("smollm2", &sources, &mut |_| {}).unwrap_err();
    assert!(matches!(refused, Error::NoRoom { .. }), "{refused}");
    std::fs::remove_dir_all(&sources.cache).unwrap();
}
