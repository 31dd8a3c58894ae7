//! What a choice among replicas looks at: a row of each, numbers that change by themselves, and who has which blocks in
//! its cache. Knows no links and no views of people.

use crate::caches::{Caches, Gap, IDS_MAX, Ids, Teller};
use crate::circuit::{Circuit, Turn, Usual};
use crate::ledger::Ledger;
use crate::pick::{self, Policy, Row, Standing, VersionId, Wish};
use proto::cluster as wire;
use std::sync::Arc;
use types::{BLOCK_TOKENS, BlockHash, PolicyDigest, TenantId, Token};

/// Replicas name their blocks from a secret of their cluster. Of more secrets than so many, caches are not looked up.
const SALTS_MAX: usize = 4;

/// At the root of a replica's block names.
pub type Salt = [u8; 16];

#[derive(Default)]
pub struct Board {
    /// In the order in which they came.
    seats: Vec<Seat>,
    caches: Caches,
}

struct Seat {
    place: usize,
    /// But for what the ledger and the caches know.
    row: Row,
    salt: Salt,
    ledger: Arc<Ledger>,
    teller: Teller,
    circuit: Circuit,
}

/// What a view says of a replica, for its row.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub standing: Standing,
    pub digest: PolicyDigest,
    pub version: VersionId,
    pub context: u32,
    pub salt: Salt,
    /// The same at every router.
    pub id: u64,
}

/// Kept for its memory, so that a choice allocates nothing.
pub struct Scratch {
    rows: Vec<Row>,
    salts: Vec<(Salt, Ids)>,
    depths: Box<[u32; IDS_MAX]>,
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch { rows: Vec::new(), salts: Vec::with_capacity(SALTS_MAX), depths: Box::new([0; IDS_MAX]) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    pub place: usize,
    /// Of the prompt, tokens that its cache has.
    pub n_cached: u32,
    /// Among those that were open to it: somebody would have answered otherwise, and gets nothing.
    pub stranger: Option<usize>,
}

impl Board {
    pub fn sit(&mut self, place: usize, ledger: Arc<Ledger>) {
        debug_assert!(self.seats.last().is_none_or(|last| last.place < place), "no place is given twice");
        let row = row(&Facts {
            standing: Standing::Absent,
            digest: PolicyDigest::default(),
            version: VersionId::default(),
            context: 0,
            salt: Salt::default(),
            id: 0,
        });
        let (teller, circuit) = (Teller::default(), Circuit::default());
        self.seats.push(Seat { place, row, salt: Salt::default(), ledger, teller, circuit });
    }

    pub fn leave(&mut self, place: usize) {
        self.hear_anew(place);
        self.seats.retain(|seat| seat.place != place);
    }

    pub fn show(&mut self, place: usize, facts: &Facts) {
        if let Some(seat) = self.seat(place) {
            (seat.row, seat.salt) = (row(facts), facts.salt);
        }
    }

    /// What its cache has is not known any more: another stream begins.
    pub fn hear_anew(&mut self, place: usize) {
        let Board { seats, caches } = self;
        if let Some(seat) = find(seats, place) {
            caches.forget(&mut seat.teller);
            seat.teller = Teller::default();
        }
    }

    pub fn hear(&mut self, place: usize, told: &wire::Cached) -> Result<(), Gap> {
        let Board { seats, caches } = self;
        find(seats, place).map_or(Ok(()), |seat| caches.hear(&mut seat.teller, told))
    }

    /// Once a second: who is to get nothing new for a while, and who is to be tried again.
    pub fn judge(&mut self, second: u64) -> Vec<(usize, Turn)> {
        let windows: Vec<_> = self.seats.iter().map(|seat| seat.ledger.look()).collect();
        let mut n_shunned = self.seats.iter().filter(|seat| seat.circuit.is_open()).count();
        let n_ready = self.seats.iter().filter(|seat| seat.row.standing <= Standing::Shunned).count();
        let mut turns = Vec::new();
        for (at, seat) in self.seats.iter_mut().enumerate() {
            let usual = Usual::of_others(&windows, at);
            let is_open = seat.circuit.is_open();
            // Half of all may be shunned: if most of them are worse than they were, that is how it is.
            let may_open = is_open || (n_shunned + 1) * 2 <= n_ready;
            if let Some(turn) = seat.circuit.look(second, &windows[at], &usual, may_open) {
                n_shunned += usize::from(!is_open && seat.circuit.is_open());
                turns.push((seat.place, turn));
            }
        }
        turns
    }

    pub fn row_of(&self, place: usize) -> Option<Row> {
        let at = self.seats.binary_search_by_key(&place, |seat| seat.place).ok()?;
        Some(self.seats[at].row(&self.caches))
    }

    pub fn rows(&self) -> impl Iterator<Item = (usize, Row)> + '_ {
        self.seats.iter().map(|seat| (seat.place, seat.row(&self.caches)))
    }

    /// Who gets a request. `names` gives what its blocks are called from a secret on, one after the other.
    pub fn choose<I: Iterator<Item = u64>>(
        &self,
        policy: Policy,
        wish: &Wish,
        names: Option<impl Fn(&PolicyDigest, &Salt) -> I>,
        scratch: &mut Scratch,
    ) -> Option<Chosen> {
        scratch.rows.clear();
        scratch.rows.extend(self.rows().map(|(_, row)| row));
        if let Some(names) = names.filter(|_| policy.reads_caches(wish)) {
            self.look_up(wish, names, scratch);
        }
        let idx = pick::pick(policy, &scratch.rows, wish)?;
        // Among several versions everybody is somebody's.
        let of_one = || pick::strangers(&scratch.rows).next().map(|idx| self.seats[idx].place);
        let stranger = if wish.version.is_none() { of_one() } else { None };
        Some(Chosen { place: self.seats[idx].place, n_cached: scratch.rows[idx].n_cached, stranger })
    }

    /// For each row that is open to the request, what its cache has.
    fn look_up<I: Iterator<Item = u64>>(
        &self,
        wish: &Wish,
        names: impl Fn(&PolicyDigest, &Salt) -> I,
        scratch: &mut Scratch,
    ) {
        let Scratch { rows, salts, depths } = scratch;
        salts.clear();
        depths.fill(0);
        let (mut digest, mut n_open) = (None, 0);
        for (idx, row) in pick::open(rows, wish) {
            let Seat { salt, teller, .. } = &self.seats[idx];
            (digest, n_open) = (Some(row.digest), n_open + 1);
            let Some(id) = teller.id else { continue };
            let known = salts.iter().position(|(of, _)| of == salt);
            if known.is_none() && salts.len() < SALTS_MAX {
                salts.push((*salt, Ids::default()));
            }
            let at = known.unwrap_or(salts.len() - 1);
            if salts[at].0 == *salt {
                salts[at].1.insert(id);
            }
        }
        // Who is alone gets it whatever it has.
        let Some(digest) = digest.filter(|_| n_open > 1) else { return };
        for (salt, among) in salts.iter() {
            self.caches.depths(names(&digest, salt), *among, depths);
        }
        for (row, seat) in rows.iter_mut().zip(&self.seats) {
            let depth = seat.teller.id.map_or(0, |id| depths[usize::from(id)]);
            row.n_cached = (depth * BLOCK_TOKENS).min(wish.n_prompt.saturating_sub(1));
        }
    }

    fn seat(&mut self, place: usize) -> Option<&mut Seat> {
        find(&mut self.seats, place)
    }
}

fn find(seats: &mut [Seat], place: usize) -> Option<&mut Seat> {
    let at = seats.binary_search_by_key(&place, |seat| seat.place).ok()?;
    Some(&mut seats[at])
}

impl Seat {
    fn row(&self, caches: &Caches) -> Row {
        let standing = match self.row.standing {
            Standing::Ready if !self.circuit.admits(self.ledger.n_own()) => Standing::Shunned,
            standing => standing,
        };
        Row {
            standing,
            work: self.ledger.work(),
            n_running: self.ledger.n_running(),
            tokens_free: self.ledger.tokens_free(),
            n_names: self.teller.id.map_or(0, |id| caches.n_names(id)),
            ..self.row
        }
    }
}

fn row(facts: &Facts) -> Row {
    let Facts { standing, digest, version, context, id, .. } = *facts;
    Row { standing, digest, version, context, work: 0, n_running: 0, tokens_free: None, n_cached: 0, n_names: 0, id }
}

/// What a replica calls the blocks of a prompt that it could have: the last token is always computed.
pub fn names<'a>(
    prompt: &'a [Token],
    tenant: TenantId,
    digest: &PolicyDigest,
    salt: &Salt,
) -> impl Iterator<Item = u64> + use<'a> {
    let n_blocks = prompt.len().saturating_sub(1) / BLOCK_TOKENS as usize;
    let blocks = prompt.chunks_exact(BLOCK_TOKENS as usize).take(n_blocks);
    let root = BlockHash::root(digest, tenant, None, salt);
    blocks.scan(root, |name, block| {
        *name = name.child(block.iter().copied());
        Some(name.short())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(salt: u8, id: u64) -> Facts {
        let (digest, version) = (PolicyDigest::default(), VersionId::default());
        Facts { standing: Standing::Ready, digest, version, context: 4096, salt: [salt; 16], id }
    }

    fn board(salts: &[u8]) -> Board {
        let mut board = Board::default();
        for (place, salt) in salts.iter().enumerate() {
            board.sit(place, Arc::default());
            board.show(place, &facts(*salt, place as u64));
        }
        board
    }

    fn tell(board: &mut Board, place: usize, sequence: u64, prompt: &[Token], salt: u8) {
        let added = names(prompt, TenantId(0), &PolicyDigest::default(), &[salt; 16]).collect();
        let told = wire::Cached { sequence, anew: sequence == 1, added, dropped: Vec::new() };
        board.hear(place, &told).unwrap();
    }

    fn choose(board: &Board, prompt: &[Token]) -> (usize, u32) {
        let wish = Wish { n_prompt: prompt.len() as u32, ..Wish::default() };
        let names = |digest: &PolicyDigest, salt: &Salt| names(prompt, TenantId(0), digest, salt);
        let chosen = board.choose(Policy::Prefix, &wish, Some(names), &mut Scratch::default()).unwrap();
        (chosen.place, chosen.n_cached)
    }

    #[test]
    fn who_has_the_prompt_gets_it_whatever_its_secret_and_until_it_has_too_much_to_do() {
        let mut board = board(&[1, 2, 1]);
        let prompt: Vec<Token> = (0..100).collect();
        assert_eq!(choose(&board, &prompt), (0, 0));
        tell(&mut board, 1, 1, &prompt[..50], 2);
        assert_eq!(choose(&board, &prompt), (1, 48));
        tell(&mut board, 2, 1, &prompt, 1);
        assert_eq!(choose(&board, &prompt), (2, 96));
        // The same words of somebody else have other names.
        let others = |digest: &PolicyDigest, salt: &Salt| names(&prompt, TenantId(9), digest, salt);
        let wish = Wish { n_prompt: 100, ..Wish::default() };
        let chosen = board.choose(Policy::Prefix, &wish, Some(others), &mut Scratch::default()).unwrap();
        assert_eq!((chosen.place, chosen.n_cached), (0, 0));
        let ledger = board.seats[2].ledger.clone();
        let busy = ledger.enter(49);
        assert_eq!(choose(&board, &prompt), (1, 48));
        drop(busy);
        assert_eq!(choose(&board, &prompt), (2, 96));
        // A stream that begins anew has told nothing yet.
        board.hear_anew(2);
        assert_eq!(choose(&board, &prompt), (1, 48));
        board.leave(1);
        assert_eq!(choose(&board, &prompt), (0, 0));
    }

    #[test]
    fn of_a_prompt_at_most_all_but_its_last_token_is_cached() {
        let mut board = board(&[1, 1]);
        let prompt: Vec<Token> = (0..33).collect();
        tell(&mut board, 1, 1, &prompt, 1);
        assert_eq!((choose(&board, &prompt), choose(&board, &prompt[..32])), ((1, 32), (1, 16)));
        assert_eq!(choose(&board, &prompt[..16]), (0, 0));
    }
}
