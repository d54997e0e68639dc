//! Naming namespaces on a command line, and `kvtide explain`.

use std::path::Path;

use kvtide_client::NamespaceRow;
use kvtide_tiers::block::{Namespace, NamespaceDifference};
use serde::Serialize;

use super::args::Explain;
use super::error::CliError;
use super::out::Out;
use super::remote::Remote;
use super::table::{Align, Table};
use crate::units::hex;

/// The namespace that `name` means: its number, or the first digits of its fingerprint.
pub(crate) fn find<'a>(
    known: &'a [NamespaceRow],
    name: &str,
) -> Result<&'a NamespaceRow, CliError> {
    if let Ok(number) = name.parse::<u32>()
        && let Some(row) = known.iter().find(|row| row.id.0 == number)
    {
        return Ok(row);
    }
    let digits = name.to_ascii_lowercase();
    let fits: Vec<&NamespaceRow> =
        known.iter().filter(|row| hex(&row.fingerprint).starts_with(&digits)).collect();
    match fits.as_slice() {
        [row] if digits.len() >= 2 => Ok(row),
        [_, _, ..] => Err(CliError::Failed(format!(
            "`{name}` is the beginning of {} fingerprints; give more digits, or the number",
            fits.len()
        ))),
        _ => Err(CliError::Failed(format!(
            "no namespace `{name}` that you may see; `kvtide ls` lists them by number"
        ))),
    }
}

/// A short name for a namespace's model.
pub(crate) fn model(namespace: &Namespace) -> String {
    let weights: String = namespace.model.weights.chars().take(24).collect();
    let mut text = weights;
    for (mark, part) in [("@", &namespace.model.revision), ("+", &namespace.model.adapter)] {
        if !part.is_empty() {
            text.push_str(mark);
            text.extend(part.chars().take(12));
        }
    }
    text
}

/// One of the two namespaces to compare.
#[derive(Serialize)]
struct Side {
    name: String,
    tenant: Option<String>,
    namespace: Namespace,
}

#[derive(Serialize)]
struct Explained {
    left: Side,
    right: Side,
    differences: Vec<NamespaceDifference>,
    shared: bool,
}

pub(crate) fn explain(
    args: &Explain,
    remote: impl FnOnce() -> Result<Remote, CliError>,
    out: Out,
) -> Result<(), CliError> {
    let from_files = (file(&args.left)?, file(&args.right)?);
    let (left, right) = match from_files {
        // Two files need no daemon.
        (Some(left), Some(right)) => (left, right),
        (left, right) => {
            let known = remote()?.namespaces()?;
            let side = |name: &str, file: Option<Side>| match file {
                Some(side) => Ok(side),
                None => find(&known, name).map(|row| Side {
                    name: name.to_owned(),
                    tenant: Some(row.tenant.clone()),
                    namespace: row.namespace.clone(),
                }),
            };
            (side(&args.left, left)?, side(&args.right, right)?)
        }
    };
    out.emit(&compare(left, right), text)
}

fn compare(left: Side, right: Side) -> Explained {
    let mut differences = left.namespace.explain(&right.namespace);
    if let (Some(a), Some(b)) = (&left.tenant, &right.tenant)
        && a != b
    {
        let tenant =
            NamespaceDifference { field: "tenant".into(), left: a.clone(), right: b.clone() };
        differences.insert(0, tenant);
    }
    let shared = differences.is_empty();
    Explained { left, right, differences, shared }
}

fn text(found: &Explained) -> String {
    if found.shared {
        return format!(
            "{} and {} are equal in every field: they share blocks.\n",
            found.left.name, found.right.name
        );
    }
    let mut table = Table::new(&[
        ("FIELD", Align::Left),
        (&found.left.name, Align::Left),
        (&found.right.name, Align::Left),
    ]);
    let shown =
        |value: &str| if value.is_empty() { "(empty)".to_owned() } else { value.to_owned() };
    for difference in &found.differences {
        table.row([difference.field.clone(), shown(&difference.left), shown(&difference.right)]);
    }
    format!("They do not share blocks, because these fields differ:\n\n{}", table.render())
}

/// Reads a namespace from a file, if `name` is the path of one.
fn file(name: &str) -> Result<Option<Side>, CliError> {
    let path = Path::new(name);
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| CliError::Failed(format!("cannot read {name}: {error}")))?;
    let namespace: Namespace = if text.trim_start().starts_with('{') {
        serde_json::from_str(&text).map_err(|error| CliError::Failed(format!("{name}: {error}")))?
    } else {
        toml::from_str(&text).map_err(|error| CliError::Failed(format!("{name}: {error}")))?
    };
    namespace.check().map_err(|error| CliError::Failed(format!("{name}: {error}")))?;
    Ok(Some(Side { name: name.to_owned(), tenant: None, namespace }))
}

#[cfg(test)]
mod tests {
    use super::super::demo::script;
    use super::*;
    use kvtide_tiers::block::NamespaceId;

    fn row(id: u32, first: u8) -> NamespaceRow {
        let mut fingerprint = [0; 16];
        fingerprint[0] = first;
        NamespaceRow {
            id: NamespaceId(id),
            tenant: "a".into(),
            namespace: script::namespace(),
            generation: 0,
            fingerprint,
        }
    }

    #[test]
    fn a_namespace_is_named_by_number_or_by_the_start_of_its_fingerprint() {
        let known = [row(1, 0xab), row(2, 0xac), row(33, 0xcd)];
        assert_eq!(find(&known, "33").unwrap().id, NamespaceId(33));
        assert_eq!(find(&known, "AB").unwrap().id, NamespaceId(1));
        assert!(find(&known, "a").unwrap_err().to_string().contains("2 fingerprints"));
        assert!(find(&known, "ffff").is_err());
        assert!(find(&known, "").is_err());
    }

    #[test]
    fn explain_names_each_field_and_the_tenant() {
        let side = |name: &str, tenant: &str, salt: &str| {
            let mut namespace = script::namespace();
            namespace.salt = salt.into();
            Side { name: name.into(), tenant: Some(tenant.into()), namespace }
        };
        let found = compare(side("1", "a", ""), side("2", "b", "x"));
        let text = text(&found);
        assert!(text.contains("tenant  a        b"), "{text}");
        assert!(text.contains("salt    (empty)  x"), "{text}");
        assert!(compare(side("1", "a", ""), side("2", "a", "")).shared);
    }

    #[test]
    fn namespaces_are_read_from_toml_and_json() {
        let folder = tempfile::tempdir().unwrap();
        let namespace = script::namespace();
        for (name, text) in [
            ("a.toml", toml::to_string(&namespace).unwrap()),
            ("a.json", serde_json::to_string(&namespace).unwrap()),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            let side = file(path.to_str().unwrap()).unwrap().unwrap();
            assert_eq!(side.namespace, namespace);
        }
        let path = folder.path().join("bad.toml");
        std::fs::write(&path, "[model]\nweights = 3\n").unwrap();
        assert!(file(path.to_str().unwrap()).is_err());
    }
}
