//! Faults by schedule.
//!
//! A schedule is a list with commas: `CALL@N=KIND` fails the N-th call of that name, `CALL@N+=KIND`
//! the N-th and all after it, `CALL=KIND` every one; `*` is any call. A kind is a name of
//! [`KINDS`], a number (any code, also one that no header has), `hang`, which blocks the call, or
//! `stall`, which lets the call queue its work but blocks the stream in front of it (a call that
//! queues none hangs). Calls are counted from the moment the schedule was read.
//!
//! A fault with a code that stays, in a call that queues work, is queued in place of that work:
//! the call itself succeeds, and the error shows where the driver would show it, in what comes
//! after. Any other fault is what the call returns.
//!
//! Schedules come from `FAKECUDA_FAULTS`, from [`inject`], and from the file
//! `FAKECUDA_FAULT_FILE`, which is read again at each call. What hangs or stalls goes on when the
//! schedule that it came from was replaced or its file is gone; from the environment, never.

use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::config::{config, give_up};

/// Names of codes.
const KINDS: [(&str, u32); 21] = [
    ("invalid_value", 1),
    ("oom", 2),
    ("not_initialized", 3),
    ("stub", 34),
    ("too_old", 35),
    ("no_device", 100),
    ("invalid_context", 201),
    ("map_failed", 205),
    ("ecc", 214),
    ("invalid_ptx", 218),
    ("unsupported_ptx", 222),
    ("operating_system", 304),
    ("invalid_handle", 400),
    ("not_found", 500),
    ("illegal_address", 700),
    ("launch_timeout", 702),
    ("launch_failed", 719),
    ("not_supported", 801),
    ("system_not_ready", 802),
    ("mismatch", 803),
    ("unknown", 999),
];

/// How often a call that hangs looks whether it may go on.
const HANG_POLL: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Code(u32),
    Hang,
    Stall,
}

/// What is to happen to a call.
#[derive(Clone, Copy)]
pub(crate) enum Fault {
    Code(u32),
    Hang(Source),
    Stall(Source),
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Rule {
    call: String,
    from: u64,
    and_after: bool,
    kind: Kind,
    seen: u64,
}

#[derive(Default)]
struct Schedules {
    environment: Vec<Rule>,
    injected: Vec<Rule>,
    /// Raised by each injection.
    injection: u64,
    file: Vec<Rule>,
    file_text: String,
}

/// Where a rule came from.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    Environment,
    Injection(u64),
    File,
}

static SCHEDULES: LazyLock<Mutex<Schedules>> = LazyLock::new(|| {
    let environment =
        parse(&config().faults).unwrap_or_else(|why| give_up(format!("FAKECUDA_FAULTS: {why}")));
    Mutex::new(Schedules { environment, ..Schedules::default() })
});

/// What is to happen to this call of `name`.
pub(crate) fn next(name: &str) -> Option<Fault> {
    let mut schedules = SCHEDULES.lock().unwrap_or_else(PoisonError::into_inner);
    read_file(&mut schedules);
    let injection = schedules.injection;
    // All rules count the call, also behind one that fires.
    let found = [
        (fire(&mut schedules.environment, name), Source::Environment),
        (fire(&mut schedules.injected, name), Source::Injection(injection)),
        (fire(&mut schedules.file, name), Source::File),
    ];
    found.into_iter().find_map(|(kind, source)| {
        kind.map(|kind| match kind {
            Kind::Code(code) => Fault::Code(code),
            Kind::Hang => Fault::Hang(source),
            Kind::Stall => Fault::Stall(source),
        })
    })
}

/// Blocks for as long as the schedule says that calls hang.
pub(crate) fn hang(source: Source) {
    while hangs(source) {
        std::thread::sleep(HANG_POLL);
    }
}

/// Replaces what was injected. Says whether the schedule could be read.
pub(crate) fn inject(text: &str) -> bool {
    let Ok(rules) = parse(text) else { return false };
    let mut schedules = SCHEDULES.lock().unwrap_or_else(PoisonError::into_inner);
    schedules.injected = rules;
    schedules.injection += 1;
    true
}

fn hangs(source: Source) -> bool {
    match source {
        Source::Environment => true,
        Source::Injection(injection) => {
            SCHEDULES.lock().unwrap_or_else(PoisonError::into_inner).injection == injection
        }
        Source::File => config().fault_file.as_ref().is_some_and(|path| path.exists()),
    }
}

/// Takes the file's rules over when its text changed, so that calls are counted from then on.
fn read_file(schedules: &mut Schedules) {
    let Some(path) = &config().fault_file else { return };
    let text = std::fs::read_to_string(path).unwrap_or_default();
    if text != schedules.file_text {
        schedules.file =
            parse(&text).unwrap_or_else(|why| give_up(format!("FAKECUDA_FAULT_FILE: {why}")));
        schedules.file_text = text;
    }
}

fn fire(rules: &mut [Rule], name: &str) -> Option<Kind> {
    let mut kind = None;
    for rule in rules.iter_mut().filter(|rule| rule.call == "*" || rule.call == name) {
        rule.seen += 1;
        if rule.seen == rule.from || (rule.and_after && rule.seen > rule.from) {
            kind = kind.or(Some(rule.kind));
        }
    }
    kind
}

fn parse(text: &str) -> Result<Vec<Rule>, String> {
    text.split([',', '\n']).map(str::trim).filter(|rule| !rule.is_empty()).map(rule).collect()
}

fn rule(text: &str) -> Result<Rule, String> {
    let bad = || format!("{text:?} is not CALL[@N[+]]=KIND");
    let (call, kind) = text.split_once('=').ok_or_else(bad)?;
    let (call, from) = match call.split_once('@') {
        Some((call, from)) => (call, from),
        None => (call, "1+"),
    };
    let (from, and_after) = match from.strip_suffix('+') {
        Some(from) => (from, true),
        None => (from, false),
    };
    let from: u64 = from.trim().parse().map_err(|_| bad())?;
    let known = KINDS.iter().find(|(name, _)| *name == kind.trim()).map(|(_, code)| *code);
    let kind = match (kind.trim(), known) {
        ("hang", _) => Kind::Hang,
        ("stall", _) => Kind::Stall,
        (_, Some(code)) => Kind::Code(code),
        (number, None) => Kind::Code(number.parse().map_err(|_| bad())?),
    };
    let is_call = call == "*" || crate::entry::NAMES.contains(&call);
    if from == 0 || !is_call {
        return Err(format!("{text:?} names no call of the fake"));
    }
    Ok(Rule { call: call.to_owned(), from, and_after, kind, seen: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_fire_at_their_call_and_all_of_them_count() {
        let mut rules =
            parse("cuMemAlloc_v2@2=oom, cuMemAlloc_v2@4+=ecc,cuInit=stub,*@6=917").unwrap();
        let fired: Vec<_> = (0..5).map(|_| fire(&mut rules, "cuMemAlloc_v2")).collect();
        let code = |code| Some(Kind::Code(code));
        assert_eq!(fired, [None, code(2), None, code(214), code(214)]);
        assert_eq!(fire(&mut rules, "cuMemFree_v2"), code(917), "the sixth call of any name");
        assert_eq!(fire(&mut rules, "cuInit"), code(34));
        assert_eq!(fire(&mut rules, "cuInit"), code(34));
    }

    #[test]
    fn a_schedule_with_a_typo_is_refused() {
        for bad in ["cuMemAlloc_v2", "cuMemAlloc_v2@x=oom", "cuMemAlloc_v2@0=oom", "cuNo@1=oom"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse("cuMemAlloc_v2@1=oops").is_err());
        assert_eq!(parse("").unwrap(), []);
    }
}
