//! Conversions of the hashes that a rank has read, to the wire and back. Knows nothing of the sender.

use crate::cluster as wire;
use crate::malformed::{Malformed, out_of_range};
use types::{PieceHash, PieceRun};

impl From<&PieceRun> for wire::PieceRun {
    fn from(run: &PieceRun) -> wire::PieceRun {
        let PieceRun { weight, n_pieces, first, hashes } = run;
        let hashes = hashes.iter().flat_map(|PieceHash(hash)| hash).copied().collect();
        wire::PieceRun { weight: weight.clone(), n_pieces: *n_pieces, first: *first, hashes }
    }
}

impl TryFrom<&wire::PieceRun> for PieceRun {
    type Error = Malformed;

    fn try_from(run: &wire::PieceRun) -> Result<PieceRun, Malformed> {
        let wire::PieceRun { weight, n_pieces, first, hashes } = run;
        if weight.is_empty() {
            return Err(Malformed::Missing { field: "loaded.weights.weight" });
        }
        let (hashes, []) = hashes.as_chunks::<32>() else {
            return Err(out_of_range("loaded.weights.hashes", hashes.len()));
        };
        let end = u64::from(*first) + hashes.len() as u64;
        if hashes.is_empty() || end > u64::from(*n_pieces) {
            return Err(out_of_range("loaded.weights.n_pieces", *n_pieces));
        }
        let hashes = hashes.iter().copied().map(PieceHash).collect();
        Ok(PieceRun { weight: weight.clone(), n_pieces: *n_pieces, first: *first, hashes })
    }
}

impl wire::Loaded {
    /// The runs of pieces that the rank holds.
    pub fn runs(&self) -> Result<Vec<PieceRun>, Malformed> {
        self.weights.iter().map(PieceRun::try_from).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_go_there_and_back_and_what_cannot_be_meant_is_refused() {
        let hashes = vec![PieceHash([1; 32]), PieceHash([2; 32])];
        let run = PieceRun { weight: "model.norm.weight".into(), n_pieces: 5, first: 3, hashes };
        let sent = wire::PieceRun::from(&run);
        assert_eq!(PieceRun::try_from(&sent).unwrap(), run);
        for bad in [
            wire::PieceRun { weight: String::new(), ..sent.clone() },
            wire::PieceRun { hashes: vec![0; 33], ..sent.clone() },
            wire::PieceRun { hashes: Vec::new(), ..sent.clone() },
            wire::PieceRun { n_pieces: 4, ..sent.clone() },
            wire::PieceRun { first: u32::MAX, ..sent.clone() },
        ] {
            assert!(PieceRun::try_from(&bad).is_err(), "{bad:?}");
        }
    }
}
