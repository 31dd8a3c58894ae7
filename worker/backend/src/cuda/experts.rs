//! Mixtures of experts: the device decides which experts are chosen and the host never learns it. So one launch covers
//! all experts of a rank, and each expert finds its rows.

use super::buffer::{Buffer, Vector};
use super::device::Cuda;
use super::driver::{DeviceMemory, LaunchShape};
use super::kernels::{arguments, by_row};
use super::linear::tiles_per_block;
use super::lock::lock;
use super::recurrence::NO_RECURRENCE;
use super::table::Kernel;
use super::weights::{Matrix, WeightKind};
use crate::{Error, ExpertStack, Experts, Memory, MlpActivation, Pointwise, Result, Routing, Scoring};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

/// The kernels' limit.
const EXPERTS_MAX: usize = 1024;
const USED_MAX: usize = 32;
/// The limit of layers whose experts share the memory of one `Routes`.
const LAYERS_MAX: usize = 512;
/// For the bounds of runs of experts: each rank has a few, the same in all layers.
const RUNS_BYTES: usize = 4 << 10;
const WORD: usize = 4;
const ADDRESS: usize = 8;
/// The rows of a block of the grouped kernels.
const ROWS: usize = 16;

/// The chosen experts of a pass, and the buffers to compute with them.
pub struct Routes {
    routing: Routing,
    n_rows: usize,
    rows_max: usize,
    chosen: DeviceMemory,  // [rows_max, n_used]
    weights: DeviceMemory, // [rows_max, n_used]
    starts: DeviceMemory,  // [n_experts + 1]
    order: DeviceMemory,   // [rows_max * n_used]
    place: DeviceMemory,   // [rows_max * n_used]
    gate_up: Buffer,       // [rows_max * n_used, 2 * inner]
    inner: Buffer,         // [rows_max * n_used, inner]
    y: Buffer,             // [rows_max * n_used, hidden]
    addresses: Mutex<ExpertAddresses>,
}

/// The addresses of the weights of each layer's experts, in the kernels' form.
struct ExpertAddresses {
    bytes: DeviceMemory,
    end: usize,
    /// By the address of the digits of a layer's first matrix.
    known: BTreeMap<u64, (u64, u64)>,
    /// Bounds of runs, and their addresses.
    runs: Vec<(Vec<u32>, u64)>,
}

impl Routes {
    pub(super) fn new(cuda: &Cuda, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Routes> {
        let Routing { n_experts, n_used, .. } = routing;
        let too_big = || Error::Shape(format!("{n_used} of {n_experts} experts for {rows_max} rows on CUDA"));
        cuda.forget_graphs();
        let n_choices = rows_max.checked_mul(n_used).filter(|n| u32::try_from(*n).is_ok()).ok_or_else(too_big)?;
        if !routing.is_possible() || n_used > USED_MAX || n_experts > EXPERTS_MAX {
            return Err(too_big());
        }
        let words = |n: usize| DeviceMemory::new(&cuda.context, "choices of experts", n * WORD);
        // Two matrices of each expert, each with digits and scales; a stacked one may have two parts.
        let addresses = DeviceMemory::new(
            &cuda.context,
            "addresses of experts",
            LAYERS_MAX * 6 * n_experts * ADDRESS + RUNS_BYTES,
        )?;
        Ok(Routes {
            routing,
            n_rows: 0,
            rows_max,
            chosen: words(n_choices)?,
            weights: words(n_choices)?,
            starts: words(n_experts + 1)?,
            order: words(n_choices)?,
            place: words(n_choices)?,
            gate_up: cuda.buffer(n_choices, 2 * inner)?,
            inner: cuda.buffer(n_choices, inner)?,
            y: cuda.buffer(n_choices, hidden)?,
            addresses: Mutex::new(ExpertAddresses {
                bytes: addresses,
                end: 0,
                known: BTreeMap::new(),
                runs: Vec::new(),
            }),
        })
    }
}

impl ExpertAddresses {
    /// Returns the addresses of the digits and scales of one part of each matrix. They do not move, so they are
    /// uploaded once.
    fn part_addresses(&mut self, cuda: &Cuda, matrices: &[&Matrix], part: usize) -> Result<(u64, u64)> {
        let parts = || matrices.iter().filter_map(|matrix| matrix.parts.get(part));
        let key = parts().next().map_or(0, |part| part.digits.address(0));
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let alike =
            |(a, b): (&Matrix, &Matrix)| a.pieces == b.pieces && a.parts.len() == b.parts.len() && a.n_out == b.n_out;
        let are_alike = matrices.windows(2).all(|pair| alike((pair[0], pair[1])));
        let kinds: Vec<WeightKind> = parts().map(|part| part.kind).collect();
        if !are_alike || kinds.len() != matrices.len() || kinds.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(types::Unsupported("experts of one layer with different formats on CUDA").into());
        }
        let digits: Vec<u64> = parts().map(|part| part.digits.address(0)).collect();
        let scales: Vec<u64> = parts().map(|part| part.scales.address(0)).collect();
        let pointers = (self.put(cuda, bytemuck::cast_slice(&digits))?, self.put(cuda, bytemuck::cast_slice(&scales))?);
        self.known.insert(key, pointers);
        Ok(pointers)
    }

    /// Returns the address of the bounds of these runs, which are also uploaded once.
    fn bounds(&mut self, cuda: &Cuda, runs: &[Range<u32>]) -> Result<u64> {
        let bounds = || runs.iter().flat_map(|run| [run.start, run.end]);
        if let Some((_, at)) = self.runs.iter().find(|(known, _)| known.iter().copied().eq(bounds())) {
            return Ok(*at);
        }
        let words: Vec<u32> = bounds().collect();
        let at = self.put(cuda, bytemuck::cast_slice(&words))?;
        self.runs.push((words, at));
        Ok(at)
    }

    /// Uploads bytes in units of eight.
    fn put(&mut self, cuda: &Cuda, data: &[u8]) -> Result<u64> {
        let (at, n_bytes) = (self.end, data.len());
        if at + n_bytes > self.bytes.len() {
            return Err(Error::OutOfMemory { what: "addresses of experts", n: at + n_bytes });
        }
        cuda.upload_bytes(&self.bytes, at, data)?;
        self.end += n_bytes;
        Ok(self.bytes.address(at))
    }
}

/// One matrix of each expert, and the first expert's number.
struct MatrixPerExpert<'a> {
    all: Vec<&'a Matrix>,
    first: u32,
}

impl Cuda {
    /// Computes each expert's product with the rows that chose it: those in `order`, or the choices themselves.
    fn grouped_product(
        &self,
        of: &MatrixPerExpert<'_>,
        x: u64,
        order: u64,
        n_used: usize,
        routes: &Routes,
        out: &Buffer,
    ) {
        let Some(model) = of.all.first() else { return };
        out.set_bf16(false);
        for (i, part) in model.parts.iter().enumerate() {
            let pointers = lock(&routes.addresses).part_addresses(self, &of.all, i);
            let Some((digits, scales)) = self.keep_error(pointers) else { return };
            let columns = part.n_tiles().div_ceil(tiles_per_block(model.pieces.n)) as u32;
            let depth = of.all.len() as u32;
            let shape = LaunchShape { grid: [columns, routes.n_rows.div_ceil(ROWS) as u32, depth], ..by_row(0) };
            let to = out.address() + part.first_out as u64 * WORD as u64;
            let (ld_out, n_out, n_used) = (model.n_out as u32, part.rows as u32, n_used as u32);
            let (starts, first, pieces) = (routes.starts.address(0), of.first, model.pieces);
            let args = arguments![digits, scales, x, to, ld_out, n_out, starts, first, order, n_used, pieces];
            // SAFETY: the experts have one layout, `starts` and `order` are those of `group`, and out has a row for
            // each choice.
            unsafe { self.launch(Kernel::grouped(part.kind), shape, args) };
        }
    }

    /// Groups the choices by expert, after `route`.
    fn group_by_expert(&self, routes: &Routes) {
        let (chosen, n_choices) = (routes.chosen.address(0), (routes.n_rows * routes.routing.n_used) as u32);
        let (starts, order, place) = (routes.starts.address(0), routes.order.address(0), routes.place.address(0));
        let shape = LaunchShape { grid: [routes.routing.n_experts as u32, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
        // SAFETY: all have room for the choices of `rows_max` rows, or for a start of each expert.
        unsafe { self.launch(Kernel::GroupChoices, shape, arguments![chosen, n_choices, starts, order, place]) };
    }

    /// Each choice's row += the bias of its expert, of those from `first` on. x: [n_choices, cols]
    fn add_biases(&self, biases: &Vector, first: u32, routes: &Routes, x: &Buffer) {
        let n_choices = routes.n_rows * routes.routing.n_used;
        let (cols, n) = (x.cols as u32, (biases.len / x.cols.max(1)) as u32);
        let (x, chosen, order, bias) =
            (x.address(), routes.chosen.address(0), routes.order.address(0), biases.address());
        let args = arguments![x, cols, chosen, order, first, n, bias];
        // SAFETY: x has a row for each choice, and there are n biases of its width.
        unsafe { self.launch(Kernel::AddExpertBias, by_row(n_choices), args) };
    }

    /// One plane for each run of experts. out: [n_runs * n_rows, hidden]
    fn fold(&self, runs: &[Range<u32>], routes: &Routes, out: &Buffer) {
        let bounds = lock(&routes.addresses).bounds(self, runs);
        let Some(runs_at) = self.keep_error(bounds) else { return };
        out.set_bf16(false);
        let (y, place, chosen) = (routes.y.address(), routes.place.address(0), routes.chosen.address(0));
        let (weights, n_used) = (routes.weights.address(0), routes.routing.n_used as u32);
        let (cols, to) = (out.cols as u32, out.address());
        let grid = [cols.div_ceil(256), routes.n_rows as u32, runs.len() as u32];
        let args = arguments![y, place, chosen, weights, n_used, runs_at, cols, to];
        // SAFETY: y has a row for each choice, and out was checked to hold all planes.
        unsafe { self.launch(Kernel::FoldExperts, LaunchShape { grid, ..by_row(0) }, args) };
    }
}

impl Experts for Cuda {
    fn route(&self, scores: &Buffer, correction: Option<&Vector>, n_rows: usize, routes: &mut Routes) {
        let Routing { n_experts, n_used, normalized, scoring } = routes.routing;
        assert!(correction.is_none_or(|of| of.len == n_experts), "a correction for each expert");
        scores.check(n_rows, n_experts);
        assert!(n_rows <= routes.rows_max, "{n_rows} rows of choices in room for {}", routes.rows_max);
        routes.n_rows = n_rows;
        if n_rows == 0 {
            return;
        }
        self.to_f32(scores, n_rows);
        let (scores, chosen, weights) = (scores.address(), routes.chosen.address(0), routes.weights.address(0));
        let (n_experts, n_used, normalized) = (n_experts as u32, n_used as u32, u32::from(normalized));
        let shape = LaunchShape { grid: [n_rows as u32, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
        match scoring {
            Scoring::Softmax => {
                let args = arguments![scores, n_experts, n_used, normalized, chosen, weights];
                // SAFETY: scores has this many rows, and there is room for their choices.
                unsafe { self.launch(Kernel::Route, shape, args) };
            }
            Scoring::Sigmoid { n_groups, n_used: of_groups, factor } => {
                let (correction, n_groups, of_groups) =
                    (correction.map_or(0, Vector::address), n_groups as u32, of_groups as u32);
                let args = arguments![
                    scores, correction, n_experts, n_used, n_groups, of_groups, normalized, factor, chosen, weights
                ];
                // SAFETY: as above, and the correction is as long as a row of scores.
                unsafe { self.launch(Kernel::RouteSigmoid, shape, args) };
            }
        }
        self.group_by_expert(routes);
    }

    fn scale_choices(&self, _: &Vector, _: &mut Routes) {
        unreachable!("`check_attention` refuses norms of values, which all models with factors of experts have");
    }

    fn apply_experts(
        &self,
        x: &Buffer,
        experts: &ExpertStack<Cuda>,
        runs: &[Range<u32>],
        n_rows: usize,
        routes: &mut Routes,
        out: &mut Buffer,
    ) {
        assert_eq!(routes.n_rows, n_rows, "the rows differ from those that were routed");
        out.check(runs.len() * n_rows, x.cols);
        let n_used = routes.routing.n_used;
        if n_rows == 0 || runs.is_empty() {
            return;
        }
        let first = runs[0].start;
        let gate_up = MatrixPerExpert { all: experts.all.iter().map(|expert| &expert.gate_up).collect(), first };
        let down = MatrixPerExpert { all: experts.all.iter().map(|expert| &expert.down).collect(), first };
        let x = self.in_bf16(x, n_rows);
        // [n_choices, 2 * inner]
        self.grouped_product(&gate_up, x, routes.order.address(0), n_used, routes, &routes.gate_up);
        if let Some([bias, _]) = &experts.biases {
            self.add_biases(bias, first, routes, &routes.gate_up);
        }
        let n_choices = n_rows * n_used;
        match experts.activation {
            MlpActivation::Gated(gate) => self.apply_gate(&routes.gate_up, gate, n_choices, &mut routes.inner),
            MlpActivation::Plain(_) => unreachable!("{NO_RECURRENCE}: no other model has experts without a gate"),
        }
        self.grouped_product(&down, routes.inner.address(), 0, 1, routes, &routes.y); // [n_choices, hidden]
        if let Some([_, bias]) = &experts.biases {
            self.add_biases(bias, first, routes, &routes.y);
        }
        self.fold(runs, routes, out);
    }
}
