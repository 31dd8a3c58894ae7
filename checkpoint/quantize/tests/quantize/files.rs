//! Whole models, written again: they open, their metadata is the same, and their numbers are as close as types allow.

use checkpoint::{Checkpoint, JoinedGguf};
use quantize::{Error, Recipe, decode_row};
use std::path::{Path, PathBuf};
use types::Dtype;

/// A folder that is removed at the end of a test.
struct TestFolder(PathBuf);

impl TestFolder {
    fn new(name: &str) -> TestFolder {
        let path = std::env::temp_dir().join(format!("lockstep-quantize-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        TestFolder(path)
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference")
}

/// Every GGUF of the reference models.
fn models() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(reference()).unwrap().map(|folder| folder.unwrap().path().join("model.gguf"));
    let mut models: Vec<PathBuf> = folders.filter(|model| model.exists()).collect();
    models.sort();
    models
}

fn quantize(input: &Path, output: &Path, recipe: Recipe) -> Result<quantize::QuantizeReport, Error> {
    quantize::file(input, output, recipe, &mut |_| {})
}

/// Keys with their values, except the two that describe the types.
fn metadata(model: &JoinedGguf) -> Vec<(String, Vec<u8>)> {
    let types = ["general.file_type", "general.quantization_version"];
    let kept = model.header.raw_values().filter(|(key, _)| !types.contains(key));
    kept.map(|(key, range)| (key.to_owned(), model.bytes[range].to_vec())).collect()
}

fn numbers(model: &JoinedGguf, name: &str) -> Vec<f32> {
    let entry = model.header.tensor(name).unwrap();
    let mut bytes = vec![0; entry.bytes.len()];
    model.files[entry.file].read_at(entry.bytes.start as u64, &mut bytes).unwrap();
    let mut numbers = vec![0.0; entry.dims.iter().product::<u64>() as usize];
    decode_row(entry.dtype, &bytes, &mut numbers);
    numbers
}

/// The limit of the root mean square error, as a part of the numbers' own root mean square.
fn error_max(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 0.001,
        Dtype::BF16 => 0.004,
        Dtype::Q8_0 => 0.01,
        Dtype::Q6K => 0.03,
        Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q5K => 0.06,
        Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q4K | Dtype::IQ4NL => 0.12,
        Dtype::Q3K => 0.2,
        Dtype::Q2K => 0.4,
        other => panic!("no recipe writes {other:?}"),
    }
}

fn check(input: &Path, output: &Path, recipe: Recipe) {
    let what = format!("{}, {}", input.display(), recipe.name());
    let report = quantize(input, output, recipe).unwrap();
    let (before, after) = (JoinedGguf::open(input).unwrap(), JoinedGguf::open(output).unwrap());
    assert_eq!(metadata(&before), metadata(&after), "{what}");
    assert_eq!(after.header.unsigned("general.quantization_version").unwrap(), Some(2));
    assert_eq!(report.bytes_after, std::fs::metadata(output).unwrap().len());
    assert_eq!(after.header.tensors().count(), before.header.tensors().count());
    for (name, entry) in before.header.tensors() {
        let written = after.header.tensor(name).unwrap();
        assert_eq!(written.dims, entry.dims, "{what}, {name}");
        let (old, new) = (numbers(&before, name), numbers(&after, name));
        if written.dtype == entry.dtype {
            assert!(old == new, "{what}, {name}");
            continue;
        }
        let sum = |all: &mut dyn Iterator<Item = f32>| all.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let error = (sum(&mut old.iter().zip(&new).map(|(a, b)| a - b)) / sum(&mut old.iter().copied())).sqrt();
        assert!(error <= error_max(written.dtype), "{what}, {name}: {error:.4} as {:?}", written.dtype);
    }
    let (old, new) = (Checkpoint::open(input).unwrap(), Checkpoint::open(output).unwrap());
    let mut spec = old.spec().clone();
    spec.name.clone_from(&new.spec().name);
    assert_eq!(spec, *new.spec(), "{what}");
    assert_eq!(old.tokenizer().unwrap().n_vocab(), new.tokenizer().unwrap().n_vocab());
}

#[test]
fn every_model_is_written_with_every_recipe() {
    let folder = TestFolder::new("every");
    let models = models();
    assert!(models.len() > 30, "{models:?}");
    for (i, model) in models.iter().enumerate() {
        // Each model with four recipes, and all recipes over the models.
        for j in 0..4 {
            check(model, &folder.0.join("out.gguf"), Recipe::ALL[(i + 4 * j) % Recipe::ALL.len()]);
        }
    }
    let left: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["out.gguf"]);
}

#[test]
fn a_model_that_is_written_twice_is_the_same_file() {
    let folder = TestFolder::new("twice");
    let model = reference().join("gguf-llama3/model.gguf");
    let (first, second, third) = (folder.0.join("1.gguf"), folder.0.join("2.gguf"), folder.0.join("3.gguf"));
    quantize(&model, &first, Recipe::Q4KM).unwrap();
    quantize(&model, &second, Recipe::Q4KM).unwrap();
    let bytes = std::fs::read(&first).unwrap();
    assert!(bytes == std::fs::read(&second).unwrap());
    // Types that are already right are not rounded again.
    quantize(&first, &third, Recipe::Q4KM).unwrap();
    assert!(bytes == std::fs::read(&third).unwrap());
}

#[test]
fn progress_reaches_the_whole_model() {
    let folder = TestFolder::new("progress");
    let model = reference().join("gguf-llama3/model.gguf");
    let (mut last, mut n_tensors, mut tensor) = (0, 0, String::new());
    let report = quantize::file(&model, &folder.0.join("out.gguf"), Recipe::Q8_0, &mut |progress| {
        assert!(progress.done > last && progress.done <= progress.total);
        last = progress.done;
        if progress.tensor != tensor {
            n_tensors += 1;
            tensor = progress.tensor.to_owned();
        }
    });
    let counted: usize = report.unwrap().types.iter().map(|(_, n)| n).sum();
    assert_eq!(n_tensors, counted);
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_no_file() {
    let folder = TestFolder::new("refused");
    let model = folder.0.join("model.gguf");
    std::fs::copy(reference().join("gguf-llama3/model.gguf"), &model).unwrap();
    let before = std::fs::read(&model).unwrap();
    assert!(matches!(quantize(&model, &model, Recipe::Q8_0), Err(Error::SameFile { .. })));
    let error = quantize(&folder.0, &folder.0.join("out.gguf"), Recipe::Q8_0).unwrap_err();
    assert!(error.to_string().contains("convert_hf_to_gguf.py"), "{error}");
    let nowhere = quantize(&model, &folder.0.join("no/folder/out.gguf"), Recipe::Q8_0);
    assert!(matches!(nowhere, Err(Error::Write { .. })));
    // A number that is none.
    let entry = JoinedGguf::open(&model).unwrap().header.tensor("blk.0.attn_q.weight").unwrap().clone();
    let mut damaged = before.clone();
    damaged[entry.bytes.start..][..4].fill(0xff);
    std::fs::write(folder.0.join("damaged.gguf"), damaged).unwrap();
    let recipe = if entry.dtype == Dtype::Q8_0 { Recipe::Q4KM } else { Recipe::Q8_0 };
    let error = quantize(&folder.0.join("damaged.gguf"), &folder.0.join("out.gguf"), recipe).unwrap_err();
    let Error::Row { tensor, row: 0, source } = error else { panic!("{error}") };
    assert!(tensor == "blk.0.attn_q.weight" && source.to_string().contains("not finite"), "{tensor}: {source}");
    assert!(std::fs::read(&model).unwrap() == before && !folder.0.join("out.gguf").exists());
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2);
}
