//! Reads a TOML file key by key, and keeps every problem with its line and with what is allowed
//! there, so that one run of `--check-config` names them all.

use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One thing that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file, or the command line's option, that it is in.
    pub source: String,
    /// The line in the file, from 1; 0 where there is none.
    pub line: usize,
    /// What is wrong.
    pub what: String,
    /// What is allowed, or what to do.
    pub allowed: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.source)?;
        if self.line > 0 {
            write!(out, ":{}", self.line)?;
        }
        write!(out, ": {}; {}", self.what, self.allowed)
    }
}

/// Why a configuration is refused: everything that is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// At least one problem, in the order of the lines.
    pub problems: Vec<Problem>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.problems.iter().enumerate() {
            let separator = if at == 0 { "" } else { "\n" };
            write!(out, "{separator}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// Collects problems of one file.
pub(super) struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
    pub(super) problems: Vec<Problem>,
}

/// A value of the file with the name and place it was found at.
pub(super) struct Found<T> {
    pub(super) value: T,
    pub(super) line: usize,
}

/// One table of the file, whose keys are taken one by one; what is left is unknown.
pub(super) struct Section<'a, 'i> {
    name: String,
    table: &'a DeTable<'i>,
    known: Vec<&'static str>,
    pub(super) line: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(path: &'a Path, text: &'a str) -> Reader<'a> {
        Reader { path, text, problems: Vec::new() }
    }

    /// Parses the file; what is not TOML is a problem, and then nothing is returned.
    pub(super) fn parse(&mut self) -> Option<DeTable<'a>> {
        match DeTable::parse(self.text) {
            Ok(table) => Some(table.into_inner()),
            Err(error) => {
                let line = error.span().map_or(0, |span| self.line(&span));
                let what = format!("not valid TOML: {}", error.message());
                self.problem(line, what, "see the example configuration for the form");
                None
            }
        }
    }

    pub(super) fn problem(
        &mut self,
        line: usize,
        what: impl Into<String>,
        allowed: impl Into<String>,
    ) {
        self.problems.push(Problem {
            source: self.path.display().to_string(),
            line,
            what: what.into(),
            allowed: allowed.into(),
        });
    }

    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.as_bytes().get(..span.start).unwrap_or_default();
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }

    pub(super) fn root<'t, 'i>(&self, table: &'t DeTable<'i>) -> Section<'t, 'i> {
        Section { name: String::new(), table, known: Vec::new(), line: 0 }
    }
}

impl<'a, 'i> Section<'a, 'i> {
    fn path_of(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    fn get(&mut self, key: &'static str) -> Option<(&'a Spanned<DeValue<'i>>, String)> {
        self.known.push(key);
        Some((self.table.get(key)?, self.path_of(key)))
    }

    /// A table below this one.
    pub(super) fn section(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Section<'a, 'i>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        let Some(table) = value.get_ref().as_table() else {
            reader.problem(line, format!("`{name}` is not a table"), format!("write `[{name}]`"));
            return None;
        };
        Some(Section { name, table, known: Vec::new(), line })
    }

    /// The tables of an array of tables.
    pub(super) fn sections(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Vec<Section<'a, 'i>> {
        let Some((value, name)) = self.get(key) else { return Vec::new() };
        let allowed = format!("write `[[{name}]]` once for each");
        let line = reader.line(&value.span());
        let Some(array) = value.get_ref().as_array() else {
            reader.problem(line, format!("`{name}` is not a list of tables"), allowed);
            return Vec::new();
        };
        let mut out = Vec::new();
        for each in array.iter() {
            let line = reader.line(&each.span());
            match each.get_ref().as_table() {
                Some(table) => {
                    out.push(Section { name: name.clone(), table, known: Vec::new(), line });
                }
                None => reader.problem(line, format!("`{name}` holds no table"), &*allowed),
            }
        }
        out
    }

    /// A text.
    pub(super) fn text(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<String>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        let Some(text) = value.get_ref().as_str() else {
            let what = format!("`{name}` is {}, not a text", value.get_ref().type_str());
            reader.problem(line, what, "put it in quotes");
            return None;
        };
        Some(Found { value: text.to_owned(), line })
    }

    /// A path.
    pub(super) fn path(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<PathBuf>> {
        let Found { value, line } = self.text(reader, key)?;
        if value.is_empty() {
            let what = format!("`{}` is empty", self.path_of(key));
            reader.problem(line, what, "name a path, or leave the key out for the default");
            return None;
        }
        Some(Found { value: PathBuf::from(value), line })
    }

    /// A truth value.
    pub(super) fn flag(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<bool>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        let Some(flag) = value.get_ref().as_bool() else {
            let what = format!("`{name}` is {}", value.get_ref().type_str());
            reader.problem(line, what, "true and false are allowed");
            return None;
        };
        Some(Found { value: flag, line })
    }

    /// A truth value, or "auto" for `None`.
    pub(super) fn flag_or_auto(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<Option<bool>>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        match value.get_ref() {
            DeValue::Boolean(flag) => Some(Found { value: Some(*flag), line }),
            DeValue::String(text) if text == "auto" => Some(Found { value: None, line }),
            other => {
                let what = format!("`{name}` is {}", show(other));
                reader.problem(line, what, "\"auto\", true and false are allowed");
                None
            }
        }
    }

    /// A whole number within `range`.
    pub(super) fn number(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Option<Found<u64>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        let allowed = format!("{} to {} is allowed", range.start(), range.end());
        let number = integer(value.get_ref());
        let Some(number) = number.filter(|number| range.contains(number)) else {
            let what = format!("`{name}` is {}", show(value.get_ref()));
            reader.problem(line, what, allowed);
            return None;
        };
        Some(Found { value: number, line })
    }

    /// A number of bytes: an integer, or a text with a unit.
    pub(super) fn bytes(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Option<Found<u64>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        let size = match value.get_ref().as_str() {
            Some(text) => parse_bytes(text),
            None => integer(value.get_ref()).ok_or_else(|| SIZE_FORM.to_owned()),
        };
        let what = format!("`{name}` is {}", show(value.get_ref()));
        match size {
            Ok(size) if range.contains(&size) => Some(Found { value: size, line }),
            Ok(_) => {
                reader.problem(line, what, bytes_allowed(&range));
                None
            }
            Err(allowed) => {
                reader.problem(line, what, allowed);
                None
            }
        }
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
        choices: &[(&'static str, T)],
    ) -> Option<Found<T>> {
        let Found { value, line } = self.text(reader, key)?;
        if let Some((_, choice)) = choices.iter().find(|(word, _)| *word == value) {
            return Some(Found { value: *choice, line });
        }
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let what = format!("`{}` is \"{value}\"", self.path_of(key));
        reader.problem(line, what, format!("one of {} is allowed", words.join(", ")));
        None
    }

    /// A list of user or group numbers.
    pub(super) fn ids(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<Vec<u32>>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        let ids: Option<Vec<u32>> = value.get_ref().as_array().and_then(|array| {
            array.iter().map(|each| u32::try_from(integer(each.get_ref())?).ok()).collect()
        });
        if ids.is_none() {
            let what = format!("`{name}` is not a list of numbers");
            reader.problem(line, what, "write the numeric ids, like [1000, 1001] (see `id NAME`)");
        }
        Some(Found { value: ids?, line })
    }

    /// A list of texts.
    pub(super) fn texts(
        &mut self,
        reader: &mut Reader<'_>,
        key: &'static str,
    ) -> Option<Found<Vec<String>>> {
        let (value, name) = self.get(key)?;
        let line = reader.line(&value.span());
        let texts: Option<Vec<String>> = value.get_ref().as_array().and_then(|array| {
            array.iter().map(|each| each.get_ref().as_str().map(str::to_owned)).collect()
        });
        if texts.is_none() {
            let what = format!("`{name}` is not a list of texts");
            reader.problem(line, what, "write a list like [\"a\", \"b\"]");
        }
        Some(Found { value: texts?, line })
    }

    /// Whatever was not asked for is unknown.
    pub(super) fn finish(self, reader: &mut Reader<'_>) {
        for key in self.table.keys() {
            let name: &str = key.get_ref();
            if self.known.contains(&name) {
                continue;
            }
            let line = reader.line(&key.span());
            let near = self.known.iter().map(|known| (distance(name, known), *known)).min();
            let allowed = match near {
                Some((far, known)) if far <= 3 && far < name.len() => {
                    format!("did you mean `{known}`?")
                }
                _ => format!("allowed here: {}", self.known.join(", ")),
            };
            reader.problem(line, format!("unknown key `{}`", self.path_of(name)), allowed);
        }
    }
}

const SIZE_FORM: &str =
    "write a number of bytes, or a text with a unit: \"64KiB\", \"512MiB\", \"1GiB\", \"1TiB\"";

/// A number of bytes from a text such as `512MiB`.
///
/// # Errors
/// What is allowed.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return Err(SIZE_FORM.to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| SIZE_FORM.to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "at most 16777215TiB is allowed".to_owned())
}

/// Bytes in the largest unit that shows them exactly enough for people.
pub fn show_bytes(bytes: u64) -> String {
    for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes >= 1 << shift {
            let tenths = bytes.saturating_mul(10) >> shift;
            if tenths.is_multiple_of(10) {
                return format!("{} {unit}", tenths / 10);
            }
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{bytes} B")
}

/// What sizes are allowed, in words.
pub(super) fn bytes_allowed(range: &RangeInclusive<u64>) -> String {
    if *range.end() == u64::MAX {
        return format!("at least {} is allowed", show_bytes(*range.start()));
    }
    format!("{} to {} is allowed", show_bytes(*range.start()), show_bytes(*range.end()))
}

fn integer(value: &DeValue<'_>) -> Option<u64> {
    let integer = value.as_integer()?;
    u64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

fn show(value: &DeValue<'_>) -> String {
    match value {
        DeValue::Integer(integer) => integer.as_str().to_owned(),
        DeValue::Float(float) => float.as_str().to_owned(),
        DeValue::String(text) => format!("\"{text}\""),
        other => format!("of type {}", other.type_str()),
    }
}

/// Edits that turn one word into another.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, l) in left.chars().enumerate() {
        let mut diagonal = at;
        let mut before = at + 1;
        let mut next = vec![before];
        for (r, above) in right.iter().zip(row.iter().skip(1)) {
            let change = diagonal + usize::from(l != *r);
            diagonal = *above;
            before = change.min(above + 1).min(before + 1);
            next.push(before);
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("1 GiB"), Ok(1 << 30));
        assert_eq!(parse_bytes("4096"), Ok(4096));
        for bad in ["", "GiB", "1GB", "1.5GiB", "-1", "99999999999TiB", "1 KiB x"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(show_bytes(1536 << 20), "1.5 GiB");
        assert_eq!(show_bytes(1 << 40), "1 TiB");
        assert_eq!(show_bytes(17), "17 B");
    }

    #[test]
    fn distance_counts_edits() {
        assert_eq!(distance("bytes", "byets"), 2);
        assert_eq!(distance("byte", "bytes"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("queue_depht", "queue_depth"), 2);
    }
}
