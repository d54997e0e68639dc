//! A block that is forgotten while the nvme device does not answer cannot be erased there. It must
//! stay forgotten all the same when the device is back after a restart.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failing helper fails the test")]

mod node_support;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use kvtide_tiers::catalog::{CodecChoice, Forget, Reply, Request};
use kvtide_tiers::io::{BlockDevice, IoDone, IoFailure, IoOp, RingChoice, Waker};
use kvtide_tiers::movement::{DeviceWrap, Node, NodeConfig, RetireNamespace};
use node_support::{Client, NAMESPACE, config, key};

const ENODEV: i32 = 19;

/// A device that can be pulled out.
struct Pulled {
    inner: Box<dyn BlockDevice>,
    out: Arc<AtomicBool>,
    failed: Vec<IoDone>,
}

impl BlockDevice for Pulled {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.failed.len()
    }

    fn submit(&mut self, op: IoOp) -> Result<(), IoOp> {
        if !self.out.load(Ordering::SeqCst) {
            return self.inner.submit(op);
        }
        let result = Err(IoFailure::Os(ENODEV));
        self.failed.push(IoDone { user: op.user, buffer: op.buffer, result });
        Ok(())
    }

    fn reap(&mut self, timeout: Option<Duration>, done: &mut Vec<IoDone>) -> io::Result<()> {
        if self.failed.is_empty() {
            return self.inner.reap(timeout, done);
        }
        done.append(&mut self.failed);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.inner.sync()
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

/// A node whose device leaves when the flag is set, and whose namespace has this generation.
fn pullable(folder: &Path, out: &Arc<AtomicBool>, generation: &Arc<AtomicU32>) -> NodeConfig {
    let mut config = config(folder, RingChoice::Blocking);
    let out = Arc::clone(out);
    if let Some(nvme) = &mut config.nvme {
        nvme.wrap = Some(DeviceWrap(Arc::new(move |inner| {
            Box::new(Pulled { inner, out: Arc::clone(&out), failed: Vec::new() })
        })));
    }
    let generation = Arc::clone(generation);
    config.retire = Some(RetireNamespace(Arc::new(move |id| {
        assert_eq!(id, NAMESPACE);
        Some(1 + generation.fetch_add(1, Ordering::SeqCst))
    })));
    config
}

/// Stores 16 blocks, pulls the device, asks `forget`, restarts. Returns the blocks found then.
fn found_after_restart(forget: Option<Request>) -> u32 {
    let folder = tempfile::tempdir().unwrap();
    let (out, generation) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(1)));
    let node = Node::start(pullable(folder.path(), &out, &generation), |_| Some(1)).unwrap();
    let client = Client::connect(&node, CodecChoice::Raw);
    client.store_all(0..16);
    while client.stats().dirty_blocks > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Descriptors are committed 100 ms after the first one.
    std::thread::sleep(Duration::from_millis(300));
    out.store(true, Ordering::SeqCst);
    client.store_all(100..116);
    while client.stats().nvme.offline.is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    if let Some(forget) = forget {
        let Reply::Count(count) = client.ask(forget) else { panic!("not a count") };
        assert!(count > 0, "the blocks were in host RAM");
    }
    node.stop();
    let now = generation.load(Ordering::SeqCst);
    let node = Node::start(config(folder.path(), RingChoice::Blocking), |_| Some(now)).unwrap();
    let client = Client::connect(&node, CodecChoice::Raw);
    let found = client.lookup(0..16).blocks;
    node.stop();
    found
}

#[test]
fn what_was_not_forgotten_comes_back() {
    assert_eq!(found_after_restart(None), 16);
}

#[test]
fn forgotten_and_bad_blocks_stay_away() {
    let (namespace, keys) = (NAMESPACE, vec![key(0)]);
    let forget = Forget::Keys { namespace, keys: keys.clone() };
    assert_eq!(found_after_restart(Some(Request::Forget(forget))), 0);
    assert_eq!(found_after_restart(Some(Request::ReportBad { namespace, keys })), 0);
}
