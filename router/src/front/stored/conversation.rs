//! Conversations that clients continue: items in their order, and the client's metadata. They share the room, the
//! lifetime and the tenants of stored responses. Knows no JSON.

use crate::front::stored::room::RoomPermit;
use std::sync::{Arc, Weak};

/// The cost of an item beside its text, in bytes.
pub(super) const ITEM_BYTES: usize = 128;

pub struct StoredItem {
    pub id: String,
    pub text: String,
}

impl StoredItem {
    pub(super) fn n_bytes(&self) -> usize {
        self.id.len() + self.text.len() + ITEM_BYTES
    }
}

/// A conversation as it stood when it was read.
#[derive(Clone)]
pub struct ReadConversation {
    /// In Unix seconds.
    pub created: u64,
    pub metadata: Arc<str>,
    pub items: Vec<Arc<StoredItem>>,
}

impl ReadConversation {
    pub fn n_bytes(&self) -> usize {
        self.items.iter().map(|item| item.text.len()).sum()
    }
}

pub(super) struct StoredConversation {
    pub read: ReadConversation,
    pub room: RoomPermit,
    /// Held by the response that continues the conversation.
    turn: Weak<()>,
}

/// The right to continue a conversation: no other response can until it is dropped.
pub struct ConversationTurn {
    _held: Arc<()>,
}

impl StoredConversation {
    pub fn new(read: ReadConversation, room: RoomPermit) -> StoredConversation {
        StoredConversation { read, room, turn: Weak::new() }
    }

    /// Returns None while another response has the turn.
    pub fn take_turn(&mut self) -> Option<ConversationTurn> {
        if self.turn.strong_count() > 0 {
            return None;
        }
        let turn = Arc::new(());
        self.turn = Arc::downgrade(&turn);
        Some(ConversationTurn { _held: turn })
    }

    /// Removes an item and returns it.
    pub fn remove(&mut self, id: &str) -> Option<Arc<StoredItem>> {
        let at = self.read.items.iter().position(|item| item.id == id)?;
        Some(self.read.items.remove(at))
    }
}
