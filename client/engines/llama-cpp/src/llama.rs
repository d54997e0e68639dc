//! llama.cpp, made safe: the only `unsafe` of this crate.
//!
//! Owns the model and the context of llama.cpp and frees them. Invariants: a [`Context`] keeps its
//! [`Model`] alive; it is used by one thread at a time (`&mut`, and not `Sync`); every pointer
//! given to llama.cpp lives until the call returns, since it keeps none of them.
//!
//! The parser behind [`Context::import`] trusts its input. It is given bytes only whose frame was
//! checked ([`crate::frame`]), and which the daemon handed out after comparing their checksum.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Once, OnceLock};

use llama_cpp_sys_2 as sys;

use crate::error::EngineError;

/// The sequence that holds the conversation.
const CONVERSATION: sys::llama_seq_id = 0;
/// The sequence through which single blocks go in and out.
const SCRATCH: sys::llama_seq_id = 1;
/// The level of the messages of llama.cpp that are shown.
const LOG_LEVEL: sys::ggml_log_level = sys::GGML_LOG_LEVEL_ERROR;

/// A token's number in the model's vocabulary.
pub type Token = i32;

/// How the elements of K and V are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvType {
    /// bfloat16.
    Bf16,
    /// IEEE half, which is llama.cpp's own default.
    F16,
    /// IEEE single.
    F32,
}

impl KvType {
    /// As llama.cpp's command line names it.
    pub fn name(self) -> &'static str {
        match self {
            KvType::Bf16 => "bf16",
            KvType::F16 => "f16",
            KvType::F32 => "f32",
        }
    }

    fn of_ggml(self) -> sys::ggml_type {
        match self {
            KvType::Bf16 => sys::GGML_TYPE_BF16,
            KvType::F16 => sys::GGML_TYPE_F16,
            KvType::F32 => sys::GGML_TYPE_F32,
        }
    }
}

/// How a context is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ContextOptions {
    /// Most tokens of the conversation.
    pub ctx: u32,
    /// Most tokens of one decode.
    pub batch: u32,
    /// Threads that compute.
    pub threads: i32,
    /// Elements of K and V.
    pub kv: KvType,
    /// Whether flash attention is used.
    pub flash_attention: bool,
}

impl Default for ContextOptions {
    /// Flash attention with bfloat16: logits do not depend on how a prompt was split.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = i32::try_from(cores).unwrap_or(i32::MAX);
        ContextOptions { ctx: 4096, batch: 512, threads, kv: KvType::Bf16, flash_attention: true }
    }
}

extern "C" fn show(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if level != LOG_LEVEL || text.is_null() {
        return;
    }
    // SAFETY: llama.cpp gives a string that ends with 0 and lives until this returns.
    let text = unsafe { CStr::from_ptr(text) };
    eprint!("llama.cpp: {}", text.to_string_lossy());
}

/// Prepares llama.cpp, once in a process.
fn start() {
    static STARTED: Once = Once::new();
    // SAFETY: both may be called at any time before the first model is loaded, and `show` is a
    // function that lives for ever and keeps no state.
    STARTED.call_once(|| unsafe {
        sys::llama_log_set(Some(show), ptr::null_mut());
        sys::llama_backend_init();
    });
}

/// The text behind a pointer of llama.cpp's own, empty for none.
///
/// # Safety
/// `text` is null, or a string that ends with 0 and does not change during the call.
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller promises it.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What of this build of llama.cpp changes the bytes it computes: its version, and the instructions
/// it was compiled for.
pub fn build() -> String {
    start();
    // The second call writes into a string of llama.cpp's own, one caller at a time.
    static BUILD: OnceLock<String> = OnceLock::new();
    let text = BUILD.get_or_init(|| {
        // SAFETY: both return strings that end with 0, and nobody else in this process calls the
        // second, so that its string does not change while it is copied.
        let (version, system) =
            unsafe { (owned(sys::llama_version()), owned(sys::llama_print_system_info())) };
        format!("llama.cpp {version} ({})", system.trim_end_matches([' ', '|']))
    });
    text.clone()
}

/// A model's weights and vocabulary.
pub struct Model {
    model: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
}

// SAFETY: llama.cpp does not change a model after it was loaded, and has no thread-local state.
unsafe impl Send for Model {}
// SAFETY: as above; all methods only read.
unsafe impl Sync for Model {}

impl Model {
    /// Loads a GGUF file, all of it on the CPU.
    ///
    /// # Errors
    /// When llama.cpp does not take it; its message is on standard error.
    pub fn load(path: &Path) -> Result<Arc<Model>, EngineError> {
        start();
        let refused = || EngineError::Load { path: path.to_owned() };
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| refused())?;
        // SAFETY: `name` ends with 0, and the parameters are llama.cpp's own with numbers changed.
        let model = unsafe {
            let mut params = sys::llama_model_default_params();
            params.n_gpu_layers = 0;
            sys::llama_model_load_from_file(name.as_ptr(), params)
        };
        let model = NonNull::new(model).ok_or_else(refused)?;
        // SAFETY: the model was just loaded; its vocabulary lives as long as it does.
        let vocab = unsafe { sys::llama_model_get_vocab(model.as_ptr()) };
        let Some(vocab) = NonNull::new(vocab.cast_mut()) else {
            // SAFETY: nobody else has it.
            unsafe { sys::llama_model_free(model.as_ptr()) };
            return Err(refused());
        };
        Ok(Arc::new(Model { model, vocab }))
    }

    /// A value of the file's metadata, as text.
    pub fn meta(&self, key: &str) -> Option<String> {
        let key = CString::new(key).ok()?;
        let mut value = vec![0u8; 512];
        // SAFETY: the model lives, the key ends with 0, and no more than the length is written.
        let length = unsafe {
            sys::llama_model_meta_val_str(
                self.model.as_ptr(),
                key.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        let length = usize::try_from(length).ok()?;
        String::from_utf8(value.get(..length)?.to_vec()).ok()
    }

    /// A number of the model's architecture (`attention.head_count_kv`, say).
    pub fn number(&self, key: &str) -> Option<u32> {
        let architecture = self.meta("general.architecture")?;
        self.meta(&format!("{architecture}.{key}"))?.parse().ok()
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        // SAFETY: the model lives.
        let layers = unsafe { sys::llama_model_n_layer(self.model.as_ptr()) };
        u32::try_from(layers).unwrap_or(0)
    }

    /// KV heads of the first layer.
    pub fn kv_heads(&self) -> u32 {
        // SAFETY: the model lives.
        let heads = unsafe { sys::llama_model_n_head_kv(self.model.as_ptr()) };
        u32::try_from(heads).unwrap_or(0)
    }

    /// Elements of one head.
    pub fn head_dim(&self) -> u32 {
        // SAFETY: the model lives.
        let (width, heads) = unsafe {
            let model = self.model.as_ptr();
            (sys::llama_model_n_embd(model), sys::llama_model_n_head(model))
        };
        let even = width.checked_div(heads).and_then(|each| u32::try_from(each).ok());
        self.number("attention.key_length").or(even).unwrap_or(0)
    }

    /// Tokens of context that the model was trained with.
    pub fn trained_ctx(&self) -> u32 {
        // SAFETY: the model lives.
        let tokens = unsafe { sys::llama_model_n_ctx_train(self.model.as_ptr()) };
        u32::try_from(tokens).unwrap_or(0)
    }

    /// Tokens that a layer with sliding-window attention sees, 0 for no such layers.
    pub fn window(&self) -> u32 {
        // SAFETY: the model lives.
        let tokens = unsafe { sys::llama_model_n_swa(self.model.as_ptr()) };
        u32::try_from(tokens).unwrap_or(0)
    }

    /// Whether all that the model remembers lies in a KV cache, so that it can be cut into blocks:
    /// no recurrent state, no encoder.
    pub fn is_plain_decoder(&self) -> bool {
        // SAFETY: the model lives.
        unsafe {
            let model = self.model.as_ptr();
            sys::llama_model_has_decoder(model)
                && !sys::llama_model_has_encoder(model)
                && !sys::llama_model_is_recurrent(model)
                && !sys::llama_model_is_hybrid(model)
                && !sys::llama_model_is_diffusion(model)
        }
    }

    /// The chat template in the file.
    pub fn template(&self) -> Option<String> {
        // SAFETY: the model lives, null asks for the default, and the text belongs to the model.
        let text =
            unsafe { owned(sys::llama_model_chat_template(self.model.as_ptr(), ptr::null())) };
        (!text.is_empty()).then_some(text)
    }

    /// Number of tokens in the vocabulary.
    pub fn vocabulary(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        let tokens = unsafe { sys::llama_vocab_n_tokens(self.vocab.as_ptr()) };
        usize::try_from(tokens).unwrap_or(0)
    }

    /// Whether the model says by this token that it has ended.
    pub fn is_end(&self, token: Token) -> bool {
        let known = usize::try_from(token).is_ok_and(|token| token < self.vocabulary());
        // SAFETY: the vocabulary lives as long as the model, and has the token.
        known && unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), token) }
    }

    /// The tokens of a text. Names of control tokens in it stand for them.
    ///
    /// # Errors
    /// A text that is too long to count.
    pub fn tokenize(&self, text: &str) -> Result<Vec<Token>, EngineError> {
        let too_long = EngineError::Text { what: "it is longer than 2 GiB" };
        let Ok(bytes) = i32::try_from(text.len()) else { return Err(too_long) };
        let mut tokens = vec![0; text.len() + 2];
        for _ in 0..2 {
            let room = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            // SAFETY: the vocabulary lives; the lengths are those of the text and the buffer.
            let count = unsafe {
                sys::llama_tokenize(
                    self.vocab.as_ptr(),
                    text.as_ptr().cast(),
                    bytes,
                    tokens.as_mut_ptr(),
                    room,
                    true,
                    true,
                )
            };
            match usize::try_from(count) {
                Ok(count) => {
                    tokens.truncate(count);
                    return Ok(tokens);
                }
                Err(_) if count == i32::MIN => break,
                Err(_) => tokens.resize(usize::try_from(count.unsigned_abs()).unwrap_or(0), 0),
            }
        }
        Err(too_long)
    }

    /// The bytes that a token stands for; control tokens stand for none. They need not be whole
    /// characters.
    pub fn piece(&self, token: Token) -> Vec<u8> {
        if usize::try_from(token).is_ok_and(|token| token >= self.vocabulary()) || token < 0 {
            return Vec::new();
        }
        let mut piece = vec![0u8; 64];
        for _ in 0..2 {
            let room = i32::try_from(piece.len()).unwrap_or(i32::MAX);
            let at = piece.as_mut_ptr().cast();
            // SAFETY: the vocabulary lives and has the token; no more than `room` is written.
            let count = unsafe {
                sys::llama_token_to_piece(self.vocab.as_ptr(), token, at, room, 0, false)
            };
            if let Ok(count) = usize::try_from(count) {
                piece.truncate(count);
                return piece;
            }
            piece.resize(usize::try_from(count.unsigned_abs()).unwrap_or(0), 0);
        }
        Vec::new()
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: contexts keep their model alive, so that nobody uses it any more.
        unsafe { sys::llama_model_free(self.model.as_ptr()) };
    }
}

/// Puts messages (role, text) into a template, ready for the assistant's answer. `None` when
/// llama.cpp does not know the template.
///
/// # Errors
/// Text with a zero byte in it.
pub(crate) fn apply_template(
    template: &str,
    messages: &[(&str, &str)],
) -> Result<Option<String>, EngineError> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| EngineError::Text { what: "it has a zero byte in it" })
    };
    let template = text(template)?;
    let mut texts = Vec::with_capacity(messages.len());
    for (role, content) in messages {
        texts.push((text(role)?, text(content)?));
    }
    let chat: Vec<sys::llama_chat_message> = texts
        .iter()
        .map(|(role, content)| sys::llama_chat_message {
            role: role.as_ptr(),
            content: content.as_ptr(),
        })
        .collect();
    let mut out = vec![0u8; 1024 + 2 * messages.iter().map(|(_, text)| text.len()).sum::<usize>()];
    for _ in 0..2 {
        let room = i32::try_from(out.len()).unwrap_or(i32::MAX);
        let at = out.as_mut_ptr().cast();
        // SAFETY: all strings end with 0 and live in `texts`; no more than `room` is written.
        let length = unsafe {
            sys::llama_chat_apply_template(
                template.as_ptr(),
                chat.as_ptr(),
                chat.len(),
                true,
                at,
                room,
            )
        };
        let Ok(length) = usize::try_from(length) else { return Ok(None) };
        if let Some(written) = out.get(..length) {
            return Ok(String::from_utf8(written.to_vec()).ok());
        }
        out.resize(length, 0);
    }
    Ok(None)
}

/// The KV cache and the computation of one conversation.
pub struct Context {
    context: NonNull<sys::llama_context>,
    model: Arc<Model>,
    options: ContextOptions,
}

// SAFETY: llama.cpp lets a context move between threads; `&mut` keeps it to one at a time.
unsafe impl Send for Context {}

impl Context {
    /// Makes a context for one conversation, with a scratch sequence beside it.
    ///
    /// # Errors
    /// When llama.cpp cannot.
    pub fn new(model: &Arc<Model>, options: ContextOptions) -> Result<Context, EngineError> {
        // SAFETY: the model lives, and the parameters are llama.cpp's own with numbers changed.
        let context = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = options.ctx;
            params.n_batch = options.batch;
            params.n_ubatch = options.batch;
            params.n_seq_max = 2;
            params.n_threads = options.threads;
            params.n_threads_batch = options.threads;
            params.flash_attn_type = match options.flash_attention {
                true => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
                false => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
            };
            params.type_k = options.kv.of_ggml();
            params.type_v = options.kv.of_ggml();
            params.kv_unified = true;
            // Without it, layers with a sliding window forget, and blocks cannot be cut.
            params.swa_full = true;
            params.no_perf = true;
            sys::llama_init_from_model(model.model.as_ptr(), params)
        };
        let context = NonNull::new(context).ok_or(EngineError::Context { ctx: options.ctx })?;
        Ok(Context { context, model: Arc::clone(model), options })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// How it was made.
    pub fn options(&self) -> &ContextOptions {
        &self.options
    }

    fn memory(&self) -> sys::llama_memory_t {
        // SAFETY: the context lives; its memory lives as long as it does.
        unsafe { sys::llama_get_memory(self.context.as_ptr()) }
    }

    /// Computes tokens of the conversation, of which the first is at `position`, in one batch. The
    /// logits of the last one are kept.
    ///
    /// # Errors
    /// When llama.cpp refuses; the conversation may then hold some of them.
    pub fn decode(&mut self, tokens: &[Token], position: usize) -> Result<(), EngineError> {
        let failed = |code| EngineError::Decode { position, tokens: tokens.len(), code };
        let count = i32::try_from(tokens.len()).map_err(|_| failed(-1))?;
        let first = i32::try_from(position).map_err(|_| failed(-1))?;
        let end = first.checked_add(count).ok_or_else(|| failed(-1))?;
        let mut token = tokens.to_vec();
        let mut pos: Vec<sys::llama_pos> = (first..end).collect();
        let mut sequence = [CONVERSATION];
        let mut n_seq_id = vec![1i32; tokens.len()];
        let mut seq_id = vec![sequence.as_mut_ptr(); tokens.len()];
        let mut logits = vec![0i8; tokens.len()];
        let Some(last) = logits.last_mut() else { return Ok(()) };
        *last = 1;
        let batch = sys::llama_batch {
            n_tokens: count,
            token: token.as_mut_ptr(),
            embd: ptr::null_mut(),
            pos: pos.as_mut_ptr(),
            n_seq_id: n_seq_id.as_mut_ptr(),
            seq_id: seq_id.as_mut_ptr(),
            logits: logits.as_mut_ptr(),
        };
        // SAFETY: the context lives, and all arrays have `count` elements and outlive the call.
        let code = unsafe { sys::llama_decode(self.context.as_ptr(), batch) };
        if code == 0 { Ok(()) } else { Err(failed(code)) }
    }

    /// The logits of the last token of the last decode; empty before the first.
    pub fn logits(&mut self) -> &[f32] {
        let count = self.model.vocabulary();
        // SAFETY: the context lives. The row has as many elements as the vocabulary has tokens, and
        // stays as it is until the next decode, which needs `&mut self`.
        unsafe {
            let row = sys::llama_get_logits_ith(self.context.as_ptr(), -1);
            if row.is_null() { &[] } else { std::slice::from_raw_parts(row, count) }
        }
    }

    /// Forgets the conversation from `position` on. False when llama.cpp cannot; then nothing of
    /// it may be used any more but after a `truncate(0)`, which never fails.
    pub fn truncate(&mut self, position: usize) -> bool {
        let from = i32::try_from(position).unwrap_or(i32::MAX);
        // SAFETY: the context lives.
        unsafe { sys::llama_memory_seq_rm(self.memory(), CONVERSATION, from, -1) }
    }

    fn clear_scratch(&mut self) {
        // SAFETY: the context lives. To remove a whole sequence never fails.
        unsafe { sys::llama_memory_seq_rm(self.memory(), SCRATCH, -1, -1) };
    }

    fn copy(&mut self, from: sys::llama_seq_id, to: sys::llama_seq_id, span: (i32, i32)) {
        // SAFETY: the context lives and has both sequences, in one stream of cells.
        unsafe { sys::llama_memory_seq_cp(self.memory(), from, to, span.0, span.1) };
    }

    /// The KV of tokens `first..first + tokens` of the conversation, as llama.cpp's state of one
    /// sequence, in `out` (whose length becomes that of the state). Empty when llama.cpp fails.
    pub fn export(&mut self, first: usize, tokens: usize, out: &mut Vec<u8>) {
        out.clear();
        let Some(span) = span(first, tokens) else { return };
        self.clear_scratch();
        self.copy(CONVERSATION, SCRATCH, span);
        // SAFETY: the context lives and has the sequence; no more than the length is written.
        let written = unsafe {
            let context = self.context.as_ptr();
            let bytes = sys::llama_state_seq_get_size_ext(context, SCRATCH, 0);
            out.resize(bytes, 0);
            sys::llama_state_seq_get_data_ext(context, out.as_mut_ptr(), bytes, SCRATCH, 0)
        };
        self.clear_scratch();
        if written != out.len() {
            out.clear();
        }
    }

    /// The reverse of [`Context::export`]: puts the KV of tokens `first..first + tokens`, which the
    /// conversation must not have, behind it. False when llama.cpp refuses them; nothing is
    /// changed then.
    pub fn import(&mut self, bytes: &[u8], first: usize, tokens: usize) -> bool {
        let Some(span) = span(first, tokens) else { return false };
        // SAFETY: the context lives and has the sequence; llama.cpp reads no more than the length.
        let read = unsafe {
            sys::llama_state_seq_set_data_ext(
                self.context.as_ptr(),
                bytes.as_ptr(),
                bytes.len(),
                SCRATCH,
                0,
            )
        };
        let good = read == bytes.len();
        if good {
            self.copy(SCRATCH, CONVERSATION, span);
        }
        self.clear_scratch();
        good
    }
}

fn span(first: usize, tokens: usize) -> Option<(i32, i32)> {
    let end = i32::try_from(first.checked_add(tokens)?).ok()?;
    Some((i32::try_from(first).ok()?, end))
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        unsafe { sys::llama_free(self.context.as_ptr()) };
    }
}

/// Draws tokens at random, from the 40 likeliest that make up 95 %, at a temperature.
pub struct Sampler(NonNull<sys::llama_sampler>);

// SAFETY: a sampler has no thread-local state; `&mut` keeps it to one thread at a time.
unsafe impl Send for Sampler {}

impl Sampler {
    /// A sampler that draws the same from the same logits for the same seed.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn new(seed: u32, temperature: f32) -> Result<Sampler, EngineError> {
        // SAFETY: the chain owns the samplers that are added to it.
        let chain = unsafe {
            let chain = sys::llama_sampler_chain_init(sys::llama_sampler_chain_default_params());
            sys::llama_sampler_chain_add(chain, sys::llama_sampler_init_top_k(40));
            sys::llama_sampler_chain_add(chain, sys::llama_sampler_init_top_p(0.95, 1));
            sys::llama_sampler_chain_add(chain, sys::llama_sampler_init_temp(temperature));
            sys::llama_sampler_chain_add(chain, sys::llama_sampler_init_dist(seed));
            chain
        };
        NonNull::new(chain).map(Sampler).ok_or(EngineError::Context { ctx: 0 })
    }

    /// Draws one of the vocabulary by its logits. `None` when there are none.
    pub fn draw(&mut self, context: &mut Context) -> Option<Token> {
        if context.logits().is_empty() {
            return None;
        }
        // SAFETY: both live, and the last decode left logits.
        let token =
            unsafe { sys::llama_sampler_sample(self.0.as_ptr(), context.context.as_ptr(), -1) };
        Some(token)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // SAFETY: nobody else has it; the samplers of the chain go with it.
        unsafe { sys::llama_sampler_free(self.0.as_ptr()) };
    }
}
