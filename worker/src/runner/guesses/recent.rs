//! The newest answers of each named client: a client often gets answers that resemble each other. Two clients never
//! share an answer, nor do two salts of one client.

use std::collections::VecDeque;
use types::{CacheOwner, Request, TenantId, Token};

/// The most clients with answers.
const OWNERS_MAX: usize = 64;
/// The most tokens of one client's answers.
const TOKENS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(in crate::runner) struct RecentAnswers {
    /// The client whose answer is newest comes last.
    owners: VecDeque<OwnerAnswers>,
}

#[derive(Debug)]
struct OwnerAnswers {
    owner: CacheOwner,
    /// Answers one behind the other, the newest last.
    tokens: Vec<Token>,
}

/// Returns the client whose answers resemble this request's. None for a client without a key, and for a request that
/// leaves nothing behind.
pub(super) fn owner_of(request: &Request) -> Option<CacheOwner> {
    (request.tenant != TenantId::default() && !request.cache_apart).then(|| request.cache_owner())
}

impl RecentAnswers {
    /// Returns the client's newest answers.
    pub fn of(&self, owner: Option<CacheOwner>) -> &[Token] {
        let mut found = self.owners.iter().filter(|of| Some(of.owner) == owner);
        found.next().map_or(&[], |of| &of.tokens)
    }

    /// Adds an answer, and drops the oldest tokens beyond the limits.
    pub fn add(&mut self, owner: CacheOwner, answer: &[Token]) {
        let answer = &answer[answer.len().saturating_sub(TOKENS_MAX)..];
        if answer.is_empty() {
            return;
        }
        let place = self.owners.iter().position(|of| of.owner == owner);
        let mut of = place.and_then(|place| self.owners.remove(place)).unwrap_or_else(|| self.new_place(owner));
        let n_dropped = (of.tokens.len() + answer.len()).saturating_sub(TOKENS_MAX);
        of.tokens.drain(..n_dropped);
        of.tokens.extend_from_slice(answer);
        self.owners.push_back(of);
    }

    fn new_place(&mut self, owner: CacheOwner) -> OwnerAnswers {
        let is_full = self.owners.len() == OWNERS_MAX;
        let mut tokens = is_full.then(|| self.owners.pop_front()).flatten().map_or_else(Vec::new, |of| of.tokens);
        tokens.clear();
        tokens.reserve(TOKENS_MAX);
        OwnerAnswers { owner, tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::CacheSalt;

    fn owner(tenant: u64, salt: u8) -> CacheOwner {
        CacheOwner { tenant: TenantId(tenant), own_salt: CacheSalt([salt; 16]) }
    }

    #[test]
    fn each_client_and_each_salt_has_answers_of_its_own() {
        let mut recent = RecentAnswers::default();
        recent.add(owner(1, 0), &[1, 2]);
        recent.add(owner(1, 7), &[3]);
        recent.add(owner(2, 0), &[4]);
        recent.add(owner(1, 0), &[5]);
        let of = |tenant, salt| recent.of(Some(owner(tenant, salt)));
        assert_eq!((of(1, 0), of(1, 7), of(2, 0)), (&[1, 2, 5][..], &[3][..], &[4][..]));
        assert!(of(2, 7).is_empty() && recent.of(None).is_empty());
    }

    #[test]
    fn a_client_without_a_key_and_an_audit_have_none() {
        let request = Request { tenant: TenantId(3), ..Request::default() };
        assert_eq!(owner_of(&request), Some(owner(3, 0)));
        assert_eq!(owner_of(&Request { cache_apart: true, ..request.clone() }), None);
        assert_eq!(owner_of(&Request { tenant: TenantId(0), ..request }), None);
    }

    #[test]
    fn the_oldest_tokens_and_clients_are_dropped() {
        let mut recent = RecentAnswers::default();
        recent.add(owner(1, 0), &[9; 10]);
        recent.add(owner(1, 0), &vec![7; TOKENS_MAX - 4]);
        let kept = recent.of(Some(owner(1, 0)));
        assert_eq!((kept.len(), &kept[..5]), (TOKENS_MAX, &[9, 9, 9, 9, 7][..]));
        recent.add(owner(1, 0), &vec![8; TOKENS_MAX + 50]);
        assert_eq!(recent.of(Some(owner(1, 0))), vec![8; TOKENS_MAX]);
        (2..=OWNERS_MAX as u64 + 1).for_each(|tenant| recent.add(owner(tenant, 0), &[1]));
        assert_eq!((recent.owners.len(), recent.of(Some(owner(1, 0)))), (OWNERS_MAX, &[][..]));
        assert_eq!(recent.of(Some(owner(2, 0))), [1], "its place has none of the tokens of another client");
    }
}
