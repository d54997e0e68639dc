//! The rules of the repository that no compiler checks: which crate may use which, how long lines,
//! functions and files may be, where `unsafe` may stand, and that the documents name what exists.
//!
//! These are ratchets. [`EXCEPTIONS`] started empty and never grows without a reason beside it.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::{DependencyKind, MetadataCommand, Package, TargetKind};

/// Longest line of Rust, in characters.
const LINE_COLUMNS_MAX: usize = 100;
/// Longest function, in lines, from `fn` to the closing brace.
const FUNCTION_LINES_MAX: usize = 70;
/// Longest file, in lines.
const FILE_LINES_MAX: usize = 1000;
/// How far above an `unsafe` block its `SAFETY` comment may start, in lines.
const SAFETY_LINES_MAX: usize = 14;

/// (rule, path) pairs that may break a rule, each with a comment that says why.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// The crates, lowest first. An arrow goes only to a crate with a smaller number.
const CRATES: [(&str, &str, u32); 8] = [
    ("kvtide-kernels", "kernels", 0),
    ("kvtide-fakecuda", "tests/fakecuda", 1),
    ("kvtide-tiers", "tiers", 2),
    ("kvtide-client", "client", 3),
    ("kvtide-daemon", "daemon", 4),
    ("smallengine", "tests/smallengine", 4),
    ("kvtide-tests", "tests", 5),
    ("kvtide-bench", "bench", 5),
];

/// The four homes of `unsafe`, as beginnings of paths, and two that speak C: the fake driver, and
/// the module that makes llama.cpp safe, which is no part of the workspace.
const UNSAFE_HOMES: [&str; 6] = [
    "kernels/",
    "tiers/src/io/ring",
    "tiers/src/io/buffer",
    "tiers/src/tier/device",
    "tests/fakecuda/",
    "client/engines/llama-cpp/src/llama.rs",
];

/// A Rust file: its text, and its code with comments, strings and characters blanked.
struct Source {
    path: String,
    text: String,
    code: String,
}

/// Complaints found by one rule.
#[derive(Default)]
struct Findings(Vec<String>);

impl Findings {
    fn add(&mut self, rule: &str, path: &str, line: usize, what: impl AsRef<str>) {
        if !EXCEPTIONS.contains(&(rule, path)) {
            self.0.push(format!("{path}:{line}: {}", what.as_ref()));
        }
    }

    fn end(self, rule: &str) {
        assert!(self.0.is_empty(), "{rule}:\n  {}", self.0.join("\n  "));
    }
}

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the tests crate lies in the repository").to_path_buf()
}

/// All files below `folder`, as paths from the root, without build output and version control.
fn files(folder: &Path, found: &mut Vec<String>) {
    let root = root();
    let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()).collect();
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && name != ".git" && name != "shared" {
                files(&path, found);
            }
        } else {
            found.push(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
        }
    }
}

fn all_files() -> Vec<String> {
    let mut found = Vec::new();
    files(&root(), &mut found);
    found
}

fn sources() -> Vec<Source> {
    let sources: Vec<Source> = all_files()
        .into_iter()
        .filter(|path| path.ends_with(".rs"))
        .map(|path| {
            let text = fs::read_to_string(root().join(&path)).unwrap();
            let code = blank(&text);
            Source { path, text, code }
        })
        .collect();
    assert!(sources.len() > 5, "found {} Rust files: the walk is broken", sources.len());
    sources
}

/// Blanks comments, strings and characters, and keeps every line end where it was.
fn blank(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skipped(&chars, at);
        if end == at {
            out.push(chars[at]);
            at += 1;
        } else {
            for c in &chars[at..end] {
                out.push(if *c == '\n' { '\n' } else { ' ' });
            }
            at = end;
        }
    }
    out
}

/// Where the comment, string or character that starts at `at` ends; `at` itself when none starts.
fn skipped(chars: &[char], at: usize) -> usize {
    let next = |offset: usize| chars.get(at + offset).copied().unwrap_or('\0');
    match (chars[at], next(1)) {
        ('/', '/') => end_of(chars, at, |rest| rest[0] == '\n', 0),
        ('/', '*') => {
            let mut depth = 0;
            let mut end = at;
            while end < chars.len() {
                match (chars[end], chars.get(end + 1)) {
                    ('/', Some('*')) => (depth, end) = (depth + 1, end + 2),
                    ('*', Some('/')) => (depth, end) = (depth - 1, end + 2),
                    _ => end += 1,
                }
                if depth == 0 {
                    break;
                }
            }
            end
        }
        ('"', _) => end_of_string(chars, at + 1),
        ('r', '"' | '#') if !at.checked_sub(1).is_some_and(|before| is_word(chars[before])) => {
            end_of_raw_string(chars, at + 1).unwrap_or(at)
        }
        ('b', '"' | 'r') if !at.checked_sub(1).is_some_and(|before| is_word(chars[before])) => {
            match next(1) {
                '"' => end_of_string(chars, at + 2),
                _ => end_of_raw_string(chars, at + 2).unwrap_or(at),
            }
        }
        ('\'', '\\') => end_of(chars, at + 3, |rest| rest[0] == '\'', 1),
        ('\'', _) if next(2) == '\'' => at + 3,
        _ => at,
    }
}

fn end_of(chars: &[char], from: usize, stop: impl Fn(&[char]) -> bool, extra: usize) -> usize {
    let mut end = from;
    while end < chars.len() && !stop(&chars[end..]) {
        end += 1;
    }
    (end + extra).min(chars.len())
}

fn end_of_string(chars: &[char], from: usize) -> usize {
    let mut end = from;
    while end < chars.len() {
        match chars[end] {
            '\\' => end += 2,
            '"' => return end + 1,
            _ => end += 1,
        }
    }
    chars.len()
}

/// `from` is behind the `r`. `None` when no raw string starts here.
fn end_of_raw_string(chars: &[char], from: usize) -> Option<usize> {
    let hashes = chars[from..].iter().take_while(|c| **c == '#').count();
    if chars.get(from + hashes) != Some(&'"') {
        return None;
    }
    let mut close = vec!['"'];
    close.extend(vec!['#'; hashes]);
    Some(end_of(chars, from + hashes + 1, |rest| rest.starts_with(&close), close.len()))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

/// The lines of `#[cfg(test)]` modules, which no length limit of functions covers.
fn test_lines(code: &str) -> BTreeSet<usize> {
    let lines: Vec<&str> = code.lines().collect();
    let mut inside = BTreeSet::new();
    for (at, line) in lines.iter().enumerate() {
        let starts = line.trim() == "#[cfg(test)]"
            && lines.get(at + 1).is_some_and(|next| words(next).any(|word| word == "mod"));
        if starts && let Some(end) = body_end(&lines, at + 1) {
            inside.extend(at..=end);
        }
    }
    inside
}

/// The line on which the body of the item that starts on line `start` ends; `None` without a body.
fn body_end(lines: &[&str], start: usize) -> Option<usize> {
    let (mut braces, mut brackets) = (0i32, 0i32);
    for (at, line) in lines.iter().enumerate().skip(start) {
        for c in line.chars() {
            match c {
                '(' | '[' => brackets += 1,
                ')' | ']' => brackets -= 1,
                '{' => braces += 1,
                '}' => {
                    braces -= 1;
                    if braces == 0 {
                        return Some(at);
                    }
                }
                ';' if braces == 0 && brackets == 0 => return None,
                _ => {}
            }
        }
    }
    None
}

/// (first line from 0, number of lines, name) of every function outside of test modules.
fn functions(code: &str) -> Vec<(usize, usize, String)> {
    let lines: Vec<&str> = code.lines().collect();
    let tests = test_lines(code);
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        if tests.contains(&at) {
            continue;
        }
        let mut before = words(line).skip_while(|word| {
            ["pub", "crate", "super", "const", "async", "unsafe", "extern"].contains(word)
        });
        if before.next() == Some("fn")
            && let Some(name) = before.next()
            && let Some(end) = body_end(&lines, at)
        {
            found.push((at, end - at + 1, name.to_owned()));
        }
    }
    found
}

fn is_test_path(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs")
}

fn packages() -> Vec<Package> {
    let metadata =
        MetadataCommand::new().manifest_path(root().join("Cargo.toml")).no_deps().exec().unwrap();
    metadata.packages
}

#[test]
fn the_workspace_has_exactly_these_crates_and_arrows_run_one_way() {
    let packages = packages();
    let names: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    assert_eq!(names, CRATES.iter().map(|(name, ..)| *name).collect());
    let rank: BTreeMap<&str, u32> = CRATES.iter().map(|(name, _, rank)| (*name, *rank)).collect();
    for package in &packages {
        let own = rank[package.name.as_str()];
        for dependency in package.dependencies.iter().filter(|found| found.path.is_some()) {
            // A crate that names itself for its tests turns its own features on, no more.
            let itself = dependency.name == package.name.as_str();
            if itself && dependency.kind == DependencyKind::Development {
                continue;
            }
            let other = rank[dependency.name.as_str()];
            assert!(other < own, "{} must not use {}", package.name, dependency.name);
        }
    }
}

#[test]
fn the_client_uses_tiers_without_its_default_features() {
    let packages = packages();
    let client = packages.iter().find(|package| package.name.as_str() == "kvtide-client").unwrap();
    for dependency in client.dependencies.iter().filter(|found| found.name == "kvtide-tiers") {
        if dependency.kind == DependencyKind::Normal {
            assert!(!dependency.uses_default_features, "default-features must be off");
            for feature in &dependency.features {
                assert_eq!(feature, "memory", "a client needs identity, geometry and memory only");
            }
        }
    }
    for package in &packages {
        for dependency in &package.dependencies {
            let gpu = dependency.name == "cudarc";
            assert!(
                !gpu || ["kvtide-kernels", "kvtide-tiers"].contains(&package.name.as_str()),
                "{} must not use cudarc",
                package.name
            );
        }
    }
}

#[test]
fn every_crate_root_but_those_with_a_home_of_unsafe_forbids_it() {
    let mut findings = Findings::default();
    let root = root();
    for package in packages() {
        let homes = ["kvtide-tiers", "kvtide-kernels", "kvtide-fakecuda"];
        if homes.contains(&package.name.as_str()) {
            continue;
        }
        for target in &package.targets {
            if target.kind.contains(&TargetKind::CustomBuild) {
                continue;
            }
            let path = target.src_path.as_std_path();
            let text = fs::read_to_string(path).unwrap();
            if !blank(&text).contains("#![forbid(unsafe_code)]") {
                let path = path.strip_prefix(&root).unwrap().to_str().unwrap();
                findings.add("forbid-unsafe", path, 1, "lacks #![forbid(unsafe_code)]");
            }
        }
    }
    findings.end("crate roots");
}

#[test]
fn unsafe_stands_only_in_its_homes_and_says_why_it_is_sound() {
    let mut findings = Findings::default();
    for source in sources() {
        let home = UNSAFE_HOMES.iter().any(|home| source.path.starts_with(home));
        let text: Vec<&str> = source.text.lines().collect();
        for (at, line) in source.code.lines().enumerate() {
            if !words(line).any(|word| word == "unsafe") {
                continue;
            }
            if !home {
                findings.add("unsafe", &source.path, at + 1, "unsafe outside of its homes");
            }
            let from = at.saturating_sub(SAFETY_LINES_MAX);
            let said = text[from..=at]
                .iter()
                .any(|line| line.contains("// SAFETY:") || line.contains("/// # Safety"));
            if !said {
                findings.add("safety", &source.path, at + 1, "unsafe without `// SAFETY:`");
            }
        }
    }
    findings.end("unsafe");
}

#[test]
fn lines_functions_and_files_are_short() {
    let mut findings = Findings::default();
    for source in sources() {
        let lines = source.text.lines().count();
        if lines > FILE_LINES_MAX {
            let what = format!("{lines} lines; a file has at most {FILE_LINES_MAX}");
            findings.add("file", &source.path, lines, what);
        }
        for (at, line) in source.text.lines().enumerate() {
            let columns = line.chars().count();
            if columns > LINE_COLUMNS_MAX {
                let what = format!("{columns} columns; a line has at most {LINE_COLUMNS_MAX}");
                findings.add("line", &source.path, at + 1, what);
            }
        }
        if is_test_path(&source.path) {
            continue;
        }
        for (at, lines, name) in functions(&source.code) {
            if lines > FUNCTION_LINES_MAX {
                let what = format!("`{name}` has {lines} lines; at most {FUNCTION_LINES_MAX}");
                findings.add("function", &source.path, at + 1, what);
            }
        }
    }
    findings.end("lengths");
}

#[test]
fn nothing_unfinished_is_committed() {
    let mut findings = Findings::default();
    for source in sources() {
        for (at, line) in source.code.lines().enumerate() {
            if ["<<<<<<< ", ">>>>>>> "].iter().any(|mark| line.starts_with(mark)) {
                findings.add("unfinished", &source.path, at + 1, "a merge that was not finished");
            }
            for left in ["todo!", "dbg!", "unimplemented!"] {
                let found = line
                    .find(left)
                    .is_some_and(|place| !line[..place].chars().next_back().is_some_and(is_word));
                if found {
                    findings.add("unfinished", &source.path, at + 1, left);
                }
            }
        }
    }
    findings.end("unfinished");
}

#[test]
fn every_name_in_architecture_md_exists() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut known = BTreeSet::new();
    for path in all_files() {
        let file = fs::read_to_string(root().join(&path)).unwrap_or_default();
        if path.ends_with(".rs") {
            known.extend(words(&blank(&file)).map(str::to_owned));
        } else if path.ends_with(".toml") {
            known.extend(words(&file).map(str::to_owned));
            known.extend(file.split('"').map(str::to_owned));
        }
    }
    let mut findings = Findings::default();
    let mut seen = 0;
    for (at, line) in text.lines().enumerate() {
        for name in line.split('`').skip(1).step_by(2) {
            // Commands and flags are not names.
            if name.contains(' ') || name.starts_with('-') || name.is_empty() {
                continue;
            }
            seen += 1;
            let is_path = name.contains('/') || name.contains('.');
            let exists = root().join(name.trim_end_matches('/')).exists()
                || known.contains(name)
                || (!is_path && words(name).all(|word| known.contains(word)));
            if !exists {
                let what = format!("`{name}` is neither a path nor a name in the code");
                findings.add("architecture", "ARCHITECTURE.md", at + 1, what);
            }
        }
    }
    assert!(seen > 20, "only {seen} names in ARCHITECTURE.md: it is not the map it should be");
    findings.end("ARCHITECTURE.md");
}

#[test]
fn no_place_of_a_developers_machine_is_committed() {
    // Put together here, so that this file does not find itself.
    let places = [
        concat!("/ro", "ot/"),
        concat!("/wo", "rk/"),
        concat!("/tmp/", "kv/"),
        concat!("/ho", "me/"),
        concat!("file:", "///"),
    ];
    let mut findings = Findings::default();
    for path in all_files() {
        let Ok(text) = fs::read_to_string(root().join(&path)) else { continue };
        for (at, line) in text.lines().enumerate() {
            for place in places.iter().filter(|place| line.contains(**place)) {
                findings.add("places", &path, at + 1, format!("names the place {place}"));
            }
            let source = line.trim().strip_prefix("source = ");
            if path == "Cargo.lock"
                && source.is_some_and(|source| {
                    source != "\"registry+https://github.com/rust-lang/crates.io-index\""
                })
            {
                findings.add("registry", &path, at + 1, "another source than crates.io");
            }
        }
        if path.starts_with(".cargo/") || path.starts_with("rust-toolchain") {
            findings.add("registry", &path, 1, "decides for every machine where crates come from");
        }
    }
    findings.end("places");
}

#[test]
fn ci_runs_the_test_command_that_the_readme_shows() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let ci = fs::read_to_string(root().join(".ci/run")).unwrap();
    let command = "cargo test --workspace";
    assert!(readme.lines().any(|line| line == command), "README.md shows `{command}`");
    assert!(ci.lines().any(|line| line.trim() == command), ".ci/run runs `{command}`");
}

#[test]
fn the_scanner_sees_code_and_nothing_else() {
    let text = "let a = \"unsafe // x\"; // unsafe\nlet b = 'u'; let c: &'a str = r#\"dbg!\"#;\n\
                /* a /* unsafe */ b */ let d = b\"todo!\"; let e = '\\''; let f = b'\"'; unsafe_x";
    let code = blank(text);
    assert_eq!(code.lines().count(), text.lines().count());
    for word in ["unsafe", "dbg", "todo"] {
        assert!(!words(&code).any(|found| found == word), "{word} in {code}");
    }
    for word in ["a", "b", "c", "d", "e", "f", "str", "unsafe_x"] {
        assert!(words(&code).any(|found| found == word), "no {word} in {code}");
    }
    let code = "pub(crate) async fn one(\n    a: [u8; 2],\n) {\n    two();\n}\n\
                trait T {\n    fn none(&self);\n}\n#[cfg(test)]\nmod tests {\n    fn x() {}\n}\n";
    assert_eq!(functions(code), vec![(0, 5, "one".to_owned())]);
}
