//! GGUF files that are cut off, altered or made up: an error that says what is wrong, and never a
//! panic or memory beyond what the file could hold.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::sync::Arc;

use smallengine::{Engine, Gguf, Pool, Tokenizer, Weights, namespace, random_tokens};

const TEXT: u32 = 8;
const LIST: u32 = 9;

/// Types of tensors: values of a block, and its bytes.
const F32: (u32, usize, usize) = (0, 1, 4);
const F16: (u32, usize, usize) = (1, 1, 2);
const Q4_0: (u32, usize, usize) = (2, 32, 18);
const Q4_1: (u32, usize, usize) = (3, 32, 20);
const Q8_0: (u32, usize, usize) = (8, 32, 34);
const BF16: (u32, usize, usize) = (30, 1, 2);

/// A file in the making.
#[derive(Default)]
struct Writer {
    keys: u64,
    head: Vec<u8>,
    tensors: Vec<(String, Vec<u64>, u32)>,
    data: Vec<(u64, Vec<u8>)>,
}

fn text(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

impl Writer {
    fn key(&mut self, name: &str, kind: u32, value: &[u8]) {
        self.keys += 1;
        self.head.extend(text(name.as_bytes()));
        self.head.extend(kind.to_le_bytes());
        self.head.extend(value);
    }

    fn list(&mut self, name: &str, kind: u32, values: &[Vec<u8>]) {
        let count = (values.len() as u64).to_le_bytes();
        self.key(name, LIST, &[&kind.to_le_bytes()[..], &count, &values.concat()].concat());
    }

    fn tensor(&mut self, name: &str, dimensions: &[u64], kind: (u32, usize, usize)) {
        let (number, values, bytes) = kind;
        let blocks = dimensions.iter().product::<u64>() as usize / values;
        let seed = self.tensors.len() as u64;
        let noise = random_tokens(seed, blocks * bytes, 256);
        let mut noise: Vec<u8> = noise.into_iter().map(|byte| byte as u8).collect();
        for block in noise.chunks_exact_mut(bytes) {
            match (number, bytes) {
                (0, _) => block.copy_from_slice(&0.05f32.to_le_bytes()),
                (30, _) => block.copy_from_slice(&0x3d00u16.to_le_bytes()),
                // Scale (and least value) of about a hundredth.
                (3, _) => block[..4].copy_from_slice(&[0x00, 0x21, 0x00, 0xa1]),
                _ => block[..2].copy_from_slice(&[0x00, 0x21]),
            }
        }
        let offset = self.data.last().map_or(0, |(at, data)| at + data.len() as u64);
        self.data.push((offset.next_multiple_of(32), noise));
        self.tensors.push((name.to_owned(), dimensions.to_vec(), number));
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.keys.to_le_bytes());
        out.extend(&self.head);
        for ((name, dimensions, kind), (offset, _)) in self.tensors.iter().zip(&self.data) {
            out.extend(text(name.as_bytes()));
            out.extend((dimensions.len() as u32).to_le_bytes());
            out.extend(dimensions.iter().flat_map(|count| count.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        let start = out.len().next_multiple_of(32);
        for (offset, data) in &self.data {
            out.resize(start + *offset as usize, 0);
            out.extend(data);
        }
        out
    }
}

/// A model of one layer: 64 values a token, 2 heads of 32, 1 kv head, 300 tokens.
fn model() -> Writer {
    let mut file = Writer::default();
    file.key("general.architecture", TEXT, &text(b"llama"));
    for (name, count) in [
        ("block_count", 1u32),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("rope.dimension_count", 32),
    ] {
        file.key(&format!("llama.{name}"), 4, &count.to_le_bytes());
    }
    file.key("llama.rope.freq_base", 6, &10_000f32.to_le_bytes());
    file.key("llama.attention.layer_norm_rms_epsilon", 6, &1e-5f32.to_le_bytes());
    file.key("some.truth", 7, &[1]);
    file.list("some.reals", 6, &[vec![0; 4], vec![0; 4]]);
    file.key("tokenizer.ggml.model", TEXT, &text(b"gpt2"));
    let mut tokens: Vec<String> = (b'!'..=b'~').map(|byte| char::from(byte).to_string()).collect();
    tokens.extend(["he", "ll", "hell", "<|end|>"].map(str::to_owned));
    tokens.extend((tokens.len()..300).map(|number| format!("<{number}>")));
    let listed: Vec<Vec<u8>> = tokens.iter().map(|token| text(token.as_bytes())).collect();
    file.list("tokenizer.ggml.tokens", TEXT, &listed);
    let kind = |token: &String| if token == "<|end|>" { 3i32 } else { 1 };
    let kinds: Vec<Vec<u8>> = tokens.iter().map(|t| kind(t).to_le_bytes().to_vec()).collect();
    file.list("tokenizer.ggml.token_type", 5, &kinds);
    let merges = ["h e", "l l", "he ll"].map(|merge| text(merge.as_bytes()));
    file.list("tokenizer.ggml.merges", TEXT, &merges);
    file.tensor("token_embd.weight", &[64, 300], Q8_0);
    file.tensor("output.weight", &[64, 300], F16);
    file.tensor("output_norm.weight", &[64], F32);
    for (name, dimensions, kind) in [
        ("attn_norm", &[64u64][..], F32),
        ("attn_q", &[64, 64], Q4_1),
        ("attn_k", &[64, 32], Q4_0),
        ("attn_v", &[64, 32], BF16),
        ("attn_output", &[64, 64], Q4_1),
        ("ffn_norm", &[64], F32),
        ("ffn_gate", &[64, 96], Q4_1),
        ("ffn_up", &[64, 96], Q4_0),
        ("ffn_down", &[96, 64], Q8_0),
    ] {
        file.tensor(&format!("blk.0.{name}.weight"), dimensions, kind);
    }
    file
}

/// Reads all that there is to read.
fn read(bytes: Vec<u8>) -> Result<Weights, String> {
    let file = Gguf::parse(bytes).map_err(|error| error.to_string())?;
    let tokenizer = Tokenizer::from_gguf(&file).map_err(|error| error.to_string());
    let _ = tokenizer.map(|tokenizer| tokenizer.decode(&tokenizer.encode("hello <|end|> 12")));
    Weights::from_gguf(&file).map_err(|error| error.to_string())
}

#[test]
fn a_sound_file_gives_a_model_that_runs() {
    let bytes = model().bytes();
    let tokenizer = Tokenizer::from_gguf(&Gguf::parse(bytes.clone()).unwrap()).unwrap();
    let tokens = tokenizer.encode("hello");
    assert_eq!(tokenizer.decode(&tokens), "hello");
    assert_eq!(tokens.len(), 2, "hell, o: {tokens:?}");
    assert!(tokenizer.control("<|end|>").is_some() && tokenizer.control("hell").is_none());

    let weights = Arc::new(read(bytes.clone()).unwrap());
    assert_eq!(weights.shape().vocabulary, 300);
    assert!(weights.digest().starts_with("blake3:"));
    let pool = Pool::own(&namespace(&weights, 4).layout, 8).unwrap();
    let mut engine = Engine::new(Arc::clone(&weights), pool, None);
    let logits = engine.prefill(&[1, 2, 3, 250, 5]).unwrap();
    assert_eq!(logits.len(), 300);
    assert!(logits.iter().all(|logit| logit.is_finite()));
    let mut other = bytes;
    *other.last_mut().unwrap() ^= 1;
    assert_ne!(read(other).unwrap().digest(), weights.digest());
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_refused() {
    let bytes = model().bytes();
    let head = bytes.len() - model().data.iter().map(|(_, data)| data.len()).sum::<usize>();
    let step = |at: &usize| *at < 400 || at.is_multiple_of(if *at < head { 7 } else { 997 });
    for at in (0..bytes.len()).filter(step) {
        let error = read(bytes[..at].to_vec()).err();
        let error = error.unwrap_or_else(|| panic!("cut off at {at}, and taken"));
        assert!(!error.is_empty());
    }
}

#[test]
fn altered_bytes_are_an_error_or_another_model() {
    let bytes = model().bytes();
    let head = bytes.len() - model().data.iter().map(|(_, data)| data.len()).sum::<usize>();
    let mut refused = 0;
    for seed in 0..3000u64 {
        let mut altered = bytes.clone();
        let dice = random_tokens(seed, 8, u32::MAX);
        for pair in dice[..2 + (seed % 3) as usize * 2].chunks(2) {
            let value = match pair[1] % 4 {
                0 => 0xff,
                1 => 0,
                _ => (pair[1] >> 8) as u8,
            };
            altered[pair[0] as usize % head] = value;
        }
        refused += usize::from(read(altered).is_err());
    }
    println!("{refused} of 3000 were refused");
    assert!(refused > 300, "only {refused} of 3000 were refused");
}

#[test]
fn errors_say_what_is_wrong() {
    let bytes = model().bytes();
    let put = |at: usize, value: &[u8]| {
        let mut altered = bytes.clone();
        altered[at..at + value.len()].copy_from_slice(value);
        read(altered).err().unwrap_or_default()
    };
    for wrong in [&b"GGML"[..], &b"GGUF\x01\0\0\0"[..]] {
        assert!(put(0, wrong).contains("not a GGUF file"), "{}", put(0, wrong));
    }
    // More keys and tensors than can follow.
    assert!(put(8, &u64::MAX.to_le_bytes()).contains("number of tensors"));
    assert!(put(16, &(1u64 << 40).to_le_bytes()).contains("number of keys"));

    let with = |change: &dyn Fn(&mut Writer)| {
        let mut file = model();
        change(&mut file);
        read(file.bytes()).err().unwrap_or_default()
    };
    let other = with(&|file| {
        file.key("general.architecture", TEXT, &text(b"mamba"));
    });
    assert!(other.contains("mamba") && other.contains("Llama"), "{other}");
    let scaled = with(&|file| file.key("llama.rope.scaling.type", TEXT, &text(b"yarn")));
    assert!(scaled.contains("rope scaling yarn"), "{scaled}");
    let heads = with(&|file| file.key("llama.attention.head_count", 4, &3u32.to_le_bytes()));
    assert!(!heads.is_empty());
    let missing = with(&|file| {
        file.tensors.pop();
    });
    assert!(missing.contains("no tensor `blk.0.ffn_down.weight`"), "{missing}");
    let shape = with(&|file| file.tensors[1].1 = vec![64, 299]);
    assert!(shape.contains("output.weight") && shape.contains("299"), "{shape}");
    let kind = with(&|file| file.tensors[0].2 = 12);
    assert!(kind.contains("token_embd.weight") && kind.contains("type 12"), "{kind}");
    let deep = with(&|file| file.list("deep", LIST, &[]));
    assert!(deep.contains("a list's type"), "{deep}");
    assert!(Gguf::open(std::path::Path::new("/nothing/there")).is_err());
}
