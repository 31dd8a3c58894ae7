//! The names of a log's full blocks: each is a hash of the block's tokens and of all before it.

use alloc::vec::Vec;
use core::ops::Range;
use types::{BLOCK_TOKENS, BlockHash, Request, Token};

/// The first full blocks' names, each computed once; never more than the log has.
pub(crate) struct BlockNames {
    root: BlockHash,
    known: Vec<BlockHash>,
}

impl BlockNames {
    pub fn new(root: BlockHash) -> BlockNames {
        BlockNames { root, known: Vec::new() }
    }

    /// The name of block `i` of this log, which is full.
    pub fn name(&mut self, i: u32, request: &Request) -> BlockHash {
        while self.known.len() as u32 <= i {
            let parent = self.known.last().unwrap_or(&self.root);
            let first = self.known.len() * BLOCK_TOKENS as usize;
            let hash = parent.child(tokens(request, first..first + BLOCK_TOKENS as usize));
            self.known.push(hash);
        }
        self.known[i as usize]
    }

    /// The names that are computed.
    pub fn known(&self) -> &[BlockHash] {
        &self.known
    }

    /// Allocates memory for the names of so many blocks.
    pub fn reserve(&mut self, n_blocks: usize) {
        self.known.reserve_exact(n_blocks - self.known.len().min(n_blocks));
    }
}

/// The tokens at these positions: `[start, n_prompt) of the prompt · [n_prompt, end) of the output`.
fn tokens(request: &Request, positions: Range<usize>) -> impl Iterator<Item = Token> + '_ {
    let Request { prompt, output, .. } = request;
    let n_prompt = prompt.len();
    let of_prompt = &prompt[positions.start.min(n_prompt)..positions.end.min(n_prompt)];
    let of_output = &output[positions.start.saturating_sub(n_prompt)..positions.end.saturating_sub(n_prompt)];
    of_prompt.iter().chain(of_output).copied()
}
