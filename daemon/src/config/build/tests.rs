use clap::Parser;

use kvtide_tiers::block::GpuUuid;

use super::*;
use crate::config::{DeviceUse, LogFormat};

fn load_text(text: &str, args: &[&str]) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvtided.toml");
    std::fs::write(&file, text).unwrap();
    let store = folder.path().join("store");
    let mut all = vec!["kvtided", "--config", file.to_str().unwrap()];
    if !text.contains("folder") && !args.contains(&"--store") {
        all.extend(["--store", store.to_str().unwrap()]);
    }
    all.extend(args);
    Config::load(&Args::parse_from(all))
}

/// The problems as `line: what; allowed`.
fn problems(text: &str) -> Vec<String> {
    let error = load_text(text, &[]).expect_err("the configuration is bad");
    let strip =
        |problem: &Problem| format!("{}: {}; {}", problem.line, problem.what, problem.allowed);
    error.problems.iter().map(strip).collect()
}

fn only(text: &str) -> String {
    let problems = problems(text);
    assert_eq!(problems.len(), 1, "{problems:#?}");
    problems.into_iter().next().unwrap()
}

#[test]
fn nothing_configured_takes_a_quarter_of_the_machine_and_says_so() {
    let config = load_text("", &[]).unwrap();
    assert!(config.host.bytes >= 64 << 20);
    assert!(config.notes.iter().any(|note| note.contains("a quarter of")), "{:?}", config.notes);
    assert_eq!(config.tenants.list.len(), 1);
    assert_eq!(config.tenants.list[0].name, DEFAULT_TENANT);
    assert!(!config.tenants.configured);
    assert!(matches!(config.metrics, MetricsAddress::Tcp { configured: false, .. }));
}

#[test]
fn a_full_file_is_read_and_the_command_line_goes_before_it() {
    let text = r#"
        [daemon]
        socket = "/run/x.sock"
        drain_ms = 500
        [host]
        bytes = "64MiB"
        [nvme]
        bytes = "128MiB"
        segment_bytes = "2MiB"
        queue_depth = 8
        io = "blocking"
        [device]
        enabled = false
        [limits]
        sessions = 3
        calls_in_flight = 7
        [[tenant]]
        name = "a"
        uids = [1, 2]
        codec = "lz4"
        [[tenant]]
        name = "b"
        gids = [1]
        [[shared]]
        name = "personas"
        tenants = ["a", "b"]
        [admin]
        uids = [9]
        metrics = "unix:/run/m.sock"
        [log]
        level = "debug"
        format = "json"
    "#;
    let config = load_text(text, &["--host-bytes", "32MiB", "--log-level", "warn"]).unwrap();
    assert_eq!(config.host.bytes, 32 << 20);
    assert_eq!(config.log.level, tracing::Level::WARN);
    assert_eq!(config.log.format, LogFormat::Json);
    let nvme = config.nvme.unwrap();
    assert_eq!((nvme.bytes, nvme.segment_bytes, nvme.queue_depth), (128 << 20, Some(2 << 20), 8));
    assert_eq!(config.limits.catalog.sessions, 3);
    assert_eq!(config.limits.calls_in_flight, 7);
    assert_eq!(config.tenants.caller(2, 77).unwrap().tenant.unwrap().codec, CodecChoice::Lz4);
    assert_eq!(config.tenants.shared[0].id, TenantId(2));
    assert!(config.tenants.configured);
    assert_eq!(config.drain, Duration::from_millis(500));
    assert_eq!(load_text(text, &["--nvme-bytes", "0"]).unwrap().nvme, None);
}

#[test]
fn unknown_keys_get_a_suggestion_and_a_line() {
    assert_eq!(
        only("[host]\nbytes = \"64MiB\"\nslab_byte = 5\n"),
        "3: unknown key `host.slab_byte`; did you mean `slab_bytes`?"
    );
    let far = only("[host]\n\n\nzzz = 5\n");
    assert_eq!(far, "4: unknown key `host.zzz`; allowed here: bytes, slab_bytes, keep, policy");
    assert!(only("[hots]\n").contains("1: unknown key `hots`; did you mean `host`?"));
}

#[test]
fn sizes_of_zero_and_bad_units_are_named() {
    let zero = only("[host]\nbytes = 0\n");
    assert!(zero.starts_with("2: `host.bytes` is 0; 4 MiB to"), "{zero}");
    let unit = only("\n[nvme]\nbytes = \"1GB\"\n");
    assert!(unit.starts_with("3: `nvme.bytes` is \"1GB\"; write a number of bytes"), "{unit}");
    let float = only("[nvme]\nbytes = 1.5\n");
    assert!(float.starts_with("2: `nvme.bytes` is 1.5; write"), "{float}");
    let negative = only("[nvme]\nqueue_depth = -1\n");
    assert_eq!(negative, "2: `nvme.queue_depth` is -1; 1 to 1024 is allowed");
    let small = only("[nvme]\nbytes = \"8MiB\"\nsegment_bytes = \"4MiB\"\n");
    assert!(small.starts_with("2: the nvme tier has 8 MiB; at least 17 MiB"), "{small}");
}

#[test]
fn a_socket_path_that_is_too_long_is_named() {
    let long = format!("[daemon]\nsocket = \"/{}\"\n", "x".repeat(107));
    let problem = only(&long);
    assert!(problem.starts_with("2: the socket's path has 108 bytes; at most 107"), "{problem}");
    let error = load_text("", &["--socket", &"y".repeat(200)]).unwrap_err();
    assert!(error.to_string().starts_with("--socket: the socket's path has 200 bytes"), "{error}");
}

#[test]
fn tenants_may_not_be_doubled_or_overlap() {
    let text = "[[tenant]]\nname = \"a\"\nuids = [1]\n[[tenant]]\nname = \"a\"\nuids = [1, 2]\n";
    assert_eq!(
        problems(text),
        [
            "4: tenant \"a\" is there twice; the first one is in line 1; give each its own name",
            "4: uid 1 is in tenant \"a\" as well; it belongs to \"a\" already; each may be in one",
        ]
    );
    let shared =
        "[[tenant]]\nname = \"a\"\nuids = [1]\n[[shared]]\nname = \"s\"\ntenants = [\"b\"]\n";
    assert_eq!(only(shared), "4: shared \"s\" names tenant \"b\"; the tenants are a");
    assert!(only("[[tenant]]\nname = \"a/b\"\nuids = [1]\n").starts_with("2: the name is \"a/b\""));
    assert!(only("[[tenant]]\nname = \"a\"\n").contains("has no users"));
    assert!(only("[tenant]\nname = \"a\"\n").contains("write `[[tenant]]` once for each"));
}

#[test]
fn what_is_not_toml_has_a_line() {
    let problem = only("[host]\nbytes = \n");
    assert!(problem.starts_with("2: not valid TOML"), "{problem}");
}

#[test]
fn metrics_stay_on_the_machine() {
    let open = only("[admin]\nmetrics = \"0.0.0.0:9464\"\n");
    assert!(open.contains("put a proxy in front"), "{open}");
    assert!(only("[admin]\nmetrics = \"9464\"\n").contains("loopback address with port"));
    let error = load_text("", &["--metrics", "no"]).unwrap_err().to_string();
    assert!(error.starts_with("--metrics: the address is \"no\""), "{error}");
}

#[test]
fn the_device_tier_is_on_where_there_are_gpus_unless_told_otherwise() {
    let device = |text: &str| load_text(text, &[]).unwrap().device;
    assert_eq!(device(""), DeviceSettings::default());
    assert_eq!(device("[device]\nenabled = \"auto\"\n"), DeviceSettings::default());
    assert_eq!(device("[device]\nenabled = true\n").enabled, DeviceUse::On);
    assert_eq!(device("[device]\nenabled = false\n").enabled, DeviceUse::Off);
    let text = "[device]\npool_bytes = \"1GiB\"\nlibrary = \"/x/libcuda.so\"\n\
                gpus = [\"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f\"]\n";
    let full = device(text);
    assert_eq!(full.pool_bytes, 1 << 30);
    assert_eq!(full.gpus, [GpuUuid(std::array::from_fn(|at| at as u8))]);
    assert_eq!(full.library, Some(PathBuf::from("/x/libcuda.so")));
    assert_eq!(full.to_string(), "auto, 1 of the GPUs, a pool of 1 GiB each");
    let args = ["--device-pool-bytes", "8MiB", "--device-library", "/y"];
    let config = load_text(text, &args).unwrap().device;
    assert_eq!((config.pool_bytes, config.library), (8 << 20, Some(PathBuf::from("/y"))));
}

#[test]
fn mistakes_of_the_device_tier_are_named() {
    let flag = only("[device]\nenabled = \"yes\"\n");
    assert_eq!(flag, "2: `device.enabled` is \"yes\"; \"auto\", true and false are allowed");
    let small = only("[device]\npool_bytes = 4096\n");
    assert_eq!(small, format!("2: `device.pool_bytes` is 4 KiB; {POOL_BYTES_ALLOWED}"));
    let gpus = problems("[device]\ngpus = [\"0\", \"GPU-12\"]\n");
    assert_eq!(gpus.len(), 2, "{gpus:?}");
    assert!(gpus[1].contains("\"GPU-12\", which is no UUID") && gpus[1].contains("nvidia-smi -L"));
    assert!(only("[device]\ngpus = []\n").contains("is empty"));
    let twice = "\"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f\"";
    assert!(only(&format!("[device]\ngpus = [{twice}, {twice}]\n")).contains("twice"));
    assert!(only("[device]\nlibrary = \"libcuda.so\"\n").contains("an absolute path"));
    let error = load_text("", &["--device-pool-bytes", "1KiB"]).unwrap_err().to_string();
    assert!(error.starts_with("--device-pool-bytes: the size is 1 KiB; 0 for none"), "{error}");
}

#[test]
fn several_problems_come_in_the_order_of_their_lines() {
    let lines: Vec<String> =
        problems("[nvme]\nio = \"fast\"\n[host]\nbytes = 0\n[log]\nlevle = 1\n")
            .iter()
            .map(|problem| problem.chars().take(2).collect())
            .collect();
    assert_eq!(lines, ["2:", "4:", "6:"]);
}

#[test]
fn a_store_folder_below_a_file_cannot_be_written() {
    let problem = only("[nvme]\nfolder = \"/dev/null/store\"\n");
    assert!(problem.contains("cannot be written"), "{problem}");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let args = Args::parse_from(["kvtided", "--config", "/no/such/file.toml"]);
    let error = Config::load(&args).unwrap_err().to_string();
    assert!(error.starts_with("/no/such/file.toml: cannot read the configuration"), "{error}");
}

#[test]
fn quotas_are_read_for_tenants_and_shared_namespaces() {
    let text = r#"
        [[tenant]]
        name = "a"
        uids = [1]
        [tenant.quota]
        host_soft = "1GiB"
        host_hard = "2GiB"
        [tenant.conversation_quota]
        nvme_hard = "64MiB"
        [[shared]]
        name = "personas"
        tenants = ["a"]
        [shared.quota]
        device_hard = "8MiB"
    "#;
    let config = load_text(text, &[]).unwrap();
    let quotas = config.tenants.quotas();
    let (tenant, shared) = (quotas[0].1, quotas[1].1);
    assert_eq!((tenant.all.host.soft, tenant.all.host.hard), (Some(1 << 30), Some(2 << 30)));
    assert_eq!(tenant.conversation.nvme.hard, Some(64 << 20));
    assert_eq!((shared.all.device.hard, shared.all.host.hard), (Some(8 << 20), None));
    let wrong = "[[tenant]]\nname = \"a\"\nuids = [1]\n[tenant.quota]\nhost_soft = \"2GiB\"\n\
                 host_hard = \"1GiB\"\n";
    let said = only(wrong);
    assert!(said.contains("`host_soft` is 2 GiB, above `host_hard` with 1 GiB"), "{said}");
    assert!(only(&wrong.replace("soft", "sofd")).contains("did you mean `host_soft`?"));
}

#[test]
fn a_rating_and_a_life_give_a_budget_of_writes() {
    let rated = "[nvme]\nbytes = \"128MiB\"\nrated_bytes = \"365TiB\"\n";
    let nvme = |text: &str| load_text(text, &[]).unwrap().nvme.unwrap();
    let (tib, all) = (1u64 << 40, 365u64 << 40);
    let found = nvme(rated);
    assert_eq!((found.rated_bytes, found.write_bytes_per_day), (Some(all), None));
    let found = nvme(&format!("{rated}life_years = 10\n"));
    assert_eq!((found.rated_bytes, found.write_bytes_per_day), (Some(all), Some(tib / 10)));
    let found = nvme(&format!("{rated}write_bytes_per_day = \"2GiB\"\n"));
    assert_eq!((found.rated_bytes, found.write_bytes_per_day), (Some(all), Some(2 << 30)));
    let both = format!("{rated}life_years = 5\nwrite_bytes_per_day = \"2GiB\"\n");
    assert!(only(&both).contains("keep one"));
    assert!(only("[nvme]\nlife_years = 5\n").contains("without `nvme.rated_bytes`"));
    let long = "[nvme]\nrated_bytes = \"1TiB\"\nlife_years = 30\n";
    assert!(only(long).contains("at least 1 GiB a day"));
}
