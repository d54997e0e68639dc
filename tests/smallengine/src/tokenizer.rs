//! The byte-level BPE of a GGUF file: text to tokens and back.
//!
//! Decoding is exact. Encoding splits words as GPT-2 does, with digits one by one as SmolLM wants
//! it; for text outside of common scripts another tokenizer may split elsewhere.

use std::collections::HashMap;

use crate::gguf::{Gguf, GgufError};

/// Type of a token that stands for itself and not for bytes, such as the end of a turn.
const CONTROL: i64 = 3;

/// A vocabulary and its merges.
pub struct Tokenizer {
    /// Bytes of each token.
    bytes: Vec<Vec<u8>>,
    /// Token of each single byte.
    singles: Vec<Option<u32>>,
    /// What two neighbours become, and how early.
    merges: HashMap<(u32, u32), (usize, u32)>,
    control: HashMap<String, u32>,
}

impl Tokenizer {
    /// Takes it from a file.
    ///
    /// # Errors
    /// The file has none, or one of another kind.
    pub fn from_gguf(file: &Gguf) -> Result<Tokenizer, GgufError> {
        let model = file.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(GgufError::Unfit {
                name: "tokenizer.ggml.model".into(),
                found: format!("`{model}`"),
                wanted: "`gpt2`, a byte-level BPE".into(),
            });
        }
        let texts = file.texts("tokenizer.ggml.tokens")?;
        let kinds = file.wholes("tokenizer.ggml.token_type").unwrap_or_default();
        let letters = byte_letters();
        let values: HashMap<char, u8> = letters.iter().copied().zip(0u8..=255).collect();
        let mut numbers: HashMap<&[u8], u32> = HashMap::new();
        let (mut bytes, mut control) = (Vec::new(), HashMap::new());
        for (at, (text, number)) in texts.iter().zip(0u32..).enumerate() {
            let letters = String::from_utf8_lossy(text);
            if kinds.get(at) == Some(&CONTROL) {
                control.insert(letters.into_owned(), number);
                bytes.push(text.clone());
                continue;
            }
            numbers.entry(text.as_slice()).or_insert(number);
            bytes.push(letters.chars().filter_map(|c| values.get(&c).copied()).collect());
        }
        let mut merges = HashMap::new();
        for (rank, merge) in file.texts("tokenizer.ggml.merges")?.iter().enumerate() {
            let Some(at) = merge.iter().position(|byte| *byte == b' ') else { continue };
            let (left, right) = (merge.get(..at).unwrap_or(merge), merge.get(at + 1..));
            let right = right.unwrap_or_default();
            let whole = [left, right].concat();
            let pair = (numbers.get(left), numbers.get(right), numbers.get(whole.as_slice()));
            if let (Some(left), Some(right), Some(whole)) = pair {
                merges.entry((*left, *right)).or_insert((rank, *whole));
            }
        }
        let single =
            |letter: &char| numbers.get(letter.encode_utf8(&mut [0; 4]).as_bytes()).copied();
        let singles = letters.iter().map(single).collect();
        Ok(Tokenizer { bytes, singles, merges, control })
    }

    /// The token that stands for itself, by its text.
    pub fn control(&self, text: &str) -> Option<u32> {
        self.control.get(text).copied()
    }

    /// Tokens of a text; what looks like a control token in it is text. Bytes that the vocabulary
    /// lacks are left out.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        words(text).into_iter().flat_map(|word| self.encode_word(word)).collect()
    }

    fn encode_word(&self, word: &str) -> Vec<u32> {
        let single = |byte: u8| self.singles.get(usize::from(byte)).copied().flatten();
        let mut tokens: Vec<u32> = word.bytes().filter_map(single).collect();
        loop {
            let pairs = tokens.windows(2).enumerate().filter_map(|(at, pair)| match pair {
                [left, right] => {
                    self.merges.get(&(*left, *right)).map(|(rank, whole)| (*rank, at, *whole))
                }
                _ => None,
            });
            let Some((_, at, whole)) = pairs.min() else { return tokens };
            tokens.splice(at..at + 2, [whole]);
        }
    }

    /// The bytes of tokens; unknown ones have none.
    pub fn decode_bytes(&self, tokens: &[u32]) -> Vec<u8> {
        let bytes = |token: &u32| self.bytes.get(*token as usize).cloned().unwrap_or_default();
        tokens.iter().flat_map(bytes).collect()
    }

    /// The text of tokens. A character that is cut by either end is shown as `\u{fffd}`.
    pub fn decode(&self, tokens: &[u32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(tokens)).into_owned()
    }
}

/// The letter by which each byte is written in the vocabulary: itself where it is visible.
fn byte_letters() -> Vec<char> {
    let mut hidden = 256u32..;
    (0u8..=255)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => hidden.next().and_then(char::from_u32).unwrap_or('\u{fffd}'),
        })
        .collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    Space,
    Other,
}

fn class(c: char) -> Class {
    match c {
        _ if c.is_whitespace() => Class::Space,
        _ if c.is_alphabetic() => Class::Letter,
        _ if c.is_numeric() => Class::Digit,
        _ => Class::Other,
    }
}

/// Cuts a text where no merge may reach across. First before and after each digit, then as GPT-2:
/// `'s|'t|'re|'ve|'m|'ll|'d| ?letters| ?digits| ?others|spaces before spaces|spaces`.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if class(first) == Class::Digit {
            let (digit, after) = rest.split_at(first.len_utf8());
            words.push(digit);
            rest = after;
            continue;
        }
        let digit = rest.find(|c| class(c) == Class::Digit).unwrap_or(rest.len());
        let (mut part, after) = rest.split_at(digit);
        rest = after;
        while !part.is_empty() {
            let (word, after) = part.split_at(word_bytes(part));
            words.push(word);
            part = after;
        }
    }
    words
}

/// Bytes of the first word of a text without digits.
fn word_bytes(text: &str) -> usize {
    let endings = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];
    if let Some(ending) = endings.iter().find(|ending| text.starts_with(**ending)) {
        return ending.len();
    }
    let run = |text: &str, kind: Class| text.find(|c| class(c) != kind).unwrap_or(text.len());
    let body = text.strip_prefix(' ').unwrap_or(text);
    match body.chars().next().map(class) {
        Some(kind @ (Class::Letter | Class::Digit | Class::Other)) => {
            text.len() - body.len() + run(body, kind)
        }
        _ => {
            let spaces = run(text, Class::Space);
            let last = text.get(..spaces).and_then(|spaces| spaces.chars().next_back());
            let last = last.map_or(0, char::len_utf8);
            // The last space belongs to the word behind it, if there is one and it is not alone.
            if spaces < text.len() && spaces > last { spaces - last } else { spaces }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_as_gpt_2_cuts_them() {
        let cases: [(&str, &[&str]); 6] = [
            ("Hello, world!", &["Hello", ",", " world", "!"]),
            ("it's 2024", &["it", "'s", " ", "2", "0", "2", "4"]),
            ("a  b\n\nc", &["a", " ", " b", "\n", "\n", "c"]),
            ("x \n", &["x", " \n"]),
            (" ünï...", &[" ünï", "..."]),
            ("", &[]),
        ];
        for (text, wanted) in cases {
            assert_eq!(words(text), wanted);
            assert_eq!(words(text).concat(), text);
        }
    }

    #[test]
    fn every_byte_has_a_letter_of_its_own() {
        let letters = byte_letters();
        let distinct: std::collections::HashSet<&char> = letters.iter().collect();
        assert_eq!(distinct.len(), 256);
        assert_eq!((letters[0], letters[32], letters[65]), ('Ā', 'Ġ', 'A'));
    }
}
