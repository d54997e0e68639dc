//! What an engine knows of the future of a conversation, and may say with every request.
//!
//! A hint is believed until it proves wrong, and then less: what the classes that hints make are
//! worth is learned like everything else. Wrong hints make eviction less good and nothing else; no
//! hint makes a lookup find what it should not, or lets a block stay longer than limits allow.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What an engine knows of the future of a conversation. By default nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Hints {
    /// Whether somebody will continue it.
    pub conversation: Conversation,
    /// When, milliseconds from now.
    pub returns_in_ms: Option<u32>,
    /// What its blocks are worth beside others'.
    pub priority: Priority,
    /// Keeps the blocks for so many milliseconds, as a pin does, as far as `Limits::retain_ms_max`
    /// and half of what may be pinned allow.
    pub retain_ms: Option<u64>,
}

/// The state of a conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
pub enum Conversation {
    /// Nobody says.
    #[default]
    Unknown,
    /// It goes on.
    Open,
    /// It goes on as soon as a tool has answered.
    WaitingForTool,
    /// It is over: what only it uses can be dropped first.
    Finished,
    /// It is over, and what only it uses is to be dropped: by a touch at once, by other requests as
    /// soon as room is needed.
    Drop,
}

impl Conversation {
    /// Whether nobody is going to continue it.
    pub fn is_over(self) -> bool {
        matches!(self, Conversation::Finished | Conversation::Drop)
    }
}

/// What blocks are worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
pub enum Priority {
    /// As much as others.
    #[default]
    Normal = 0,
    /// A sixteenth.
    Low = 1,
    /// Sixteen times as much.
    High = 2,
}

impl Hints {
    /// The conversation goes on.
    pub fn open() -> Hints {
        Hints::of(Conversation::Open)
    }

    /// The conversation goes on as soon as a tool has answered.
    pub fn waiting_for_tool() -> Hints {
        Hints::of(Conversation::WaitingForTool)
    }

    /// The conversation is over.
    pub fn finished() -> Hints {
        Hints::of(Conversation::Finished)
    }

    /// The conversation is over, and its blocks can go.
    pub fn drop() -> Hints {
        Hints::of(Conversation::Drop)
    }

    fn of(conversation: Conversation) -> Hints {
        Hints { conversation, ..Hints::default() }
    }

    /// Somebody is expected to continue it after so long.
    pub fn returns_in(mut self, time: Duration) -> Hints {
        self.returns_in_ms = Some(u32::try_from(time.as_millis()).unwrap_or(u32::MAX));
        self
    }

    /// Its blocks are worth more or less than others'.
    pub fn priority(mut self, priority: Priority) -> Hints {
        self.priority = priority;
        self
    }

    /// Its blocks are to stay for so long, as far as limits allow.
    pub fn retain(mut self, time: Duration) -> Hints {
        self.retain_ms = Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// What may be said of blocks that others use too: nothing by which they would leave earlier or
    /// stay longer at the cost of others.
    pub fn harmless(self) -> Hints {
        let conversation = match self.conversation {
            over if over.is_over() => Conversation::Unknown,
            conversation => conversation,
        };
        Hints { conversation, priority: Priority::Normal, retain_ms: None, ..self }
    }

    /// Whether anything is said.
    pub fn says_nothing(&self) -> bool {
        *self == Hints::default()
    }
}
