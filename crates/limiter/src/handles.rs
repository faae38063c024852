//! Handles: what would be an index has a type, so that a layer cannot be looked up among rules, nor a rule of one vector in
//! another.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut, Range, RangeFrom};

/// A position in an [`IdVec`].
pub trait Handle: Copy + Eq + fmt::Debug {
    /// The handle of the item at this position. For an [`IdVec`], which hands its handles out, and for tests.
    fn at(index: usize) -> Self;
    /// The number behind the handle, for output and for arrays of fixed layout.
    fn index(self) -> usize;
}

/// Declares handles, each a number of 32 bits.
#[macro_export]
macro_rules! handles {
    ($($(#[$doc:meta])+ $name:ident,)+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(u32);

        impl $crate::handles::Handle for $name {
            #[inline(always)]
            fn at(index: usize) -> $name {
                debug_assert!(u32::try_from(index).is_ok(), "a vector has fewer than 2^32 items");
                $name(index as u32)
            }

            #[inline(always)]
            fn index(self) -> usize {
                self.0 as usize
            }
        }
    )+};
}

handles! {
    /// A rule of a [`RuleSet`](crate::rule_set::RuleSet).
    RuleId,
    /// A rule of a [`ChargePlan`](crate::charge_plan::ChargePlan): its position there.
    PlanPosition,
    /// A charge of a decision: its position in [`DecisionResult::charges`](crate::decision_context::DecisionResult::charges).
    ChargePosition,
    /// A layer among those of its rule.
    LayerPosition,
    /// A name by which refusals of a rule are counted: see [`CompiledRule::limit_names`](crate::rule_set::CompiledRule::limit_names).
    LimitNameId,
    /// The windows of a rule that apply to a key: those of a plan or an override, or the default ones.
    VariantId,
    /// Windows of a [`RuleSet`](crate::rule_set::RuleSet): each kind once, for all layers.
    WindowsId,
}

impl VariantId {
    /// The default windows of a rule.
    pub const DEFAULT: VariantId = VariantId(0);
}

impl PlanPosition {
    /// The first rule of a plan.
    pub const FIRST: PlanPosition = PlanPosition(0);
}

impl ChargePosition {
    /// The first charge of a decision.
    pub const FIRST: ChargePosition = ChargePosition(0);
}

impl LayerPosition {
    /// The first layer of a rule.
    pub const FIRST: LayerPosition = LayerPosition(0);
}

impl WindowsId {
    /// The first windows of a rule set.
    pub const FIRST: WindowsId = WindowsId(0);
}

impl Default for VariantId {
    fn default() -> VariantId {
        VariantId::DEFAULT
    }
}

/// A layer of a rule of a [`RuleSet`](crate::rule_set::RuleSet).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LayerId {
    /// The rule.
    pub rule: RuleId,
    /// The position of the layer among those of its rule.
    pub position: LayerPosition,
}

/// A vector that is indexed by one kind of handle.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdVec<I, T> {
    items: Vec<T>,
    ids: PhantomData<fn(I) -> I>,
}

impl<I: Handle, T> IdVec<I, T> {
    /// A vector without items.
    pub const fn new() -> IdVec<I, T> {
        IdVec { items: Vec::new(), ids: PhantomData }
    }

    /// Appends an item, and returns its handle.
    #[inline]
    pub fn push(&mut self, item: T) -> I {
        self.items.push(item);
        I::at(self.items.len() - 1)
    }

    /// The handle that the next item gets.
    #[inline]
    pub fn next_id(&self) -> I {
        I::at(self.items.len())
    }

    /// Removes all items.
    #[inline]
    pub fn clear(&mut self) {
        self.items.clear();
    }

    /// Removes the items that `keeps` is false for. The items behind them get other handles.
    pub fn retain(&mut self, keeps: impl FnMut(&T) -> bool) {
        self.items.retain(keeps);
    }

    /// Removes the items from `first` on.
    #[inline]
    pub fn truncate(&mut self, first: I) {
        self.items.truncate(first.index());
    }

    /// The item; `None` if the handle is of a longer vector.
    #[inline]
    pub fn get(&self, id: I) -> Option<&T> {
        self.items.get(id.index())
    }

    /// As [`IdVec::get`], to change the item.
    #[inline]
    pub fn get_mut(&mut self, id: I) -> Option<&mut T> {
        self.items.get_mut(id.index())
    }

    /// The last item, to change it.
    #[inline]
    pub fn last_mut(&mut self) -> Option<&mut T> {
        self.items.last_mut()
    }

    /// Appends copies of an item, or removes the last ones, until there are so many.
    pub fn resize(&mut self, len: usize, item: T)
    where
        T: Clone,
    {
        self.items.resize(len, item);
    }

    /// The number of items.
    #[inline]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are no items.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The items in order.
    #[inline]
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.items.iter()
    }

    /// As [`IdVec::iter`], to change them.
    #[inline]
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.items.iter_mut()
    }

    /// The handles of all items, in order.
    #[inline]
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = I> + ExactSizeIterator + Clone + use<I, T> {
        (0..self.items.len()).map(I::at)
    }

    /// The handles of the items from `first` on, in order.
    #[inline]
    pub fn ids_from(&self, first: I) -> impl DoubleEndedIterator<Item = I> + ExactSizeIterator + Clone + use<I, T> {
        (first.index()..self.items.len()).map(I::at)
    }

    /// The handles of a range, in order.
    #[inline]
    pub fn ids_in(
        &self,
        range: Range<I>,
    ) -> impl DoubleEndedIterator<Item = I> + ExactSizeIterator + Clone + use<I, T> {
        (range.start.index()..range.end.index()).map(I::at)
    }

    /// The items with their handles, in order.
    #[inline]
    pub fn enumerate(&self) -> impl DoubleEndedIterator<Item = (I, &T)> + ExactSizeIterator + Clone {
        self.items.iter().enumerate().map(|(index, item)| (I::at(index), item))
    }

    /// As [`IdVec::enumerate`], to change the items.
    #[inline]
    pub fn enumerate_mut(&mut self) -> impl Iterator<Item = (I, &mut T)> {
        self.items.iter_mut().enumerate().map(|(index, item)| (I::at(index), item))
    }

    /// The handle of the first item for which `is` holds.
    pub fn position(&self, is: impl FnMut(&T) -> bool) -> Option<I> {
        self.items.iter().position(is).map(I::at)
    }

    /// A vector of the same length, with an item made from each of these.
    pub fn map<U>(&self, item: impl FnMut(&T) -> U) -> IdVec<I, U> {
        self.items.iter().map(item).collect()
    }

    /// Appends copies of the items of another vector.
    #[inline]
    pub fn extend_from(&mut self, other: &IdVec<I, T>)
    where
        T: Clone,
    {
        self.items.extend_from_slice(&other.items);
    }

    /// The items as a slice.
    #[inline]
    pub fn as_slice(&self) -> &[T] {
        &self.items
    }

    /// As [`IdVec::as_slice`], to change the items.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.items
    }
}

impl<I, T> Default for IdVec<I, T> {
    fn default() -> IdVec<I, T> {
        IdVec { items: Vec::new(), ids: PhantomData }
    }
}

impl<I: Handle, T> Index<I> for IdVec<I, T> {
    type Output = T;

    #[inline(always)]
    fn index(&self, id: I) -> &T {
        &self.items[id.index()]
    }
}

impl<I: Handle, T> IndexMut<I> for IdVec<I, T> {
    #[inline(always)]
    fn index_mut(&mut self, id: I) -> &mut T {
        &mut self.items[id.index()]
    }
}

impl<I: Handle, T> Index<Range<I>> for IdVec<I, T> {
    type Output = [T];

    #[inline(always)]
    fn index(&self, range: Range<I>) -> &[T] {
        &self.items[range.start.index()..range.end.index()]
    }
}

impl<I: Handle, T> IndexMut<Range<I>> for IdVec<I, T> {
    #[inline(always)]
    fn index_mut(&mut self, range: Range<I>) -> &mut [T] {
        &mut self.items[range.start.index()..range.end.index()]
    }
}

impl<I: Handle, T> Index<RangeFrom<I>> for IdVec<I, T> {
    type Output = [T];

    #[inline(always)]
    fn index(&self, range: RangeFrom<I>) -> &[T] {
        &self.items[range.start.index()..]
    }
}

impl<I: Handle, T> IndexMut<RangeFrom<I>> for IdVec<I, T> {
    #[inline(always)]
    fn index_mut(&mut self, range: RangeFrom<I>) -> &mut [T] {
        &mut self.items[range.start.index()..]
    }
}

impl<I, T> FromIterator<T> for IdVec<I, T> {
    fn from_iter<A: IntoIterator<Item = T>>(items: A) -> IdVec<I, T> {
        IdVec { items: items.into_iter().collect(), ids: PhantomData }
    }
}

impl<I, T> From<Vec<T>> for IdVec<I, T> {
    fn from(items: Vec<T>) -> IdVec<I, T> {
        IdVec { items, ids: PhantomData }
    }
}

impl<I, T, const N: usize> From<[T; N]> for IdVec<I, T> {
    fn from(items: [T; N]) -> IdVec<I, T> {
        IdVec { items: items.into(), ids: PhantomData }
    }
}

impl<I, T: PartialEq<U>, U, const N: usize> PartialEq<[U; N]> for IdVec<I, T> {
    fn eq(&self, other: &[U; N]) -> bool {
        self.items == *other
    }
}

impl<I, T> Extend<T> for IdVec<I, T> {
    fn extend<A: IntoIterator<Item = T>>(&mut self, items: A) {
        self.items.extend(items);
    }
}

impl<I, T> IntoIterator for IdVec<I, T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> std::vec::IntoIter<T> {
        self.items.into_iter()
    }
}

impl<'a, I, T> IntoIterator for &'a IdVec<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> std::slice::Iter<'a, T> {
        self.items.iter()
    }
}

impl<'a, I, T> IntoIterator for &'a mut IdVec<I, T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> std::slice::IterMut<'a, T> {
        self.items.iter_mut()
    }
}
