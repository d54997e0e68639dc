//! The store folder: one daemon at a time, private secrets, a table never silently replaced.
#![cfg(feature = "store")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking"
)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvtide_tiers::block::{
    ElementType, KvLayout, Model, Namespace, NamespaceId, NamespaceKey, RankScope,
};
use kvtide_tiers::folder::{FolderError, StoreFolder, inspect};

fn namespace(weights: &str) -> Namespace {
    Namespace {
        model: Model { weights: weights.into(), revision: String::new(), adapter: String::new() },
        layout: KvLayout {
            layers: 2,
            kv_heads: 2,
            head_dim: 64,
            element: ElementType::Bf16,
            tokens_per_block: 16,
            kv_group: 0,
            ranks: RankScope::Rank { rank: 0, world: 1 },
            page_layout_version: 1,
        },
        salt: String::new(),
    }
}

const HOLD: &str = "KVTIDE_TEST_HOLD_FOLDER";

/// Not a test of its own: the process that `a_killed_holder_frees_the_folder` starts.
#[test]
fn holder() {
    let Some(path) = std::env::var_os(HOLD) else { return };
    let _folder = StoreFolder::open(Path::new(&path)).unwrap();
    println!("\nheld");
    std::thread::sleep(std::time::Duration::from_secs(60));
}

fn start_holder(path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "holder", "--nocapture"])
        .env(HOLD, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "held"));
    child
}

#[test]
fn a_killed_holder_frees_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let mut child = start_holder(&path);
    let error = StoreFolder::open(&path).unwrap_err();
    assert!(matches!(error, FolderError::Locked { pid: Some(pid), .. } if pid == child.id()));
    assert!(error.to_string().contains(&format!("in use by process {}", child.id())));
    assert_eq!(inspect(&path).unwrap().locked_by, Some(child.id()));
    child.kill().unwrap();
    child.wait().unwrap();
    let held = StoreFolder::open(&path).unwrap();
    assert!(matches!(StoreFolder::open(&path), Err(FolderError::Locked { .. })));
    drop(held);
    assert_eq!(inspect(&path).unwrap().locked_by, None);
}

#[test]
fn secrets_and_namespaces_outlive_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/store");
    let store = StoreFolder::open(&path).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    let secret = store.tenant_secret("alice").unwrap();
    assert_ne!(secret, store.tenant_secret("bob").unwrap());
    let one = store.namespace("alice", &namespace("m")).unwrap();
    let two = store.namespace("bob", &namespace("m")).unwrap();
    assert_ne!(one.id, two.id);
    assert_ne!(one.fingerprint, two.fingerprint);
    let key = NamespaceKey::derive(&secret, &namespace("m"));
    assert_eq!(one.fingerprint, key.fingerprint());
    assert_eq!(store.generation(one.id), Some(one.generation));
    let generation = store.bump_generation(one.id).unwrap();
    assert_ne!(generation, one.generation);
    assert_eq!(store.generation(NamespaceId(99)), None);
    assert!(matches!(store.bump_generation(NamespaceId(99)), Err(FolderError::Unknown(99))));
    let entries = store.entries();
    drop(store);
    for file in ["secrets", "namespaces.json", "lock"] {
        assert_eq!(mode(&path.join(file)), 0o600, "{file}");
    }
    let store = StoreFolder::open(&path).unwrap();
    assert_eq!(store.tenant_secret("alice").unwrap(), secret);
    assert_eq!(store.entries(), entries);
    assert_eq!(store.namespace("alice", &namespace("m")).unwrap(), entries[0]);
    assert_eq!(store.namespace("alice", &namespace("n")).unwrap().id, NamespaceId(3));
    let view = inspect(&path).unwrap();
    assert_eq!(view.namespaces.unwrap().len(), 3);
    assert_eq!(view.tenants.unwrap().unwrap(), ["alice", "bob"]);
}

#[test]
fn a_lost_secret_makes_the_old_blocks_dead() {
    let folder = tempfile::tempdir().unwrap();
    let store = StoreFolder::open(folder.path()).unwrap();
    let before = store.namespace("alice", &namespace("m")).unwrap();
    drop(store);
    std::fs::remove_file(folder.path().join("secrets")).unwrap();
    let store = StoreFolder::open(folder.path()).unwrap();
    let after = store.namespace("alice", &namespace("m")).unwrap();
    assert_eq!(before.id, after.id);
    assert_ne!((before.generation, before.fingerprint), (after.generation, after.fingerprint));
}

#[test]
fn bad_names_and_namespaces_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = StoreFolder::open(folder.path()).unwrap();
    for name in ["", "a\nb", &"x".repeat(257)] {
        assert!(matches!(store.tenant_secret(name), Err(FolderError::TenantName { .. })));
    }
    let error = store.namespace("alice", &namespace("")).unwrap_err();
    assert!(error.to_string().contains("weights"), "{error}");
    assert!(store.entries().is_empty());
}

#[test]
fn a_damaged_table_is_named_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("namespaces.json");
    let store = StoreFolder::open(folder.path()).unwrap();
    store.namespace("alice", &namespace("model-a")).unwrap();
    drop(store);
    let good = std::fs::read_to_string(&path).unwrap();
    let cases = [
        good.replace("model-a", "model-b"),
        good[..good.len() / 2].to_owned(),
        "not json".to_owned(),
        good.replacen("\"version\": 1", "\"version\": 0", 1),
    ];
    for bad in cases {
        std::fs::write(&path, &bad).unwrap();
        let error = StoreFolder::open(folder.path()).unwrap_err();
        assert!(matches!(error, FolderError::Damaged { .. }));
        let text = error.to_string();
        assert!(text.contains("namespaces.json") && text.contains("move the file away"), "{text}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), bad);
        assert!(inspect(folder.path()).unwrap().namespaces.is_err());
    }
    std::fs::write(&path, good.replacen("\"version\": 1", "\"version\": 2", 1)).unwrap();
    let error = StoreFolder::open(folder.path()).unwrap_err();
    assert!(matches!(error, FolderError::Newer { version: 2, .. }), "{error}");
    std::fs::write(&path, good.replace('\n', " ")).unwrap();
    assert_eq!(StoreFolder::open(folder.path()).unwrap().entries().len(), 1);
}

#[test]
fn secrets_that_others_can_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = StoreFolder::open(folder.path()).unwrap();
    store.tenant_secret("alice").unwrap();
    drop(store);
    let path = folder.path().join("secrets");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
    let text = StoreFolder::open(folder.path()).unwrap_err().to_string();
    assert!(text.contains("0640") && text.contains("chmod 600"), "{text}");
}

#[test]
fn what_is_not_a_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [file.clone(), file.join("below")] {
        assert!(matches!(StoreFolder::open(&path), Err(FolderError::NotAFolder { .. })));
    }
    assert!(matches!(inspect(&file), Err(FolderError::NotAFolder { .. })));
    let root = rustix::process::geteuid().is_root();
    let closed = folder.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o500)).unwrap();
    // Root may write everywhere, except into /proc.
    let path = if root { Path::new("/proc/self/fdinfo").to_owned() } else { closed };
    let error = StoreFolder::open(&path).unwrap_err();
    assert!(matches!(error, FolderError::NotWritable { .. } | FolderError::Io { .. }), "{error}");
}
