//! Which codec blocks are written to nvme with, where the operator leaves it to the daemon.
//!
//! Encoding pays for a client that reloads when the time that the drive needs less exceeds the time
//! that decoding takes on the threads that copy. Both are measured: some blocks of each namespace
//! are encoded and decoded for trial, and reads are timed as clients see them. Until both are
//! known, and whenever it does not pay, blocks are written as they are.

use super::Catalog;
use super::request::{CodecChoice, CodecReport, CodecWhy, Timestamp};
use crate::block::{Codec, NamespaceId};

/// Blocks that are encoded for trial before anything is chosen.
const TRIAL_BLOCKS: u64 = 8;

/// One block in so many is encoded for trial afterwards, because data and drive change.
const TRIAL_EVERY: u64 = 512;

/// Bytes that must have been read before the drive's speed is taken for known.
const READ_BYTES_MIN: u64 = 64 << 20;

/// After so many bytes what was measured counts half, so that the newer counts more.
const MEASURED_BYTES_MAX: u64 = 1 << 30;

/// What encoding and decoding a block for trial came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CodecTrial {
    /// Bytes of the block.
    pub raw_bytes: u32,
    /// Bytes of its encoded form; as many if it does not shrink enough.
    pub stored_bytes: u32,
    /// How long decoding took, microseconds.
    pub decode_us: u64,
}

/// What is known of one namespace.
#[derive(Default)]
pub(super) struct NamespaceCodec {
    writes: u64,
    trials: u64,
    raw_bytes: u64,
    stored_bytes: u64,
    decode_us: u64,
    chosen: Codec,
}

/// How fast nvme is read, as those who wait for it see it.
#[derive(Default)]
pub(super) struct ReadClock {
    since: Option<Timestamp>,
    busy_us: u64,
    bytes: u64,
}

impl ReadClock {
    /// A read begins.
    pub(super) fn begin(&mut self, now: Timestamp) {
        self.since.get_or_insert(now);
    }

    /// A read of `bytes` ended (0: it failed); `more` are under way.
    pub(super) fn end(&mut self, now: Timestamp, bytes: u64, more: bool) {
        let since = self.since.take().unwrap_or(now);
        self.since = more.then_some(now);
        self.busy_us += now.0.saturating_sub(since.0);
        self.bytes += bytes;
        if self.bytes > MEASURED_BYTES_MAX {
            self.bytes /= 2;
            self.busy_us /= 2;
        }
    }

    /// How long reading so many bytes takes, microseconds.
    fn time_of(&self, bytes: u64) -> Option<u64> {
        let known = self.bytes >= READ_BYTES_MIN;
        known
            .then(|| (u128::from(bytes) * u128::from(self.busy_us) / u128::from(self.bytes)) as u64)
    }
}

impl NamespaceCodec {
    fn note(&mut self, trial: CodecTrial) {
        self.trials += 1;
        self.raw_bytes += u64::from(trial.raw_bytes);
        self.stored_bytes += u64::from(trial.stored_bytes);
        self.decode_us += trial.decode_us;
        if self.raw_bytes > MEASURED_BYTES_MAX {
            self.raw_bytes /= 2;
            self.stored_bytes /= 2;
            self.decode_us /= 2;
        }
    }

    /// Chooses by what is measured. Changes its mind for a tenth only, so that it does not waver.
    fn choose(&mut self, reading: &ReadClock, threads: u64) -> CodecWhy {
        if self.trials < TRIAL_BLOCKS {
            return CodecWhy::NoTrial;
        }
        let less = self.raw_bytes.saturating_sub(self.stored_bytes);
        let Some(saved_us) = reading.time_of(less) else {
            return CodecWhy::NoReads;
        };
        let cost_us = self.decode_us / threads.max(1);
        let wins = match self.chosen {
            Codec::Raw => saved_us * 10 > cost_us * 11,
            Codec::Lz4 => saved_us * 11 > cost_us * 10,
        };
        self.chosen = if wins && less > 0 { Codec::Lz4 } else { Codec::Raw };
        CodecWhy::Measured { raw_bytes: self.raw_bytes, saved_bytes: less, saved_us, cost_us }
    }
}

impl Catalog {
    /// Whether blocks of the namespace may be encoded when they are written.
    pub(super) fn may_be_encoded(&self, namespace: NamespaceId) -> bool {
        let info = self.namespaces.get(&namespace);
        info.is_some_and(|info| info.codec != CodecChoice::Raw && info.element.is_16_bit())
    }

    /// The codec for the next block of the namespace that is written, and whether it is a trial.
    pub(super) fn codec_for(&mut self, namespace: NamespaceId) -> (Codec, bool) {
        let choice = self.namespaces.get(&namespace).map(|info| info.codec);
        match choice.filter(|_| self.may_be_encoded(namespace)) {
            None | Some(CodecChoice::Raw) => (Codec::Raw, false),
            Some(CodecChoice::Lz4) => (Codec::Lz4, false),
            Some(CodecChoice::Auto) => {
                let known = self.codecs.entry(namespace).or_default();
                let trial = known.writes < TRIAL_BLOCKS || known.writes.is_multiple_of(TRIAL_EVERY);
                known.writes += 1;
                if trial {
                    return (Codec::Lz4, true);
                }
                if let Some(nvme) = &self.nvme {
                    known.choose(&nvme.reading, self.config.copy_threads.into());
                }
                (known.chosen, false)
            }
        }
    }

    pub(super) fn note_codec_trial(&mut self, namespace: NamespaceId, trial: CodecTrial) {
        self.codecs.entry(namespace).or_default().note(trial);
    }

    /// The codecs of the namespaces for which the operator wants more than raw blocks, by number.
    pub(super) fn codec_reports(&mut self) -> Vec<CodecReport> {
        let threads = u64::from(self.config.copy_threads);
        let asked = self.namespaces.values().filter(|info| info.codec != CodecChoice::Raw);
        let mut reports = Vec::new();
        for info in asked {
            let (codec, why) = match (info.codec, self.nvme.as_ref()) {
                _ if !info.element.is_16_bit() => (Codec::Raw, CodecWhy::Element),
                (CodecChoice::Auto, Some(nvme)) => {
                    let known = self.codecs.entry(info.id).or_default();
                    let why = known.choose(&nvme.reading, threads);
                    (known.chosen, why)
                }
                (CodecChoice::Lz4, Some(_)) => (Codec::Lz4, CodecWhy::Configured),
                (_, None) => (Codec::Raw, CodecWhy::NoNvme),
                (CodecChoice::Raw, _) => (Codec::Raw, CodecWhy::Configured),
            };
            reports.push(CodecReport { namespace: info.id, choice: info.codec, codec, why });
        }
        reports.sort_unstable_by_key(|report| report.namespace);
        reports
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(stored_bytes: u32, decode_us: u64) -> CodecTrial {
        CodecTrial { raw_bytes: 1_000_000, stored_bytes, decode_us }
    }

    fn clock(mb_s: u64) -> ReadClock {
        let mut clock = ReadClock::default();
        clock.begin(Timestamp(0));
        clock.end(Timestamp(1_000_000), mb_s * 1_000_000, false);
        clock
    }

    #[test]
    fn encoding_is_chosen_only_where_it_saves_more_than_it_costs() {
        // A sixth less at 400 MB/s is 400 us a block; at 1,400 MB/s it is 119.
        for (mb_s, decode_us, threads, codec) in [
            (400, 300, 1, Codec::Lz4),
            (1_400, 300, 1, Codec::Raw),
            (1_400, 300, 4, Codec::Lz4),
            (400, 390, 1, Codec::Raw),
        ] {
            let mut known = NamespaceCodec::default();
            for _ in 0..TRIAL_BLOCKS - 1 {
                known.note(trial(840_000, decode_us));
            }
            assert_eq!(known.choose(&clock(mb_s), threads), CodecWhy::NoTrial);
            known.note(trial(840_000, decode_us));
            assert_eq!(known.choose(&ReadClock::default(), threads), CodecWhy::NoReads);
            let why = known.choose(&clock(mb_s), threads);
            assert_eq!(known.chosen, codec, "{mb_s} MB/s, {decode_us} us, {threads}: {why:?}");
        }
    }

    #[test]
    fn blocks_that_do_not_shrink_stay_raw_although_decoding_costs_nothing() {
        let mut known = NamespaceCodec::default();
        for _ in 0..TRIAL_BLOCKS {
            known.note(trial(1_000_000, 0));
        }
        known.choose(&clock(100), 1);
        assert_eq!(known.chosen, Codec::Raw);
    }

    #[test]
    fn a_choice_does_not_waver_and_follows_the_drive() {
        let mut known = NamespaceCodec::default();
        for _ in 0..TRIAL_BLOCKS {
            known.note(trial(840_000, 300));
        }
        known.choose(&clock(400), 1);
        assert_eq!(known.chosen, Codec::Lz4);
        // 160,000 bytes at 550 MB/s are 291 us: a little less than decoding.
        known.choose(&clock(550), 1);
        assert_eq!(known.chosen, Codec::Lz4);
        known.choose(&clock(1_000), 1);
        assert_eq!(known.chosen, Codec::Raw);
        known.choose(&clock(500), 1);
        assert_eq!(known.chosen, Codec::Raw);
    }

    #[test]
    fn reads_side_by_side_are_timed_once() {
        let mut clock = ReadClock::default();
        clock.begin(Timestamp(100));
        clock.begin(Timestamp(150));
        clock.end(Timestamp(300), 50 << 20, true);
        clock.end(Timestamp(400), 50 << 20, false);
        clock.begin(Timestamp(9_000));
        clock.end(Timestamp(9_100), 0, false);
        assert_eq!(clock.busy_us, 400);
        assert_eq!(clock.time_of(1 << 20), Some(4));
    }
}
