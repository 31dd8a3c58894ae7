//! The end of a certificate's validity. Parses only the parts of X.509 that this needs.

use time::{Date, Month, OffsetDateTime, Time};

const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// The field `version`, which the oldest certificates lack.
const VERSION: u8 = 0xa0;

/// Returns the time at which the certificate expires, or None if it cannot be read.
pub fn not_after(certificate: &[u8]) -> Option<OffsetDateTime> {
    let mut signed = Der(Der(certificate).expect(SEQUENCE)?);
    let mut fields = Der(signed.expect(SEQUENCE)?);
    if fields.0.first() == Some(&VERSION) {
        fields.expect(VERSION)?;
    }
    // The serial number, the signature's algorithm, and the issuer.
    for tag in [INTEGER, SEQUENCE, SEQUENCE] {
        fields.expect(tag)?;
    }
    let mut validity = Der(fields.expect(SEQUENCE)?);
    let _not_before = validity.next()?;
    let (tag, text) = validity.next()?;
    time_of(tag, std::str::from_utf8(text).ok()?)
}

/// Parses `YYMMDDhhmmssZ`, with years from 1950 to 2049, or `YYYYMMDDhhmmssZ`.
fn time_of(tag: u8, text: &str) -> Option<OffsetDateTime> {
    let (year, rest) = match tag {
        UTC_TIME => {
            let year: i32 = text.get(..2)?.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, text.get(2..)?)
        }
        GENERALIZED_TIME => (text.get(..4)?.parse().ok()?, text.get(4..)?),
        _ => return None,
    };
    let two = |i: usize| rest.get(2 * i..2 * i + 2)?.parse::<u8>().ok();
    let date = Date::from_calendar_date(year, Month::try_from(two(0)?).ok()?, two(1)?).ok()?;
    Some(date.with_time(Time::from_hms(two(2)?, two(3)?, two(4)?).ok()?).assume_utc())
}

/// The rest of a sequence of tagged values.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The next tag and its value.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let [tag, length, rest @ ..] = self.0 else { return None };
        let (length, rest) = match usize::from(*length) {
            short @ ..0x80 => (short, rest),
            long => {
                let (length, rest) = rest.split_at_checked(long - 0x80).filter(|(length, _)| length.len() <= 4)?;
                (length.iter().fold(0, |all, byte| all << 8 | usize::from(*byte)), rest)
            }
        };
        let (value, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((*tag, value))
    }

    /// The next value, if it has this tag.
    fn expect(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next().filter(|(found, _)| *found == tag).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};

    fn made(ends: OffsetDateTime) -> Vec<u8> {
        let mut params = CertificateParams::new(vec!["lockstep.cluster".to_owned()]).unwrap();
        params.not_after = ends;
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn a_certificate_s_end_is_read() {
        // Years from 2050 on have another format.
        for seconds in [1_700_000_000, 2_524_607_999, 2_524_608_000, 4_000_000_000] {
            let ends = OffsetDateTime::from_unix_timestamp(seconds).unwrap();
            assert_eq!(not_after(&made(ends)), Some(ends));
        }
    }

    #[test]
    fn what_is_no_certificate_has_no_end() {
        let whole = made(OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap());
        for n in 0..whole.len().min(200) {
            assert_eq!(not_after(&whole[..n]), None, "{n} bytes");
        }
        assert_eq!(not_after(b"-----BEGIN CERTIFICATE-----"), None);
        for flipped in 0..120 {
            let mut bytes = whole.clone();
            bytes[flipped] ^= 0xff;
            // Every input must end without a panic.
            let _any = not_after(&bytes);
        }
    }
}
