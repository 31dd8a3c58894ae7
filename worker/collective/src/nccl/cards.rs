//! What ranks that have met as a mesh tell each other of NCCL: which they have, on which device; and, once all have
//! said so, the names that communicators come together under. Makes none of them.

use super::meet::Carrier;
use super::table::{NcclVersion, Table, UniqueId};
use crate::error::{Error, Result};
use crate::frame::Kind;
use crate::mesh::Mesh;
use crate::moves::{Ends, Move, Way};
use backend::cuda::Cuda;

const CARD_WORDS: usize = 6;
const ID_WORDS: usize = 32;

/// What a rank tells its neighbours.
#[derive(Clone, Copy)]
pub(super) struct Card {
    /// Which carrier it was told to take.
    wish: u32,
    /// Zero: it has none.
    version: i32,
    /// Which device of which host.
    device: [u32; 4],
}

impl Card {
    pub fn new(cuda: &Cuda, carrier: Carrier, table: Option<&Table>) -> Result<Card> {
        let version = table.map_or(Ok(NcclVersion(0)), Table::version)?.0;
        Ok(Card { wish: carrier as u32, version, device: device_name(cuda) })
    }

    fn words(&self) -> [u32; CARD_WORDS] {
        let mut words = [0; CARD_WORDS];
        (words[0], words[1]) = (self.wish, self.version as u32);
        words[2..].copy_from_slice(&self.device);
        words
    }

    fn of(words: &[u32; CARD_WORDS]) -> Card {
        let device = std::array::from_fn(|i| words[2 + i]);
        Card { wish: words[0], version: words[1] as i32, device }
    }
}

/// With whom a rank exchanges without the host.
#[derive(Clone, Copy)]
pub(super) struct Partners {
    /// The others of its stage.
    pub stage: bool,
    /// The same rank of the next stage, and of the one before.
    pub next: bool,
    pub before: bool,
}

impl Partners {
    pub fn has_any(self) -> bool {
        self.stage || self.next || self.before
    }
}

/// Under which name each communicator meets. Those that are not to be have none that means anything.
pub(super) struct Names {
    pub stage: UniqueId,
    pub next: UniqueId,
    pub before: UniqueId,
}

/// Whether these ranks exchange through NCCL. All of them come to the same answer.
fn agree(cards: &[Card]) -> Result<bool> {
    let wish = |carrier: Carrier| cards.iter().any(|card| card.wish == carrier as u32);
    if wish(Carrier::Nccl) && wish(Carrier::Host) {
        return Err(Error::Plan("ranks that are to exchange through NCCL, and their peers through the host"));
    }
    let version = cards[0].version;
    let is_there = version >= NcclVersion::MIN.0 && cards.iter().all(|card| card.version == version);
    let is_shared = (1..cards.len()).any(|i| cards[..i].iter().any(|card| card.device == cards[i].device));
    let is_able = is_there && (!is_shared || NcclVersion(version) >= NcclVersion::SHARING);
    if wish(Carrier::Nccl) && !is_able {
        return Err(Error::Plan(match is_there {
            true => "NCCL before 2.30 for ranks that share a device",
            false => "NCCL (libnccl.so.2, 2.19 or later) for ranks that do not all have the same",
        }));
    }
    // To share a device has to be allowed in NCCL's own environment, so that nobody gets there unasked.
    let is_asked = cards.iter().all(|card| card.wish == Carrier::Nccl as u32);
    Ok(!wish(Carrier::Host) && is_able && (!is_shared || is_asked))
}

impl Mesh {
    /// Tells the neighbours, hears from them, and says with whom of them to exchange. They say the same.
    pub(super) fn partners(&mut self, mine: &Card) -> Result<Partners> {
        let (me, tp_size) = (usize::from(self.rank.0), self.tp_size());
        let stage: Vec<usize> = (0..tp_size).map(|tp| self.in_stage(tp)).collect();
        let next = (!self.part.is_last()).then(|| [me, me + tp_size]);
        let before = (!self.part.is_first()).then(|| [me - tp_size, me]);
        let groups = [&stage, next.as_slice().as_flattened(), before.as_slice().as_flattened()];
        let neighbours: Vec<usize> = groups.concat().into_iter().filter(|rank| *rank != me).collect();
        for rank in neighbours {
            self.moves.extend([Way::Out, Way::In].map(|way| Move::block(rank, way, 1, 0..CARD_WORDS)));
        }
        let mut cards = Told { mine: mine.words(), theirs: vec![mine.words(); self.grid.n_ranks().into()] };
        self.exchange(Kind::Cards, CARD_WORDS as u64, &|_| 0, &mut cards)?;
        let has_agreed = |ranks: &[usize]| {
            let cards: Vec<Card> = ranks.iter().map(|rank| Card::of(&cards.theirs[*rank])).collect();
            if cards.len() > 1 { agree(&cards) } else { Ok(false) }
        };
        Ok(Partners { stage: has_agreed(groups[0])?, next: has_agreed(groups[1])?, before: has_agreed(groups[2])? })
    }

    /// The lowest of a stage, or of a pair of stages, makes the name and tells it: not before all of them have agreed,
    /// as NCCL begins to listen for those that it makes a name for.
    pub(super) fn names(&mut self, table: &Table, partners: Partners) -> Result<Names> {
        let make = |is_mine: bool| if is_mine { table.unique_id() } else { Ok(UniqueId([0; ID_WORDS])) };
        let made = make(partners.stage && self.tp() == 0).and_then(|stage| Ok([stage, make(partners.next)?]));
        let mine = made.map_err(|error| self.fail(error.into()))?;
        let (me, tp_size, first) = (usize::from(self.rank.0), self.tp_size(), self.in_stage(0));
        let others = if partners.stage && self.tp() == 0 { first + 1..first + tp_size } else { 0..0 };
        let to = others.chain(partners.next.then_some(me + tp_size)).map(|rank| (rank, Way::Out));
        let of_stage = (partners.stage && self.tp() != 0).then_some(first);
        let from = of_stage.into_iter().chain(partners.before.then(|| me - tp_size)).map(|rank| (rank, Way::In));
        const WORDS: usize = 2 * ID_WORDS;
        self.moves.extend(to.chain(from).map(|(rank, way)| Move::block(rank, way, 1, 0..WORDS)));
        let mut mine_as_words = [0; WORDS];
        mine_as_words.copy_from_slice(mine.map(|id| id.0).as_flattened());
        let mut names = Told { mine: mine_as_words, theirs: vec![mine_as_words; self.grid.n_ranks().into()] };
        self.exchange(Kind::Cards, WORDS as u64, &|_| 0, &mut names)?;
        let id = |rank: usize, which: usize| UniqueId(names.theirs[rank].as_chunks().0[which]);
        let before = if partners.before { id(me - tp_size, 1) } else { mine[1] };
        Ok(Names { stage: id(first, 0), next: mine[1], before })
    }
}

/// Words that ranks tell each other: of those that tell nothing, this rank's own.
struct Told<const N: usize> {
    mine: [u32; N],
    theirs: Vec<[u32; N]>,
}

impl<const N: usize> Ends for Told<N> {
    fn read(&mut self, _row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.mine[col..][..out.len()]);
    }

    fn write(&mut self, peer: usize, _row: usize, col: usize, words: &[u32]) {
        self.theirs[peer][col..][..words.len()].copy_from_slice(words);
    }
}

/// The same for all processes that can reach the device.
fn device_name(cuda: &Cuda) -> [u32; 4] {
    // Where it cannot be read, hosts are told apart by nothing, and devices look shared: the host carries.
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&boot);
    for number in cuda.card().pci {
        hasher.update(&number.to_le_bytes());
    }
    let hash = hasher.finalize();
    let words = hash.as_bytes().as_chunks::<4>().0;
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(wish: Carrier, version: i32, device: u32) -> Card {
        Card { wish: wish as u32, version, device: [device; 4] }
    }

    fn agreed(cards: &[Card]) -> Option<bool> {
        agree(cards).ok()
    }

    #[test]
    fn all_have_it_or_nobody_does() {
        let auto = |version, device| card(Carrier::Auto, version, device);
        assert_eq!(agreed(&[auto(22_800, 1), auto(22_800, 2)]), Some(true));
        assert_eq!(agreed(&[auto(22_800, 1), auto(0, 2)]), Some(false));
        assert_eq!(agreed(&[auto(22_800, 1), auto(23_007, 2)]), Some(false));
        assert_eq!(agreed(&[auto(21_806, 1), auto(21_806, 2)]), Some(false));
        assert_eq!(agreed(&[auto(22_800, 1), card(Carrier::Host, 22_800, 2)]), Some(false));
    }

    #[test]
    fn a_device_is_shared_only_by_those_who_ask_for_it() {
        let both = |wish, version| agreed(&[card(wish, version, 1), card(wish, version, 1)]);
        assert_eq!(both(Carrier::Auto, 23_007), Some(false));
        assert_eq!(both(Carrier::Nccl, 23_007), Some(true));
        assert_eq!(both(Carrier::Nccl, 22_800), None);
        assert_eq!(both(Carrier::Nccl, 0), None);
        assert_eq!(agreed(&[card(Carrier::Nccl, 23_007, 1), card(Carrier::Host, 23_007, 2)]), None);
    }

    #[test]
    fn cards_come_back() {
        let there = card(Carrier::Nccl, 23_007, 5);
        let back = Card::of(&there.words());
        assert_eq!((back.wish, back.version, back.device), (2, 23_007, [5; 4]));
    }
}
