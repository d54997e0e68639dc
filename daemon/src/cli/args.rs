//! The command line of `kvtide`, and nothing else: no I/O here.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvtide_tiers::catalog::Tier;

const EXIT_CODES: &str = "\
Exit codes:
  0  done, and nothing wrong was found
  1  it failed, or a problem was found
  2  the command line is wrong
  3  the daemon cannot be reached";

/// Looks into a running kvtided, and into stores at rest. Never writes to a store.
#[derive(Parser, Debug)]
#[command(name = "kvtide", version, after_help = EXIT_CODES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every subcommand takes.
#[derive(Args, Debug, Clone)]
pub(crate) struct Global {
    /// The daemon's socket [default: $KVTIDE_SOCKET, else the user's own daemon, else
    /// /run/kvtide/kvtide.sock]
    #[arg(long, global = true, value_name = "PATH", help_heading = "Global options")]
    pub(crate) socket: Option<PathBuf>,
    /// Print one JSON value, for programs
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// Give up on the daemon after this time (like 500ms, 5s, 2m)
    #[arg(long, global = true, value_name = "TIME", default_value = "5s", value_parser = duration,
          help_heading = "Global options")]
    pub(crate) timeout: Duration,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// How the daemon runs: tiers, limits, what is off and why
    Status,
    /// What is in the cache: totals by namespace, tenant or tier, or single blocks
    Ls(Ls),
    /// Everything known of one block
    Show(Show),
    /// Why two namespaces do not share blocks, field by field
    Explain(Explain),
    /// Counters, once or as they change
    Stats(Stats),
    /// Drop blocks from all tiers
    Forget(Forget),
    /// Keep a block and all before it in its chain from being evicted, for a time
    Pin(Pin),
    /// End a pin
    Unpin {
        /// The number that `pin` printed
        pin: u64,
    },
    /// Stop admitting blocks, and write what is only in RAM to nvme
    Drain {
        /// Write for so long at most; what is hottest goes first
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
        deadline: Duration,
    },
    /// Check a store that no daemon has open; reads only
    Fsck(Fsck),
    /// The configuration that kvtided would use here, or a check of a file
    Config(Config),
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Show kvtide at work: own daemon, four processes, two of them killed, every byte checked
    Demo(Demo),
}

#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// Only this tenant
    #[arg(long, value_name = "NAME")]
    pub(crate) tenant: Option<String>,
    /// Only this namespace: its number, or the first digits of its fingerprint
    #[arg(long, value_name = "NS")]
    pub(crate) namespace: Option<String>,
    /// Only this tier
    #[arg(long, value_name = "TIER")]
    pub(crate) tier: Option<TierName>,
    /// What to add up by
    #[arg(long, value_name = "WHAT", default_value = "namespace", conflicts_with = "blocks")]
    pub(crate) by: By,
    /// List single blocks instead of totals
    #[arg(long)]
    pub(crate) blocks: bool,
    /// Most blocks to list; totals are over all
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) limit: usize,
    /// How to order the list of blocks
    #[arg(long, value_name = "ORDER", default_value = "chain", requires = "blocks")]
    pub(crate) sort: Sort,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Namespace,
    Tenant,
    Tier,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    /// As the table has them
    Chain,
    /// Longest unused first
    Idle,
    /// Most hits first
    Hits,
    /// Largest first
    Size,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TierName {
    Device,
    Host,
    Nvme,
}

impl From<TierName> for Tier {
    fn from(name: TierName) -> Tier {
        match name {
            TierName::Device => Tier::Device,
            TierName::Host => Tier::Host,
            TierName::Nvme => Tier::Nvme,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct Show {
    /// The block's key: 64 hexadecimal digits, or as many of the first as are unambiguous
    #[arg(value_parser = key_prefix)]
    pub(crate) key: KeyPrefix,
}

#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// A namespace: its number, the first digits of its fingerprint, or a TOML or JSON file
    #[arg(value_name = "NS1")]
    pub(crate) left: String,
    /// The other one
    #[arg(value_name = "NS2")]
    pub(crate) right: String,
}

#[derive(Args, Debug)]
pub(crate) struct Stats {
    /// Print again and again, with rates since the last time
    #[arg(long)]
    pub(crate) watch: bool,
    /// Time between two prints
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub(crate) interval: Duration,
    /// Stop after so many prints (with --watch)
    #[arg(long, value_name = "N", requires = "watch")]
    pub(crate) count: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct Forget {
    #[command(subcommand)]
    pub(crate) what: ForgetWhat,
    /// Do not ask
    #[arg(long, short, global = true)]
    pub(crate) yes: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ForgetWhat {
    /// A block and all that follow it in their chains
    Key {
        /// The block's key, or its first digits
        #[arg(value_parser = key_prefix)]
        key: KeyPrefix,
    },
    /// What one conversation stored
    Conversation {
        /// The namespace: its number, or the first digits of its fingerprint
        namespace: String,
        /// The engine's number for the conversation
        conversation: u64,
    },
    /// All blocks of a namespace, for good
    Namespace {
        /// The namespace: its number, or the first digits of its fingerprint
        namespace: String,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Pin {
    /// The key of the last block to keep, or its first digits
    #[arg(value_parser = key_prefix)]
    pub(crate) key: KeyPrefix,
    /// How long (the daemon may shorten it to its own limit)
    #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = duration)]
    pub(crate) time: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct Fsck {
    /// The store's folder
    pub(crate) dir: PathBuf,
    /// Read and check every payload as well, not only headers and descriptors
    #[arg(long)]
    pub(crate) payloads: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Config {
    #[command(subcommand)]
    pub(crate) what: Option<ConfigWhat>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ConfigWhat {
    /// Print what kvtided would use, all defaults filled in
    Show {
        /// With this file [default: none]
        file: Option<PathBuf>,
    },
    /// Check a file, and say what is wrong where
    Check {
        /// The file
        file: PathBuf,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Demo {
    /// Turns of each conversation
    #[arg(long, value_name = "N", default_value_t = 6,
          value_parser = clap::value_parser!(u32).range(4..=6))]
    pub(crate) turns: u32,
    /// Where to make the temporary folder [default: the system's]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// The first digits of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct KeyPrefix {
    digits: String,
}

impl KeyPrefix {
    /// The whole bytes that it names; an odd last digit is left to [`KeyPrefix::fits`].
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let digit = |c: &u8| char::from(*c).to_digit(16).unwrap_or(0) as u8;
        let (pairs, _) = self.digits.as_bytes().as_chunks::<2>();
        pairs.iter().map(|[high, low]| digit(high) << 4 | digit(low)).collect()
    }

    /// Whether a key in hexadecimal digits starts with it.
    pub(crate) fn fits(&self, key: &str) -> bool {
        key.starts_with(&self.digits)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.digits
    }
}

/// Reads the digits of a key or of its beginning.
pub(crate) fn key_prefix(text: &str) -> Result<KeyPrefix, String> {
    let digits = text.trim_end_matches("..").to_ascii_lowercase();
    if digits.is_empty() || digits.len() > 64 || !digits.bytes().all(|c| c.is_ascii_hexdigit()) {
        return Err("a key has 1 to 64 hexadecimal digits".to_owned());
    }
    Ok(KeyPrefix { digits })
}

/// Reads a time with a unit: `500ms`, `5s`, `2m`, `1h`, `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time; write a number and ms, s, m, h or d, like 30s");
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(unit_ms)
        .filter(|ms| *ms > 0)
        .map(Duration::from_millis)
        .ok_or_else(|| format!("`{text}` is out of range; give more than 0 and less than ages"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("kvtide").chain(line.split_whitespace()))
    }

    #[test]
    fn the_definition_is_sound_and_help_has_the_exit_codes() {
        Cli::command().debug_assert();
        let help = Cli::command().render_long_help().to_string();
        assert!(help.contains("3  the daemon cannot be reached"), "{help}");
    }

    #[test]
    fn every_subcommand_takes_json_and_socket_behind_it() {
        for line in [
            "status",
            "ls",
            "show ab",
            "explain 1 2",
            "stats",
            "forget namespace 1",
            "pin ab",
            "unpin 7",
            "drain",
            "fsck store",
            "config",
            "config check x",
            "demo",
        ] {
            let cli = parse(&format!("{line} --json --socket s")).expect(line);
            assert!(cli.global.json, "{line}");
            assert_eq!(cli.global.socket, Some(PathBuf::from("s")), "{line}");
        }
    }

    #[test]
    fn wrong_lines_are_refused_with_exit_code_2() {
        for line in [
            "",
            "nonsense",
            "show",
            "show xyz",
            "ls --tier tape",
            "ls --blocks --by tier",
            "pin ab --for 5",
            "drain --deadline 0s",
            "stats --count 3",
            "forget",
            "demo --turns 99",
        ] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn times_and_keys_are_read() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7200)));
        for wrong in ["", "5", "s", "-1s", "5 s", "0ms", "99999999999999999999s", "1w"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
        let key = key_prefix("ABC..").expect("three digits");
        assert_eq!(key.bytes(), [0xab]);
        assert!(key.fits("abcdef") && !key.fits("abdcef"));
        assert!(key_prefix(&"a".repeat(65)).is_err());
    }
}
