//! The router, as far as it decides: its own pick over what it knows of each replica. Knows no time.

use router::pick::{self, Row, Standing};
use types::PolicyDigest;

pub struct Front {
    table: Vec<Row>,
}

impl Front {
    pub fn new(n_replicas: usize, context: u32, digest: PolicyDigest) -> Front {
        let row = Row { standing: Standing::Ready, digest, context, work: 0 };
        Front { table: vec![row; n_replicas] }
    }

    /// Who gets a prompt of so many tokens, which is work from now on.
    pub fn give(&mut self, n_prompt: u32) -> Option<usize> {
        let replica = pick::least_work(&self.table, n_prompt)?;
        self.table[replica].work += u64::from(n_prompt);
        Some(replica)
    }

    /// It says tokens: its prompt is done, and each step of it is one token.
    pub fn begun(&mut self, replica: usize, n_prompt: u32) {
        self.table[replica].work -= u64::from(n_prompt) - 1;
    }

    pub fn ended(&mut self, replica: usize, n_prompt: u32, has_begun: bool) {
        self.table[replica].work -= if has_begun { 1 } else { n_prompt.into() };
    }
}
