//! Measures how long a rank takes to load a whole model on the CPU, step by step, and the peak of its memory.
//!
//! With a file, matrices come from it; if it is absent, it is written.
//!
//!     cargo run --release -p model --example load_time -- MODEL [THREADS [FILE]]

use backend::cpu::{Cpu, CpuConfig, Isa};
use checkpoint::Checkpoint;
use collective::{CancelFlag, Ranks};
use model::{LoadSource, Model, PackedKey, PackedMatrices, PassLimits};
use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::time::Instant;
use types::Activations;

/// A file belongs to one model; give it no other.
const KEY: PackedKey = [0; 32];

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (path, threads, file) = match &arguments[..] {
        [path] => (path, 2, None),
        [path, threads] => (path, threads.parse()?, None),
        [path, threads, file] => (path, threads.parse()?, Some(Path::new(file))),
        _ => return Err("MODEL [THREADS [FILE]]".into()),
    };
    let begun = Instant::now();
    let step = |what: &str, begun: Instant| println!("{what}: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    let checkpoint = Checkpoint::open(Path::new(path))?;
    step("open the checkpoint", begun);
    let at = Instant::now();
    checkpoint.fingerprint()?;
    step("fingerprint", at);
    let at = Instant::now();
    let device = Cpu::new(CpuConfig { threads, activations: Activations::Int8, isa: Isa::detect(), spin: true })?;
    step("open the device", at);
    let at = Instant::now();
    let spec = checkpoint.spec();
    let limits = PassLimits { rows_max: 512, outputs_max: 16, context: 2048.min(spec.context) };
    let ranks: Ranks<Cpu> = Ranks::solo(spec.n_layers);
    let packed = file.map(|file| PackedMatrices::open(file, KEY).unwrap_or_else(|_| PackedMatrices::new(KEY)));
    let source = LoadSource { cancel: &CancelFlag::default(), packed: packed.as_ref() };
    let model = Model::load_from(&checkpoint, &device, ranks.part(), limits, source)?;
    step("load", at);
    step("all", begun);
    println!("{} bytes read, {} of packed weights; {}", model.read_bytes(), model.weight_bytes(), peak()?);
    if let (Some(file), Some(packed)) = (file, packed) {
        let at = Instant::now();
        println!("{:?} matrices from the file and packed", packed.counts());
        let image = packed.into_image();
        image.map(|image| image.write(&mut File::create(file)?, &|| true)).transpose()?;
        step("write", at);
    }
    Ok(())
}

/// The most memory that this process had at any time.
fn peak() -> Result<String> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    Ok(status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("VmHWM unknown").to_owned())
}
