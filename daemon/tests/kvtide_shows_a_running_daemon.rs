//! Every subcommand of `kvtide` against a real daemon that holds two short conversations.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use kvtide_client::blocking::Client;
use kvtide_client::{
    ClientConfig, ElementType, KvLayout, Model, Namespace, NamespaceSpec, Outcome, RankScope,
    RegionLayout,
};
use serde_json::Value;

const BLOCK_BYTES: u64 = 64 << 10;

struct Daemon {
    child: Child,
    folder: PathBuf,
}

impl Daemon {
    fn start(folder: &Path) -> Daemon {
        let child = Command::new(env!("CARGO_BIN_EXE_kvtided"))
            .arg("--socket")
            .arg(folder.join("s"))
            .arg("--store")
            .arg(folder.join("store"))
            .args(["--host-bytes", "16MiB", "--nvme-bytes", "64MiB", "--metrics", "off"])
            .args(["--log-level", "warn"])
            .spawn()
            .unwrap();
        Daemon { child, folder: folder.to_path_buf() }
    }

    fn client(&self) -> Client {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            match Client::connect(ClientConfig::new(self.folder.join("s"))) {
                Ok(client) => return client,
                Err(error) => assert!(Instant::now() < until, "the daemon is not there: {error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn kvtide(&self, line: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_kvtide"))
            .args(line.split_whitespace())
            .arg("--socket")
            .arg(self.folder.join("s"))
            .output()
            .unwrap()
    }

    fn text(&self, line: &str) -> String {
        let output = self.kvtide(line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.text(&format!("{line} --json"))).unwrap()
    }

    fn stop(mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn namespace(salt: &str) -> Namespace {
    Namespace {
        model: Model { weights: "weights".into(), revision: "r1".into(), adapter: String::new() },
        layout: KvLayout {
            layers: 4,
            kv_heads: 2,
            head_dim: 64,
            element: ElementType::Bf16,
            tokens_per_block: 16,
            kv_group: 0,
            ranks: RankScope::SameOnAll,
            page_layout_version: 1,
        },
        salt: salt.into(),
    }
}

/// Stores `blocks` blocks of one conversation; answers the last key.
fn store(client: &Client, salt: &str, conversation: u64, blocks: u32) -> String {
    let namespace = client.open_namespace(&NamespaceSpec::own(namespace(salt))).unwrap();
    let region = client.create_region(RegionLayout::opaque(blocks, BLOCK_BYTES)).unwrap();
    let tokens: Vec<u32> = (0..16 * blocks).map(|at| at + 1000 * conversation as u32).collect();
    let keys = namespace.chain(&tokens);
    let places: Vec<u32> = (0..blocks).collect();
    for place in &places {
        region.write_block(*place, &[*place as u8 + 1; BLOCK_BYTES as usize]).unwrap();
    }
    let time = Duration::from_secs(10);
    let outcomes = client.store_prefix(&namespace, conversation, &region, &keys, &places, time);
    assert_eq!(outcomes, vec![Outcome::Stored; blocks as usize]);
    keys.last().unwrap().to_string()
}

#[test]
fn every_subcommand_answers_people_and_programs() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path());
    let client = daemon.client();
    let last = store(&client, "", 1, 8);
    store(&client, "x", 2, 3);

    let status = daemon.json("status");
    assert_eq!(status["status"]["host_bytes"], 16 << 20);
    assert!(daemon.text("status").contains("device"));

    let all = daemon.json("ls");
    assert_eq!(all["total"]["blocks"], 11);
    let names: Vec<&str> =
        all["groups"].as_array().unwrap().iter().map(|g| g["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 2, "{all}");
    let one = daemon.json(&format!("ls --blocks --namespace {}", names[0]));
    assert_eq!(one["blocks"].as_array().unwrap().len(), 8, "{one}");
    assert!(daemon.text("ls --by tier").contains("host"));
    assert!(daemon.text("ls --blocks --limit 2").contains("2 of 11 blocks shown"));

    let shown = daemon.json(&format!("show {}", &last[..20]));
    assert_eq!(shown["key"], last);
    assert_eq!(shown["position"], 7);
    let output = daemon.kvtide("show 0123456789abcdef");
    assert_eq!(output.status.code(), Some(1), "{output:?}");

    let explained = daemon.json(&format!("explain {} {}", names[0], names[1]));
    assert_eq!(explained["differences"][0]["field"], "salt");
    assert_eq!(explained["shared"], false);

    let pinned = daemon.json(&format!("pin {last} --for 1m"));
    assert_eq!(pinned["blocks"], 8);
    let unpinned = daemon.text(&format!("unpin {}", pinned["pin"]));
    assert!(unpinned.contains("8 blocks"), "{unpinned}");

    let stats = daemon.json("stats");
    assert_eq!(stats["catalog"]["stored"], 11);
    assert_eq!(daemon.text("stats --watch --interval 10ms --count 2").lines().count(), 3);
    assert!(daemon.text("stats").contains("TENANT"));

    let refused = daemon.kvtide(&format!("forget conversation {} 2", names[1]));
    assert_eq!(refused.status.code(), Some(2), "nobody was asked: {refused:?}");
    let gone = daemon.json(&format!("forget conversation {} 2 --yes", names[1]));
    assert_eq!(gone["blocks"], 3);
    let gone = daemon.json(&format!("forget key {last} --yes"));
    assert_eq!(gone["blocks"], 1);
    assert_eq!(daemon.json("ls")["total"]["blocks"], 7);

    let drained = daemon.json("drain --deadline 20s");
    assert_eq!(drained["blocks_lost"], 0);
    drop(client);
    daemon.stop();
    fsck_is_clean(&folder.path().join("store"));
}

fn fsck_is_clean(store: &Path) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvtide"))
        .args(["fsck", "--payloads", "--json"])
        .arg(store)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["descriptors_valid"], 7, "{report}");
    assert_eq!(report["payloads_verified"], 7, "{report}");
    assert_eq!(report["clean"], true, "{report}");
}
