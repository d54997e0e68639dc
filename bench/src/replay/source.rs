//! Where the requests of a replay come from: the trace, once or for a time.

use std::time::{Duration, Instant};

use super::{ReplayArgs, wire::Job};
use crate::trace::TraceReader;

/// Hands out requests in the order of the trace.
#[derive(Debug)]
pub(super) struct Source {
    args: ReplayArgs,
    reader: TraceReader,
    pass: u64,
    handed_out: u64,
    limit: u64,
    expected: u64,
    /// When the first request of this pass was handed out, and its time in the trace.
    pass_start: Option<(Instant, u64)>,
}

impl Source {
    pub(super) fn open(args: &ReplayArgs) -> anyhow::Result<Source> {
        let in_trace = TraceReader::count(&args.trace)?;
        let limit = args.requests.unwrap_or(u64::MAX);
        let expected = if args.duration.is_some() { limit } else { limit.min(in_trace) };
        Ok(Source {
            args: args.clone(),
            reader: TraceReader::open(&args.trace)?,
            pass: 0,
            handed_out: 0,
            limit,
            expected: if expected == u64::MAX { in_trace } else { expected },
            pass_start: None,
        })
    }

    /// How many requests there will be, for the progress bar; a guess when time sets the end.
    pub(super) fn requests_expected(&self) -> u64 {
        self.expected
    }

    /// Hands out nothing more.
    pub(super) fn end(&mut self) {
        self.limit = 0;
    }

    /// The next request; waits for its time where the trace's times are kept.
    pub(super) fn next(&mut self, started: Instant) -> anyhow::Result<Option<Job>> {
        let over = |after: Duration| started.elapsed() >= after;
        if self.handed_out >= self.limit || self.args.duration.is_some_and(over) {
            return Ok(None);
        }
        let request = match self.reader.next_request()? {
            Some(request) => request,
            None if self.args.duration.is_none() => return Ok(None),
            None => {
                self.reader = TraceReader::open(&self.args.trace)?;
                self.pass += 1;
                self.pass_start = None;
                match self.reader.next_request()? {
                    Some(request) => request,
                    None => return Ok(None),
                }
            }
        };
        let (since, at_ms) = *self.pass_start.get_or_insert((Instant::now(), request.at_ms));
        if let Some(speed) = self.args.speed {
            let due_ms = request.at_ms.saturating_sub(at_ms) as f64 / speed;
            let due = Duration::from_secs_f64((due_ms / 1e3).min(1e9));
            std::thread::sleep(due.saturating_sub(since.elapsed()));
        }
        let job = Job { index: self.handed_out, pass: self.pass, path: request.path };
        self.handed_out += 1;
        Ok(Some(job))
    }
}
