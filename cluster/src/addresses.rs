//! Members that are given as flags: `host:port`, separated by commas.

use std::str::FromStr;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses(pub Vec<String>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address: use host:port")]
pub struct BadAddress(String);

impl FromStr for Addresses {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Addresses, BadAddress> {
        let addresses: Vec<String> = text.split(',').map(|address| address.trim().to_owned()).collect();
        match addresses.iter().find(|address| !is_address(address)) {
            Some(bad) => Err(BadAddress(bad.clone())),
            None => Ok(Addresses(addresses)),
        }
    }
}

pub(crate) fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_name = !host.is_empty() && !host.contains(char::is_whitespace) && !host.contains('/');
    is_name && port.parse::<u16>().is_ok_and(|port| port > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Result<&[&str], &str>) {
        let expect = expect.map(|all| all.iter().map(|address| address.to_string()).collect::<Vec<_>>());
        assert_eq!(text.parse::<Addresses>().map(|all| all.0), expect.map_err(|bad| BadAddress(bad.into())));
    }

    #[test]
    fn addresses_are_read() {
        check("a:1, b.c:65535,[::1]:3", Ok(&["a:1", "b.c:65535", "[::1]:3"]));
        check("a:1,b", Err("b"));
        check("", Err(""));
        check("a:0", Err("a:0"));
        check("http://a:1", Err("http://a:1"));
    }
}
