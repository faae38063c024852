//! Gateways that find Redis by its Sentinels: when the master dies and its replica takes over, they go on by themselves.

use crate::world::eventually;
use crate::world::redis::RedisServer;
use crate::world::sentinel::{MASTER, Sentinels};
use crate::world::siblings::{Siblings, admitted, rule, shared};

#[test]
fn the_replica_takes_over_and_counting_goes_on() {
    let mut master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let settings =
        format!("sentinel_master = \"{MASTER}\"\nmode = \"exact\"\non_outage = \"refuse\"\ntimeout = \"500ms\"");
    let gateways = Siblings::start(2, &shared(&sentinels.urls(), &settings, &rule("[\"10/30d\"]", "")));
    assert_eq!(gateways.0.iter().map(|gateway| admitted(gateway, "alice", 3)).sum::<usize>(), 6);
    let counted =
        || replica.keys().iter().find(|key| key.contains("alice")).map_or(0, |key| replica.number(&["GET", key]));
    eventually("the replica knows", || counted() == 6);
    master.kill();
    let status = |gateway: usize| gateways.0[gateway].client().get_with("/a", &[("X-Key", "alice")]).status;
    assert_eq!(status(0), 503);
    sentinels.failed_over(&replica);
    let mut more = 0;
    for gateway in [0, 1] {
        eventually("it goes on by itself", || {
            let answer = status(gateway);
            more += i64::from(answer == 200);
            answer == 200
        });
    }
    // One limit still, with what was counted before.
    let rest = gateways.0.iter().map(|gateway| admitted(gateway, "alice", 5) as i64).sum::<i64>();
    assert_eq!((more + rest, counted()), (4, 10));
}
