//! One turn: a prompt's KV, an answer, and what both cost.

use std::time::{Duration, Instant};

use kvtide_llama_cpp::cache::Stored;
use kvtide_llama_cpp::chat::{Choice, Text};
use kvtide_llama_cpp::{EngineError, Prefill, Session};
use serde_json::{Value, json};

/// What became of a turn.
pub(crate) struct Turn {
    pub(crate) reply: String,
    /// Of the reply's first token.
    pub(crate) logits: Vec<f32>,
    prefill: Prefill,
    stored: Stored,
    /// From the prompt's text to the first token.
    first: Duration,
    /// From there to the last.
    rest: Duration,
    store: Duration,
    generated: usize,
    block_tokens: usize,
    block_bytes: usize,
    connected: bool,
}

/// Answers a prompt in at most `most` tokens, and stores what is new. `show` gets the answer piece
/// by piece.
pub(crate) fn take_turn(
    session: &mut Session,
    choice: &mut Choice,
    prompt: &str,
    most: usize,
    mut show: impl FnMut(&str),
) -> Result<Turn, EngineError> {
    let start = Instant::now();
    let model = session.context().model().clone();
    let tokens = model.tokenize(prompt)?;
    let prefill = session.prefill(&tokens)?;
    let logits = session.context().logits().to_vec();
    let mut token = choice.next(session);
    let first = start.elapsed();
    let (mut reply, mut text, mut generated) = (String::new(), Text::default(), 0);
    while let Some(now) = token.filter(|token| generated < most && !model.is_end(*token)) {
        generated += 1;
        let piece = text.push(&model.piece(now));
        show(&piece);
        reply.push_str(&piece);
        match session.append(now) {
            Ok(()) => token = choice.next(session),
            // The context is full: the answer ends here.
            Err(EngineError::NoRoom { .. }) => break,
            Err(error) => return Err(error),
        }
    }
    let end = text.end();
    show(&end);
    reply.push_str(&end);
    let rest = start.elapsed() - first;
    let stored = session.store(0);
    let layout = &session.namespace().layout;
    Ok(Turn {
        reply,
        logits,
        prefill,
        stored,
        first,
        rest,
        store: start.elapsed() - first - rest,
        generated,
        block_tokens: usize::try_from(layout.tokens_per_block).unwrap_or(0),
        block_bytes: session.block_bytes(),
        connected: session.cache().is_some_and(|cache| cache.client().is_connected()),
    })
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl Turn {
    /// All of it, for programs.
    pub(crate) fn json(&self, number: usize) -> Value {
        let loaded = &self.prefill.loaded;
        json!({
            "turn": number,
            "prompt_tokens": self.prefill.prompt,
            "own_tokens": self.prefill.own,
            "device_tokens": loaded.device * self.block_tokens,
            "host_tokens": loaded.host * self.block_tokens,
            "nvme_tokens": loaded.nvme * self.block_tokens,
            "computed_tokens": self.prefill.computed,
            "offered_blocks": loaded.offered,
            "missed_blocks": loaded.missed,
            "loaded_bytes": loaded.blocks() * self.block_bytes,
            "load_ms": ms(self.prefill.load),
            "compute_ms": ms(self.prefill.compute),
            "first_token_ms": ms(self.first),
            "generated_tokens": self.generated,
            "generate_ms": ms(self.rest),
            "stored_blocks": self.stored.stored,
            "stored_bytes": self.stored.stored * self.block_bytes,
            "present_blocks": self.stored.present,
            "refused_blocks": self.stored.refused,
            "store_ms": ms(self.store),
            "daemon": self.connected,
            "reply": self.reply,
        })
    }

    /// In a line, for people.
    pub(crate) fn sentence(&self) -> String {
        let loaded = &self.prefill.loaded;
        let mut from = Vec::new();
        for (name, tokens) in [
            ("this process", self.prefill.own),
            ("device", loaded.device * self.block_tokens),
            ("host", loaded.host * self.block_tokens),
            ("nvme", loaded.nvme * self.block_tokens),
        ] {
            if tokens > 0 {
                from.push(format!("{tokens} from {name}"));
            }
        }
        let reused = if from.is_empty() { "none reused".to_owned() } else { from.join(", ") };
        let megabytes = |blocks: usize| (blocks * self.block_bytes) as f64 / 1e6;
        format!(
            "prompt {} tokens: {reused}, {} computed; first token after {:.0} ms; {:.1} MB loaded \
             in {:.0} ms, {:.1} MB stored",
            self.prefill.prompt,
            self.prefill.computed,
            self.first.as_secs_f64() * 1e3,
            megabytes(loaded.blocks()),
            self.prefill.load.as_secs_f64() * 1e3,
            megabytes(self.stored.stored),
        )
    }
}
