//! A Redis Cluster of three masters, created by redis-cli. Each master has a third of the slots. Without replicas, the slots
//! of a killed node are unavailable, and the others still work.

use std::process::{Command, Stdio};

use super::eventually;
use super::external_servers;
use super::redis::RedisServer;
use super::test_ca::TestCa;

/// Lines of redis.conf for every node.
const NODE_CONFIG: &str = "cluster-enabled yes\ncluster-node-timeout 2000\ncluster-require-full-coverage no";

pub struct RedisCluster {
    pub nodes: Vec<RedisServer>,
}

impl RedisCluster {
    pub fn start() -> RedisCluster {
        RedisCluster::with_config("")
    }

    /// With lines of redis.conf for each node.
    pub fn with_config(lines: &str) -> RedisCluster {
        let nodes: Vec<RedisServer> =
            (0..3).map(|_| RedisServer::with_config(&format!("{NODE_CONFIG}\n{lines}"))).collect();
        RedisCluster::create(nodes, &[])
    }

    /// With TLS, and certificates for these names alone: the nodes announce addresses.
    pub fn with_tls_for(names: &[&str], authority: &TestCa) -> RedisCluster {
        let lines = format!("{NODE_CONFIG}\ntls-cluster yes\ntls-replication yes\ncluster-announce-ip 127.0.0.1");
        let nodes = (0..3).map(|_| RedisServer::with_tls_for(names, authority, &lines)).collect();
        RedisCluster::create(nodes, &["--tls", "--insecure"])
    }

    fn create(nodes: Vec<RedisServer>, options: &[&str]) -> RedisCluster {
        let addresses = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port));
        let created = Command::new("timeout")
            .arg("60")
            .arg(external_servers::program("redis-cli"))
            .args(options)
            .args(["--cluster", "create"])
            .args(addresses)
            .arg("--cluster-yes")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stdout));
        let cluster = RedisCluster { nodes };
        cluster.wait_until_complete();
        cluster
    }

    /// Waits until every node reports a complete cluster.
    pub fn wait_until_complete(&self) {
        for node in &self.nodes {
            eventually("the cluster is complete", || {
                let info = node.cli(&["CLUSTER", "INFO"]);
                let all = ["cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3"];
                all.iter().all(|line| info.contains(line))
            });
        }
    }

    /// Its nodes as a list of the gateway's configuration.
    pub fn urls(&self) -> String {
        let urls: Vec<String> = self.nodes.iter().map(|node| format!("\"{}\"", node.url())).collect();
        format!("[{}]", urls.join(", "))
    }

    pub fn slot(&self, key: &str) -> u16 {
        let running = self.nodes.iter().find(|node| node.is_running()).expect("a node that runs");
        u16::try_from(running.integer(&["CLUSTER", "KEYSLOT", key])).unwrap()
    }

    /// The position of the node that owns a slot, according to that node.
    pub fn owner(&self, slot: u16) -> usize {
        let has = |node: &RedisServer| {
            let nodes = node.cli(&["CLUSTER", "NODES"]);
            let own = nodes.lines().find(|line| line.contains("myself")).unwrap_or_default();
            own.split(' ').skip(8).any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                matches!((first.parse::<u16>(), last.parse::<u16>()), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
            })
        };
        let owner = self.nodes.iter().position(|node| node.is_running() && has(node));
        owner.unwrap_or_else(|| panic!("no node has slot {slot}"))
    }

    /// Runs a command at the node that owns a key.
    pub fn cli(&self, key: &str, command: &[&str]) -> String {
        self.nodes[self.owner(self.slot(key))].cli(command)
    }

    /// The keys of all running nodes, sorted.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> =
            self.nodes.iter().filter(|node| node.is_running()).flat_map(RedisServer::keys).collect();
        keys.sort();
        keys
    }

    /// Moves a slot with its keys while clients use them. During the move, a key may be at either node.
    pub fn move_slot(&self, slot: u16, to: usize) {
        let from = self.owner(slot);
        assert_ne!(from, to);
        self.begin_slot_move(slot, from, to);
        self.migrate_keys(slot, from, to);
        self.end_slot_move(slot, from, to);
    }

    /// From now on, the old node redirects requests for keys that are no longer there to the new node (ASK).
    pub fn begin_slot_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        self.expect_ok(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.node_id(from)]);
        self.expect_ok(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.node_id(to)]);
    }

    /// Moves the keys of a slot one by one.
    pub fn migrate_keys(&self, slot: u16, from: usize, to: usize) {
        let port = self.nodes[to].port.to_string();
        loop {
            let keys = self.nodes[from].cli(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "100"]);
            if keys.is_empty() {
                return;
            }
            for key in keys.lines() {
                let output = self.nodes[from].cli(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
                // NOKEY: the key has expired with its window.
                assert!(output == "OK" || output == "NOKEY", "{output}");
            }
        }
    }

    /// Announces the new owner of a slot to all nodes.
    pub fn end_slot_move(&self, slot: u16, from: usize, to: usize) {
        let (slot, id) = (slot.to_string(), self.node_id(to));
        let others = (0..self.nodes.len()).filter(|node| ![from, to].contains(node) && self.nodes[*node].is_running());
        // The new node first, so that the slot always has an owner.
        [to, from]
            .into_iter()
            .chain(others)
            .for_each(|node| self.expect_ok(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &id]));
    }

    fn node_id(&self, node: usize) -> String {
        self.nodes[node].cli(&["CLUSTER", "MYID"])
    }

    fn expect_ok(&self, node: usize, command: &[&str]) {
        assert_eq!(self.nodes[node].cli(command), "OK", "{command:?}");
    }
}
