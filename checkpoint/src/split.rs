//! A GGUF in one file, or in several that are numbered: `model-00001-of-00003.gguf`. Any of them stands for all.

use crate::error::{Error, Result};
use crate::file::SourceFile;
use crate::gguf::Gguf;
use std::path::Path;

/// The most parts that one model may have.
const PARTS_MAX: u32 = 4096;

/// The content of a part's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GgufPart<'a> {
    pub stem: &'a str,
    /// Counted from one.
    pub number: u32,
    pub count: u32,
}

impl<'a> GgufPart<'a> {
    pub fn of(file_name: &'a str) -> Option<GgufPart<'a>> {
        let (rest, count) = file_name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        (1 <= number && number <= count && count <= PARTS_MAX).then_some(GgufPart { stem, number, count })
    }

    /// The names of all parts, in order.
    pub fn names(self) -> impl Iterator<Item = String> {
        let GgufPart { stem, count, .. } = self;
        (1..=count).map(move |number| format!("{stem}-{number:05}-of-{count:05}.gguf"))
    }
}

fn five_digits(text: &str) -> Option<u32> {
    let plain = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

/// The parts of a model, joined.
pub struct JoinedGguf {
    /// Covers all parts; the metadata comes from the first.
    pub header: Gguf,
    /// The first part's header bytes, which the metadata points into.
    pub bytes: Vec<u8>,
    pub files: Vec<SourceFile>,
}

impl JoinedGguf {
    /// Opens the file, or all parts of the model that the file is one of. Does not check what the tensors are for.
    pub fn open(path: &Path) -> Result<JoinedGguf> {
        open(path)
    }
}

/// Opens all parts.
pub(crate) fn open(path: &Path) -> Result<JoinedGguf> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match GgufPart::of(name) {
        Some(part) if part.count > 1 => open_parts(path, part),
        _ => open_whole(path),
    }
}

fn open_whole(path: &Path) -> Result<JoinedGguf> {
    let file = SourceFile::open_filled(path)?;
    let (header, bytes) = Gguf::read(&file)?;
    match header.unsigned("split.count").map_err(Error::with_path(path))? {
        None | Some(0 | 1) => Ok(JoinedGguf { header, bytes, files: vec![file] }),
        Some(count) => malformed(path, format!("it is one of {count} parts, but its name has no part number")),
    }
}

fn open_parts(path: &Path, part: GgufPart<'_>) -> Result<JoinedGguf> {
    let (mut header, mut first) = (Gguf::default(), Vec::new());
    let mut files = Vec::new();
    for (index, name) in part.names().enumerate() {
        let path_of_part = path.with_file_name(&name);
        if !path_of_part.exists() {
            return malformed(path, format!("its part {name} is missing"));
        }
        let file = SourceFile::open_filled(&path_of_part)?;
        let (parsed, bytes) = Gguf::read(&file)?;
        check_part_header(&parsed, index as u64, part.count.into(), &path_of_part)?;
        header.add_part(parsed, index).map_err(Error::with_path(&path_of_part))?;
        if index == 0 {
            first = bytes;
        }
        files.push(file);
    }
    let n_expected = header.unsigned("split.tensors.count").map_err(Error::with_path(path))?;
    let found = header.tensors().count() as u64;
    match n_expected {
        Some(n_expected) if n_expected == found => Ok(JoinedGguf { header, bytes: first, files }),
        Some(n_expected) => {
            malformed(path, format!("its parts have {found} tensors in all, and should have {n_expected}"))
        }
        None => malformed(path, "the first part has no split.tensors.count".to_owned()),
    }
}

fn check_part_header(header: &Gguf, index: u64, count: u64, path: &Path) -> Result<()> {
    let read = |key: &str| header.unsigned(key).map_err(Error::with_path(path));
    match (read("split.no")?, read("split.count")?) {
        (Some(no), Some(of)) if (no, of) == (index, count) => Ok(()),
        (Some(no), Some(of)) => {
            malformed(path, format!("its name is part {} of {count}, but its header is {} of {of}", index + 1, no + 1))
        }
        _ => malformed(path, "it is named as a part, but its header has no split.no and split.count".to_owned()),
    }
}

fn malformed<T>(path: &Path, what: String) -> Result<T> {
    Err(Error::Malformed { path: path.to_owned(), what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let check = |name: &str, expect: Option<(&str, u32, u32)>| {
            assert_eq!(GgufPart::of(name).map(|part| (part.stem, part.number, part.count)), expect, "{name}");
        };
        check("m-Q4_K_M-00002-of-00003.gguf", Some(("m-Q4_K_M", 2, 3)));
        check("m-of-x-00001-of-00001.gguf", Some(("m-of-x", 1, 1)));
        check("m-00004-of-00003.gguf", None);
        check("m-00000-of-00003.gguf", None);
        check("m-1-of-3.gguf", None);
        check("m-00001-of-99999.gguf", None);
        check("m-+0001-of-00003.gguf", None);
        check("m.gguf", None);
        let part = GgufPart::of("m-00002-of-00002.gguf").unwrap();
        assert_eq!(part.names().collect::<Vec<_>>(), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
    }
}
