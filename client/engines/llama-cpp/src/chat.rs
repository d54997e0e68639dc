//! Messages of a conversation: in a file, as a prompt, and as an answer.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::EngineError;
use crate::llama::{Model, Sampler, Token, apply_template};
use crate::session::Session;

/// One message.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// The messages so far.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Conversation {
    /// In order.
    pub messages: Vec<Message>,
}

impl Conversation {
    /// Reads a conversation from a JSON file; one that does not exist is an empty one.
    ///
    /// # Errors
    /// A file that cannot be read, or is no conversation.
    pub fn read(path: &Path) -> Result<Conversation, EngineError> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(EngineError::Read { path: path.to_owned(), source }),
        };
        let bad = |source| EngineError::Conversation { path: path.to_owned(), source };
        serde_json::from_str(&text).map_err(bad)
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), EngineError> {
        let failed = |source| EngineError::Write { path: path.to_owned(), source };
        let text = serde_json::to_vec_pretty(self)
            .map_err(|source| EngineError::Conversation { path: path.to_owned(), source })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let file =
            tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
        fs::write(file.path(), text).map_err(failed)?;
        file.persist(path).map_err(|error| failed(error.error))?;
        Ok(())
    }

    /// Adds a message.
    pub fn say(&mut self, role: &str, content: impl Into<String>) {
        self.messages.push(Message { role: role.to_owned(), content: content.into() });
    }

    /// The prompt that asks the model for the next answer, by the model's own template; by ChatML
    /// where llama.cpp does not know that one.
    ///
    /// # Errors
    /// Text with a zero byte in it.
    pub fn prompt(&self, model: &Model) -> Result<String, EngineError> {
        let messages: Vec<(&str, &str)> =
            self.messages.iter().map(|each| (each.role.as_str(), each.content.as_str())).collect();
        if let Some(template) = model.template()
            && let Some(prompt) = apply_template(&template, &messages)?
        {
            return Ok(prompt);
        }
        Ok(chatml(&messages))
    }
}

fn chatml(messages: &[(&str, &str)]) -> String {
    let mut prompt = String::new();
    for (role, content) in messages {
        prompt.push_str(&format!("<|im_start|>{role}\n{content}<|im_end|>\n"));
    }
    prompt.push_str("<|im_start|>assistant\n");
    prompt
}

/// How the next token is chosen.
pub enum Choice {
    /// The likeliest, always.
    Greedy,
    /// At random, from a seed.
    Random(Sampler),
}

impl Choice {
    /// The next token by the context's logits; `None` when there are none.
    pub fn next(&mut self, session: &mut Session) -> Option<Token> {
        match self {
            Choice::Greedy => likeliest(session.context().logits()),
            Choice::Random(sampler) => sampler.draw(session.context()),
        }
    }
}

/// The first of the largest logits.
fn likeliest(logits: &[f32]) -> Option<Token> {
    let mut best: Option<(usize, f32)> = None;
    for (at, logit) in logits.iter().enumerate() {
        if best.is_none_or(|(_, most)| *logit > most) {
            best = Some((at, *logit));
        }
    }
    best.and_then(|(at, _)| Token::try_from(at).ok())
}

/// Puts pieces of tokens together to whole characters.
#[derive(Default)]
pub struct Text {
    rest: Vec<u8>,
}

impl Text {
    /// Adds a piece; what is complete now comes back.
    pub fn push(&mut self, piece: &[u8]) -> String {
        self.rest.extend(piece);
        let whole = match std::str::from_utf8(&self.rest) {
            Ok(text) => text.len(),
            // Incomplete at the end: wait for more.
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => self.rest.len(),
        };
        let behind = self.rest.split_off(whole.min(self.rest.len()));
        let text = String::from_utf8_lossy(&self.rest).into_owned();
        self.rest = behind;
        text
    }

    /// What is left at the end.
    pub fn end(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.rest)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_out_whole() {
        let mut text = Text::default();
        let [first, second] = "ä".as_bytes() else { panic!("two bytes") };
        assert_eq!(text.push(&[b'a', *first]), "a");
        assert_eq!(text.push(&[*second, b'b']), "äb");
        assert_eq!(text.push(&[0xff, b'c']), "\u{fffd}c");
        assert_eq!(text.push(&[*first]), "");
        assert_eq!(text.end(), "\u{fffd}");
    }

    #[test]
    fn the_first_of_the_largest_logits_is_taken() {
        assert_eq!(likeliest(&[0.0, 3.0, 3.0, -1.0]), Some(1));
        assert_eq!(likeliest(&[]), None);
    }

    #[test]
    fn a_conversation_survives_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("talk.json");
        let mut talk = Conversation::read(&path).unwrap();
        assert!(talk.messages.is_empty());
        talk.say("user", "hi");
        talk.write(&path).unwrap();
        assert_eq!(Conversation::read(&path).unwrap(), talk);
        let prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(chatml(&[("user", "hi")]), prompt);
        fs::write(&path, "{").unwrap();
        assert!(Conversation::read(&path).is_err());
    }
}
