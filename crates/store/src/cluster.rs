//! The slot map of a Redis Cluster, and the connections to its masters.
//!
//! The map comes from `CLUSTER SLOTS`, is corrected by `MOVED`, and is fetched again after an unexpected reply. Only
//! masters are used.
//!
//! The cluster client of redis-rs (1.8) is not used: it sends a command again after the connection broke, which would
//! count twice. With `retries(0)` it does not, but follows neither `MOVED` nor `ASK`. It also hides the owner of a slot, by
//! which calls are grouped and circuit breakers kept, and reconnects, after which a server may have lost counts.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use redis::Value;
use tokio::sync::oneshot;
use tokio::task::spawn_local;

use super::connect::{Connector, with_timeout};
use super::connection::Connection;
use super::hash_slot::{SLOTS, slot};
use super::reconnecting::{Endpoint, ReconnectingConnection, ServerId};
use super::sentinel::reply_text;
use transom_config::redis::Node;

/// Limit for fetching the map from one node.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Marks a slot without a master.
const NO_OWNER: u16 = u16::MAX;
/// Candidate keys tried to find one for each master; among so many, every slot has one.
const CANDIDATE_KEYS_MAX: u32 = 1_000_000;

pub struct Cluster {
    seeds: Vec<Node>,
    connector: Rc<Connector>,
    connections_opened: Rc<Cell<u64>>,
    map: RefCell<Map>,
    /// The callers that wait while the map is fetched.
    map_waiters: RefCell<Option<Vec<MapWaiter>>>,
}

type MapWaiter = oneshot::Sender<Result<(), String>>;

#[derive(Default)]
struct Map {
    /// For each slot, the index of its master; empty before the map is fetched.
    owners: Vec<u16>,
    masters: Vec<(Node, Rc<ReconnectingConnection>)>,
}

/// A range of slots, first to last inclusive, and its master.
#[derive(PartialEq, Eq, Debug)]
struct SlotRange {
    first: u16,
    last: u16,
    master: Node,
}

impl Cluster {
    pub fn new(seeds: Vec<Node>, connector: Rc<Connector>, opened: Rc<Cell<u64>>) -> Rc<Cluster> {
        Rc::new(Cluster {
            seeds,
            connector,
            connections_opened: opened,
            map: RefCell::default(),
            map_waiters: RefCell::new(None),
        })
    }

    /// The master of a slot. Fetches the map if the slot is unknown.
    pub async fn master(self: &Rc<Self>, slot: u16) -> Result<Rc<ReconnectingConnection>, String> {
        if let Some(link) = self.map.borrow().master(slot) {
            return Ok(link);
        }
        self.refresh().await?;
        let link = self.map.borrow().master(slot);
        link.ok_or_else(|| format!("no node of the cluster has slot {slot}"))
    }

    /// The master of a slot, as far as is known.
    pub fn owner(&self, slot: u16) -> Option<ServerId> {
        self.map.borrow().master(slot).map(|link| link.server)
    }

    /// The name of a master.
    pub fn name_of(&self, server: ServerId) -> Option<String> {
        let map = self.map.borrow();
        map.masters.iter().find(|(_, link)| link.server == server).map(|(node, _)| node.to_string())
    }

    /// The open connections to masters.
    pub fn connections(&self) -> Vec<Rc<Connection>> {
        self.map.borrow().masters.iter().filter_map(|(_, link)| link.current()).collect()
    }

    /// Every master that has slots, with a key in one of its slots that begins with `prefix`.
    pub fn masters(&self, prefix: &str) -> Vec<(Rc<ReconnectingConnection>, String)> {
        let map = self.map.borrow();
        let mut found: Vec<Option<String>> = vec![None; map.masters.len()];
        let mut missing = found.iter().enumerate().filter(|(at, _)| map.has_slots(*at)).count();
        for n in 0..CANDIDATE_KEYS_MAX {
            if missing == 0 {
                break;
            }
            let key = format!("{prefix}{n}}}");
            let owner = map.owners.get(usize::from(slot(&key))).copied().unwrap_or(NO_OWNER);
            if let Some(empty @ None) = found.get_mut(usize::from(owner)) {
                *empty = Some(key);
                missing -= 1;
            }
        }
        let masters = map.masters.iter().zip(found);
        masters.filter_map(|((_, link), key)| Some((Rc::clone(link), key?))).collect()
    }

    /// Records that a slot has moved to another node for good.
    pub fn moved(self: &Rc<Self>, slot: u16, node: Node) -> Rc<ReconnectingConnection> {
        let link = {
            let mut map = self.map.borrow_mut();
            let at = self.master_index(&mut map, node);
            if let Some(owner) = map.owners.get_mut(usize::from(slot)) {
                *owner = at;
            }
            Rc::clone(&map.masters[usize::from(at)].1)
        };
        self.refresh_in_background();
        link
    }

    /// The node that a slot is moving to.
    pub fn importing(&self, node: Node) -> Rc<ReconnectingConnection> {
        let mut map = self.map.borrow_mut();
        let at = self.master_index(&mut map, node);
        Rc::clone(&map.masters[usize::from(at)].1)
    }

    /// Fetches the map in the background.
    pub fn refresh_in_background(self: &Rc<Self>) {
        if self.map_waiters.borrow().is_none() {
            let cluster = Rc::clone(self);
            spawn_local(async move { drop(cluster.refresh().await) });
        }
    }

    /// Fetches the map, once for all concurrent callers.
    pub async fn refresh(self: &Rc<Self>) -> Result<(), String> {
        let (sender, result) = oneshot::channel();
        let begins = {
            let mut asking = self.map_waiters.borrow_mut();
            let begins = asking.is_none();
            asking.get_or_insert_default().push(sender);
            begins
        };
        if begins {
            let cluster = Rc::clone(self);
            spawn_local(async move {
                let found = cluster.fetch_map().await;
                for sender in cluster.map_waiters.take().unwrap_or_default() {
                    // A dropped caller needs no map.
                    drop(sender.send(found.clone()));
                }
            });
        }
        result.await.unwrap_or_else(|_closed| Err("the gateway ends".to_owned()))
    }

    /// Fetches the map from a connected master, otherwise from a configured node.
    async fn fetch_map(&self) -> Result<(), String> {
        let mut why = "no node of the cluster is known".to_owned();
        for connection in self.connections() {
            match with_timeout(&connection.node, REPLY_TIMEOUT, fetch_slots(&connection)).await {
                Ok(ranges) => {
                    self.apply_map(ranges);
                    return Ok(());
                }
                Err(error) => why = error,
            }
        }
        for node in &self.seeds {
            match with_timeout(node, REPLY_TIMEOUT, async { fetch_slots(&*self.connector.open(node).await?).await })
                .await
            {
                Ok(ranges) => {
                    self.apply_map(ranges);
                    return Ok(());
                }
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// Replaces the map. Connections to nodes without slots close when their calls have ended.
    fn apply_map(&self, ranges: Vec<SlotRange>) {
        let old = self.map.take();
        let mut map = Map { owners: vec![NO_OWNER; usize::from(SLOTS)], masters: Vec::new() };
        for SlotRange { first, last, master } in ranges {
            if !map.masters.iter().any(|(node, _)| *node == master)
                && let Some(known) = old.masters.iter().find(|(node, _)| *node == master)
            {
                map.masters.push(known.clone());
            }
            let at = self.master_index(&mut map, master);
            for owner in map.owners.iter_mut().take(usize::from(last) + 1).skip(usize::from(first)) {
                *owner = at;
            }
        }
        self.map.replace(map);
    }

    /// The index of a node among the masters, added if new.
    fn master_index(&self, map: &mut Map, node: Node) -> u16 {
        let known = map.masters.iter().position(|(known, _)| *known == node);
        let at = known.unwrap_or_else(|| {
            let link = ReconnectingConnection::new(
                ServerId::of(&node),
                Endpoint::Fixed(node.clone()),
                Rc::clone(&self.connector),
                Rc::clone(&self.connections_opened),
            );
            map.masters.push((node, link));
            map.masters.len() - 1
        });
        // There are at most as many masters as slots.
        u16::try_from(at).unwrap_or(NO_OWNER - 1)
    }
}

impl Map {
    fn master(&self, slot: u16) -> Option<Rc<ReconnectingConnection>> {
        let owner = self.owners.get(usize::from(slot))?;
        self.masters.get(usize::from(*owner)).map(|(_, link)| Rc::clone(link))
    }

    fn has_slots(&self, master: usize) -> bool {
        self.owners.iter().any(|owner| usize::from(*owner) == master)
    }
}

async fn fetch_slots(connection: &Connection) -> Result<Vec<SlotRange>, String> {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    let reply = connection.call(command).await.map_err(|failure| connection.describe(&failure))?;
    let ranges = parse_slots(&reply, &connection.node)
        .ok_or_else(|| format!("{}: unexpected reply to CLUSTER SLOTS", connection.node))?;
    if ranges.is_empty() { Err(format!("{}: the node knows no slots", connection.node)) } else { Ok(ranges) }
}

fn parse_slots(reply: &Value, queried_node: &Node) -> Option<Vec<SlotRange>> {
    let Value::Array(reply) = reply else { return None };
    let range = |reply: &Value| {
        let Value::Array(reply) = reply else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = reply.as_slice() else { return None };
        let [host, Value::Int(port), ..] = master.as_slice() else { return None };
        let master = resolve_node(reply_text(host).unwrap_or_default(), u16::try_from(*port).ok()?, queried_node)?;
        Some(SlotRange { first: u16::try_from(*first).ok()?, last: u16::try_from(*last).ok()?, master })
    };
    let ranges: Vec<SlotRange> = reply.iter().map(range).collect::<Option<_>>()?;
    // A slot may occur only once.
    let slots: usize = ranges.iter().map(|range| usize::from(range.last.saturating_sub(range.first)) + 1).sum();
    (slots <= usize::from(SLOTS)).then_some(ranges)
}

/// A node by the address that others report. A node that does not know its own host has the host that was queried.
fn resolve_node(host: &str, port: u16, queried_node: &Node) -> Option<Node> {
    let host = match (host, queried_node) {
        ("" | "?", Node::Tcp { host, .. }) => host,
        ("" | "?", Node::Unix(_)) => return None,
        (host, _) => host,
    };
    Some(Node::Tcp { host: host.to_owned(), port })
}

/// Parses the details of `MOVED` and `ASK`: `SLOT HOST:PORT`.
pub fn parse_redirect(details: &str, queried_node: &Node) -> Option<(u16, Node)> {
    let (slot, address) = details.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    Some((slot.parse().ok()?, resolve_node(host, port.parse().ok()?, queried_node)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: u16) -> Node {
        Node::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn a_node_without_a_host_name_has_the_address_that_was_queried() {
        let queried_node = node("10.0.0.1", 6379);
        assert_eq!(parse_redirect("3999 10.0.0.2:6381", &queried_node), Some((3999, node("10.0.0.2", 6381))));
        assert_eq!(parse_redirect("3999 fe80::1:6381", &queried_node), Some((3999, node("fe80::1", 6381))));
        assert_eq!(parse_redirect("3999 :6381", &queried_node), Some((3999, node("10.0.0.1", 6381))));
        for malformed in ["", "3999", "3999 a", "x a:1", "3999 a:99999"] {
            assert_eq!(parse_redirect(malformed, &queried_node), None, "{malformed}");
        }
    }

    #[test]
    fn the_first_node_of_a_slot_range_is_its_master() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let server = |host: &str, port| Value::Array(vec![text(host), Value::Int(port), text("id")]);
        let range =
            |first, last, servers: &[Value]| Value::Array([&[Value::Int(first), Value::Int(last)], servers].concat());
        let reply = Value::Array(vec![
            range(0, 5460, &[server("a", 1), server("b", 2)]),
            range(5461, 16383, &[Value::Array(vec![Value::Nil, Value::Int(3)])]),
        ]);
        let expected = [
            SlotRange { first: 0, last: 5460, master: node("a", 1) },
            SlotRange { first: 5461, last: 16383, master: node("queried", 3) },
        ];
        assert_eq!(parse_slots(&reply, &node("queried", 9)).as_deref(), Some(&expected[..]));
        assert_eq!(parse_slots(&Value::Array(vec![range(0, 1, &[])]), &node("queried", 9)), None);
        let all = range(0, 16383, &[server("a", 1)]);
        assert_eq!(parse_slots(&Value::Array(vec![all, range(5, 5, &[server("b", 2)])]), &node("queried", 9)), None);
    }
}
