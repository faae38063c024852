//! Which server of a cluster has a slot, and the connections to all that have one.
//!
//! redis-rs has connections to clusters of its own; they send a command again when the connection broke under it, which
//! would count twice what was counted. So the way is found here: the map is what a node tells, a slot that moved
//! is corrected by the answer that says so, and everything that is not as expected has the map told anew. Only
//! masters are asked.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use redis::Value;
use tokio::sync::oneshot;
use tokio::task::spawn_local;

use super::connect::{Dial, in_time};
use super::connection::Connection;
use super::hash_slot::{SLOTS, slot};
use super::reconnecting::{Endpoint, Link, Server};
use super::sentinel::text;
use crate::config::redis::Node;

/// Until a node that does not tell the map is given up.
const PATIENCE: Duration = Duration::from_millis(500);
/// Nobody has the slot.
const NOBODY: u16 = u16::MAX;
/// Keys among which there is one for every slot.
const KEYS_MAX: u32 = 1_000_000;

pub struct Cluster {
    seeds: Vec<Node>,
    dial: Rc<Dial>,
    opened: Rc<Cell<u64>>,
    map: RefCell<Map>,
    /// Who waits for the map, while it is asked for.
    asking: RefCell<Option<Vec<Tell>>>,
}

type Tell = oneshot::Sender<Result<(), String>>;

#[derive(Default)]
struct Map {
    /// By slot, the position of its master; empty before the map was told.
    owners: Vec<u16>,
    masters: Vec<(Node, Rc<Link>)>,
}

/// A part of the map: from the first slot to the last, and whose they are.
#[derive(PartialEq, Eq, Debug)]
struct Range {
    first: u16,
    last: u16,
    master: Node,
}

impl Cluster {
    pub fn new(seeds: Vec<Node>, dial: Rc<Dial>, opened: Rc<Cell<u64>>) -> Rc<Cluster> {
        Rc::new(Cluster { seeds, dial, opened, map: RefCell::default(), asking: RefCell::new(None) })
    }

    /// The master of a slot.
    pub async fn master(self: &Rc<Self>, slot: u16) -> Result<Rc<Link>, String> {
        if let Some(link) = self.map.borrow().master(slot) {
            return Ok(link);
        }
        self.refresh().await?;
        let link = self.map.borrow().master(slot);
        link.ok_or_else(|| format!("no node of the cluster has slot {slot}"))
    }

    /// Who the master of a slot is, as far as it is known.
    pub fn owner(&self, slot: u16) -> Option<Server> {
        self.map.borrow().master(slot).map(|link| link.server)
    }

    /// What a master is called, if it is one.
    pub fn name_of(&self, server: Server) -> Option<String> {
        let map = self.map.borrow();
        map.masters.iter().find(|(_, link)| link.server == server).map(|(node, _)| node.to_string())
    }

    /// The connections to masters that stand.
    pub fn standing(&self) -> Vec<Rc<Connection>> {
        self.map.borrow().masters.iter().filter_map(|(_, link)| link.standing()).collect()
    }

    /// Every master that has slots, and a key in one of them that begins with `stem`.
    pub fn masters(&self, stem: &str) -> Vec<(Rc<Link>, String)> {
        let map = self.map.borrow();
        let mut found: Vec<Option<String>> = vec![None; map.masters.len()];
        let mut missing = found.iter().enumerate().filter(|(at, _)| map.has_slots(*at)).count();
        for n in 0..KEYS_MAX {
            if missing == 0 {
                break;
            }
            let key = format!("{stem}{n}}}");
            let owner = map.owners.get(usize::from(slot(&key))).copied().unwrap_or(NOBODY);
            if let Some(place @ None) = found.get_mut(usize::from(owner)) {
                *place = Some(key);
                missing -= 1;
            }
        }
        let masters = map.masters.iter().zip(found);
        masters.filter_map(|((_, link), key)| Some((Rc::clone(link), key?))).collect()
    }

    /// A slot has moved to another node, for good.
    pub fn moved(self: &Rc<Self>, slot: u16, node: Node) -> Rc<Link> {
        let link = {
            let mut map = self.map.borrow_mut();
            let at = self.place(&mut map, node);
            if let Some(owner) = map.owners.get_mut(usize::from(slot)) {
                *owner = at;
            }
            Rc::clone(&map.masters[usize::from(at)].1)
        };
        self.doubt();
        link
    }

    /// The node that a slot is moving to.
    pub fn importing(&self, node: Node) -> Rc<Link> {
        let mut map = self.map.borrow_mut();
        let at = self.place(&mut map, node);
        Rc::clone(&map.masters[usize::from(at)].1)
    }

    /// Has the map told anew; nobody waits for it.
    pub fn doubt(self: &Rc<Self>) {
        if self.asking.borrow().is_none() {
            let cluster = Rc::clone(self);
            spawn_local(async move { drop(cluster.refresh().await) });
        }
    }

    /// Has the map told anew, once for all who ask at a time.
    pub async fn refresh(self: &Rc<Self>) -> Result<(), String> {
        let (tell, told) = oneshot::channel();
        let begins = {
            let mut asking = self.asking.borrow_mut();
            let begins = asking.is_none();
            asking.get_or_insert_default().push(tell);
            begins
        };
        if begins {
            let cluster = Rc::clone(self);
            spawn_local(async move {
                let found = cluster.find().await;
                for tell in cluster.asking.take().unwrap_or_default() {
                    // Who went away needs no map.
                    drop(tell.send(found.clone()));
                }
            });
        }
        told.await.unwrap_or_else(|_closed| Err("the gateway ends".to_owned()))
    }

    /// Asks the masters that are connected, then the nodes that are configured, until one tells.
    async fn find(&self) -> Result<(), String> {
        let mut why = "no node of the cluster is known".to_owned();
        for line in self.standing() {
            match in_time(&line.node, PATIENCE, ask(&line)).await {
                Ok(ranges) => {
                    self.adopt(ranges);
                    return Ok(());
                }
                Err(error) => why = error,
            }
        }
        for node in &self.seeds {
            match in_time(node, PATIENCE, async { ask(&*self.dial.open(node).await?).await }).await {
                Ok(ranges) => {
                    self.adopt(ranges);
                    return Ok(());
                }
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// Connections to nodes that have no slot any more end when what is asked on them is answered.
    fn adopt(&self, ranges: Vec<Range>) {
        let old = self.map.take();
        let mut map = Map { owners: vec![NOBODY; usize::from(SLOTS)], masters: Vec::new() };
        for Range { first, last, master } in ranges {
            if !map.masters.iter().any(|(node, _)| *node == master)
                && let Some(known) = old.masters.iter().find(|(node, _)| *node == master)
            {
                map.masters.push(known.clone());
            }
            let at = self.place(&mut map, master);
            for owner in map.owners.iter_mut().take(usize::from(last) + 1).skip(usize::from(first)) {
                *owner = at;
            }
        }
        self.map.replace(map);
    }

    /// The position of a node among the masters.
    fn place(&self, map: &mut Map, node: Node) -> u16 {
        let known = map.masters.iter().position(|(known, _)| *known == node);
        let at = known.unwrap_or_else(|| {
            let link = Link::new(
                Server::of(&node),
                Endpoint::Fixed(node.clone()),
                Rc::clone(&self.dial),
                Rc::clone(&self.opened),
            );
            map.masters.push((node, link));
            map.masters.len() - 1
        });
        // There are no more masters than slots.
        u16::try_from(at).unwrap_or(NOBODY - 1)
    }
}

impl Map {
    fn master(&self, slot: u16) -> Option<Rc<Link>> {
        let owner = self.owners.get(usize::from(slot))?;
        self.masters.get(usize::from(*owner)).map(|(_, link)| Rc::clone(link))
    }

    fn has_slots(&self, master: usize) -> bool {
        self.owners.iter().any(|owner| usize::from(*owner) == master)
    }
}

async fn ask(line: &Connection) -> Result<Vec<Range>, String> {
    let mut question = redis::cmd("CLUSTER");
    question.arg("SLOTS");
    let said = line.ask(question).await.map_err(|failure| line.blame(&failure))?;
    let ranges = ranges(&said, &line.node).ok_or_else(|| format!("{}: no map of slots", line.node))?;
    if ranges.is_empty() { Err(format!("{}: it knows of no slots", line.node)) } else { Ok(ranges) }
}

fn ranges(said: &Value, asked: &Node) -> Option<Vec<Range>> {
    let Value::Array(said) = said else { return None };
    let range = |said: &Value| {
        let Value::Array(said) = said else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = said.as_slice() else { return None };
        let [host, Value::Int(port), ..] = master.as_slice() else { return None };
        let master = named(text(host).unwrap_or_default(), u16::try_from(*port).ok()?, asked)?;
        Some(Range { first: u16::try_from(*first).ok()?, last: u16::try_from(*last).ok()?, master })
    };
    let ranges: Vec<Range> = said.iter().map(range).collect::<Option<_>>()?;
    // Each slot has one master.
    let slots: usize = ranges.iter().map(|range| usize::from(range.last.saturating_sub(range.first)) + 1).sum();
    (slots <= usize::from(SLOTS)).then_some(ranges)
}

/// A node as others name it. One that does not know its own name is where it was asked.
fn named(host: &str, port: u16, asked: &Node) -> Option<Node> {
    let host = match (host, asked) {
        ("" | "?", Node::Tcp { host, .. }) => host,
        ("" | "?", Node::Unix(_)) => return None,
        (host, _) => host,
    };
    Some(Node::Tcp { host: host.to_owned(), port })
}

/// Where a slot is, or is moving to, as `MOVED` and `ASK` say it: `SLOT HOST:PORT`.
pub fn redirected(details: &str, asked: &Node) -> Option<(u16, Node)> {
    let (slot, address) = details.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    Some((slot.parse().ok()?, named(host, port.parse().ok()?, asked)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: u16) -> Node {
        Node::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn a_node_that_does_not_know_its_name_is_where_it_was_asked() {
        let asked = node("10.0.0.1", 6379);
        assert_eq!(redirected("3999 10.0.0.2:6381", &asked), Some((3999, node("10.0.0.2", 6381))));
        assert_eq!(redirected("3999 fe80::1:6381", &asked), Some((3999, node("fe80::1", 6381))));
        assert_eq!(redirected("3999 :6381", &asked), Some((3999, node("10.0.0.1", 6381))));
        for strange in ["", "3999", "3999 a", "x a:1", "3999 a:99999"] {
            assert_eq!(redirected(strange, &asked), None, "{strange}");
        }
    }

    #[test]
    fn a_map_names_masters_first() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let server = |host: &str, port| Value::Array(vec![text(host), Value::Int(port), text("id")]);
        let range =
            |first, last, servers: &[Value]| Value::Array([&[Value::Int(first), Value::Int(last)], servers].concat());
        let said = Value::Array(vec![
            range(0, 5460, &[server("a", 1), server("b", 2)]),
            range(5461, 16383, &[Value::Array(vec![Value::Nil, Value::Int(3)])]),
        ]);
        let expected = [
            Range { first: 0, last: 5460, master: node("a", 1) },
            Range { first: 5461, last: 16383, master: node("asked", 3) },
        ];
        assert_eq!(ranges(&said, &node("asked", 9)).as_deref(), Some(&expected[..]));
        assert_eq!(ranges(&Value::Array(vec![range(0, 1, &[])]), &node("asked", 9)), None);
        let all = range(0, 16383, &[server("a", 1)]);
        assert_eq!(ranges(&Value::Array(vec![all, range(5, 5, &[server("b", 2)])]), &node("asked", 9)), None);
    }
}
