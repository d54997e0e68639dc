//! The blocking client goes on answering when it is called from within another runtime, however
//! often: it once spun for ever when that runtime's budget of polls was used up.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::sync::mpsc;
use std::time::Duration;

use kvtide_tests::Setup;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");

#[test]
fn many_calls_in_one_task() {
    let daemon = Setup::new(NODE).start();
    let client = daemon.client();
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // One task that never yields makes far more calls than a budget allows.
        let calls =
            runtime.block_on(async { (0..1000).map_while(|_| client.stats().ok()).count() });
        done.send(calls).unwrap();
    });
    assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(1000));
}
