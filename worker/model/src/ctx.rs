//! The arguments of a pass, besides weights and the layer's own scratch buffers. Passed whole, so that a layer takes
//! what it needs.

use crate::kv::KvCache;
use crate::rope::Ropes;
use backend::{Device, Pass};
use collective::Ranks;

pub struct Ctx<'a, D: Device> {
    pub device: &'a D,
    /// The ranks that compute the pass together.
    pub ranks: &'a mut Ranks<D>,
    pub pass: &'a Pass<'a>,
    pub kv: &'a mut KvCache<D>,
    pub ropes: &'a Ropes<D>,
}

impl<D: Device> Ctx<'_, D> {
    pub fn n_rows(&self) -> usize {
        self.pass.n_rows()
    }
}
