//! The chat template: ChatML, as SmolLM2 was taught.

use crate::tokenizer::Tokenizer;

/// Who speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Whoever set the model up.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// Tokens of these messages and of the start of the model's answer. A vocabulary without ChatML's
/// marks has them as text.
pub fn chat_tokens(tokenizer: &Tokenizer, messages: &[(Role, &str)]) -> Vec<u32> {
    let mark = |text: &str| {
        tokenizer.control(text).map_or_else(|| tokenizer.encode(text), |token| vec![token])
    };
    let mut tokens = Vec::new();
    for (role, text) in messages {
        tokens.extend(mark("<|im_start|>"));
        tokens.extend(tokenizer.encode(&format!("{}\n{text}", role.name())));
        tokens.extend(mark("<|im_end|>"));
        tokens.extend(tokenizer.encode("\n"));
    }
    tokens.extend(mark("<|im_start|>"));
    tokens.extend(tokenizer.encode("assistant\n"));
    tokens
}

/// The token by which the model ends its answer.
pub fn end_of_turn(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.control("<|im_end|>")
}
