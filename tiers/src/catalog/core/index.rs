//! Finds a block's number by the hash of its key, in 10 to 13 bytes for each block.
//!
//! An open table of entries that hold half of the hash and the number, so that it grows and closes
//! gaps without a look at the blocks, and one probe is one cache line. It is cut into parts that
//! grow by themselves: the longest pause is the copy of one part, not of all.
//!
//! Invariants: an entry lies between the place its hash asks for and the next free place; a part
//! always has a free place, so that every search ends.

/// Parts; a power of two.
const PARTS: usize = 64;

/// No entry: no block has this number.
const EMPTY: u64 = u64::MAX;

/// Places of a part that has any, at least.
const PLACES_MIN: usize = 8;

/// The number of every block, by hash.
pub(crate) struct KeyIndex {
    parts: Vec<Part>,
    count: usize,
}

#[derive(Clone, Default)]
struct Part {
    /// The upper half of the hash, then the number.
    places: Vec<u64>,
    used: usize,
}

impl KeyIndex {
    pub(crate) fn new() -> KeyIndex {
        KeyIndex { parts: vec![Part::default(); PARTS], count: 0 }
    }

    /// Entries.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    fn part(&self, hash: u64) -> &Part {
        self.parts.get(hash as usize % PARTS).expect("the remainder is below the number of parts")
    }

    /// The first number with this hash that `is_it`.
    pub(crate) fn find(&self, hash: u64, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        self.part(hash).find(hash, is_it).map(|(_, number)| number)
    }

    /// Reads the place that the hash asks for, so that a search soon after finds it in the cache.
    pub(crate) fn warm(&self, hash: u64) -> u64 {
        let part = self.part(hash);
        part.places.get(part.home(hash)).copied().unwrap_or(EMPTY)
    }

    /// Adds an entry; the number must not be there yet.
    pub(crate) fn insert(&mut self, hash: u64, number: u32) {
        let part = self.parts.get_mut(hash as usize % PARTS);
        part.expect("the remainder is below the number of parts").insert(hash, number);
        self.count += 1;
    }

    /// Takes an entry out. Says whether it was there.
    pub(crate) fn remove(&mut self, hash: u64, number: u32) -> bool {
        let part = self.parts.get_mut(hash as usize % PARTS);
        let removed = part.is_some_and(|part| part.remove(hash, number));
        self.count -= usize::from(removed);
        removed
    }
}

impl Part {
    /// Where the search for a hash begins.
    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.places.len() as u64) >> 32) as usize
    }

    fn get(&self, at: usize) -> u64 {
        self.places.get(at).copied().unwrap_or(EMPTY)
    }

    fn set(&mut self, at: usize, entry: u64) {
        *self.places.get_mut(at).expect("a search stays within the part") = entry;
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 < self.places.len() { at + 1 } else { 0 }
    }

    fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<(usize, u32)> {
        let mut at = self.home(hash);
        loop {
            let entry = self.get(at);
            if entry == EMPTY {
                return None;
            }
            if entry >> 32 == hash >> 32 && is_it(entry as u32) {
                return Some((at, entry as u32));
            }
            at = self.after(at);
        }
    }

    fn insert(&mut self, hash: u64, number: u32) {
        // Four fifths full: a search that finds nothing looks at two cache lines on average.
        if (self.used + 1) * 5 > self.places.len() * 4 {
            self.grow();
        }
        self.put(hash >> 32 << 32 | u64::from(number));
        self.used += 1;
    }

    fn put(&mut self, entry: u64) {
        let mut at = self.home(entry);
        while self.get(at) != EMPTY {
            at = self.after(at);
        }
        self.set(at, entry);
    }

    /// A quarter more places: less memory lies idle than if they were doubled.
    fn grow(&mut self) {
        let places = (self.places.len() + self.places.len() / 4).max(PLACES_MIN);
        let before = std::mem::replace(&mut self.places, vec![EMPTY; places]);
        before.into_iter().filter(|entry| *entry != EMPTY).for_each(|entry| self.put(entry));
    }

    fn remove(&mut self, hash: u64, number: u32) -> bool {
        let Some((mut gap, _)) = self.find(hash, |found| found == number) else {
            return false;
        };
        self.used -= 1;
        // Whatever lies behind the gap and may lie in it moves there, up to the next free place.
        let mut at = gap;
        loop {
            at = self.after(at);
            let entry = self.get(at);
            if entry == EMPTY {
                self.set(gap, EMPTY);
                return true;
            }
            let len = self.places.len();
            let from = |home: usize| (at + len - home) % len;
            if from(self.home(entry)) >= from(gap) {
                self.set(gap, entry);
                gap = at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Agrees with a plain set of pairs, with hashes that collide and wrap around.
        #[test]
        fn agrees_with_a_plain_set(
            ops in prop::collection::vec((0u8..3, 0u64..12, 0u32..64), 0..600),
        ) {
            let mut index = KeyIndex::new();
            let mut plain = BTreeSet::new();
            for (op, hash, number) in ops {
                // Both ends of one part, a few hashes each.
                let hash = if hash < 6 { hash << 32 } else { u64::MAX << 36 | hash << 32 };
                if op < 2 {
                    if plain.insert((hash, number)) {
                        index.insert(hash, number);
                    }
                } else {
                    prop_assert_eq!(index.remove(hash, number), plain.remove(&(hash, number)));
                }
                prop_assert_eq!(index.len(), plain.len());
            }
            for (hash, number) in &plain {
                prop_assert_eq!(index.find(*hash, |found| found == *number), Some(*number));
            }
            prop_assert_eq!(index.find(3 << 40, |_| true), None);
        }
    }
}
