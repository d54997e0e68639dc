//! The subcommands that change what the daemon holds: `forget`, `pin`, `unpin`, `drain`.

use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

use kvtide_client::{Drained, ForgetWhat, Inspect, PinId};
use serde::Serialize;

use super::args::{Forget, ForgetWhat as Asked, Pin};
use super::error::CliError;
use super::namespaces;
use super::out::Out;
use super::remote::Remote;
use crate::units::{bytes, count, span};

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
    if !out.json
        && let Some(catalog) = remote.stats()?.catalog
    {
        eprintln!(
            "{} blocks ({}) are only in RAM; writing the hottest of them for {} at most",
            count(catalog.dirty_blocks),
            bytes(catalog.dirty_bytes),
            span(deadline)
        );
    }
    let drained = remote.drain(deadline)?;
    out.emit(&drained, drained_text)
}

fn drained_text(drained: &Drained) -> String {
    let mut text = format!(
        "drained: of {} blocks ({}) only in RAM, {} ({}) were written to nvme\n\
         a restart finds {} blocks ({}) on nvme\n",
        count(drained.blocks_before),
        bytes(drained.bytes_before),
        count(drained.blocks_written),
        bytes(drained.bytes_written),
        count(drained.blocks_on_nvme),
        bytes(drained.bytes_on_nvme),
    );
    if drained.blocks_lost > 0 {
        text.push_str(&format!(
            "{} blocks ({}), the coldest ones, are only in RAM still: they will be lost with the \
             daemon, unless the next one takes its RAM over (see `kvtide status`)\n",
            count(drained.blocks_lost),
            bytes(drained.bytes_lost),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_says_what_was_what_is_and_what_would_be_lost() {
        let mut drained = Drained {
            blocks_before: 1000,
            bytes_before: 64 << 20,
            blocks_written: 1000,
            bytes_written: 64 << 20,
            blocks_on_nvme: 1200,
            bytes_on_nvme: 75 << 20,
            ..Drained::default()
        };
        let text = drained_text(&drained);
        assert!(text.contains("of 1,000 blocks (64.0 MiB) only in RAM"), "{text}");
        assert!(text.contains("finds 1,200 blocks") && !text.contains("lost"), "{text}");
        (drained.blocks_lost, drained.bytes_lost) = (7, 7 << 16);
        assert!(drained_text(&drained).contains("7 blocks (448.0 KiB), the coldest"));
    }
}
