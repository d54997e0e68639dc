//! A time that grows with two quantities, learned from what was seen.
//!
//! `time = a * x + b * y`, with neither factor below zero. The fit is by least squares of relative
//! errors, in which what lies far off counts little, so that a few odd observations do not move it.
//! Only the latest observations are kept. Where they do not tell `x` and `y` apart, `x` explains
//! them.

use std::collections::VecDeque;

use super::request::Timestamp;

/// Observations before anything is said.
const SEEN_MIN: usize = 3;

/// Rounds of weighing and fitting.
const ROUNDS: usize = 12;

/// How strongly `b` is held at zero where the observations do not say otherwise.
const PULL: f64 = 1e-3;

/// The least spread of relative errors: what is off by less is not odd.
const SPREAD_MIN: f64 = 0.02;

/// Observations within so much of what is expected need no new fit each time.
const GOOD_ENOUGH: f64 = 0.05;

/// Observations after which there is a new fit in any case.
const FIT_EVERY: u32 = 8;

#[derive(Clone, Copy, Debug)]
struct Seen {
    x: f64,
    y: f64,
    us: f64,
    at: Timestamp,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    seen: VecDeque<Seen>,
    keep: usize,
    keep_ms: u64,
    since_fit: u32,
    fit: Option<(f64, f64)>,
}

impl Line {
    /// One that keeps so many observations, each for so long at most.
    pub(crate) fn new(keep: usize, keep_ms: u64) -> Line {
        Line { seen: VecDeque::with_capacity(keep), keep, keep_ms, since_fit: 0, fit: None }
    }

    /// Learns one observation. `x` and `us` are above zero, `y` is not below.
    pub(crate) fn note(&mut self, now: Timestamp, x: f64, y: f64, us: f64) {
        let off = self.expect(x, y).map(|expected| (expected / us - 1.0).abs());
        while self.seen.len() >= self.keep
            || self.seen.front().is_some_and(|seen| seen.at.plus_ms(self.keep_ms) < now)
        {
            self.seen.pop_front();
        }
        self.seen.push_back(Seen { x, y, us, at: now });
        self.since_fit += 1;
        if off.is_none_or(|off| off > GOOD_ENOUGH) || self.since_fit >= FIT_EVERY {
            self.fit();
        }
    }

    /// Microseconds to expect; `None` while too little was seen.
    pub(crate) fn expect(&self, x: f64, y: f64) -> Option<f64> {
        self.fit.map(|(a, b)| a * x + b * y)
    }

    /// The two factors, microseconds for one of `x` and for one of `y`.
    pub(crate) fn factors(&self) -> Option<(f64, f64)> {
        self.fit
    }

    /// Forgets all but the latest `count` observations.
    pub(crate) fn keep_latest(&mut self, count: usize) {
        while self.seen.len() > count {
            self.seen.pop_front();
        }
        self.fit();
    }

    /// When it last learned.
    pub(crate) fn last_at(&self) -> Timestamp {
        self.seen.back().map(|seen| seen.at).unwrap_or_default()
    }

    fn fit(&mut self) {
        self.since_fit = 0;
        if self.seen.len() < SEEN_MIN {
            self.fit = None;
            return;
        }
        let mut rates: Vec<f64> = self.seen.iter().map(|seen| seen.us / seen.x).collect();
        let mut fit = (median(&mut rates), 0.0);
        for _ in 0..ROUNDS {
            let off = |seen: &Seen| ((fit.0 * seen.x + fit.1 * seen.y) / seen.us - 1.0).abs();
            let mut offs: Vec<f64> = self.seen.iter().map(off).collect();
            let spread = (1.4826 * median(&mut offs)).max(SPREAD_MIN);
            let weigh = |seen: &Seen| 1.0 / (1.0 + (off(seen) / (2.385 * spread)).powi(2));
            let weighed: Vec<(f64, Seen)> =
                self.seen.iter().map(|seen| (weigh(seen), *seen)).collect();
            fit = least_squares(&weighed);
        }
        self.fit = Some(fit);
    }
}

/// The factors that make the sum of weighted squares of relative errors the least.
fn least_squares(weighed: &[(f64, Seen)]) -> (f64, f64) {
    let (mut xx, mut xy, mut yy, mut x1, mut y1) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (weight, seen) in weighed {
        let (x, y) = (seen.x / seen.us, seen.y / seen.us);
        xx += weight * x * x;
        xy += weight * x * y;
        yy += weight * y * y;
        x1 += weight * x;
        y1 += weight * y;
    }
    let only_x = if xx > 0.0 { x1 / xx } else { 0.0 };
    let held = yy * (1.0 + PULL);
    let determinant = xx * held - xy * xy;
    if determinant <= 0.0 {
        return (only_x, 0.0);
    }
    let a = (x1 * held - y1 * xy) / determinant;
    let b = (y1 * xx - x1 * xy) / determinant;
    if b < 0.0 {
        return (only_x, 0.0);
    }
    if a < 0.0 {
        return (0.0, y1 / held);
    }
    (a, b)
}

/// The middle one. Orders the list.
fn median(list: &mut [f64]) -> f64 {
    let middle = list.len() / 2;
    if list.is_empty() {
        return 0.0;
    }
    *list.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seen(line: &mut Line, at: u64, (a, b): (f64, f64), (x, y): (f64, f64), times: f64) {
        line.note(Timestamp(at), x, y, (a * x + b * y) * times);
    }

    fn near(line: &Line, (a, b): (f64, f64), (x, y): (f64, f64), part: f64) -> bool {
        let real = a * x + b * y;
        line.expect(x, y).is_some_and(|found| (found - real).abs() <= part * real)
    }

    #[test]
    fn nothing_is_said_before_enough_was_seen() {
        let mut line = Line::new(16, 1000);
        for at in 0..2 {
            line.note(Timestamp(at), 10.0, 0.0, 100.0);
            assert_eq!(line.expect(10.0, 0.0), None);
        }
        line.note(Timestamp(2), 10.0, 0.0, 100.0);
        assert!(near(&line, (10.0, 0.0), (7.0, 0.0), 0.01));
    }

    #[test]
    fn what_cannot_be_told_apart_is_explained_by_x() {
        let mut line = Line::new(16, 1000);
        for at in 0..16 {
            line.note(Timestamp(at), 1e6, 1.0, 500.0);
        }
        assert!(near(&line, (500.0 / 1e6, 0.0), (3e6, 1.0), 0.01), "{:?}", line.factors());
    }

    #[test]
    fn old_observations_are_forgotten_by_number_and_by_age() {
        let mut line = Line::new(8, 1000);
        for at in 0..8 {
            line.note(Timestamp(at), 10.0, 0.0, 100.0);
        }
        for at in 8..16 {
            line.note(Timestamp(at), 10.0, 0.0, 900.0);
        }
        assert!(near(&line, (90.0, 0.0), (10.0, 0.0), 0.01));
        for at in 0..3 {
            line.note(Timestamp(5_000_000 + at), 10.0, 0.0, 10.0);
        }
        assert!(near(&line, (1.0, 0.0), (10.0, 0.0), 0.01), "{:?}", line.factors());
        line.note(Timestamp(5_000_009), 10.0, 0.0, 70.0);
        line.keep_latest(1);
        assert_eq!(line.expect(10.0, 0.0), None);
    }

    proptest! {
        #[test]
        fn both_factors_are_found_although_a_quarter_is_absurd(
            a in 1.0f64..1000.0,
            // Where the context costs as much as the tokens. If it is far below the contexts that
            // are seen, nothing can be told of the tokens' own part.
            half_at in 10_000.0f64..200_000.0,
            sizes in proptest::collection::vec((64.0f64..8192.0, 0.0f64..100_000.0), 64),
            noise in proptest::collection::vec(0.95f64..1.05, 64),
            odd in 10.0f64..1000.0,
        ) {
            let real = (a, a / half_at);
            let mut line = Line::new(64, u64::MAX / 2000);
            for (at, ((tokens, context), noise)) in sizes.iter().zip(&noise).enumerate() {
                let absurd = if at % 4 == 3 { odd } else { 1.0 };
                let xy = (*tokens, tokens * (context + tokens / 2.0));
                seen(&mut line, at as u64, real, xy, noise * absurd);
            }
            for (tokens, context) in [(256.0, 0.0), (4096.0, 20_000.0), (1024.0, 90_000.0)] {
                let xy = (tokens, tokens * (context + tokens / 2.0));
                prop_assert!(near(&line, real, xy, 0.12), "{real:?} {:?}", line.factors());
            }
        }

        #[test]
        fn whatever_is_seen_no_time_is_negative_or_not_a_number(
            all in proptest::collection::vec(
                (1e-3f64..1e12, 0.0f64..1e18, 1.0f64..1e13), 1..80),
            x in 1e-3f64..1e12,
            y in 0.0f64..1e18,
        ) {
            let mut line = Line::new(64, 1000);
            for (at, (x, y, us)) in all.into_iter().enumerate() {
                line.note(Timestamp(at as u64), x, y, us);
            }
            if let Some(us) = line.expect(x, y) {
                prop_assert!(us.is_finite() && us >= 0.0, "{us} {:?}", line.factors());
            }
        }
    }
}
