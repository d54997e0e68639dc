//! The steps in which a node gives up service under pressure, from what costs least to all of it.

use serde::{Deserialize, Serialize};

/// How far service is given up. Each step includes those before it.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash, Serialize, Deserialize,
)]
pub enum Step {
    /// Not at all.
    #[default]
    Normal,
    /// Prefetches are answered busy.
    NoPrefetch,
    /// What no lookup has found is not written to nvme; it leaves host RAM without.
    NoColdSpill,
    /// The ends of the coldest paths leave host RAM, written or not.
    DropTails,
    /// Stores are answered busy, and what only one path uses leaves host RAM: shared prefixes stay.
    SharedOnly,
    /// Lookups find nothing. Loads under a lease go on.
    Bypass,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Step; 6] = [
        Step::Normal,
        Step::NoPrefetch,
        Step::NoColdSpill,
        Step::DropTails,
        Step::SharedOnly,
        Step::Bypass,
    ];

    /// The name, as operators see it.
    pub fn name(self) -> &'static str {
        match self {
            Step::Normal => "normal",
            Step::NoPrefetch => "no prefetch",
            Step::NoColdSpill => "no spill of cold blocks",
            Step::DropTails => "drop tails",
            Step::SharedOnly => "shared prefixes only",
            Step::Bypass => "bypass",
        }
    }

    /// The step behind this one; the last one has none.
    pub fn next(self) -> Option<Step> {
        Step::ALL.into_iter().find(|step| *step > self)
    }

    /// The step before this one.
    pub fn previous(self) -> Option<Step> {
        Step::ALL.into_iter().rev().find(|step| *step < self)
    }
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
pub enum Signal {
    /// Host RAM that nothing can leave, because it is not on nvme yet or pinned: 50 is the part
    /// that may be so in daily use, 100 all of it. Demands [`Step::SharedOnly`] at most.
    #[default]
    Occupancy,
    /// Blocks of open tickets, or entries of leases, beside their limits. Demands any step.
    Queues,
    /// The age of the oldest operation of nvme, beside a tenth of what takes the tier offline; 100
    /// when it is. Demands [`Step::NoColdSpill`] at most, for RAM is as fast as ever.
    Nvme,
}

impl Signal {
    /// All of them.
    pub const ALL: [Signal; 3] = [Signal::Occupancy, Signal::Queues, Signal::Nvme];

    /// The name, as operators see it.
    pub fn name(self) -> &'static str {
        match self {
            Signal::Occupancy => "occupancy",
            Signal::Queues => "queues",
            Signal::Nvme => "nvme",
        }
    }

    /// The farthest step that it can demand.
    pub fn most(self) -> Step {
        match self {
            Signal::Occupancy => Step::SharedOnly,
            Signal::Queues => Step::Bypass,
            Signal::Nvme => Step::NoColdSpill,
        }
    }
}

/// All signals, percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Pressure {
    /// [`Signal::Occupancy`].
    pub occupancy: u8,
    /// [`Signal::Queues`].
    pub queues: u8,
    /// [`Signal::Nvme`].
    pub nvme: u8,
}

impl Pressure {
    /// One of them.
    pub fn of(&self, signal: Signal) -> u8 {
        match signal {
            Signal::Occupancy => self.occupancy,
            Signal::Queues => self.queues,
            Signal::Nvme => self.nvme,
        }
    }
}

/// Where a node is on the ladder, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LadderReport {
    /// The step.
    pub step: Step,
    /// For how long, milliseconds.
    pub for_ms: u64,
    /// What led to it.
    pub why: Signal,
    /// The signals now.
    pub pressure: Pressure,
    /// How often steps were entered since start, upwards.
    pub raised: u64,
    /// How often one was left, downwards.
    pub lowered: u64,
}
