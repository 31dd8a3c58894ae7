//! Which bytes of the model the ranks have read: joined to one root, and compared where several ranks have read the
//! same. Knows names of weights and hashes of their pieces; no weight's bytes come here.

use super::Replica;
use super::endings::Cause;
use crate::WorkerId;
use proto::cluster as wire;
use std::collections::BTreeMap;
use tonic::Status;
use types::{PieceHash, PieceRun, PolicyDigest, Rank, WeightsRoot};

/// The hashes that the ranks report, and what they add up to.
#[derive(Default)]
pub(crate) struct Readings {
    /// The reports for the epoch that begins.
    said: BTreeMap<Rank, Vec<PieceRun>>,
    /// The weights of the last epoch for which all ranks had loaded.
    joined: JoinedWeights,
    /// Present from the first time that the replica serves. What it serves never changes.
    served: Option<Served>,
}

struct Served {
    /// The policy by the model's fingerprint, without the root.
    meant: PolicyDigest,
    weights: JoinedWeights,
}

/// All pieces of all weights, by name. Empty if ranks have no model.
#[derive(Clone, Default, PartialEq, Eq)]
struct JoinedWeights(BTreeMap<String, Vec<PieceHash>>);

/// Why ranks cannot serve together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unequal {
    #[error(
        "{} read other bytes of the weight {weight} (piece {piece}) than {than}: a file of the model is damaged, or of \
         another model",
        named(ranks)
    )]
    Bytes { ranks: Vec<Rank>, than: &'static str, weight: String, piece: u32 },
    #[error("{} did not read all of the weight {weight}, and nobody else did", named(ranks))]
    Missing { ranks: Vec<Rank>, weight: String },
}

fn named(ranks: &[Rank]) -> String {
    ranks.iter().map(|rank| format!("rank {}", rank.0)).collect::<Vec<_>>().join(" and ")
}

impl Unequal {
    /// The ranks that are not believed.
    fn ranks(&self) -> &[Rank] {
        match self {
            Unequal::Bytes { ranks, .. } | Unequal::Missing { ranks, .. } => ranks,
        }
    }
}

impl Readings {
    /// A new placement: forgets the reports.
    pub fn begin(&mut self) {
        self.said.clear();
    }

    pub fn say(&mut self, rank: Rank, runs: Vec<PieceRun>) {
        self.said.insert(rank, runs);
    }

    /// Call when all ranks have reported what they have read.
    pub fn join(&mut self) -> Result<(), Unequal> {
        let joined = self.joined_by_all()?;
        if let Some(served) = &self.served
            && let Some((weight, piece)) = served.weights.difference(&joined)
        {
            return Err(self.unequal(&weight, piece));
        }
        self.said.clear();
        self.joined = joined;
        Ok(())
    }

    fn joined_by_all(&self) -> Result<JoinedWeights, Unequal> {
        let mut by_weight: BTreeMap<&str, Vec<(Rank, &PieceRun)>> = BTreeMap::new();
        for (rank, run) in self.runs() {
            by_weight.entry(&run.weight).or_default().push((rank, run));
        }
        let joined = |(weight, runs): (&str, Vec<_>)| Ok((weight.to_owned(), self.joined_weight(weight, &runs)?));
        by_weight.into_iter().map(joined).collect::<Result<_, _>>().map(JoinedWeights)
    }

    /// All pieces of a weight, from all ranks' reports.
    fn joined_weight(&self, weight: &str, runs: &[(Rank, &PieceRun)]) -> Result<Vec<PieceHash>, Unequal> {
        // The served weights give the number of pieces; before that, the first rank that has the weight does.
        let served = self.served.as_ref().and_then(|served| served.weights.0.get(weight));
        let missing =
            || Unequal::Missing { ranks: runs.iter().map(|(rank, _)| *rank).collect(), weight: weight.into() };
        let said = runs.first().map_or(0, |(_, run)| run.n_pieces);
        let n_pieces = served.map_or(said, |pieces| pieces.len() as u32);
        if let Some((_, run)) = runs.iter().find(|(_, run)| run.n_pieces != n_pieces) {
            return Err(self.unequal(weight, run.first));
        }
        let n_said: usize = runs.iter().map(|(_, run)| run.hashes.len()).sum();
        // A made-up number of pieces must not make this allocate memory for it.
        if n_said < n_pieces as usize {
            return Err(missing());
        }
        let mut pieces: Vec<Option<PieceHash>> = vec![None; n_pieces as usize];
        for (_, run) in runs {
            for (piece, hash) in (run.first..).zip(&run.hashes) {
                if pieces[piece as usize].get_or_insert(*hash) != hash {
                    return Err(self.unequal(weight, piece));
                }
            }
        }
        pieces.into_iter().collect::<Option<Vec<_>>>().ok_or_else(missing)
    }

    fn runs(&self) -> impl Iterator<Item = (Rank, &PieceRun)> {
        self.said.iter().flat_map(|(rank, runs)| runs.iter().map(|run| (*rank, run)))
    }

    /// The ranks that are not believed: those that differ from what is served or from most others, or all that have the
    /// piece.
    fn unequal(&self, weight: &str, piece: u32) -> Unequal {
        let at = |run: &PieceRun| {
            let hash = run.hashes.get(piece.checked_sub(run.first)? as usize)?;
            Some((run.n_pieces, *hash))
        };
        let of_weight = self.runs().filter(|(_, run)| run.weight == weight);
        let said: Vec<_> = of_weight.filter_map(|(rank, run)| Some((rank, at(run)?))).collect();
        let served = self.served.as_ref().and_then(|served| served.weights.piece(weight, piece));
        let n_like = |hash| said.iter().filter(|(_, said)| *said == hash).count();
        let most = said.iter().map(|(_, hash)| *hash).find(|hash| n_like(*hash) * 2 > said.len());
        // What is served is right, even if it has no such piece.
        let (believed, than) = match (&self.served, most) {
            (Some(_), _) => (served, "the replica"),
            (None, Some(most)) => (Some(most), "the others"),
            (None, None) => (None, "each other"),
        };
        let wrong = said.iter().filter(|(_, hash)| Some(*hash) != believed).map(|(rank, _)| *rank);
        let mut ranks: Vec<Rank> = wrong.collect();
        if ranks.is_empty() {
            // All ranks lack what is served.
            ranks = self.said.keys().copied().collect();
        }
        Unequal::Bytes { ranks, than, weight: weight.to_owned(), piece }
    }

    /// Called once, when the replica first serves: the weights joined last stay what it serves. Returns the policy of
    /// its streams.
    pub fn serve(&mut self, meant: PolicyDigest) -> PolicyDigest {
        let weights = std::mem::take(&mut self.joined);
        let policy = weights.policy(meant);
        self.served = Some(Served { meant, weights });
        policy
    }

    /// The policy by the model's fingerprint, if the replica has served.
    pub fn meant(&self) -> Option<PolicyDigest> {
        self.served.as_ref().map(|served| served.meant)
    }

    /// The policy of a model that was read whole. If the ranks reported no hashes, these do not count either.
    pub fn policy_of(&self, meant: PolicyDigest, whole: &[PieceRun]) -> PolicyDigest {
        match &self.served {
            Some(served) if !served.weights.0.is_empty() => JoinedWeights::of(whole).policy(meant),
            _ => meant,
        }
    }

    /// The first weight that differs from what is served.
    pub fn differs(&self, whole: &[PieceRun]) -> Option<String> {
        let served = self.served.as_ref()?;
        served.weights.difference(&JoinedWeights::of(whole)).map(|(weight, _)| weight)
    }
}

impl JoinedWeights {
    /// From runs that cover whole weights.
    fn of(whole: &[PieceRun]) -> JoinedWeights {
        JoinedWeights(whole.iter().map(|run| (run.weight.clone(), run.hashes.clone())).collect())
    }

    fn policy(&self, meant: PolicyDigest) -> PolicyDigest {
        match self.0.is_empty() {
            true => meant,
            false => meant.loaded(&WeightsRoot::of(self.0.iter().map(|(name, hashes)| (name.as_str(), &hashes[..])))),
        }
    }

    /// Returns the number of the weight's pieces too.
    fn piece(&self, weight: &str, piece: u32) -> Option<(u32, PieceHash)> {
        let pieces = self.0.get(weight)?;
        Some((pieces.len() as u32, *pieces.get(piece as usize)?))
    }

    /// The first piece that differs, if any.
    fn difference(&self, other: &JoinedWeights) -> Option<(String, u32)> {
        let names = self.0.keys().chain(other.0.keys());
        let differs = |name: &&String| self.0.get(*name) != other.0.get(*name);
        let name = names.into_iter().find(differs)?;
        let [ours, theirs] = [self, other].map(|of| of.0.get(name).map_or(&[][..], |pieces| &pieces[..]));
        let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        Some((name.clone(), same as u32))
    }
}

impl Replica {
    /// A rank that has a model reports the hashes of its bytes.
    pub(super) fn hear_readings(&mut self, rank: Rank, loaded: &wire::Loaded) -> Result<(), Status> {
        let runs = loaded.runs().map_err(|malformed| Status::invalid_argument(malformed.to_string()))?;
        if runs.is_empty() && self.config.policy_digest.is_some() {
            let why = "this rank does not say which bytes of the model it has read: it is of another release";
            return Err(Status::failed_precondition(why));
        }
        self.readings.say(rank, runs);
        Ok(())
    }

    /// All ranks have loaded. Those that are not believed are lost, by the name of the weight.
    pub(super) fn have_read_the_same(&mut self) -> bool {
        let Err(why) = self.readings.join() else { return true };
        let shards = self.phase.blueprint().into_iter().flat_map(|blueprint| &blueprint.shards);
        let wrong: Vec<WorkerId> =
            shards.filter(|shard| why.ranks().contains(&shard.rank)).map(|shard| shard.worker).collect();
        for worker in wrong {
            self.report_loss(worker, Cause::Wrong, Status::failed_precondition(why.to_string()));
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEANT: PolicyDigest = PolicyDigest([9; 32]);

    /// A run of a weight of four pieces, from `first` on.
    fn run(weight: &str, first: u32, pieces: &[u8]) -> PieceRun {
        let hashes = pieces.iter().map(|byte| PieceHash([*byte; 32])).collect();
        PieceRun { weight: weight.into(), n_pieces: 4, first, hashes }
    }

    fn say(readings: &mut Readings, said: &[&[PieceRun]]) -> Result<(), Unequal> {
        readings.begin();
        (0..).zip(said).for_each(|(rank, runs)| readings.say(Rank(rank), runs.to_vec()));
        readings.join()
    }

    fn policy(said: &[&[PieceRun]]) -> PolicyDigest {
        let mut readings = Readings::default();
        say(&mut readings, said).unwrap();
        readings.serve(MEANT)
    }

    #[test]
    fn a_policy_knows_the_bytes_and_not_who_has_read_them() {
        let whole = [run("a", 0, &[1, 2, 3, 4]), run("b", 0, &[5, 6, 7, 8])];
        let alone = policy(&[&whole]);
        assert_eq!(policy(&[&[run("a", 0, &[1, 2, 3, 4])], &[run("b", 0, &[5, 6, 7, 8])]]), alone);
        let parts = [run("b", 0, &[5, 6]), run("a", 2, &[3, 4])];
        assert_eq!(policy(&[&parts, &[run("a", 0, &[1, 2, 3])], &[run("b", 1, &[6, 7, 8])]]), alone);
        assert_ne!(policy(&[&[run("a", 0, &[1, 2, 3, 9]), run("b", 0, &[5, 6, 7, 8])]]), alone);
        // Ranks without a model keep the policy by fingerprint.
        assert_eq!(policy(&[&[], &[]]), MEANT);
        let mut served = Readings::default();
        say(&mut served, &[&whole]).unwrap();
        assert_eq!((served.serve(MEANT), served.policy_of(MEANT, &whole), served.meant()), (alone, alone, Some(MEANT)));
        let other = [whole[0].clone(), run("b", 0, &[5, 6, 0, 8])];
        assert_eq!((served.differs(&whole), served.differs(&other)), (None, Some("b".into())));
        assert_ne!(served.policy_of(MEANT, &other), alone);
    }

    #[test]
    fn who_has_read_other_bytes_is_known_by_the_weights_name() {
        let bytes = |said: &[&[PieceRun]]| match say(&mut Readings::default(), said).unwrap_err() {
            Unequal::Bytes { ranks, weight, piece, .. } => (ranks, weight, piece),
            missing @ Unequal::Missing { .. } => panic!("{missing}"),
        };
        let (good, bad) = ([run("a", 0, &[1, 2, 3, 4])], [run("a", 0, &[1, 2, 0, 4])]);
        assert_eq!(bytes(&[&good, &bad]), (vec![Rank(0), Rank(1)], "a".into(), 2), "nobody knows who is right");
        assert_eq!(bytes(&[&bad, &good, &good]), (vec![Rank(0)], "a".into(), 2));
        let mut served = Readings::default();
        say(&mut served, &[&good]).unwrap();
        served.serve(MEANT);
        let why = say(&mut served, &[&bad, &bad, &good]).unwrap_err();
        assert_eq!(why.ranks(), [Rank(0), Rank(1)]);
        assert!(why.to_string().contains("rank 0 and rank 1 read other bytes of the weight a"), "{why}");
        assert_eq!(say(&mut served, &[&bad]).unwrap_err().ranks(), [Rank(0)]);
        assert_eq!(say(&mut served, &[&[run("b", 0, &[1, 2, 3, 4])]]).unwrap_err().ranks(), [Rank(0)]);
        // A rank that reports more than there is affects no other.
        let more = [good[0].clone(), run("zzz", 0, &[1, 2, 3, 4])];
        assert_eq!(say(&mut served, &[&good, &more]).unwrap_err().ranks(), [Rank(1)]);
        let huge = [PieceRun { n_pieces: u32::MAX, ..good[0].clone() }];
        assert_eq!(say(&mut served, &[&huge, &good]).unwrap_err().ranks(), [Rank(0)]);
        assert_eq!(say(&mut served, &[&good, &good]), Ok(()));
    }

    #[test]
    fn what_nobody_has_read_is_missed() {
        let parts = [run("a", 0, &[1, 2]), run("a", 1, &[2, 3])];
        let missing = Unequal::Missing { ranks: vec![Rank(0), Rank(1)], weight: "a".into() };
        assert_eq!(say(&mut Readings::default(), &[&parts[..1], &parts[1..]]), Err(missing));
        let many = PieceRun { n_pieces: u32::MAX, ..run("a", 0, &[1]) };
        assert!(matches!(say(&mut Readings::default(), &[&[many]]), Err(Unequal::Missing { .. })));
    }
}
