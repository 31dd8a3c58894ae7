//! API keys from a file, compared by their hashes. A key's name is its tenant; tenants share no cache and may have
//! limits. The file may be reloaded while requests run.

use crate::limits::tenants::{Quotas, SHARE_ONE, TenantLimits};
use crate::lines::{self, BadLine};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock};
use tokio_util::sync::CancellationToken;
use types::TenantId;

/// How many tenants have their own metrics label, for as long as the process lives: the first of the file. All others
/// share one.
const LABELS_MAX: usize = 100;
/// The label of all other tenants.
const OTHER: &str = "other";
/// The name with the default limits.
const DEFAULTS: &str = "*";

/// The keys of a router; clones share them. If there never was any, every client is admitted.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<RwLock<Arc<KeyTable>>>);

#[derive(Default)]
struct KeyTable {
    known: Vec<KnownKey>,
    tenants: BTreeMap<TenantId, Arc<TenantLimits>>,
    /// The tenant of clients without a key, if none is required, and of clients with a removed key.
    others: Arc<TenantLimits>,
    labels: BTreeSet<Arc<str>>,
    /// Whether a key is required although none is known: all were taken away.
    is_closed: bool,
    /// Whether this router has a share of its tenants' limits, and not all.
    is_divided: bool,
}

#[derive(Clone)]
struct KnownKey {
    hash: [u8; 32],
    tenant: TenantId,
    role: Role,
    /// Cancelled when the file no longer has the key, or has it for another tenant or role.
    revoked: CancellationToken,
}

/// What the owner of a key may see besides its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Nothing. The cluster, but only if no key names an operator.
    Tenant,
    /// The cluster, and all tenants' requests without their texts.
    Operator,
}

/// A client that has sent a valid key.
#[derive(Clone, Debug)]
pub struct AdmittedClient {
    pub tenant: TenantId,
    pub role: Role,
    /// Cancelled when the key is taken back; never if no key is required.
    pub revoked: CancellationToken,
}

/// A line, parsed.
struct KeyLine<'a> {
    name: &'a str,
    /// None in a line of defaults.
    key: Option<&'a str>,
    /// A key without a name is its own name, which no page may show.
    is_secret: bool,
    role: Role,
    quotas: Quotas,
}

impl KnownKey {
    fn matches(&self, hash: &[u8; 32], tenant: TenantId, role: Role) -> bool {
        (&self.hash, self.tenant, self.role) == (hash, tenant, role)
    }
}

impl<'a> KeyLine<'a> {
    fn parse(line: &'a str) -> Result<KeyLine<'a>, String> {
        let no_key = || "no key: a line must be `key` or `name:key`, then its limits".to_owned();
        let (name, rest) = line.split_once(':').map_or((line, line), |(name, rest)| (name.trim(), rest));
        let mut words = rest.split_whitespace();
        let key = words.next().ok_or_else(no_key)?;
        let is_secret = !line.contains(':');
        let name = if is_secret { key } else { name };
        if name.is_empty() {
            return Err(no_key());
        }
        let (mut role, mut quotas) = (Role::Tenant, Quotas::default());
        // In a line of defaults the first word may be a limit, or stand where a key would.
        words.try_for_each(|word| match word.split_once('=') {
            Some(("role", "operator")) if name != DEFAULTS => {
                role = Role::Operator;
                Ok(())
            }
            Some(("role", _)) => Err(format!("`{word}` is not a role: the only one is role=operator")),
            _ => quotas.read(word),
        })?;
        Ok(KeyLine { name, key: (name != DEFAULTS).then_some(key), is_secret, role, quotas })
    }
}

impl KeyTable {
    /// Returns the keys of the good lines, and the bad lines. A tenant with the same name as in `before` keeps its used
    /// quotas.
    fn parse(text: &str, before: &KeyTable) -> (KeyTable, Vec<BadLine>) {
        let mut all_bad = Vec::new();
        let mut table =
            KeyTable { labels: before.labels.clone(), is_divided: before.is_divided, ..KeyTable::default() };
        let first_share = if table.is_divided { 0 } else { SHARE_ONE };
        let mut named: BTreeMap<TenantId, (Quotas, Arc<str>)> = BTreeMap::new();
        let mut defaults = Quotas::default();
        for (number, line) in lines::counted(text) {
            let added = KeyLine::parse(line).and_then(|line| {
                let Some(key) = line.key else {
                    defaults = defaults.and(line.quotas)?;
                    return Ok(());
                };
                let id = tenant(line.name);
                let quotas = named.get(&id).map_or(Quotas::default(), |(quotas, _)| *quotas).and(line.quotas)?;
                table.known.push(before.key_for_next_table(hash(key), id, line.role));
                let label = table.label(line.name, line.is_secret);
                named.entry(id).or_insert((quotas, label)).0 = quotas;
                Ok(())
            });
            all_bad.extend(added.err().map(|problem| BadLine { line: number, problem }));
        }
        let weights = named.values().map(|(quotas, _)| u64::from(quotas.or(defaults).weight().0)).sum();
        let tenant = |(id, (quotas, label)): (TenantId, (Quotas, Arc<str>))| {
            let before = before.tenants.get(&id);
            (id, Arc::new(TenantLimits::new(label, quotas.or(defaults), weights, before, first_share)))
        };
        table.tenants = named.into_iter().map(tenant).collect();
        table.others = before.others.clone();
        table.is_closed = before.is_closed || !before.known.is_empty();
        (table, all_bad)
    }

    /// Returns a key of the next table. It is the same as in this table if it belongs to the same tenant.
    fn key_for_next_table(&self, hash: [u8; 32], tenant: TenantId, role: Role) -> KnownKey {
        let same = self.known.iter().find(|known| known.matches(&hash, tenant, role));
        KnownKey {
            hash,
            tenant,
            role,
            revoked: same.map_or_else(CancellationToken::new, |known| known.revoked.clone()),
        }
    }

    /// Ends the requests of keys that `next` does not have for the same tenant.
    fn revoke_all_but(&self, next: &KeyTable) {
        let goes_on =
            |known: &KnownKey| next.known.iter().any(|other| other.matches(&known.hash, known.tenant, known.role));
        self.known.iter().filter(|known| !goes_on(known)).for_each(|known| known.revoked.cancel());
    }

    fn label(&mut self, name: &str, is_secret: bool) -> Arc<str> {
        let has_room = self.labels.contains(name) || self.labels.len() < LABELS_MAX;
        if is_secret || !has_room {
            return OTHER.into();
        }
        let label: Arc<str> = name.into();
        self.labels.insert(label.clone());
        label
    }
}

impl Default for TenantLimits {
    fn default() -> Self {
        TenantLimits::new(OTHER.into(), Quotas::default(), 1, None, SHARE_ONE)
    }
}

impl ApiKeys {
    /// A line is `key` or `name:key`; empty lines and those that begin with `#` do not count. Keys of one name share a
    /// tenant. The tenant's limits may follow the key, as in `alice:KEY weight=4 requests_per_minute=600
    /// tokens_per_minute=90000 concurrent=16`. So may `role=operator`, which applies to that key alone. A line that
    /// begins with `*` has the limits of each tenant that has none of its own.
    pub fn parse(text: &str) -> Result<ApiKeys, BadLine> {
        let (table, bad) = KeyTable::parse(text, &KeyTable::default());
        match bad.into_iter().next() {
            None => Ok(ApiKeys(Arc::new(RwLock::new(Arc::new(table))))),
            Some(bad) => Err(bad),
        }
    }

    /// Returns how many keys the good lines of a file have.
    pub fn count(text: &str) -> usize {
        KeyTable::parse(text, &KeyTable::default()).0.known.len()
    }

    /// Replaces the keys by those of the good lines, and returns the bad ones as an error. If there were keys before
    /// and none is left, no client is admitted.
    pub fn replace(&self, text: &str) -> Result<(), Vec<BadLine>> {
        let before = self.table();
        let (table, bad) = KeyTable::parse(text, &before);
        let table = Arc::new(table);
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = table.clone();
        // This comes last: a client that it cuts off and that retries is refused.
        before.revoke_all_but(&table);
        if bad.is_empty() { Ok(()) } else { Err(bad) }
    }

    /// From now on this router has a share of its tenants' limits, at first none.
    pub(crate) fn divide(&self) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let KeyTable { known, tenants, others, labels, is_closed, .. } = &**table;
        tenants.values().for_each(|tenant| tenant.set_share(0, [0.0; 2]));
        let (known, is_closed) = (known.clone(), *is_closed);
        let (tenants, others, labels) = (tenants.clone(), others.clone(), labels.clone());
        *table = Arc::new(KeyTable { known, tenants, others, labels, is_closed, is_divided: true });
    }

    /// Returns the tenants with limits that routers divide.
    pub(crate) fn limited_tenants(&self) -> Vec<(TenantId, Arc<TenantLimits>)> {
        let table = self.table();
        let limited = table.tenants.iter().filter(|(_, tenant)| tenant.is_limited());
        limited.map(|(id, tenant)| (*id, tenant.clone())).collect()
    }

    fn table(&self) -> Arc<KeyTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many keys are known.
    pub fn n_keys(&self) -> usize {
        self.table().known.len()
    }

    /// Whether no key is required.
    pub fn is_open(&self) -> bool {
        let table = self.table();
        table.known.is_empty() && !table.is_closed
    }

    /// Whether some key is an operator's. If none is, every key may see the cluster, as there is no operator for it.
    pub fn name_operators(&self) -> bool {
        self.table().known.iter().any(|known| known.role == Role::Operator)
    }

    /// Returns the tenant of a key. The search takes as long for a nearly right key as for any other.
    pub fn tenant(&self, key: &str) -> Option<TenantId> {
        self.client_of_key(key).map(|admitted| admitted.tenant)
    }

    /// Does the same, and returns the signal of the key's end too.
    pub fn client_of_key(&self, key: &str) -> Option<AdmittedClient> {
        let offered = hash(key);
        let mut found = None;
        for known in &self.table().known {
            // All keys are compared to the end, and by hashes, which an attacker cannot choose.
            let differs = known.hash.iter().zip(&offered).fold(0, |all, (a, b)| all | (a ^ b));
            if std::hint::black_box(differs) == 0 {
                let KnownKey { tenant, role, revoked, .. } = known.clone();
                found = Some(AdmittedClient { tenant, role, revoked });
            }
        }
        found
    }

    /// Returns the tenant of an `authorization` header. Without keys, all clients are one tenant.
    pub fn authorized(&self, authorization: Option<&str>) -> Option<TenantId> {
        self.authorized_client(authorization).map(|admitted| admitted.tenant)
    }

    /// Does the same, and returns the signal of the key's end too.
    pub fn authorized_client(&self, authorization: Option<&str>) -> Option<AdmittedClient> {
        if self.is_open() {
            // A client of a server without keys is its operator.
            let (tenant, revoked) = (TenantId::default(), CancellationToken::new());
            return Some(AdmittedClient { tenant, role: Role::Operator, revoked });
        }
        let (scheme, key) = authorization?.trim().split_once(' ')?;
        if scheme.eq_ignore_ascii_case("bearer") { self.client_of_key(key.trim()) } else { None }
    }

    /// Returns a tenant, with its limits and use.
    pub fn tenant_limits(&self, id: TenantId) -> Arc<TenantLimits> {
        let table = self.table();
        table.tenants.get(&id).unwrap_or(&table.others).clone()
    }

    /// Returns the sum of the weights of all tenants that have requests without a token yet.
    pub(crate) fn weights_waiting(&self) -> u64 {
        let table = self.table();
        let waiting = table.tenants.values().filter(|tenant| tenant.n_waiting() > 0);
        waiting.map(|tenant| u64::from(tenant.weight().0)).sum()
    }
}

/// Shows how many keys there are, and none of them.
impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.table().known.len())
    }
}

fn hash(key: &str) -> [u8; 32] {
    *blake3::Hasher::new_derive_key("lockstep 2026 api key").update(key.as_bytes()).finalize().as_bytes()
}

/// Returns a tenant's id; never zero, which is for clients without a key.
fn tenant(name: &str) -> TenantId {
    let hash = blake3::Hasher::new_derive_key("lockstep 2026 tenant").update(name.as_bytes()).finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    TenantId(u64::from_le_bytes(first).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::TenantWeight;

    #[test]
    fn a_key_ends_when_the_file_has_it_no_more_or_for_another() {
        let keys = ApiKeys::parse("a:k1\na:k2\nb:k3\nb:k4").unwrap();
        let admitted = ["k1", "k2", "k3", "k4"].map(|key| keys.client_of_key(key).unwrap());
        let ended = || admitted.each_ref().map(|admitted| admitted.revoked.is_cancelled());
        keys.replace("a:k1 weight=2\na:k3\nb:k4\nc:k5").unwrap();
        assert_eq!(ended(), [false, true, true, false]);
        let readmitted = keys.client_of_key("k3").unwrap();
        assert!(readmitted.tenant == admitted[0].tenant && !readmitted.revoked.is_cancelled());
        keys.replace("a:k3").unwrap();
        assert_eq!(ended(), [true; 4]);
        assert!(!readmitted.revoked.is_cancelled());
    }

    #[test]
    fn a_key_may_be_an_operator_s() {
        let keys = ApiKeys::parse("alice:k1 weight=2\nann:k2 role=operator weight=3").unwrap();
        let role = |key| keys.client_of_key(key).unwrap().role;
        assert_eq!((role("k1"), role("k2"), keys.name_operators()), (Role::Tenant, Role::Operator, true));
        let admitted = keys.client_of_key("k2").unwrap();
        keys.replace("alice:k1 role=operator\nann:k2").unwrap();
        assert!(admitted.revoked.is_cancelled(), "an operator's streams end with the role");
        keys.replace("alice:k1\nann:k2").unwrap();
        assert!(!keys.name_operators() && keys.client_of_key("k1").unwrap().role == Role::Tenant);
        assert_eq!(ApiKeys::default().authorized_client(None).unwrap().role, Role::Operator);
        for bad in ["a:k role=admin", "* role=operator", "a:k role="] {
            assert!(ApiKeys::parse(bad).unwrap_err().problem.contains("role=operator"), "{bad}");
        }
    }

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
        let labels = tenants.map(|tenant| keys.tenant_limits(tenant).label().to_string());
        assert_eq!(labels, ["alice", "bob", "other"], "a key without a name must not become a label");
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
    fn key_limits_are_parsed_and_errors_are_reported() {
        let text = "* weight=2 concurrent=8\nalice:k1 weight=5\nalice:k2 requests_per_minute=60\nbob:k3\nk4 weight=1";
        let keys = ApiKeys::parse(text).unwrap();
        let weight = |key| keys.tenant_limits(keys.tenant(key).unwrap()).weight();
        assert_eq!(
            ["k1", "k2", "k3", "k4"].map(weight),
            [TenantWeight(5), TenantWeight(5), TenantWeight(2), TenantWeight(1)]
        );
        assert_eq!(keys.tenant("*"), None);
        let cases = [
            ("a:b\n\n:c", 3, "no key"),
            ("a:", 1, "no key"),
            ("a:b weight=0", 1, "weight"),
            ("a:b weight=1001", 1, "weight"),
            ("a:b\na:c requests_per_minute=x", 2, "requests_per_minute"),
            ("a:b wieght=2", 1, "wieght=2"),
            ("a:b weight=2\na:c weight=3", 2, "twice"),
        ];
        for (text, line, problem) in cases {
            let bad = ApiKeys::parse(text).unwrap_err();
            assert!(bad.line == line && bad.problem.contains(problem), "{text:?}: {bad}");
        }
        assert!(ApiKeys::parse("# nobody\n").unwrap().is_open());
    }

    #[test]
    fn good_lines_of_a_file_that_is_read_again_are_in_force_and_without_any_no_client_is_admitted() {
        let keys = ApiKeys::parse("alice:k1 weight=5").unwrap();
        let bad = keys.replace("alice:\nalice:k1 weight=5\nbob:k2 weight=0\ncarol:k3").unwrap_err();
        assert_eq!(bad.iter().map(|bad| bad.line).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(["k1", "k2", "k3"].map(|key| keys.tenant(key).is_some()), [true, false, true]);
        assert_eq!((ApiKeys::count("alice:\nbob:k2"), ApiKeys::count("# none\n* weight=2")), (1, 0));
        for none in ["", "# none", "* weight=2", "alice:"] {
            let keys = ApiKeys::parse("alice:k1 weight=5").unwrap();
            let admitted = keys.client_of_key("k1").unwrap();
            let _bad = keys.replace(none);
            assert!(!keys.is_open() && admitted.revoked.is_cancelled(), "{none:?}");
            assert!(keys.authorized(None).is_none() && keys.authorized(Some("Bearer k1")).is_none(), "{none:?}");
            keys.replace("alice:k1").unwrap();
            assert!(keys.tenant("k1").is_some() && keys.authorized(None).is_none(), "{none:?}");
        }
        let alice = keys.tenant("k1");
        let held = keys.clone();
        keys.replace("alice:k9 weight=6\nbob:k2").unwrap();
        assert_eq!((held.tenant("k1"), held.tenant("k9")), (None, alice));
        assert_eq!(keys.tenant_limits(alice.unwrap()).weight(), TenantWeight(6));
    }

    #[test]
    fn metrics_label_a_bounded_number_of_tenants() {
        let lines = |from: usize| (from..from + 90).map(|i| format!("t{i}:k{i}\n")).collect::<String>();
        let keys = ApiKeys::parse(&lines(0)).unwrap();
        keys.replace(&lines(50)).unwrap();
        let label = |i: usize| keys.tenant_limits(keys.tenant(&format!("k{i}")).unwrap()).label().to_string();
        assert_eq!((label(99), label(100)), ("t99".to_owned(), "other".to_owned()));
    }
}
