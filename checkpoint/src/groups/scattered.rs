//! Matrices whose columns belong to scattered groups (act-order, `desc_act` of GPTQ): read as numbers, because a block
//! has one scale for neighbouring columns. A number is scale × (digit - zero), rounded once to the scales' type: what
//! the format's own unpacker computes.

use super::cells::{ShardMatrix, write_number};
use super::words::words_of;
use super::{ColumnGroups, GroupQuantMatrix};
use crate::error::{Error, Result};
use crate::file::SourceFile;
use half::{bf16, f16};
use std::ops::Range;
use types::{Dtype, ScaleType};

impl GroupQuantMatrix {
    /// Returns the type of what `read_rows` writes.
    pub fn dtype(&self) -> Dtype {
        match (self.groups, self.grouped.scale) {
            (ColumnGroups::Scattered(_), ScaleType::F16) => Dtype::F16,
            (ColumnGroups::Scattered(_), ScaleType::BF16) => Dtype::BF16,
            (ColumnGroups::Scattered(_), ScaleType::F32) => Dtype::F32,
            _ => Dtype::Grouped(self.grouped),
        }
    }

    /// The numbers of some rows, one row after another.
    pub(super) fn read_numbers(
        &self,
        files: &[SourceFile],
        rows: &Range<usize>,
        order: ShardMatrix,
        to: &mut [u8],
    ) -> Result<()> {
        let (groups, n_groups) = (self.read_groups(files, order)?, self.n_groups());
        let (digits, scales) = (self.read_digits(files, rows)?, self.read_scales(files, rows)?);
        let zeros = self.read_zeros(files, rows)?;
        let (k, dtype, size) = (self.shape[1], self.dtype(), self.grouped.scale.bytes());
        let middle = u16::from(self.grouped.digits.middle());
        for (i, (to, digit)) in to.chunks_exact_mut(size).zip(digits).enumerate() {
            let group = i / k * n_groups + groups[i % k];
            let zero = zeros.as_ref().map_or(middle, |zeros| zeros[group]);
            let scale = scale_of(self.grouped.scale, &scales[group * size..][..size]);
            // Exact for scales of 16 bits, so the number is rounded once.
            write_number(dtype, scale * (f32::from(digit) - f32::from(zero)), to);
        }
        Ok(())
    }

    /// The group of each column.
    fn read_groups(&self, files: &[SourceFile], order: ShardMatrix) -> Result<Vec<usize>> {
        let bytes = order.read(files, 0..order.rows, 0..order.cols)?;
        let groups: Vec<usize> = words_of(&bytes).map(|group| group as usize).collect();
        let n_groups = self.n_groups();
        match groups.iter().position(|group| *group >= n_groups) {
            None => Ok(groups),
            Some(column) => {
                let group = groups[column] as u32 as i32;
                let what = format!("a matrix of {n_groups} groups, whose column {column} is in group {group} (g_idx)");
                Err(Error::Malformed { path: files[order.shard].path().to_owned(), what })
            }
        }
    }
}

/// Returns a scale of this type.
fn scale_of(scale: ScaleType, bytes: &[u8]) -> f32 {
    match (scale, bytes) {
        (ScaleType::F16, &[low, high]) => f16::from_le_bytes([low, high]).to_f32(),
        (ScaleType::BF16, &[low, high]) => bf16::from_le_bytes([low, high]).to_f32(),
        (_, bytes) => bytes.first_chunk().map_or(0., |bytes| f32::from_le_bytes(*bytes)),
    }
}
