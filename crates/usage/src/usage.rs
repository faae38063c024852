//! What a request used, in disjoint kinds, and the cost of that by weights.

use std::ops::{Index, IndexMut};

use super::decimal::Decimal;

/// Kinds of usage. A token is of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Input,
    /// Input that was read from a cache.
    CachedInput,
    /// Input that was written to a cache.
    CacheWrite,
    Output,
    /// Output that the client does not see.
    Reasoning,
}

impl Kind {
    pub const ALL: [Kind; 5] = [Kind::Input, Kind::CachedInput, Kind::CacheWrite, Kind::Output, Kind::Reasoning];

    /// The name in the configuration, in metrics and in logs.
    pub fn name(self) -> &'static str {
        ["input", "cached_input", "cache_write", "output", "reasoning"][self as usize]
    }

    /// The kind whose weight this one has without a weight of its own.
    fn fallback(self) -> Kind {
        match self {
            Kind::Input | Kind::CachedInput | Kind::CacheWrite => Kind::Input,
            Kind::Output | Kind::Reasoning => Kind::Output,
        }
    }
}

/// How much of each kind was used.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Usage([Decimal; 5]);

impl Index<Kind> for Usage {
    type Output = Decimal;

    fn index(&self, kind: Kind) -> &Decimal {
        &self.0[kind as usize]
    }
}

impl IndexMut<Kind> for Usage {
    fn index_mut(&mut self, kind: Kind) -> &mut Decimal {
        &mut self.0[kind as usize]
    }
}

impl Usage {
    pub fn of(input: Decimal, output: Decimal) -> Usage {
        let mut usage = Usage::default();
        (usage[Kind::Input], usage[Kind::Output]) = (input, output);
        usage
    }
}

/// Tokens that weights count once each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountedTokens {
    /// Input and output.
    All,
    Input,
    Output,
}

/// The factor of each kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weights([Decimal; 5]);

impl Default for Weights {
    fn default() -> Weights {
        Weights([Decimal::ONE; 5])
    }
}

impl Weights {
    /// `given`: the weight of a kind, if it has one.
    pub fn new(given: impl Fn(Kind) -> Option<Decimal>) -> Weights {
        Weights(Kind::ALL.map(|kind| given(kind).or_else(|| given(kind.fallback())).unwrap_or(Decimal::ONE)))
    }

    /// The tokens whose number the weighted sum is; `None`: it is an amount of another kind, such as money. Kinds that differ from
    /// input or output in the price alone, such as input from a cache, may have any weight beside it.
    pub fn counted_tokens(&self) -> Option<CountedTokens> {
        let [input, cached_input, cache_write, output, reasoning] = self.0;
        match (input, output) {
            (Decimal::ONE, Decimal::ONE) => Some(CountedTokens::All),
            (Decimal::ONE, Decimal::ZERO) if reasoning == Decimal::ZERO => Some(CountedTokens::Input),
            (Decimal::ZERO, Decimal::ONE) if [cached_input, cache_write] == [Decimal::ZERO; 2] => {
                Some(CountedTokens::Output)
            }
            _ => None,
        }
    }

    /// The weighted sum, rounded up. A cost beyond `u32::MAX` is `u32::MAX`.
    pub fn cost(&self, usage: &Usage) -> u32 {
        Decimal::rounded_sum(self.0.into_iter().zip(usage.0))
    }
}

/// A name, or the beginning of names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamePattern {
    text: String,
    is_beginning: bool,
}

impl NamePattern {
    /// A text with `*` at the end stands for all names that begin so. `None`: it is empty, or has a `*` elsewhere.
    pub fn parse(text: &str) -> Option<NamePattern> {
        let (name, is_beginning) = text.strip_suffix('*').map_or((text, false), |beginning| (beginning, true));
        let is_pattern = !text.is_empty() && !name.contains('*');
        is_pattern.then(|| NamePattern { text: name.to_owned(), is_beginning })
    }

    pub fn matches(&self, name: &str) -> bool {
        if self.is_beginning { name.starts_with(&self.text) } else { name == self.text }
    }
}

/// What a request says of its model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestedModel<'a> {
    /// Nothing.
    Unknown,
    /// Its body was not read.
    Unread,
    Named(&'a str),
    /// Servers may read different names.
    Ambiguous,
}

impl<'a> RequestedModel<'a> {
    /// With the model that the answer names.
    pub fn or(self, answered: Option<&'a str>) -> RequestedModel<'a> {
        match (self, answered) {
            (RequestedModel::Unknown | RequestedModel::Unread, Some(name)) => RequestedModel::Named(name),
            (RequestedModel::Unread, None) => RequestedModel::Ambiguous,
            (model, _) => model,
        }
    }

    pub fn name(self) -> Option<&'a str> {
        if let RequestedModel::Named(name) = self { Some(name) } else { None }
    }
}

/// Weights by the name of the model.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ModelWeights {
    /// The longest patterns first.
    patterns: Vec<(NamePattern, Weights)>,
    default: Weights,
}

impl ModelWeights {
    /// The same for all models.
    pub fn of_all(weights: Weights) -> ModelWeights {
        ModelWeights { patterns: Vec::new(), default: weights }
    }

    /// `default`: for models without a pattern; 1 if absent.
    pub fn new(mut patterns: Vec<(NamePattern, Weights)>, default: Option<Weights>) -> ModelWeights {
        // A whole name is longer than the same text with `*`.
        patterns.sort_by_key(|(pattern, _)| (std::cmp::Reverse(pattern.text.len()), pattern.is_beginning));
        ModelWeights { patterns, default: default.unwrap_or_default() }
    }

    /// The weighted sum; of an ambiguous model, the greatest of all models.
    pub fn cost(&self, usage: &Usage, model: RequestedModel<'_>) -> u32 {
        let cost = self.of(model.name()).cost(usage);
        match model {
            RequestedModel::Ambiguous => {
                self.patterns.iter().map(|(_, weights)| weights.cost(usage)).fold(cost, u32::max)
            }
            _ => cost,
        }
    }

    fn of(&self, model: Option<&str>) -> &Weights {
        let matches = |(pattern, _): &&(NamePattern, Weights)| model.is_some_and(|model| pattern.matches(model));
        self.patterns.iter().find(matches).map_or(&self.default, |(_, weights)| weights)
    }

    /// As [`Weights::counted_tokens`], if that is the same for all models.
    pub fn counted_tokens(&self) -> Option<CountedTokens> {
        let counted = self.default.counted_tokens();
        counted.filter(|_| self.patterns.iter().all(|(_, weights)| weights.counted_tokens() == counted))
    }

    /// Whether the model makes no difference.
    pub fn is_for_all(&self) -> bool {
        self.patterns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(given: &[(Kind, &str)]) -> Weights {
        Weights::new(|kind| given.iter().find(|(known, _)| *known == kind).and_then(|(_, text)| Decimal::parse(text)))
    }

    fn usage(numbers: [u64; 5]) -> Usage {
        Usage(numbers.map(Decimal::from))
    }

    #[test]
    fn a_kind_without_a_weight_has_that_of_its_kin() {
        assert_eq!(Weights::default().cost(&usage([1, 2, 3, 4, 5])), 15);
        assert_eq!(weights(&[(Kind::Input, "10")]).cost(&usage([1, 2, 3, 4, 5])), 69);
        assert_eq!(weights(&[(Kind::Output, "10")]).cost(&usage([1, 2, 3, 4, 5])), 96);
        let all =
            weights(&[(Kind::Input, "1"), (Kind::CachedInput, "0.1"), (Kind::CacheWrite, "1.25"), (Kind::Output, "4")]);
        assert_eq!(all.cost(&usage([100, 11, 0, 10, 1])), 146);
        assert_eq!(all.cost(&usage([0, 1, 1, 0, 0])), 2);
        assert_eq!(all.cost(&usage([0; 5])), 0);
        assert_eq!(all.cost(&usage([u64::MAX; 5])), u32::MAX);
        let names = Kind::ALL.map(Kind::name);
        assert_eq!(names, ["input", "cached_input", "cache_write", "output", "reasoning"]);
    }

    #[test]
    fn weights_of_one_count_tokens() {
        use CountedTokens::{All, Input, Output};
        for (given, counted) in [
            (&[][..], Some(All)),
            (&[(Kind::CachedInput, "0.1"), (Kind::CacheWrite, "1.25")], Some(All)),
            (&[(Kind::Output, "0")], Some(Input)),
            (&[(Kind::CachedInput, "0"), (Kind::Output, "0.0")], Some(Input)),
            (&[(Kind::Output, "0"), (Kind::Reasoning, "1")], None),
            (&[(Kind::Input, "0")], Some(Output)),
            (&[(Kind::Input, "0"), (Kind::CacheWrite, "1")], None),
            (&[(Kind::Input, "0"), (Kind::Output, "0")], None),
            (&[(Kind::Output, "4")], None),
            (&[(Kind::Input, "2"), (Kind::Output, "2")], None),
        ] {
            assert_eq!(weights(given).counted_tokens(), counted, "{given:?}");
        }
        let of_model = |given: &[(Kind, &str)]| {
            let pattern = (NamePattern::parse("a*").unwrap(), weights(given));
            ModelWeights::new(vec![pattern], Some(weights(&[(Kind::Output, "0")]))).counted_tokens()
        };
        assert_eq!(of_model(&[(Kind::CachedInput, "0.5"), (Kind::Output, "0")]), Some(Input));
        assert_eq!(of_model(&[]), None);
    }

    #[test]
    fn the_longest_pattern_decides() {
        let of = |text: &str| weights(&[(Kind::Input, text), (Kind::Output, text)]);
        let patterns = [("gpt-5*", "2"), ("gpt-5-mini*", "3"), ("gpt-5-mini", "4"), ("*", "5")];
        let patterns = || patterns.iter().map(|(name, weight)| (NamePattern::parse(name).unwrap(), of(weight)));
        let models = ModelWeights::new(patterns().collect(), Some(of("9")));
        let cost = |model: Option<&str>| models.of(model).cost(&usage([1, 0, 0, 0, 0]));
        for (model, expected) in [("gpt-5", 2), ("gpt-5-mini", 4), ("gpt-5-mini-high", 3), ("o3", 5)] {
            assert_eq!(cost(Some(model)), expected, "{model}");
        }
        assert_eq!(cost(None), 9);
        let cost = |model: RequestedModel| models.cost(&usage([1, 0, 0, 0, 0]), model);
        assert_eq!([RequestedModel::Named("o3"), RequestedModel::Ambiguous].map(cost), [5, 9]);
        let unread = [None, Some("gpt-5")].map(|answered| cost(RequestedModel::Unread.or(answered)));
        let unknown = [None, Some("gpt-5")].map(|answered| cost(RequestedModel::Unknown.or(answered)));
        assert_eq!((unread, unknown), ([9, 2], [9, 2]));
        let cheap_by_default = ModelWeights::new(patterns().collect(), Some(of("1")));
        let cost = |model: RequestedModel| cheap_by_default.cost(&usage([1, 0, 0, 0, 0]), model);
        assert_eq!([RequestedModel::Unknown, RequestedModel::Ambiguous].map(cost), [1, 5]);
        assert_eq!(ModelWeights::new(patterns().take(1).collect(), None).of(Some("o3")), &Weights::default());
        assert_eq!(["", "a*b", "**"].map(NamePattern::parse), [None, None, None]);
        assert_eq!(ModelWeights::of_all(of("7")).of(Some("o3")), &of("7"));
    }
}
