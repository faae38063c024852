//! A hash table whose copies share what they have in common: a changed copy of a large table costs little, and readers keep the
//! former one.
//!
//! The entries are in shards of a few hundred. A copy shares all shards, and a change copies the shard that it concerns.

use std::sync::Arc;

use hashbrown::HashTable;

/// Entries of a shard when a table is made for a number of entries, and how many more it may have before there are more shards.
const SHARD_ENTRIES: usize = 256;
const GROWTH: usize = 4;

/// Entries of type `T`, by hashes that the caller computes. All their bits have to be random.
#[derive(Clone, Debug)]
pub struct ShardedTable<T> {
    /// A power of two.
    shards: Vec<Arc<HashTable<T>>>,
    entries: usize,
}

impl<T: Clone> ShardedTable<T> {
    pub fn for_entries(entries: usize) -> ShardedTable<T> {
        let shards = (entries / SHARD_ENTRIES).next_power_of_two();
        ShardedTable { shards: (0..shards).map(|_| Arc::default()).collect(), entries: 0 }
    }

    /// The entry with this hash for which `is_wanted` holds.
    #[inline]
    pub fn find(&self, hash: u64, is_wanted: impl FnMut(&T) -> bool) -> Option<&T> {
        self.shards[self.shard(hash)].find(hash, is_wanted)
    }

    /// Adds an entry, which is not in the table. `hash_of` returns the hash of any entry.
    pub fn insert(&mut self, entry: T, hash_of: impl Fn(&T) -> u64) {
        if self.entries >= self.shards.len() * SHARD_ENTRIES * GROWTH {
            let mut larger = ShardedTable::for_entries(self.entries * GROWTH);
            for entry in self.iter() {
                larger.add(entry.clone(), &hash_of);
            }
            *self = larger;
        }
        self.add(entry, &hash_of);
    }

    fn add(&mut self, entry: T, hash_of: &impl Fn(&T) -> u64) {
        let hash = hash_of(&entry);
        let shard = self.shard(hash);
        Arc::make_mut(&mut self.shards[shard]).insert_unique(hash, entry, hash_of);
        self.entries += 1;
    }

    /// Removes the entry with this hash for which `is_wanted` holds.
    pub fn remove(&mut self, hash: u64, mut is_wanted: impl FnMut(&T) -> bool) {
        let shard = self.shard(hash);
        if self.shards[shard].find(hash, &mut is_wanted).is_none() {
            return;
        }
        if let Ok(entry) = Arc::make_mut(&mut self.shards[shard]).find_entry(hash, is_wanted) {
            entry.remove();
            self.entries -= 1;
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.shards.iter().flat_map(|shard| shard.iter())
    }

    pub fn len(&self) -> usize {
        self.entries
    }

    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    #[inline]
    fn shard(&self, hash: u64) -> usize {
        // A shard finds its entries by the lowest and the highest bits.
        (hash >> 32) as usize & (self.shards.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::hash::BuildHasher;

    use proptest::prelude::*;

    use super::*;

    fn hash(key: u32) -> u64 {
        foldhash::fast::FixedState::with_seed(1).hash_one(key)
    }

    proptest! {
        #[test]
        fn copies_keep_their_entries(
            first in 0..3000u32,
            changes in proptest::collection::vec((0..4000u32, any::<bool>()), 0..300),
        ) {
            let mut table = ShardedTable::for_entries(0);
            let mut model = BTreeMap::new();
            for key in 0..first {
                table.insert((key, 0), |(key, _)| hash(*key));
                model.insert(key, 0);
            }
            let (former, before) = (table.clone(), model.clone());
            for (n, (key, is_removal)) in changes.into_iter().enumerate() {
                table.remove(hash(key), |(known, _)| *known == key);
                model.remove(&key);
                if !is_removal {
                    table.insert((key, n), |(key, _)| hash(*key));
                    model.insert(key, n);
                }
            }
            for (table, model) in [(&table, &model), (&former, &before)] {
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(&table.iter().copied().collect::<BTreeMap<_, _>>(), model);
                for key in 0..4000 {
                    let found = table.find(hash(key), |(known, _)| *known == key);
                    prop_assert_eq!(found.map(|(_, n)| n), model.get(&key));
                }
            }
        }
    }
}
