//! Which bytes of the model the ranks have read: joined to one root, and compared where several ranks have read the
//! same. Knows names of weights and hashes of their pieces; no weight's bytes come here.
//!
//! Layers are on one stage whole, and its ranks divide each weight of theirs among them in ascending order. So a stage
//! that has any piece of a weight has all of it, and a missing piece belongs to one of the ranks around the gap:
//!
//! ```text
//! rank 0  [ 0 1 ]                 ends before piece 3, and so does its neighbour: not its
//! rank 1        [ 2 ]             its, or the next one's
//! rank 2            . [ 4 5 ]
//! ```

use super::joined::{ModelPieceHashes, ServedWeights};
use proto::cluster as wire;
use std::collections::BTreeMap;
use std::sync::Arc;
use tonic::Status;
use types::{Grid, PieceHash, PieceRun, PolicyDigest, Rank};

/// The hashes that the ranks report, and the weights joined from them.
pub(crate) struct WeightReadings {
    /// The reports for the epoch that begins.
    grid: Grid,
    reports: BTreeMap<Rank, Vec<PieceRun>>,
    /// The weights of the last epoch for which all ranks had loaded.
    joined: ModelPieceHashes,
    /// Present from the first time that the replica serves.
    served: Option<ServedWeights>,
}

impl Default for WeightReadings {
    fn default() -> WeightReadings {
        WeightReadings { grid: Grid::SOLO, reports: BTreeMap::new(), joined: ModelPieceHashes::default(), served: None }
    }
}

/// Why ranks cannot serve together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReadingMismatch {
    #[error(
        "{} read other bytes of the weight {weight} (piece {piece}) than {than}: a file is damaged or \
         belongs to another model",
        named(ranks)
    )]
    Bytes { ranks: Vec<Rank>, than: &'static str, weight: String, piece: u32 },
    #[error("{} did not read all of the weight {weight} (piece {piece}), which is on their stage", named(ranks))]
    Missing { ranks: Vec<Rank>, weight: String, piece: u32 },
}

fn named(ranks: &[Rank]) -> String {
    ranks.iter().map(|rank| format!("rank {}", rank.0)).collect::<Vec<_>>().join(" and ")
}

impl ReadingMismatch {
    /// The distrusted ranks.
    pub fn ranks(&self) -> &[Rank] {
        match self {
            ReadingMismatch::Bytes { ranks, .. } | ReadingMismatch::Missing { ranks, .. } => ranks,
        }
    }
}

impl WeightReadings {
    /// Begins with ranks that have places on this grid.
    pub fn begin(&mut self, grid: Grid) {
        self.grid = grid;
        self.reports.clear();
    }

    pub fn record(&mut self, rank: Rank, runs: Vec<PieceRun>) {
        self.reports.insert(rank, runs);
    }

    /// Takes the hashes of its bytes from a rank that has loaded. They are required if the replica has a model.
    pub fn accept(&mut self, rank: Rank, loaded: &wire::Loaded, has_model: bool) -> Result<(), Status> {
        let runs = loaded.runs().map_err(|malformed| Status::invalid_argument(malformed.to_string()))?;
        if runs.is_empty() && has_model {
            let why = "this rank does not report hashes of the model's bytes: it has another release";
            return Err(Status::failed_precondition(why));
        }
        self.record(rank, runs);
        Ok(())
    }

    /// Call when all ranks have reported what they have read.
    pub fn join(&mut self) -> Result<(), ReadingMismatch> {
        let joined = self.joined_by_all()?;
        if let Some(served) = &self.served
            && let Some((weight, piece)) = served.weights.difference(&joined)
        {
            return Err(self.find_unequal_ranks(&weight, piece));
        }
        self.reports.clear();
        self.joined = joined;
        Ok(())
    }

    fn joined_by_all(&self) -> Result<ModelPieceHashes, ReadingMismatch> {
        let mut by_weight: BTreeMap<&str, Vec<(Rank, &PieceRun)>> = BTreeMap::new();
        for (rank, run) in self.runs() {
            by_weight.entry(&run.weight).or_default().push((rank, run));
        }
        let joined = |(weight, runs): (&str, Vec<_>)| Ok((weight.to_owned(), self.joined_weight(weight, &runs)?));
        by_weight.into_iter().map(joined).collect()
    }

    /// All pieces of a weight, from all ranks' reports.
    fn joined_weight(&self, weight: &str, runs: &[(Rank, &PieceRun)]) -> Result<Vec<PieceHash>, ReadingMismatch> {
        // The served weights give the number of pieces; before that, the first rank that has the weight does.
        let served = self.served.as_ref().and_then(|served| served.weights.n_pieces(weight));
        let reported = runs.first().map_or(0, |(_, run)| run.n_pieces);
        let n_pieces = served.map_or(reported, |n_pieces| n_pieces as u32);
        if let Some((_, run)) = runs.iter().find(|(_, run)| run.n_pieces != n_pieces) {
            return Err(self.find_unequal_ranks(weight, run.first));
        }
        // Checked before memory is allocated for them, against an invented number of pieces.
        for of_stage in runs.chunk_by(|(a, _), (b, _)| self.stage(*a) == self.stage(*b)) {
            if let Some(piece) = first_gap(of_stage, n_pieces) {
                let ranks = self.around(of_stage, piece);
                return Err(ReadingMismatch::Missing { ranks, weight: weight.into(), piece });
            }
        }
        let mut pieces: Vec<Option<PieceHash>> = vec![None; n_pieces as usize];
        for (_, run) in runs {
            for (piece, hash) in (run.first..).zip(&run.hashes) {
                if pieces[piece as usize].get_or_insert(*hash) != hash {
                    return Err(self.find_unequal_ranks(weight, piece));
                }
            }
        }
        Ok(pieces.into_iter().flatten().collect())
    }

    fn stage(&self, rank: Rank) -> u16 {
        self.grid.place(rank).stage
    }

    /// Returns the ranks of a stage to which a piece may belong that none of them has read: from the last that ends
    /// before it to the first that begins behind it.
    fn around(&self, of_stage: &[(Rank, &PieceRun)], piece: u32) -> Vec<Rank> {
        let stage = of_stage.first().map(|(rank, _)| self.stage(*rank));
        let before = of_stage.iter().filter(|(_, run)| run.first < piece).map(|(rank, _)| *rank).max();
        let behind = of_stage.iter().filter(|(_, run)| run.first > piece).map(|(rank, _)| *rank).min();
        let is_around =
            |rank: &Rank| before.is_none_or(|before| before <= *rank) && behind.is_none_or(|behind| *rank <= behind);
        let ranks: Vec<Rank> = self.reports.keys().copied().filter(|rank| Some(self.stage(*rank)) == stage).collect();
        let around: Vec<Rank> = ranks.iter().copied().filter(is_around).collect();
        // Ranks that contradict the layout leave none between them: then the whole stage is distrusted.
        if around.is_empty() { ranks } else { around }
    }

    fn runs(&self) -> impl Iterator<Item = (Rank, &PieceRun)> {
        self.reports.iter().flat_map(|(rank, runs)| runs.iter().map(|run| (*rank, run)))
    }

    /// Returns the distrusted ranks: those that differ from the served weights or from most others, or all that have
    /// the piece.
    fn find_unequal_ranks(&self, weight: &str, piece: u32) -> ReadingMismatch {
        let at = |run: &PieceRun| {
            let hash = run.hashes.get(piece.checked_sub(run.first)? as usize)?;
            Some((run.n_pieces, *hash))
        };
        let of_weight = self.runs().filter(|(_, run)| run.weight == weight);
        let hashes: Vec<_> = of_weight.filter_map(|(rank, run)| Some((rank, at(run)?))).collect();
        let served = self.served.as_ref().and_then(|served| served.weights.piece(weight, piece));
        let n_like = |hash| hashes.iter().filter(|(_, found)| *found == hash).count();
        let most = hashes.iter().map(|(_, hash)| *hash).find(|hash| n_like(*hash) * 2 > hashes.len());
        // The served weights are right, even if they have no such piece.
        let (believed, than) = match (&self.served, most) {
            (Some(_), _) => (served, "the replica"),
            (None, Some(most)) => (Some(most), "the others"),
            (None, None) => (None, "each other"),
        };
        let wrong = hashes.iter().filter(|(_, hash)| Some(*hash) != believed).map(|(rank, _)| *rank);
        let mut ranks: Vec<Rank> = wrong.collect();
        if ranks.is_empty() {
            // All ranks lack a served piece.
            ranks = self.reports.keys().copied().collect();
        }
        ReadingMismatch::Bytes { ranks, than, weight: weight.to_owned(), piece }
    }

    /// Returns the policy of the replica's streams. The weights joined last when it first serves stay what it serves.
    pub fn serve(&mut self, meant: PolicyDigest) -> PolicyDigest {
        if let Some(served) = &self.served {
            return served.policy;
        }
        let weights = std::mem::take(&mut self.joined);
        let policy = weights.policy(meant);
        self.served = Some(ServedWeights { meant, policy, weights: Arc::new(weights) });
        policy
    }

    /// Present once the replica has served.
    pub fn served(&self) -> Option<&ServedWeights> {
        self.served.as_ref()
    }

    /// The policy by the model's fingerprint, if the replica has served.
    pub fn expected_policy(&self) -> Option<PolicyDigest> {
        self.served.as_ref().map(|served| served.meant)
    }

    /// The policy of a model that was read whole. If the ranks reported no hashes, these do not count either.
    pub fn policy_of(&self, meant: PolicyDigest, whole: &[PieceRun]) -> PolicyDigest {
        match &self.served {
            Some(served) if !served.weights.is_empty() => ModelPieceHashes::of(whole).policy(meant),
            _ => meant,
        }
    }

    /// The first weight that differs from the served ones.
    pub fn differs(&self, whole: &[PieceRun]) -> Option<String> {
        let served = self.served.as_ref()?;
        served.weights.difference(&ModelPieceHashes::of(whole)).map(|(weight, _)| weight)
    }
}

/// The first of so many pieces that is in none of the runs.
fn first_gap(runs: &[(Rank, &PieceRun)], n_pieces: u32) -> Option<u32> {
    let mut spans: Vec<_> = runs.iter().map(|(_, run)| (run.first, run.first + run.hashes.len() as u32)).collect();
    spans.sort_unstable();
    let mut next = 0;
    for (first, end) in spans {
        if first > next {
            break;
        }
        next = next.max(end);
    }
    (next < n_pieces).then_some(next)
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

    fn join_reports(readings: &mut WeightReadings, reports: &[&[PieceRun]]) -> Result<(), ReadingMismatch> {
        join_reports_on(readings, (reports.len(), 1), reports)
    }

    fn join_reports_on(
        readings: &mut WeightReadings,
        (tp, pp): (usize, u16),
        reports: &[&[PieceRun]],
    ) -> Result<(), ReadingMismatch> {
        readings.begin(Grid { tp: tp as u16, pp });
        (0..).zip(reports).for_each(|(rank, runs)| readings.record(Rank(rank), runs.to_vec()));
        readings.join()
    }

    fn policy(reports: &[&[PieceRun]]) -> PolicyDigest {
        let mut readings = WeightReadings::default();
        join_reports(&mut readings, reports).unwrap();
        readings.serve(MEANT)
    }

    #[test]
    fn policy_depends_on_bytes_and_not_on_ranks() {
        let whole = [run("a", 0, &[1, 2, 3, 4]), run("b", 0, &[5, 6, 7, 8])];
        let alone = policy(&[&whole]);
        assert_eq!(policy(&[&[run("a", 0, &[1, 2, 3, 4])], &[run("b", 0, &[5, 6, 7, 8])]]), alone);
        let parts = [run("b", 0, &[5, 6]), run("a", 2, &[3, 4])];
        assert_eq!(policy(&[&parts, &[run("a", 0, &[1, 2, 3])], &[run("b", 1, &[6, 7, 8])]]), alone);
        assert_ne!(policy(&[&[run("a", 0, &[1, 2, 3, 9]), run("b", 0, &[5, 6, 7, 8])]]), alone);
        // Ranks without a model keep the policy by fingerprint.
        assert_eq!(policy(&[&[], &[]]), MEANT);
        let mut served = WeightReadings::default();
        join_reports(&mut served, &[&whole]).unwrap();
        assert_eq!(
            (served.serve(MEANT), served.policy_of(MEANT, &whole), served.expected_policy()),
            (alone, alone, Some(MEANT))
        );
        let other = [whole[0].clone(), run("b", 0, &[5, 6, 0, 8])];
        assert_eq!((served.differs(&whole), served.differs(&other)), (None, Some("b".into())));
        assert_ne!(served.policy_of(MEANT, &other), alone);
    }

    #[test]
    fn rank_with_other_bytes_is_found_by_weight() {
        let bytes = |reports: &[&[PieceRun]]| match join_reports(&mut WeightReadings::default(), reports).unwrap_err() {
            ReadingMismatch::Bytes { ranks, weight, piece, .. } => (ranks, weight, piece),
            missing @ ReadingMismatch::Missing { .. } => panic!("{missing}"),
        };
        let (good, bad) = ([run("a", 0, &[1, 2, 3, 4])], [run("a", 0, &[1, 2, 0, 4])]);
        assert_eq!(bytes(&[&good, &bad]), (vec![Rank(0), Rank(1)], "a".into(), 2), "either of the two may be wrong");
        assert_eq!(bytes(&[&bad, &good, &good]), (vec![Rank(0)], "a".into(), 2));
        let mut served = WeightReadings::default();
        join_reports(&mut served, &[&good]).unwrap();
        served.serve(MEANT);
        let why = join_reports(&mut served, &[&bad, &bad, &good]).unwrap_err();
        assert_eq!(why.ranks(), [Rank(0), Rank(1)]);
        assert!(why.to_string().contains("rank 0 and rank 1 read other bytes of the weight a"), "{why}");
        assert_eq!(join_reports(&mut served, &[&bad]).unwrap_err().ranks(), [Rank(0)]);
        assert_eq!(join_reports(&mut served, &[&[run("b", 0, &[1, 2, 3, 4])]]).unwrap_err().ranks(), [Rank(0)]);
        // A rank that reports more than there is affects no other.
        let more = [good[0].clone(), run("zzz", 0, &[1, 2, 3, 4])];
        assert_eq!(join_reports(&mut served, &[&good, &more]).unwrap_err().ranks(), [Rank(1)]);
        let huge = [PieceRun { n_pieces: u32::MAX, ..good[0].clone() }];
        assert_eq!(join_reports(&mut served, &[&huge, &good]).unwrap_err().ranks(), [Rank(0)]);
        assert_eq!(join_reports(&mut served, &[&good, &good]), Ok(()));
    }

    #[test]
    fn piece_that_no_rank_has_read_is_missing() {
        let parts = [run("a", 0, &[1, 2]), run("a", 1, &[2, 3])];
        // The first ends before the other does, so the last piece is not the first's.
        let missing = ReadingMismatch::Missing { ranks: vec![Rank(1)], weight: "a".into(), piece: 3 };
        assert_eq!(join_reports(&mut WeightReadings::default(), &[&parts[..1], &parts[1..]]), Err(missing));
        let many = PieceRun { n_pieces: u32::MAX, ..run("a", 0, &[1]) };
        assert!(matches!(
            join_reports(&mut WeightReadings::default(), &[&[many]]),
            Err(ReadingMismatch::Missing { .. })
        ));
    }

    #[test]
    fn only_ranks_around_a_missing_piece_are_named() {
        let (whole, of) = (run("a", 0, &[1, 2, 3, 4]), |first, pieces: &[u8]| [run("a", first, pieces)]);
        let missed = |(tp, pp), reports: &[&[PieceRun]]| {
            let why = join_reports_on(&mut WeightReadings::default(), (tp, pp), reports).unwrap_err();
            let ReadingMismatch::Missing { ranks, piece, .. } = why else { panic!("{why}") };
            (ranks.iter().map(|rank| rank.0).collect::<Vec<_>>(), piece)
        };
        // A rank without a report stands in the gap, with its neighbours: either of them may hold more than it
        // reported.
        let four_reports: [&[PieceRun]; 4] = [&of(0, &[1]), &of(1, &[2]), &[], &of(3, &[4])];
        assert_eq!(missed((4, 1), &four_reports), (vec![1, 2, 3], 2));
        assert_eq!(missed((2, 1), &[&[], &of(1, &[2, 3, 4])]), (vec![0, 1], 0));
        assert_eq!(missed((2, 1), &[&of(0, &[1, 2, 3, 4])[..0], &of(0, &[1, 2])]), (vec![1], 2));
        // Another stage that holds the weight too does not stand in for the one that omits it.
        assert_eq!(missed((2, 2), &[std::slice::from_ref(&whole), &[], &of(0, &[1, 2]), &[]]), (vec![2, 3], 2));
        assert_eq!(missed((1, 2), &[&of(1, &[2, 3, 4]), std::slice::from_ref(&whole)]), (vec![0], 0));
        // A rank that reports more than its part takes no other's blame, and neither does a stage without the weight.
        let all: [&[PieceRun]; 4] = [std::slice::from_ref(&whole), &of(2, &[3, 4]), &[], &[]];
        assert_eq!(join_reports_on(&mut WeightReadings::default(), (2, 2), &all), Ok(()));
    }
}
