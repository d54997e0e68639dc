//! Tables and numbers for people. Nothing here prints; everything returns text.

use std::fmt::Write as _;
use std::time::Duration;

/// On which side of its column a cell stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table with a header, aligned by column. Cells are short and have no line ends.
pub(crate) struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
    /// Rows before which a line is drawn.
    rules: Vec<usize>,
}

impl Table {
    /// A table whose columns are named and aligned: `("BYTES", Align::Right)`.
    pub(crate) fn new(columns: &[(&str, Align)]) -> Table {
        let columns = columns.iter().map(|(name, align)| ((*name).to_owned(), *align)).collect();
        Table { columns, rows: Vec::new(), rules: Vec::new() }
    }

    /// Adds a row. Missing cells are empty, cells beyond the last column are dropped.
    pub(crate) fn row<I, S>(&mut self, cells: I)
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.columns.len(), String::new());
        self.rows.push(row);
    }

    /// Draws a line below the last row, for totals.
    pub(crate) fn rule(&mut self) {
        self.rules.push(self.rows.len());
    }

    /// The table as text, one line for each row, no trailing spaces.
    pub(crate) fn render(&self) -> String {
        let widths: Vec<usize> = (0..self.columns.len()).map(|at| self.width(at)).collect();
        let header: Vec<&str> = self.columns.iter().map(|(name, _)| name.as_str()).collect();
        let mut out = String::new();
        self.line(&mut out, &widths, &header);
        for (at, row) in self.rows.iter().enumerate() {
            if self.rules.contains(&at) {
                let dashes: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
                let dashes: Vec<&str> = dashes.iter().map(String::as_str).collect();
                self.line(&mut out, &widths, &dashes);
            }
            let cells: Vec<&str> = row.iter().map(String::as_str).collect();
            self.line(&mut out, &widths, &cells);
        }
        out
    }

    /// The widths in use, for tables that are printed row by row.
    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        let header = self.columns.get(column).map(|(name, _)| name);
        cells.chain(header).map(|cell| cell.chars().count()).max().unwrap_or(0)
    }

    fn line(&self, out: &mut String, widths: &[usize], cells: &[&str]) {
        let mut line = String::new();
        let columns = cells.iter().zip(widths).zip(&self.columns).enumerate();
        for (at, ((cell, width), (_, align))) in columns {
            if at > 0 {
                line.push_str("  ");
            }
            // Writing to a String cannot fail.
            let _ = match align {
                Align::Left => write!(line, "{cell:<width$}"),
                Align::Right => write!(line, "{cell:>width$}"),
            };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}

/// Lines of `name: value`, the values aligned.
pub(crate) fn pairs(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for (name, value) in pairs {
        let line = format!("{name:<width$}  {value}");
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Bytes with a binary unit: `0 B`, `4.0 KiB`, `1.5 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        // 1023.95 would print as 1024.0.
        if value < 1023.95 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

/// A count with thousands apart: `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A share of a whole: `12.5 %`, `-` of nothing.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => format!("{:.1} %", part as f64 * 100.0 / whole as f64),
    }
}

/// A time span in the unit that suits it: `850 us`, `12.3 ms`, `4.2 s`, `3 min 05 s`, `2 d 4 h`.
pub(crate) fn span(time: Duration) -> String {
    let micros = time.as_micros();
    let seconds = time.as_secs();
    match seconds {
        0 if micros == 0 => "0 s".to_owned(),
        0 if micros < 1000 => format!("{micros} us"),
        0 => format!("{:.1} ms", micros as f64 / 1e3),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_aligns_its_columns_and_leaves_no_trailing_spaces() {
        let mut table =
            Table::new(&[("TIER", Align::Left), ("BLOCKS", Align::Right), ("NOTE", Align::Left)]);
        table.row(["host", "7", "x"]);
        table.row(["nvme", "1,234,567", ""]);
        table.rule();
        table.row(["all", "1,234,574"]);
        let expected = "\
TIER     BLOCKS  NOTE
host          7  x
nvme  1,234,567
----  ---------  ----
all   1,234,574
";
        assert_eq!(table.render(), expected);
    }

    #[test]
    fn an_empty_first_cell_keeps_the_other_columns_in_place() {
        let mut table = Table::new(&[("A", Align::Left), ("B", Align::Left)]);
        table.row(["", "x"]);
        assert_eq!(table.render(), "A  B\n   x\n");
    }

    #[test]
    fn numbers_have_units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(4096), "4.0 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1000), "1,000");
        assert_eq!(count(1234567), "1,234,567");
        assert_eq!(percent(1, 8), "12.5 %");
        assert_eq!(percent(0, 0), "-");
        assert_eq!(span(Duration::from_micros(850)), "850 us");
        assert_eq!(span(Duration::from_micros(12_340)), "12.3 ms");
        assert_eq!(span(Duration::from_millis(4_200)), "4.2 s");
        assert_eq!(span(Duration::from_secs(185)), "3 min 05 s");
        assert_eq!(span(Duration::from_secs(3600 * 5 + 120)), "5 h 02 min");
        assert_eq!(span(Duration::from_secs(86400 * 2 + 3600 * 4)), "2 d 4 h");
        assert_eq!(pairs(&[("a", "1".into()), ("long", "2".into())]), "a     1\nlong  2\n");
        assert_eq!(hex(&[0, 255, 16]), "00ff10");
    }
}
