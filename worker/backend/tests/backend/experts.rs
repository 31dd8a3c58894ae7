//! Mixtures of experts against a dense reference: in any batch, and cut over ranks, bit for bit.

use crate::numbers::{File, Rng, all, assert_bits, assert_close, cpu, cpus, filled};
use backend::cpu::{Cpu, Isa, Routes};
use backend::{Clamp, ElementOp, Expert, ExpertStack, Experts, Gate, Memory, MlpActivation, Routing, Scoring, Weights};
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
    activation: MlpActivation,
    /// Of all experts: [n_experts, 2 * INNER] and [n_experts, HIDDEN].
    biases: Option<[Vec<f32>; 2]>,
}

impl Case {
    fn new(rng: &mut Rng, dtype: Dtype, (n_experts, n_used): (usize, usize), n_rows: usize) -> Case {
        Case {
            routing: Routing { n_experts, n_used, normalized: true, scoring: Scoring::Softmax },
            n_rows,
            x: rng.floats(n_rows * HIDDEN),
            scores: rng.floats(n_rows * n_experts).iter().map(|x| x * 4.0).collect(),
            gate_up: (0..n_experts).map(|_| File::random(rng, dtype, 2 * INNER, HIDDEN)).collect(),
            down: (0..n_experts).map(|_| File::random(rng, dtype, HIDDEN, INNER)).collect(),
            activation: MlpActivation::Gated(Gate::Silu),
            biases: None,
        }
    }

    fn routes(&self, cpu: &Cpu) -> Routes {
        let mut routes = cpu.routes(self.n_rows, HIDDEN, INNER, self.routing).unwrap();
        cpu.route(&filled(cpu, self.n_rows, &self.scores), None, self.n_rows, &mut routes);
        routes
    }

    /// The planes of a rank that owns some of the experts.
    fn planes(&self, cpu: &Cpu, owned: Range<usize>) -> (Vec<Range<u32>>, Vec<f32>) {
        let expert = |e: usize| Expert {
            gate_up: cpu.matrix(&[self.gate_up[e].stored()]).unwrap(),
            down: cpu.matrix(&[self.down[e].stored()]).unwrap(),
        };
        let runs = aligned_runs(owned.start as u32..owned.end as u32, self.routing.n_experts as u32);
        let stack = self.stack(cpu, owned.clone(), owned.map(expert).collect());
        let mut out = cpu.buffer(runs.len() * self.n_rows, HIDDEN).unwrap();
        let x = filled(cpu, self.n_rows, &self.x);
        cpu.apply_experts(&x, &stack, &runs, self.n_rows, &mut self.routes(cpu), &mut out);
        let planes = all(cpu, &out, runs.len() * self.n_rows);
        (runs, planes)
    }

    fn stack(&self, cpu: &Cpu, owned: Range<usize>, all: Vec<Expert<Cpu>>) -> ExpertStack<Cpu> {
        let of = |biases: &Vec<f32>, n: usize| cpu.vector(&biases[owned.start * n..owned.end * n]).unwrap();
        let biases = self.biases.as_ref().map(|[gate_up, down]| [of(gate_up, 2 * INNER), of(down, HIDDEN)]);
        ExpertStack { all, activation: self.activation, biases }
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
            let bias = |which: usize, i: usize, n: usize| {
                self.biases.as_ref().map_or(0.0, |biases| f64::from(biases[which][id * n + i]))
            };
            let gate_up = product(&self.gate_up[id], &x);
            let gate_up: Vec<f64> = gate_up.iter().enumerate().map(|(i, x)| x + bias(0, i, 2 * INNER)).collect();
            let (gate, up) = gate_up.split_at(gate_up.len() - INNER);
            let gate = if gate.is_empty() { up } else { gate };
            let gated = |(gate, up): (&f64, &f64)| match self.activation {
                MlpActivation::Gated(Gate::Silu) => gate / (1.0 + (-gate).exp()) * up,
                MlpActivation::Plain(ElementOp::ReluSquared) => up.max(0.0).powi(2),
                MlpActivation::Gated(Gate::Clamped(Clamp { alpha, limit })) => {
                    let (gate, limit) = (gate.min(f64::from(limit)), f64::from(limit));
                    (up.clamp(-limit, limit) + 1.0) * gate / (1.0 + (-gate * f64::from(alpha)).exp())
                }
                other => unreachable!("no case has {other:?}"),
            };
            let inner: Vec<f64> = gate.iter().zip(up).map(gated).collect();
            let y = product(&self.down[id], &inner);
            let y = y.iter().enumerate().map(|(i, y)| y + bias(1, i, HIDDEN));
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
fn experts_without_a_gate_square_what_is_positive() {
    let mut rng = Rng(22);
    let mut case = Case::new(&mut rng, Dtype::F32, (5, 2), 13);
    case.activation = MlpActivation::Plain(ElementOp::ReluSquared);
    case.gate_up = (0..5).map(|_| File::random(&mut rng, Dtype::F32, INNER, HIDDEN)).collect();
    let cpus = cpus(Activations::F32);
    let expected = case.whole(&cpus[0].1);
    assert_close("squared", &expected, &case.dense(), 1e-3);
    cpus[1..].iter().for_each(|(path, cpu)| assert_bits(path, &case.whole(cpu), &expected));
}

#[test]
fn clamps_and_biases_are_each_experts_own() {
    let mut rng = Rng(21);
    let mut case = Case::new(&mut rng, Dtype::F32, (5, 2), 13);
    case.activation = MlpActivation::Gated(Gate::Clamped(Clamp { alpha: 1.702, limit: 0.4 }));
    case.biases = Some([rng.floats(5 * 2 * INNER), rng.floats(5 * HIDDEN)]);
    let cpus = cpus(Activations::F32);
    let expected = case.whole(&cpus[0].1);
    assert_close("clamped, with biases", &expected, &case.dense(), 1e-3);
    cpus[1..].iter().for_each(|(path, cpu)| assert_bits(path, &case.whole(cpu), &expected));
    // Two ranks have what one has.
    let ranks = [case.planes(&cpus[0].1, 0..3), case.planes(&cpus[0].1, 3..5)];
    for i in 0..13 * HIDDEN {
        let of = |(runs, planes): &(Vec<Range<u32>>, Vec<f32>)| {
            let plane = |(p, run): (usize, &Range<u32>)| (run.clone(), planes[p * 13 * HIDDEN + i]);
            runs.iter().enumerate().map(plane).collect::<Vec<_>>()
        };
        let sum = sum_runs(&ranks.iter().flat_map(of).collect::<Vec<_>>());
        assert_eq!(sum.to_bits(), expected[i].to_bits());
    }
}

/// Groups, their two best, the correction that only the choice sees, and the factor, by the letter in f64.
#[test]
fn sigmoids_are_chosen_within_their_groups() {
    let mut rng = Rng(22);
    for (n_experts, n_used, n_groups, of_groups, normalized) in
        [(6, 3, 3, 2, true), (8, 2, 1, 1, false), (16, 4, 4, 2, true), (12, 5, 2, 2, false)]
    {
        let scoring = Scoring::Sigmoid { n_groups, n_used: of_groups, factor: 1.7 };
        let routing = Routing { n_experts, n_used, normalized, scoring };
        let scores: Vec<f32> = rng.floats(40 * n_experts).iter().map(|x| x * 3.0).collect();
        let correction: Vec<f32> = rng.floats(n_experts).iter().map(|x| x * 0.5).collect();
        for (path, cpu) in cpus(Activations::F32) {
            let mut routes = cpu.routes(40, 32, 32, routing).unwrap();
            cpu.route(&filled(&cpu, 40, &scores), Some(&cpu.vector(&correction).unwrap()), 40, &mut routes);
            for (row, scores) in scores.chunks(n_experts).enumerate() {
                let (ids, weights) = chosen_by_letter(&routing, scores, &correction);
                assert_eq!(routes.choices_of_row(row).0, ids, "{path}, row {row}");
                assert_close(&path, routes.choices_of_row(row).1, &weights, 1e-5);
            }
        }
    }
}

fn chosen_by_letter(routing: &Routing, scores: &[f32], correction: &[f32]) -> (Vec<u32>, Vec<f64>) {
    let Scoring::Sigmoid { n_groups, n_used, factor } = routing.scoring else { panic!("sigmoids") };
    let sigmoids: Vec<f64> = scores.iter().map(|x| 1.0 / (1.0 + (-f64::from(*x)).exp())).collect();
    let seen: Vec<f64> = sigmoids.iter().zip(correction).map(|(x, by)| x + f64::from(*by)).collect();
    let size = scores.len() / n_groups;
    let best = |mut of: Vec<usize>, score: &dyn Fn(usize) -> f64, n: usize| {
        of.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
        of.truncate(n);
        of
    };
    let of_group = |group: usize| (group * size..(group + 1) * size).collect::<Vec<_>>();
    let group_score = |group: usize| best(of_group(group), &|i| seen[i], 2).into_iter().map(|i| seen[i]).sum::<f64>();
    let groups = best((0..n_groups).collect(), &group_score, n_used);
    let mut ids = best(groups.into_iter().flat_map(of_group).collect(), &|i| seen[i], routing.n_used);
    ids.sort_unstable();
    let total: f64 = if routing.normalized { ids.iter().map(|i| sigmoids[*i]).sum() } else { 1.0 };
    let weights = ids.iter().map(|i| sigmoids[*i] / total * f64::from(factor)).collect();
    (ids.into_iter().map(|i| i as u32).collect(), weights)
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
                biases: None,
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
fn ties_go_to_lower_expert_and_nan_last() {
    let cpu = cpu(Isa::detect(), 1, Activations::F32);
    let check = |scores: &[f32], expect: &[u32]| {
        let routing = Routing { n_experts: scores.len(), n_used: 2, normalized: true, scoring: Scoring::Softmax };
        let mut routes = cpu.routes(1, 32, 32, routing).unwrap();
        cpu.route(&filled(&cpu, 1, scores), None, 1, &mut routes);
        assert_eq!(routes.choices_of_row(0).0, expect, "{scores:?}");
    };
    check(&[1.0, 2.0, 2.0, 2.0], &[1, 2]);
    check(&[0.0, 0.0, 0.0], &[0, 1]);
    check(&[-0.0, 0.0, 5.0], &[0, 2]);
    check(&[f32::NAN, 1.0, f32::NAN, 0.0], &[1, 3]);
    check(&[f32::NAN; 3], &[0, 1]);
    check(&[f32::NEG_INFINITY; 3], &[0, 1]);
}

#[test]
fn factors_of_experts_scale_weights_and_choose_nothing() {
    let cpu = cpu(Isa::detect(), 1, Activations::F32);
    let (mut rng, factors) = (Rng(77), [4.0, 0.5, -2.0, 0.0, 1.5]);
    let case = Case::new(&mut rng, Dtype::F32, (factors.len(), 2), 20);
    let (plain, mut scaled) = (case.routes(&cpu), case.routes(&cpu));
    cpu.scale_choices(&cpu.vector(&factors).unwrap(), &mut scaled);
    let mut chosen = Vec::new();
    for row in 0..case.n_rows {
        let ((ids, weights), (same, found)) = (plain.choices_of_row(row), scaled.choices_of_row(row));
        let expected: Vec<f32> = ids.iter().zip(weights).map(|(id, weight)| weight * factors[*id as usize]).collect();
        assert_eq!(ids, same, "row {row}");
        assert_bits(&format!("row {row}"), found, &expected);
        chosen.extend(ids);
    }
    assert!((0..5).all(|expert| chosen.contains(&expert)), "{chosen:?}");
}

#[test]
fn routes_that_cannot_be_are_refused() {
    let cpu = cpu(Isa::detect(), 1, Activations::F32);
    let routes = |n_experts, n_used| {
        cpu.routes(2, 32, 32, Routing { n_experts, n_used, normalized: true, scoring: Scoring::Softmax })
    };
    assert!(routes(4, 4).is_ok());
    assert!([(4, 0), (4, 5), (0, 0)].iter().all(|(n, used)| routes(*n, *used).is_err()));
}
