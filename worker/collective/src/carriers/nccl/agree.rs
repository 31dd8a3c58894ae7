//! What ranks of a mesh send each other about NCCL: version, device and configured carrier, and, once all agree, the
//! ids under which communicators meet. Creates no communicator.

use super::api::{NcclApi, NcclVersion, UniqueId};
use crate::carriers::carry::CarrierChoice;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::notes::swap_notes;
use crate::plan::LinkEncryption;
use backend::cuda::Cuda;

const SUPPORT_WORDS: usize = 8;
const ID_WORDS: usize = 32;

/// What a rank sends to its neighbours.
#[derive(Clone, Copy)]
pub(super) struct NcclSupport {
    /// The carrier that the rank was configured with.
    carrier: u32,
    /// The library's version; zero without the library.
    version: i32,
    /// Names a device of a host.
    device: [u32; 4],
    /// Names a host.
    host: [u32; 2],
}

impl NcclSupport {
    pub fn new(cuda: &Cuda, choice: CarrierChoice, api: Option<&NcclApi>) -> Result<NcclSupport> {
        let version = api.map_or(Ok(NcclVersion(0)), NcclApi::version)?.0;
        Ok(NcclSupport { carrier: choice as u32, version, device: device_name(cuda), host: host_name() })
    }

    fn words(&self) -> [u32; SUPPORT_WORDS] {
        let mut words = [0; SUPPORT_WORDS];
        (words[0], words[1]) = (self.carrier, self.version as u32);
        words[2..6].copy_from_slice(&self.device);
        words[6..].copy_from_slice(&self.host);
        words
    }

    fn of(words: &[u32; SUPPORT_WORDS]) -> NcclSupport {
        let device = std::array::from_fn(|i| words[2 + i]);
        NcclSupport { carrier: words[0], version: words[1] as i32, device, host: [words[6], words[7]] }
    }
}

/// The neighbours with which a rank exchanges without the host.
#[derive(Clone, Copy)]
pub(super) struct NcclPartners {
    /// Whether these include the other ranks of its stage.
    pub stage: bool,
    /// Whether these include the same rank of the next stage, and of the previous one.
    pub next: bool,
    pub before: bool,
}

impl NcclPartners {
    pub fn has_any(self) -> bool {
        self.stage || self.next || self.before
    }
}

/// The id under which each communicator meets. Without a communicator its id is meaningless.
pub(super) struct CommIds {
    pub stage: UniqueId,
    pub next: UniqueId,
    pub before: UniqueId,
}

/// Returns whether these ranks exchange through NCCL. All of them get the same result.
fn agree(all: &[NcclSupport], encryption: LinkEncryption) -> Result<bool> {
    let is_chosen = |choice: CarrierChoice| all.iter().any(|one| one.carrier == choice as u32);
    if is_chosen(CarrierChoice::Nccl) && is_chosen(CarrierChoice::Host) {
        return Err(Error::Plan("some ranks exchange through NCCL, and their peers through the host"));
    }
    let version = all[0].version;
    let is_there = version >= NcclVersion::MIN.0 && all.iter().all(|one| one.version == version);
    let is_shared = (1..all.len()).any(|i| all[..i].iter().any(|one| one.device == all[i].device));
    // NCCL's own connections are not encrypted.
    let is_overheard = encryption == LinkEncryption::On && all.iter().any(|one| one.host != all[0].host);
    if is_chosen(CarrierChoice::Nccl) && is_overheard {
        return Err(Error::Plan("NCCL cannot encrypt links between hosts, which --link-encryption on requires"));
    }
    let is_able = is_there && !is_overheard && (!is_shared || NcclVersion(version) >= NcclVersion::SHARING);
    if is_chosen(CarrierChoice::Nccl) && !is_able {
        return Err(Error::Plan(match is_there {
            true => "ranks that share a device require NCCL 2.30 or later",
            false => "NCCL requires the same libnccl.so.2, of version 2.19 or later, on all ranks",
        }));
    }
    // NCCL's own environment must allow a shared device, so devices are shared only if the configuration requires NCCL.
    let is_chosen_by_all = all.iter().all(|one| one.carrier == CarrierChoice::Nccl as u32);
    Ok(!is_chosen(CarrierChoice::Host) && is_able && (!is_shared || is_chosen_by_all))
}

/// Exchanges support with the neighbours and returns those that use NCCL. They get the same result.
pub(super) fn partners(mesh: &mut Mesh, mine: &NcclSupport) -> Result<NcclPartners> {
    let (me, tp_size) = (usize::from(mesh.rank().0), mesh.tp_size());
    let stage: Vec<usize> = (0..tp_size).map(|tp| mesh.stage_rank(tp)).collect();
    let next = (!mesh.part().is_last()).then(|| [me, me + tp_size]);
    let before = (!mesh.part().is_first()).then(|| [me - tp_size, me]);
    let groups = [&stage, next.as_slice().as_flattened(), before.as_slice().as_flattened()];
    let neighbours: Vec<usize> = groups.concat().into_iter().filter(|rank| *rank != me).collect();
    let encryption = mesh.encryption();
    let all = swap_notes(mesh, SUPPORT_WORDS as u64, mine.words(), &neighbours, &neighbours)?;
    let has_agreed = |ranks: &[usize]| {
        let group: Vec<NcclSupport> = ranks.iter().map(|rank| NcclSupport::of(&all[*rank])).collect();
        if group.len() > 1 { agree(&group, encryption) } else { Ok(false) }
    };
    Ok(NcclPartners { stage: has_agreed(groups[0])?, next: has_agreed(groups[1])?, before: has_agreed(groups[2])? })
}

/// Lets the lowest rank of a stage, or of a pair of stages, make the id and send it. It does so only once all have
/// agreed, because NCCL begins to listen for each id that it makes.
pub(super) fn exchange_comm_ids(mesh: &mut Mesh, api: &NcclApi, partners: NcclPartners) -> Result<CommIds> {
    const WORDS: usize = 2 * ID_WORDS;
    let make = |is_mine: bool| if is_mine { api.unique_id() } else { Ok(UniqueId([0; ID_WORDS])) };
    let is_lowest = mesh.tp() == 0;
    let made = make(partners.stage && is_lowest).and_then(|stage| Ok([stage, make(partners.next)?]));
    let mine = made.map_err(|error| mesh.fail(error.into()))?;
    let (me, tp_size, first) = (usize::from(mesh.rank().0), mesh.tp_size(), mesh.stage_rank(0));
    let others = if partners.stage && is_lowest { first + 1..first + tp_size } else { 0..0 };
    let to: Vec<usize> = others.chain(partners.next.then_some(me + tp_size)).collect();
    let of_stage = (partners.stage && !is_lowest).then_some(first);
    let from: Vec<usize> = of_stage.into_iter().chain(partners.before.then(|| me - tp_size)).collect();
    let mut words = [0; WORDS];
    words.copy_from_slice(mine.map(|id| id.0).as_flattened());
    let all = swap_notes(mesh, WORDS as u64, words, &to, &from)?;
    let id = |rank: usize, which: usize| UniqueId(all[rank].as_chunks().0[which]);
    let before = if partners.before { id(me - tp_size, 1) } else { mine[1] };
    Ok(CommIds { stage: id(first, 0), next: mine[1], before })
}

/// Returns the device's name, equal in all processes that can reach it.
fn device_name(cuda: &Cuda) -> [u32; 4] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&boot());
    for number in cuda.card().pci {
        hasher.update(&number.to_le_bytes());
    }
    words_of(hasher.finalize())
}

/// Returns the machine's name, which lasts until it boots again.
fn host_name() -> [u32; 2] {
    words_of(blake3::hash(&boot()))
}

/// If the boot id cannot be read, hosts look the same and devices look shared, so the host carries.
fn boot() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

fn words_of<const N: usize>(hash: blake3::Hash) -> [u32; N] {
    let words = hash.as_bytes().as_chunks::<4>().0;
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn support(carrier: CarrierChoice, version: i32, device: u32) -> NcclSupport {
        NcclSupport { carrier: carrier as u32, version, device: [device; 4], host: [1, 2] }
    }

    fn agreed(all: &[NcclSupport]) -> Option<bool> {
        agree(all, LinkEncryption::Off).ok()
    }

    #[test]
    fn what_is_to_be_encrypted_goes_through_nccl_within_a_host_alone() {
        let on = |carrier, host| NcclSupport { host: [1, host], ..support(carrier, 22_800, host) };
        let check = |choice, hosts: [u32; 2], expect| {
            let all = hosts.map(|host| on(choice, host));
            let all = [all[0], NcclSupport { device: [9; 4], ..all[1] }];
            let agreed = [LinkEncryption::Off, LinkEncryption::On].map(|encryption| agree(&all, encryption).ok());
            assert_eq!(agreed, expect, "{choice:?} on {hosts:?}");
        };
        check(CarrierChoice::Auto, [1, 1], [Some(true), Some(true)]);
        check(CarrierChoice::Auto, [1, 2], [Some(true), Some(false)]);
        check(CarrierChoice::Nccl, [1, 1], [Some(true), Some(true)]);
        check(CarrierChoice::Nccl, [1, 2], [Some(true), None]);
    }

    #[test]
    fn nccl_is_used_by_all_or_none() {
        let auto = |version, device| support(CarrierChoice::Auto, version, device);
        assert_eq!(agreed(&[auto(22_800, 1), auto(22_800, 2)]), Some(true));
        assert_eq!(agreed(&[auto(22_800, 1), auto(0, 2)]), Some(false));
        assert_eq!(agreed(&[auto(22_800, 1), auto(23_007, 2)]), Some(false));
        assert_eq!(agreed(&[auto(21_806, 1), auto(21_806, 2)]), Some(false));
        assert_eq!(agreed(&[auto(22_800, 1), support(CarrierChoice::Host, 22_800, 2)]), Some(false));
    }

    #[test]
    fn device_is_shared_only_by_explicit_choice() {
        let both = |carrier, version| agreed(&[support(carrier, version, 1), support(carrier, version, 1)]);
        assert_eq!(both(CarrierChoice::Auto, 23_007), Some(false));
        assert_eq!(both(CarrierChoice::Nccl, 23_007), Some(true));
        assert_eq!(both(CarrierChoice::Nccl, 22_800), None);
        assert_eq!(both(CarrierChoice::Nccl, 0), None);
        assert_eq!(agreed(&[support(CarrierChoice::Nccl, 23_007, 1), support(CarrierChoice::Host, 23_007, 2)]), None);
    }

    #[test]
    fn support_survives_encoding() {
        let there = support(CarrierChoice::Nccl, 23_007, 5);
        let back = NcclSupport::of(&there.words());
        assert_eq!((back.carrier, back.version, back.device, back.host), (2, 23_007, [5; 4], [1, 2]));
    }
}
