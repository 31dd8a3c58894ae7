//! etcd with authentication: certificates on both sides, a user and a password.

use super::{PATIENCE, claim, config, is, next, open, within};
use crate::etcd::{Etcd, Tls};
use cluster::{Error, EtcdConfig, EtcdStore, EtcdTls, Registration, Store};
use etcd_client::{Client, Permission};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::PathBuf;

struct Folder(PathBuf);

impl Folder {
    fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

/// An authority, and a certificate for loopback with its key, as PEM.
fn certificates() -> (String, String, String) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let certificate = pem("CERTIFICATE", certificate.der());
    (pem("CERTIFICATE", authority.der()), certificate, pem("PRIVATE KEY", key.serialized_der()))
}

/// The text that files have: base 64 between two lines.
fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {label}-----\n");
    for (i, three) in der.chunks(3).enumerate() {
        let bits = three.iter().enumerate().fold(0, |bits, (i, byte)| bits | u32::from(*byte) << (16 - 8 * i));
        let digit =
            |at: usize| if at <= three.len() { DIGITS[(bits >> (18 - 6 * at) & 63) as usize] as char } else { '=' };
        text.extend((0..4).map(digit));
        text.push_str(if i % 16 == 15 { "\n" } else { "" });
    }
    format!("{text}\n-----END {label}-----\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_on_both_sides() {
    let folder = Folder(std::env::temp_dir().join(format!("lockstep-etcd-tls-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).unwrap();
    let (authority, certificate, key) = certificates();
    let files = Tls {
        authority: folder.write("authority", &authority),
        certificate: folder.write("certificate", &certificate),
        key: folder.write("key", &key),
    };
    let etcd = Etcd::start_with(1, Some(&files));
    let with = |identity, authority: &str| {
        let tls = EtcdTls { authority: authority.as_bytes().to_vec(), identity };
        EtcdStore::open(EtcdConfig { tls: Some(tls), ..config(etcd.endpoints(), "/tls") })
    };
    let proven = || Some((certificate.clone().into_bytes(), key.clone().into_bytes()));
    let store = Store::Etcd(with(proven(), &authority).await.unwrap());
    let held = claim(&store, "a", "h:1").await;
    assert_eq!(next(&mut store.watch()).await, is("a", "h:1", &held));
    // Without a certificate, or with an authority that has not signed etcd's: the store is away, and reports why.
    let (stranger, _, _) = certificates();
    for (store, expect) in
        [(with(None, &authority).await, "ertificate"), (with(proven(), &stranger).await, "ertificate")]
    {
        let mut health = store.unwrap().health();
        let is_expected = |why: &str| why.contains(expect);
        let seen = health.wait_for(|health| health.away.as_deref().is_some_and(is_expected));
        if tokio::time::timeout(PATIENCE, seen).await.is_err() {
            panic!("{:?}", health.borrow().away);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_and_a_password() {
    let etcd = Etcd::start(1);
    // Etcd requires a user from every client once it answers.
    let store = open(etcd.endpoints(), "/auth").await;
    super::until(&store, true).await;
    drop(store);
    let mut root = Client::connect(etcd.endpoints(), None).await.unwrap();
    root.user_add("root", "secret", None).await.unwrap();
    root.role_add("root").await.unwrap();
    root.user_grant_role("root", "root").await.unwrap();
    root.role_add("member").await.unwrap();
    let all = Permission::read_write("/auth/").with_prefix();
    root.role_grant_permission("member", all).await.unwrap();
    root.user_add("lockstep", "word", None).await.unwrap();
    root.user_grant_role("lockstep", "member").await.unwrap();
    root.auth_enable().await.unwrap();
    let with = |user: Option<(&str, &str)>, prefix: &str| {
        let user = user.map(|(name, password)| (name.to_owned(), password.to_owned()));
        EtcdStore::open(EtcdConfig { user, ..config(etcd.endpoints(), prefix) })
    };
    let store = Store::Etcd(with(Some(("lockstep", "word")), "/auth").await.unwrap());
    let held = claim(&store, "a", "h:1").await;
    assert_eq!(next(&mut store.watch()).await, is("a", "h:1", &held));
    // Another prefix, another password, no user.
    let cases = [(Some(("lockstep", "word")), "/else"), (Some(("lockstep", "wrong")), "/auth"), (None, "/auth")];
    for (user, prefix) in cases {
        let store = with(user, prefix).await.unwrap();
        let refused = within("a refusal", store.claim("b", Registration::default())).await;
        assert!(matches!(refused, Err(Error::Refused(_))), "{user:?} at {prefix}: {refused:?}");
    }
}
