//! Decides by name which tensors of a folder form one matrix of few bits, and checks that their shapes agree.

use super::cells::{ShardMatrix, TensorPart, TensorReader, TensorTaker, cells, of_type};
use super::method::QuantMethod;
use super::words::WordPacking;
use super::{ColumnGroups, DigitLayout, GroupQuantMatrix, are_in_order};
use crate::error::ParseError;
use safetensors::tensor::Dtype as Stored;
use types::{DigitBits, GroupSize, GroupedDtype, ScaleType};

/// Returns what follows a matrix's name in the names of its digits, by method and layout.
pub(crate) fn digits_of(method: QuantMethod) -> &'static [&'static str] {
    match method {
        QuantMethod::None => &[],
        QuantMethod::Gptq { .. } | QuantMethod::Awq => &[".qweight"],
        QuantMethod::Integers => &[".weight_packed", ".weight"],
        QuantMethod::Int8 | QuantMethod::Codes => &[".weight"],
        QuantMethod::Nvfp4(factor) => factor.digits(),
    }
}

/// Returns the matrix that has this tensor as its digits.
pub(crate) fn grouped_matrix(
    method: QuantMethod,
    stem: &str,
    digits: &TensorPart,
    take: TensorTaker<'_>,
    read: TensorReader<'_>,
) -> Result<GroupQuantMatrix, ParseError> {
    let mut of = |suffix: &str| take(&format!("{stem}{suffix}"));
    let none = |suffix: &str| ParseError::Malformed(format!("the matrix {stem} has no {stem}{suffix}"));
    let parts = match method {
        QuantMethod::Gptq { .. } | QuantMethod::Awq => CompanionTensors {
            scales: of(".scales").ok_or_else(|| none(".scales"))?,
            zeros: Some(of(".qzeros").ok_or_else(|| none(".qzeros"))?),
            order: of(".g_idx"),
            shape: None,
        },
        QuantMethod::Int8 => {
            let mut scales = of(".SCB").ok_or_else(|| none(".SCB"))?;
            // A vector, which is one row elsewhere.
            scales.dims.reverse();
            CompanionTensors { scales, zeros: None, order: None, shape: None }
        }
        _ => CompanionTensors {
            scales: of(".weight_scale").ok_or_else(|| none(".weight_scale"))?,
            zeros: of(".weight_zero_point"),
            order: of(".weight_g_idx"),
            shape: of(".weight_shape").map(|part| shape_in(&part, read)),
        },
    };
    if let Some(format) = of(".weight_format")
        && (format.dtype != Stored::U8 || read(&format, 1).is_none_or(|order| order != [0]))
    {
        return ParseError::unsupported(format!("the matrix {stem}, whose weight_format is not that of plain rows,"));
    }
    // The rounding of activations is ignored.
    of(".input_zero_point");
    let is_packed = digits.dtype == Stored::I32;
    let of_method = match (method, is_packed) {
        (QuantMethod::Gptq { zero_plus }, true) => parts.down_layout(digits, zero_plus),
        (QuantMethod::Awq, true) => parts.across_layout(digits),
        (QuantMethod::Integers, true) => parts.row_words_layout(digits),
        (QuantMethod::Integers | QuantMethod::Int8, false) => parts.bytes_layout(method, digits),
        _ => None,
    };
    let Some(matrix) = of_method else {
        let dims = parts.described(digits);
        return ParseError::malformed(format!("the matrix {stem} cannot be made of {dims}"));
    };
    let head_bytes = matrix.order.map_or(0, |order| ORDER_BYTES_MAX.min(order.rows * order.cols * order.size));
    let order_head = parts.order.and_then(|part| read(&part, head_bytes));
    matrix.into_blocks(stem, &order_head.unwrap_or_default())
}

/// How many bytes of a list of groups decide whether the groups are scattered; more of a tensor may not be here yet.
const ORDER_BYTES_MAX: usize = 4096;

/// Reads the shape from a tensor that holds a matrix's shape.
fn shape_in(part: &TensorPart, read: TensorReader<'_>) -> Option<[usize; 2]> {
    let is_one = part.dtype == Stored::I64 && part.dims == [2];
    let bytes = is_one.then(|| read(part, 16))??;
    let dim = |bytes: &[u8; 8]| usize::try_from(i64::from_le_bytes(*bytes)).ok().filter(|n| *n > 0);
    let [rows, cols] = bytes.as_chunks().0 else { return None };
    Some([dim(rows)?, dim(cols)?])
}

struct CompanionTensors {
    scales: TensorPart,
    zeros: Option<TensorPart>,
    order: Option<TensorPart>,
    /// The shape in a tensor that holds one; the inner None if its contents cannot be a shape.
    shape: Option<Option<[usize; 2]>>,
}

/// A matrix whose blocks are not known yet.
struct UnsizedMatrix {
    layout: DigitLayout,
    packing: WordPacking,
    shape: [usize; 2],
    n_groups: usize,
    digits: ShardMatrix,
    scales: (ShardMatrix, ScaleType),
    zeros: Option<ShardMatrix>,
    zero_plus: u16,
    order: Option<ShardMatrix>,
    divisor: Option<u16>,
}

impl CompanionTensors {
    fn described(&self, digits: &TensorPart) -> String {
        let all = [Some(digits), Some(&self.scales), self.zeros.as_ref(), self.order.as_ref()].into_iter().flatten();
        let each = all.map(|part| format!("{:?} {:?}", part.dtype, part.dims)).collect::<Vec<_>>();
        let shape =
            self.shape.map_or(String::new(), |shape| format!(", but weight_shape is {:?}", shape.unwrap_or_default()));
        each.join(", ") + &shape
    }

    fn scales(&self) -> Option<(ShardMatrix, ScaleType)> {
        let of = match self.scales.dtype {
            Stored::F16 => ScaleType::F16,
            Stored::BF16 => ScaleType::BF16,
            Stored::F32 => ScaleType::F32,
            _ => return None,
        };
        Some((cells(&self.scales)?, of))
    }

    /// Returns the groups of `k` columns, in words; None if the file has them and they are invalid.
    fn order(&self, k: usize) -> Option<Option<ShardMatrix>> {
        let Some(order) = &self.order else { return Some(None) };
        of_type(order, Stored::I32).filter(|cells| cells.rows * cells.cols == k).map(Some)
    }

    /// Words of `n` numbers along K, below each other.
    fn down_layout(&self, digits: &TensorPart, zero_plus: u16) -> Option<UnsizedMatrix> {
        let (words, zeros) = (of_type(digits, Stored::I32)?, of_type(self.zeros.as_ref()?, Stored::I32)?);
        let rows = words.cols;
        let packing = WordPacking::ALL.into_iter().find(|packing| packing.digits_in(zeros.cols) == Some(rows))?;
        let shape = [rows, packing.digits_in(words.rows)?];
        self.with_line_per_group(DigitLayout::Down, packing, shape, (words, zeros), zero_plus)
    }

    /// Words of eight rows, for each of K.
    fn across_layout(&self, digits: &TensorPart) -> Option<UnsizedMatrix> {
        let (words, zeros) = (of_type(digits, Stored::I32)?, of_type(self.zeros.as_ref()?, Stored::I32)?);
        let packing = WordPacking::Four;
        let shape = [packing.digits_in(words.cols)?, words.rows];
        let is_whole = zeros.cols == words.cols;
        is_whole.then(|| self.with_line_per_group(DigitLayout::Across, packing, shape, (words, zeros), 0))?
    }

    /// One line of scales, and one of zeros, for each group.
    fn with_line_per_group(
        &self,
        layout: DigitLayout,
        packing: WordPacking,
        shape: [usize; 2],
        (digits, zeros): (ShardMatrix, ShardMatrix),
        zero_plus: u16,
    ) -> Option<UnsizedMatrix> {
        let (scales, n_groups) = (self.scales()?, zeros.rows);
        let order = self.order(shape[1])?;
        let fits = scales.0.rows == n_groups && scales.0.cols == shape[0];
        let zeros = Some(zeros);
        fits.then_some(UnsizedMatrix {
            layout,
            packing,
            shape,
            n_groups,
            digits,
            scales,
            zeros,
            zero_plus,
            order,
            divisor: None,
        })
    }

    /// Words of `n` numbers along K, row after row.
    fn row_words_layout(&self, digits: &TensorPart) -> Option<UnsizedMatrix> {
        let (words, shape) = (of_type(digits, Stored::I32)?, self.shape??);
        let both = [WordPacking::Four, WordPacking::Eight];
        let packing = both.into_iter().find(|packing| packing.digits_in(words.cols) == Some(shape[1]))?;
        let zeros = match &self.zeros {
            None => None,
            Some(zeros) => Some(of_type(zeros, Stored::I32)?),
        };
        (words.rows == shape[0])
            .then(|| self.with_scales_per_row(DigitLayout::Along, packing, shape, words, zeros, None))?
    }

    /// Bytes, row after row.
    fn bytes_layout(&self, method: QuantMethod, digits: &TensorPart) -> Option<UnsizedMatrix> {
        let cells = of_type(digits, Stored::I8).filter(|_| digits.dims.len() == 2)?;
        let zeros = match &self.zeros {
            None => None,
            Some(zeros) => Some(of_type(zeros, Stored::I8)?),
        };
        let divisor = (method == QuantMethod::Int8).then_some(127);
        let is_right = divisor.is_none() || self.scales.dtype == Stored::F32;
        let shape = [cells.rows, cells.cols];
        is_right
            .then(|| self.with_scales_per_row(DigitLayout::Bytes, WordPacking::Eight, shape, cells, zeros, divisor))?
    }

    /// Scales, and zeros, of each row.
    fn with_scales_per_row(
        &self,
        layout: DigitLayout,
        packing: WordPacking,
        shape: [usize; 2],
        digits: ShardMatrix,
        zeros: Option<ShardMatrix>,
        divisor: Option<u16>,
    ) -> Option<UnsizedMatrix> {
        let lines = if layout == DigitLayout::Bytes { shape[0] } else { shape[0].div_ceil(packing.n_digits()) };
        let (scales, order) = (self.scales()?, self.order(shape[1])?);
        let n_groups = scales.0.cols;
        let is_one = scales.0.rows == 1 && n_groups == 1 && zeros.is_none();
        let fits = is_one || scales.0.rows == shape[0];
        let fits = fits && zeros.is_none_or(|zeros| zeros.rows == lines && zeros.cols == n_groups);
        fits.then_some(UnsizedMatrix {
            layout,
            packing,
            shape,
            n_groups,
            digits,
            scales,
            zeros,
            zero_plus: 0,
            order,
            divisor,
        })
    }
}

impl UnsizedMatrix {
    /// Returns the matrix in blocks of the size that its groups allow. `order_head` begins the list of groups, if the
    /// file has one.
    fn into_blocks(self, name: &str, order_head: &[u8]) -> Result<GroupQuantMatrix, ParseError> {
        let [_, k] = self.shape;
        let columns = k / self.n_groups;
        let size = GroupSize::dividing(columns).filter(|_| k.is_multiple_of(self.n_groups));
        let Some(size) = size else {
            let n = self.n_groups;
            return ParseError::unsupported(format!(
                "the matrix {name} of {k} columns in {n} groups, whose size is not a multiple of 32,"
            ));
        };
        let has_zeros = self.zeros.is_some();
        let digits = if self.packing == WordPacking::Eight { DigitBits::Eight } else { DigitBits::Four };
        let groups = match self.order {
            Some(order) if !are_in_order(order_head, columns) => ColumnGroups::Scattered(order),
            order => ColumnGroups::InOrder(order),
        };
        let grouped = GroupedDtype { digits, scale: self.scales.1, has_zeros, size };
        Ok(GroupQuantMatrix {
            layout: self.layout,
            packing: self.packing,
            grouped,
            shape: self.shape,
            columns,
            digits: self.digits,
            scales: self.scales.0,
            zeros: self.zeros,
            zero_plus: self.zero_plus,
            groups,
            divisor: self.divisor,
        })
    }
}
