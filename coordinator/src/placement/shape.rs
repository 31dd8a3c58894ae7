//! The bytes of each part of a model: its weights, what a pass reads, and its KV, as a rank will find them. Knows no
//! machines.

use checkpoint::{Checkpoint, LayerSizes, ModelSizes, ModelSpec, StateHeads};
use std::ops::Range;
use types::{CacheGroup, DeviceClass, GridPlace, KvDtype, KvLayout, LayerGroups, Leaves, RankPart, Shares};

/// The properties of a model that placement needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    pub n_layers: u32,
    pub hidden: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    /// The width of the MLP.
    pub inner: u32,
    pub vocab: u32,
    /// The context length that it was trained for.
    pub context: u32,
    pub experts: Option<ExpertShape>,
    /// The heads of layers with a state.
    pub states: Option<StateHeads>,
    /// What each of its layers keeps of earlier positions.
    pub cache: LayerGroups,
    /// Layers that must be on one stage.
    pub joined: Range<u32>,
    /// As stored in the file; packing adds only padding.
    pub sizes: ModelSizes,
    /// Bytes of a draft model and its KV cache, which the rank that samples holds beside its part.
    pub draft: u64,
}

/// The experts of each layer that has any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    pub n: u32,
    /// How many of them a token uses.
    pub n_used: u32,
    /// The width of one expert.
    pub inner: u32,
}

impl ModelShape {
    /// Whether nothing is kept of a request's positions: it is an encoder.
    pub fn keeps_nothing(&self) -> bool {
        self.cache.groups().is_empty()
    }

    pub fn of(checkpoint: &Checkpoint) -> ModelShape {
        ModelShape::from_sizes(checkpoint.spec(), checkpoint.sizes())
    }

    /// The shape of the layer that predicts one token further, as a model of its own. None if the file lacks it.
    pub fn of_mtp(checkpoint: &Checkpoint) -> Option<ModelShape> {
        Some(ModelShape::from_sizes(&checkpoint.mtp()?.layer, checkpoint.mtp_sizes()?))
    }

    pub(crate) fn cuts(&self) -> LayerCuts<'_> {
        LayerCuts { joined: &self.joined, n_layers: self.n_layers }
    }

    /// The shape of a model that is known by its spec and the sizes of its parts.
    pub fn from_sizes(spec: &ModelSpec, sizes: ModelSizes) -> ModelShape {
        ModelShape {
            n_layers: spec.n_layers,
            hidden: spec.hidden,
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            inner: spec.inner,
            vocab: spec.vocab,
            context: spec.context,
            experts: spec.experts.map(|experts| ExpertShape {
                n: experts.n,
                n_used: experts.n_used,
                inner: experts.inner,
            }),
            states: spec.state_heads(),
            cache: spec.cache_groups(),
            joined: spec.joined_layers(),
            sizes,
            draft: 0,
        }
    }
}

/// The layers at which a stage may end and the next begin: all but those within the joined ones.
pub(crate) struct LayerCuts<'a> {
    joined: &'a Range<u32>,
    n_layers: u32,
}

impl LayerCuts<'_> {
    pub fn n(&self) -> u32 {
        self.n_layers.saturating_sub(1 + (self.joined.len() as u32).saturating_sub(1))
    }

    /// The cut of this number, or the end of the model.
    pub fn at(&self, i: u32) -> u32 {
        let is_before = i < self.joined.start;
        let layer = i + if is_before { 1 } else { (self.joined.len() as u32).max(1) };
        layer.min(self.n_layers)
    }

    fn is_within(&self, layer: u32) -> bool {
        self.joined.start < layer && layer < self.joined.end
    }

    /// The last cut up to a layer.
    pub fn last_to(&self, layer: u32) -> u32 {
        if self.is_within(layer) { self.joined.start } else { layer }
    }

    /// The first cut from a layer on.
    pub fn first_from(&self, layer: u32) -> u32 {
        if self.is_within(layer) { self.joined.end } else { layer }
    }
}

/// One rank's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartSizes {
    pub heads: Range<u32>,
    /// All KV heads that its query heads read: a head that a boundary cuts is held on both sides.
    pub kv_heads: Range<u32>,
    pub weights: u64,
    /// The part of the weights that every rank of the stage holds.
    pub replicated: u64,
    /// The bytes that a pass of one row reads: the embedding is looked up and does not count, the head is read whole.
    pub read: u64,
    /// The bytes of all experts that it holds, a part of `weights`; and of the rows of the head, a part of `read`.
    pub experts: u64,
    pub head: u64,
    /// The bytes of its heads' K and V, or states, for a block of each cache group: zero where its stage has no layer
    /// of the group.
    pub block_bytes: Vec<u64>,
}

/// Measures parts of one model.
pub(crate) struct PartMeasurer<'a> {
    pub shape: &'a ModelShape,
    /// The device class.
    pub class: DeviceClass,
    o_proj: Leaves,
    down_proj: Leaves,
    /// Of heads with a state, and the columns of each.
    states: Option<(Leaves, u32)>,
    /// The same of each cache group's attention, whose heads may be longer than the model's.
    groups: Vec<(Leaves, u32)>,
    /// `before[i]` is the sum of the layers before layer i.
    before: Vec<LayerSizes>,
    kv_dtype: KvDtype,
}

impl<'a> PartMeasurer<'a> {
    pub fn new(shape: &'a ModelShape, class: DeviceClass, kv_dtype: KvDtype) -> PartMeasurer<'a> {
        let mut before = vec![LayerSizes::default()];
        for layer in &shape.sizes.layers {
            before.push(before[before.len() - 1] + *layer);
        }
        // A shape without sizes still has layers.
        before.resize(shape.n_layers as usize + 1, before[before.len() - 1]);
        let o_proj = Leaves::o_proj(class, shape.n_heads, shape.head_dim);
        let down_proj = Leaves::down_proj(class, shape.inner);
        let states = shape.states.map(|of| (of.leaves(class), of.dim));
        let dim = |group: &CacheGroup| match group.layout {
            KvLayout::Heads { k, .. } => k,
            KvLayout::State { .. } => shape.head_dim,
        };
        let dims = shape.cache.groups().iter().map(dim);
        let groups = dims.map(|dim| (Leaves::o_proj(class, shape.n_heads, dim), dim)).collect();
        PartMeasurer { shape, class, o_proj, down_proj, states, groups, before, kv_dtype }
    }

    /// The smallest runs of heads that a rank can own.
    pub fn n_leaves(&self) -> u32 {
        self.o_proj.len() as u32
    }

    pub fn part(&self, part: &RankPart) -> PartSizes {
        let heads = part.owned_heads(&self.o_proj, self.shape.head_dim);
        let kv_heads = self.kv_heads(&heads, self.shape.n_kv_heads);
        let layers = self.layers(part, &heads, &kv_heads);
        let outer = self.outer(part);
        let head_rows = if part.is_last() { self.rows(part, self.head_bytes()) } else { 0 };
        let n_states = self.states.as_ref().map_or(0, |(leaves, dim)| part.owned_heads(leaves, *dim).len());
        let n_heads = |group: &CacheGroup, (leaves, dim): &(Leaves, u32)| match group.layout {
            KvLayout::State { .. } => n_states,
            KvLayout::Heads { n, .. } => self.kv_heads(&part.owned_heads(leaves, *dim), n).len(),
        };
        let page =
            |(group, of): (&CacheGroup, _)| group.rank_layout(n_heads(group, of) as u32).page_bytes(self.kv_dtype);
        let pages = self.shape.cache.groups().iter().zip(&self.groups).map(page);
        let n_layers = self.shape.cache.n_layers(&part.layers);
        let draft = if part.is_sampler() { self.shape.draft } else { 0 };
        PartSizes {
            weights: layers.total() + outer.total() + draft,
            // No other rank shares it: a cut must not count on it.
            replicated: layers.replicated + outer.replicated + draft,
            read: layers.total() - layers.experts + self.experts_read(layers.experts) + outer.replicated + head_rows,
            experts: layers.experts,
            head: head_rows,
            block_bytes: n_layers.zip(pages).map(|(n_layers, page)| n_layers as u64 * page).collect(),
            heads,
            kv_heads,
        }
    }

    /// A stage as a single rank would hold it.
    pub fn stage(&self, stage: u16, n_stages: u16, layers: Range<u32>) -> PartSizes {
        let place = GridPlace { stage, tp: 0 };
        self.part(&RankPart { place, layers, shares: Shares::even(1), n_stages })
    }

    /// The KV heads that these query heads read, of `n` in a layer.
    fn kv_heads(&self, heads: &Range<u32>, n: u32) -> Range<u32> {
        let per_kv = (self.shape.n_heads / n.max(1)).max(1);
        let start = heads.start / per_kv;
        match heads.is_empty() {
            true => start..start,
            false => start..heads.end.div_ceil(per_kv).min(n),
        }
    }

    fn layers(&self, part: &RankPart, heads: &Range<u32>, kv_heads: &Range<u32>) -> LayerSizes {
        let shape = self.shape;
        let all = self.before[part.layers.end as usize] - self.before[part.layers.start as usize];
        let columns = self.down_proj.elements(&part.owned(self.down_proj.len() as u32));
        let experts = shape.experts.map_or(0..1, |experts| part.owned(experts.n));
        LayerSizes {
            heads: portion(all.heads, heads, shape.n_heads),
            kv_heads: portion(all.kv_heads, kv_heads, shape.n_kv_heads),
            mlp: portion(all.mlp, &columns, shape.inner),
            experts: portion(all.experts, &experts, shape.experts.map_or(1, |experts| experts.n)),
            replicated: all.replicated,
        }
    }

    /// The parts outside the layers: rows of the vocabulary, and the last norm.
    fn outer(&self, part: &RankPart) -> LayerSizes {
        let sizes = &self.shape.sizes;
        // One matrix is both embedding and head if one rank has both.
        let tied_here = part.is_first() && sizes.head == 0;
        let tables = sizes.embedding + sizes.layer_inputs;
        let embedding = if part.is_first() { self.rows(part, tables) } else { 0 };
        let head = if part.is_last() && !tied_here { self.rows(part, self.head_bytes()) } else { 0 };
        let replicated = if part.is_last() { sizes.norm } else { 0 };
        LayerSizes { heads: embedding, mlp: head, replicated, ..LayerSizes::default() }
    }

    fn rows(&self, part: &RankPart, bytes: u64) -> u64 {
        portion(bytes, &part.owned(self.shape.vocab), self.shape.vocab)
    }

    pub fn head_bytes(&self) -> u64 {
        match self.shape.sizes.head {
            0 => self.shape.sizes.embedding,
            head => head,
        }
    }

    pub fn experts_read(&self, bytes: u64) -> u64 {
        self.shape.experts.map_or(bytes, |experts| portion(bytes, &(0..experts.n_used), experts.n))
    }
}

/// The bytes of some of `of` equal units, rounded up.
fn portion(bytes: u64, units: &Range<u32>, of: u32) -> u64 {
    let n = u128::from(units.end.saturating_sub(units.start));
    (u128::from(bytes) * n).div_ceil(u128::from(of.max(1))) as u64
}
