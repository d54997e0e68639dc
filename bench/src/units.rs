//! Sizes, times and rates as people write and read them.

use std::time::Duration;

pub use kvtide_daemon::units::{bytes as show_bytes, count as show_count};

/// Parses a size: a whole number with an optional unit (`KiB`, `MiB`, `GiB`, `TiB`, or `kB`, `MB`,
/// `GB`, `TB`), such as `64KiB`. `0` is refused.
///
/// # Errors
/// A sentence that says what is allowed.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("`{text}` is not a size; write a number and a unit, such as 64KiB, 1GiB");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let unit = text.get(digits.len()..).unwrap_or("").trim();
    let scale: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(wrong()),
    };
    let count: u64 = digits.trim().parse().map_err(|_| wrong())?;
    match count.checked_mul(scale) {
        Some(0) => Err(format!("`{text}`: the size must not be 0")),
        Some(bytes) => Ok(bytes),
        None => Err(format!("`{text}` does not fit in 64 bits")),
    }
}

/// Parses a time: a number with a unit (`ms`, `s`, `m`, `h`), such as `60s`. `0` is refused.
///
/// # Errors
/// A sentence that says what is allowed.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("`{text}` is not a time; write a number and a unit, such as 500ms or 60s");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale_ms = match text.get(digits.len()..).unwrap_or("") {
        "ms" => 1.0,
        "s" | "" => 1_000.0,
        "m" | "min" => 60_000.0,
        "h" => 3_600_000.0,
        _ => return Err(wrong()),
    };
    let count: f64 = digits.parse().map_err(|_| wrong())?;
    let ms = count * scale_ms;
    if !ms.is_finite() || !(1.0..=1e12).contains(&ms) {
        return Err(wrong());
    }
    Ok(Duration::from_micros((ms * 1_000.0) as u64))
}

/// Microseconds for people: `870 us`, `1.25 ms`, `3.10 s`.
pub fn show_micros(us: u64) -> String {
    match us {
        0..=999 => format!("{us} us"),
        1_000..=999_999 => format!("{:.2} ms", us as f64 / 1e3),
        _ => format!("{:.2} s", us as f64 / 1e6),
    }
}

/// A part of a whole in percent: `35.23 %`; `-` where there is no whole.
pub fn show_ratio(part: u64, whole: u64) -> String {
    if whole == 0 { "-".into() } else { format!("{:.2} %", part as f64 * 100.0 / whole as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_and_zero_is_refused() {
        assert_eq!(parse_bytes("64KiB"), Ok(65_536));
        assert_eq!(parse_bytes("6 GiB"), Ok(6 << 30));
        assert_eq!(parse_bytes("2GB"), Ok(2_000_000_000));
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_duration("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(parse_duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        for bad in ["0", "", "x", "1XB", "-1", "99999999999TiB", "1.5GiB"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        for bad in ["0s", "", "x", "1 year", "-1s", "infs", "NaNs"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_are_shown_for_people() {
        assert_eq!(show_bytes(1_610_612_736), "1.5 GiB");
        assert_eq!(show_bytes(12), "12 B");
        assert_eq!(show_count(288_500), "288,500");
        assert_eq!(show_count(500), "500");
        assert_eq!(show_micros(1_250), "1.25 ms");
        assert_eq!(show_ratio(1, 4), "25.00 %");
        assert_eq!(show_ratio(1, 0), "-");
    }
}
