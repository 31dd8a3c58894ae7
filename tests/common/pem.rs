//! Writes certificates and keys as PEM. Has no knowledge of their contents.

pub fn pem(kind: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in der.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        let digit = |i: usize| char::from(DIGITS[(bits >> (18 - 6 * i)) as usize & 63]);
        text.extend((0..4).map(|i| if i <= three.len() { digit(i) } else { '=' }));
    }
    format!("-----BEGIN {kind}-----\n{text}\n-----END {kind}-----\n")
}
