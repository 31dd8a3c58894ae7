//! Resume handles: a client sends one, with how much it has read, and its stream continues at any router of the
//! cluster. Identifies the request only by its fingerprint: the client sends it again.
//!
//! A handle is one word of text: fields, among them the request's fingerprint, and a MAC over them and the tenant under
//! the cluster's key. With a changed letter, another request or another tenant it is invalid. A stream is a function of
//! its request, so a handle reveals nothing that the request itself would not.

use crate::refusal::ResumeError;
use std::fmt::{self, Display};
use types::{PolicyDigest, Request, TenantId};

const VERSION: u8 = 2;
/// The bytes of the policy digest in a handle. This is enough, because the reading router has all served digests.
const DIGEST_BYTES: usize = 8;
const PRINT_BYTES: usize = 8;
const CODE_BYTES: usize = 12;
const KEY_PURPOSE: &str = "lockstep 2026 resume handle";
const PRINT_PURPOSE: &str = "lockstep 2026 resume fingerprint";
/// A longer text is no handle, and is not read.
const TEXT_CHARS_MAX: usize = 1024;
/// A replica's name in a handle. A longer name is cut, and the replica is not found again by it.
const NAME_BYTES_MAX: usize = 255;

/// The key that only the routers of a cluster share.
#[derive(Clone)]
pub struct ResumeKey([u8; 32]);

impl ResumeKey {
    /// Derives the key from the cluster's secret. A cluster without a secret trusts every client that reaches it.
    pub fn of(secret: &[u8]) -> ResumeKey {
        ResumeKey(blake3::derive_key(KEY_PURPOSE, secret))
    }
}

impl fmt::Debug for ResumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResumeKey(..)")
    }
}

/// What another router needs to resume a stream, besides the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResumeHandle {
    pub digest: PolicyDigest,
    pub seed: u64,
    /// The context of the former replica: so an answer without its own limit ends at the same place again.
    pub context: u32,
    /// The context of the former replica: an answer without its own limit ends at the same place again.
    pub public: (u32, u64),
    /// When it was let in, in Unix seconds. A template that reads the time gets this one again.
    pub created: u64,
    /// The id of its first choice, under which it may still run; the others' ids follow.
    pub first_id: u64,
    pub incarnation: u64,
    pub replica: String,
}

/// A digest of everything that a stream is a function of, as submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint([u8; PRINT_BYTES]);

impl Fingerprint {
    /// `text` is the client's settings for the text, which replicas never see.
    pub fn of<'a>(requests: impl Iterator<Item = &'a Request>, text: impl Iterator<Item = &'a str>) -> Fingerprint {
        let mut hasher = blake3::Hasher::new_derive_key(PRINT_PURPOSE);
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        requests.for_each(|request| add(&proto::stream_key(request)));
        text.for_each(|text| add(text.as_bytes()));
        let mut print = [0; PRINT_BYTES];
        hasher.finalize_xof().fill(&mut print);
        Fingerprint(print)
    }
}

impl ResumeHandle {
    pub fn seal(&self, key: &ResumeKey, print: &Fingerprint, tenant: TenantId) -> String {
        let mut bytes = self.fields(print);
        let code = code(key, &bytes, tenant);
        bytes.extend_from_slice(&code);
        encode(&bytes)
    }

    /// Whether it was made at this replica in this incarnation: a later one has none of its requests.
    pub fn is_of(&self, replica: &str, incarnation: u64) -> bool {
        self.replica == replica && self.incarnation == incarnation
    }

    fn fields(&self, print: &Fingerprint) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&self.digest.0[..DIGEST_BYTES]);
        bytes.extend_from_slice(&print.0);
        let (nonce, public) = self.public;
        // A stream that was not resumed yet has one id.
        let moved = self.first_id ^ public;
        for number in [self.seed, public, self.created, moved, self.incarnation, self.context.into(), nonce.into()] {
            put(&mut bytes, number);
        }
        bytes.extend_from_slice(&self.replica.as_bytes()[..cut(&self.replica)]);
        bytes
    }
}

fn cut(name: &str) -> usize {
    (0..=name.len().min(NAME_BYTES_MAX)).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0)
}

/// A handle as a client sent it, not trusted before it is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UncheckedHandle {
    pub unchecked: ResumeHandle,
    bytes: Vec<u8>,
    code: [u8; CODE_BYTES],
}

impl UncheckedHandle {
    pub fn read(text: &str) -> Result<UncheckedHandle, ResumeError> {
        let mut bytes =
            Some(text).filter(|text| text.len() <= TEXT_CHARS_MAX).and_then(decode).ok_or(ResumeError::Garbled)?;
        let at = bytes.len().checked_sub(CODE_BYTES).ok_or(ResumeError::Garbled)?;
        let code = bytes.split_off(at).try_into().map_err(|_| ResumeError::Garbled)?;
        let unchecked = fields(&bytes).ok_or(ResumeError::Garbled)?;
        Ok(UncheckedHandle { unchecked, bytes, code })
    }

    /// Completes the digest, of which a handle has only the beginning, from the digests that are served here.
    pub fn complete_digest(&mut self, served: impl Iterator<Item = PolicyDigest>) {
        let of = &mut self.unchecked.digest;
        let is_it = |known: &PolicyDigest| known.0[..DIGEST_BYTES] == of.0[..DIGEST_BYTES];
        let found = { served }.find(is_it);
        *of = found.unwrap_or(*of);
    }

    /// Returns the handle, if it was made by this cluster for this request of this tenant.
    pub fn check(self, key: &ResumeKey, print: &Fingerprint, tenant: TenantId) -> Result<ResumeHandle, ResumeError> {
        // All bytes are compared to the end, so that timing does not show how much of a guess was right.
        let expected = code(key, &self.bytes, tenant);
        let differs = expected.iter().zip(&self.code).fold(0, |all, (a, b)| all | (a ^ b));
        if std::hint::black_box(differs) != 0 {
            return Err(ResumeError::Forged);
        }
        let is_of_it = self.bytes[PRINT_AT..PRINT_AT + PRINT_BYTES] == print.0;
        if is_of_it { Ok(self.unchecked) } else { Err(ResumeError::OtherRequest) }
    }
}

const PRINT_AT: usize = 1 + DIGEST_BYTES;

fn fields(bytes: &[u8]) -> Option<ResumeHandle> {
    let mut rest = bytes.strip_prefix(&[VERSION])?;
    let begins: [u8; DIGEST_BYTES] = take(&mut rest)?;
    let mut digest = PolicyDigest::default();
    digest.0[..DIGEST_BYTES].copy_from_slice(&begins);
    let _print: [u8; PRINT_BYTES] = take(&mut rest)?;
    let mut number = || read_varint(&mut rest);
    let (seed, public, created, moved, incarnation) = (number()?, number()?, number()?, number()?, number()?);
    let (context, nonce) = (u32::try_from(number()?).ok()?, u32::try_from(number()?).ok()?);
    let first_id = moved ^ public;
    let replica = Some(rest).filter(|name| name.len() <= NAME_BYTES_MAX)?;
    let replica = String::from_utf8(replica.to_vec()).ok()?;
    Some(ResumeHandle { digest, seed, context, public: (nonce, public), created, first_id, incarnation, replica })
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*first)
}

/// Writes seven bits a byte, the lowest first; all bytes but the last have the eighth.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn read_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for at in (0..u64::BITS).step_by(7) {
        let [byte] = take(rest)?;
        number |= u64::from(byte & 0x7f) << at;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

fn code(key: &ResumeKey, fields: &[u8], tenant: TenantId) -> [u8; CODE_BYTES] {
    let mut hasher = blake3::Hasher::new_keyed(&key.0);
    hasher.update(&tenant.0.to_le_bytes()).update(fields);
    let mut code = [0; CODE_BYTES];
    code.copy_from_slice(&hasher.finalize().as_bytes()[..CODE_BYTES]);
    code
}

/// How much of one choice a client has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadMark {
    /// The client does not have even the choice's opening.
    #[default]
    Nothing,
    /// The client has the text that the first `n` tokens allow to be shown; if the choice `ended`, it has its end too.
    Tokens { n: u32, ended: bool },
}

impl ReadMark {
    pub fn at(n: u32) -> ReadMark {
        ReadMark::Tokens { n, ended: false }
    }

    pub fn n_tokens(self) -> u32 {
        match self {
            ReadMark::Nothing => 0,
            ReadMark::Tokens { n, .. } => n,
        }
    }

    pub fn has_ended(self) -> bool {
        matches!(self, ReadMark::Tokens { ended: true, .. })
    }

    fn parse(text: &str) -> Option<ReadMark> {
        if text == "-" {
            return Some(ReadMark::Nothing);
        }
        let (digits, ended) = text.strip_suffix('e').map_or((text, false), |digits| (digits, true));
        Some(ReadMark::Tokens { n: whole_number(digits)?, ended })
    }
}

fn whole_number(digits: &str) -> Option<u32> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

impl Display for ReadMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadMark::Nothing => f.write_str("-"),
            ReadMark::Tokens { n, ended } => write!(f, "{n}{}", if *ended { "e" } else { "" }),
        }
    }
}

/// How much of a stream a client has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadMarks {
    pub choices: Vec<ReadMark>,
    pub usage: bool,
    /// How many events the client has, where events are numbered.
    pub n_events: Option<u32>,
}

impl ReadMarks {
    pub fn none(n_choices: usize) -> ReadMarks {
        ReadMarks { choices: vec![ReadMark::Nothing; n_choices], ..ReadMarks::default() }
    }
}

impl Display for ReadMarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, mark) in self.choices.iter().enumerate() {
            write!(f, "{}{mark}", if i > 0 { "," } else { "" })?;
        }
        f.write_str(if self.usage { "!" } else { "" })?;
        self.n_events.map_or(Ok(()), |n| write!(f, "@{n}"))
    }
}

/// What a client sends to resume a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    pub handle: UncheckedHandle,
    pub marks: ReadMarks,
}

impl Resume {
    /// Parses a `Last-Event-ID`: the handle, a colon, a mark for each choice, and optionally the number of events.
    pub fn parse(text: &str, choices_max: usize) -> Result<Resume, ResumeError> {
        let (handle, marks) = text.trim().split_once(':').ok_or(ResumeError::Garbled)?;
        let (marks, n_events) = match marks.split_once('@') {
            Some((marks, n)) => (marks, Some(whole_number(n).ok_or(ResumeError::Garbled)?)),
            None => (marks, None),
        };
        let (marks, usage) = marks.strip_suffix('!').map_or((marks, false), |marks| (marks, true));
        let choices = marks.split(',').take(choices_max + 1).map(ReadMark::parse);
        let choices = choices.collect::<Option<Vec<_>>>().ok_or(ResumeError::Garbled)?;
        Ok(Resume { handle: UncheckedHandle::read(handle)?, marks: ReadMarks { choices, usage, n_events } })
    }
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// URL-safe Base64 without padding.
fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        text.extend((0..=three.len()).map(|i| char::from(DIGITS[(bits >> (18 - 6 * i)) as usize & 63])));
    }
    text
}

/// Each run of bytes has exactly one text: a text that `encode` would not have written is refused.
fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for four in text.as_bytes().chunks(4) {
        let digit = |digit: &u8| DIGITS.iter().position(|known| known == digit).map(|digit| digit as u32);
        let bits = four.iter().try_fold(0u32, |bits, byte| digit(byte).map(|digit| bits << 6 | digit))?;
        let bits = bits << (6 * (4 - four.len()));
        let n = four.len().checked_sub(1).filter(|n| *n > 0)?;
        bytes.extend_from_slice(&bits.to_be_bytes()[1..=n]);
    }
    (encode(&bytes) == text).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(prompt: &[u32]) -> Fingerprint {
        let request = Request { prompt: prompt.to_vec(), ..Request::default() };
        Fingerprint::of([&request].into_iter(), ["stop"].into_iter())
    }

    fn handle() -> ResumeHandle {
        ResumeHandle {
            digest: PolicyDigest([7; 32]),
            seed: u64::MAX - 1,
            context: 200,
            public: (3, 4),
            created: 5,
            first_id: 6,
            incarnation: 8,
            replica: "local-0".into(),
        }
    }

    #[test]
    fn only_a_sealed_handle_opens() {
        let (key, print, tenant) = (ResumeKey::of(b"secret"), print(&[1, 2]), TenantId(9));
        let text = handle().seal(&key, &print, tenant);
        let opened = UncheckedHandle::read(&text).unwrap();
        let begins = |of: &ResumeHandle| PolicyDigest(std::array::from_fn(|i| if i < 8 { of.digest.0[i] } else { 0 }));
        assert_eq!(opened.unchecked, ResumeHandle { digest: begins(&handle()), ..handle() });
        let mut opened = opened;
        opened.complete_digest([PolicyDigest([6; 32]), PolicyDigest([7; 32])].into_iter());
        assert_eq!(opened.unchecked, handle());
        let check = |key: &ResumeKey, print: &Fingerprint, tenant| opened.clone().check(key, print, tenant);
        assert_eq!(check(&key, &print, tenant), Ok(handle()));
        assert_eq!(check(&ResumeKey::of(b"another"), &print, tenant), Err(ResumeError::Forged));
        assert_eq!(check(&key, &print, TenantId(8)), Err(ResumeError::Forged));
        assert_eq!(check(&key, &self::print(&[1, 3]), tenant), Err(ResumeError::OtherRequest));
        // Every change is noticed, and most before any field is trusted.
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            let check = UncheckedHandle::read(&changed).and_then(|opened| opened.check(&key, &print, tenant));
            assert!(check.is_err(), "letter {at} of {text}");
        }
        for cut in 0..text.len() {
            let check = UncheckedHandle::read(&text[..cut]).and_then(|opened| opened.check(&key, &print, tenant));
            assert!(check.is_err(), "{cut} letters of {text}");
        }
    }

    /// The handle has to be short, because it stands in each event.
    #[test]
    fn a_handle_is_short() {
        let made = ResumeHandle { seed: (1 << 53) - 1, created: 1 << 31, public: (u32::MAX, 1 << 40), ..handle() };
        let made = ResumeHandle { first_id: 1 << 40, context: 131_072, incarnation: 1 << 20, ..made };
        let text = made.seal(&ResumeKey::of(b""), &print(&[]), TenantId(0));
        assert!(text.len() <= 96, "{} letters: {text}", text.len());
    }

    #[test]
    fn a_long_name_is_cut_where_a_letter_ends() {
        let (key, print) = (ResumeKey::of(b""), print(&[]));
        let replica = "é".repeat(200);
        let text = ResumeHandle { replica, ..handle() }.seal(&key, &print, TenantId(0));
        assert_eq!(UncheckedHandle::read(&text).unwrap().unchecked.replica, "é".repeat(127));
    }

    #[test]
    fn marks_are_read_as_they_are_written() {
        let handle = handle().seal(&ResumeKey::of(b""), &print(&[]), TenantId(0));
        for text in ["-", "0", "17,-,3e", "4294967295e!", "1,2,3", "5@7", "5e!@4294967295"] {
            let resume = Resume::parse(&format!("{handle}:{text}"), 3).unwrap();
            assert_eq!(resume.marks.to_string(), text);
        }
        for text in ["", "e", "-e", "1,", "+1", "1!2", "4294967296", "!", "0x1", "1@", "@1", "1@+2", "1@2!"] {
            assert_eq!(Resume::parse(&format!("{handle}:{text}"), 3), Err(ResumeError::Garbled), "{text:?}");
        }
        assert_eq!(Resume::parse(&handle, 3), Err(ResumeError::Garbled));
        assert_eq!(Resume::parse(":1", 3), Err(ResumeError::Garbled));
        // No more marks are kept than a stream can have.
        let many = Resume::parse(&format!("{handle}:{}1", "1,".repeat(100_000)), 3).unwrap();
        assert_eq!(many.marks.choices.len(), 4);
    }

    #[test]
    fn letters_are_those_of_urls() {
        for (bytes, text) in [(&b""[..], ""), (b"f", "Zg"), (b"fo", "Zm8"), (b"foo", "Zm9v"), (&[255; 3], "____")] {
            assert_eq!((encode(bytes).as_str(), decode(text).as_deref()), (text, Some(bytes)));
        }
        for text in ["Z", "Zh", "Zm9", "Zg==", "Zm9v!", "Zm9vZ", "é"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
