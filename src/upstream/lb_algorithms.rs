//! Which server gets a request, as pure arithmetic: weights in, a position out.
//!
//! A weight of 0 is a server that is not to be chosen. This file knows no server and reads no clock;
//! chance is handed in, so that every choice can be repeated.

/// Two servers at random, by their weights; of these the one with fewer requests under way for its
/// weight (the power of two choices; Mitzenmacher 2001). The second is never the first, so that a
/// server that hangs is passed by wherever there is another. `random` returns a number below its
/// argument.
pub fn least_requests(
    weights: &[u32],
    under_way: impl Fn(usize) -> u32,
    mut random: impl FnMut(u64) -> u64,
) -> Option<usize> {
    let total = total(weights);
    if total == 0 {
        return None;
    }
    let first = at(weights, random(total), None)?;
    let rest = total - u64::from(weights[first]);
    if rest == 0 {
        return Some(first);
    }
    let second = at(weights, random(rest), Some(first))?;
    // A ratio, without dividing. What the request itself adds is left out: idle servers are equal,
    // and then it is the weights by which the first was drawn that count.
    let load = |of: usize, other: usize| u64::from(under_way(of)) * u64::from(weights[other]);
    Some(if load(second, first) < load(first, second) { second } else { first })
}

/// Smooth weighted round robin: every server gains its weight, the one with most is chosen and loses
/// the sum. A heavy server's turns are spread between the others', as nginx has it.
pub fn round_robin(weights: &[u32], turns: &mut [i64]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (server, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0) {
        turns[server] += i64::from(*weight);
        if best.is_none_or(|best| turns[server] > turns[best]) {
            best = Some(server);
        }
    }
    let best = best?;
    turns[best] -= i64::try_from(total(weights)).unwrap_or(i64::MAX);
    Some(best)
}

/// Weighted rendezvous hashing (Thaler and Ravishankar 1998; weights after Schindelhauer and
/// Schomaker 2005): every server draws a number from the key and its own name, and the best draw
/// wins. When a server leaves, only its keys move, each to its second best; when weights change, only
/// as many as have to. No table has to be made anew for that.
pub fn rendezvous(weights: &[u32], names: &[u64], key: u64) -> Option<usize> {
    let draw = |server: usize| {
        // In the open interval from 0 to 1, so that the logarithm is a number below 0.
        let chance = ((mixed(key ^ names[server]) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        -chance.ln() / f64::from(weights[server])
    };
    let candidates = (0..weights.len()).filter(|server| weights[*server] > 0);
    candidates.map(|server| (draw(server), server)).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, server)| server)
}

fn total(weights: &[u32]) -> u64 {
    weights.iter().map(|weight| u64::from(*weight)).sum()
}

/// The server to which a point on the line of all weights belongs; without one of them.
fn at(weights: &[u32], mut point: u64, without: Option<usize>) -> Option<usize> {
    for (server, weight) in weights.iter().enumerate().filter(|(server, _)| Some(*server) != without) {
        match point.checked_sub(u64::from(*weight)) {
            Some(rest) => point = rest,
            None => return Some(server),
        }
    }
    None
}

/// The finaliser of SplitMix64: every bit of the result depends on every bit given.
fn mixed(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chance that is the same every time.
    fn chance() -> impl FnMut(u64) -> u64 {
        let mut random = fastrand::Rng::with_seed(7);
        move |below| random.u64(..below)
    }

    fn shares(servers: usize, picks: usize, mut pick: impl FnMut() -> usize) -> Vec<f64> {
        let mut counts = vec![0; servers];
        (0..picks).for_each(|_| counts[pick()] += 1);
        counts.into_iter().map(|count: usize| count as f64 / picks as f64).collect()
    }

    fn names(servers: u64) -> Vec<u64> {
        (1..=servers).map(|n| mixed(n << 32)).collect()
    }

    #[test]
    fn idle_servers_are_chosen_by_weight() {
        let mut random = chance();
        let weights = [1, 3, 0, 6];
        let shares = shares(4, 100_000, || least_requests(&weights, |_| 0, &mut random).unwrap());
        for (share, wanted) in shares.iter().zip([0.1, 0.3, 0.0, 0.6]) {
            assert!((share - wanted).abs() < 0.01, "{shares:?}");
        }
    }

    #[test]
    fn busy_servers_are_filled_by_weight() {
        // Requests that never end: what is under way follows the weights closely.
        let (mut random, mut busy) = (chance(), [0_u32; 3]);
        for _ in 0..6000 {
            let server = least_requests(&[1, 2, 3], |server| busy[server], &mut random).unwrap();
            busy[server] += 1;
        }
        for (busy, wanted) in busy.into_iter().zip([1000, 2000, 3000]) {
            assert!(busy.abs_diff(wanted) <= 5, "{busy} of {wanted}");
        }
    }

    #[test]
    fn a_server_that_hangs_is_passed_by() {
        let mut random = chance();
        let mut hung = |weights: &[u32]| least_requests(weights, |server| u32::from(server == 1) * 100, &mut random);
        assert!((0..1000).all(|_| hung(&[1, 1]) == Some(0)));
        assert!((0..1000).all(|_| hung(&[1, 5, 1]) != Some(1)));
        assert_eq!(hung(&[0, 1]), Some(1));
        assert_eq!(hung(&[0, 0]), None);
    }

    #[test]
    fn round_robin_is_exact_and_smooth() {
        let (weights, mut turns) = ([5, 1, 1], [0; 3]);
        let order: Vec<usize> = (0..7).map(|_| round_robin(&weights, &mut turns).unwrap()).collect();
        assert_eq!(order, [0, 0, 1, 0, 2, 0, 0]);
        assert_eq!(turns, [0; 3]);
        // Whoever is away gains nothing meanwhile.
        let order: Vec<usize> = (0..4).map(|_| round_robin(&[1, 0, 1], &mut turns).unwrap()).collect();
        assert_eq!(order, [0, 2, 0, 2]);
        assert_eq!(round_robin(&[0, 0], &mut turns), None);
    }

    #[test]
    fn keys_are_spread_by_weight() {
        let names = names(4);
        let mut key = 0;
        let shares = shares(4, 100_000, || {
            key += 1;
            rendezvous(&[1, 2, 3, 4], &names, mixed(key)).unwrap()
        });
        for (share, wanted) in shares.iter().zip([0.1, 0.2, 0.3, 0.4]) {
            assert!((share - wanted).abs() < 0.01, "{shares:?}");
        }
    }

    #[test]
    fn only_the_keys_of_the_server_that_leaves_move() {
        let names = names(5);
        let (all, without) = ([1, 1, 2, 1, 1], [1, 1, 0, 1, 1]);
        let mut moved = [0; 5];
        for key in (0..50_000).map(mixed) {
            let (before, after) = (rendezvous(&all, &names, key).unwrap(), rendezvous(&without, &names, key).unwrap());
            if before == 2 {
                moved[after] += 1;
            } else {
                assert_eq!(before, after);
            }
        }
        // And they spread over all that are left.
        assert!(moved.iter().enumerate().all(|(server, moved)| (server == 2) == (*moved == 0)), "{moved:?}");
        let (least, most) = (moved.iter().filter(|n| **n > 0).min().unwrap(), moved.iter().max().unwrap());
        assert!(most * 10 < least * 12, "{moved:?}");
    }

    #[test]
    fn a_weight_that_grows_takes_keys_and_gives_none_away() {
        let names = names(3);
        for key in (0..10_000).map(mixed) {
            let (before, after) =
                (rendezvous(&[10, 10, 1], &names, key).unwrap(), rendezvous(&[10, 10, 10], &names, key).unwrap());
            assert!(after == before || after == 2);
        }
        assert_eq!(rendezvous(&[0, 0, 0], &names, 1), None);
    }
}
