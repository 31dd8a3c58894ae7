//! A worker's description of itself and its place, to the wire and back. Knows nothing of requests and steps.

use crate::cluster as wire;
use crate::malformed::{Malformed, out_of_range, word};
use types::{Activations, DeviceKind, KvDtype, Layout, NumericsMode, PolicyDigest, Rank, Shares, Stage};

impl wire::WorkerHello {
    /// The device that the worker computes on.
    pub fn device(&self) -> Result<DeviceKind, Malformed> {
        word("hello.device", &self.device)
    }
}

impl wire::Assign {
    /// The rank, and the layout of the grid that it belongs to.
    pub fn layout(&self) -> Result<(Rank, Layout), Malformed> {
        let stage = |stage: &wire::Stage| {
            let layers = stage.layer_start..stage.layer_end;
            Shares::new(stage.share_bounds.clone()).map(|shares| Stage { layers, shares })
        };
        let stages = self.stages.iter().map(stage).collect::<Result<Vec<_>, _>>();
        let layout = stages.and_then(Layout::new).map_err(Malformed::Stages)?;
        match u16::try_from(self.rank) {
            Ok(rank) if rank < layout.grid().n_ranks() => Ok((Rank(rank), layout)),
            _ => Err(out_of_range("assign.rank", self.rank)),
        }
    }

    /// The policy that the replica serves under, if it is known.
    pub fn policy(&self) -> Result<Option<PolicyDigest>, Malformed> {
        match self.policy_digest.is_empty() {
            true => Ok(None),
            false => policy_digest(&self.policy_digest).map(Some),
        }
    }

    pub fn activations(&self) -> Result<Activations, Malformed> {
        word("assign.activations", &self.activations)
    }

    pub fn kv_dtype(&self) -> Result<KvDtype, Malformed> {
        word("assign.kv_dtype", &self.kv_dtype)
    }

    /// The mode of the order of sums. A coordinator that sends none has only one mode.
    pub fn mode(&self) -> Result<NumericsMode, Malformed> {
        if self.numerics.is_empty() { Ok(NumericsMode::default()) } else { word("assign.numerics", &self.numerics) }
    }

    /// The epoch's secret. Empty stands for zeros: a rank alone has no peer to prove itself to.
    pub fn secret(&self) -> Result<[u8; 32], Malformed> {
        match self.mesh_secret.len() {
            0 => Ok([0; 32]),
            len => self.mesh_secret.as_slice().try_into().map_err(|_| out_of_range("assign.mesh_secret", len)),
        }
    }
}

impl From<&Stage> for wire::Stage {
    fn from(stage: &Stage) -> wire::Stage {
        wire::Stage {
            layer_start: stage.layers.start,
            layer_end: stage.layers.end,
            share_bounds: stage.shares.bounds().to_vec(),
        }
    }
}

/// A digest as frames and handles carry it.
pub fn policy_digest(bytes: &[u8]) -> Result<PolicyDigest, Malformed> {
    bytes.try_into().map(PolicyDigest).map_err(|_| out_of_range("policy_digest", bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::DeviceClass;

    #[test]
    fn unknown_words_are_refused_with_the_field_name() {
        let assign = |activations: &str, kv_dtype: &str, numerics: &str| wire::Assign {
            activations: activations.into(),
            kv_dtype: kv_dtype.into(),
            numerics: numerics.into(),
            ..wire::Assign::default()
        };
        let old = assign("int8", "f16", "");
        assert_eq!(old.activations().unwrap(), Activations::Int8);
        assert_eq!((old.kv_dtype().unwrap(), old.mode().unwrap()), (KvDtype::F16, NumericsMode::Lockstep));
        assert_eq!(assign("", "", "fast").mode().unwrap(), NumericsMode::Fast);
        let wrong = assign("int4", "", "slow");
        assert!(wrong.activations().unwrap_err().to_string().starts_with("assign.activations: \"int4\" is not a"));
        assert!(wrong.kv_dtype().unwrap_err().to_string().starts_with("assign.kv_dtype: \"\" is not a"));
        assert!(wrong.mode().unwrap_err().to_string().starts_with("assign.numerics: \"slow\" is not a"));
        let hello = |device: &str| wire::WorkerHello { device: device.into(), ..wire::WorkerHello::default() }.device();
        assert_eq!(hello("").unwrap().class(), DeviceClass::Cpu);
        assert!(hello("gpu").unwrap_err().to_string().starts_with("hello.device: \"gpu\" is not a device"));
    }
}
