//! The subcommands that change what the daemon holds: `forget`, `pin`, `unpin`, `drain`.

use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

use kvtide_client::{ForgetWhat, Inspect, PinId};
use serde::Serialize;

use super::args::{Forget, ForgetWhat as Asked, Pin};
use super::error::CliError;
use super::namespaces;
use super::out::Out;
use super::remote::Remote;
use crate::units::{count, span};

#[derive(Serialize)]
struct Forgotten {
    blocks: u64,
}

#[derive(Serialize)]
struct PinnedOut {
    pin: u64,
    blocks: u32,
    seconds: u64,
}

#[derive(Serialize)]
struct Unpinned {
    blocks: u64,
}

#[derive(Serialize)]
struct DrainedOut {
    blocks_written: u64,
    blocks_lost: u64,
}

pub(crate) fn forget(args: &Forget, remote: &Remote, out: Out) -> Result<(), CliError> {
    let (what, question) = match &args.what {
        Asked::Key { key } => {
            let row = remote.block(key)?;
            let question = format!("Forget block {} and all that follow it?", row.key);
            (ForgetWhat::Keys(row.namespace, vec![row.key]), question)
        }
        Asked::Conversation { namespace, conversation } => {
            let known = remote.namespaces()?;
            let row = namespaces::find(&known, namespace)?;
            let question = format!(
                "Forget what conversation {conversation} stored in namespace {} of tenant {}?",
                row.id.0, row.tenant
            );
            (ForgetWhat::Conversation(row.id, *conversation), question)
        }
        Asked::Namespace { namespace } => {
            let known = remote.namespaces()?;
            let row = namespaces::find(&known, namespace)?;
            let query = Inspect { namespaces: Some(vec![row.id]), ..Inspect::default() };
            let blocks = remote.inspect_all(query, usize::MAX)?.len() as u64;
            let question = format!(
                "Forget all {} blocks of namespace {} ({}) of tenant {}, for good?",
                count(blocks),
                row.id.0,
                namespaces::model(&row.namespace),
                row.tenant
            );
            (ForgetWhat::Namespace(row.id), question)
        }
    };
    if !args.yes && !agreed(&question, out)? {
        return Err(CliError::failed("nothing was forgotten"));
    }
    let blocks = remote.forget(&what)?;
    out.emit(&Forgotten { blocks }, |done| format!("{} blocks forgotten\n", count(done.blocks)))
}

fn agreed(question: &str, out: Out) -> Result<bool, CliError> {
    if out.json || !io::stdin().is_terminal() {
        return Err(CliError::Usage(format!(
            "{question} Say so with --yes; there is nobody to ask here"
        )));
    }
    let mut stderr = io::stderr().lock();
    write!(stderr, "{question} [y/N] ").and_then(|()| stderr.flush()).map_err(CliError::failed)?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(CliError::failed)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

pub(crate) fn pin(args: &Pin, remote: &Remote, out: Out) -> Result<(), CliError> {
    let last = remote.block(&args.key)?;
    let keys = remote.chain(&last)?;
    let pinned = remote.pin(last.namespace, &keys, args.time)?;
    let done = PinnedOut { pin: pinned.pin.0, blocks: pinned.blocks, seconds: args.time.as_secs() };
    out.emit(&done, |done| {
        format!(
            "pin {}: {} of {} blocks are kept for {} at most (`kvtide unpin {}` ends it)\n",
            done.pin,
            count(u64::from(done.blocks)),
            count(keys.len() as u64),
            span(args.time),
            done.pin
        )
    })
}

pub(crate) fn unpin(pin: u64, remote: &Remote, out: Out) -> Result<(), CliError> {
    let blocks = remote.unpin(PinId(pin))?;
    out.emit(&Unpinned { blocks }, |done| format!("{} blocks unpinned\n", count(done.blocks)))
}

pub(crate) fn drain(deadline: Duration, remote: &Remote, out: Out) -> Result<(), CliError> {
    let drained = remote.drain(deadline)?;
    let done =
        DrainedOut { blocks_written: drained.blocks_written, blocks_lost: drained.blocks_lost };
    out.emit(&done, |done| {
        let mut text = format!("drained: {} blocks written to nvme\n", count(done.blocks_written));
        if done.blocks_lost > 0 {
            text.push_str(&format!(
                "{} blocks could not be written and will be lost with the daemon; \
                 see `kvtide status` for the state of nvme\n",
                count(done.blocks_lost)
            ));
        }
        text
    })?;
    if done.blocks_lost > 0 { Err(CliError::Found) } else { Ok(()) }
}
