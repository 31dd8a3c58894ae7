//! Tiny random encoders, embedders and classifiers against transformers' results in float64, and against themselves
//! bit for bit: alone, beside other texts, with any instructions, on one rank and on two.

use crate::reference::{cases, tokens};
use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::{Batch, BlockTables, Device, Memory, PassSlice};
use checkpoint::{Checkpoint, Pooling};
use collective::Ranks;
use model::{KvCache, Model, PassLimits};
use serde_json::Value;
use std::path::PathBuf;
use types::cache::blocks_for;
use types::{Activations, BlockId, KvDtype, Token, Want};

const ENCODERS: [&str; 12] = [
    "bert",
    "bert-cls",
    "bert-rank",
    "roberta",
    "xlm-roberta-rank",
    "mpnet",
    "nomic-bert",
    "modern-bert",
    "modern-bert-class",
    "gemma-embedding",
    "qwen3-embedding",
    "qwen3-class",
];
const ROWS_MAX: usize = 1024;
const TEXTS_MAX: usize = 8;

/// A text, and where its second part begins.
type Text = (Vec<Token>, u32);

struct Encoder {
    device: Cpu,
    ranks: Ranks<Cpu>,
    model: Model<Cpu>,
    kv: KvCache<Cpu>,
    kind: Pooling,
    hidden: usize,
}

impl Encoder {
    fn new(name: &str, isa: Isa, threads: usize) -> Encoder {
        let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../tests/reference", name].iter().collect();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let device = Cpu::new(CpuConfig { threads, activations: Activations::F32, isa, spin: true }).unwrap();
        let spec = checkpoint.spec();
        let ranks = Ranks::solo(spec.n_layers);
        let limits = PassLimits { rows_max: ROWS_MAX, outputs_max: TEXTS_MAX, context: spec.context };
        let model = Model::load(&checkpoint, &device, ranks.part(), limits).unwrap();
        let pools = vec![(ROWS_MAX / 16 + TEXTS_MAX) as u32; spec.cache_groups().groups().len()];
        let mut specs = model::kv_specs(spec, ranks.part(), device.class(), KvDtype::F32, &pools);
        specs.extend(model::encoder_kv(spec, ranks.part(), device.class(), [ROWS_MAX, TEXTS_MAX]));
        let kv = KvCache::new(&device, &specs).unwrap();
        let (kind, hidden) = (spec.pooling.kind, spec.hidden as usize);
        Encoder { device, ranks, model, kv, kind, hidden }
    }

    /// The vector of each text, computed in one pass.
    fn vectors(&mut self, texts: &[Text]) -> Vec<Vec<f32>> {
        let mut batch = Batch { tables: vec![BlockTables::default()], ..Batch::default() };
        let mut n_blocks = 0;
        for (tokens, second) in texts {
            let (first, n) = (batch.n_rows() as u32, tokens.len() as u32);
            batch.tokens.extend(tokens);
            batch.positions.extend(0..n);
            batch.types.extend((0..n).map(|position| u32::from(*second > 0 && position >= *second)));
            batch.slices.push(PassSlice::new(first..first + n, 0, Want::Pool));
            batch.tables[0].blocks.extend((n_blocks..n_blocks + blocks_for(n)).map(BlockId));
            n_blocks += blocks_for(n);
            batch.tables[0].bounds.push(n_blocks);
        }
        let pass = batch.pass();
        self.model.forward(&self.device, &mut self.ranks, &pass, &mut self.kv).unwrap();
        self.device.take_failure().unwrap();
        let mut states = vec![0.0; batch.n_rows() * self.hidden];
        self.device.read(self.model.hidden().unwrap(), 0..batch.n_rows(), &mut states);
        let vector = |slice: &PassSlice| {
            let rows = slice.rows.start as usize * self.hidden..slice.rows.end as usize * self.hidden;
            let mut vector = pooled(self.kind, &states[rows], self.hidden);
            self.model.finish_pooled(&self.device, &mut vector);
            vector
        };
        batch.slices.iter().map(vector).collect()
    }
}

fn pooled(kind: Pooling, states: &[f32], hidden: usize) -> Vec<f32> {
    let rows = states.chunks_exact(hidden);
    let n = rows.len() as f32;
    match kind {
        Pooling::First => rows.clone().next().unwrap().to_vec(),
        Pooling::Last => rows.clone().next_back().unwrap().to_vec(),
        Pooling::Mean => {
            let sum = rows.fold(vec![0.0; hidden], |sum, row| sum.iter().zip(row).map(|(a, b)| a + b).collect());
            sum.iter().map(|sum| sum / n).collect()
        }
        Pooling::Max => unreachable!("no checkpoint pools like that"),
    }
}

fn text(case: &Value) -> Text {
    (tokens(&case["prompt"]), case["second"].as_u64().unwrap() as u32)
}

fn bits(vectors: &[Vec<f32>]) -> Vec<Vec<u32>> {
    vectors.iter().map(|vector| vector.iter().map(|number| number.to_bits()).collect()).collect()
}

#[test]
fn vectors_are_those_of_transformers() {
    for name in ENCODERS {
        let mut encoder = Encoder::new(name, Isa::detect(), 1);
        let mut furthest = 0.0f64;
        for case in cases(name) {
            let vector = encoder.vectors(&[text(&case)]).remove(0);
            let expected: Vec<f64> = case["vector"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
            assert_eq!(vector.len(), expected.len(), "{name}, {}", case["name"]);
            let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
            let apart = vector.iter().zip(&expected).map(|(got, expected)| (f64::from(*got) - expected).abs());
            let apart = apart.fold(0.0, f64::max) / largest;
            assert!(apart < 2e-5, "{name}, {}: {apart:e} of the largest number", case["name"]);
            furthest = furthest.max(apart);
        }
        println!("{name}: at most {furthest:.1e} of the largest number");
    }
}

#[test]
fn other_texts_threads_and_instructions_change_no_bit() {
    for name in ENCODERS {
        let texts: Vec<Text> = cases(name).iter().map(text).collect();
        let mut encoder = Encoder::new(name, Isa::detect(), 1);
        let alone: Vec<Vec<f32>> = texts.iter().flat_map(|of| encoder.vectors(std::slice::from_ref(of))).collect();
        let mut turned = texts.clone();
        turned.reverse();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for threads in [1, 3] {
                let mut encoder = Encoder::new(name, isa, threads);
                let mut got = encoder.vectors(&turned);
                got.reverse();
                assert_eq!(bits(&got), bits(&alone), "{name}, {isa:?}, {threads} threads");
            }
        }
    }
}
