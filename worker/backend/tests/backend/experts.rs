//! Mixtures of experts against a dense reference: in any batch, and cut over ranks, bit for bit.

use crate::numbers::{File, Rng, all, assert_bits, assert_close, cpu, cpus, filled};
use backend::cpu::{Cpu, Isa, Routes};
use backend::{Expert, Experts, Memory, Routing};
use std::ops::Range;
use types::leaves::{aligned_runs, sum_runs};
use types::{Activations, Dtype};

const HIDDEN: usize = 64;
const INNER: usize = 32;

struct Case {
    routing: Routing,
    n_rows: usize,
    x: Vec<f32>,
    scores: Vec<f32>,
    gate_up: Vec<File>,
    down: Vec<File>,
}

impl Case {
    fn new(rng: &mut Rng, dtype: Dtype, (n_experts, n_used): (usize, usize), n_rows: usize) -> Case {
        Case {
            routing: Routing { n_experts, n_used, normalized: true },
            n_rows,
            x: rng.floats(n_rows * HIDDEN),
            scores: rng.floats(n_rows * n_experts).iter().map(|x| x * 4.0).collect(),
            gate_up: (0..n_experts).map(|_| File::random(rng, dtype, 2 * INNER, HIDDEN)).collect(),
            down: (0..n_experts).map(|_| File::random(rng, dtype, HIDDEN, INNER)).collect(),
        }
    }

    fn routes(&self, cpu: &Cpu) -> Routes {
        let mut routes = cpu.routes(self.n_rows, HIDDEN, INNER, self.routing).unwrap();
        cpu.route(&filled(cpu, self.n_rows, &self.scores), self.n_rows, &mut routes);
        routes
    }

    /// The planes of a rank that owns some of the experts.
    fn planes(&self, cpu: &Cpu, owned: Range<usize>) -> (Vec<Range<u32>>, Vec<f32>) {
        let expert = |e: usize| Expert {
            gate_up: cpu.matrix(&[self.gate_up[e].stored()]).unwrap(),
            down: cpu.matrix(&[self.down[e].stored()]).unwrap(),
        };
        let runs = aligned_runs(owned.start as u32..owned.end as u32, self.routing.n_experts as u32);
        let experts: Vec<_> = owned.map(expert).collect();
        let mut out = cpu.buffer(runs.len() * self.n_rows, HIDDEN).unwrap();
        let x = filled(cpu, self.n_rows, &self.x);
        cpu.experts(&x, &experts, &runs, self.n_rows, &mut self.routes(cpu), &mut out);
        let planes = all(cpu, &out, runs.len() * self.n_rows);
        (runs, planes)
    }

    fn whole(&self, cpu: &Cpu) -> Vec<f32> {
        self.planes(cpu, 0..self.routing.n_experts).1
    }

    /// Each row's weighted sum over its experts, in f64.
    fn dense(&self) -> Vec<f64> {
        let rows = self.x.chunks(HIDDEN).zip(self.scores.chunks(self.routing.n_experts));
        rows.flat_map(|(x, scores)| self.dense_row(x, scores)).collect()
    }

    fn dense_row(&self, x: &[f32], scores: &[f32]) -> Vec<f64> {
        let mut ids: Vec<usize> = (0..scores.len()).collect();
        ids.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        ids.truncate(self.routing.n_used);
        let weight = |id: usize| f64::from(scores[id]).exp();
        let of: Vec<usize> = if self.routing.normalized { ids.clone() } else { (0..scores.len()).collect() };
        let total: f64 = of.iter().map(|id| weight(*id)).sum();
        let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let mut out = vec![0.0; HIDDEN];
        for id in ids {
            let gate_up = product(&self.gate_up[id], &x);
            let (gate, up) = gate_up.split_at(INNER);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            let y = product(&self.down[id], &inner);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += weight(id) / total * y);
        }
        out
    }
}

fn product(file: &File, x: &[f64]) -> Vec<f64> {
    let row = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    file.values.chunks(file.k).map(row).collect()
}

#[test]
fn a_mixture_is_the_sum_of_its_chosen_experts() {
    let mut rng = Rng(1);
    for (shape, normalized) in [((4, 1), true), ((4, 2), false), ((7, 3), true), ((32, 8), false), ((3, 3), true)] {
        let mut case = Case::new(&mut rng, Dtype::F32, shape, 13);
        case.routing.normalized = normalized;
        let cpus = cpus(Activations::F32);
        let expected = case.whole(&cpus[0].1);
        assert_close(&format!("{shape:?}"), &expected, &case.dense(), 1e-3);
        cpus[1..].iter().for_each(|(path, cpu)| assert_bits(path, &case.whole(cpu), &expected));
    }
}

#[test]
fn a_row_does_not_know_its_neighbours() {
    let cpu = cpu(Isa::detect(), 2, Activations::Int8);
    for dtype in [Dtype::Q8_0, Dtype::BF16] {
        let case = Case::new(&mut Rng(2), dtype, (6, 2), 29);
        let together = case.whole(&cpu);
        for row in 0..case.n_rows {
            let alone = Case {
                n_rows: 1,
                x: case.x[row * HIDDEN..][..HIDDEN].to_vec(),
                scores: case.scores[row * 6..][..6].to_vec(),
                gate_up: case.gate_up.iter().map(copy).collect(),
                down: case.down.iter().map(copy).collect(),
                ..case
            };
            assert_bits(&format!("{dtype:?}, row {row}"), &alone.whole(&cpu), &together[row * HIDDEN..][..HIDDEN]);
        }
    }
}

fn copy(file: &File) -> File {
    let (bytes, scales, values) = (file.bytes.clone(), file.scales.clone(), file.values.clone());
    File { dtype: file.dtype, rows: file.rows, k: file.k, bytes, scales, values }
}

#[test]
fn ranks_that_share_the_experts_add_up_to_the_same_bits() {
    let mut rng = Rng(3);
    for (n_experts, n_used) in [(7, 3), (8, 2), (13, 5), (2, 1)] {
        let case = Case::new(&mut rng, Dtype::Q4_1, (n_experts, n_used), 9);
        let cpu = cpu(Isa::detect(), 1, Activations::F32);
        let whole = case.whole(&cpu);
        for cuts in [[0, 1], [1, 1], [n_experts / 2, n_experts], [n_experts / 3, n_experts - 1]] {
            let ranks = [0..cuts[0], cuts[0]..cuts[1], cuts[1]..n_experts].map(|owned| case.planes(&cpu, owned));
            let sum = |i: usize| {
                let of = |(runs, planes): &(Vec<Range<u32>>, Vec<f32>)| {
                    let plane = |(p, run): (usize, &Range<u32>)| (run.clone(), planes[p * 9 * HIDDEN + i]);
                    runs.iter().enumerate().map(plane).collect::<Vec<_>>()
                };
                sum_runs(&ranks.iter().flat_map(of).collect::<Vec<_>>())
            };
            let got: Vec<f32> = (0..9 * HIDDEN).map(sum).collect();
            assert_bits(&format!("{n_experts} experts cut at {cuts:?}"), &got, &whole);
        }
    }
}

#[test]
fn ties_go_to_the_lower_expert_and_no_number_to_nobody_first() {
    let cpu = cpu(Isa::detect(), 1, Activations::F32);
    let check = |scores: &[f32], expect: &[u32]| {
        let routing = Routing { n_experts: scores.len(), n_used: 2, normalized: true };
        let mut routes = cpu.routes(1, 32, 32, routing).unwrap();
        cpu.route(&filled(&cpu, 1, scores), 1, &mut routes);
        assert_eq!(routes.of(0).0, expect, "{scores:?}");
    };
    check(&[1.0, 2.0, 2.0, 2.0], &[1, 2]);
    check(&[0.0, 0.0, 0.0], &[0, 1]);
    check(&[-0.0, 0.0, 5.0], &[0, 2]);
    check(&[f32::NAN, 1.0, f32::NAN, 0.0], &[1, 3]);
    check(&[f32::NAN; 3], &[0, 1]);
    check(&[f32::NEG_INFINITY; 3], &[0, 1]);
}

#[test]
fn routes_that_cannot_be_are_refused() {
    let cpu = cpu(Isa::detect(), 1, Activations::F32);
    let routes = |n_experts, n_used| cpu.routes(2, 32, 32, Routing { n_experts, n_used, normalized: true });
    assert!(routes(4, 4).is_ok());
    assert!([(4, 0), (4, 5), (0, 0)].iter().all(|(n, used)| routes(*n, *used).is_err()));
}
