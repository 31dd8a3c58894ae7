//! Why no more of a prompt was reused. Both services number the reasons alike, in the order of `ReuseEnd::ALL`.

use crate::{cluster, v1};
use types::{PrefixReuse, ReuseEnd};

impl cluster::Output {
    /// Sets why no more of its prompt was reused, as far as the client may know.
    #[must_use]
    pub fn with_reuse(self, reuse: PrefixReuse) -> Self {
        let reuse_end = reuse.ended.map_or(0, |ended| ended.for_client() as i32 + 1);
        cluster::Output { reuse_end, reuse_position: reuse.position, fetched_tokens: reuse.fetched, ..self }
    }

    /// Returns the reuse of its prompt. A reason that this build does not know becomes none.
    pub fn reuse(&self) -> PrefixReuse {
        let ended = from_number(self.reuse_end);
        PrefixReuse { ended, position: self.reuse_position, fetched: self.fetched_tokens }
    }
}

impl v1::Usage {
    #[must_use]
    pub fn with_reuse(self, reuse: PrefixReuse) -> Self {
        let reuse_end = reuse.ended.map_or(0, |ended| ended as i32 + 1);
        v1::Usage { reuse_end, reuse_position: reuse.position, fetched_tokens: reuse.fetched, ..self }
    }

    pub fn reuse(&self) -> PrefixReuse {
        let ended = from_number(self.reuse_end);
        PrefixReuse { ended, position: self.reuse_position, fetched: self.fetched_tokens }
    }
}

fn from_number(number: i32) -> Option<ReuseEnd> {
    let i = usize::try_from(number.checked_sub(1)?).ok()?;
    ReuseEnd::ALL.get(i).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_one_number_in_both_services() {
        for ended in ReuseEnd::ALL {
            let reuse = PrefixReuse { ended: Some(ended), position: 48, fetched: 16 };
            let output = cluster::Output::default().with_reuse(reuse);
            assert_eq!(output.reuse(), PrefixReuse { ended: Some(ended.for_client()), ..reuse });
            let usage = v1::Usage::default().with_reuse(reuse);
            assert_eq!(usage.reuse(), reuse);
            let word = format!("REUSE_END_{}", ended.name().to_uppercase());
            assert_eq!(usage.reuse_end().as_str_name(), word);
            assert_eq!(cluster::ReuseEnd::try_from(usage.reuse_end).map(|end| end.as_str_name().to_owned()), Ok(word));
        }
        for number in [i32::MIN, -1, 0, 11] {
            assert_eq!(cluster::Output { reuse_end: number, ..cluster::Output::default() }.reuse().ended, None);
        }
    }
}
