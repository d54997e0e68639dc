//! Which policies decide, and what the drive's writes come to, as operators see them.

use serde::{Deserialize, Serialize};

/// Which blocks leave first, by tier, and what may be written.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PolicyStatus {
    /// The policy of host RAM, as the configuration names it.
    pub host: String,
    /// That of the pools in GPU memory.
    pub device: String,
    /// How nvme makes room, in words.
    pub nvme: String,
    /// The drive under nvme; operators only, and only when nvme is on.
    pub drive: Option<DriveStatus>,
}

/// What is written to the drive, beside what it may be written.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DriveStatus {
    /// The drive, as in /sys/block, with its model; why it is not known otherwise.
    pub name: String,
    /// Its capacity.
    pub drive_bytes: Option<u64>,
    /// Bytes that the daemon wrote since its start.
    pub written_bytes: u64,
    /// Seconds since then.
    pub seconds: u64,
    /// Bytes that everybody wrote to the drive since the machine was started.
    pub machine_written_bytes: Option<u64>,
    /// Seconds since then.
    pub machine_seconds: Option<u64>,
    /// Blocks that were not written for want of budget.
    pub refused_blocks: u64,
    /// Bytes that may be written in a day.
    pub budget_bytes_per_day: Option<u64>,
    /// Bytes that the drive may be written over its life.
    pub rated_bytes: Option<u64>,
    /// Bytes written in a day at the present rate: the daemon's, or everybody's where that is more.
    pub bytes_per_day: Option<u64>,
    /// Thousandths of the drive's capacity written in a day at that rate.
    pub drive_writes_per_day_milli: Option<u64>,
    /// Days that `rated_bytes` last at that rate, counted from a new drive.
    pub life_days: Option<u64>,
    /// What cannot be said, and why.
    pub unknown: Vec<String>,
}
