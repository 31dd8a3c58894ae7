//! Who may ask: API keys from a file, compared by their hashes. A key's name is its tenant, and tenants share no cache.

use types::TenantId;

/// The keys of a router. Without any, everybody may ask.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<Known>);

#[derive(Clone)]
struct Known {
    hash: [u8; 32],
    tenant: TenantId,
}

/// A line of a keys' file that cannot be meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} has no key: each line is `key` or `name:key`")]
pub struct NoKey {
    pub line: usize,
}

impl ApiKeys {
    /// A line is `key` or `name:key`; empty lines and those that begin with `#` are nobody's. Keys of one name share a
    /// tenant.
    pub fn parse(text: &str) -> Result<ApiKeys, NoKey> {
        let mut keys = ApiKeys::default();
        for (i, line) in text.lines().map(str::trim).enumerate() {
            if !line.is_empty() && !line.starts_with('#') {
                keys.add(line).map_err(|()| NoKey { line: i + 1 })?;
            }
        }
        Ok(keys)
    }

    fn add(&mut self, line: &str) -> Result<(), ()> {
        let (name, key) = line.split_once(':').map_or((line, line), |(name, key)| (name.trim(), key.trim()));
        if name.is_empty() || key.is_empty() {
            return Err(());
        }
        self.0.push(Known { hash: hash(key), tenant: tenant(name) });
        Ok(())
    }

    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// Whose key this is. As long for a key that is nearly right as for any other.
    pub fn tenant(&self, key: &str) -> Option<TenantId> {
        let offered = hash(key);
        let mut found = None;
        for known in &self.0 {
            // One by one without a way out, and on hashes, which nobody can aim.
            let differs = known.hash.iter().zip(&offered).fold(0, |all, (a, b)| all | (a ^ b));
            if std::hint::black_box(differs) == 0 {
                found = Some(known.tenant);
            }
        }
        found
    }

    /// Whose an `authorization` is. Without keys, everybody is one tenant.
    pub fn authorized(&self, authorization: Option<&str>) -> Option<TenantId> {
        if self.is_open() {
            return Some(TenantId::default());
        }
        let (scheme, key) = authorization?.trim().split_once(' ')?;
        if scheme.eq_ignore_ascii_case("bearer") { self.tenant(key.trim()) } else { None }
    }
}

/// Says how many, and not which.
impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

fn hash(key: &str) -> [u8; 32] {
    *blake3::Hasher::new_derive_key("lockstep 2026 api key").update(key.as_bytes()).finalize().as_bytes()
}

/// Never zero: that is everybody without a key.
fn tenant(name: &str) -> TenantId {
    let hash = blake3::Hasher::new_derive_key("lockstep 2026 tenant").update(name.as_bytes()).finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    TenantId(u64::from_le_bytes(first).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_its_tenant() {
        let keys = ApiKeys::parse("# the house\nalice:k1\n\nbob: k2\nalice :k3\n plain \n").unwrap();
        assert!(!keys.is_open());
        assert_eq!(keys.tenant("k1"), keys.tenant("k3"));
        let tenants = ["k1", "k2", "plain"].map(|key| keys.tenant(key).unwrap());
        assert!(tenants.iter().all(|tenant| tenant.0 != 0));
        assert!(tenants[0] != tenants[1] && tenants[1] != tenants[2]);
        for wrong in ["", "k", "k11", "alice", "alice:k1", "# the house"] {
            assert_eq!(keys.tenant(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn authorization_is_a_bearer() {
        let keys = ApiKeys::parse("k1").unwrap();
        assert!(keys.authorized(Some("Bearer k1")).is_some());
        assert!(keys.authorized(Some("bearer  k1 ")).is_some());
        for wrong in [None, Some(""), Some("k1"), Some("Basic k1"), Some("Bearer k2"), Some("Bearer")] {
            assert_eq!(keys.authorized(wrong), None, "{wrong:?}");
        }
        assert_eq!(ApiKeys::default().authorized(None), Some(TenantId(0)));
    }

    #[test]
    fn a_line_without_a_key_is_told() {
        assert_eq!(ApiKeys::parse("a:b\n\n:c").unwrap_err(), NoKey { line: 3 });
        assert_eq!(ApiKeys::parse("a:").unwrap_err(), NoKey { line: 1 });
        assert!(ApiKeys::parse("# nobody\n").unwrap().is_open());
    }
}
