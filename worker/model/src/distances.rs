//! What an encoder's scores have by the distance from query to key: a learned number for each bucket of distances.

use crate::attention::heads_of_rows;
use crate::error::Result;
use crate::layers::OwnedHeads;
use crate::weights::WeightLoader;
use backend::{AttentionHeads, Memory};
use checkpoint::ModelSpec;

/// The distance from which on all keys before a query share a bucket, and all behind it.
const REACH: i32 = 128;

/// The numbers of this rank's heads, laid out by distance; None for models without them. [n_heads, 2 * REACH + 1]
pub fn load<M: Memory>(all: &WeightLoader<'_, M>, spec: &ModelSpec) -> Result<Option<M::Vector>> {
    let n_buckets = spec.encoder.map_or(0, |of| of.n_distance_buckets) as usize;
    if n_buckets == 0 {
        return Ok(None);
    }
    let (name, n_heads) = ("distances", spec.n_heads as usize);
    let numbers = all.at_path("model").numbers(&format!("{name}.weight"), [n_buckets, n_heads])?;
    let whole = AttentionHeads::whole(n_heads, n_heads, spec.head_dim as usize, 1.0);
    let query = OwnedHeads::of(all.device().class(), all.part(), whole).query;
    let of_head = |head: usize| (-REACH..=REACH).map(move |distance| (head, bucket(distance, n_buckets)));
    let owned = heads_of_rows(&query, whole.head_dim).flat_map(of_head);
    let laid_out: Vec<f32> = owned.map(|(head, bucket)| numbers[bucket * n_heads + head]).collect();
    all.vector(name, &laid_out).map(Some)
}

/// The bucket of the distance from a query to a key. Half of the buckets are for keys behind the query; half of these
/// have one distance each, and the others grow with its logarithm.
fn bucket(distance: i32, n_buckets: usize) -> usize {
    let of_side = n_buckets / 2;
    let (n_exact, far) = (of_side / 2, distance.unsigned_abs() as usize);
    let within = if far < n_exact {
        far
    } else {
        let grown = libm::logf(far as f32 / n_exact as f32) / libm::log(f64::from(REACH) / n_exact as f64) as f32;
        (n_exact + (grown * (of_side - n_exact) as f32) as usize).min(of_side - 1)
    };
    within + if distance > 0 { of_side } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::bucket;

    /// As transformers computes them for MPNet.
    #[test]
    fn buckets_grow_with_the_logarithm_of_distances() {
        let of_query = |distances: &[i32]| distances.iter().map(|d| bucket(*d, 32)).collect::<Vec<_>>();
        assert_eq!(of_query(&[0, -1, -7, -8, -11, -12, -15, -16, -22, -23]), [0, 1, 7, 8, 8, 9, 9, 10, 10, 11]);
        assert_eq!(of_query(&[-31, -32, -63, -64, -127, -128]), [11, 12, 13, 14, 15, 15]);
        assert_eq!(of_query(&[1, 7, 8, 16, 128]), [17, 23, 24, 26, 31]);
    }
}
