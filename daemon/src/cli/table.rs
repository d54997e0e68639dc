//! Tables and numbers for people. Nothing here prints; everything returns text.

use std::fmt::Write as _;

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
    fn pairs_are_aligned() {
        assert_eq!(pairs(&[("a", "1".into()), ("long", "2".into())]), "a     1\nlong  2\n");
    }
}
