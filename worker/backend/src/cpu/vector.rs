//! Numbers that are made at load and only read from then on: norms, biases, tables of positions. Does not know what
//! they are for.

use crate::PackedBytes;
use std::ops::Deref;
use std::sync::Arc;

/// Clones share the numbers.
#[derive(Clone)]
pub struct Vector(Arc<VectorData>);

struct VectorData(Box<[f32]>);

impl Vector {
    pub fn new(values: &[f32]) -> Vector {
        Vector(Arc::new(VectorData(values.into())))
    }

    pub fn bytes(&self) -> PackedBytes {
        PackedBytes::new(self.0.clone(), size_of_val::<[f32]>(self))
    }
}

impl Deref for Vector {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0.0
    }
}

impl AsRef<[u8]> for VectorData {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
