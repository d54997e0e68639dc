//! Which copy leaves a tier first. One policy object serves the copies of one tier and size class;
//! it knows blocks by number only and holds no other state than its order. What is known of blocks
//! beyond that it asks of an [`Outlook`].

mod arc;
mod lists;
mod pre;

pub use arc::Arc;
pub(crate) use lists::OrderList;
pub use pre::Pre;

/// How a block is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Use {
    /// What kind of request used it last, below [`QUEUES`]: blocks of one kind have the same
    /// future.
    pub queue: u8,
    /// A request begins to use it; otherwise one that is under way goes on or ends.
    pub fresh: bool,
    /// Stands for the block's key, for policies that remember what is gone.
    pub key: u64,
}

/// Kinds of requests that a [`Use`] can name.
pub const QUEUES: usize = 234;

/// What is known of a block in a tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct About {
    /// Counts uses: blocks with lower numbers were used earlier.
    pub tick: u64,
    /// When it was last used, in the caller's unit.
    pub used_at: u32,
    /// What a hit on it is worth, beside one on another block.
    pub weight: f32,
}

/// What a policy may ask about the blocks of its tier.
pub trait Outlook {
    /// What is known of the block.
    fn about(&self, block: u32) -> About;
    /// What a block of this queue promises: expected hits for each unit of time in which it is
    /// kept. The same for all as long as too little is known.
    fn score(&self, queue: u8, about: &About) -> f32;
    /// A block that follows this one in a chain and is in the same tier. Looked for within bounds.
    fn child(&self, block: u32) -> Option<u32>;
    /// Stands for the block's key.
    fn key(&self, block: u32) -> u64;
}

/// The order in which copies leave a tier. Blocks are named by their number in the block table;
/// callers touch a request's blocks leaf first, root last, so that leaves are colder than roots.
pub trait Policy: Send {
    /// A copy enters the tier. The block must not be in it.
    fn insert(&mut self, block: u32, how: Use);
    /// A copy enters the tier by which a request goes on from `before`, the block that precedes it:
    /// it is colder than that one, if that one is there.
    fn insert_behind(&mut self, _before: u32, block: u32, how: Use) {
        self.insert(block, how);
    }
    /// A copy was used.
    fn touch(&mut self, block: u32, how: Use);
    /// Whether a copy of the block is in the tier.
    fn contains(&self, block: u32) -> bool;
    /// Copies in the tier.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// A copy leaves, for whatever reason. No effect when it is not there.
    fn remove(&mut self, block: u32);
    /// The first block, coldest first, for which `may_leave` is true. Looks at 4,096 blocks at
    /// most, so that a tier full of pinned copies costs bounded time. The block stays inserted.
    fn victim(
        &mut self,
        outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32>;
}

/// Most blocks that one search for a victim looks at.
const SCAN_MAX: usize = 4096;

/// The policies, as configurations name them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PolicyChoice {
    /// [`Pre`].
    #[default]
    Pre,
    /// [`Lru`].
    Lru,
    /// [`Arc`].
    Arc,
    /// [`Fifo`].
    Fifo,
    /// [`Sieve`].
    Sieve,
}

impl PolicyChoice {
    /// All of them, the default first.
    pub const ALL: [PolicyChoice; 5] = [
        PolicyChoice::Pre,
        PolicyChoice::Lru,
        PolicyChoice::Arc,
        PolicyChoice::Fifo,
        PolicyChoice::Sieve,
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            PolicyChoice::Pre => "pre",
            PolicyChoice::Lru => "lru",
            PolicyChoice::Arc => "arc",
            PolicyChoice::Fifo => "fifo",
            PolicyChoice::Sieve => "sieve",
        }
    }

    /// The policy of this name.
    pub fn by_name(name: &str) -> Option<PolicyChoice> {
        PolicyChoice::ALL.into_iter().find(|choice| choice.name() == name)
    }

    /// One policy, for one tier and size class.
    pub fn make(self) -> Box<dyn Policy> {
        match self {
            PolicyChoice::Pre => Box::new(Pre::default()),
            PolicyChoice::Lru => Box::new(Lru::default()),
            PolicyChoice::Arc => Box::new(Arc::default()),
            PolicyChoice::Fifo => Box::new(Fifo::default()),
            PolicyChoice::Sieve => Box::new(Sieve::default()),
        }
    }

    /// Whether it needs an [`Outlook`] that learns.
    pub fn learns(self) -> bool {
        self == PolicyChoice::Pre
    }
}

/// Least recently used; leaf-first by the order of touches.
#[derive(Default)]
pub struct Lru(OrderList);

impl Policy for Lru {
    fn contains(&self, block: u32) -> bool {
        self.0.contains(block)
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn insert(&mut self, block: u32, _how: Use) {
        self.0.push_front(block);
    }

    fn insert_behind(&mut self, before: u32, block: u32, _how: Use) {
        self.0.push_behind(before, block);
    }

    fn touch(&mut self, block: u32, _how: Use) {
        self.0.move_front(block);
    }

    fn remove(&mut self, block: u32) {
        self.0.remove(block);
    }

    fn victim(
        &mut self,
        _outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32> {
        self.0.victim(may_leave)
    }
}

/// First in, first out.
#[derive(Default)]
pub struct Fifo(OrderList);

impl Policy for Fifo {
    fn contains(&self, block: u32) -> bool {
        self.0.contains(block)
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn insert(&mut self, block: u32, _how: Use) {
        self.0.push_front(block);
    }

    fn touch(&mut self, _block: u32, _how: Use) {}

    fn remove(&mut self, block: u32) {
        self.0.remove(block);
    }

    fn victim(
        &mut self,
        _outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32> {
        self.0.victim(may_leave)
    }
}

/// SIEVE (Zhang et al., NSDI '24): a FIFO whose hand spares blocks that were used since it last
/// came by.
#[derive(Default)]
pub struct Sieve {
    order: OrderList,
    used: Vec<bool>,
    hand: Option<u32>,
}

impl Sieve {
    fn mark(&mut self, block: u32, used: bool) {
        let at = block as usize;
        if at >= self.used.len() {
            self.used.resize(at + 1, false);
        }
        if let Some(mark) = self.used.get_mut(at) {
            *mark = used;
        }
    }
}

impl Policy for Sieve {
    fn contains(&self, block: u32) -> bool {
        self.order.contains(block)
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn insert(&mut self, block: u32, _how: Use) {
        self.mark(block, false);
        self.order.push_front(block);
    }

    fn touch(&mut self, block: u32, _how: Use) {
        if self.order.contains(block) {
            self.mark(block, true);
        }
    }

    fn remove(&mut self, block: u32) {
        if self.hand == Some(block) {
            self.hand = self.order.warmer(block);
        }
        self.order.remove(block);
    }

    fn victim(
        &mut self,
        _outlook: &dyn Outlook,
        may_leave: &mut dyn FnMut(u32) -> bool,
    ) -> Option<u32> {
        // Two rounds: the first may spare every block.
        for _ in 0..2 * self.order.len() + 1 {
            let block = self.hand.or_else(|| self.order.back())?;
            self.hand = self.order.warmer(block);
            if self.used.get(block as usize).copied().unwrap_or(false) {
                self.mark(block, false);
            } else if may_leave(block) {
                return Some(block);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Knows nothing.
    struct Plain;

    impl Outlook for Plain {
        fn about(&self, block: u32) -> About {
            About { tick: u64::from(block), used_at: 0, weight: 1.0 }
        }

        fn score(&self, _queue: u8, _about: &About) -> f32 {
            0.0
        }

        fn child(&self, _block: u32) -> Option<u32> {
            None
        }

        fn key(&self, block: u32) -> u64 {
            u64::from(block)
        }
    }

    proptest! {
        /// LRU agrees with a plain deque under any operations.
        #[test]
        fn lru_agrees_with_a_plain_deque(ops in prop::collection::vec((0u8..4, 0u32..16), 0..200)) {
            let mut lru = Lru::default();
            let mut plain: VecDeque<u32> = VecDeque::new();
            for (op, block) in ops {
                let at = plain.iter().position(|other| *other == block);
                match (op, at) {
                    (0, None) => {
                        lru.insert(block, Use::default());
                        plain.push_front(block);
                    }
                    (1, _) => {
                        lru.touch(block, Use::default());
                        if let Some(at) = at {
                            plain.remove(at);
                            plain.push_front(block);
                        }
                    }
                    (2, _) => {
                        lru.remove(block);
                        if let Some(at) = at {
                            plain.remove(at);
                        }
                    }
                    _ => {
                        let odd = |block: u32| block % 2 == 1;
                        let expected = plain.iter().rev().copied().find(|block| odd(*block));
                        prop_assert_eq!(lru.victim(&Plain, &mut |block| odd(block)), expected);
                    }
                }
                prop_assert_eq!(lru.0.len(), plain.len());
            }
        }
    }

    #[test]
    fn sieve_spares_what_was_used() {
        let mut sieve = Sieve::default();
        for block in 0..3 {
            sieve.insert(block, Use::default());
        }
        sieve.touch(0, Use::default());
        assert_eq!(sieve.victim(&Plain, &mut |_| true), Some(1));
        sieve.remove(1);
        assert_eq!(sieve.victim(&Plain, &mut |_| true), Some(2));
    }
}
