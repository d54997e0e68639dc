//! Steps up and down the degradation ladder, by measured pressure and with hysteresis.
//!
//! Invariants: one step at a time; a step is entered after pressure was high for 2 s without a
//! pause, and left after it was lower by a margin for 5 s, both counted from the last change at
//! the earliest.

use super::Catalog;
use super::copies::slot_bytes;
use super::event::Action;
use super::request::Timestamp;
use super::slot_tier::{Home, Leave, View};
use super::table::{HostCopy, NvmeCopy, step_of};
use crate::catalog::ladder::{LadderReport, Pressure, Signal, Step};

/// Pressure has to last so long before the next step is taken, milliseconds.
const RISE_MS: u64 = 2_000;

/// Relief has to last so long before a step is taken back, milliseconds.
const FALL_MS: u64 = 5_000;

/// A step is left this far below where it is entered, percent.
const MARGIN: u8 = 15;

/// Of the time after which an operation takes nvme offline: one so old is full pressure.
const NVME_AGE_PART: u64 = 10;

/// Blocks that are given up unwritten in one go.
const UNWRITTEN_MAX: usize = 256;

/// Blocks that one tick drops from host RAM.
const DROPPED_MAX: usize = 256;

/// Occupancy below which nothing more is dropped, percent: that of [`Step::DropTails`], left.
const RELIEVED_AT: u8 = 88 - MARGIN;

/// Pressure at which a step is entered, percent.
fn enters_at(step: Step) -> u8 {
    match step {
        Step::Normal => 0,
        Step::NoPrefetch => 70,
        Step::NoColdSpill => 80,
        Step::DropTails => 88,
        Step::SharedOnly => 94,
        Step::Bypass => 98,
    }
}

/// Where a node is.
#[derive(Default)]
pub(super) struct Ladder {
    step: Step,
    since: Timestamp,
    why: Signal,
    /// Since when the pressure has been high enough for the next step.
    high: Option<Timestamp>,
    /// Since when it has been low enough to take this one back.
    low: Option<Timestamp>,
    pressure: Pressure,
    raised: u64,
    lowered: u64,
}

impl Ladder {
    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn report(&self, now: Timestamp) -> LadderReport {
        LadderReport {
            step: self.step,
            for_ms: now.0.saturating_sub(self.since.0) / 1000,
            why: self.why,
            pressure: self.pressure,
            raised: self.raised,
            lowered: self.lowered,
        }
    }

    /// Takes in what was measured. Says which step was left for which one, if that is so.
    fn observe(&mut self, now: Timestamp, pressure: Pressure) -> Option<Step> {
        self.pressure = pressure;
        let demands = |step: Step, percent: u8| {
            let signals = Signal::ALL.into_iter().filter(|signal| signal.most() >= step);
            signals
                .filter(|signal| pressure.of(*signal) >= percent)
                .max_by_key(|signal| pressure.of(*signal))
        };
        let above = self.step.next().and_then(|next| demands(next, enters_at(next)));
        let held = demands(self.step, enters_at(self.step).saturating_sub(MARGIN));
        self.high = above.and(self.high.or(Some(now)));
        self.low = if held.is_some() { None } else { self.low.or(Some(now)) };
        let lasted = |since: Option<Timestamp>, ms: u64| {
            since.is_some_and(|since| since.max(self.since).plus_ms(ms) <= now)
        };
        let from = self.step;
        if let (Some(why), Some(next)) = (above, self.step.next())
            && lasted(self.high, RISE_MS)
        {
            (self.step, self.why) = (next, why);
            self.raised += 1;
        } else if let Some(previous) = self.step.previous()
            && lasted(self.low, FALL_MS)
        {
            self.step = previous;
            self.lowered += 1;
        } else {
            return None;
        }
        (self.since, self.high, self.low) = (now, None, None);
        Some(from)
    }
}

impl Catalog {
    /// With every tick: measures, and takes or takes back a step.
    pub(super) fn climb(&mut self) {
        if self.config.trace_order {
            return;
        }
        let pressure = self.pressure();
        if let Some(from) = self.ladder.observe(self.now, pressure) {
            let LadderReport { step: to, why, pressure, .. } = self.ladder.report(self.now);
            self.actions.push(Action::Degraded { from, to, why, pressure });
        }
        let step = self.ladder.step();
        if step >= Step::DropTails && pressure.occupancy >= RELIEVED_AT {
            self.drop_cold(step >= Step::SharedOnly);
        }
    }

    fn pressure(&self) -> Pressure {
        let capacity = self.host.tier.slots.capacity_bytes();
        let held = match self.nvme_usable() {
            true => self.host.dirty_bytes,
            false => self.counters.pinned_bytes,
        };
        let usual = capacity - capacity / 100 * u64::from(self.config.clean_percent.min(100));
        let occupancy = match held.checked_sub(usual) {
            None => percent(held, usual) / 2,
            Some(more) => 50 + percent(more, capacity - usual) / 2,
        };
        let limits = &self.config.limits;
        let share = |count: usize, most: usize| percent(count as u64, most as u64);
        let queues = share(self.flow.blocks_open, limits.blocks_in_flight)
            .max(share(self.clients.leased_blocks, limits.leased_blocks));
        let age = self.flow.oldest_on_nvme().map_or(0, |since| self.now.0 - since.0);
        let nvme = match &self.nvme {
            None => 0,
            Some(nvme) if nvme.offline.is_some() => 100,
            Some(_) => percent(age / 1000, limits.device_ms / NVME_AGE_PART),
        };
        Pressure { occupancy, queues, nvme }
    }

    /// Drops the ends of the coldest paths, which are in host RAM only. `unshared`: whatever only
    /// one path uses.
    fn drop_cold(&mut self, unshared: bool) {
        for class in 0..self.host.tier.slots.classes() {
            for _ in 0..DROPPED_MAX {
                if self.pressure().occupancy < RELIEVED_AT {
                    return;
                }
                let (table, reuse) = (&self.table, &self.reuse);
                let (now, weigh_cost) = (step_of(self.now), self.config.weigh_cost);
                let (home, unwritten_hold) = (Home::Host, true);
                let view = View { table, reuse, home, now, weigh_cost, unwritten_hold };
                let victim = self.host.tier.victim(class, &view, |index| {
                    let block = table.get(index);
                    let idle = matches!(block.host, HostCopy::Resident { users: 0, .. })
                        && block.nvme == NvmeCopy::Absent;
                    let leaf = table.child(index, |child| !child.is_ghost()).is_none();
                    let shared = block.hits > 1 || table.branches(index);
                    match (block.pins > 0, idle && (leaf || unshared) && !shared) {
                        (true, _) => Leave::Pinned,
                        (false, true) => Leave::Yes,
                        (false, false) => Leave::No,
                    }
                });
                let Some(victim) = victim else { break };
                self.counters.dropped_under_pressure += 1;
                self.evict(Home::Host, victim);
            }
        }
    }

    /// Whether the block is not written while pressure lasts: no lookup has found it.
    pub(super) fn stays_unwritten(&self, index: u32) -> bool {
        let block = self.table.get(index);
        let cold = block.hits == 0 && block.pins == 0;
        cold && self.ladder.step() >= Step::NoColdSpill && self.drain.is_none()
    }

    /// Lets cold blocks leave host RAM unwritten, as many as are too many to be dirty.
    pub(super) fn give_up_cold(&mut self) {
        if self.ladder.step() < Step::NoColdSpill {
            return;
        }
        for _ in 0..UNWRITTEN_MAX {
            let cold = self.must_write_down().then(|| self.next_dirty()).flatten();
            let Some(index) = cold.filter(|index| self.stays_unwritten(*index)) else {
                return;
            };
            self.counters.not_spilled_bytes += slot_bytes(self.table.get(index));
            self.refuse_write(index);
            self.host.in_the_way = self.host.in_the_way.saturating_sub(1);
        }
    }
}

fn percent(part: u64, whole: u64) -> u8 {
    let percent = u128::from(part) * 100 / u128::from(whole.max(1));
    percent.min(100) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(percent: u8) -> Pressure {
        Pressure { queues: percent, ..Pressure::default() }
    }

    /// Observes every 100 ms; the steps with the times at which they were entered.
    fn climb(
        ladder: &mut Ladder,
        from_ms: u64,
        for_ms: u64,
        pressure: impl Fn(u64) -> Pressure,
    ) -> Vec<(u64, Step)> {
        let mut changes = Vec::new();
        for ms in (from_ms..from_ms + for_ms).step_by(100) {
            if ladder.observe(Timestamp(ms * 1000), pressure(ms)).is_some() {
                changes.push((ms, ladder.step()));
            }
        }
        changes
    }

    #[test]
    fn each_step_is_entered_under_pressure_and_left_after_relief() {
        let mut ladder = Ladder::default();
        let up = climb(&mut ladder, 10_000, 20_000, |_| queues(100));
        let expected: Vec<Step> = Step::ALL.into_iter().skip(1).collect();
        assert_eq!(up.iter().map(|(_, step)| *step).collect::<Vec<_>>(), expected);
        assert!(up.windows(2).all(|pair| pair[1].0 - pair[0].0 >= RISE_MS), "{up:?}");
        let down = climb(&mut ladder, 40_000, 40_000, |_| queues(0));
        let expected: Vec<Step> = Step::ALL.into_iter().rev().skip(1).collect();
        assert_eq!(down.iter().map(|(_, step)| *step).collect::<Vec<_>>(), expected);
        assert!(down.windows(2).all(|pair| pair[1].0 - pair[0].0 >= FALL_MS), "{down:?}");
        let report = ladder.report(Timestamp(80_000_000));
        assert_eq!((report.step, report.raised, report.lowered), (Step::Normal, 5, 5));
    }

    #[test]
    fn each_step_stops_at_its_own_pressure_and_holds_down_to_the_margin() {
        for step in Step::ALL.into_iter().skip(1) {
            let mut ladder = Ladder::default();
            climb(&mut ladder, 10_000, 30_000, |_| queues(enters_at(step)));
            assert_eq!(ladder.step(), step);
            let held = climb(&mut ladder, 50_000, 60_000, |_| queues(enters_at(step) - MARGIN));
            assert_eq!(held, [], "{step:?}");
            climb(&mut ladder, 120_000, 8_000, |_| queues(enters_at(step) - MARGIN - 1));
            assert_eq!(Some(ladder.step()), step.previous());
        }
    }

    #[test]
    fn short_peaks_and_short_pauses_change_nothing() {
        let mut ladder = Ladder::default();
        let peaks = |ms: u64| if ms % 2_000 < 1_500 { queues(100) } else { queues(0) };
        assert_eq!(climb(&mut ladder, 0, 60_000, peaks), []);
        climb(&mut ladder, 100_000, 2_100, |_| queues(75));
        assert_eq!(ladder.step(), Step::NoPrefetch);
        let pauses = |ms: u64| if ms % 5_000 < 4_500 { queues(0) } else { queues(75) };
        assert_eq!(climb(&mut ladder, 105_000, 60_000, pauses), []);
    }

    #[test]
    fn no_pressure_makes_steps_go_back_and_forth_within_the_dwell_time() {
        let mut random = 1u64;
        for seed in 0..50u64 {
            let mut ladder = Ladder::default();
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed);
            let (mut level, mut until) = (0, 0);
            let mut changes = vec![];
            for ms in (0..200_000u64).step_by(100) {
                if ms >= until {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(7);
                    level = (random >> 33) % 101;
                    until = ms + (random >> 20) % 9_000;
                }
                let before = ladder.step();
                if ladder.observe(Timestamp(ms * 1000), queues(level as u8)).is_some() {
                    let steps = Step::ALL.iter().filter(|step| {
                        **step > before.min(ladder.step()) && **step <= before.max(ladder.step())
                    });
                    assert_eq!(steps.count(), 1, "one step at a time");
                    changes.push((ms, ladder.step() > before));
                }
            }
            for pair in changes.windows(2) {
                let least = if pair[1].1 { RISE_MS } else { FALL_MS };
                assert!(pair[1].0 - pair[0].0 >= least, "seed {seed}: {changes:?}");
            }
        }
    }

    #[test]
    fn each_signal_demands_what_helps_against_it() {
        for signal in Signal::ALL {
            let mut ladder = Ladder::default();
            let pressure = match signal {
                Signal::Occupancy => Pressure { occupancy: 100, ..Pressure::default() },
                Signal::Queues => queues(100),
                Signal::Nvme => Pressure { nvme: 100, ..Pressure::default() },
            };
            climb(&mut ladder, 0, 60_000, |_| pressure);
            assert_eq!((ladder.step(), ladder.why), (signal.most(), signal));
        }
    }
}
