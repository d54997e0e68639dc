//! Recorded request traces: Mooncake JSON lines and kvtrace CSV, plain or zstd.
//!
//! A trace names no text, only blocks: every block number stands for a whole prefix, so the number
//! in front of it on a path is its parent, always the same one. The reader checks that, which also
//! proves that no path contains a number twice. Requests are read one at a time; what is kept of a
//! kvtrace is 24 bytes per request (its paths share prefixes and would take gigabytes when spelled
//! out) and of a Mooncake trace one parent per block. Nothing in a file makes the reader panic.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// Longest line that is accepted, bytes. A file without line ends is not read into memory.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Longest path that is accepted, blocks.
const PATH_BLOCKS_MAX: u64 = 1 << 20;

/// Most distinct blocks in one trace.
const BLOCKS_MAX: u64 = 1 << 31;

/// The first bytes of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The column names, which some files have as their first line.
const KVTRACE_HEADER: &str = "t_ms,input_tokens,output_tokens,session,flags,ref,shared,new";

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TraceRequest {
    /// Number of the request, from 0.
    pub index: u64,
    /// When it came, milliseconds from the start of the trace.
    pub at_ms: u64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// The blocks of the prompt, root first.
    pub path: Vec<u64>,
}

/// The two formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceFormat {
    /// JSON lines with `hash_ids`.
    Mooncake,
    /// CSV lines whose paths refer to earlier requests.
    Kvtrace,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("{}: cannot open the trace: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Reading or decompressing failed.
    #[error("{}:{line}: cannot read the trace: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The line under way, from 1.
        line: u64,
        /// What the system or the decompressor said.
        source: io::Error,
    },
    /// A line is not what it should be.
    #[error("{}:{line}: expected {expected}, found {found}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The file has no request.
    #[error(
        "{}: the trace has no lines; expected Mooncake JSON lines or kvtrace CSV",
        path.display()
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// What is wrong with a line: expected, found.
type Broken = (String, String);

/// Reads a trace request by request.
pub struct TraceReader {
    path: PathBuf,
    input: Box<dyn BufRead + Send>,
    line: u64,
    text: Vec<u8>,
    next_index: u64,
    state: State,
    failed: bool,
}

impl std::fmt::Debug for TraceReader {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("TraceReader")
            .field("path", &self.path)
            .field("line", &self.line)
            .finish_non_exhaustive()
    }
}

/// What must be remembered of the lines read so far.
enum State {
    /// Nothing read yet.
    Unknown,
    Mooncake(MooncakeState),
    Kvtrace(KvtraceState),
}

impl TraceReader {
    /// Opens a trace. The compression is found by the file's first bytes and the format by its
    /// first line, whatever the file is called.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub fn open(path: &Path) -> Result<TraceReader, TraceError> {
        let open = |source| TraceError::Open { path: path.to_owned(), source };
        let mut file = BufReader::with_capacity(1 << 16, File::open(path).map_err(open)?);
        let packed = file.fill_buf().map_err(open)?.starts_with(&ZSTD_MAGIC);
        let input: Box<dyn BufRead + Send> = if packed {
            let decoder = zstd::stream::read::Decoder::with_buffer(file).map_err(open)?;
            Box::new(BufReader::with_capacity(1 << 16, decoder))
        } else {
            Box::new(file)
        };
        Ok(TraceReader::over(path, input))
    }

    /// Counts the lines that are not empty, which is fast, for a progress bar.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub fn count(path: &Path) -> Result<u64, TraceError> {
        let mut reader = TraceReader::open(path)?;
        let mut count = 0;
        while reader.read_line()? {
            count += u64::from(!reader.text.trim_ascii().is_empty());
        }
        Ok(count)
    }

    fn over(path: &Path, input: Box<dyn BufRead + Send>) -> TraceReader {
        TraceReader {
            path: path.to_owned(),
            input,
            line: 0,
            text: Vec::new(),
            next_index: 0,
            state: State::Unknown,
            failed: false,
        }
    }

    /// The format, once a request has been read.
    pub fn format(&self) -> Option<TraceFormat> {
        match self.state {
            State::Unknown => None,
            State::Mooncake(_) => Some(TraceFormat::Mooncake),
            State::Kvtrace(_) => Some(TraceFormat::Kvtrace),
        }
    }

    /// The next request, or `None` at the end. After an error there is nothing more to read.
    ///
    /// # Errors
    /// The file cannot be read, or its next line is broken.
    pub fn next_request(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        if self.failed {
            return Ok(None);
        }
        let result = self.read_request();
        self.failed = result.is_err();
        result
    }

    fn read_request(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        loop {
            if !self.read_line()? {
                if self.next_index == 0 {
                    return Err(TraceError::Empty { path: self.path.clone() });
                }
                return Ok(None);
            }
            let Ok(text) = std::str::from_utf8(&self.text) else {
                return Err(self.broken(("text in UTF-8".into(), quote(&self.text))));
            };
            let text = text.trim();
            if text.is_empty() || (self.line == 1 && text == KVTRACE_HEADER) {
                continue;
            }
            if matches!(self.state, State::Unknown) {
                self.state = match text.starts_with('{') {
                    true => State::Mooncake(MooncakeState::default()),
                    false => State::Kvtrace(KvtraceState::default()),
                };
            }
            let parsed = match &mut self.state {
                State::Mooncake(state) => state.parse(text),
                State::Kvtrace(state) => state.parse(text),
                State::Unknown => continue,
            };
            let mut request = parsed.map_err(|broken| self.broken(broken))?;
            request.index = self.next_index;
            self.next_index += 1;
            return Ok(Some(request));
        }
    }

    /// Reads a line into `text`; false at the end of the file.
    fn read_line(&mut self) -> Result<bool, TraceError> {
        self.text.clear();
        self.line += 1;
        let mut limited = (&mut self.input).take(LINE_BYTES_MAX);
        let bytes = limited.read_until(b'\n', &mut self.text).map_err(|source| {
            TraceError::Read { path: self.path.clone(), line: self.line, source }
        })?;
        if bytes as u64 == LINE_BYTES_MAX && self.text.last() != Some(&b'\n') {
            return Err(self.broken((
                format!("a line of at most {} MiB", LINE_BYTES_MAX >> 20),
                "a longer one".into(),
            )));
        }
        Ok(bytes > 0)
    }

    fn broken(&self, (expected, found): Broken) -> TraceError {
        TraceError::Line { path: self.path.clone(), line: self.line, expected, found }
    }
}

impl Iterator for TraceReader {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_request().transpose()
    }
}

/// A stretch of a broken line for the error: short, printable.
fn quote(text: &[u8]) -> String {
    let mut out = String::from_utf8_lossy(text.get(..60).unwrap_or(text)).into_owned();
    if text.len() > 60 {
        out.push_str("..");
    }
    format!("{out:?}")
}

#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// The parent of every block seen, `u64::MAX` for a first one.
#[derive(Default)]
struct MooncakeState {
    parents: HashMap<u64, u64>,
}

impl MooncakeState {
    fn parse(&mut self, text: &str) -> Result<TraceRequest, Broken> {
        const FORM: &str = "JSON with whole numbers `timestamp`, `input_length`, `output_length` \
                            and a list of them `hash_ids`";
        let line: MooncakeLine = serde_json::from_str(text)
            .map_err(|error| (FORM.to_owned(), format!("{} ({error})", quote(text.as_bytes()))))?;
        if line.hash_ids.len() as u64 > PATH_BLOCKS_MAX {
            let found = format!("{}", line.hash_ids.len());
            return Err((format!("at most {PATH_BLOCKS_MAX} blocks in `hash_ids`"), found));
        }
        let mut before = u64::MAX;
        for id in &line.hash_ids {
            let parent = *self.parents.entry(*id).or_insert(before);
            if parent != before {
                let name = |id: u64| match id {
                    u64::MAX => "no block".to_owned(),
                    id => format!("block {id}"),
                };
                return Err((
                    format!("block {id} behind {}, as in an earlier line", name(parent)),
                    format!("it behind {}", name(before)),
                ));
            }
            before = *id;
        }
        Ok(TraceRequest {
            index: 0,
            at_ms: line.timestamp,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            path: line.hash_ids,
        })
    }
}

/// The path of one request: the first `shared` blocks of another one's, then fresh numbers.
#[derive(Clone, Copy)]
struct Span {
    of: u32,
    shared: u32,
    fresh_from: u64,
    blocks: u32,
}

#[derive(Default)]
struct KvtraceState {
    spans: Vec<Span>,
    next_id: u64,
}

impl KvtraceState {
    fn parse(&mut self, text: &str) -> Result<TraceRequest, Broken> {
        let form = || (format!("`{KVTRACE_HEADER}`"), quote(text.as_bytes()));
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let [t_ms, input, output, session, flags, of, shared, new] = fields.as_slice() else {
            return Err(form());
        };
        let number = |name: &str, text: &str, max: u64| match text.parse::<u64>() {
            Ok(value) if value <= max => Ok(value),
            _ => Err((
                format!("`{name}` to be a whole number of at most {max}"),
                quote(text.as_bytes()),
            )),
        };
        number("session", session, u64::MAX)?;
        number("flags", flags, u64::MAX)?;
        let shared = number("shared", shared, PATH_BLOCKS_MAX)?;
        let new = number("new", new, PATH_BLOCKS_MAX)?;
        let of = match *of {
            "-1" => u32::MAX,
            text => match text.parse::<u32>() {
                Ok(of) if (of as usize) < self.spans.len() => of,
                _ => {
                    let expected =
                        format!("`ref` to be -1 or one of {} requests before", self.spans.len());
                    return Err((expected, quote(text.as_bytes())));
                }
            },
        };
        let most = self.spans.get(of as usize).map_or(0, |span| u64::from(span.blocks));
        if shared > most {
            return Err((
                format!("`shared` to be at most the {most} blocks of the path it refers to"),
                shared.to_string(),
            ));
        }
        if shared + new > PATH_BLOCKS_MAX || self.next_id + new > BLOCKS_MAX {
            let limits = format!("paths of {PATH_BLOCKS_MAX} and a trace of {BLOCKS_MAX} blocks");
            return Err((format!("at most {limits}"), format!("{new} new ones")));
        }
        let as_u32 = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX);
        self.spans.push(Span {
            of,
            shared: as_u32(shared),
            fresh_from: self.next_id,
            blocks: as_u32(shared + new),
        });
        self.next_id += new;
        Ok(TraceRequest {
            index: 0,
            at_ms: number("t_ms", t_ms, u64::MAX)?,
            input_tokens: number("input_tokens", input, u64::MAX)?,
            output_tokens: number("output_tokens", output, u64::MAX)?,
            path: self.path_of_last(),
        })
    }

    /// Spells out the last path, from its end to its root: each span fills what lies behind the
    /// part that it shares.
    fn path_of_last(&self) -> Vec<u64> {
        let Some(mut span) = self.spans.last() else { return Vec::new() };
        let mut path = vec![0; span.blocks as usize];
        let mut open = path.as_mut_slice();
        loop {
            if open.len() > span.shared as usize {
                let (rest, fresh) = open.split_at_mut(span.shared as usize);
                fresh.iter_mut().zip(span.fresh_from..).for_each(|(place, id)| *place = id);
                open = rest;
            }
            match self.spans.get(span.of as usize) {
                Some(next) if !open.is_empty() => span = next,
                _ => return path,
            }
        }
    }
}

/// The folder with public traces: `KVTIDE_TRACES`, else `../shared/traces` beside the workspace.
pub fn trace_folder() -> PathBuf {
    std::env::var_os("KVTIDE_TRACES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces"),
        PathBuf::from,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Vec<TraceRequest>, TraceError> {
        let input = Box::new(io::Cursor::new(text.to_vec()));
        TraceReader::over(Path::new("t"), input).collect()
    }

    fn message(text: &str) -> String {
        read(text.as_bytes()).unwrap_err().to_string()
    }

    const MOONCAKE: &str = "\
        {\"timestamp\": 0, \"input_length\": 1030, \"output_length\": 5, \
        \"hash_ids\": [7, 9, 11]}\n\
        \n\
        {\"timestamp\": 27, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [7, 9]}";
    const KVTRACE: &str =
        "0,400,1,3,1,-1,0,4\n5,410,1,3,0,0,3,2\n9,1,1,4,0,1,4,1\n9,1,1,4,0,2,2,0\n";

    #[test]
    fn both_formats_give_the_same_kind_of_paths() {
        let requests = read(MOONCAKE.as_bytes()).unwrap();
        assert_eq!(requests[0].path, [7, 9, 11]);
        assert_eq!(requests[1].path, [7, 9]);
        assert_eq!((requests[1].index, requests[1].at_ms, requests[1].input_tokens), (1, 27, 600));
        let paths: Vec<_> = read(KVTRACE.as_bytes()).unwrap().into_iter().map(|r| r.path).collect();
        assert_eq!(paths, [vec![0, 1, 2, 3], vec![0, 1, 2, 4, 5], vec![0, 1, 2, 4, 6], vec![0, 1]]);
        let with_header = format!("{KVTRACE_HEADER}\n{KVTRACE}");
        assert_eq!(read(with_header.as_bytes()).unwrap().len(), 4);
    }

    #[test]
    fn a_packed_file_is_known_by_its_bytes_and_not_its_name() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("a.txt", MOONCAKE), ("b.zst", KVTRACE)] {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            let plain: Vec<_> = TraceReader::open(&path).unwrap().map(Result::unwrap).collect();
            std::fs::write(&path, zstd::encode_all(text.as_bytes(), 1).unwrap()).unwrap();
            let packed: Vec<_> = TraceReader::open(&path).unwrap().map(Result::unwrap).collect();
            assert_eq!(TraceReader::count(&path).unwrap(), packed.len() as u64);
            assert_eq!(plain, packed);
        }
    }

    #[test]
    fn a_broken_line_is_named_with_what_was_expected() {
        let cases = [
            ("{\"timestamp\": 0}\n", "t:1: expected JSON with whole numbers `timestamp`"),
            (&format!("{MOONCAKE}\nnonsense\n"), "t:4: expected JSON"),
            (&MOONCAKE.replace("[7, 9]", "[9]"), "t:3: expected block 9 behind block 7"),
            (&MOONCAKE.replace("9, 11]", "9, 7]"), "t:1: expected block 7 behind no block"),
            (&MOONCAKE.replace("1030", "-1"), "t:1: expected JSON"),
            ("hello\n", "t:1: expected `t_ms,input_tokens"),
            (&format!("{KVTRACE}1,2,3\n"), "t:5: expected `t_ms"),
            (&format!("{KVTRACE}1,1,1,1,0,4,1,1\n"), "t:5: expected `ref` to be -1 or one of 4"),
            (&format!("{KVTRACE}1,1,1,1,0,3,3,1\n"), "t:5: expected `shared` to be at most the 2"),
            (&format!("{KVTRACE}1,1,1,1,0,-1,1,1\n"), "t:5: expected `shared` to be at most the 0"),
            (&format!("{KVTRACE}x,1,1,1,0,-1,0,1\n"), "t:5: expected `t_ms` to be a whole number"),
            (&format!("{KVTRACE}1,1,1,1,0,-1,0,9999999999\n"), "t:5: expected `new`"),
            ("", "t: the trace has no lines"),
        ];
        for (text, start) in cases {
            let message = message(text);
            assert!(message.starts_with(start), "{message}\n does not start with\n {start}");
        }
        let binary = read(&[0xff, 0xfe, b'\n']).unwrap_err().to_string();
        assert!(binary.starts_with("t:1: expected text in UTF-8"), "{binary}");
    }

    #[test]
    fn a_cut_zstd_file_and_a_missing_one_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cut");
        let packed = zstd::encode_all(KVTRACE.as_bytes(), 1).unwrap();
        std::fs::write(&path, &packed[..packed.len() - 5]).unwrap();
        let result: Result<Vec<_>, _> = TraceReader::open(&path).unwrap().collect();
        assert!(matches!(result, Err(TraceError::Read { .. })), "{result:?}");
        let missing = TraceReader::open(&folder.path().join("none")).unwrap_err();
        assert!(matches!(missing, TraceError::Open { .. }));
    }

    /// Random bytes and random damage to good files: an error or requests, never a panic.
    #[test]
    fn damage_never_panics() {
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize
        };
        for round in 0..2000 {
            let text = if round % 2 == 0 { MOONCAKE } else { KVTRACE };
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..1 + random() % 4 {
                let at = random() % bytes.len();
                match random() % 3 {
                    0 => bytes[at] = random() as u8,
                    1 => bytes[at] = b"0123456789,-[]{}\n\""[random() % 18],
                    _ => bytes.truncate(at.max(1)),
                }
            }
            let _ = read(&bytes);
        }
    }
}
