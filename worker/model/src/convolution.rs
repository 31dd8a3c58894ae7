//! Short convolutions between two gates. Ranks divide the channels, in runs that are leaves of the output's sum.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{ColumnParallel, OwnedHeads, RowParallel};
use crate::limits::PassLimits;
use crate::weights::{MatrixRows, WeightLoader};
use backend::{AttentionHeads, ConvolutionCall, ConvolvedChannels, Device, Memory};
use checkpoint::{ConvolutionSpec, ModelSpec};
use std::ops::Range;
use types::{DeviceClass, Leaves, RankPart};

pub struct ShortConvolution<M: Memory> {
    input: ColumnParallel<M>, // b_proj, c_proj, x_proj [3 * n_channels, hidden]
    weight: M::Vector,        // conv [taps, n_channels]
    output: RowParallel<M>,   // out_proj [hidden, n_channels]
    channels: ConvolvedChannels,
    /// The cache group, and this layer's index among the rank's layers of that group.
    place: (usize, usize),
}

/// The buffers that a short convolution works in.
pub struct ConvolutionScratch<M: Memory> {
    projected: M::Buffer, // [rows_max, 3 * n_channels]
    out: M::Buffer,       // [rows_max, n_channels]
}

/// A rank's channels, which of all they are, and the leaves of the sum of `out_proj` over all.
pub fn owned_channels(
    class: DeviceClass,
    part: &RankPart,
    of: &ConvolutionSpec,
) -> (ConvolvedChannels, Range<usize>, Leaves) {
    let (n, width) = (of.n as usize, of.width as usize);
    let OwnedHeads { query, leaves, .. } = OwnedHeads::of(class, part, AttentionHeads::whole(n, n, width, 1.0));
    let channels = ConvolvedChannels { n: query.len() / width, width, taps: of.taps as usize };
    (channels, query, leaves)
}

/// A convolution's weights as kernels have them, from `[n_channels, taps]` to `[taps, n_channels]`.
pub fn taps_of_channels(channels: &[f32], taps: usize) -> Vec<f32> {
    (0..taps).flat_map(|tap| channels.iter().skip(tap).step_by(taps).copied()).collect()
}

impl<M: Memory> ShortConvolution<M> {
    /// `layer` is its number in the model.
    pub fn load(
        at: &WeightLoader<'_, M>,
        spec: &ModelSpec,
        of: &ConvolutionSpec,
        layer: usize,
    ) -> Result<ShortConvolution<M>> {
        let (hidden, n, taps) = (spec.hidden as usize, (of.n * of.width) as usize, of.taps as usize);
        let (channels, columns, leaves) = owned_channels(at.device().class(), at.part(), of);
        let rows = |name| MatrixRows { name, n, owned: columns.clone() };
        let all = at.numbers("conv.weight", [n, taps])?;
        let weight = taps_of_channels(&all[columns.start * taps..columns.end * taps], taps);
        Ok(ShortConvolution {
            input: ColumnParallel::load(at, hidden, &[rows("b_proj"), rows("c_proj"), rows("x_proj")])?,
            weight: at.vector("conv.weight", &weight)?,
            output: RowParallel::load(at, "out_proj", hidden, &leaves)?,
            channels,
            place: spec.cache_groups().state_place(&at.part().layers, layer as u32),
        })
    }

    pub fn n_planes(&self) -> usize {
        self.output.n_planes()
    }
}

impl<M: Memory> ConvolutionScratch<M> {
    pub fn new(all: &WeightLoader<'_, M>, of: &ConvolutionSpec, limits: PassLimits) -> Result<ConvolutionScratch<M>> {
        let n = owned_channels(all.device().class(), all.part(), of).0.n_channels();
        let rows = |cols| all.device().buffer(limits.rows_max, cols);
        Ok(ConvolutionScratch { projected: rows(3 * n)?, out: rows(n)? })
    }
}

impl<D: Device> ShortConvolution<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden]
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut ConvolutionScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let (device, pass, n_rows, (group, layer)) = (ctx.device, ctx.pass, ctx.n_rows(), self.place);
        self.input.forward(device, x, n_rows, &mut scratch.projected); // [n_rows, 3 * n_channels]
        let call = ConvolutionCall { pass, channels: &self.channels, group, layer };
        // [n_rows, n_channels]
        device.convolve(&scratch.projected, &self.weight, &call, &mut ctx.kv.groups[group], &mut scratch.out);
        self.output.forward(ctx, &scratch.out, out)
    }
}
