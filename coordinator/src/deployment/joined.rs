//! All weights of a model by the hashes of their pieces: joined from the ranks' reports, compared piece by piece, and
//! sent to routers that find two replicas different. Knows no rank.

use proto::cluster as wire;
use std::collections::BTreeMap;
use std::sync::Arc;
use types::{PieceHash, PieceRun, PolicyDigest, WeightsRoot};

/// All pieces of all weights, by name. Empty if ranks have no model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ModelPieceHashes(BTreeMap<String, Vec<PieceHash>>);

/// The weights that a replica serves. They never change.
#[derive(Clone, Debug)]
pub(crate) struct ServedWeights {
    /// The policy by the model's fingerprint, without the root.
    pub meant: PolicyDigest,
    /// The same over all bytes.
    pub policy: PolicyDigest,
    pub weights: Arc<ModelPieceHashes>,
}

impl ModelPieceHashes {
    /// From runs that cover whole weights.
    pub fn of(whole: &[PieceRun]) -> ModelPieceHashes {
        whole.iter().map(|run| (run.weight.clone(), run.hashes.clone())).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn policy(&self, meant: PolicyDigest) -> PolicyDigest {
        match self.0.is_empty() {
            true => meant,
            false => {
                meant.with_weights(&WeightsRoot::of(self.0.iter().map(|(name, hashes)| (name.as_str(), &hashes[..]))))
            }
        }
    }

    pub fn n_pieces(&self, weight: &str) -> Option<usize> {
        self.0.get(weight).map(Vec::len)
    }

    /// Returns the number of the weight's pieces too.
    pub fn piece(&self, weight: &str, piece: u32) -> Option<(u32, PieceHash)> {
        let pieces = self.0.get(weight)?;
        Some((pieces.len() as u32, *pieces.get(piece as usize)?))
    }

    /// The first piece that differs, if any.
    pub fn difference(&self, other: &ModelPieceHashes) -> Option<(String, u32)> {
        let names = self.0.keys().chain(other.0.keys());
        let differs = |name: &&String| self.0.get(*name) != other.0.get(*name);
        let name = names.into_iter().find(differs)?;
        let [ours, theirs] = [self, other].map(|of| of.0.get(name).map_or(&[][..], |pieces| &pieces[..]));
        let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        Some((name.clone(), same as u32))
    }
}

impl FromIterator<(String, Vec<PieceHash>)> for ModelPieceHashes {
    fn from_iter<T: IntoIterator<Item = (String, Vec<PieceHash>)>>(weights: T) -> ModelPieceHashes {
        ModelPieceHashes(weights.into_iter().collect())
    }
}

impl ServedWeights {
    /// Returns one hash of each weight, or the hashes of one weight's pieces. Two answers are enough to find the first
    /// piece that differs, and neither has all pieces of a large model.
    pub fn hashes(&self, weight: &str) -> wire::WeightHashes {
        let ModelPieceHashes(weights) = &*self.weights;
        let policy_digest = self.policy.0.to_vec();
        if !weight.is_empty() {
            let pieces = weights.get(weight).into_iter().flatten().flat_map(|PieceHash(hash)| hash).copied().collect();
            return wire::WeightHashes { policy_digest, weights: Vec::new(), pieces };
        }
        let of_weight = |(name, pieces): (&String, &Vec<PieceHash>)| {
            let WeightsRoot(hash) = WeightsRoot::of([(name.as_str(), &pieces[..])]);
            wire::WeightHash { weight: name.clone(), hash: hash.to_vec() }
        };
        wire::WeightHashes { policy_digest, weights: weights.iter().map(of_weight).collect(), pieces: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_answers_name_the_first_piece_that_differs() {
        let run = |weight: &str, pieces: [u8; 3]| {
            let hashes = pieces.map(|byte| PieceHash([byte; 32])).to_vec();
            PieceRun { weight: weight.into(), n_pieces: 3, first: 0, hashes }
        };
        let served = |b: [u8; 3]| {
            let weights = Arc::new(ModelPieceHashes::of(&[run("a", [1, 2, 3]), run("b", b)]));
            let meant = PolicyDigest([9; 32]);
            ServedWeights { meant, policy: weights.policy(meant), weights }
        };
        let (good, bad) = (served([4, 5, 6]), served([4, 0, 6]));
        let (ours, theirs) = (good.hashes(""), bad.hashes(""));
        assert_eq!((&ours.weights[0].weight, &ours.weights[1].weight), (&"a".into(), &"b".into()));
        assert!(ours.weights[0] == theirs.weights[0] && ours.weights[1] != theirs.weights[1]);
        assert_ne!(ours.policy_digest, theirs.policy_digest);
        let [ours, theirs] = [good.hashes("b").pieces, bad.hashes("b").pieces];
        assert!(ours.len() == 96 && ours[..32] == theirs[..32] && ours[32..64] != theirs[32..64]);
        assert!(good.hashes("no such weight").pieces.is_empty());
    }
}
